"""`forebay top` of a line under load: what it shows is what clients and replicas have seen."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from cluster.clock import SystemClock
from cluster.config import EngineConfig, RouterConfig
from cluster.engine.runner import EngineRunner
from cluster.metrics import LATENCY_BUCKETS_SECONDS, TTFT, Metric
from cluster.model import ModelFolder
from cluster.ports import EnginePort
from deployments.settings import ModelConfig, Profile
from ops import cli
from tests.line import Line, running_line, until
from tests.padded import PaddedBackend, engine_over

SLOTS, REPLICAS, WAITING, ASKED = 4, 2, 3, 5
STEP_S = 0.04
ON_THE_WAY_S = 1.0
"""Of a client's time for a first token, what may be its own and the socket's, in a process that has all of the line in it."""
MODEL = ModelConfig(
    replicas=REPLICAS, engine=EngineConfig(slots=SLOTS, step_token_budget=64, blocks=512, max_model_len=1024)
)


def padded_engine(model: ModelFolder) -> EnginePort:
    from cluster.engine.torch.backend import TorchBackend

    backend = PaddedBackend(TorchBackend(model, MODEL.engine), STEP_S)
    return EngineRunner(engine_over(backend, model, MODEL.engine), SystemClock())


@pytest.fixture
async def line(tiny_model: ModelFolder, tmp_path: Path) -> AsyncIterator[Line]:
    profile = Profile(models=(MODEL,), router=RouterConfig())
    async with running_line(tiny_model, profile, tmp_path, padded_engine) as running:
        yield running


async def stream(line: Line, tier: str, tokens: int) -> tuple[str, float]:
    """(the request's id, seconds to its first token)."""
    body = {
        "model": line.model.name, "prompt": "once", "temperature": 0, "ignore_eos": True, "max_tokens": tokens,
        "service_tier": tier, "stream": True,
    }  # fmt: skip
    sent_s, first_s, request_id = time.monotonic(), 0.0, ""
    async with line.client.stream("POST", "/v1/completions", json=body) as answer:
        async for text in answer.aiter_lines():
            if text.startswith("data: {") and not request_id:
                first_s, request_id = time.monotonic() - sent_s, json.loads(text[6:])["id"]
    return request_id, first_s


async def running(line: Line, priority_class: str) -> int:
    (model,) = (await line.client.get("/status")).json()["router"]["models"]
    return sum(band["running_requests"] for band in model["bands"] if band["priority_class"] == priority_class)


async def top(capsys: pytest.CaptureFixture[str], line: Line, *options: str) -> str:
    arguments = ("top", "--once", "--url", line.url, "--interval", "0.5", *options)
    code = await asyncio.to_thread(cli.run, arguments)
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    return out


def bucket(seconds: float) -> tuple[float, float]:
    """The bounds of the histogram's bucket into which a time falls."""
    upper = min(bound for bound in LATENCY_BUCKETS_SECONDS if seconds <= bound)
    return max((bound for bound in (0.0, *LATENCY_BUCKETS_SECONDS) if bound < upper), default=0.0), upper


@pytest.mark.alone
async def test_top_shows_the_queue_the_memory_by_class_every_preemption_with_its_why_and_first_tokens_as_clients_see_them(
    line: Line, capsys: pytest.CaptureFixture[str]
) -> None:
    work = [asyncio.create_task(stream(line, "flex", 900)) for _ in range(SLOTS * REPLICAS + WAITING)]
    try:
        await until(
            lambda: line.metric(Metric(f"{TTFT.name}_count", ""), priority_class="batch"),
            float(SLOTS * REPLICAS).__eq__,
        )
        urgent = await asyncio.gather(*(stream(line, "priority", 4) for _ in range(ASKED)))
        work.append(asyncio.create_task(stream(line, "priority", 900)))
        await until(lambda: running(line, "interactive"), (1).__eq__)
        shown: dict[str, Any] = json.loads(await top(capsys, line, "--json"))
        text = await top(capsys, line)
        asked = {s["told"]["request_id"] for s in shown["decisions"] if s["told"]["priority_class"] == "interactive"}
        explained = {name: (await line.client.get(f"/v1/requests/{name}/explain")).json() for name in asked}
    finally:
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)

    (model,) = shown["models"]
    classes = {row["priority_class"]: row for row in model["classes"]}
    assert (classes["batch"]["queued"], classes["interactive"]["queued"]) == (WAITING, 0)
    assert classes["batch"]["oldest_s"] >= 5 * STEP_S
    assert classes["interactive"]["running"] == 1
    blocks = {name: sum(r["blocks_by_class"][name] for r in model["replicas"]) for name in classes}
    assert blocks["batch"] > blocks["interactive"] > blocks["standard"] == 0
    for replica in model["replicas"]:
        used = replica["blocks_total"] - replica["blocks_free"]
        assert 0 < sum(replica["blocks_by_class"].values()) <= used, "nothing here is shared"
        assert (replica["state"], replica["slots"]) == ("ready", SLOTS)
    made = classes["batch"]["tokens_per_s"] + classes["interactive"]["tokens_per_s"]
    assert 0 < made <= 1.5 * SLOTS * REPLICAS / STEP_S, (
        "each slot makes a token a step, and half a second is no exact time"
    )

    preempted = [seen["told"] for seen in shown["decisions"] if seen["told"]["event"] == "preempted"]
    assert {told["priority_class"] for told in preempted} == {"batch"}
    reasons = {told["why"] for told in preempted}
    assert {f"for {request_id}: pause" for request_id, _ in urgent} <= reasons
    assert model["preempted"]["pause"] == len(preempted)
    assert shown["controller"]["generation"] >= 1

    first_s = sorted(told["ttft_ms"] / 1000 for told in explained.values())
    assert classes["interactive"]["first_tokens"] == len(first_s) == ASKED + 1
    half_s, rounding_s = first_s[ASKED // 2], 0.0005
    lower, upper = bucket(half_s - rounding_s)[0], bucket(half_s + rounding_s)[1]
    assert lower <= classes["interactive"]["ttft_p50_s"] <= upper, "half of them had come by then"
    for request_id, seconds in urgent:
        on_the_way_s = seconds - explained[request_id]["ttft_ms"] / 1000
        assert -0.001 <= on_the_way_s < ON_THE_WAY_S, "what the router counts is what its client waited for"

    assert "preempted" in text
    assert all(name in text for name in ("replica-0", "replica-1", "interactive", "batch"))
    assert max(map(len, text.splitlines())) <= 160
