"""Replicas come and go with the load on a real Ray cluster, and no request is lost on the way."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from cluster.model import ModelFolder
from tests.line import until
from tests.ray.conftest import Served, served
from tests.ray.streams import Reader, body, client_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROFILE = {
    "replicas": 1,
    "scale": {"min": 0, "max": 3, "average_s": 5, "up_after_s": 1, "down_after_s": 10, "idle_after_s": 5},
    "engine": {"blocks": 1024, "max_model_len": 1024, "slots": 4, "step_token_budget": 64},
}
TOKENS = 200


@dataclass
class Load:
    """So many streams at once, each followed by the next."""

    client: httpx.AsyncClient
    readers: list[Reader] = field(default_factory=list)
    streams: int = 0
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def run(self, streams: int, pause_s: float = 0.0) -> None:
        """From now on; those beyond end with their stream."""
        self.streams = streams
        self.tasks += [asyncio.create_task(self._each(n, pause_s)) for n in range(streams)]

    async def _each(self, number: int, pause_s: float) -> None:
        streams = self.streams
        while self.streams == streams:
            reader = Reader(self.client, body(max_tokens=TOKENS))
            self.readers.append(reader)
            await reader.task
            await asyncio.sleep(pause_s)

    async def end(self) -> None:
        self.streams = 0
        await asyncio.gather(*self.tasks)


def kill_controller(instance: Served) -> None:
    os.kill(instance.status()["cluster"]["controller_pid"], signal.SIGKILL)


async def test_from_one_replica_to_three_and_back_to_one_and_to_none_and_awake_again_with_0_requests_lost(
    tiny_model: ModelFolder, tmp_path: Path
) -> None:
    """With its controller killed when there are three: the next one takes them away."""
    with served(tiny_model, tmp_path, profile=PROFILE) as instance:
        async with client_of(instance.url) as client:

            async def replicas() -> int:
                return len(instance.replicas())

            undisturbed = Reader(client, body(max_tokens=TOKENS))
            await undisturbed.task
            load = Load(client)
            began_s = time.monotonic()
            load.run(20)
            await until(replicas, (3).__eq__, within_s=240)
            print(f"1 → 3 after {time.monotonic() - began_s:.1f} s")
            kill_controller(instance)
            began_s = time.monotonic()
            load.run(1, pause_s=1.0)
            await until(replicas, (1).__eq__, within_s=180)
            print(f"3 → 1 after {time.monotonic() - began_s:.1f} s")
            await load.end()
            assert [(r.errors, r.done, r.text == undisturbed.text) for r in load.readers] == [([], True, True)] * len(
                load.readers
            )
            await until(replicas, (0).__eq__, within_s=60)
            began_s = time.monotonic()
            woken = Reader(client, body(max_tokens=TOKENS))
            await woken.task
            print(f"awake after {time.monotonic() - began_s:.1f} s; {len(load.readers)} streams")
            assert (woken.errors, woken.text) == ([], undisturbed.text)
