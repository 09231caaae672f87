"""Router and replica over a real loopback connection, with an engine that the test plays by hand."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from cluster.clock import SystemClock
from cluster.config import TransportConfig
from cluster.engine.prefix import numbers_of, told_of
from cluster.messages import Abort, Add, RosterEntry, StepFrame, ToReplica
from cluster.ports import EngineProgress, HeldAttempt, MovesPort, ReplicaPort, StepResult
from cluster.types import (
    EngineLoad,
    FinishReason,
    Generation,
    Preempted,
    PrefixChange,
    Refusal,
    RefusalReason,
    ReplicaId,
    ReplicaReport,
    ReplicaState,
    Request,
    RequestId,
    Sampling,
    TokenDelta,
)
from deployments.replica_link import ReplicaLink
from deployments.replica_server import ReplicaServer
from deployments.transport import Acceptor, Identity
from router.suspects import Trial

SECRET = b"s" * 32
REPLICA = ReplicaId("replica-1")
GENERATION = Generation(4, "u4")


def request(name: str, emitted: int = 0) -> Request:
    return Request(
        request_id=RequestId(name),
        tenant="t",
        priority=0,
        priority_class="standard",
        arrived_unix_s=1.0,
        prompt_ids=(1, 2),
        sampling=Sampling(max_tokens=9, seed=1),
        emitted_ids=tuple(range(emitted)),
    )


class PlayedEngine:
    """An EnginePort whose steps are the test's: it records what it is told and says what it is given to say."""

    moves: MovesPort

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.heard = asyncio.Event()
        self.load = EngineLoad(slots_total=4, blocks_total=64, blocks_free=64, block_size_tokens=16)

    def start(self, on_result: Callable[[StepResult], None], on_death: Callable[[str], None]) -> None:
        self._on_result = on_result

    def add(self, request: Request, attempt: int) -> None:
        self.told.append(("add", request.request_id, attempt))
        self.heard.set()

    def abort(self, request_id: RequestId, attempt: int) -> None:
        self.told.append(("abort", request_id, attempt))
        self.heard.set()

    def held(self, limit: int) -> Future[tuple[HeldAttempt, ...]]:
        raise NotImplementedError

    def progress(self) -> EngineProgress:
        return EngineProgress(load=self.load, alive=True, step_age_s=None)

    def stop(self) -> None:
        pass

    def step(self, *deltas: TokenDelta, prefixes: PrefixChange | None = None, **changes: int) -> None:
        self.load = msgspec.structs.replace(self.load, steps_total=self.load.steps_total + 1, **changes)
        self._on_result(StepResult(load=self.load, deltas=deltas, prefixes=prefixes))

    def preempt(self, *preempted: Preempted) -> None:
        self._on_result(StepResult(load=self.load, preempted=preempted))


@dataclass
class Router:
    """A ReplicaListener that keeps what it hears."""

    events: asyncio.Queue[tuple[str, str]] = field(default_factory=asyncio.Queue)
    frames: asyncio.Queue[StepFrame] = field(default_factory=asyncio.Queue)

    in_use: Generation = GENERATION

    def link_up(self, port: ReplicaPort, report: ReplicaReport | None) -> bool:
        if port.generation < self.in_use:
            return False
        self.events.put_nowait(("up", ""))
        return True

    def link_down(self, replica_id: ReplicaId, generation: Generation) -> None:
        self.events.put_nowait(("down", ""))

    def replica_lost(self, replica_id: ReplicaId, generation: Generation, why: str) -> None:
        self.events.put_nowait(("lost", why))

    def frame(self, replica_id: ReplicaId, generation: Generation, frame: StepFrame) -> None:
        self.frames.put_nowait(frame)

    async def until(self, condition: Callable[[StepFrame], object]) -> StepFrame:
        while not condition(frame := await self.frames.get()):
            pass
        return frame

    async def event(self) -> str:
        return (await self.events.get())[0]


