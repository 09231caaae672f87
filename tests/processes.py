"""The line as production has it, less Ray: controller, routers and replicas are processes that a test starts and kills.

Owns: starting and ending them, and what a test does to one. What runs in them is tests/process_parts.py. Invariants: no
process outlives its cluster; a test ends none but these.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import cast

import httpx
import msgspec
import psutil

from cluster.metrics import REPLICAS_READY, Metric
from cluster.model import ModelFolder
from deployments.settings import Instance, Profile, ServeAccess, url_of
from ops.bench.router_run import Part
from ops.bench.router_wire import Listening
from tests.forks import Forked
from tests.line import read_metric, until
from tests.process_parts import Drain, Err, Freeze, Hold, HoldMoves, MoveCall, Told, UntilMoveHeld
from tests.ray.streams import client_of

START_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 10.0
END_TIMEOUT_S = 60.0

_listening = msgspec.json.Decoder(Listening).decode
_told = msgspec.json.Decoder(Told).decode


class Process(Part):
    """One of them."""

    def _start(self, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """A command is a module, whose `main` takes the rest of it."""
        module, *arguments = command
        self._forked = Forked(module, arguments, environment, self._log)
        return cast("subprocess.Popen[bytes]", self._forked)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def begun(self) -> Listening:
        """Wait until it can be used."""
        return await asyncio.to_thread(self.hear, _listening, START_TIMEOUT_S)

    def kill(self) -> None:
        """SIGKILL; returns when it has ended."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """SIGSTOP, until `go_on`."""
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def terminate(self) -> None:
        """SIGTERM: what it means is in tests/process_parts.py."""
        self._process.terminate()

    async def left(self) -> int:
        """Its exit status, once it has ended."""
        async with asyncio.timeout(END_TIMEOUT_S):
            await self.ended()
        return self._process.wait()

    async def leave(self) -> int:
        """SIGTERM; its exit status, once it has ended."""
        self.terminate()
        return await self.left()

    async def ended(self) -> None:
        """Wait until it has ended, by itself or by another."""
        fd = self._forked.ended_fd
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(fd, over.set)
        try:
            await over.wait()
        finally:
            loop.remove_reader(fd)


class ReplicaPart(Process):
    """A replica. `replica_id` is what routers know it by."""

    def __init__(self, replica_id: str, command: Sequence[str]) -> None:
        super().__init__(replica_id, command)
        self.replica_id = replica_id

    async def hold(self, tokens: int | None) -> None:
        """No sequence gets longer than that; see `process_parts.Hold`."""
        await self._told(Hold(tokens))

    async def err(self, tokens: int | None) -> None:
        """Whoever comes to so many tokens there ends with an error; see `process_parts.Err`."""
        await self._told(Err(tokens))

    async def freeze(self) -> None:
        """Returns when it has stopped. Something must run on it."""
        await self._told(Freeze())

        async def status() -> str:
            return psutil.Process(self.pid).status()

        await until(status, psutil.STATUS_STOPPED.__eq__, within_s=ANSWER_TIMEOUT_S)

    def thaw(self) -> None:
        self.go_on()

    async def drain(self) -> None:
        """Returns when it takes nothing new any more; it goes on with what it has."""
        await self._told(Drain())

    async def hold_moves(self, call: MoveCall | None) -> None:
        """Its engine stops before such a call about a move; see `process_parts.HoldMoves`."""
        await self._told(HoldMoves(call))

    async def until_move_held(self) -> None:
        await self._told(UntilMoveHeld())

    async def _told(self, what: Told) -> None:
        self.tell(what)
        assert await asyncio.to_thread(self.hear, _told, ANSWER_TIMEOUT_S) == what


class Cluster:
    """A running line. `client` asks its first router."""

    def __init__(
        self, instance_file: Path, controllers: int, step_s: float, row_s: float, stack: contextlib.AsyncExitStack
    ) -> None:
        self._instance_file = str(instance_file)
        self._times_ms = str(step_s * 1000), str(row_s * 1000)
        self._stack = stack
        self._controller_ports = [0] * controllers
        self._replicas_made = 0
        self.replicas: list[ReplicaPart] = []
        """Those that run, the oldest first."""
        self.routers: list[Process] = []
        """Those that run, the oldest first."""
        self.urls: list[str] = []
        """Of the routers that it began with, in their order. One that takes another's place has its port."""
        self.client: httpx.AsyncClient
        self.controllers: dict[int, Process] = {}
        """By their place: the one that leads, and one that stands by where the profile says so."""

    @property
    def controller(self) -> Process:
        """The first."""
        return self.controllers[0]

    @property
    def url(self) -> str:
        return self.urls[0]

    async def start(self, replicas: int, routers: int) -> None:
        for place in range(len(self._controller_ports)):
            await self.start_controller(place)
        began = [self._begin_router() for _ in range(routers)]
        await asyncio.gather(*(self.start_replica() for _ in range(replicas)))
        for router in began:
            (port,) = (await router.begun()).ports
            self.urls.append(url_of("127.0.0.1", port))
        self.client = await self._stack.enter_async_context(client_of(self.url))
        for url in self.urls:
            await until_takes_work(url)
        await self.until_ready(replicas)

    def _begin_router(self) -> Process:
        command = self.command("tests.process_parts", "router", self._instance_file, self._controllers_at)
        router = Process("router", command)
        self._stack.callback(router.close)
        self.routers.append(router)
        return router

    async def start_router(self) -> str | None:
        """One more: where it listens; None where each port has a router already, and it stands by."""
        ports = (await self._begin_router().begun()).ports
        return url_of("127.0.0.1", ports[0]) if ports else None

    async def start_controller(self, place: int = 0) -> None:
        """One, or one in the place of one that has been killed."""
        role = ("controller", self._instance_file, str(self._controller_ports[place]), str(place))
        controller = self.controllers[place] = Process("controller", self.command("tests.process_parts", *role))
        self._stack.callback(controller.close)
        (self._controller_ports[place],) = (await controller.begun()).ports

    @property
    def _controllers_at(self) -> str:
        return ",".join(map(str, self._controller_ports))

    async def start_replica(self, replica_id: str = "") -> ReplicaPart:
        """One more, or one by the name of one that has gone; returns when the routers have met it."""
        if not replica_id:
            replica_id, self._replicas_made = f"replica-{self._replicas_made}", self._replicas_made + 1
        role = ("replica", self._instance_file, self._controllers_at, replica_id, *self._times_ms)
        replica = ReplicaPart(replica_id, self.command("tests.process_parts", *role))
        self._stack.callback(replica.close)
        await replica.begun()
        self.replicas.append(replica)
        return replica

    def kill(self, replica: ReplicaPart) -> None:
        self.replicas.remove(replica)
        replica.kill()

    async def until_ready(self, replicas: int, within_s: float = 30.0) -> float:
        """Wait until the first router uses so many replicas; returns after how many seconds."""
        _, waited_s = await until(lambda: self.metric(REPLICAS_READY), float(replicas).__eq__, within_s)
        return waited_s

    async def metric(self, metric: Metric, **labels: str) -> float:
        return await read_metric(self.client, metric, **labels)

    @staticmethod
    def command(module: str, *arguments: str) -> tuple[str, ...]:
        return (module, *arguments)


