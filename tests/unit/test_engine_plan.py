"""Single decisions of continuous batching, on literal views. The laws that hold for all plans: tests/conformance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from cluster.config import EngineConfig
from cluster.engine.scheduling.admission import LOOK_AHEAD
from cluster.engine.scheduling.choose import order_for
from cluster.engine.scheduling.continuous import plan
from cluster.engine.scheduling.plan import Admission, Chunk, Cost, Preemption, StepPlan, View
from cluster.engine.scheduling.sequence import SequenceState
from cluster.types import PreemptionMeans, RequestId
from tests.conformance.engine_kit import config

PRIORITY = order_for(config())
PAUSE, SWAP, RECOMPUTE = PreemptionMeans.PAUSE, PreemptionMeans.SWAP, PreemptionMeans.RECOMPUTE


def sequence(
    name: str, tokens: int, *, priority: int = 0, arrived: float = 0.0, started: bool = False
) -> SequenceState:
    state = SequenceState((RequestId(name), 0), priority, arrived, tokens=tokens, limit_tokens=100, started=started)
    state.key = PRIORITY.key(state)
    return state


def small(name: str, *, output: int = 1, arrived: float) -> SequenceState:
    """It has two tokens and will have `output` more."""
    state = SequenceState((RequestId(name), 0), 0, arrived, tokens=2, limit_tokens=2 + output)
    state.key = PRIORITY.key(state)
    return state


def running(
    name: str, tokens: int, *, computed: int, blocks: int, priority: int = 0, arrived: float = 0.0
) -> SequenceState:
    state = sequence(name, tokens, priority=priority, arrived=arrived, started=True)
    state.computed, state.blocks, state.running = computed, blocks, True
    return state


def paused(
    name: str, tokens: int, *, computed: int, blocks: int, priority: int = 0, arrived: float = 0.0
) -> SequenceState:
    state = running(name, tokens, computed=computed, blocks=blocks, priority=priority, arrived=arrived)
    state.running = False
    return state


def decide(
    waiting: Sequence[SequenceState],
    run: Sequence[SequenceState],
    blocks_free: int,
    settings: EngineConfig | None = None,
    *,
    host_blocks_free: int = 0,
    cost: Cost = Cost(1.0, 1.0),  # noqa: B008 - a constant
) -> StepPlan:
    """Blocks of 4 tokens, 4 slots, 16 tokens per step, unless told otherwise."""
    return plan(View(waiting, run, blocks_free, host_blocks_free, cost), settings or config(), PRIORITY)


def test_a_plan_names_every_chunk_and_every_block() -> None:
    grows = running("a", 9, computed=8, blocks=2)
    decode = running("b", 7, computed=6, blocks=2)
    prefill = running("c", 20, computed=10, blocks=6)
    new = sequence("d", 9)
    got = decide([new], [grows, decode, prefill], 10)
    assert got == StepPlan(
        admitted=(Admission(new, 3),),
        chunks=(
            Chunk(grows, 1, 1, True),
            Chunk(decode, 1, 0, True),
            Chunk(prefill, 10, 0, True),
            Chunk(new, 4, 0, False),
        ),
    )


# --- growth ---


def test_the_last_in_order_is_preempted_for_growth_and_it_may_be_the_one_that_grows() -> None:
    first, last = running("a", 9, computed=8, blocks=2), running("b", 9, computed=8, blocks=2)
    got = decide([], [first, last], 1)
    assert got == StepPlan(preempted=(Preemption(last, None),), chunks=(Chunk(first, 1, 1, True),))


def test_growth_takes_the_blocks_of_one_that_waits_behind_before_those_of_one_that_runs() -> None:
    first, last = running("a", 9, computed=8, blocks=2), running("b", 7, computed=6, blocks=2)
    behind = paused("c", 7, computed=6, blocks=2, arrived=1.0)
    got = decide([behind], [first, last], 0)
    assert got.preempted == (Preemption(behind, None),)
    assert got.chunks == (Chunk(first, 1, 1, True), Chunk(last, 1, 0, True))


def test_growth_never_takes_the_blocks_of_one_that_waits_ahead() -> None:
    ahead = paused("a", 7, computed=6, blocks=2)
    last = running("b", 9, computed=8, blocks=2, arrived=1.0)
    got = decide([ahead], [last], 0, config(slots=1))
    assert got.preempted == (Preemption(last, None),)
    assert got.admitted == (Admission(ahead, 0),)


# --- by what means ---


@pytest.mark.parametrize(
    ("host_blocks_free", "swap_block_s", "means"),
    [(3, 4.0, SWAP), (3, 4.1, RECOMPUTE), (2, 1.0, RECOMPUTE)],
    ids=["as cheap", "dearer", "no room"],
)
def test_swapped_out_where_that_costs_no_more_than_computing_again_and_there_is_room(
    host_blocks_free: int, swap_block_s: float, means: PreemptionMeans
) -> None:
    """Three blocks against twelve tokens at a second each."""
    first, last = running("a", 9, computed=8, blocks=2), running("b", 13, computed=12, blocks=3)
    got = decide([], [first, last], 0, host_blocks_free=host_blocks_free, cost=Cost(1.0, swap_block_s))
    assert got.preempted == (Preemption(last, None, means),)


def test_a_victim_whose_slot_alone_is_needed_keeps_its_blocks() -> None:
    lows = [running(f"low{n}", 6, computed=5, blocks=2, priority=-10) for n in range(4)]
    urgent = sequence("urgent", 5, priority=10)
    got = decide([urgent], lows, 2)
    assert got.preempted == (Preemption(lows[3], urgent, PAUSE),)
    got = decide([urgent], lows, 1)
    assert got.preempted == (Preemption(lows[3], urgent, RECOMPUTE),)


def test_a_victim_gives_back_the_block_that_this_plan_had_given_it() -> None:
    """The urgent request needs 4 blocks: the victim's 3 and the one that it was about to get."""
    low = running("low", 13, computed=12, blocks=3, priority=-10)
    urgent = sequence("urgent", 15, priority=10)
    got = decide([urgent], [low], 1)
    assert got == StepPlan(
        preempted=(Preemption(low, urgent),),
        admitted=(Admission(urgent, 4),),
        chunks=(Chunk(urgent, 15, 0, True),),
    )


