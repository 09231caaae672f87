"""Room is made for a request that fits nowhere by those who lose least by it, and for no other reason."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cluster.config import ControlConfig
from cluster.control.preempt import EXACT_MAX, SEARCH_MAX, UNPLACED_TICKS, decide
from cluster.control.view import ClusterView, Demand, Replica, Underway, blocks_of, frees, takes
from cluster.messages import HeldRequest, Standing
from cluster.types import PriorityLoad, ReplicaId, ReplicaState, RequestId, RouterId
from tests.unit.control_kit import (
    NOW_S,
    demand,
    paused,
    replica,
    request,
    shuffled,
    some_fleet,
    view,
    waits,
)

CONFIG = ControlConfig()


def who_leaves(
    seen: ClusterView, config: ControlConfig = CONFIG, now_s: float = NOW_S
) -> list[tuple[str, str, str | None]]:
    return sorted((u.proposal.request_id, u.proposal.source, u.proposal.target) for u in decide(seen, config, now_s))


def small(name: str, *held: HeldRequest, slots: int = 8, blocks: int = 20, **more: object) -> Replica:
    return replica(name, *held, slots=slots, blocks=blocks, **more)  # type: ignore[arg-type]


def one(name: str, *, priority: int = 0, blocks: int = 10, remaining: int = 1) -> HeldRequest:
    """A request whose last block is not full: it fills no other."""
    return request(name, priority=priority, blocks=blocks, tokens=blocks * 16 - 1, remaining=remaining)


# --- who leaves ---


def test_the_cheapest_of_those_who_are_enough_leaves_and_no_other() -> None:
    held = [one("a", blocks=3), one("b", blocks=5), one("c", blocks=6), one("d", blocks=6, priority=10)]
    assert who_leaves(view(small("r", *held), demands=[demand(blocks=5)])) == [("b", "r", None)]
    assert who_leaves(view(small("r", *held), demands=[demand(blocks=3)])) == [("a", "r", None)]
    assert who_leaves(view(small("r", *held), demands=[demand(blocks=8)])) == [("a", "r", None), ("b", "r", None)]
    assert who_leaves(view(small("r", *held), demands=[demand(blocks=14)])) == [(n, "r", None) for n in "abc"]
    assert who_leaves(view(small("r", *held), demands=[demand(blocks=15)])) == []


def test_what_is_free_there_counts() -> None:
    held = [one("a", blocks=3), one("b", blocks=5)]
    assert who_leaves(view(small("r", *held, blocks=10), demands=[demand(blocks=5)])) == [("a", "r", None)]


def test_who_is_as_urgent_is_never_parked() -> None:
    held = [one("a", priority=10, blocks=5), one("b", priority=11, blocks=5), one("c", priority=9, blocks=10)]
    assert who_leaves(view(small("r", *held), demands=[demand(priority=10, blocks=10)])) == [("c", "r", None)]
    assert who_leaves(view(small("r", *held), demands=[demand(priority=9, blocks=10)])) == []


def test_shared_blocks_are_not_freed() -> None:
    shares = request("a", blocks=2, tokens=8 * 16 - 1, remaining=1)
    alone = one("b", blocks=12)
    assert who_leaves(view(small("r", shares, alone, blocks=14), demands=[demand(blocks=3)])) == [("b", "r", None)]
    assert who_leaves(view(small("r", shares, blocks=2), demands=[demand(blocks=2)])) == [("a", "r", None)]


def test_blocks_that_the_others_are_still_to_fill_are_no_room_for_the_demand() -> None:
    grows = request("grows", priority=10, blocks=10, remaining=80)  # 5 blocks more
    assert who_leaves(view(small("r", grows, one("a", blocks=5), blocks=20), demands=[demand(blocks=5)])) == [
        ("a", "r", None)
    ]
    assert who_leaves(view(small("r", grows, one("a", blocks=4), blocks=19), demands=[demand(blocks=5)])) == []


def test_over_all_replicas_the_one_where_it_costs_least_is_taken() -> None:
    dear = small("a", one("dear", blocks=20))
    cheap = small("b", one("cheap", blocks=12), one("urgent", blocks=8, priority=10))
    assert who_leaves(view(dear, cheap, demands=[demand(blocks=12)])) == [("cheap", "b", None)]
    assert who_leaves(view(dear, cheap, demands=[demand(blocks=13)])) == [("dear", "a", None)]


def test_a_slot_is_made_free_where_only_slots_are_lacking() -> None:
    held = [one("a", blocks=9), one("b", blocks=2), paused("p", blocks=1, priority=-10)]
    full = small("r", *held, slots=2, blocks=100)
    assert who_leaves(view(full, demands=[demand(blocks=5)])) == [("b", "r", None)]


def test_what_is_paused_is_parked_before_what_runs_as_long() -> None:
    held = [one("runs", blocks=10), paused("paused", blocks=10)]
    assert who_leaves(view(small("r", *held), demands=[demand(blocks=10)])) == [("paused", "r", None)]


@pytest.mark.parametrize(("blocks", "target"), [(12, "t"), (11, None)])
def test_a_victim_moves_where_there_is_room_for_it_and_parks_where_there_is_none(
    blocks: int, target: str | None
) -> None:
    here = small("r", one("a", blocks=12), one("b", priority=10, blocks=5))
    assert who_leaves(view(here, small("t", blocks=blocks), demands=[demand(blocks=15)])) == [("a", "r", target)]


def test_those_who_move_to_one_place_must_all_have_room_there() -> None:
    here = small("r", one("a", blocks=8), one("b", blocks=8), one("c", priority=10, blocks=4))
    asked = [demand(blocks=16)]
    assert who_leaves(view(here, small("t", blocks=15), demands=asked)) == [("a", "r", "t"), ("b", "r", None)]
    one_slot = small("t", slots=1, blocks=15)
    assert who_leaves(view(here, one_slot, demands=asked)) == [("a", "r", "t"), ("b", "r", None)]


def test_free_room_in_two_places_is_brought_together_in_one() -> None:
    """Nobody is less urgent than the demand, and there are 12 blocks: 6 here and 6 there."""
    here = small("here", one("a", priority=10, blocks=10), one("b", priority=20, blocks=4))
    there = small("there", one("c", priority=10, blocks=14))
    assert who_leaves(view(here, there, demands=[demand(priority=0, blocks=10)])) == [("b", "here", "there")]
    assert who_leaves(view(here, there, demands=[demand(priority=0, blocks=11)])) == []


def test_the_more_urgent_leave_only_where_the_less_urgent_are_not_enough_anywhere() -> None:
    here = small("here", one("a", priority=20, blocks=10))
    there = small("there", one("b", priority=0, blocks=16))
    assert who_leaves(view(here, there, small("t", blocks=10), demands=[demand(priority=10, blocks=15)])) == [
        ("b", "there", None)
    ]
    urgent = small("there", one("b", priority=10, blocks=16))
    assert who_leaves(view(here, urgent, small("t", blocks=10), demands=[demand(priority=10, blocks=15)])) == [
        ("a", "here", "t")
    ]


# --- when nobody leaves ---


@pytest.mark.parametrize("ticks", [UNPLACED_TICKS, UNPLACED_TICKS + 0.1])
def test_a_demand_must_be_older_than_two_ticks(ticks: float) -> None:
    seen = view(small("r", one("a")), demands=[demand(blocks=15, waits_s=ticks * CONFIG.tick_s)])
    assert bool(who_leaves(seen)) is (ticks > UNPLACED_TICKS)


def test_nobody_leaves_for_what_a_replica_seems_to_have_room_for_until_that_must_have_shown() -> None:
    """Its router knows of something on its way there."""
    seen = (small("r", one("a", blocks=10)), small("roomy", blocks=12))
    expiry_s = CONFIG.proposal_expiry_s
    assert who_leaves(view(*seen, demands=[demand(blocks=12, waits_s=0.9 * expiry_s)])) == []
    assert who_leaves(view(*seen, demands=[demand(blocks=12, waits_s=1.1 * expiry_s)])) == [("a", "r", "roomy")]


def test_a_demand_gets_no_other_proposals_while_the_first_are_on_their_way() -> None:
    def seen(at_s: float, lately: tuple[Underway, ...] = ()) -> ClusterView:
        replicas = [small(r, one(f"{r}1"), one(f"{r}2"), at_s=at_s) for r in ("r", "s")]
        return view(*replicas, demands=[demand(blocks=15, at_s=at_s)], lately=lately)

    lately = decide(seen(NOW_S), CONFIG, NOW_S)
    assert {u.proposal.source for u in lately} == {"r"}
    assert all(u.proposal.for_request_id == "urgent" for u in lately)
    before_s, after_s = (NOW_S + part * CONFIG.proposal_expiry_s for part in (0.9, 1.1))
    assert who_leaves(seen(before_s, lately), now_s=before_s) == []
    # Those two rest: the others leave.
    assert {source for _, source, _ in who_leaves(seen(after_s, lately), now_s=after_s)} == {"s"}


def test_two_demands_get_two_places_in_two_ticks() -> None:
    replicas = [small(r, one(f"{r}1"), one(f"{r}2")) for r in ("r", "s")]
    both = [demand("first", blocks=20), demand("second", blocks=20, router=RouterId("other"))]
    lately: tuple[Underway, ...] = ()
    for _ in range(3):
        lately += decide(view(*replicas, demands=both, lately=lately), CONFIG, NOW_S)
    gone = Counter((u.proposal.for_request_id, u.proposal.source) for u in lately)
    assert gone == {("first", "r"): 2, ("second", "s"): 2}


def test_where_room_is_made_for_one_demand_none_is_made_for_another() -> None:
    cheap = small("r", *(one(f"r{n}") for n in range(4)), blocks=40)
    dear = small("s", *(one(f"s{n}", blocks=15) for n in range(2)), blocks=30)
    first, second = demand("first", blocks=20), demand("second", blocks=20, router=RouterId("other"))
    assert {source for _, source, _ in who_leaves(view(cheap, dear, demands=[second]))} == {"r"}
    lately = decide(view(cheap, dear, demands=[first]), CONFIG, NOW_S)
    assert {source for _, source, _ in who_leaves(view(cheap, dear, demands=[first, second], lately=lately))} == {"s"}


def helped(*demands: Demand) -> set[RequestId | None]:
    """Of those that there is something to be done for, where 20 blocks can be made free and 6 are."""
    replicas = [small("r", one("a", priority=3)), small("roomy", blocks=6)]
    return {u.proposal.for_request_id for u in decide(view(*replicas, demands=demands), CONFIG, NOW_S)}


def test_a_demand_that_cannot_be_helped_keeps_no_other_from_it() -> None:
    hopeless = demand("hopeless", blocks=21, priority=4, waits_s=9, router=RouterId("1"))
    as_urgent = demand("as urgent", blocks=15, priority=4, waits_s=0.2, router=RouterId("2"))
    assert helped(hopeless) == set()
    assert helped(hopeless, as_urgent) == {"as urgent"}
    fits = demand("fits", blocks=6, priority=6, waits_s=0.5, router=RouterId("3"))
    assert helped(fits) == set()
    assert helped(fits, as_urgent) == {"as urgent"}


def test_of_equally_urgent_demands_the_one_that_has_waited_longest_goes_first() -> None:
    late = demand("a", blocks=15, waits_s=0.5)
    early = demand("b", blocks=15, waits_s=0.75, router=RouterId("other"))
    assert helped(late, early) == {"b"}


def test_the_more_urgent_demand_goes_first() -> None:
    seen = small("r", one("r1"), one("r2"))
    both = [demand("late", blocks=20, priority=5, waits_s=9), demand("now", blocks=20, router=RouterId("other"))]
    assert {u.proposal.for_request_id for u in decide(view(seen, demands=both), CONFIG, NOW_S)} == {"now"}


def test_nobody_leaves_where_the_room_would_go_to_somebody_else() -> None:
    for priority, goes in ((10, False), (9, True)):
        seen = small("r", one("a", blocks=20), waits("w", priority=priority))
        assert bool(who_leaves(view(seen, demands=[demand(blocks=15)]))) is goes


def test_nobody_leaves_a_replica_that_drains_or_is_silent_or_could_never_hold_the_demand() -> None:
    asked = [demand(blocks=15)]
    assert len(who_leaves(view(small("r", one("a")), demands=asked))) == 1
    assert who_leaves(view(small("r", one("a"), state=ReplicaState.DRAINING), demands=asked)) == []
    late_s = NOW_S - 1.01 * CONFIG.stale_after_s
    assert who_leaves(view(small("r", one("a"), at_s=late_s), demands=asked)) == []
    assert who_leaves(view(small("r", one("a")), demands=[demand(blocks=21)])) == []


def test_who_was_parked_as_often_as_it_may_be_is_not_parked_again_but_moves() -> None:
    held, asked = one("a", blocks=20), [demand(blocks=15)]
    for times, goes in ((CONFIG.max_parks - 1, True), (CONFIG.max_parks, False)):
        parks = {RequestId("a"): times}
        assert bool(who_leaves(view(small("r", held), demands=asked, parks=parks))) is goes
    here = small("r", held, one("b", priority=10, blocks=5), blocks=25)
    asked = [demand(blocks=20)]
    assert who_leaves(view(here, demands=asked, parks={RequestId("a"): CONFIG.max_parks})) == []
    roomy = small("t", one("t", priority=10, blocks=6), blocks=26, slots=2)
    assert (
        who_leaves(view(here, roomy, demands=[demand(blocks=21)], parks={RequestId("a"): CONFIG.max_parks})) == []
    )  # of 25 it needs more than 20
    asked = [demand(blocks=20, waits_s=9)]
    assert who_leaves(view(here, roomy, demands=asked, parks={RequestId("a"): CONFIG.max_parks})) == [("a", "r", "t")]


def test_what_holds_nothing_is_no_victim() -> None:
    seen = small("r", one("a", priority=10, blocks=15), waits("w", priority=0))
    assert who_leaves(view(seen, demands=[demand(blocks=6)])) == []


def test_what_is_not_told_of_one_by_one_cannot_leave() -> None:
    seen = small("r", one("a", blocks=4), more=[PriorityLoad(0, 1, 16)])
    assert who_leaves(view(seen, demands=[demand(blocks=5)])) == []
    assert who_leaves(view(seen, demands=[demand(blocks=4)])) == [("a", "r", None)]


# --- laws ---


@given(
    seed=st.integers(0, 2**32),
    demands=st.lists(st.tuples(st.sampled_from((-5, 0, 5, 20)), st.integers(1, 40)), min_size=1, max_size=3),
)
@settings(max_examples=400, deadline=None)
def test_whoever_leaves_is_needed_and_enough_and_has_somewhere_to_go(seed: int, demands: list[tuple[int, int]]) -> None:
    replicas = some_fleet(seed)
    asked = [
        demand(f"d{n}", priority=priority, blocks=blocks, router=RouterId(f"r{n}"))
        for n, (priority, blocks) in enumerate(demands)
    ]
    often = {h.request_id: seed % (CONFIG.max_parks + 2) for r in replicas for h in r.held[::2]}
    seen = view(*replicas, demands=asked, parks=often)
    proposed = decide(seen, CONFIG, NOW_S)
    by_id = {r.replica_id: r for r in replicas}
    assert len({u.proposal.request_id for u in proposed}) == len(proposed)
    come_slots, come_blocks = Counter[ReplicaId](), Counter[ReplicaId]()
    for u in proposed:
        if u.goes_to is not None:
            come_slots[u.goes_to] += 1
            come_blocks[u.goes_to] += u.takes_blocks
    for d in asked:
        mine = [u for u in proposed if u.proposal.for_request_id == d.told.request_id]
        if mine:
            (source,) = {u.proposal.source for u in mine}
            r = by_id[source]
            assert r.ready
            assert not any(level.priority >= d.told.priority for level in r.load.waiting)
            held = [next(h for h in r.held if h.request_id == u.proposal.request_id) for u in mine]
            assert _lacking(r, d, held, come_slots[source], come_blocks[source]) is False
            for left_out in held:
                others = [h for h in held if h is not left_out]
                assert _lacking(r, d, others, come_slots[source], come_blocks[source]) is True
            for u, h in zip(mine, held, strict=True):
                assert h.standing is not Standing.WAITS
                if u.proposal.target is None:
                    assert h.priority < d.told.priority
                    assert often.get(h.request_id, 0) < CONFIG.max_parks
                else:
                    t = by_id[u.proposal.target]
                    assert t.ready
                    assert t is not r
                    assert u.takes_blocks >= takes(h, t.load)
                    assert not any(level.priority >= h.priority for level in t.load.waiting)
                    running = sum(level.requests for level in t.load.running)
                    assert running + come_slots[t.replica_id] <= t.load.slots_total
                    assert come_blocks[t.replica_id] <= t.load.blocks_free
    other_order = view(*shuffled(replicas, seed), demands=asked[::-1], parks=often)
    assert decide(other_order, CONFIG, NOW_S) == proposed


def _lacking(r: Replica, d: Demand, gone: list[HeldRequest], come_slots: int, come_blocks: int) -> bool:
    """Whether the demand has no place there once these are gone, by what each of those who stay holds and is to fill."""
    fills = sum(
        blocks_of(h.tokens + h.to_compute_tokens + h.remaining_tokens, r.load) - blocks_of(h.tokens, r.load)
        for h in r.held
        if h.standing is Standing.RUNS and h not in gone
    )
    free = r.load.blocks_free + sum(h.blocks for h in gone) - fills - come_blocks
    runs = sum(level.requests for level in r.load.running) - sum(h.standing is Standing.RUNS for h in gone) + come_slots
    return free < d.told.blocks or runs >= r.load.slots_total


def _sets(
    replicas: tuple[Replica, ...], d: Demand, among_all: bool
) -> Iterator[tuple[float, Replica, list[HeldRequest]]]:
    """Each set that would be enough, with the least that it could cost: nobody stands in another's way."""
    for r in replicas:
        if not r.ready or any(level.priority >= d.told.priority for level in r.load.waiting):
            continue
        able = [h for h in r.held if h.standing is not Standing.WAITS]
        able = [h for h in able if among_all or h.priority < d.told.priority]
        for count in range(1, len(able) + 1):
            for gone in itertools.combinations(able, count):
                costs = [_cost_s(h, r, d, replicas) for h in gone]
                if not _lacking(r, d, list(gone), 0, 0) and math.inf not in costs:
                    yield math.fsum(costs), r, list(gone)