@dataclass
class World:
    engine: PlayedEngine
    server: ReplicaServer
    acceptor: Acceptor
    entry: RosterEntry
    config: TransportConfig
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    links: list[ReplicaLink] = field(default_factory=list)

    async def router(self, name: str = "router-1") -> tuple[Router, ReplicaLink]:
        listener = Router()
        link = ReplicaLink(self.entry, Identity("router", name, SECRET), listener, self.config, self.numbers)
        self.links.append(link)
        self.tasks.append(asyncio.create_task(link.run()))
        assert await listener.event() == "up"
        return listener, link

    async def told(self, *what: Any) -> None:
        while what not in self.engine.told:
            self.engine.heard.clear()
            await self.engine.heard.wait()


Make = Callable[..., Any]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    worlds: list[World] = []

    async def make_world(**changes: Any) -> World:
        config = TransportConfig(**changes)
        engine = PlayedEngine()
        server = ReplicaServer(engine, REPLICA, GENERATION, config, SystemClock())
        server.start(lambda why: None)
        acceptor = Acceptor(
            lambda _: Identity("replica", REPLICA, SECRET, generation=GENERATION),
            frozenset({"router"}),
            msgspec.msgpack.Decoder(ToReplica).decode,
            server.accept,
            config,
        )
        host, port = await acceptor.listen("127.0.0.1", 0, SECRET)
        world = World(engine, server, acceptor, RosterEntry(REPLICA, GENERATION, host, port, "m"), config)
        worlds.append(world)
        return world

    yield make_world
    for world in worlds:
        for link in world.links:
            link.close()
        await world.acceptor.close()
        await asyncio.gather(*world.tasks)


def tokens(name: str, index: int, count: int, attempt: int = 0, finish: FinishReason | None = None) -> TokenDelta:
    ids = tuple(range(index, index + count))
    return TokenDelta(RequestId(name), attempt, index, ids, tuple(f"{i} " for i in ids), finish)


async def test_all_tokens_of_a_step_for_one_router_leave_in_one_frame_with_the_load(make: Make) -> None:
    world = await make()
    router, link = await world.router()
    for i in range(64):
        link.add(request(str(i)), 0)
    await world.told("add", "63", 0)
    world.engine.step(*(tokens(str(i), 0, 1) for i in range(64)), blocks_free=7, adds_total=64)
    frame = await router.until(lambda f: f.deltas)
    assert sorted(int(d.request_id) for d in frame.deltas) == list(range(64))
    assert (frame.report.load.blocks_free, frame.report.applied_sequence) == (7, 64)


@pytest.mark.parametrize(("period_s", "steps"), [(1e-9, [1, 1, 2]), (3600.0, [1, 2])], ids=["after it", "within it"])
async def test_a_report_leaves_every_period_but_to_whom_a_frame_has_just_left(
    make: Make, period_s: float, steps: list[int]
) -> None:
    world = await make(report_period_s=period_s)
    router, link = await world.router()
    link.add(request("a"), 0)
    await world.told("add", "a", 0)
    world.engine.step(tokens("a", 0, 1))
    first = await router.until(lambda frame: frame.deltas)
    world.server.tick()
    world.engine.step(tokens("a", 1, 1))
    frames = [first]
    while frames[-1].deltas == first.deltas or not frames[-1].deltas:
        frames.append(await router.frames.get())
    assert [frame.report.load.steps_total for frame in frames] == steps


async def test_each_router_gets_its_own_tokens_and_both_get_the_load(make: Make) -> None:
    world = await make()
    first, first_link = await world.router("a")
    second, _ = await world.router("b")
    first_link.add(request("x"), 0)
    await world.told("add", "x", 0)
    world.engine.step(tokens("x", 0, 1), blocks_free=5)
    assert (await first.until(lambda f: f.report.load.blocks_free == 5)).deltas
    assert not (await second.until(lambda f: f.report.load.blocks_free == 5)).deltas


async def test_a_report_counts_exactly_the_adds_that_the_engine_has_taken(make: Make) -> None:
    world = await make()
    router, link = await world.router()
    assert [link.add(request(n), 0) for n in "abc"] == [1, 2, 3]
    await world.told("add", "c", 0)
    world.server.tick()
    assert (await router.until(lambda f: True)).report.applied_sequence == 0
    world.engine.step(adds_total=2)
    assert (await router.until(lambda f: f.report.load.steps_total == 1)).report.applied_sequence == 2


