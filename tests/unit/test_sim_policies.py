"""The baselines: each chooses as its source says, and sends nothing where production would not."""

from __future__ import annotations

import random

import pytest

from cluster.types import EngineLoad, PriorityLoad, ReplicaId
from ops.sim.policies import POLICIES
from ops.sim.policies.least_load import LeastLoad
from ops.sim.policies.llumnix import TARGET_LOAD, Llumnix, freeness
from ops.sim.policies.round_robin import RoundRobin
from ops.sim.values import Policy
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


def test_freeness_is_free_less_waiting_blocks_by_requests() -> None:
    """Four run on 400 of 1,000 blocks and two wait; 600 blocks are predicted for the six: 100 each."""
    one = load(running=4, waiting=2, blocks_free=600)
    assert freeness(view("a", one, own_blocks=600), one) == (600 - 2 * 100) / 4


def test_a_replica_with_urgent_work_looks_full_from_the_target_load_on() -> None:
    used = int(1000 * TARGET_LOAD)
    at_target = load(running=1, blocks_free=1000 - used, priority=10)
    assert freeness(view("a", at_target), at_target) == 0.0
    plain = load(running=1, blocks_free=1000 - used)
    assert freeness(view("a", plain), plain) == 1000 - used


def test_llumnix_sends_to_the_greatest_freeness() -> None:
    crowded = view("crowded", load(running=6, blocks_free=700))
    roomy = view("roomy", load(running=2, blocks_free=500))
    urgent = view("urgent", load(running=1, blocks_free=800, priority=10))
    assert chosen(Llumnix(), crowded, roomy, urgent) == "roomy"