async def until_takes_work(url: str) -> None:
    """Wait until this router's /ready says so."""
    async with client_of(url) as client:

        async def status() -> int:
            return (await client.get("/ready")).status_code

        await until(status, (200).__eq__)


@contextlib.asynccontextmanager
async def running_cluster(
    model: ModelFolder,
    profile: Profile,
    folder: Path,
    *,
    step_s: float,
    row_s: float = 0.0,
    replicas: int = 2,
    routers: int = 1,
    port: int = 0,
    serve: ServeAccess | None = None,
) -> AsyncIterator[Cluster]:
    """Start `profile`, whose one model is `model`, with so many replicas and routers, and steps of `step_s` and `row_s` for
    each request that runs; its secret is kept in `folder`. The routers listen on `port` and those after it, which others can then take over, or on free ones.
    `serve`: who answers as Serve, where the model has `scale`."""
    secret_path, instance_file = folder / "secret", folder / "instance.json"
    secret_path.write_text("0123456789abcdef" * 4)
    router = profile.router.model_copy(update={"port": port})
    profile = profile.model_copy(update={"routers": routers, "router": router})
    instance = Instance(profile=profile, model_folders=(model.path,), secret_path=secret_path, serve=serve)
    instance_file.write_text(instance.model_dump_json())
    async with contextlib.AsyncExitStack() as stack:
        cluster = Cluster(instance_file, 1 + profile.control.standby, step_s, row_s, stack)
        await cluster.start(replicas, routers)
        yield cluster
