"""The baselines: each chooses as its source says, and sends nothing where production would not."""

from __future__ import annotations

import random

import pytest

from cluster.types import EngineLoad, PriorityLoad, ReplicaId, RequestId
from ops.sim.policies import POLICIES
from ops.sim.policies.least_load import LeastLoad
from ops.sim.policies.llumnix import TARGET_LOAD, Llumnix, freeness
from ops.sim.policies.round_robin import RoundRobin
from ops.sim.values import Instance, Policy
from router.routing import Need
from router.view import Condition, OwnLoad, ReplicaView

NEED = Need(priority=0, tokens=160, tokens_max=320)


def load(
    *, running: int = 0, waiting: int = 0, blocks_free: int = 1000, priority: int = 0, blocks_total: int = 1000
) -> EngineLoad:
    return EngineLoad(
        slots_total=8,
        blocks_total=blocks_total,
        blocks_free=blocks_free,
        block_size_tokens=16,
        running=(PriorityLoad(priority, running, blocks_total - blocks_free),) if running else (),
        waiting=(PriorityLoad(priority, waiting, 0),) if waiting else (),
    )


def view(
    name: str,
    engine: EngineLoad | None,
    condition: Condition = Condition.ROUTABLE,
    own_blocks: int = 0,
    unreported: tuple[PriorityLoad, ...] = (),
) -> ReplicaView:
    own = (OwnLoad(0, own_blocks, 0),) if own_blocks else ()
    return ReplicaView(replica_id=ReplicaId(name), condition=condition, load=engine, own=own, unreported=unreported)


def chosen(policy: Policy, *views: ReplicaView, need: Need = NEED) -> str | None:
    placement = policy.place(need, views, 0.0, random.Random(0))
    return None if placement is None else placement.replica_id


@pytest.mark.parametrize("make", [p for p in POLICIES.values() if p is not None])
def test_a_baseline_sends_only_where_work_is_taken_and_could_fit(make: type[Policy]) -> None:
    silent = view("silent", load(), Condition.SILENT)
    unknown = view("unknown", None)
    small = view("small", load(blocks_total=19, blocks_free=19))  # 320 tokens are 20 blocks
    busy = view("busy", load(running=8, waiting=50, blocks_free=0))
    assert chosen(make(), silent, unknown, small, busy) == "busy"
    assert chosen(make(), silent, unknown, small) is None


@pytest.mark.parametrize("make", [p for p in POLICIES.values() if p is not None])
def test_a_baseline_reserves_the_blocks_that_the_request_needs(make: type[Policy]) -> None:
    placement = make().place(NEED, [view("a", load())], 0.0, random.Random(0))
    assert placement is not None
    assert placement.blocks == 10  # 160 tokens in blocks of 16


def test_round_robin_takes_turns_whatever_the_load() -> None:
    policy, views = RoundRobin(), (view("a", load(running=8)), view("b", load()), view("c", load()))
    assert [chosen(policy, *views) for _ in range(6)] == ["a", "b", "c", "a", "b", "c"]


def test_least_load_counts_what_runs_what_waits_and_what_is_under_way() -> None:
    under_way = (PriorityLoad(0, 3, 30),)
    assert chosen(LeastLoad(), view("a", load(running=3)), view("b", load(running=1, waiting=1))) == "b"
    assert chosen(LeastLoad(), view("a", load(running=2)), view("b", load(), unreported=under_way)) == "a"


def test_least_load_draws_among_equals() -> None:
    policy, views, rng = LeastLoad(), [view(name, load(running=1)) for name in "abc"], random.Random(0)
    placements = [policy.place(NEED, views, 0.0, rng) for _ in range(60)]
    assert {p.replica_id for p in placements if p is not None} == {"a", "b", "c"}


def test_freeness_is_what_is_free_less_what_the_first_that_waits_asks_for_by_the_running_requests() -> None:
    assert freeness(1000, 600, 80, 4, urgent=False) == (600 - 80) / 4
    assert freeness(1000, 40, 80, 4, urgent=False) == -10  # more is asked for than there is
    assert freeness(1000, 1000, 0, 0, urgent=False) == 1000


def test_a_replica_with_urgent_work_looks_full_from_the_target_load_on() -> None:
    used = int(1000 * TARGET_LOAD)
    assert freeness(1000, 1000 - used, 0, 1, urgent=True) == 0.0
    assert freeness(1000, 1000 - used, 0, 1, urgent=False) == 1000 - used


def instance(
    name: str, blocks_free: int, running: int = 10, *, first_blocks: int = 0, priority: int = 0, moves: bool = True
) -> Instance:
    return Instance(
        replica_id=ReplicaId(name),
        blocks_total=1000,
        blocks_free=blocks_free,
        first_blocks=first_blocks,
        running=running,
        priority_max=priority if running else None,
        shortest=(RequestId(f"of-{name}"), 1) if moves else None,
    )


def migrations(*instances: Instance, busy: frozenset[str] = frozenset()) -> list[tuple[str, str, str]]:
    policy = Llumnix()
    policy.observe({one.replica_id: one for one in instances})
    return [(m.source, m.target, m.identity[0]) for m in policy.migrate({ReplicaId(name) for name in busy})]


def test_llumnix_pairs_the_least_free_below_the_threshold_with_the_most_free_above_it() -> None:
    """Ten run on each: free blocks are ten times the freeness, and the threshold is 3."""
    worst, bad, at = instance("worst", 0), instance("bad", 20), instance("at", 30)
    good, best = instance("good", 100), instance("best", 900)
    assert migrations(good, bad, best, worst, at) == [("worst", "best", "of-worst"), ("bad", "good", "of-bad")]
    assert migrations(worst, bad, best) == [("worst", "best", "of-worst")]
    assert migrations(good, best, at) == []
    assert migrations(worst, bad) == []


def test_llumnix_moves_from_where_the_first_waits_and_not_to_where_high_priority_runs() -> None:
    waits = instance("waits", 100, first_blocks=90)  # a freeness of 1
    urgent = instance("urgent", 870, priority=10)  # 130 are used, and 125 would be the target
    assert migrations(waits, urgent) == []
    assert migrations(waits, urgent, instance("good", 50)) == [("urgent", "good", "of-urgent")]
    assert migrations(waits, instance("calm", 870)) == [("waits", "calm", "of-waits")]


def test_llumnix_moves_one_request_of_a_pair_at_a_time_and_none_that_has_not_begun() -> None:
    assert migrations(instance("worst", 0), instance("best", 900), busy=frozenset({"best"})) == []
    assert migrations(instance("worst", 0), instance("best", 900), busy=frozenset({"worst"})) == []
    assert migrations(instance("worst", 0, moves=False), instance("best", 900)) == []


def test_llumnix_sends_to_the_greatest_freeness() -> None:
    crowded = view("crowded", load(running=6, blocks_free=700))
    roomy = view("roomy", load(running=2, blocks_free=500))
    urgent = view("urgent", load(running=1, blocks_free=800, priority=10))
    assert chosen(Llumnix(), crowded, roomy, urgent) == "roomy"
