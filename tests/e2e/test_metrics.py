"""What processes show at their ports while they serve: a router, a replica by the names of model servers, a controller."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster import metrics as names
from cluster.config import EngineConfig, MetricsConfig, RouterConfig, TransportConfig
from cluster.metrics import Metric
from cluster.model import ModelFolder
from deployments.checks import free_ports
from deployments.exposition import AGAIN_S
from deployments.settings import ModelConfig, Profile
from tests.line import read_metric, until
from tests.processes import running_cluster
from tests.promtool import check_metrics, needs_promtool
from tests.ray.streams import client_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

HOST = "127.0.0.1"
ENGINE = EngineConfig(slots=2, step_token_budget=64, blocks=64, max_model_len=512)
STEP_S = 0.02
TOKENS, STATED = 60, 40


async def ask(client: httpx.AsyncClient) -> None:
    body = {
        "model": "tiny-llama", "prompt": "once", "temperature": 0, "ignore_eos": True, "max_tokens": TOKENS,
        "expected_output_tokens": STATED,
    }  # fmt: skip
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text


def series(text: str, metric: Metric) -> dict[str, float]:
    return {
        s.name.removeprefix(metric.name) + "".join(v for k, v in sorted(s.labels.items()) if k != "model"): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
        if family.name == metric.name
    }


@needs_promtool
async def test_each_process_shows_what_it_does_while_it_does_it(tiny_model: ModelFolder, tmp_path: Path) -> None:
    """Three replicas of one machine have two ports: two show themselves there, and when one is gone the third does."""
    port = free_ports(HOST, 3)
    profile = Profile(
        models=(ModelConfig(engine=ENGINE),),
        router=RouterConfig(),
        transport=TransportConfig(),
        metrics=MetricsConfig(replica_port=port, replica_ports=2, controller_port=port + 2),
    )
    async with (
        running_cluster(tiny_model, profile, tmp_path, step_s=STEP_S, replicas=1) as cluster,
        client_of(f"http://{HOST}:{port}") as at_replica,
        client_of(f"http://{HOST}:{port + 1}") as at_second,
        client_of(f"http://{HOST}:{port + 2}") as at_controller,
    ):
        first = cluster.replicas[0]
        await cluster.start_replica()
        await cluster.start_replica()  # which has no port
        await cluster.until_ready(3)
        asking = [asyncio.create_task(ask(cluster.client)) for _ in range(12)]

        async def running() -> list[float]:
            shown = (at_replica, at_second)
            return [await read_metric(at, names.SERVER_RUNNING, model_name="tiny-llama") for at in shown]

        assert max((await until(running, all))[0]) <= ENGINE.slots
        assert 0 < await read_metric(at_replica, names.SERVER_KV_USAGE) <= 1
        await asyncio.gather(*asking)
        text = (await at_replica.get("/metrics")).text
        assert series(text, names.SERVER_CACHE) == {f"{ENGINE.block_size_tokens}tiny-llama{ENGINE.blocks}": 1}
        assert series(text, names.SERVER_KV_USAGE) == {"tiny-llama": 0}
        foretold = series(text, names.OUTPUT_OVER_PREDICTED)
        assert foretold["_sum" + "standard"] == foretold["_count" + "standard"] * TOKENS / STATED > 0

        text = (await at_controller.get("/metrics")).text
        check_metrics(text)
        assert series(text, names.TICK)["_count"] > 0

        text = (await cluster.client.get("/metrics")).text
        check_metrics(text)
        assert 0 < series(text, names.ITL)["_countstandard"] <= len(asking) * (TOKENS - 1)  # some may come together
        # Each family of a router is a name of ours, each with a kind of its own.
        known = {m.name for m in vars(names).values() if isinstance(m, Metric)}
        assert {family.name for family in text_string_to_metric_families(text)} - {
            n + "_created" for n in known
        } <= known

        cluster.kill(first)

        async def answers() -> bool:
            try:
                return (await at_replica.get("/metrics")).status_code == 200
            except httpx.TransportError:
                return False

        await until(answers, bool, within_s=10 * AGAIN_S)
