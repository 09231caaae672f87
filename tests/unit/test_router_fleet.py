"""Where work goes in a large fleet: a place is found where there is one, load is even, and prompts find their caches."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from cluster.config import RouterConfig
from cluster.messages import StepFrame
from cluster.types import (
    EngineLoad,
    Generation,
    PriorityLoad,
    ReplicaId,
    ReplicaReport,
    ReplicaState,
    Request,
    RequestId,
)
from router.affinity import Affinity, keys_of
from router.fleet import SCAN_REPLICAS, Fleet, IdSet, New, _room_of
from router.routing import Need, Placement, choose, prompts_ahead
from router.terms import Terms
from router.view import Replica, ReplicaView, Reservation
from tests.unit.fake_replica import Bench, FakeReplica
from tests.unit.test_router_prefixes import hashes, held

BLOCK = 16
BENCH = Bench()
"""Whose core the ports name as their listener; nothing is sent over them here."""


def report(port: FakeReplica, engine: EngineLoad, applied: int = 0) -> ReplicaReport:
    return ReplicaReport(
        replica_id=port.replica_id,
        generation=port.generation,
        state=ReplicaState.READY,
        observed_unix_s=0.0,
        load=engine,
        step_age_s=None,
        applied_sequence=applied,
    )


def joined(fleet: Fleet, name: str, engine: EngineLoad) -> Replica:
    port = FakeReplica(BENCH.core, ReplicaId(name))
    linked = fleet.linked(port, 0.0)
    assert isinstance(linked, New)
    linked.replica.observe(report(port, engine), 0.0)
    return linked.replica


def some_load(rng: random.Random) -> EngineLoad:
    slots, blocks = rng.randint(1, 4), rng.randint(2, 20)
    levels: list[PriorityLoad] = []
    free = blocks
    for priority in (-10, 0, 10):
        count = rng.randint(0, slots - sum(level.requests for level in levels))
        filled = rng.randint(0, free) if count else 0
        if count:
            levels.append(PriorityLoad(priority, count, filled))
            free -= filled
    waiting = (PriorityLoad(-10, 1, 0),) if rng.random() < 0.2 else ()
    return EngineLoad(
        slots_total=slots, blocks_total=blocks, blocks_free=free, block_size_tokens=BLOCK, running=tuple(levels),
        waiting=waiting,
    )  # fmt: skip


@pytest.mark.parametrize("replicas", [8, 100])
@pytest.mark.parametrize("seed", range(6))
def test_place_is_found_exactly_where_a_look_at_all_replicas_finds_one(replicas: int, seed: int) -> None:
    """While reports come, attempts begin and end, links break and replicas go, and the same needs are asked again."""
    rng = random.Random(seed)
    config = RouterConfig(silent_after_s=1e6, fenced_after_s=1e7)
    fleet = Fleet(config)
    members = [joined(fleet, f"r{k:03}", some_load(rng)) for k in range(replicas)]
    reserved: list[tuple[Replica, RequestId]] = []
    needs = [Need(p, BLOCK * t, BLOCK * t) for p in (-10, 0, 10) for t in (1, 6, 14)]
    found = Counter[bool]()
    for k in range(1500):
        replica, action = rng.choice(members), rng.random()
        if action < 0.25:
            replica.observe(report(FakeReplica(BENCH.core, replica.replica_id), some_load(rng), k), 0.0)
        elif action < 0.3:
            replica.link_up = not replica.link_up
        elif action < 0.35:
            replica.back_off()
        elif action < 0.5 and reserved:
            holder, name = reserved.pop(rng.randrange(len(reserved)))
            if name in holder.reservations:
                holder.release(name)
        elif action < 0.52 and len(members) > 2:
            members.remove(replica)
            fleet.forget(replica)
        elif action < 0.54:
            members.append(joined(fleet, f"n{k:04}", some_load(rng)))
        need = rng.choice(needs)
        views = fleet.views(0.0)
        placed = fleet.place(need, 0.0, rng)
        best = choose(need, views, rng)
        assert (placed is None) is (best is None)
        found[placed is not None] += 1
        if placed is None or best is None:
            continue
        (view,) = (v for v in views if v.replica_id == placed.replica_id)
        assert choose(need, [view], rng) == placed, "it is a place by the same rules"
        if any(is_free(need, v) for v in views):
            assert is_free(need, view), "a free place is preferred to one that is made"
        if rng.random() < 0.5:
            target = fleet[placed.replica_id]
            name = RequestId(f"q{k}")
            target.reserve(name, Reservation(1, k + 1, need.priority, placed.blocks))
            reserved.append((target, name))
    assert min(found[True], found[False]) > 100


def test_free_place_is_found_behind_more_replicas_than_are_looked_at_at_once_that_only_seem_to_have_one() -> None:
    """Those have refused something, which no index knows; elsewhere lesser work would give way."""
    rng, need = random.Random(0), Need(10, BLOCK, BLOCK)
    fleet = Fleet(RouterConfig(silent_after_s=1e6, fenced_after_s=1e7))
    idle = EngineLoad(slots_total=4, blocks_total=20, blocks_free=20, block_size_tokens=BLOCK)
    full = msgspec.structs.replace(idle, blocks_free=16, running=(PriorityLoad(-10, 4, 4),))
    for k in range(10):
        joined(fleet, f"full{k}", full)
    for k in range(3 * SCAN_REPLICAS):
        joined(fleet, f"refused{k:03}", idle).back_off()
    joined(fleet, "free", idle)
    assert [fleet.place(need, 0.0, rng).replica_id for _ in range(20)] == ["free"] * 20  # type: ignore[union-attr]


def is_free(need: Need, view: ReplicaView) -> bool:
    placed = choose(need, [view], random.Random(0))
    return placed is not None and placed.free


def test_room_rises_with_tokens_and_the_largest_of_one_room_is_less_than_an_eighth_larger_than_the_least() -> None:
    rooms = [_room_of(tokens) for tokens in range(5000)]
    assert rooms == sorted(rooms)
    for room in set(rooms):
        least = rooms.index(room)
        assert least + rooms.count(room) - 1 < max(1, least) * 9 / 8


def test_no_work_of_any_priority_finds_more_blocks_free_than_the_most_that_are_said_to_be() -> None:
    """Over random reports, and attempts that they count, that they do not count yet, and that are parked there."""
    rng = random.Random(6)
    met = 0
    for _ in range(400):
        engine = msgspec.structs.replace(some_load(rng), slots_total=1000)
        replica = joined(Fleet(RouterConfig()), "r", engine)
        replica.observe(report(FakeReplica(BENCH.core, ReplicaId("r")), engine, applied=2), 0.0)
        for number in range(1, rng.randint(1, 5)):
            parked = rng.random() < 0.3
            reservation = Reservation(1, number, rng.choice((-10, 0, 10)), rng.randint(1, 6), parked)
            replica.reserve(RequestId(f"{number}"), reservation)
        view, rng_of_ties = replica.view(RouterConfig(), 0.0), random.Random(0)
        for priority in (-10, 0, 10, 20):
            for blocks in range(1, engine.blocks_total + 1):
                wanted = Need(priority, BLOCK * blocks, BLOCK * blocks)
                if choose(wanted, [view], rng_of_ties, free=True) is not None:
                    assert blocks <= replica.blocks_free_most()
                    met += blocks == replica.blocks_free_most()
    assert met > 200


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5])
def test_of_many_replicas_few_are_looked_at_though_blocks_are_all_that_is_short(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand with free slots, whose blocks are full of lesser work but for a share of them; each request takes a free place
    where there is one, and never are more looked at than two, two and two."""
    rng = random.Random(2)
    fleet = Fleet(RouterConfig())
    full = EngineLoad(
        slots_total=9, blocks_total=90, blocks_free=3, block_size_tokens=BLOCK, running=(PriorityLoad(-10, 3, 87),)
    )
    for number in range(1000):
        joined(fleet, f"r{number}", msgspec.structs.replace(full, blocks_free=40 if rng.random() < share else 3))
    looks: list[int] = []

    def counted(need: Need, views: Sequence[ReplicaView], *rest: Any, **kinds: Any) -> Placement | None:
        looks.append(len(views))
        return choose(need, views, *rest, **kinds)

    monkeypatch.setattr("router.fleet.choose", counted)
    for number in range(60):
        looks.clear()
        placed = fleet.place(Need(0, 4 * BLOCK, 4 * BLOCK), 0.0, rng)
        assert placed is not None
        assert placed.free is (share > 0)
        assert sum(looks) <= 6
        reservation = Reservation(1, number + 1, 0, placed.blocks)
        fleet[placed.replica_id].reserve(RequestId(f"{number}"), reservation)


