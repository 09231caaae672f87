"""Each order's own promises, and the bound on how long the short may keep the long waiting."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import EngineConfig, Order, WithinClass
from cluster.engine.scheduling.ageing import Ageing
from cluster.engine.scheduling.choose import order_for
from cluster.engine.scheduling.sequence import SequenceState
from cluster.types import RequestId
from tests.conformance.engine_kit import config
from tests.conformance.plan_machine import Machine

TOKENS_PER_S, LONGEST_WAIT_S = 8.0, 16.0
STEP_S = 0.25


def settings(order: Order, **changes: object) -> EngineConfig:
    return config(
        order=order,
        slots=1,
        blocks=2000,
        max_model_len=2000,
        ageing_tokens_per_s=TOKENS_PER_S,
        longest_wait_s=LONGEST_WAIT_S,
        srpt_margin_tokens=0.0,
        **changes,
    )


def sequence(
    name: str, output: float, *, arrived: float = 0.0, prompt: int = 1, priority: int = 0, started: bool = False
) -> SequenceState:
    return SequenceState(
        (RequestId(name), 0),
        priority,
        arrived,
        tokens=prompt,
        started=started,
        limit_tokens=prompt + max(1, int(output)),
        predicted_tokens=prompt + output,
    )


def names_in_order(order: Order, *states: SequenceState, **changes: object) -> list[str]:
    by = order_for(settings(order, **changes))
    return [s.identity[0] for s in sorted(states, key=by.key)]


# --- who goes first ---


def test_fcfs_knows_neither_priority_nor_length() -> None:
    first, second = sequence("b", 900, priority=-10), sequence("a", 1, arrived=1.0, priority=10)
    assert names_in_order(Order.FCFS, first, second) == ["b", "a"]


def test_sjf_takes_the_shortest_output_whatever_the_prompt() -> None:
    long, short = sequence("a", 50, prompt=1), sequence("b", 10, prompt=900)
    assert names_in_order(Order.SJF, long, short) == ["b", "a"]


def test_sjf_never_interrupts_nor_overtakes_what_has_started() -> None:
    order = order_for(settings(Order.SJF))
    old, new = sequence("a", 900, started=True), sequence("b", 1)
    old.key, new.key = order.key(old), order.key(new)
    assert old.key < new.key
    assert not order.may_preempt(new, old)


def test_srpt_counts_what_is_still_to_come() -> None:
    """The longer one has 5 of its 50 tokens left, the shorter all its 10."""
    long, short = sequence("a", 50, started=True), sequence("b", 10)
    long.tokens += 45
    assert names_in_order(Order.SRPT, long, short) == ["a", "b"]


@pytest.mark.parametrize(("remaining", "pushes"), [(20, False), (19, True)])
def test_srpt_pushes_out_only_who_needs_more_by_more_than_the_margin(remaining: int, pushes: bool) -> None:
    order = order_for(settings(Order.SRPT).model_copy(update={"srpt_margin_tokens": 16.0}))
    victim, new = sequence("a", 36, started=True), sequence("b", remaining)
    victim.key, new.key = order.key(victim), order.key(new)
    assert order.may_preempt(new, victim) is pushes


def test_priority_goes_before_length_and_length_only_counts_within_a_class() -> None:
    high, low_long, low_short = sequence("h", 100, priority=10), sequence("a", 50), sequence("b", 10, arrived=1.0)
    assert names_in_order(Order.PRIORITY, high, low_long, low_short) == ["h", "a", "b"]
    assert names_in_order(Order.PRIORITY, high, low_long, low_short, within_class=WithinClass.SJF) == ["h", "b", "a"]
    low_long.started = True
    assert names_in_order(Order.PRIORITY, high, low_long, low_short, within_class=WithinClass.SJF) == ["h", "a", "b"]


# --- ageing ---

seconds = st.floats(0, 1000)
tokens = st.floats(0, 10_000)


@given(st.floats(0.1, 1000), st.floats(0.1, 1000), seconds, seconds, tokens, tokens)
def test_nobody_goes_before_one_that_arrived_the_longest_wait_earlier(
    tokens_per_s: float, longest_wait_s: float, arrived: float, later: float, long: float, short: float
) -> None:
    ageing = Ageing(tokens_per_s, longest_wait_s)
    ahead = ageing.deadline_s(arrived, long)
    assert ageing.deadline_s(arrived + longest_wait_s + later, short) >= ahead


@given(st.floats(0.1, 1000), st.floats(0.1, 1000), st.floats(0.01, 1000), tokens, tokens)
def test_a_second_of_waiting_counts_like_so_many_tokens(
    tokens_per_s: float, longest_wait_s: float, later: float, mine: float, his: float
) -> None:
    """Whose advantage is less than the wait has credited does not go before; all in exact arithmetic but for rounding."""
    ageing = Ageing(tokens_per_s, longest_wait_s)
    if mine - his < later * tokens_per_s * (1 - 1e-6) - 1e-6:
        assert ageing.deadline_s(later, his) > ageing.deadline_s(0.0, mine)


def wait_behind_shorts(order: Order, output: int) -> float:
    """Seconds until a request of `output` tokens gets its first, on one slot that a stream of others could fill alone.

    A step takes a quarter of a second, and in each a request of one token comes, which one step serves.
    """
    machine = Machine(settings(order))
    long = sequence("long", output)
    machine.add(long)
    now_s = 0.0
    while not long.running:
        machine.add(sequence(f"short{now_s}", 1, arrived=now_s))
        machine.step()
        now_s += STEP_S
        assert now_s < 100 * LONGEST_WAIT_S, "it starves"
    return now_s - STEP_S


@pytest.mark.parametrize("order", [Order.SJF, Order.SRPT])
@pytest.mark.parametrize("output", [2, 65, 101, 129, 1000])
def test_a_stream_of_short_requests_keeps_a_long_one_waiting_no_longer_than_the_bound(
    order: Order, output: int
) -> None:
    """A short one that comes after t seconds has the deadline t + 1/8, the long one output/8, at most 16. The short one
    goes first while t < (output - 1)/8, and while t < 16 - 1/8. Those that come so early are served one per step, so
    the long one starts with the first step at or after that."""
    bound_s = min((output - 1) / TOKENS_PER_S, LONGEST_WAIT_S - 1 / TOKENS_PER_S)
    first_step_s = -(-bound_s // STEP_S) * STEP_S
    assert wait_behind_shorts(order, output) == first_step_s
    assert first_step_s <= LONGEST_WAIT_S


def test_without_the_bound_the_same_stream_keeps_it_waiting_for_as_long_as_its_length_says() -> None:
    """The test above would show a starving request: with the longest wait far away only the length counts."""
    machine = Machine(settings(Order.SJF).model_copy(update={"longest_wait_s": 1e9}))
    long = sequence("long", 1000)
    machine.add(long)
    for step in range(400):
        machine.add(sequence(f"short{step}", 1, arrived=step * STEP_S))
        machine.step()
    assert not long.running
