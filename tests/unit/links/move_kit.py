"""What tests of moves between replicas share: replicas with real engines over real sockets, and a router that plays its part
by hand. An engine takes its next step once the loop has heard of the last, so that there is time for a move."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from cluster.clock import SystemClock
from cluster.config import TransportConfig
from cluster.engine.engine import Engine
from cluster.engine.runner import EngineRunner
from cluster.messages import FromPeer, Message, MoveNotice, MoveStage, RosterEntry, StepFrame, ToRouter, Welcome
from cluster.ports import ReplicaPort, Row, RowOutput, StepResult
from cluster.types import (
    FinishReason,
    Generation,
    Preempted,
    Refusal,
    ReplicaId,
    ReplicaReport,
    ReplicaState,
    Request,
    RequestId,
)
from deployments.replica_link import ReplicaLink
from deployments.replica_server import ROLES, ReplicaServer, decode
from deployments.transport import Acceptor, Identity, Link, connect
from tests.conformance.arithmetic_backend import ArithmeticBackend
from tests.conformance.engine_kit import EOS, byte_level_codec, config, undisturbed, vocab_size

SECRET = b"s" * 32
MODEL = "m" * 64
GENERATION = Generation(1, "u1")
MAX_MODEL_LEN = 1024
PATIENCE_S = 20.0
"""How long a test waits for an event that comes at once unless something is broken."""

Key = tuple[RequestId, int]


class PacedBackend(ArithmeticBackend):
    def __init__(self, blocks: int, block_size_tokens: int, kv_format: str) -> None:
        super().__init__(blocks, block_size_tokens, vocab_size())
        self.kv_format = kv_format
        self.next = threading.Event()
        """Set once for each step."""
        self.next.set()
        self.open = threading.Event()
        """While it is not set, no step is taken."""
        self.open.set()
        self.held = threading.Event()
        """Set while a step waits for that."""

    def run(self, rows: Sequence[Row], padding_tokens: int = 0) -> list[RowOutput]:
        assert self.next.wait(PATIENCE_S)
        self.next.clear()
        if not self.open.is_set():
            self.held.set()
        assert self.open.wait(PATIENCE_S)
        self.held.clear()
        return super().run(rows, padding_tokens)


class PacedRunner(EngineRunner):
    """Its steps follow one another by `step_s` at least."""

    def __init__(self, engine: Engine, backend: PacedBackend, step_s: float) -> None:
        super().__init__(engine, SystemClock())
        self._step_s = step_s
        self._backend = backend
        self._loop = asyncio.get_running_loop()

    def start(self, on_result: Callable[[StepResult], None], on_death: Callable[[str], None]) -> None:
        def hear(result: StepResult) -> None:
            on_result(result)
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._loop.call_later, self._step_s, self._backend.next.set)

        super().start(hear, on_death)


@dataclass
class Replica:
    name: str
    engine: Engine
    runner: EngineRunner
    server: ReplicaServer
    acceptor: Acceptor
    entry: RosterEntry
    ticking: asyncio.Task[None]
    deaths: list[str] = field(default_factory=list)
    steps: threading.Event = field(default_factory=threading.Event)
    """While it is not set, a paced engine takes no step."""
    held: threading.Event = field(default_factory=threading.Event)
    """Set while a step of a paced engine waits for that."""

    async def hold(self) -> int:
        """Stop a paced engine, which has work, amid a step; returns how many it has made. Of those all has been heard."""
        self.steps.clear()
        await until(self.held.is_set)
        return self.runner.progress().load.steps_total

    @property
    def is_empty(self) -> bool:
        load = self.runner.progress().load
        held = len(self.server._owner) + len(self.server._leaving) + len(self.server._coming)
        return load.blocks_free == load.blocks_total and not (load.running or load.waiting or held)

    async def emptied(self) -> None:
        await until(lambda: self.is_empty)

    async def end(self) -> None:
        self.ticking.cancel()
        await self.server.close()
        await self.acceptor.close()
        await asyncio.to_thread(self.runner.stop)


async def until(happened: Callable[[], object]) -> None:
    """For what is not told: of books and of an engine's thread."""
    async with asyncio.timeout(PATIENCE_S):
        while not happened():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