@pytest.mark.parametrize("replicas", [8, 100])
def test_size_that_no_pool_could_hold_is_known_as_replicas_come_and_go(replicas: int) -> None:
    fleet = Fleet(RouterConfig())
    need = Need(0, BLOCK, BLOCK * 7)
    assert not fleet.too_large(need), "nothing known says nothing"
    engine = EngineLoad(slots_total=1, blocks_total=6, blocks_free=6, block_size_tokens=BLOCK)
    for k in range(replicas):
        joined(fleet, f"r{k}", engine)
    assert fleet.too_large(need)
    larger = joined(fleet, "l", EngineLoad(slots_total=1, blocks_total=7, blocks_free=7, block_size_tokens=BLOCK))
    assert not fleet.too_large(need)
    fleet.forget(larger)
    assert fleet.too_large(need)


def test_two_drawn_keep_a_large_fleet_nearly_as_even_as_looking_at_all() -> None:
    """10,000 requests of one block over 200 replicas: 50 each. One drawn would leave the fullest near 70; two leave it
    within log log 200 / log 2 = 2.4 of the mean, and a constant (Mitzenmacher)."""
    rng = random.Random(1)
    fleet = Fleet(RouterConfig())
    engine = EngineLoad(slots_total=1000, blocks_total=1000, blocks_free=1000, block_size_tokens=BLOCK)
    for k in range(200):
        joined(fleet, f"r{k:03}", engine)
    counts = Counter[ReplicaId]()
    for k in range(10_000):
        placed = fleet.place(Need(0, BLOCK, BLOCK), 0.0, rng)
        assert placed is not None
        fleet[placed.replica_id].reserve(RequestId(f"{k}"), Reservation(1, k + 1, 0, 1))
        counts[placed.replica_id] += 1
        if k % 200 == 199:  # what is sent is soon counted by reports; otherwise summaries would be made of all of it
            settle(fleet)
    assert max(counts.values()) - 50 <= 6


