"""Whatever comes on a link is refused by name or done: no message, however wrong its fields, is an error of who hears it."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Iterator
from typing import Any, cast

import msgspec
import pytest

from cluster.clock import SystemClock
from cluster.config import TransportConfig
from cluster.control.demand import Meter
from cluster.control.leader import SETTLE_S, Term
from cluster.messages import (
    Abort,
    Add,
    BandDemand,
    BandLevel,
    CallOff,
    DrainAsk,
    FirstTokens,
    Follows,
    Gate,
    Gates,
    Grant,
    HeldRequest,
    Hello,
    Left,
    Message,
    Move,
    MoveNotice,
    MoveStage,
    Propose,
    Release,
    ReplicaHere,
    ReplicaStatus,
    ResendFrom,
    RosterEntry,
    RouterDemand,
    RouterService,
    RouterStatus,
    ScaleDecision,
    ScaleStatus,
    Standing,
    StatusRequest,
    Stays,
    StepFrame,
    TenantService,
    ToController,
    ToRouter,
    Unplaced,
    Waiter,
)
from cluster.types import (
    EngineLoad,
    Generation,
    PodRef,
    Preempted,
    PrefixChange,
    PriorityLoad,
    Refusal,
    RefusalReason,
    ReplicaId,
    ReplicaReport,
    ReplicaState,
    RequestId,
    RouterId,
    SharedWork,
)
from deployments.controller_server import ControllerServer
from deployments.replica_server import ReplicaServer, decode
from deployments.transport import Link
from tests.unit.fake_replica import Bench
from tests.unit.links.test_replica_links import PlayedEngine, request

encode = msgspec.msgpack.encode
GENERATION = Generation(3, "g")
ENTRY = RosterEntry(ReplicaId("r1"), GENERATION, "127.0.0.1", 1, "m", "zone", "node")
LOAD = EngineLoad(
    slots_total=4,
    blocks_total=64,
    blocks_free=10,
    block_size_tokens=16,
    running=(PriorityLoad(0, 2, 20), PriorityLoad(-10, 1, 4)),
    waiting=(PriorityLoad(0, 1, 3),),
)
REPORT = ReplicaReport(
    replica_id=ENTRY.replica_id,
    generation=GENERATION,
    state=ReplicaState.READY,
    observed_unix_s=1.0,
    load=LOAD,
    step_age_s=0.1,
    shared=(SharedWork(0, 1.0),),
)
A, B, BIG = RequestId("a"), RequestId("b"), RequestId("big")
HELD = tuple(
    HeldRequest(name, 1, RouterId("one"), 0, standing, 6, 90, 50, 1)
    for name, standing in ((A, Standing.RUNS), (B, Standing.PAUSED))
)
DEMAND = RouterDemand(
    model="m",
    number=1,
    bands=(BandDemand(0, 3, 2, 1.0),),
    heads=(Waiter("t", 1.0, 2.0, 3.0, 4.0), Waiter("u", 2.0, 2.0, 3.0, 4.0)),
    first_for_s=0.1,
    blocked=False,
    held_s=0.0,
    sent_per_s=2.0,
    sent_service=3.0,
    open_service=1.0,
    service=(TenantService(0, "t", 1, 3.0),),
    first_tokens=(FirstTokens("standard", 1, 2),),
)
TO_CONTROLLER: tuple[Message, ...] = (
    ReplicaHere(ENTRY, 1, PodRef("p", "u")),
    ReplicaStatus(REPORT, HELD),
    RouterStatus(RouterId("one"), 1.0, "http://x", 1, ()),
    StatusRequest(1),
    DrainAsk(1, "r1", drain=True),
    DEMAND,
    Unplaced("m", BIG, 10, 30, 1.0),
    Stays(A, 1, BIG),
    Left(A, 1, BIG),
    Follows(GENERATION, heard=True),
)
TO_REPLICA: tuple[Message, ...] = (
    Add(request("a"), 1, 1),
    Add(request("b", emitted=2), 2, 2, shared=True),
    Abort(A, 1),
    ResendFrom(A, 1, 0),
    Move(A, 1, 2, ENTRY),
    CallOff(A, 1),
    Grant(B, 2, 1, 3),
    Release(A, 1),
)
TO_ROUTER: tuple[Message, ...] = (
    Gates(
        "m",
        Gate(0, 5),
        (BandLevel(0, 1.0, 1),),
        (RouterService(RouterId("other"), 1, 2.0, (TenantService(0, "t", 1, 2.0),)),),
    ),
    Propose(GENERATION, A, 1, ReplicaId("r1"), GENERATION, ReplicaId("r2"), GENERATION, None, "why", {"x": 1.0}),
    ScaleStatus("m", ScaleDecision(1.0, 1, 2, "why", {"of_one_per_s": 2.0}), 1),
)


class Wire:
    """A link that encodes all that it is told to send, as a real one does."""

    congested = False

    def send(self, message: Message) -> None:
        encode(message)

    def close(self, reason: str) -> None: ...

    def abort(self, reason: str) -> None: ...


def wire() -> Link:
    return cast(Link, Wire())


# --- what is wrong with them ---


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of all that a decoded message consists of, but itself."""
    if isinstance(value, list | dict):
        for key, item in enumerate(value) if isinstance(value, list) else value.items():
            yield (*path, key)
            yield from places(item, (*path, key))