async def test_a_new_link_of_the_same_router_is_told_of_none_of_its_adds_before_they_are_counted(make: Make) -> None:
    world = await make()
    _, link = await world.router()
    for name in "abc":
        link.add(request(name), 0)
    await world.told("add", "c", 0)
    world.engine.step(adds_total=3)
    link._closing = True  # its router gave it up; the replica has not noticed
    again, second = await world.router()
    number = second.add(request("d"), 0)
    await world.told("add", "d", 0)
    world.server.tick()
    assert (await again.until(lambda f: f.report.load.adds_total == 3)).report.applied_sequence < number
    world.engine.step(adds_total=4)
    assert (await again.until(lambda f: f.report.load.adds_total == 4)).report.applied_sequence == number


async def test_a_router_that_comes_back_goes_on_from_the_token_it_asks_for(make: Make) -> None:
    world = await make()
    router, link = await world.router()
    link.add(request("x"), 0)
    await world.told("add", "x", 0)
    world.engine.step(tokens("x", 0, 3))
    await router.until(lambda f: f.deltas)
    assert link._link is not None
    link._link.abort("cable pulled")
    assert await router.event() == "down"
    world.engine.step(tokens("x", 3, 2))
    assert await router.event() == "up"
    link.resend_from(RequestId("x"), 0, 1)
    received: list[int] = []
    while len(received) < 4:
        for d in (await router.until(lambda f: f.deltas)).deltas:
            received[d.index - 1 :] = d.token_ids
    assert received == [1, 2, 3, 4]
    assert ("abort", "x", 0) not in world.engine.told


async def test_each_link_is_told_of_the_prefix_cache_afresh_and_then_of_its_changes(make: Make) -> None:
    """Of 3,000 blocks and of what came and went before and since, for two routers of which one loses its link."""
    world = await make(report_period_s=1e-9)
    blocks = list(range(3000))
    world.engine.step(prefixes=PrefixChange(told_of(blocks)))
    world.engine.step(prefixes=PrefixChange(told_of([5000]), told_of(blocks[:10])))
    held = {*blocks[10:], 5000}

    async def hears(router: Router, known: set[int] | None) -> set[int]:
        """What it knows once that is as much as there is."""
        async with asyncio.timeout(10):
            while known is None or len(known) != len(held):
                change = (await router.until(lambda f: f.prefixes is not None)).prefixes
                assert change is not None
                assert change.afresh is (known is None)
                known = (known or set()).difference(numbers_of(change.gone)).union(numbers_of(change.held))
                world.server.tick()
        return known

    quick, _ = await world.router("quick")
    cut, link = await world.router("cut")
    known = await hears(quick, None)
    assert known == held
    assert await hears(cut, None) == held
    assert link._link is not None
    link._link.abort("cable pulled")
    assert await cut.event() == "down"
    cut.frames = asyncio.Queue()
    world.engine.step(prefixes=PrefixChange(told_of([7000, 7001]), told_of([5000])))
    held = held - {5000} | {7000, 7001}
    assert await hears(quick, known) == held
    assert await cut.event() == "up"
    assert await hears(cut, None) == held


async def test_an_attempt_that_never_arrived_is_refused_when_asked_for(make: Make) -> None:
    world = await make()
    router, link = await world.router()
    link.resend_from(RequestId("ghost"), 3, 0)
    (refusal,) = (await router.until(lambda f: f.refusals)).refusals
    assert (refusal.request_id, refusal.attempt, refusal.reason) == ("ghost", 3, RefusalReason.UNKNOWN_ATTEMPT)


async def test_the_work_of_a_router_that_stays_away_ends(make: Make) -> None:
    world = await make(orphan_after_s=0.05)
    _, link = await world.router()
    link.add(request("x"), 0)
    await world.told("add", "x", 0)
    link._closing = True  # no goodbye: the process is gone
    assert link._link is not None
    link._link.abort("killed")
    await asyncio.wait_for(world.told("abort", "x", 0), 5)


async def test_a_goodbye_ends_the_work_at_once(make: Make) -> None:
    world = await make(orphan_after_s=3600)
    _, link = await world.router()
    link.add(request("x"), 0)
    await world.told("add", "x", 0)
    link.close()
    await asyncio.wait_for(world.told("abort", "x", 0), 5)


