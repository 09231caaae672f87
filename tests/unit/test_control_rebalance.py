"""Work goes from a replica that has too much to one that has room, and comes to rest there."""

from __future__ import annotations

import math
import random
from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.config import ControlConfig
from cluster.control import preempt
from cluster.control.rebalance import decide
from cluster.control.view import ClusterView, Replica, Underway, blocks_of, takes
from cluster.messages import HeldRequest, Standing
from cluster.types import PriorityLoad, ReplicaId, ReplicaState
from tests.unit.control_kit import (
    BLOCK,
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
PAUSE_S, BLOCK_S, VALUE_S = CONFIG.move_pause_s, CONFIG.move_block_s, CONFIG.move_value_s


def who_goes(
    seen: ClusterView, config: ControlConfig = CONFIG, now_s: float = NOW_S
) -> list[tuple[str, str, str | None]]:
    return [(u.proposal.request_id, u.proposal.source, u.proposal.target) for u in decide(seen, config, now_s)]


def runners(
    count: int, *, name: str = "run", blocks: int = 4, priority: int = 0, remaining: int = 16
) -> list[HeldRequest]:
    return [request(f"{name}{n}", blocks=blocks, priority=priority, remaining=remaining) for n in range(count)]


# --- what waits ---


def test_what_waits_goes_back_to_its_router_only_while_another_replica_has_room() -> None:
    full = replica("full", *runners(4), waits("w"))
    assert who_goes(view(full, replica("idle"))) == [("w", "full", None)]
    assert who_goes(view(full, replica("busy", *runners(4, name="b")))) == []
    assert who_goes(view(full)) == []


def test_what_is_paused_moves_with_its_blocks() -> None:
    full = replica("full", *runners(4), paused("p", blocks=6, remaining=17))
    (underway,) = decide(view(full, replica("idle")), CONFIG, NOW_S)
    assert underway.proposal.target == "idle"
    assert underway.takes_blocks == 6 + 2
    assert underway.proposal.target_generation == replica("idle").entry.generation
    assert not underway.parks
    small = replica("small", blocks=7)
    assert who_goes(view(full, small)) == []
    assert who_goes(view(full, replica("small", blocks=8))) == [("p", "full", "small")]


def test_the_most_urgent_that_waits_goes_first_and_of_equals_what_kept_its_blocks() -> None:
    one = replica("one", *runners(4), waits("w", priority=0), paused("p", priority=0))
    two = replica("two", *runners(4, name="o"), waits("urgent", priority=10))
    room_for_one = replica("t", *runners(3, name="t"))
    assert who_goes(view(one, two, room_for_one)) == [("urgent", "two", None)]
    assert who_goes(view(one, room_for_one)) == [("p", "one", "t")]


def test_where_the_first_has_no_room_a_smaller_one_behind_it_goes() -> None:
    full = replica("full", *runners(4), paused("big", priority=5, blocks=20), paused("small", priority=0, blocks=5))
    assert who_goes(view(full, replica("t", blocks=10))) == [("small", "full", "t")]


def test_what_may_be_let_in_with_the_next_step_is_left_alone() -> None:
    for part, goes in ((0.9, False), (1.1, True)):
        full = replica("full", *runners(4), waits("w"), stalled_since_s=NOW_S - part * CONFIG.stall_s)
        assert bool(who_goes(view(full, replica("idle")))) is goes


@pytest.mark.parametrize("running", [3, 4])
def test_what_waits_goes_where_its_prompt_and_the_output_that_is_expected_of_it_fit(running: int) -> None:
    """Whether it waits for blocks, as long as a slot is free, or for a slot."""
    tight = replica(
        "tight", *runners(running, blocks=32), waits("w", to_compute=5 * BLOCK - 1, remaining=2 * BLOCK + 1), blocks=130
    )
    assert who_goes(view(tight, replica("t", blocks=6))) == []
    assert who_goes(view(tight, replica("t", blocks=7))) == [("w", "tight", None)]


def test_what_waits_without_blocks_goes_back_where_only_less_urgent_work_runs_on_another_replica() -> None:
    full = replica("full", *runners(4, priority=10), waits("w", priority=10))
    for priority, goes in ((10, False), (9, True)):
        lower = replica("t", *runners(4, name="t", priority=priority))
        assert who_goes(view(full, lower)) == [("w", "full", None)] * goes
        behind = replica("t", *runners(4, name="t", priority=priority), waits("g", priority=10), stalled_since_s=NOW_S)
        assert who_goes(view(full, behind)) == []
    lower = replica("t", *runners(4, name="t", priority=-10, blocks=2), blocks=14)  # 4 are to be filled
    wants = {blocks: waits("w", priority=10, to_compute=(blocks - 1) * BLOCK) for blocks in (10, 11)}
    for blocks, goes in ((10, True), (11, False)):
        full = replica("full", *runners(4, priority=10), wants[blocks])
        assert bool(who_goes(view(full, lower))) is goes
    kept = replica("full", *runners(4, priority=10), paused("p", priority=10))
    assert who_goes(view(kept, lower)) == []
    free = replica("free")
    (underway,) = decide(
        view(replica("full", *runners(4, priority=10), waits("w", priority=10)), free, lower), CONFIG, 0
    )
    assert underway.goes_to == "free"


def test_what_waits_goes_where_less_urgent_work_gives_way_though_what_is_paused_found_no_room_before_it() -> None:
    """Nobody gives way for one that moves: that there was no room for it says nothing of one that is sent anew."""
    kept = replica("kept", *runners(4, name="k", priority=10), paused("p", priority=10))
    full = replica("full", *runners(4, priority=10), waits("w", priority=10, to_compute=4 * BLOCK))
    lower = replica("lower", *runners(4, name="l", priority=-10))
    assert who_goes(view(kept, full, lower)) == [("w", "full", None)]


def test_nothing_goes_to_where_as_urgent_work_waits() -> None:
    full = replica("full", *runners(4), waits("w", priority=0))
    # It has a slot, but somebody waits there for blocks to gather.
    for priority, goes in ((0, False), (10, False), (-10, True)):
        gathering = replica("t", *runners(2, name="t"), waits("g", priority=priority), stalled_since_s=NOW_S)
        assert bool(who_goes(view(full, gathering))) is goes


@pytest.mark.parametrize("state", ReplicaState)
def test_nothing_goes_to_or_from_a_replica_that_drains(state: ReplicaState) -> None:
    full, idle = replica("full", *runners(4), waits("w")), replica("idle")
    ready = state is ReplicaState.READY
    assert bool(who_goes(view(full, replica("idle", state=state)))) is ready
    assert bool(who_goes(view(replica("full", *runners(4), waits("w"), state=state), idle))) is ready


def test_nothing_goes_to_or_from_a_replica_that_is_silent_or_stands_still() -> None:
    full, idle = replica("full", *runners(4), waits("w")), replica("idle")
    late_s = NOW_S - 1.01 * CONFIG.stale_after_s
    assert who_goes(view(full, replica("idle", at_s=late_s))) == []
    assert who_goes(view(replica("full", *runners(4), waits("w"), at_s=late_s), idle)) == []
    assert who_goes(view(full, replica("idle", step_age_s=1.01 * CONFIG.stale_after_s))) == []
    assert who_goes(view(full, replica("idle", step_age_s=0.5 * CONFIG.stale_after_s))) == [("w", "full", None)]


@pytest.mark.parametrize(
    ("attempt", "rest_s"), [(1, CONFIG.proposal_expiry_s), (2, CONFIG.request_rest_s)], ids=["stayed", "left"]
)
def test_a_request_rests_after_it_has_left_and_after_it_was_asked_for(attempt: int, rest_s: float) -> None:
    full, idle = replica("full", *runners(4), waits("w")), replica("idle")
    lately = decide(view(full, idle), CONFIG, NOW_S)
    for after_s, goes in ((0.9 * rest_s, False), (1.1 * rest_s, True)):
        now_s = NOW_S + after_s
        full = replica("full", *runners(4), waits("w", attempt=attempt), at_s=now_s)
        assert bool(who_goes(view(full, replica("idle", at_s=now_s), lately=lately), now_s=now_s)) is goes


def test_room_that_an_earlier_proposal_takes_is_nobody_elses_until_that_expires() -> None:
    one = replica("one", *runners(4), waits("w1"))
    target = replica("t", *runners(3, name="t"))
    lately = decide(view(one, target), CONFIG, NOW_S)
    assert [u.proposal.request_id for u in lately] == ["w1"]
    for after_s, goes in ((0.9 * CONFIG.proposal_expiry_s, False), (1.1 * CONFIG.proposal_expiry_s, True)):
        now_s = NOW_S + after_s
        two = replica("two", *runners(4, name="o"), waits("w2"), at_s=now_s)
        then = replica("t", *runners(3, name="t"), at_s=now_s)
        assert bool(who_goes(view(two, then, lately=lately), now_s=now_s)) is goes


def test_while_a_demand_waits_nothing_less_urgent_takes_room() -> None:
    big = demand(priority=0, blocks=990)
    target = replica("t", *runners(1, name="t", blocks=30))
    for held, goes in (
        (waits("w", priority=-10), False),
        (waits("w", priority=0), False),  # it has not begun and may be the later of the two
        (waits("w", priority=10), True),
        (paused("p", priority=-10), False),
        (paused("p", priority=0), True),  # it goes on before what is new
        (request("r", priority=0, remaining=10_000), False),
        (request("r", priority=10, remaining=10_000), True),
    ):
        others = runners(3 if held.standing is Standing.RUNS else 4, name="x", priority=20)
        full = replica("full", *others, held, step_s=0.1)
        assert bool(who_goes(view(full, target, demands=[big]))) is goes, held


# --- what runs ---


def test_what_runs_moves_for_what_its_client_gains_by_it() -> None:
    # 3 run at 0.05 s a step where 0 run; a guess at the other is 0.05 * (0.5 + 0.5 / 3) = 1/30 s. So a token gains 1/60 s.
    threshold = (VALUE_S + PAUSE_S + 4 * BLOCK_S) * 60
    for remaining, goes in ((int(threshold) - 1, False), (int(threshold) + 2, True)):
        hot = replica("hot", *runners(3, remaining=remaining), step_s=0.05)
        gone = decide(view(hot, replica("idle")), CONFIG, NOW_S)
        assert bool(gone) is goes
        for underway in gone:
            assert underway.proposal.numbers["gain_s"] == pytest.approx(remaining / 60 - PAUSE_S - 4 * BLOCK_S)


def test_of_a_pair_the_request_that_gains_most_moves() -> None:
    held = [request("few", remaining=100), request("many", remaining=400), request("heavy", remaining=400, blocks=20)]
    assert who_goes(view(replica("hot", *held, step_s=0.05), replica("idle"))) == [("many", "hot", "idle")]


def test_nothing_that_runs_moves_while_the_step_at_its_source_is_unknown() -> None:
    held = runners(4, remaining=10_000)
    assert who_goes(view(replica("hot", *held), replica("idle"))) == []
    assert len(who_goes(view(replica("hot", *held, step_s=0.05), replica("idle")))) == 1


def test_nothing_that_runs_moves_to_where_steps_take_as_long() -> None:
    hot = replica("hot", *runners(4, remaining=10_000), step_s=0.05)
    cold = runners(1, name="c")
    assert who_goes(view(hot, replica("cold", *cold, step_s=0.05))) == []
    assert len(who_goes(view(hot, replica("cold", *cold, step_s=0.04)))) == 1


@pytest.mark.parametrize(
    ("here", "there", "goes"), [(1, 0, False), (2, 0, True), (2, 1, False), (3, 1, True), (3, 2, False)]
)
def test_a_source_is_never_less_full_than_its_target_afterwards(here: int, there: int, goes: bool) -> None:
    hot = replica("hot", *runners(here, remaining=10_000), step_s=0.05)
    cold = replica("cold", *runners(there, name="c"), step_s=0.01 if there else None)
    assert bool(who_goes(view(hot, cold))) is goes


def test_who_frees_nothing_that_its_source_is_short_of_stays() -> None:
    """Its source is full of blocks, and all of those that it reads others read too."""
    for own, goes in ((0, False), (2, True)):
        held = [request("reads", blocks=own, tokens=2 * BLOCK, remaining=400), request("fills", blocks=900)]
        hot = replica("hot", *held, slots=100, step_s=0.05)
        assert bool(who_goes(view(hot, replica("cold", slots=100)))) is goes


def test_the_fullest_are_paired_with_the_emptiest_and_each_is_in_one_pair() -> None:
    hot = [replica(f"hot{n}", *runners(n, name=f"h{n}-", remaining=10_000), slots=8, step_s=0.1) for n in (6, 8)]
    cold = [replica(f"cold{n}", *runners(n, name=f"c{n}-"), slots=8, step_s=0.01) for n in (0, 1)]
    gone = who_goes(view(*hot, *cold))
    assert [(source, target) for _, source, target in gone] == [("hot8", "cold0"), ("hot6", "cold1")]


def test_a_pair_rests_after_a_move_between_the_two_either_way() -> None:
    hot = replica("hot", *runners(4, remaining=10_000), slots=8, step_s=0.05)
    cold = replica("cold", slots=8)
    lately = decide(view(hot, cold), CONFIG, NOW_S)
    assert len(lately) == 1
    assert who_goes(view(hot, cold, lately=lately)) == []
    other_way = [
        replica("cold", *runners(8, name="c", remaining=10_000), slots=8, step_s=0.05),
        replica("hot", slots=8),
    ]
    assert who_goes(view(*other_way, lately=lately)) == []
    assert len(who_goes(view(hot, cold, replica("also", slots=8), lately=lately))) == 1


def test_what_two_replicas_tell_of_while_it_moves_is_proposed_once() -> None:
    before = replica("before", *runners(4), waits("w"))
    after = replica("after", *runners(4, name="a"), waits("w", attempt=2))
    idle = [replica(f"idle{n}") for n in range(2)]
    assert who_goes(view(before, after, *idle)) == [("w", "after", None)]


def test_a_tick_proposes_no_more_than_it_may() -> None:
    config = ControlConfig(moves_per_tick=3)
    full = [replica(f"full{n}", *runners(4, name=f"f{n}-"), waits(f"w{n}")) for n in range(10)]
    idle = [replica(f"idle{n}") for n in range(10)]
    assert len(who_goes(view(*full, *idle), config)) == 3
    hot = [replica(f"hot{n}", *runners(4, name=f"h{n}-", remaining=10_000), step_s=0.05) for n in range(10)]
    assert len(who_goes(view(*hot, *idle), config)) == 3


@pytest.mark.parametrize(("slots", "blocks"), [(8, 4), (100, 200)], ids=["slots", "blocks"])
def test_a_source_counts_as_without_those_who_are_on_their_way_from_it(slots: int, blocks: int) -> None:
    config = ControlConfig(pair_rest_s=0)
    hot = replica("hot", *runners(4, blocks=blocks, remaining=100), slots=slots, step_s=0.05)
    cold, gone = replica("cold", slots=slots), replica("gone", slots=slots)
    (first,) = decide(view(hot, gone), config, NOW_S)
    held = {h.request_id: h for h in hot.held}
    lately = [
        first._replace(proposal=msgspec.structs.replace(first.proposal, request_id=request_id)) for request_id in held
    ]
    assert len(who_goes(view(hot, cold, lately=lately[:1]), config)) == 1
    assert who_goes(view(hot, cold, lately=lately[:3]), config) == []  # of two that are left one would go


def test_where_room_is_made_for_a_demand_nothing_is_evened_out() -> None:
    """What is told of it counts who leaves as there still; and the room is for the demand."""
    asked = [demand(priority=-5, blocks=300, waits_s=9)]
    made = replica("made", *runners(4, remaining=100), request("low", priority=-10, blocks=800), slots=8, step_s=0.05)
    cleared = preempt.decide(view(made, demands=asked), CONFIG, NOW_S)
    assert [u.proposal.request_id for u in cleared] == ["low"]
    idle = replica("idle", slots=8, blocks=200)
    assert len(who_goes(view(made, idle, demands=asked))) == 1
    assert who_goes(view(made, idle, demands=asked, lately=cleared)) == []
    full = replica("full", *runners(4, name="f"), waits("w"))
    roomy = replica("roomy", *runners(3, name="o"), request("low", priority=-10, blocks=800), slots=8)
    cleared = preempt.decide(view(roomy, demands=asked), CONFIG, NOW_S)
    assert who_goes(view(full, roomy, demands=asked)) == [("w", "full", None)]
    assert who_goes(view(full, roomy, demands=asked, lately=cleared)) == []


# --- failure domains ---


def test_of_nearly_equal_targets_the_host_then_the_zone_with_least_as_urgent_work_is_taken() -> None:
    full = replica("full", *runners(4, priority=5), waits("w", priority=5))
    busy = replica("busy", host="h1", slots=4, more=[PriorityLoad(5, 4, 4)])
    low = replica("low", host="h2", slots=4, more=[PriorityLoad(0, 4, 4)])

    def taken(*targets: Replica) -> str:
        (underway,) = decide(view(full, busy, low, *targets), CONFIG, NOW_S)
        assert underway.goes_to is not None
        return underway.goes_to

    assert taken(replica("a", host="h1"), replica("b", host="h2")) == "b"  # what runs on h2 is less urgent
    assert taken(replica("b", host="h1"), replica("a", host="h2")) == "a"
    emptier = replica("a", host="h1", slots=100)
    assert taken(emptier, replica("b", *runners(6, name="x"), slots=100, host="h2")) == "a"  # not nearly equal
    nearly = replica("b", *runners(2, name="x"), slots=100, host="h2")
    assert taken(replica("a", host="h1", slots=100), nearly) == "b"
    here = replica("zoned", host="h3", zone="z1", slots=4, more=[PriorityLoad(5, 4, 4)])
    assert taken(here, replica("a", host="h4", zone="z1"), replica("b", host="h5", zone="z2")) == "b"


def test_pods_of_one_node_fail_together_whatever_hosts_they_are() -> None:
    """In Kubernetes each pod is a host of its own."""

    def pod(name: str, node: str, *held: HeldRequest) -> Replica:
        made = replica(name, *held)  # on a host of its name
        return msgspec.structs.replace(made, entry=msgspec.structs.replace(made.entry, node=node))

    full = pod("full", "n0", *runners(4), waits("w"))
    busy = pod("busy", "n1", *runners(4, name="b"))
    for near, far in (("a", "b"), ("b", "a")):
        (underway,) = decide(view(full, busy, pod(near, "n1"), pod(far, "n2")), CONFIG, NOW_S)
        assert underway.goes_to == far


def test_a_request_does_not_count_against_its_own_host() -> None:
    """4 and itself on h1, and 4 on h2: wherever it goes, one host has 5 and the other 4."""
    full = replica("full", *runners(4), waits("w"), host="h1")
    other = replica("other", *runners(4, name="o"), host="h2")
    (underway,) = decide(view(full, other, replica("a", host="h1"), replica("b", host="h2")), CONFIG, NOW_S)
    assert underway.goes_to == "a"


# --- laws ---


@given(seed=st.integers(0, 2**32), asked=st.none() | st.integers(-10, 10))
@settings(max_examples=400, deadline=None)
def test_nothing_is_proposed_to_where_it_has_no_room_nor_twice(seed: int, asked: int | None) -> None:
    replicas = some_fleet(seed)
    demands = [] if asked is None else [demand(priority=asked, blocks=8)]
    config = ControlConfig(pair_rest_s=0, move_value_s=0.001, move_pause_s=0, move_block_s=0)
    lately: tuple[Underway, ...] = ()
    for _ in range(3):
        seen = view(*replicas, demands=demands, lately=lately)
        proposed = decide(seen, config, NOW_S)
        _check_room(seen, proposed)
        lately += proposed
        ids = [u.proposal.request_id for u in lately]
        assert len(set(ids)) == len(ids)
        pairs = Counter(r for u in proposed for r in (u.proposal.source, u.goes_to))
        assert all(count == 1 for count in pairs.values())
        other_order = view(*shuffled(replicas, seed), demands=demands, lately=seen.lately)
        assert decide(other_order, config, NOW_S) == proposed


def _check_room(seen: ClusterView, proposed: tuple[Underway, ...]) -> None:
    by_id = {r.replica_id: r for r in seen.replicas}
    slots, blocks = Counter[ReplicaId](), Counter[ReplicaId]()
    for u in seen.lately + proposed:
        assert u.goes_to is not None
        slots[u.goes_to] += 1
        blocks[u.goes_to] += u.takes_blocks
    for u in proposed:
        source, target = by_id[u.proposal.source], by_id[u.goes_to or ReplicaId("")]
        (held,) = (h for h in source.held if h.request_id == u.proposal.request_id)
        assert source is not target
        assert u.proposal.target == (None if held.standing is Standing.WAITS else target.replica_id)
        assert u.takes_blocks >= takes(held, target.load)
        assert target.ready
        assert not any(level.priority >= held.priority for level in target.load.waiting)
        # Only where it waits without blocks less urgent work may give way for it.
        stays = -math.inf if held.standing is not Standing.WAITS else held.priority
        running = sum(level.requests for level in target.load.running if level.priority >= stays)
        given = sum(level.blocks for level in target.load.running if level.priority < stays)
        assert running + slots[target.replica_id] <= target.load.slots_total
        assert blocks[target.replica_id] <= target.load.blocks_free + given


class Cluster:
    """Replicas that hold requests which neither grow nor end, engines that let in what waits there, and a router that
    sends what was given back to where there is room."""

    def __init__(self, start: tuple[Replica, ...], rng: random.Random) -> None:
        self.start = {r.replica_id: r for r in start}
        self.held = {r.replica_id: list(r.held) for r in start}
        self.queued: list[HeldRequest] = []
        self.rng = rng

    def seen(self, now_s: float) -> ClusterView:
        return view(
            *(
                replica(
                    r,
                    *held,
                    slots=self.start[r].load.slots_total,
                    blocks=self.start[r].load.blocks_total,
                    # a fixed part, and one that grows with what runs
                    step_s=0.01 + 0.02 * self.runs(r) if self.runs(r) else None,
                    at_s=now_s,
                )
                for r, held in self.held.items()
            )
        )

    def runs(self, r: ReplicaId) -> int:
        return sum(h.standing is Standing.RUNS for h in self.held[r])

    def free(self, r: ReplicaId) -> int:
        return self.start[r].load.blocks_total - sum(h.blocks for h in self.held[r])

    def fullnesses(self) -> list[float]:
        return sorted((r.fullness for r in self.seen(0.0).replicas), reverse=True)

    def apply(self, underway: Underway) -> None:
        proposal = underway.proposal
        (held,) = (h for h in self.held[proposal.source] if h.request_id == proposal.request_id)
        self.held[proposal.source].remove(held)
        if proposal.target is None:
            self.queued.append(held)
        else:
            blocks = blocks_of(held.tokens, self.start[proposal.target].load)
            assert self.free(proposal.target) >= blocks
            self._run(proposal.target, held, blocks)

    def settle(self) -> None:
        """Engines, then the router: whoever waits begins where it can."""
        for r, there in self.held.items():
            for held in sorted(there, key=lambda h: (-h.priority, h.request_id)):
                wants = self._wants(held) if held.standing is Standing.WAITS else held.blocks
                has = held.blocks if held.standing is Standing.PAUSED else 0
                fits = self.runs(r) < self.start[r].load.slots_total and self.free(r) + has >= wants
                if held.standing is not Standing.RUNS and fits:
                    there.remove(held)
                    self._run(r, held, wants)
        for held in sorted(self.queued, key=lambda h: (-h.priority, h.request_id)):
            able = [r for r in self.held if self.runs(r) < self.start[r].load.slots_total and self._fits(r, held)]
            if able:
                self.queued.remove(held)
                self._run(self.rng.choice(sorted(able)), held, self._wants(held))

    def _fits(self, r: ReplicaId, held: HeldRequest) -> bool:
        return self.free(r) >= self._wants(held)

    def _wants(self, held: HeldRequest) -> int:
        """As it begins: blocks for what it is yet to compute."""
        return -(-held.to_compute_tokens // BLOCK)

    def _run(self, r: ReplicaId, held: HeldRequest, blocks: int) -> None:
        tokens = held.tokens or blocks * BLOCK
        self.held[r].append(
            request(
                held.request_id, priority=held.priority, blocks=blocks, tokens=tokens, remaining=held.remaining_tokens
            )
        )


@given(seed=st.integers(0, 2**32))
@settings(max_examples=400, deadline=None)
def test_under_steady_load_moves_come_to_an_end_and_none_undoes_another(seed: int) -> None:
    """Without any rest at all, so that nothing but the decision itself keeps work from going to and fro."""
    config = ControlConfig(
        request_rest_s=0,
        pair_rest_s=0,
        stall_s=0,
        proposal_expiry_s=0.5,
        move_value_s=0.001,
        move_pause_s=0,
        move_block_s=0,
    )
    ready = tuple(r for r in some_fleet(seed, most=5) if r.ready)
    cluster, now_s = Cluster(ready, random.Random(seed)), NOW_S
    cluster.settle()
    requests = sum(len(held) for held in cluster.held.values())
    were = set[tuple[tuple[str, str], ...]]()
    for _ in range(requests * (len(ready) + 1) + 1):
        now_s += 1.0
        proposed = decide(cluster.seen(now_s), config, now_s)
        if not proposed:
            break
        for underway in proposed:
            before = cluster.fullnesses()
            cluster.apply(underway)
            if underway.standing is Standing.RUNS:
                assert cluster.fullnesses() < before
        cluster.settle()
        now = tuple(sorted((h.request_id, r) for r, held in cluster.held.items() for h in held))
        assert cluster.queued or now not in were
        were.add(now)
    else:
        pytest.fail("work still moves")
    assert sum(len(held) for held in cluster.held.values()) + len(cluster.queued) == requests


def test_a_replica_that_came_later_gets_its_part_and_then_nothing_moves() -> None:
    config = ControlConfig(request_rest_s=0, pair_rest_s=0, proposal_expiry_s=0.5)
    start = (
        replica("first", *runners(12, remaining=500), slots=16),
        replica("later", slots=16),
    )
    cluster, now_s, moves = Cluster(start, random.Random(1)), NOW_S, 0
    for _ in range(40):
        now_s += 1.0
        for underway in decide(cluster.seen(now_s), config, now_s):
            cluster.apply(underway)
            moves += 1
    assert (moves, cluster.runs(ReplicaId("first")), cluster.runs(ReplicaId("later"))) == (6, 6, 6)