class Ears:
    """ReplicaListener of one router: all that it has heard."""

    def __init__(self) -> None:
        self.tokens: dict[Key, list[int]] = {}
        self.ends: dict[Key, FinishReason] = {}
        self.notices: list[MoveNotice] = []
        self.refusals: list[Refusal] = []
        self.reports: dict[ReplicaId, ReplicaReport] = {}
        self.up: set[ReplicaId] = set()
        self.firsts: dict[Key, int] = {}
        self.first_told: dict[Key, tuple[int, int]] = {}
        """Tokens of the first frame with any of an attempt, and how many steps its replica had made."""
        self.preempted: list[Preempted] = []
        self._news = asyncio.Event()

    def link_up(self, port: ReplicaPort, report: ReplicaReport | None) -> bool:
        self.up.add(port.replica_id)
        self._news.set()
        return True

    def link_down(self, replica_id: ReplicaId, generation: Generation) -> None:
        self.up.discard(replica_id)
        self._news.set()

    def replica_lost(self, replica_id: ReplicaId, generation: Generation, why: str) -> None:
        self._news.set()

    def frame(self, replica_id: ReplicaId, generation: Generation, frame: StepFrame) -> None:
        for delta in frame.deltas:
            key = (delta.request_id, delta.attempt)
            got = self.tokens.setdefault(key, [])
            first = self.firsts.setdefault(key, delta.index)
            self.first_told.setdefault(key, (len(delta.token_ids), frame.report.load.steps_total))
            assert delta.index == first + len(got), "tokens lost or doubled"
            got.extend(delta.token_ids)
            if delta.finish is not None:
                self.ends[key] = delta.finish
        for notice in frame.moves:
            if notice.stage is MoveStage.FROZEN:
                told = self.firsts[notice.request_id, notice.attempt] + len(
                    self.told(notice.request_id, notice.attempt)
                )
                assert notice.index == told, "it follows all that was told"
        self.notices.extend(frame.moves)
        self.refusals.extend(frame.refusals)
        self.preempted.extend(frame.preempted)
        self.reports[replica_id] = frame.report
        self._news.set()

    def told(self, name: str, attempt: int = 0) -> list[int]:
        return self.tokens.get((RequestId(name), attempt), [])

    async def until(self, happened: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not happened():
                self._news.clear()
                await self._news.wait()

    def of(self, name: str, attempt: int) -> list[MoveNotice]:
        return [n for n in self.notices if (n.request_id, n.attempt) == (name, attempt)]

    async def notice(self, name: str, attempt: int, stage: MoveStage) -> MoveNotice:
        """The latest of that stage, once there is one."""
        await self.until(lambda: any(n.stage is stage for n in self.of(name, attempt)))
        return [n for n in self.of(name, attempt) if n.stage is stage][-1]

    async def off(self, name: str, attempt: int = 0) -> str:
        return (await self.notice(name, attempt, MoveStage.OFF)).why


class Router:
    """One router, which plays its part in moves by hand."""

    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self.name = name
        self.ears = Ears()
        self.links: dict[str, ReplicaLink] = {}
        self.tasks: list[asyncio.Task[None]] = []
        self._numbers = itertools.count(1)

    async def reach(self, *replicas: Replica) -> Router:
        for replica in replicas:
            identity = Identity("router", self.name, SECRET, MODEL)
            link = ReplicaLink(replica.entry, identity, self.ears, self._world.config, self._numbers)
            self.links[replica.name] = link
            self.tasks.append(asyncio.create_task(link.run()))
            await self.ears.until(partial(self.ears.up.__contains__, replica.entry.replica_id))
        return self

    async def runs(self, request: Request, on: Replica, tokens: int = 5, attempt: int = 0) -> Request:
        """Send it, and wait until it has told some tokens."""
        self.links[on.name].add(request, attempt)
        await self.tells(request.request_id, attempt, tokens)
        return request

    async def tells(self, name: RequestId, attempt: int, tokens: int) -> None:
        """Wait for so many of an attempt's tokens, or its end."""
        heard = self.ears
        await heard.until(lambda: len(heard.told(name, attempt)) >= tokens or (name, attempt) in heard.ends)

    async def frozen(self, name: RequestId, source: Replica, target: RosterEntry, attempt: int = 0) -> int | None:
        """Ask for a move and wait for its source. Returns at which token it is frozen; None where it has ended."""
        self.links[source.name].move(name, attempt, attempt + 1, target)
        heard = self.ears
        await heard.until(
            lambda: (name, attempt) in heard.ends or any(n.stage is MoveStage.FROZEN for n in heard.of(name, attempt))
        )
        return next((n.index for n in heard.of(name, attempt) if n.stage is MoveStage.FROZEN), None)

    async def moves(self, name: RequestId, source: Replica, target: Replica, attempt: int = 0) -> bool:
        """Move it. False where it has ended before."""
        index = await self.frozen(name, source, target.entry, attempt)
        if index is None:
            return False
        self.links[target.name].grant(name, attempt + 1, index)
        await self.ears.notice(name, attempt + 1, MoveStage.TAKEN)
        self.links[source.name].release(name, attempt)
        return True

    async def ends(self, name: RequestId, attempt: int = 0) -> list[int]:
        """All tokens that its attempts up to this one have told, once this one has ended."""
        await self.ears.until(lambda: (name, attempt) in self.ears.ends)
        return [token for k in range(attempt + 1) for token in self.ears.told(name, k)]

    async def goes_on(self, request: Request, attempt: int = 0) -> None:
        """As if nothing had been."""
        assert await self.ends(request.request_id, attempt) == whole(request)

    async def leave(self) -> None:
        for link in self.links.values():
            link.close()
        await asyncio.gather(*self.tasks)


class Wire:
    """One end of a link between replicas, played by hand."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.heard: asyncio.Queue[Any] = asyncio.Queue()
        self.why: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def message(self, message: Any) -> None:
        self.heard.put_nowait(message)

    def writable(self) -> None:
        pass

    def closed(self, reason: str) -> None:
        self.why.set_result(reason)

    def send(self, *messages: Message) -> None:
        for message in messages:
            self.link.send(message)

    async def hears(self) -> Any:
        async with asyncio.timeout(PATIENCE_S):
            return await self.heard.get()


class World:
    """All that a test has started; `end` checks that nothing is left anywhere."""

    def __init__(self, **transport: Any) -> None:
        patient = {"move_answer_s": PATIENCE_S, "move_expiry_s": PATIENCE_S}
        self.config = TransportConfig(**{"report_period_s": 0.02, "move_chunk_bytes": 64, **patient, **transport})
        self.replicas: list[Replica] = []
        self.routers: list[Router] = []
        self.wires: list[Wire] = []
        self.acceptors: list[Acceptor] = []

    async def replica(
        self, name: str, *, kv_format: str = "arithmetic", model: str = MODEL, step_s: float = 0.0, **changes: object
    ) -> Replica:
        """One that a test can stop between two steps."""
        values = {"blocks": 512, "max_model_len": MAX_MODEL_LEN, "step_token_budget": 64, "max_held": 64, **changes}
        settings = config(**values)
        backend = PacedBackend(settings.blocks, settings.block_size_tokens, kv_format)
        engine = Engine(settings, backend, byte_level_codec(), (EOS,))
        replica = await self.serve(name, engine, PacedRunner(engine, backend, step_s), model)
        replica.steps, replica.held = backend.open, backend.held
        return replica

    async def serve(self, name: str, engine: Engine, runner: EngineRunner, model: str = MODEL) -> Replica:
        identity = Identity("replica", name, SECRET, model, GENERATION)
        server = ReplicaServer(runner, ReplicaId(name), GENERATION, self.config, SystemClock(), identity)
        acceptor = Acceptor(lambda _: identity, ROLES, decode, server.accept, self.config)
        host, port = await acceptor.listen("127.0.0.1", 0, SECRET)

        async def tick() -> None:
            while True:
                server.tick()
                await asyncio.sleep(self.config.report_period_s)

        entry = RosterEntry(ReplicaId(name), GENERATION, host, port, "m")
        replica = Replica(name, engine, runner, server, acceptor, entry, asyncio.create_task(tick()))
        server.start(replica.deaths.append)
        self.replicas.append(replica)
        return replica

    async def router(self, *replicas: Replica, name: str = "router-1") -> Router:
        router = Router(self, name)
        self.routers.append(router)
        return await router.reach(*replicas)

    async def peer(self, of: Replica, role: str = "replica", model: str = MODEL) -> Wire:
        """A link to a replica that the test speaks on."""

        def greeted(link: Link, welcome: Welcome) -> Wire:
            self.wires.append(Wire(link))
            return self.wires[-1]

        heard = msgspec.msgpack.Decoder(FromPeer | ToRouter).decode
        identity = Identity(role, "played", SECRET, model, GENERATION)
        await connect(of.entry.host, of.entry.port, identity, heard, greeted, self.config)
        return self.wires[-1]

    async def played_target(self, max_frame_bytes: int) -> tuple[RosterEntry, asyncio.Queue[Wire]]:
        """A replica that the test plays, and the links that are made to it."""
        wires: asyncio.Queue[Wire] = asyncio.Queue()

        def on_link(link: Link, hello: object) -> Wire:
            wire = Wire(link)
            self.wires.append(wire)
            wires.put_nowait(wire)
            return wire

        identity = Identity("replica", "played", SECRET, MODEL, GENERATION)
        config = self.config.model_copy(update={"max_frame_bytes": max_frame_bytes})
        acceptor = Acceptor(lambda _: identity, frozenset({"replica"}), decode, on_link, config)
        self.acceptors.append(acceptor)
        host, port = await acceptor.listen("127.0.0.1", 0, SECRET)
        return RosterEntry(ReplicaId("played"), GENERATION, host, port, "m"), wires

    async def end(self) -> None:
        for replica in self.replicas:
            replica.steps.set()
        emptied = await asyncio.gather(*(r.emptied() for r in self.replicas), return_exceptions=True)
        for router in self.routers:
            await router.leave()
        for replica in self.replicas:
            await replica.end()
        for acceptor in self.acceptors:
            await acceptor.close()
        for wire in self.wires:
            wire.link.abort("the test is over")
        for replica, left in zip(self.replicas, emptied, strict=True):
            assert not replica.deaths, replica.deaths
            assert left is None, f"{replica.name} holds something"
            replica.engine.check_integrity()


def whole(request: Request) -> list[int]:
    return undisturbed(request, max_model_len=MAX_MODEL_LEN).token_ids


def is_draining(report: ReplicaReport) -> bool:
    return report.state is ReplicaState.DRAINING