async def test_a_later_attempt_replaces_the_earlier_and_repeats_are_not_run_twice(make: Make) -> None:
    world = await make()
    router, link = await world.router()
    link.add(request("x"), 1)
    link.add(request("x"), 1)
    link.add(request("x", emitted=2), 2)
    link.add(request("x"), 1)
    link.add(request("end"), 0)
    await world.told("add", "end", 0)
    assert world.engine.told == [("add", "x", 1), ("abort", "x", 1), ("add", "x", 2), ("add", "end", 0)]
    world.engine.step(tokens("x", 0, 1, attempt=1), tokens("x", 2, 1, attempt=2))
    (d,) = (await router.until(lambda f: f.deltas)).deltas
    assert (d.attempt, d.index) == (2, 2)


async def test_an_aborted_attempt_is_silent_although_a_step_was_running(make: Make) -> None:
    world = await make()
    router, link = await world.router()
    link.add(request("x"), 0)
    link.abort(RequestId("x"), 0)
    await world.told("abort", "x", 0)
    world.engine.step(tokens("x", 0, 1))
    assert (await router.until(lambda f: f.report.load.steps_total == 1)).deltas == ()


async def test_a_router_that_does_not_read_delays_no_step_and_loses_only_its_most_backlogged(make: Make) -> None:
    world = await make(outbox_max_bytes=400_000)
    slow, slow_link = await world.router("slow")
    quick, quick_link = await world.router("quick")
    for name in ("big", "small"):
        slow_link.add(request(name), 0)
    quick_link.add(request("other"), 0)
    await world.told("add", "small", 0)
    await world.told("add", "other", 0)
    assert slow_link._link is not None
    assert slow_link._link._transport is not None
    slow_link._link._transport.pause_reading()
    # Each step brings 100 KB for `big`; sockets hold a few MB, then the outbox, then `big` is given up.
    for step in range(400):
        text = "x" * 100_000
        world.engine.step(
            TokenDelta(RequestId("big"), 0, step, (1,), (text,)),
            tokens("small", step, 1),
            tokens("other", step, 1),
        )
        await quick.until(lambda f: f.deltas)
        if ("abort", "big", 0) in world.engine.told:
            break
    assert ("abort", "big", 0) in world.engine.told
    assert ("abort", "small", 0) not in world.engine.told
    slow_link._link._transport.resume_reading()
    (refusal,) = (await slow.until(lambda f: f.refusals)).refusals
    assert (refusal.request_id, refusal.reason) == ("big", RefusalReason.OVERFLOW)
    world.engine.step(tokens("small", step + 1, 1))
    assert (await slow.until(lambda f: f.deltas)).deltas[-1].request_id == "small"


async def test_draining_refuses_new_work_and_waits_for_the_old(make: Make) -> None:
    world = await make()
    router, link = await world.router()
    link.add(request("old"), 0)
    await world.told("add", "old", 0)
    drained = asyncio.create_task(world.server.drain())
    await router.until(lambda f: f.report.state is ReplicaState.DRAINING)
    link.add(request("new"), 0)
    (refusal,) = (await router.until(lambda f: f.refusals)).refusals
    assert (refusal.request_id, refusal.reason) == ("new", RefusalReason.DRAINING)
    assert not drained.done()
    world.engine.step(tokens("old", 0, 1, finish=FinishReason.STOP))
    await asyncio.wait_for(drained, 5)
    assert (await router.until(lambda f: f.deltas)).deltas[0].finish is FinishReason.STOP


async def test_work_handed_back_is_refused_by_name_after_all_that_was_made_of_it(make: Make) -> None:
    world = await make()
    router, link = await world.router()
    link.add(request("long"), 0)
    await world.told("add", "long", 0)
    drained = asyncio.create_task(world.server.drain())
    await router.until(lambda f: f.report.state is ReplicaState.DRAINING)
    world.engine.step(tokens("long", 0, 3))
    await router.until(lambda f: f.deltas)
    world.server.hand_back()
    (refusal,) = (await router.until(lambda f: f.refusals)).refusals
    assert (refusal.request_id, refusal.attempt, refusal.reason) == ("long", 0, RefusalReason.DRAINING)
    await world.told("abort", "long", 0)
    await asyncio.wait_for(drained, 5)


