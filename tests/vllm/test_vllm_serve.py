"""Two vLLM replicas on Ray Serve behind our router: streams, priority, and both ways for a replica to die."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest
from tokenizers import Tokenizer

from cluster.engine.text import TextCodec
from cluster.model import ModelFolder
from tests.line import until
from tests.ray.conftest import Served, served
from tests.ray.streams import Reader, body, client_of
from tests.vllm.vllm_kit import Reference, request

pytestmark = [pytest.mark.alone, pytest.mark.timeout(900)]

SLOTS = 8
PROFILE = {
    "replicas": 2,
    "engine": {
        "kind": "vllm",
        "slots": SLOTS,
        "step_token_budget": 64,
        "blocks": 256,
        "max_model_len": 1024,
        "vllm": {"eager": True},
    },
}
START_S = 300.0
"""How long a replica may take to start: three processes that each import vLLM, on a busy machine."""
AT_ONCE_S = 3.0
"""Of what an event brings about, on a busy machine; nothing that is found out by asking is as fast."""
TOKENS = 300
PROMPTS = ("once", "water and light", "the quiet nights", "größer und größer")


@pytest.fixture(scope="module")
def instance(tiny_model: ModelFolder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Whatever is done to it, leaving it leaves no process behind."""
    folder = tmp_path_factory.mktemp("vllm")
    with served(tiny_model, folder, profile=PROFILE, ready_within_s=START_S) as running:
        yield running
        family = running.family()
    _, alive = psutil.wait_procs(family, timeout=5)
    assert alive == []


@pytest.fixture(scope="module")
def texts(tiny_model: ModelFolder) -> dict[str, str]:
    """What transformers makes of each prompt, a token at a time over the whole text."""
    reference = Reference(tiny_model)
    tokenizer = Tokenizer.from_file(str(tiny_model.tokenizer_path))
    codec = TextCodec.from_file(tiny_model.tokenizer_path)

    def text(prompt: str) -> str:
        ids = tuple(tokenizer.encode(prompt).ids)
        return codec.text(reference.output_ids(request(prompt, prompt=ids, max_tokens=TOKENS)))

    return {prompt: text(prompt) for prompt in PROMPTS}


def stream(model: ModelFolder, prompt: str, **changes: Any) -> dict[str, Any]:
    return body(model=model.path.name, prompt=prompt, max_tokens=TOKENS, **changes)


def begin(client: httpx.AsyncClient, model: ModelFolder, count: int) -> list[tuple[str, Reader]]:
    prompts = [PROMPTS[n % len(PROMPTS)] for n in range(count)]
    return [(prompt, Reader(client, stream(model, prompt))) for prompt in prompts]


async def check_whole(streams: list[tuple[str, Reader]], texts: dict[str, str]) -> None:
    await asyncio.gather(*(reader.task for _, reader in streams))
    assert [reader.errors for _, reader in streams] == [[]] * len(streams)
    assert all(reader.done for _, reader in streams)
    assert [prompt for prompt, reader in streams if reader.text != texts[prompt]] == []


def core_of(replica_pid: int) -> tuple[psutil.Process, list[psutil.Process]]:
    """A replica's engine core, and the core's own processes. What a core is called in the list of processes is cut short at
    times; beside it a replica has only Python's tracker of shared memory."""
    (core,) = [p for p in psutil.Process(replica_pid).children() if "resource_tracker" not in " ".join(p.cmdline())]
    return core, core.children(recursive=True)


async def ended(*processes: psutil.Process) -> None:
    """At once. Who has ended holds nothing, though its parent may not have collected it yet."""

    async def running() -> list[psutil.Process]:
        left = []
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_ZOMBIE:
                    left.append(process)
        return left

    await until(running, lambda left: not left, within_s=AT_ONCE_S)


async def two_replicas_again(instance: Served, without: str) -> dict[str, int]:
    async def replicas() -> dict[str, int]:
        return await asyncio.to_thread(instance.replicas)

    after, _ = await until(replicas, lambda now: len(now) == 2 and without not in now, within_s=START_S)
    return after


async def test_streams_are_whole_and_those_of_transformers(
    instance: Served, tiny_model: ModelFolder, texts: dict[str, str]
) -> None:
    """More than there are slots, on both replicas."""
    async with client_of(instance.url) as client:
        await check_whole(begin(client, tiny_model, 3 * SLOTS), texts)
    reports = [r["report"]["load"] for r in instance.status()["cluster"]["replicas"]]
    assert all(load["tokens_total"] > 0 for load in reports)


async def test_an_urgent_request_starts_within_few_steps_of_a_flood_and_the_flood_loses_nothing(
    instance: Served, tiny_model: ModelFolder, texts: dict[str, str]
) -> None:
    """Every slot is taken and more wait. The streams of the flood count the steps: one token each."""
    prompt = PROMPTS[0]
    async with client_of(instance.url) as client:
        flood = [Reader(client, stream(tiny_model, prompt, service_tier="flex")) for _ in range(4 * SLOTS)]
        running, _ = await until(lambda: started(flood), lambda readers: len(readers) >= 2 * SLOTS, within_s=60)
        before = [reader.events for reader in running]
        urgent = Reader(client, stream(tiny_model, PROMPTS[1], service_tier="priority"))
        await urgent.begun.wait()
        steps = max(reader.events - then for reader, then in zip(running, before, strict=True))
        over = sum(reader.done for reader in flood)
        await check_whole([(prompt, reader) for reader in flood] + [(PROMPTS[1], urgent)], texts)
    assert over == 0, "it got a slot because a stream ended"
    assert steps <= 20


async def started(readers: list[Reader]) -> list[Reader]:
    return [reader for reader in readers if reader.begun.is_set()]


async def test_a_killed_core_ends_its_replica_at_once_and_its_streams_go_on_whole_elsewhere(
    instance: Served, tiny_model: ModelFolder, texts: dict[str, str]
) -> None:
    before = instance.replicas()
    victim, pid = sorted(before.items())[0]
    replica = psutil.Process(pid)
    core, _ = core_of(pid)
    async with client_of(instance.url) as client:
        streams = begin(client, tiny_model, 2 * SLOTS)
        await asyncio.gather(*(reader.begun.wait() for _, reader in streams))
        core.kill()
        await ended(replica)
        await check_whole(streams, texts)

        after = await two_replicas_again(instance, victim)
        (newcomer,) = set(after) - set(before)

        async def served_by_it() -> int:
            await check_whole(begin(client, tiny_model, SLOTS), texts)
            reports = {r["entry"]["replica_id"]: r["report"] for r in instance.status()["cluster"]["replicas"]}
            return int(reports[newcomer]["load"]["tokens_total"]) if reports.get(newcomer) else 0

        await until(served_by_it, lambda tokens: tokens > 0, within_s=60)


async def test_a_killed_replica_leaves_no_core_behind_and_its_streams_go_on_whole_elsewhere(
    instance: Served, tiny_model: ModelFolder, texts: dict[str, str]
) -> None:
    victim, pid = sorted(instance.replicas().items())[0]
    core, workers = core_of(pid)
    assert workers, "on a CPU a core has a worker"
    async with client_of(instance.url) as client:
        streams = begin(client, tiny_model, 2 * SLOTS)
        await asyncio.gather(*(reader.begun.wait() for _, reader in streams))
        os.kill(pid, signal.SIGKILL)
        await ended(core, *workers)
        await check_whole(streams, texts)
        await two_replicas_again(instance, victim)
        await check_whole(begin(client, tiny_model, SLOTS), texts)
