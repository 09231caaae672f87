"""Routers and replicas as processes that are replaced while clients ask: what tests of upgrades start and end.

Owns: starting and ending them by their signals. What runs in them is tests/upgrade_parts.py and, for the controller,
tests/process_parts.py. Invariant: no process outlives its fleet.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from cluster.model import ModelFolder
from deployments.settings import Instance, Profile
from tests.line import until
from tests.processes import Process, client_of

END_TIMEOUT_S = 60.0


class Member(Process):
    """A router or a replica."""

    def told(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    async def left(self) -> int:
        """Its exit status, once it has ended."""
        async with asyncio.timeout(END_TIMEOUT_S):
            await self.ended()
        return self._process.wait()

    async def leave(self) -> int:
        """SIGTERM; its exit status, once it has ended."""
        self.told()
        return await self.left()


class Fleet:
    """What runs, the oldest first."""

    def __init__(self, profile: Profile, instance_file: Path, step_s: float, stack: contextlib.AsyncExitStack) -> None:
        self.profile = profile
        self._instance_file = str(instance_file)
        self._step_s = step_s
        self._stack = stack
        self._numbers = itertools.count()
        self._controller_port = ""
        self.replicas: list[Member] = []
        self.routers: list[Member] = []

    async def start(self) -> None:
        controller = self._run("tests.process_parts", "controller", self._instance_file)
        self._controller_port = str((await controller.begun()).ports[0])
        await asyncio.gather(
            *(self.add_router() for _ in range(self.profile.routers)),
            *(self.add_replica() for _ in range(self.profile.models[0].replicas)),
        )

    async def add_router(self) -> tuple[int, ...]:
        """One more; its port, once it listens, or none, once it stands by."""
        router = self._run("tests.upgrade_parts", "router", self._instance_file, self._controller_port)
        ports = (await router.begun()).ports
        self.routers.append(router)
        return ports

    async def add_replica(self) -> None:
        """One more; returns when the routers have met it."""
        name, step_ms = f"replica-{next(self._numbers)}", str(self._step_s * 1000)
        replica = self._run("tests.upgrade_parts", "replica", self._instance_file, self._controller_port, name, step_ms)
        await replica.begun()
        self.replicas.append(replica)

    def _run(self, module: str, *arguments: str) -> Member:
        member = Member(arguments[0], (sys.executable, "-m", module, *arguments))
        self._stack.callback(member.close)
        return member


async def until_ready(url: str) -> None:
    async with client_of(url) as client:

        async def status() -> int:
            return (await client.get("/ready")).status_code

        await until(status, (200).__eq__)


@contextlib.asynccontextmanager
async def running_fleet(model: ModelFolder, profile: Profile, folder: Path, *, step_s: float) -> AsyncIterator[Fleet]:
    """Start `profile`, whose one model is `model`, with steps of `step_s`; its secret is kept in `folder`."""
    secret_path, instance_file = folder / "secret", folder / "instance.json"
    secret_path.write_text("0123456789abcdef" * 4)
    instance = Instance(profile=profile, model_folders=(model.path,), secret_path=secret_path)
    instance_file.write_text(instance.model_dump_json())
    async with contextlib.AsyncExitStack() as stack:
        fleet = Fleet(profile, instance_file, step_s, stack)
        await fleet.start()
        yield fleet