def settle(fleet: Fleet) -> None:
    """Every attempt so far is counted by its replica's report, and no longer by the router."""
    for replica in fleet:
        assert replica.report is not None
        load = replica.report.load
        ran = sum(level.requests for level in load.running) + len(replica.reservations)
        for name in list(replica.reservations):
            replica.release(name)
        engine = EngineLoad(
            slots_total=load.slots_total, blocks_total=load.blocks_total, blocks_free=load.blocks_total - ran,
            block_size_tokens=BLOCK, running=(PriorityLoad(0, ran, ran),),
        )  # fmt: skip
        replica.observe(report(FakeReplica(BENCH.core, replica.replica_id), engine), 0.0)


def test_two_different_ids_are_drawn_and_every_pair_can_be() -> None:
    ids = IdSet()
    for name in "abcd":
        ids.add(ReplicaId(name))
    ids.discard(ReplicaId("b"))
    ids.discard(ReplicaId("never there"))
    rng = random.Random(0)
    pairs = {tuple(sorted(ids.two(rng))) for _ in range(200)}
    assert pairs == {("a", "c"), ("a", "d"), ("c", "d")}
    assert len(ids) == 3


def test_prompts_that_were_sent_are_counted_until_a_report_counts_them() -> None:
    engine = EngineLoad(slots_total=9, blocks_total=99, blocks_free=99, block_size_tokens=BLOCK, step_tokens=100)
    fleet = Fleet(RouterConfig())
    replica = joined(fleet, "a", engine)
    for number, (priority, tokens) in enumerate([(0, 50), (10, 200), (0, 25)], start=1):
        reservation = Reservation(1, number, priority, 1, prompt_tokens=tokens)
        replica.reserve(RequestId(f"{number}"), reservation)

    def ahead() -> list[int]:
        return [prompts_ahead(priority, replica.view(RouterConfig(), 0.0)) for priority in (-10, 0, 10)]

    assert ahead() == [275, 275, 200]
    replica.release(RequestId("3"))
    assert ahead() == [250, 250, 200]
    port = replica.port
    assert isinstance(port, FakeReplica)
    told = msgspec.structs.replace(engine, running=(PriorityLoad(0, 1, 1, 30),))
    replica.observe(report(port, told, applied=1), 0.0)
    assert ahead() == [230, 230, 200], "the report counts what is left of the first one"