def other(value: Any, rng: random.Random) -> Any:
    """Something else, of the same kind where it has one."""
    match value:
        case bool():
            return not value
        case int():
            return rng.choice((-1, 0, 1, -(2**40), 2**52, 2**63, 2**64 - 1))
        case float():
            return rng.choice((math.nan, math.inf, -math.inf, -1.0, 0.0, 1e299))
        case str():
            return rng.choice(("", "x" * 5000, "r1", "\0", "a"))
        case bytes():
            return rng.choice((b"", value + b"x", b"\xff" * 7, value * 3))
        case list():
            return rng.choice(([], value[:-1], value + value, value[::-1]))
        case dict():
            return {}
        case _:
            return rng.choice((0, -1, "x", 1.5))


def spoilt(message: Any, rng: random.Random) -> bytes:
    """With one to three things wrong with it."""
    value = msgspec.msgpack.decode(encode(message))
    for _ in range(rng.choice((1, 1, 2, 3))):
        path = rng.choice(list(places(value)))
        within = value
        for key in path[:-1]:
            within = within[key]
        within[path[-1]] = other(within[path[-1]], rng)
    return encode(value)


# --- who hears them ---


@pytest.mark.parametrize("seed", range(4))
async def test_a_controller_does_or_refuses_whatever_replicas_and_routers_tell_it(seed: int) -> None:
    rng, clock, refused = random.Random(seed), SystemClock(), 0
    decoder = msgspec.msgpack.Decoder(ToController)
    for _ in range(8):
        meter = Meter(1.0, 1.0, clock.monotonic(), 10.0)
        server = ControllerServer(b"s" * 32, clock, {"m": meter})
        server._term = Term(0, "u", GENERATION, GENERATION)
        server._leads_since_s = clock.monotonic() - SETTLE_S
        named = [("router", "one"), ("router", "two"), ("replica", "r1"), ("replica", "r2")]
        peers = [server.accept(wire(), Hello(1, 1, role, name, b"", b"", "", GENERATION)) for role, name in named]
        for _ in range(60):
            message = rng.choice(TO_CONTROLLER)
            try:
                told = decoder.decode(spoilt(message, rng) if rng.random() < 0.7 else encode(message))
            except msgspec.DecodeError:
                refused += 1
                continue
            rng.choice(peers).message(told)
            server._hand_out()
            server._propose(GENERATION, clock.monotonic())
            server._status(1, GENERATION)
            meter.load(clock.monotonic())
        for peer in peers:
            peer.closed("the test is over")
    assert refused > 50