async def test_a_replica_whose_listener_is_gone_is_lost_once_and_last(make: Make) -> None:
    world = await make()
    router, _ = await world.router()
    await world.acceptor.close()
    assert await router.event() == "down"
    event, why = await router.events.get()
    assert event == "lost"
    assert "nobody listens" in why
    assert router.events.empty()


async def test_another_incarnation_on_the_same_port_is_not_taken_for_the_old(make: Make) -> None:
    world = await make()
    router, link = await world.router()
    world.acceptor._identity = lambda _: Identity("replica", REPLICA, SECRET, generation=Generation(5, "u5"))
    assert link._link is not None
    link._link.abort("restart")
    assert await router.event() == "down"
    event, why = await router.events.get()
    assert event == "lost"
    assert "generation 5" in why


async def test_what_a_minimum_share_sent_is_told_to_the_other_routers_until_it_has_ended_or_is_preempted(
    make: Make,
) -> None:
    world = await make()
    first, link = await world.router("router-1")
    second, _ = await world.router("router-2")
    for name in ("ends", "preempted"):
        link.add(request(name), 0, shared=True)
    link.add(request("ordinary"), 0)
    await world.told("add", "ordinary", 0)
    world.engine.step()
    told = await second.until(lambda frame: len(frame.report.shared) == 2)
    assert [work.priority for work in told.report.shared] == [0, 0]
    assert all(work.age_s >= 0 for work in told.report.shared)
    assert not (await first.until(lambda frame: True)).report.shared, "its own it knows"
    world.engine.preempt(Preempted(RequestId("preempted"), 0, None, 1, 0))
    await second.until(lambda frame: len(frame.report.shared) == 1)
    world.engine.step(TokenDelta(RequestId("preempted"), 0, 0, (1,), ("x",)))
    await second.until(lambda frame: len(frame.report.shared) == 2)
    world.engine.step(
        TokenDelta(RequestId("ends"), 0, 0, (1,), ("x",), FinishReason.LENGTH),
        TokenDelta(RequestId("preempted"), 0, 1, (1,), ("x",), FinishReason.LENGTH),
    )
    await second.until(lambda frame: not frame.report.shared)


async def test_a_router_that_uses_a_later_incarnation_keeps_no_link_to_an_older_one(make: Make) -> None:
    """The link ends, so that it can be tried again: once the later one is gone, the older may be all that there is."""
    world = await make()
    listener = Router(in_use=Generation(GENERATION.number + 1, "u5"))
    link = ReplicaLink(world.entry, Identity("router", "router-1", SECRET), listener, world.config, world.numbers)
    await asyncio.wait_for(link.run(), 5)
    assert "older" in link.refused
    assert listener.events.empty()
    listener.in_use = GENERATION
    again = ReplicaLink(world.entry, Identity("router", "router-1", SECRET), listener, world.config, world.numbers)
    world.links.append(again)
    world.tasks.append(asyncio.create_task(again.run()))
    assert await listener.event() == "up"


# --- suspects of several routers ---


def trial(link: ReplicaLink, name: str, kind: Trial, tokens: int = 3) -> int:
    return link.add(request(name), 0, trial=kind, trial_tokens=tokens)


def refused(name: str) -> Callable[[StepFrame], object]:
    return lambda frame: Refusal(RequestId(name), 0, RefusalReason.FULL) in frame.refusals


async def test_of_two_trials_alone_that_two_routers_send_at_once_one_is_refused(make: Make) -> None:
    world = await make()
    (first, one), (second, two) = await world.router("router-1"), await world.router("router-2")
    trial(one, "a", Trial.ALONE)
    trial(two, "b", Trial.ALONE)
    refusals = asyncio.create_task(first.until(refused("a"))), asyncio.create_task(second.until(refused("b")))
    done, pending = await asyncio.wait(refusals, return_when=asyncio.FIRST_COMPLETED)
    assert (len(done), len(pending)) == (1, 1)
    for task in pending:
        task.cancel()
    assert len([what for what in world.engine.told if what[0] == "add"]) == 1