@pytest.mark.parametrize("replicas", [60, 100])
def test_where_few_have_a_free_slot_not_all_wait_there_while_lesser_work_could_make_room(replicas: int) -> None:
    """Replicas of one slot, all but two of them full of batch work; each request brings two steps of prompts."""
    lesser = EngineLoad(slots_total=1, blocks_total=99, blocks_free=98, block_size_tokens=BLOCK, step_tokens=100)
    lesser = msgspec.structs.replace(lesser, running=(PriorityLoad(-10, 1, 1),))
    free = msgspec.structs.replace(lesser, slots_total=99)
    fleet, rng = Fleet(RouterConfig()), random.Random(3)
    for number in range(replicas):
        joined(fleet, f"{number}", free if number < 2 else lesser)
    taken: list[ReplicaId] = []
    for number in range(20):
        placed = fleet.place(Need(0, BLOCK, BLOCK, prompt_tokens=200), 0.0, rng)
        assert placed is not None
        reservation = Reservation(1, number + 1, 0, 1, prompt_tokens=200)
        fleet[placed.replica_id].reserve(RequestId(f"{number}"), reservation)
        taken.append(placed.replica_id)
    assert max(taken.count(name) for name in taken) == 1


# --- affinity ---


def test_favoured_replica_is_taken_until_it_is_so_much_fuller() -> None:
    engine = EngineLoad(slots_total=10, blocks_total=100, blocks_free=100, block_size_tokens=BLOCK)
    fleet = Fleet(RouterConfig())
    for name in ("a", "b"):
        joined(fleet, name, engine)
    favour = {ReplicaId("b"): 0.25}
    rng = random.Random(0)
    taken = []
    for k in range(4):
        placed = fleet.place(Need(0, BLOCK, BLOCK), 0.0, rng, favour)
        assert placed is not None
        taken.append(placed.replica_id)
        fleet[placed.replica_id].reserve(RequestId(f"{k}"), Reservation(1, k + 1, 0, 1))
    assert taken == ["b", "b", "b", "a"], "with two tenths more than the other it is still taken, with three it is not"
    assert fleet.place(Need(0, BLOCK * 100, BLOCK * 100), 0.0, rng, favour) is None


@pytest.mark.parametrize("by", ["session", "prompt"])
def test_later_request_goes_where_its_beginning_was_computed(by: str) -> None:
    bench = Bench(RouterConfig(expected_output_tokens=1))
    replicas = [bench.replica(f"r{k}", slots=50, blocks=10_000) for k in range(5)]
    terms = Terms(session="talk") if by == "session" else Terms()
    prompt = 8 if by == "session" else 200
    went: Counter[str] = Counter()
    for k in range(6):
        request = bench.submit(f"q{k}", tokens=1, prompt=prompt, terms=terms)
        for replica in replicas:
            went[replica.replica_id] += sum(r.request_id == request.request_id for r, _ in replica.added)
            replica.turn()
    assert sorted(went.values()) == [0, 0, 0, 0, 6]