def _cost_s(h: HeldRequest, source: Replica, d: Demand, replicas: tuple[Replica, ...]) -> float:
    for t in replicas:
        free = t.load.slots_total > sum(level.requests for level in t.load.running)
        waits_there = any(level.priority >= h.priority for level in t.load.waiting)
        if t is not source and t.ready and free and not waits_there and t.blocks_left >= takes(h, t.load):
            return CONFIG.move_pause_s + blocks_of(h.tokens, source.load) * CONFIG.move_block_s
    if h.priority >= d.told.priority:
        return math.inf
    return h.tokens * CONFIG.recompute_token_s + (CONFIG.park_delay_s if h.standing is Standing.RUNS else 0.0)


@given(
    seed=st.integers(0, 2**32),
    priority=st.sampled_from((-5, 0, 5, 20)),
    blocks=st.integers(2, 40),
    roomy=st.booleans(),
)
@settings(max_examples=400, deadline=None)
def test_no_set_on_any_replica_would_have_cost_less(seed: int, priority: int, blocks: int, roomy: bool) -> None:
    """Against all of them, where those who move do not stand in each other's way: there is nowhere to go, or enough
    room for all."""
    spare = replica("spare", slots=100, blocks=blocks - 1)
    replicas = some_fleet(seed, most=3, room=0)
    full = tuple(r for r in replicas if r.running == r.load.slots_total or r.blocks_left <= 0)
    assume(full)
    fleet = (*full, spare) if roomy else full
    d = demand(priority=priority, blocks=blocks, waits_s=9.0)
    seen = view(*fleet, demands=[d])
    proposed = decide(seen, CONFIG, NOW_S)
    paid_s = math.fsum(u.proposal.numbers["cost_s"] for u in proposed)
    if roomy and sum(u.takes_blocks for u in proposed) + 12 > spare.load.blocks_total:
        assume(False)
    for among_all in (False, True):
        best = min((cost_s for cost_s, _, _ in _sets(fleet, d, among_all)), default=None)
        if best is not None:
            if proposed or not roomy:
                assert paid_s == pytest.approx(best)
                assert proposed
            return
    assert not proposed