async def test_a_router_is_told_that_its_trial_has_the_replica_to_itself_as_long_as_it_has(make: Make) -> None:
    world = await make(report_period_s=60.0)
    first, one = await world.router("router-1")
    number = trial(one, "a", Trial.ALONE)
    assert (await first.until(lambda frame: frame.report.alone)).report.alone == number
    await world.told("add", "a", 0)
    world.engine.step(tokens("a", 0, 3))
    assert (await first.until(lambda frame: frame.deltas)).report.alone == 0


async def test_the_engine_has_a_trial_alone_only_when_its_router_may_have_heard_so_and_none_that_was_given_up_by_then(
    make: Make,
) -> None:
    world = await make(report_period_s=60.0)
    first, _ = await world.router("router-1")
    (session,) = world.server._sessions.values()
    for sequence, name in enumerate("ab", start=1):
        world.server.message(session, Add(request(name), 0, sequence, trial=Trial.ALONE, trial_tokens=3))
        assert world.engine.told == []
        if name == "a":
            world.server.message(session, Abort(RequestId(name), 0))
            world.engine.told.clear()
    await world.told("add", "b", 0)
    assert world.engine.told == [("add", "b", 0)]
    assert (await first.until(lambda frame: frame.report.alone == 2)).report.alone == 2


@pytest.mark.parametrize("kind", [Trial.NONE, Trial.APART, Trial.ALONE])
@pytest.mark.parametrize("here", [Trial.NONE, Trial.APART, Trial.ALONE])
async def test_what_runs_beside_a_suspect_of_another_router_is_what_may(make: Make, here: Trial, kind: Trial) -> None:
    may_run = {(Trial.NONE, Trial.NONE), (Trial.NONE, Trial.APART), (Trial.APART, Trial.NONE)}
    world = await make()
    _, one = await world.router("router-1")
    second, two = await world.router("router-2")
    trial(one, "a", here)
    await world.told("add", "a", 0)
    trial(two, "b", kind)
    if (here, kind) in may_run:
        await world.told("add", "b", 0)
    else:
        await second.until(refused("b"))
        assert ("add", "b", 0) not in world.engine.told


async def test_other_routers_are_told_of_a_trial_until_it_has_its_tokens_and_then_may_send_again(make: Make) -> None:
    world = await make()
    first, one = await world.router("router-1")
    second, two = await world.router("router-2")
    trial(one, "a", Trial.ALONE, tokens=2)
    await world.told("add", "a", 0)
    world.engine.step()
    told = await second.until(lambda frame: frame.report.trial)
    assert (told.report.trial, told.report.others) == (Trial.ALONE, True)
    world.engine.step(tokens("a", 0, 1))
    frame = await first.until(lambda frame: frame.deltas)
    assert frame.report.trial == Trial.NONE, "its own it knows"
    world.engine.step(tokens("a", 1, 1))
    await second.until(lambda frame: not frame.report.trial)
    trial(two, "b", Trial.NONE)
    await world.told("add", "b", 0)


@pytest.mark.parametrize("ends", ["by itself", "by its client", "with its router"])
async def test_a_trial_is_over_with_its_request_however_that_ends(make: Make, ends: str) -> None:
    world = await make()
    _, one = await world.router("router-1")
    second, two = await world.router("router-2")
    trial(one, "a", Trial.ALONE)
    await world.told("add", "a", 0)
    world.engine.step()
    await second.until(lambda frame: frame.report.trial)
    if ends == "by itself":
        world.engine.step(tokens("a", 0, 1, finish=FinishReason.STOP))
    else:
        if ends == "by its client":
            one.abort(RequestId("a"), 0)
        else:
            one.close()
        await world.told("abort", "a", 0)
        world.engine.step()
    await second.until(lambda frame: not frame.report.trial)
    trial(two, "b", Trial.ALONE)
    await world.told("add", "b", 0)


async def test_the_first_of_several_routers_knows_that_it_is_not_alone_before_work_of_the_second_comes(
    make: Make,
) -> None:
    world = await make(report_period_s=60.0)
    first, _ = await world.router("router-1")
    assert not (await first.until(lambda frame: True)).report.others
    await world.router("router-2")
    assert (await first.until(lambda frame: frame.report.others)).report.others
