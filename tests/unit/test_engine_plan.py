"""Single decisions of continuous batching, on literal views. The laws that hold for all plans: tests/conformance."""

from __future__ import annotations

from cluster.config import EngineConfig
from cluster.engine.scheduling.continuous import plan
from cluster.engine.scheduling.plan import Admission, Chunk, Preemption, StepPlan, View
from cluster.engine.scheduling.priority import Priority
from cluster.engine.scheduling.sequence import SequenceState
from cluster.types import RequestId
from tests.conformance.engine_kit import config


def sequence(name: str, tokens: int, *, priority: int = 0, arrived: float = 0.0) -> SequenceState:
    state = SequenceState((RequestId(name), 0), priority, arrived, tokens=tokens)
    state.key = Priority().key(state)
    return state


def running(name: str, tokens: int, *, computed: int, blocks: int, priority: int = 0) -> SequenceState:
    state = sequence(name, tokens, priority=priority)
    state.started, state.computed, state.blocks = True, computed, blocks
    state.key = Priority().key(state)
    return state


def decide(
    waiting: list[SequenceState], run: list[SequenceState], blocks_free: int, settings: EngineConfig | None = None
) -> StepPlan:
    """Blocks of 4 tokens, 4 slots, 16 tokens per step, unless told otherwise."""
    return plan(View(waiting, run, blocks_free), settings or config(), Priority())


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


def test_the_last_in_order_is_preempted_for_growth_and_it_may_be_the_one_that_grows() -> None:
    first, last = running("a", 9, computed=8, blocks=2), running("b", 9, computed=8, blocks=2)
    got = decide([], [first, last], 1)
    assert got == StepPlan(preempted=(Preemption(last, None),), chunks=(Chunk(first, 1, 1, True),))


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
    assert got.preempted == (Preemption(lows[2], urgent),)


def test_an_equal_comes_in_only_if_half_a_block_per_running_sequence_stays_free_an_urgent_one_always() -> None:
    run = [running(f"r{n}", 6, computed=5, blocks=2) for n in range(4)]
    settings = config(slots=8)
    new, urgent = sequence("new", 7), sequence("urgent", 7, priority=1)  # 2 blocks
    assert decide([new], run, 3, settings).admitted == ()
    assert decide([new], run, 4, settings).admitted == (Admission(new, 2),)
    assert decide([urgent], run, 2, settings).admitted == (Admission(urgent, 2),)
    assert decide([urgent], run, 2, settings).preempted == ()
    assert decide([new], [], 2, settings).admitted == (Admission(new, 2),), "alone it may have the last block"


def test_a_request_that_is_too_large_now_is_not_overtaken_by_a_smaller_equal() -> None:
    large, small = sequence("large", 40, arrived=1.0), sequence("small", 2, arrived=2.0)
    assert decide([large, small], [running("r", 6, computed=5, blocks=2)], 8).admitted == ()


def test_nobody_behind_a_victim_is_admitted_into_what_it_left() -> None:
    """Thirteen blocks become free, and one is used; the small request that waits could have the others."""
    first, victim = running("a", 9, computed=8, blocks=2), running("b", 50, computed=49, blocks=13)
    small = sequence("small", 2, priority=-5)
    got = decide([small], [first, victim], 0)
    assert got.preempted == (Preemption(victim, None),)
    assert got.admitted == ()


def test_one_kept_out_only_by_spared_victims_is_named() -> None:
    low = running("low", 6, computed=5, blocks=2, priority=-10)
    low.pushed_out = 4
    urgent = sequence("urgent", 5, priority=10)
    got = decide([urgent], [low], 30, config(slots=1))
    assert got == StepPlan(chunks=(Chunk(low, 1, 0, True),), blocked=urgent)