# --- beyond what is searched in full ---


def test_of_many_on_one_replica_those_who_are_enough_leave_and_none_in_vain() -> None:
    held = [one(f"v{n:02}", blocks=n % 7 + 1) for n in range(EXACT_MAX + 10)]
    total = sum(h.blocks for h in held)
    for blocks in range(1, total + 1):
        gone = decide(view(small("r", *held, slots=99, blocks=total), demands=[demand(blocks=blocks)]), CONFIG, NOW_S)
        freed = [u.frees_blocks for u in gone]
        assert sum(freed) >= blocks
        assert sum(freed) - min(freed) < blocks


def test_of_many_who_can_only_move_those_with_room_do() -> None:
    held = [one(f"v{n:02}", priority=10, blocks=2 + n % 2) for n in range(EXACT_MAX + 2)]
    total = sum(h.blocks for h in held)
    here = small("r", *held, slots=99, blocks=total)
    gone = decide(view(here, small("t", blocks=7), demands=[demand(priority=0, blocks=6, waits_s=9)]), CONFIG, NOW_S)
    assert {u.proposal.target for u in gone} == {"t"}
    assert sum(u.frees_blocks for u in gone) >= 6


def test_of_many_replicas_those_with_least_to_free_are_looked_at() -> None:
    many = [small(f"r{n:03}", one(f"v{n:03}", blocks=20)) for n in range(3 * SEARCH_MAX)]
    nearly = small("z", one("z", blocks=10), one("u", priority=10, blocks=5))
    assert who_leaves(view(*many, nearly, demands=[demand(blocks=15)])) == [("z", "z", None)]


def test_frees_is_what_the_law_of_the_kit_counts() -> None:
    r = small("r", request("a", blocks=4, remaining=33))
    assert frees(r.held[0], r.load) == 4 + 3
