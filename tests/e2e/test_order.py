"""Two routers, processes of their own, before saturated replicas: they keep one order, and without a controller go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from cluster.config import EngineConfig, RouterConfig
from cluster.metrics import GATE_HELD, GATE_SHUT, QUEUE_WAIT, REPLICAS_READY, Metric
from cluster.model import ModelFolder
from deployments.settings import Profile
from tests.line import read_metric, until
from tests.processes import Cluster, running_cluster
from tests.ray.streams import client_of

PROFILE = Profile.model_validate(
    {
        "engine": EngineConfig(slots=2, step_token_budget=64, blocks=1024, max_model_len=1024).model_dump(),
        "router": RouterConfig().model_dump(),
    }
)
STEP_S = 0.025
SENT_OUT = Metric(f"{QUEUE_WAIT.name}_count", QUEUE_WAIT.help)
"""Counted at the moment at which a request is sent out first."""
STANDARD, BATCH = 24, 6


@pytest.fixture
async def cluster(tiny_model: ModelFolder, tmp_path: Path) -> AsyncIterator[Cluster]:
    async with running_cluster(tiny_model, PROFILE, tmp_path, step_s=STEP_S, replicas=2, routers=2) as running:
        yield running


async def ask(client: httpx.AsyncClient, tier: str, tokens: int) -> None:
    body = {
        "model": "tiny-llama", "prompt": "once", "temperature": 0, "ignore_eos": True, "max_tokens": tokens,
        "service_tier": tier,
    }  # fmt: skip
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == tokens


class Rivals:
    """The first router has standard work for all slots and more; then batch work comes to the second; then more standard
    work, younger, comes to the first."""

    def __init__(self, cluster: Cluster, second: httpx.AsyncClient) -> None:
        self.first, self.second = cluster.client, second
        self.answers: list[asyncio.Task[None]] = []

    async def begin(self) -> None:
        await until(lambda: read_metric(self.second, REPLICAS_READY), (2.0).__eq__)
        self._ask(self.first, "auto", STANDARD // 2, 16)
        await until(lambda: read_metric(self.second, GATE_SHUT, priority_class="batch"), (1.0).__eq__)
        self._ask(self.second, "flex", BATCH, 4)
        await until(lambda: read_metric(self.second, GATE_HELD, priority_class="batch"), (1.0).__le__)
        self._ask(self.first, "auto", STANDARD // 2, 16)

    def _ask(self, client: httpx.AsyncClient, tier: str, count: int, tokens: int) -> None:
        self.answers += [asyncio.create_task(ask(client, tier, tokens)) for _ in range(count)]

    async def sent_out(self, client: httpx.AsyncClient, name: str) -> float:
        return await read_metric(client, SENT_OUT, priority_class=name)

    async def seen(self) -> tuple[float, float]:
        """Batch and standard work sent out so far, the batch work counted first."""
        return await self.sent_out(self.second, "batch"), await self.sent_out(self.first, "standard")


async def test_no_low_work_of_one_router_is_sent_out_while_more_urgent_work_waits_on_another(cluster: Cluster) -> None:
    async with client_of(cluster.urls[1]) as second:
        rivals = Rivals(cluster, second)
        await rivals.begin()
        (_, standard), _ = await until(rivals.seen, lambda seen: seen[0] > 0)
        assert standard == STANDARD, "when the first of batch was sent out all of standard had been, the youngest too"
        await asyncio.gather(*rivals.answers)


async def test_routers_whose_controller_is_killed_go_on_each_by_itself_and_lose_nothing(cluster: Cluster) -> None:
    async with client_of(cluster.urls[1]) as second:
        rivals = Rivals(cluster, second)
        await rivals.begin()
        cluster.controller.kill()
        (_, standard), _ = await until(rivals.seen, lambda seen: seen[0] > 0)
        assert standard < STANDARD, "batch work is sent out as soon as its own router sees a slot"
        await asyncio.gather(*rivals.answers)
