"""The controller as rendezvous: whoever it introduces goes on without it, and its successor is later than it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar, get_args

import msgspec
import pytest

from cluster.clock import SystemClock
from cluster.config import ControlConfig, TransportConfig
from cluster.control.leader import Term
from cluster.control.loop import WEIGH_FOR_S
from cluster.control.view import Proposal
from cluster.messages import (
    BandDemand,
    ClusterStatus,
    DrainAsk,
    DrainOrder,
    DrainTold,
    Follows,
    FromController,
    Gate,
    Gates,
    Granted,
    HeldRequest,
    Hello,
    Leads,
    Leave,
    Left,
    Message,
    Propose,
    ReplicaHere,
    ReplicaStatus,
    Roster,
    RosterEntry,
    RouterDemand,
    ScaleDecision,
    ScaleStatus,
    Standing,
    StatusRequest,
    Stays,
    ToController,
    Unplaced,
    Waiter,
    Weigh,
    Welcome,
)
from cluster.model import ModelFolder
from cluster.types import (
    EngineLoad,
    Generation,
    PriorityLoad,
    ReplicaId,
    ReplicaReport,
    ReplicaState,
    RequestId,
    RouterId,
)
from deployments.controller_link import ControllerLinks, Find
from deployments.controller_server import ROLES, ControllerServer
from deployments.replica_process import ReplicaProcess
from deployments.settings import Environment, Instance, Profile
from deployments.transport import Acceptor, Identity, Link, LinkHandler, RejectedError, connect
from tests.line import until
from tests.unit.links.test_replica_links import PlayedEngine

T = TypeVar("T")
SECRET = b"s" * 32
CONFIG = TransportConfig(backoff_max_s=0.05)
ENTRY = RosterEntry(ReplicaId("r1"), Generation(1, "u"), "127.0.0.1", 1234, "m")


@dataclass
class Place:
    """Where a controller is to be found: what Serve answers in production."""

    address: tuple[str, int] | None = None
    acceptors: list[Acceptor] = field(default_factory=list)
    servers: list[ControllerServer] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def find(self) -> tuple[str, int]:
        if self.address is None:
            raise TimeoutError
        return self.address

    async def start(
        self,
        accept: Callable[[Link, Hello], LinkHandler] | None = None,
        number: int = 0,
        control: ControlConfig = ControlConfig(),  # noqa: B008  # frozen
    ) -> Acceptor:
        """A controller, which is ours or accepts links as it is told here."""
        server = ControllerServer(SECRET, SystemClock(), control=control, place=number)
        decode = msgspec.msgpack.Decoder(ToController).decode
        acceptor = Acceptor(server.identity, ROLES, decode, accept or server.accept, CONFIG)
        self.address = await acceptor.listen("127.0.0.1", 0, SECRET)
        self.acceptors.append(acceptor)
        self.servers.append(server)
        return acceptor


@dataclass
class Peer:
    """A router or replica as far as the controller sees it."""

    place: Place
    role: str
    generation: Generation | None = None
    name: str = ""
    heard: asyncio.Queue[FromController] = field(default_factory=asyncio.Queue)
    finds: Sequence[Find] = ()
    """Of more than one controller."""
    led: int = 0
    """The controller that was last waited for."""

    def __post_init__(self) -> None:
        finds = self.finds or (self.place.find,)
        self.link = ControllerLinks(finds, self._identity, lambda: (), self.heard.put_nowait, SystemClock(), CONFIG)
        self.place.tasks.append(asyncio.create_task(self.link.run()))

    def _identity(self) -> Identity:
        return Identity(self.role, self.name or f"{self.role}-1", SECRET, generation=self.generation)

    async def followed(self) -> int:
        """The generation of the next controller that leads it."""

        async def generation() -> int:
            return self.link.generation

        self.led, _ = await until(generation, lambda number: number > self.led)
        return self.led

    def abort(self) -> None:
        """End its links, which it makes again."""
        for one in self.link._links:
            if one.link is not None:
                one.link.abort("gone")


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    here = Place()
    yield here
    for task in here.tasks:
        task.cancel()
    await asyncio.gather(*here.tasks, return_exceptions=True)
    for acceptor in here.acceptors:
        await acceptor.close()


async def heard(peer: Peer, kind: type[T], condition: Callable[[T], object] = bool) -> T:
    while not (isinstance(message := await peer.heard.get(), kind) and condition(message)):
        pass
    return message


async def test_a_router_hears_of_a_replica_whichever_came_first(place: Place) -> None:
    await place.start()
    early = Peer(place, "router")
    assert (await early.heard.get()) == Roster(entries=())
    replica = Peer(place, "replica")
    await replica.followed()
    replica.link.tell(ReplicaHere(entry=ENTRY, pid=7))
    assert await early.heard.get() == Roster(entries=(ENTRY,))
    late = Peer(place, "router")
    assert await late.heard.get() == Roster(entries=(ENTRY,))


async def test_generations_rise_and_survive_the_controller(place: Place) -> None:
    first = await place.start()
    old = Peer(place, "replica", generation=Generation(41, "old"))
    assert await old.followed() == 1
    new = Peer(place, "replica")
    assert await new.followed() == 1
    granted = await new.heard.get()
    assert isinstance(granted, Granted)
    assert granted.generation.number == 42
    new.generation = granted.generation

    await place.start()
    await first.close()
    assert await old.followed() == 2, "a successor is later than what its peers have seen"
    assert await new.followed() == 2
    newest = Peer(place, "replica")
    granted = await newest.heard.get()
    assert isinstance(granted, Granted)
    assert granted.generation.number == 43


async def test_a_hello_that_is_not_proven_teaches_the_controller_nothing(place: Place) -> None:
    await place.start()
    assert place.address is not None
    liar = Identity("replica", "liar", b"x" * 32, generation=Generation(2**53, "evil"))

    def unwelcome(link: Link, welcome: Welcome) -> LinkHandler:
        raise AssertionError("it was let in")

    with pytest.raises(RejectedError, match=r"^secret"):
        await connect(*place.address, liar, msgspec.msgpack.decode, unwelcome, CONFIG)
    assert (await heard(Peer(place, "replica"), Granted)).generation.number == 1


async def test_routers_hear_that_a_replica_has_gone(place: Place) -> None:
    await place.start()
    router, replica = Peer(place, "router"), Peer(place, "replica")
    await replica.followed()
    replica.link.tell(ReplicaHere(entry=ENTRY, pid=7))
    await heard(router, Roster, lambda roster: roster.entries)
    replica.abort()
    await heard(router, Roster, lambda roster: not roster.entries)


class Played:
    """A controller that says it leads, and then a word; LinkHandler of its links."""

    def __init__(self, generation: Generation, word: Message) -> None:
        self.generation = generation
        self.word = word
        self.heard: asyncio.Queue[ToController] = asyncio.Queue()

    def accept(self, link: Link, hello: Hello) -> Played:
        del hello
        link.send(Leads(self.generation))
        link.send(self.word)
        return self

    def message(self, message: ToController) -> None:
        self.heard.put_nowait(message)

    def writable(self) -> None: ...

    def closed(self, reason: str) -> None: ...


EVERY_WORD: tuple[FromController, ...] = (
    Granted(Generation(1, "g")),
    Roster(()),
    DrainOrder(drain=True),
    Leave(),
    DrainTold(1, ()),
    Gates("m", Gate(0, 0), (), ()),
    Propose(Generation(2, "old"), RequestId("a"), 1, ReplicaId("r1"), ENTRY.generation, None, None, None, ""),
    ClusterStatus(1, Generation(2, "old"), 1, 0.0, (), ()),
    Weigh(1.0),
    ScaleStatus("m", ScaleDecision(1.0, 1, 2, "", {}), kept=1),
)


@pytest.mark.parametrize("word", EVERY_WORD, ids=lambda word: type(word).__name__)
@pytest.mark.parametrize("role", sorted(ROLES))
async def test_whatever_an_older_controller_says_is_refused_counted_and_told_it_also_while_the_newer_is_away(
    place: Place, role: str, word: FromController
) -> None:
    newer, again, older = (
        Played(Generation(3, "new"), word), Played(Generation(3, "new"), word), Played(Generation(2, "old"), word)
    )  # fmt: skip
    first = await place.start(newer.accept)
    peer = Peer(place, role)
    assert await peer.heard.get() == word, "the latest is heeded"
    await place.start(older.accept)
    await first.close()
    assert await older.heard.get() == Follows(newer.generation, heard=False)

    async def refused() -> int:
        return peer.link.refused

    await until(refused, (1).__eq__)
    assert peer.heard.empty()
    assert not peer.link.tell(StatusRequest(1)), "nobody leads"
    assert not peer.link.ask(StatusRequest(2))
    stale = place.acceptors[-1]
    await place.start(again.accept)
    await stale.close()
    assert await peer.heard.get() == word
    assert peer.link.refused == 1


def test_every_word_of_a_controller_is_tried_above() -> None:
    assert {type(word) for word in EVERY_WORD} == set(get_args(FromController)) - {Leads}


async def test_status_shows_what_each_last_reported_and_missing_is_none(place: Place) -> None:
    await place.start()
    replica, router = Peer(place, "replica"), Peer(place, "router")
    await replica.followed()
    await router.followed()
    replica.link.tell(ReplicaHere(entry=ENTRY, pid=7))
    await heard(router, Roster, lambda roster: roster.entries)
    router.link.tell(StatusRequest(ask_id=1))
    (summary,) = (await heard(router, ClusterStatus)).replicas
    assert (summary.pid, summary.report, summary.report_age_s) == (7, None, None)

    report = ReplicaReport(
        replica_id=ENTRY.replica_id,
        generation=ENTRY.generation,
        state=ReplicaState.READY,
        observed_unix_s=1.0,
        load=EngineLoad(slots_total=4, blocks_total=8, blocks_free=3, block_size_tokens=16),
        step_age_s=None,
    )
    replica.link.tell(ReplicaStatus(report=report))
    status = None
    while status is None or status.replicas[0].report is None:
        router.link.tell(StatusRequest(ask_id=2))
        status = await heard(router, ClusterStatus)
    assert status.replicas[0].report == report
    assert status.replicas[0].report_age_s is not None


async def test_a_drain_reaches_the_replicas_of_that_id_host_or_node_and_no_other(place: Place) -> None:
    await place.start()
    router, one, two = Peer(place, "router"), Peer(place, "replica"), Peer(place, "replica")
    other = msgspec.structs.replace(ENTRY, replica_id=ReplicaId("r2"), node="node-2")
    for peer, entry in ((one, ENTRY), (two, other)):
        await peer.followed()
        peer.link.tell(ReplicaHere(entry=entry, pid=7))
    await heard(router, Roster, lambda roster: len(roster.entries) == 2)
    router.link.tell(DrainAsk(1, "r2", True))
    assert await heard(router, DrainTold) == DrainTold(1, (ReplicaId("r2"),))
    assert await heard(two, DrainOrder) == DrainOrder(True)
    router.link.tell(DrainAsk(2, ENTRY.host, False))
    assert await heard(router, DrainTold) == DrainTold(2, (ReplicaId("r1"), ReplicaId("r2")))
    assert [await heard(peer, DrainOrder) for peer in (one, two)] == [DrainOrder(False)] * 2, "r1 has heard of one only"
    for name in ("r3", ""):  # r1 has said no node
        router.link.tell(DrainAsk(3, name, True))
        assert await heard(router, DrainTold) == DrainTold(3, ())
    router.link.tell(DrainAsk(4, "node-2", True))
    assert await heard(router, DrainTold) == DrainTold(4, (ReplicaId("r2"),))


async def test_without_a_controller_a_link_keeps_trying_and_says_so(place: Place) -> None:
    peer = Peer(place, "router")
    assert peer.link.tell(StatusRequest(ask_id=1)) is False
    await place.start()
    assert await peer.followed() == 1
    assert peer.link.tell(StatusRequest(ask_id=1)) is True
    assert (await heard(peer, ClusterStatus)).ask_id == 1


URGENT = RouterDemand(
    model="m",
    number=1,
    bands=(BandDemand(10, 1, 0, 0.0),),
    heads=(Waiter("t", 0.0, 0.0, 1.0, 8.0),),
    first_for_s=0.0,
    blocked=False,
    held_s=0.0,
    sent_per_s=0.0,
    sent_service=0.0,
    open_service=0.0,
    service=(),
)


async def test_what_waits_on_one_router_shuts_the_others_until_that_router_is_gone(place: Place) -> None:
    await place.start()
    busy, idle = Peer(place, "router", name="busy"), Peer(place, "router", name="idle")
    await busy.followed()
    await idle.followed()
    await heard(idle, Roster, lambda _: True)
    busy.link.tell(URGENT)
    assert (await heard(idle, Gates, lambda gates: gates.gate)).gate == Gate(10, 0)
    busy.abort()
    assert (await heard(idle, Gates, lambda gates: gates.gate is None)).gate is None


async def test_a_demand_that_is_not_renewed_shuts_nobody_for_long(place: Place) -> None:
    await place.start()
    busy, idle = Peer(place, "router", name="busy"), Peer(place, "router", name="idle")
    await busy.followed()
    await idle.followed()
    busy.link.tell(URGENT)
    await heard(idle, Gates, lambda gates: gates.gate)
    assert (await asyncio.wait_for(heard(idle, Gates, lambda gates: gates.gate is None), 10)).gate is None


async def test_a_replica_says_in_which_zone_its_node_is(
    place: Place, tiny_model: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREBAY_ZONE", "zone-a")
    await place.start()
    router = Peer(place, "router")
    (tmp_path / "secret").write_bytes(SECRET)
    instance = Instance(profile=Profile(), model_folders=(tiny_model.path,), secret_path=tmp_path / "secret")
    replica = ReplicaProcess(instance, tiny_model, ReplicaId("r1"), place.find, lambda _: PlayedEngine(), print)
    await replica.start("127.0.0.1", Environment().zone)
    (entry,) = (await heard(router, Roster, lambda roster: roster.entries)).entries
    assert (entry.replica_id, entry.zone) == ("r1", "zone-a")
    await replica.close()


# --- proposals ---

HELD = HeldRequest(RequestId("low"), 2, RouterId("owner"), -10, Standing.RUNS, 6, 90, 50, 1)


def status(
    entry: RosterEntry, *held: HeldRequest, running: int = 0, blocks_free: int = 8, steps: int = 0
) -> ReplicaStatus:
    """Of a replica with one slot and 8 blocks; who does not run there waits."""
    levels = {True: tuple[PriorityLoad, ...](), False: tuple[PriorityLoad, ...]()}
    for h in held:
        levels[h.standing is Standing.RUNS] += (PriorityLoad(h.priority, 1, h.blocks),)
    load = EngineLoad(
        slots_total=1,
        blocks_total=8,
        blocks_free=blocks_free,
        block_size_tokens=16,
        running=levels[True] or (PriorityLoad(0, running, 8 - blocks_free),) * bool(running),
        waiting=levels[False],
        steps_total=steps,
    )
    report = ReplicaReport(
        replica_id=entry.replica_id,
        generation=entry.generation,
        state=ReplicaState.READY,
        observed_unix_s=1.0,
        load=load,
        step_age_s=None,
    )
    return ReplicaStatus(report=report, held=held or None)


async def replica_here(place: Place, name: str) -> tuple[Peer, RosterEntry]:
    peer, entry = Peer(place, "replica", name=name), msgspec.structs.replace(ENTRY, replica_id=ReplicaId(name))
    await peer.followed()
    peer.link.tell(ReplicaHere(entry=entry, pid=7))
    return peer, entry


async def proposed_while(place: Place, owner: Peer, *told: tuple[Peer, Message]) -> Propose:
    """What the owner is proposed while these are said again and again, as replicas and routers do."""

    async def say() -> None:
        while True:
            for peer, message in told:
                peer.link.tell(message)
                await asyncio.sleep(0.02)

    place.tasks.append(saying := asyncio.create_task(say()))
    propose = await asyncio.wait_for(heard(owner, Propose), 30)
    saying.cancel()
    return propose


async def test_who_owns_what_waits_on_a_full_replica_is_told_to_call_it_back(place: Place) -> None:
    await place.start()
    owner, other = Peer(place, "router", name="owner"), Peer(place, "router", name="other")
    assert await owner.followed() == 1
    await other.followed()
    full, full_entry = await replica_here(place, "r1")
    free, free_entry = await replica_here(place, "r2")
    waits = msgspec.structs.replace(HELD, standing=Standing.WAITS, blocks=0, tokens=0)
    runs = msgspec.structs.replace(HELD, request_id=RequestId("runs"), priority=0)
    told = status(full_entry, runs, waits, blocks_free=2)
    propose = await proposed_while(place, owner, (full, told), (free, status(free_entry)))
    assert (propose.request_id, propose.attempt, propose.source, propose.source_generation) == (
        waits.request_id,
        waits.attempt,
        full_entry.replica_id,
        full_entry.generation,
    )
    assert (propose.target, propose.target_generation, propose.for_request_id) == (None, None, None)
    assert propose.generation.number == 1
    assert propose.why
    other.link.tell(StatusRequest(ask_id=1))
    while not isinstance(message := await other.heard.get(), ClusterStatus):
        assert not isinstance(message, Propose), "it owns nothing there"


async def test_who_owns_what_is_to_make_room_is_told_for_which_request_of_another_router(place: Place) -> None:
    await place.start()
    owner, other = Peer(place, "router", name="owner"), Peer(place, "router", name="other")
    await owner.followed()
    await other.followed()
    replica, entry = await replica_here(place, "r1")
    elsewhere, its_entry = await replica_here(place, "r2")
    its_entry = msgspec.structs.replace(its_entry, model="another")
    elsewhere.link.tell(ReplicaHere(entry=its_entry, pid=8))
    elsewhere.link.tell(status(its_entry))
    demand = Unplaced("m", RequestId("large"), 10, 7, 1.0)
    propose = await proposed_while(place, owner, (replica, status(entry, HELD, blocks_free=2)), (other, demand))
    assert (propose.request_id, propose.target, propose.for_request_id) == (HELD.request_id, None, "large")
    assert await heard(replica, Weigh) == Weigh(WEIGH_FOR_S), "it is to say what it holds, whatever room it has"
    while not elsewhere.heard.empty():
        assert not isinstance(elsewhere.heard.get_nowait(), Weigh), "of its model nothing waits"


async def test_where_its_router_keeps_who_is_to_make_room_another_is_asked_at_once(place: Place) -> None:
    await place.start(control=ControlConfig(proposal_expiry_s=600))
    owner = Peer(place, "router", name="owner")
    await owner.followed()
    cheap, cheap_entry = await replica_here(place, "r1")
    dear, dear_entry = await replica_here(place, "r2")
    longer = msgspec.structs.replace(HELD, request_id=RequestId("longer"), tokens=9000)
    told = (
        (cheap, status(cheap_entry, HELD, blocks_free=2)),
        (dear, status(dear_entry, longer, blocks_free=2)),
        (owner, Unplaced("m", RequestId("large"), 10, 7, 1.0)),
    )
    first = await proposed_while(place, owner, *told)
    owner.link.ask(Stays(first.request_id, first.attempt, RequestId("large")))
    second = await proposed_while(place, owner, *told)
    assert (first.request_id, second.request_id) == (HELD.request_id, longer.request_id)


async def test_where_room_that_was_made_is_taken_by_what_runs_there_another_is_asked_at_once(place: Place) -> None:
    await place.start(control=ControlConfig(proposal_expiry_s=600))
    owner = Peer(place, "router", name="owner")
    await owner.followed()
    replica, entry = await replica_here(place, "r1")
    demand = (owner, Unplaced("m", RequestId("large"), 10, 7, 1.0))
    first = await proposed_while(place, owner, (replica, status(entry, HELD, blocks_free=2)), demand)
    owner.link.ask(Left(first.request_id, first.attempt, RequestId("large")))
    grown = msgspec.structs.replace(HELD, request_id=RequestId("grown"))
    steps = [(replica, status(entry, grown, blocks_free=2, steps=number)) for number in (1, 2)]
    second = await proposed_while(place, owner, *steps, demand)
    assert (first.request_id, second.request_id) == (HELD.request_id, "grown")


async def test_nothing_is_proposed_by_a_controller_that_has_just_stood_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a second and more: what replicas have said meanwhile is not read yet."""
    clock, made = SystemClock(), list[float]()
    server = ControllerServer(SECRET, clock)

    def tick(now_s: float) -> tuple[Proposal, ...]:
        made.append(now_s)
        return ()

    monkeypatch.setattr(server._control, "tick", tick)
    monkeypatch.setattr(server, "_peers", {object()})
    monkeypatch.setattr(server, "_term", Term(0, "u", Generation(1, "u"), Generation(1, "u")))
    monkeypatch.setattr(server, "_beat_s", math.inf)  # it tells nobody
    for late_s in (0.6, 5.0):
        server._tick(clock.monotonic() - late_s)
        assert made == []
        assert server._ticking is not None, "the next one is in time"
        server._ticking.cancel()
    server._tick(clock.monotonic())
    assert len(made) == 1
    assert server._ticking is not None
    server._ticking.cancel()


async def test_a_replica_that_tells_what_cannot_be_loses_its_link_and_is_forgotten_whole(place: Place) -> None:
    await place.start()
    router, replica = Peer(place, "router"), Peer(place, "replica")
    await replica.followed()
    replica.link.tell(ReplicaHere(entry=ENTRY, pid=7))
    await heard(router, Roster, lambda roster: roster.entries)
    told = status(ENTRY, HeldRequest(RequestId("a"), 1, RouterId("router-1"), 0, Standing.RUNS, 1, 8, 8, 0), running=1)
    report = msgspec.structs.replace(told.report, load=msgspec.structs.replace(told.report.load, block_size_tokens=0))
    replica.link.tell(msgspec.structs.replace(told, report=report))
    await heard(router, Roster, lambda roster: not roster.entries)
    again = Peer(place, "replica", name="r1 again")
    await again.followed()
    again.link.tell(ReplicaHere(entry=ENTRY, pid=7))
    again.link.tell(status(ENTRY))
    again.link.ask(StatusRequest(1))
    async with asyncio.timeout(10):
        (replica_seen,) = (await heard(again, ClusterStatus)).replicas
    assert replica_seen.report == status(ENTRY).report