@pytest.mark.parametrize("seed", range(4))
def test_a_router_does_or_refuses_whatever_a_replica_or_the_controller_tells_it(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, refused = random.Random(seed), 0
    of_replica = msgspec.msgpack.Decoder(ToRouter)
    for _ in range(4):
        bench = Bench()
        hear = bench.core.frame

        def frame(replica_id: ReplicaId, generation: Generation, said: StepFrame, hear: Any = hear) -> None:
            nonlocal refused
            more = StepFrame(
                report=said.report,
                deltas=said.deltas,
                refusals=(Refusal(A, 1, RefusalReason.FULL),) if rng.random() < 0.1 else (),
                preempted=(Preempted(A, 1, B, 3, 4),) if rng.random() < 0.1 else (),
                prefixes=PrefixChange(b"12345678", b"", afresh=True),
                moves=(MoveNotice(A, 1, rng.choice(list(MoveStage)), 2),) if rng.random() < 0.1 else (),
            )
            try:
                hear(replica_id, generation, of_replica.decode(spoilt(more, rng)))
            except msgspec.DecodeError:
                refused += 1
            hear(replica_id, generation, said)

        monkeypatch.setattr(bench.core, "frame", frame)
        replicas = [bench.replica(name, slots=2) for name in ("r1", "r2")]
        for name in ("a", "b", "c", "d", "e"):
            bench.submit(name, tokens=15)
        for _ in range(40):
            bench.clock.advance(0.05)
            for replica in replicas:
                replica.turn()
            message = rng.choice(TO_ROUTER)
            try:
                told = msgspec.msgpack.decode(spoilt(message, rng), type=Gates | Propose | ScaleStatus)
            except msgspec.DecodeError:
                refused += 1
            else:
                if isinstance(told, Gates):
                    bench.core.hear(told)
                elif isinstance(told, Propose):
                    bench.core.propose(told)
                else:
                    bench.core.scaled(told)
            bench.core.tick()
            for said in (bench.core.demand("m"), bench.core.unplaced("m"), *bench.core.settled()):
                encode(said)
    assert refused > 50


@pytest.mark.parametrize("seed", range(4))
async def test_a_replica_does_or_refuses_whatever_routers_tell_it(seed: int) -> None:
    rng, refused = random.Random(seed), 0
    for _ in range(8):
        engine = PlayedEngine()
        server = ReplicaServer(engine, ENTRY.replica_id, GENERATION, TransportConfig(), SystemClock())
        server.start(lambda why: None)
        routers = [server.accept(wire(), Hello(1, 1, "router", name, b"", b"", "")) for name in ("one", "two")]
        for _ in range(40):
            message = rng.choice(TO_REPLICA)
            try:
                told = decode(spoilt(message, rng) if rng.random() < 0.7 else encode(message))
            except msgspec.DecodeError:
                refused += 1
                continue
            rng.choice(routers).message(told)
            engine.step()
            await asyncio.sleep(0)
        await server.close()
    assert refused > 50


@pytest.mark.parametrize("change", [PrefixChange(b"12345678", b"12345678"), PrefixChange()])
def test_half_a_block_in_what_is_told_of_a_prefix_cache_is_refused_by_name(change: PrefixChange) -> None:
    frame = StepFrame(report=REPORT, prefixes=change)
    assert msgspec.msgpack.decode(encode(frame), type=ToRouter) == frame
    for more in (b"x", b"1234567"):
        for held, gone in ((change.held + more, change.gone), (change.held, change.gone + more)):
            value = msgspec.msgpack.decode(encode(frame))
            value[5][:2] = held, gone
            with pytest.raises(msgspec.DecodeError, match=r"held and gone are 8 bytes a block.*\[5\]"):
                msgspec.msgpack.decode(encode(value), type=ToRouter)