def test_what_is_held_of_a_prompt_is_worth_the_steps_that_it_would_fill_beside_what_decodes_there() -> None:
    """90 decode beside it, of a step of 128 tokens: the 176 that are left of its prompt fill 5 steps, and all elsewhere 9."""
    bench = Bench(RouterConfig(expected_output_tokens=1))
    busy = bench.replica("busy", slots=100, blocks=10_000, step_tokens=128)
    bench.submit("first", tokens=1, prompt=1200)
    busy.turn()
    for k in range(90):
        bench.submit(f"{k}", tokens=1000, tenant="other")
    busy.turn()
    idle = bench.replica("idle", slots=100, blocks=10_000, step_tokens=128)
    bench.submit("next", tokens=1, prompt=1200)
    assert (len(busy.added), len(idle.added)) == (92, 0)


@pytest.mark.parametrize(("ahead", "follows"), [(19, True), (22, False)])
def test_request_waits_for_two_steps_where_that_spares_one_and_no_longer(ahead: int, follows: bool) -> None:
    """Ten steps of its prompt are held where so many stand ahead; elsewhere nothing is."""
    bench = Bench(RouterConfig(expected_output_tokens=1, affinity_weight=1e-9))
    holder = bench.replica("holder", slots=100, blocks=10_000, step_tokens=160)
    bench.submit("first", tokens=1, prompt=1601)
    holder.turn()
    told = StepFrame(holder.report(), prefixes=held(hashes(tuple(range(1, 1602)), block=BLOCK), afresh=True))
    bench.core.frame(holder.replica_id, holder.generation, told)
    bench.submit("ahead", "standard", tokens=9, prompt=160 * ahead, tenant="other")
    idle = bench.replica("idle", slots=100, blocks=10_000, step_tokens=160)
    bench.submit("next", tokens=1, prompt=1601)
    assert (len(holder.added), len(idle.added)) == ((3, 0) if follows else (2, 1))


def test_what_a_lost_replica_had_draws_nothing_to_its_successor() -> None:
    bench = Bench(RouterConfig(expected_output_tokens=1))
    first, other = bench.replica("r1"), None
    bench.submit("q0", tokens=1, terms=Terms(session="talk"))
    first.turn()
    first.die()
    successor = bench.replica("r1", generation=Generation(2, "b"), slots=4)
    other = bench.replica("r2", slots=5)
    bench.submit("q1", tokens=1, terms=Terms(session="talk"))
    assert (len(successor.added), len(other.added)) == (0, 1), "the less full one"


def request_of(tenant: str, prompt: int) -> Request:
    return Bench().submit("q", tenant=tenant, prompt=prompt)


def test_keys_are_of_one_tenant_and_longest_first() -> None:
    """Beginnings of 1,024, 256 and 64 tokens."""
    affinity = Affinity(100)
    affinity.served(keys_of(request_of("a", 300), ""), ReplicaId("r"), Generation(1, "a"), 300)
    longer = affinity.expected(keys_of(request_of("a", 2000), ""), 2000)
    assert longer is not None
    assert (longer.replica_id, longer.tokens) == ("r", 256)
    assert affinity.expected(keys_of(request_of("b", 2000), ""), 2000) is None
    assert affinity.expected(keys_of(request_of("a", 63), ""), 63) is None


def test_sessions_are_remembered_up_to_a_bound_and_the_unused_are_forgotten_first() -> None:
    affinity = Affinity(3)
    request = request_of("a", 8)
    for name in ("s1", "s2", "s3", "s1", "s4"):
        affinity.served(keys_of(request, name), ReplicaId(name), Generation(1, "a"), 8)
    assert len(affinity) == 3
    known = {name: affinity.expected(keys_of(request, name), 8) is not None for name in ("s1", "s2", "s3", "s4")}
    assert known == {"s1": True, "s2": False, "s3": True, "s4": True}


def test_affinity_takes_no_work_to_a_replica_without_room() -> None:
    bench = Bench(RouterConfig(expected_output_tokens=1))
    first, second = bench.replica("r1", slots=1), bench.replica("r2", slots=1)
    went = []
    for k in range(2):
        bench.submit(f"q{k}", tokens=9, terms=Terms(session="talk"))
        went.append((len(first.added), len(second.added)))
    assert went[1] == (1, 1)
    assert Placement(ReplicaId("r"), 1, score=0.5) == Placement(ReplicaId("r"), 1), "a score is told, not compared"