def test_urgent_work_takes_the_blocks_of_those_that_wait_before_a_running_one_loses_any() -> None:
    """A slot and two blocks are short. The waiting one has the blocks; the running one keeps its own and pauses."""
    lows = [running(f"low{n}", 6, computed=5, blocks=2, priority=-10) for n in range(4)]
    waits = paused("waits", 6, computed=5, blocks=2, priority=-10, arrived=1.0)
    urgent = sequence("urgent", 5, priority=10)
    got = decide([urgent, waits], lows, 0)
    assert got.preempted == (Preemption(waits, urgent, RECOMPUTE), Preemption(lows[3], urgent, PAUSE))
    assert got.admitted == (Admission(urgent, 2),)


def test_recomputed_too_often_it_is_swapped_whatever_that_costs_or_spared_and_the_urgent_one_is_named() -> None:
    low = running("low", 21, computed=20, blocks=6, priority=-10)
    low.pushed_out = 4
    urgent = sequence("urgent", 17, priority=10)
    got = decide([urgent], [low], 3, host_blocks_free=6, cost=Cost(1.0, 100.0))
    assert got.preempted == (Preemption(low, urgent, SWAP),)
    got = decide([urgent], [low], 3, host_blocks_free=5)
    assert got == StepPlan(chunks=(Chunk(low, 1, 0, True),), blocked=urgent)
    got = decide([urgent], [low], 5, config(slots=1))
    assert got.preempted == (Preemption(low, urgent, PAUSE),), "a pause loses nothing: it is always allowed"


def test_a_spared_one_that_waits_goes_on_so_that_its_blocks_become_free() -> None:
    low = paused("low", 21, computed=20, blocks=6, priority=-10)
    low.pushed_out = 4
    urgent = sequence("urgent", 40, priority=10)
    got = decide([urgent, low], [], 10)
    assert got == StepPlan(admitted=(Admission(low, 0),), chunks=(Chunk(low, 1, 0, True),), blocked=urgent)


def test_a_paused_one_that_lacks_a_block_gets_it_from_those_behind_however_often_they_were_recomputed() -> None:
    ahead, behind = paused("a", 8, computed=7, blocks=2), paused("b", 9, computed=8, blocks=3, priority=-10)
    behind.pushed_out = 4
    got = decide([ahead, behind], [], 0)
    assert got.preempted == (Preemption(behind, None, RECOMPUTE),)
    assert got.admitted == (Admission(ahead, 1),)


