"""Faults in which Serve has a part: what it replaces, and what clients see of it until then."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Mapping

import httpx
import pytest

from cluster.metrics import FENCED, REPLICAS_READY
from cluster.model import ModelFolder
from tests.line import read_metric, until
from tests.ray.conftest import Served
from tests.ray.streams import Reader, body, client_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TOKENS = 600


async def expected_text(client: httpx.AsyncClient, model: ModelFolder) -> str:
    fields = body(model=model.path.name, max_tokens=TOKENS, stream=False)
    return str((await client.post("/v1/completions", json=fields)).raise_for_status().json()["choices"][0]["text"])


async def begun(client: httpx.AsyncClient, model: ModelFolder, count: int) -> list[Reader]:
    """So many streams, each with its first token."""
    readers = [Reader(client, body(model=model.path.name, max_tokens=TOKENS)) for _ in range(count)]
    await asyncio.gather(*(reader.begun.wait() for reader in readers))
    return readers


async def replaced(
    instance: Served, client: httpx.AsyncClient, holds: Callable[[Mapping[str, int]], bool], within_s: float
) -> float:
    """Wait until the controller knows such replicas and the router uses two; returns after how many seconds."""

    async def replicas() -> tuple[Mapping[str, int], float]:
        return instance.replicas(), await read_metric(client, REPLICAS_READY)

    _, waited_s = await until(replicas, lambda seen: holds(seen[0]) and seen[1] == 2, within_s)
    return waited_s


async def test_a_replica_that_stays_frozen_is_replaced_and_its_streams_end_whole_before_that(
    instance: Served, tiny_model: ModelFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    async with client_of(instance.url) as client:
        text = await expected_text(client, tiny_model)
        readers = await begun(client, tiny_model, 16)
        before = instance.replicas()
        pid = min(before.items())[1]
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.gather(*(reader.task for reader in readers))
            assert [(reader.errors, reader.done) for reader in readers] == [([], True)] * len(readers)
            assert {reader.text for reader in readers} == {text}
            # Serve stops it gracefully, which a frozen process does not hear: it may be known for some time yet.
            waited_s = await replaced(instance, client, lambda now: bool(now.keys() - before.keys()), within_s=90)
        finally:
            with contextlib.suppress(ProcessLookupError):  # as it should be
                os.kill(pid, signal.SIGCONT)
        with capsys.disabled():
            print(f"\n[faults] frozen for good: replaced {waited_s:.1f} s after its streams had ended elsewhere")
        assert await read_metric(client, FENCED, kind="repeat") == 0


async def test_streams_wait_while_every_replica_is_dead_and_go_on_whole_on_those_that_serve_starts(
    instance: Served, tiny_model: ModelFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    async with client_of(instance.url) as client:
        text = await expected_text(client, tiny_model)
        readers = await begun(client, tiny_model, 8)
        dead = instance.replicas()
        for pid in dead.values():
            os.kill(pid, signal.SIGKILL)
        waited_s = await replaced(
            instance, client, lambda now: len(now) == 2 and not dead.keys() & now.keys(), within_s=90
        )
        await asyncio.gather(*(reader.task for reader in readers))
        with capsys.disabled():
            print(f"\n[faults] all replicas killed at once: two others {waited_s:.1f} s later")
        assert [(reader.errors, reader.done) for reader in readers] == [([], True)] * len(readers)
        assert {reader.text for reader in readers} == {text}
