"""Two controllers at once, over real links: both hear all, one speaks, and the other knows all when it is its turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial

import msgspec
import pytest

from cluster.control.leader import SILENT_S
from cluster.messages import (
    ClusterStatus,
    DrainAsk,
    DrainOrder,
    DrainTold,
    Gate,
    Gates,
    Granted,
    ReplicaHere,
    ReplicaStatus,
    Roster,
    StatusRequest,
)
from cluster.types import ReplicaId
from deployments.controller_server import ControllerServer
from tests.line import until
from tests.unit.links.test_controller_links import ENTRY, URGENT, Peer, Place, heard, status


@dataclass
class Two:
    """Two places and what is linked to both."""

    first: Place
    second: Place

    def peer(self, role: str, name: str, *, talks: bool = True) -> Peer:
        """One that `talks` says something again and again, as all do: something that is nothing of its role's."""
        peer = Peer(self.first, role, name=name, finds=(self.first.find, self.second.find))
        word = ReplicaStatus(status(ENTRY).report) if role == "router" else URGENT

        async def say() -> None:
            while True:
                peer.link.tell(word)
                await asyncio.sleep(0.1)

        if talks:
            self.first.tasks.append(asyncio.create_task(say()))
        return peer

    @property
    def servers(self) -> tuple[ControllerServer, ControllerServer]:
        return self.first.servers[-1], self.second.servers[-1]

    async def until_leads(self, *leads: bool) -> None:
        async def now() -> tuple[bool, ...]:
            return tuple(server.leads for server in self.servers)

        await until(now, leads.__eq__)


@pytest.fixture
async def two() -> AsyncIterator[Two]:
    both = Two(Place(), Place())
    await both.first.start(number=0)
    await both.second.start(number=1)
    yield both
    for task in both.first.tasks:
        task.cancel()
    await asyncio.gather(*both.first.tasks, return_exceptions=True)
    for place in (both.first, both.second):
        for acceptor in place.acceptors:
            await acceptor.close()


async def test_the_one_that_stood_by_knows_every_replica_the_moment_it_leads_and_goes_on_with_gates_and_drains(
    two: Two,
) -> None:
    router, busy, replica = two.peer("router", "idle"), two.peer("router", "busy"), two.peer("replica", "r1")
    granted = await heard(replica, Granted)
    await two.until_leads(True, False)
    entry = msgspec.structs.replace(ENTRY, generation=granted.generation)
    for peer in (router, busy, replica):
        await until(partial(linked, peer), (2).__eq__)
    replica.link.tell(ReplicaHere(entry=entry, pid=7))
    assert await heard(router, Roster, lambda roster: roster.entries) == Roster((entry,))
    assert replica.heard.empty(), "one generation, and from one of them"
    replica.link.tell(status(entry))

    async def known_to_the_second() -> list[ReplicaId]:
        return [peer.entry.replica_id for peer in two.servers[1]._peers if peer.entry and peer.report]

    await until(known_to_the_second, [entry.replica_id].__eq__)
    await two.first.acceptors[-1].close()
    assert await heard(router, Roster) == Roster((entry,)), "whole at once"
    assert two.servers[1].leads
    assert router.link.ask(StatusRequest(1))
    (summary,) = (await heard(router, ClusterStatus)).replicas
    assert (summary.entry, summary.report) == (entry, status(entry).report)

    async def say() -> None:
        while True:
            busy.link.tell(URGENT)
            await asyncio.sleep(0.02)

    two.first.tasks.append(saying := asyncio.create_task(say()))
    assert (await heard(router, Gates, lambda gates: gates.gate)).gate == Gate(10, 0)
    saying.cancel()
    assert router.link.ask(DrainAsk(1, "r1", True))
    assert await heard(router, DrainTold) == DrainTold(1, (ReplicaId("r1"),))
    assert await heard(replica, DrainOrder) == DrainOrder(drain=True)

    newcomer = two.peer("replica", "r2")
    assert (await heard(newcomer, Granted)).generation.number == entry.generation.number + 1
    await two.first.start(number=0)
    await until(partial(linked, router), (2).__eq__)
    await asyncio.sleep(SILENT_S)  # longer than it needs to lead where nobody is heard
    await two.until_leads(False, True)


async def linked(peer: Peer) -> int:
    return peer.link.linked


async def test_a_replica_that_comes_while_nobody_leads_has_its_generation_from_whoever_leads_next(two: Two) -> None:
    """The first is there, and cannot be reached."""
    lonely = Place()
    first, two.first = two.first, lonely
    replica = two.peer("replica", "r1")
    two.first = first
    first.tasks += lonely.tasks
    assert (await heard(replica, Granted)).generation.number == 1
    await two.until_leads(False, True)


@pytest.mark.parametrize("stood_by", [False, True])
async def test_where_only_replicas_are_linked_that_have_no_generation_yet_and_say_nothing_the_second_leads_in_time(
    two: Two, stood_by: bool
) -> None:
    """Within five seconds, and within two where it had stood by. Such a replica has nothing to report."""
    if stood_by:
        before = two.peer("replica", "r0")
        await heard(before, Granted)
        await until(partial(linked, before), (2).__eq__)
        await until(partial(stands_by, two.servers[1]), bool)
        for task in two.first.tasks:
            task.cancel()
        before.abort()
    await two.first.acceptors[-1].close()
    two.first.address = None
    replicas = [two.peer("replica", name, talks=False) for name in ("r1", "r2")]
    async with asyncio.timeout(2.0 if stood_by else 5.0):
        granted = [(await heard(replica, Granted)).generation.number for replica in replicas]
    assert sorted(granted) in ([1, 2], [2, 3])
    assert two.servers[1].leads


async def stands_by(server: ControllerServer) -> bool:
    return server._term.stood_by


async def test_serve_is_told_something_only_while_most_of_what_runs_there_has_just_said_that_it_hears_who_leads(
    two: Two,
) -> None:
    router = two.peer("router", "router", talks=False)
    replicas = [two.peer("replica", f"r{n}", talks=False) for n in range(3)]
    names = [ReplicaId(f"r{n}") for n in range(3)]
    for replica, name in zip(replicas, names, strict=True):
        granted = await heard(replica, Granted)
        entry = msgspec.structs.replace(ENTRY, replica_id=name, generation=granted.generation)
        replica.link.tell(ReplicaHere(entry=entry, pid=7))
    leader, standby = two.servers
    told: list[Peer] = [router, *replicas]

    async def vouched() -> list[bool]:
        """By all; by none of whom it knows most; where nothing runs, by the router."""
        for peer in told:
            peer.link.tell(ReplicaStatus(status(ENTRY).report))  # any word
        running = (frozenset(names), frozenset({names[0], ReplicaId("x"), ReplicaId("y")}), frozenset[ReplicaId]())
        return [leader.vouched_by(which) for which in running]

    await until(vouched, [True, False, True].__eq__)
    assert not standby.vouched_by(frozenset(names))
    del told[0]
    await until(vouched, [True, False, False].__eq__)
    del told[0]
    await asyncio.sleep(1)
    await until(vouched, [True, False, False].__eq__, within_s=5)
    del told[0]
    await until(vouched, [False, False, False].__eq__, within_s=5)
    assert leader.leads, "it is heard, and goes on with all that can be refused"