# --- who comes in ---


def test_what_one_has_already_it_is_not_given_again() -> None:
    kept = paused("a", 9, computed=8, blocks=2)
    swapped = sequence("b", 9, arrived=1.0, started=True)
    swapped.computed, swapped.host_blocks = 8, 2
    got = decide([kept, swapped], [], 10)
    assert got.admitted == (Admission(kept, 1), Admission(swapped, 3))
    assert got.chunks == (Chunk(kept, 1, 0, True), Chunk(swapped, 1, 0, True))


def test_cached_blocks_count_as_taken_only_where_nobody_held_them() -> None:
    """Twelve of 15 tokens are cached, one of these three blocks is held: a fresh block and two of the cached leave."""
    new = sequence("new", 15)
    for free, comes in ((2, False), (3, True)):
        view = View([new], [], free, cached_blocks=lambda s: 3, unheld_blocks=lambda s: 2)
        got = plan(view, config(), PRIORITY)
        assert got.admitted == ((Admission(new, 1, cached=3),) if comes else ())
        assert got.chunks == ((Chunk(new, 3, 0, True),) if comes else ())


def test_a_cached_block_that_a_victim_held_is_not_counted_as_free_as_well() -> None:
    """Nothing is free. The victim gives three blocks, two of which the urgent request begins with: there are two fresh
    ones too few."""
    low = running("low", 11, computed=10, blocks=3, priority=-10)
    urgent = sequence("urgent", 18, priority=10)  # five blocks
    view = View([urgent], [low], 0, cached_blocks=lambda s: 2, unheld_blocks=lambda s: 0)
    assert plan(view, config(), PRIORITY).admitted == ()
    assert plan(view._replace(blocks_free=2), config(), PRIORITY).admitted == (Admission(urgent, 3, cached=2),)


def test_an_earlier_admission_that_borrowed_a_victims_blocks_is_counted_too() -> None:
    """`first` shares two blocks that only `low` holds; `second` then takes them from `low`, which frees one."""
    low = running("low", 11, computed=10, blocks=3, priority=-10)
    first = sequence("first", 11, priority=10)
    second = sequence("second", 7, priority=10, arrived=1.0)
    view = View([first, second], [low], 1, cached_blocks=lambda s: 2 if s is first else 0, unheld_blocks=lambda s: 0)
    got = plan(view, config(), PRIORITY)
    assert got.admitted == (Admission(first, 1, cached=2),)
    got = plan(view._replace(blocks_free=2), config(), PRIORITY)
    assert got.preempted == (Preemption(low, second),)
    assert got.admitted == (Admission(first, 1, cached=2), Admission(second, 2))


def test_of_several_that_share_their_blocks_as_many_go_as_free_enough_together() -> None:
    """Two choices hold the same two blocks and one each; four are needed, which only both together free."""
    lows = [running(f"low{n}", 11, computed=10, blocks=3, priority=-10) for n in range(2)]
    urgent = sequence("urgent", 15, priority=10)
    view = View([urgent], lows, 0, shared=lambda _: ((0, 2), (1, 2)))
    assert {p.victim for p in plan(view, config(), PRIORITY).preempted} == set(lows)


@pytest.mark.parametrize("pushed_out", [0, 9])
def test_each_possible_victims_blocks_are_looked_at_only_a_few_times(pushed_out: int) -> None:
    """However many share a prefix, whether they make room for a large request, or are spared and it waits."""
    looked: Counter[SequenceState] = Counter()

    def shared(state: SequenceState) -> tuple[tuple[int, int], ...]:
        looked[state] += 1
        return ((0, 200),)

    lows = [running(f"low{n:03}", 11, computed=10, blocks=3, priority=-10) for n in range(200)]
    for low in lows:
        low.pushed_out = pushed_out
    urgent = sequence("urgent", 1500, priority=10)
    urgent.limit_tokens = 1600
    settings = config(slots=256, step_token_budget=256, blocks=1024, max_model_len=2000)
    got = plan(View([urgent], lows, 0, shared=shared), settings, PRIORITY)
    assert (got.blocked is urgent) == (pushed_out > 0)
    assert len(got.preempted) == (0 if pushed_out else 188), "two blocks each that are not shared, of 376"
    assert max(looked.values()) <= 8


