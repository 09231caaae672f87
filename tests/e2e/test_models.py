"""Laws of two models behind one router, over real sockets with real engines: one is never the other, nor in its way."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from cluster.clock import SystemClock
from cluster.config import EngineConfig
from cluster.engine.runner import EngineRunner
from cluster.engine.text import TextCodec
from cluster.messages import RosterEntry
from cluster.metrics import CONTINUED, QUEUED, REPLICAS_READY, REQUESTS
from cluster.model import ModelFolder
from cluster.ports import EnginePort
from cluster.types import ReplicaId
from deployments.replica_process import ReplicaProcess
from deployments.settings import Instance, ModelConfig, Profile
from deployments.transport import RejectedError
from tests.e2e.conftest import STEP_S
from tests.line import Line, running_line, until
from tests.padded import PaddedBackend, engine_over
from tests.ray.streams import Reader, body

FIRST, SECOND = "tiny-llama", "tiny-other"
SLOTS = 4
PROMPTS = ("once upon a time", "the quiet water", "größer und größer")
TOKENS = 24
ENGINE = EngineConfig(slots=SLOTS, step_token_budget=64, blocks=256, max_model_len=512)
PROFILE = Profile(models=(ModelConfig(replicas=1, engine=ENGINE), ModelConfig(replicas=1, engine=ENGINE)))


def padded(model: ModelFolder) -> EnginePort:
    from cluster.engine.torch.backend import TorchBackend

    backend = PaddedBackend(TorchBackend(model, ENGINE), STEP_S)
    return EngineRunner(engine_over(backend, model, ENGINE), SystemClock())


@pytest.fixture
async def two(tiny_model: ModelFolder, other_model: ModelFolder, tmp_path: Path) -> AsyncIterator[Line]:
    """Two models with one replica each, in this order."""
    async with running_line((tiny_model, other_model), PROFILE, tmp_path) as line:
        yield line


@pytest.fixture
async def slow_two(tiny_model: ModelFolder, other_model: ModelFolder, tmp_path: Path) -> AsyncIterator[Line]:
    """The same with padded steps."""
    async with running_line((tiny_model, other_model), PROFILE, tmp_path, padded) as line:
        yield line


@torch.inference_mode()
def transformers_text(model: ModelFolder, prompt: str, tokens: int) -> str:
    """What transformers makes of a prompt, greedily, a token at a time over the whole text."""
    plain = AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32)
    ids = Tokenizer.from_file(str(model.tokenizer_path)).encode(prompt).ids
    for _ in range(tokens):
        ids.append(int(plain(torch.tensor([ids])).logits[0, -1].argmax()))
    return TextCodec.from_file(model.tokenizer_path).text(ids[-tokens:])


def read(line: Line, model: str, **changes: Any) -> Reader:
    return Reader(line.client, body(model=model, **changes))


async def test_each_model_says_what_transformers_makes_of_it_though_both_are_asked_at_once(
    two: Line, tiny_model: ModelFolder, other_model: ModelFolder
) -> None:
    asked = [(model, prompt) for prompt in PROMPTS for model in (tiny_model, other_model)]
    readers = [read(two, model.name, prompt=prompt, max_tokens=TOKENS) for model, prompt in asked]
    await asyncio.gather(*(reader.task for reader in readers))
    expected = [transformers_text(model, prompt, TOKENS) for model, prompt in asked]
    assert [reader.text for reader in readers] == expected
    assert len(set(expected)) == len(asked)
    for model, replica in zip((tiny_model, other_model), two.replicas, strict=True):
        assert replica.engine.progress().load.adds_total == len(PROMPTS)
        finished = await two.metric(REQUESTS, model=model.name, outcome="finished")
        assert finished == len(PROMPTS)


async def test_a_flood_of_urgent_work_on_one_model_does_not_delay_the_least_urgent_of_another(slow_two: Line) -> None:
    flood = [read(slow_two, FIRST, service_tier="priority", max_tokens=400) for _ in range(4 * SLOTS)]
    await until(lambda: slow_two.metric(QUEUED, model=FIRST), float(3 * SLOTS).__eq__)
    calm = [read(slow_two, SECOND, service_tier="flex", max_tokens=8) for _ in range(SLOTS)]
    await asyncio.gather(*(reader.task for reader in calm))
    assert await slow_two.metric(QUEUED, model=FIRST) == 3 * SLOTS, "none of the flood had a turn meanwhile"
    assert not any(reader.task.done() for reader in flood)
    assert all(reader.done and reader.events >= 8 for reader in calm)
    for reader in flood:
        reader.task.cancel()
    await asyncio.gather(*(reader.task for reader in flood), return_exceptions=True)


async def test_the_loss_of_one_model_s_replica_touches_no_request_of_another(
    slow_two: Line, tiny_model: ModelFolder, other_model: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unreachable(*_: Any) -> None:
        raise RejectedError("cut off by the test")

    async def ready() -> dict[str, bool]:
        models: dict[str, bool] = (await slow_two.client.get("/ready")).raise_for_status().json()["models"]
        return models

    cut_off = [read(slow_two, FIRST, prompt=PROMPTS[0], max_tokens=TOKENS) for _ in range(2)]
    others = [read(slow_two, SECOND, prompt=PROMPTS[0], max_tokens=TOKENS) for _ in range(2)]
    await asyncio.gather(*(reader.begun.wait() for reader in (*cut_off, *others)))
    (link,) = [link for entry, link in slow_two.router._links.items() if entry.model == FIRST]
    assert link is not None
    assert link._link is not None
    with monkeypatch.context() as cut:
        cut.setattr("deployments.replica_link.connect", unreachable)
        link._link.abort("cut off by the test")
        await until(lambda: slow_two.metric(REPLICAS_READY, model=FIRST), (0.0).__eq__)
        assert await ready() == {FIRST: False, SECOND: True}
        late = read(slow_two, SECOND, prompt=PROMPTS[1], max_tokens=TOKENS)
        await asyncio.gather(*(reader.task for reader in (*others, late)))
        assert not any(reader.task.done() for reader in cut_off)
    assert {reader.text for reader in others} == {transformers_text(other_model, PROMPTS[0], TOKENS)}
    assert late.text == transformers_text(other_model, PROMPTS[1], TOKENS)
    await asyncio.gather(*(reader.task for reader in cut_off))
    assert {reader.text for reader in cut_off} == {transformers_text(tiny_model, PROMPTS[0], TOKENS)}
    assert await slow_two.metric(CONTINUED, model=FIRST) == 2
    assert await slow_two.metric(CONTINUED, model=SECOND) == 0
    assert await ready() == {FIRST: True, SECOND: True}


async def test_a_replica_of_a_model_that_a_router_does_not_serve_is_never_used_whatever_it_calls_itself(
    two: Line, other_model: ModelFolder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One says a name that nobody knows; one says the first model's name and is the second."""
    instance = Instance(
        profile=two.router._profile, model_folders=(two.model.path, other_model.path), secret_path=tmp_path / "secret"
    )

    async def roster() -> frozenset[RosterEntry]:
        return two.router._roster

    async def refusals() -> int:
        return sum(f"{there!r} there, {here!r} here" in r.getMessage() for r in caplog.records if "refused" in r.msg)

    here, there = other_model.identity[:12], two.model.identity[:12]
    caplog.set_level(logging.INFO, "forebay")
    strangers = []
    try:
        for name in ("unheard-of", FIRST):
            folder = ModelFolder.open(other_model.path, name)
            replica = ReplicaProcess(instance, folder, ReplicaId(f"as-{name}"), two.find, padded, pytest.fail)
            strangers.append(replica)
            await replica.start("127.0.0.1")
        await until(roster, lambda entries: len(entries) == 4)
        said = [read(two, model, prompt=PROMPTS[0], max_tokens=4) for model in (FIRST, SECOND) for _ in range(8)]
        await asyncio.gather(*(reader.task for reader in said))
        assert all(reader.done for reader in said)
        assert [replica.engine.progress().load.adds_total for replica in strangers] == [0, 0]
        assert await two.ready_replicas() == 2
        assert "as-unheard-of serves 'unheard-of', which is none of ours" in caplog.text
        await until(refusals, lambda count: count >= 2)
        told = [
            r.getMessage() for r in caplog.records if r.name == "forebay.router" and "is not used" in r.getMessage()
        ]
        assert len(told) == 1, "a refusal is told once, however often the link is tried"
        assert f"as-{FIRST} of {FIRST} is not used" in told[0]
        assert f"model: {there!r} there, {here!r} here" in told[0]
    finally:
        for replica in strangers:
            await replica.close()