def test_nobody_is_preempted_for_a_request_behind_a_prompt_as_long_as_the_budget() -> None:
    """It could run no token in this step: the victim goes on decoding until the prompt ahead is nearly through."""
    ahead = running("ahead", 40, computed=0, blocks=11, priority=10)
    lows = [running(f"low{n}", 6, computed=5, blocks=2, priority=-10) for n in range(3)]
    urgent = sequence("urgent", 5, priority=10)
    got = decide([urgent], [ahead, *lows], 30)
    assert (got.preempted, got.admitted) == ((), ())
    ahead.computed = 39 - 15
    got = decide([urgent], [ahead, *lows], 30)
    assert got.preempted == (), "16 tokens ahead of it are the whole budget"
    ahead.computed += 1
    got = decide([urgent], [ahead, *lows], 30)
    assert got.preempted == (Preemption(lows[2], urgent, PAUSE),)


def test_an_equal_comes_in_only_if_half_a_block_per_running_sequence_stays_free_an_urgent_one_always() -> None:
    run = [running(f"r{n}", 6, computed=5, blocks=2) for n in range(4)]
    settings = config(slots=8)
    new, urgent = sequence("new", 7), sequence("urgent", 7, priority=1)  # 2 blocks
    assert decide([new], run, 3, settings).admitted == ()
    assert decide([new], run, 4, settings).admitted == (Admission(new, 2),)
    assert decide([urgent], run, 2, settings).admitted == (Admission(urgent, 2),)
    assert decide([urgent], run, 2, settings).preempted == ()
    assert decide([new], [], 2, settings).admitted == (Admission(new, 2),), "alone it may have the last block"
    kept = paused("kept", 7, computed=6, blocks=2)
    assert decide([kept], run, 0, settings).admitted == (Admission(kept, 0),), "it asks for nothing"


def test_nobody_behind_a_victim_is_admitted_into_what_it_left() -> None:
    """Thirteen blocks become free, and one is used; the small request that waits could have the others."""
    first, victim = running("a", 9, computed=8, blocks=2), running("b", 50, computed=49, blocks=13)
    late = sequence("late", 2, priority=-5)
    got = decide([late], [first, victim], 0)
    assert got.preempted == (Preemption(victim, None),)
    assert got.admitted == ()


# --- one that is too large ---


def test_one_too_large_is_passed_by_smaller_equals_only_so_often_and_each_time_is_counted() -> None:
    run = [running("r", 6, computed=5, blocks=2)]
    large = sequence("large", 40, arrived=1.0)  # eleven blocks
    smalls = [small(f"small{n}", arrived=2.0 + n) for n in range(3)]
    settings = config(max_overtakes=2, slots=8)
    got = decide([large, *smalls], run, 9, settings)
    assert [a.sequence for a in got.admitted] == smalls[:2]
    assert got.overtaken == (large, large)
    large.overtaken = 1
    assert [a.sequence for a in decide([large, *smalls], run, 9, settings).admitted] == smalls[:1]
    large.overtaken = 2
    assert decide([large, *smalls], run, 9, settings).admitted == (), "what becomes free gathers for it"
    assert [a.sequence for a in decide([large, *smalls], run, 11, settings).admitted] == [large]


def test_one_that_passes_leaves_a_block_for_each_that_runs_and_all_that_it_is_expected_to_need() -> None:
    """Two run; it needs a block now and two in the end: four in all."""
    run = [running(f"r{n}", 6, computed=5, blocks=2) for n in range(2)]
    passing = small("small", output=5, arrived=1.0)
    assert decide([sequence("large", 40), passing], run, 3).admitted == ()
    assert decide([sequence("large", 40), passing], run, 4).admitted == (Admission(passing, 1),)
    assert decide([passing], run, 2).admitted == (Admission(passing, 1),), (
        "who passes nobody needs half a block for each"
    )


def test_one_too_large_is_passed_by_nobody_less_urgent_and_a_started_one_by_nobody_new() -> None:
    large, low, equal = sequence("large", 40), sequence("low", 2, priority=-1), sequence("equal", 2, arrived=1.0)
    assert decide([large, low], [running("r", 6, computed=5, blocks=2)], 8).admitted == ()
    large.started = True
    large.key = PRIORITY.key(large)
    assert decide([large, equal], [running("r", 6, computed=5, blocks=2)], 8).admitted == ()


def test_one_that_finds_no_slot_is_passed_by_nobody() -> None:
    run = [running(f"r{n}", 6, computed=5, blocks=2) for n in range(4)]
    got = decide([sequence("a", 5), sequence("b", 2, arrived=1.0)], run, 30)
    assert (got.admitted, got.overtaken) == ((), ())


def test_only_so_many_are_looked_at_behind_one_that_is_too_large() -> None:
    run = [running("r", 6, computed=5, blocks=2)]
    large = [sequence(f"large{n}", 40, arrived=float(n)) for n in range(LOOK_AHEAD)]
    last = small("small", arrived=99.0)
    assert decide([*large, last], run, 8).admitted == (Admission(last, 1),)
    large.append(sequence("one more", 40, arrived=50.0))
    assert decide([*large, last], run, 8).admitted == ()


# --- siblings ---


def test_a_sibling_waits_for_the_common_prompt_blocks_nobody_and_then_shares_it() -> None:
    """A prompt of 10 tokens: nine are shared, in two full blocks and a third that is copied into a fresh one."""
    leader = running("a", 10, computed=8, blocks=3)
    follower, other = sequence("b", 10), sequence("c", 3, arrived=1.0)
    follower.leader = leader
    got = decide([follower, other], [leader], 30)
    assert got.admitted == (Admission(other, 1),)
    assert got.overtaken == ()
    leader.computed = 9
    got = decide([follower, other], [leader], 30)
    assert got.admitted == (Admission(follower, 1, source=leader), Admission(other, 1))
    assert Chunk(follower, 1, 0, True) in got.chunks
    leader.running = False
    got = decide([follower], [], 30)
    assert got.admitted == (Admission(follower, 1, source=leader),), "one that is paused has the prompt too"


def test_a_sibling_does_not_come_in_with_a_leader_that_has_not_computed_the_prompt_nor_before_it() -> None:
    leader, follower = sequence("b", 10), sequence("a", 10)
    follower.leader = leader
    assert [a.sequence for a in decide([follower, leader], [], 30).admitted] == [leader]


def test_a_leader_whose_prompt_is_being_shared_does_not_lose_its_blocks_in_the_same_step() -> None:
    leader = running("z", 12, computed=11, blocks=3, priority=-10)
    follower = sequence("f", 10)
    follower.prompt_tokens, follower.leader = 10, leader
    urgent_later = sequence("g", 30, arrived=1.0)  # eight blocks: the leader's three would do
    got = decide([follower, urgent_later], [leader], 6)
    assert got.admitted == (Admission(follower, 1, source=leader),)
    assert got.preempted == ()


# --- the budget ---


def test_less_urgent_decodes_yield_the_whole_step_to_an_urgent_prompt_and_none_of_them_the_next() -> None:
    lows = [running(f"low{n}", 6, computed=5, blocks=2, priority=-10) for n in range(15)]
    urgent = running("urgent", 40, computed=0, blocks=11, priority=10)
    settings = config(slots=16)
    got = decide([], [urgent, *lows], 0, settings)
    assert got == StepPlan(chunks=(Chunk(urgent, 16, 0, False),), yielded=tuple(lows))
    for low in lows:
        low.yields = 1
    urgent.computed = 16
    got = decide([], [urgent, *lows], 0, settings)
    assert got.yielded == ()
    assert got.chunks[-1] == Chunk(urgent, 1, 0, False)


def test_decodes_yield_no_more_than_an_urgent_prompt_needs_the_last_in_order_first() -> None:
    lows = [running(f"low{n}", 6, computed=5, blocks=2, priority=-10, arrived=float(n)) for n in range(15)]
    urgent = running("urgent", 4, computed=0, blocks=2, priority=10)
    got = decide([], [urgent, *lows], 0, config(slots=16))
    assert got.yielded == tuple(lows[12:])
    assert got.chunks[-1] == Chunk(urgent, 4, 0, True)


def test_equal_decodes_yield_an_eighth_and_more_urgent_ones_nothing() -> None:
    for priority, tokens in ((0, 16 // 8), (10, 1)):
        decodes = [running(f"r{n}", 6, computed=5, blocks=2, priority=priority) for n in range(15)]
        prompt = running("z", 40, computed=0, blocks=11)
        got = decide([], [*decodes, prompt], 0, config(slots=16))
        assert got.chunks[-1] == Chunk(prompt, tokens, 0, False)
        assert len(got.yielded) == tokens - 1
