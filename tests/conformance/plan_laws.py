"""The laws that a plan keeps, whatever the batching mode and the order; and random views to try them on."""

from __future__ import annotations

import random
from collections.abc import Sequence

from cluster.config import EngineConfig
from cluster.engine.scheduling.order import Order
from cluster.engine.scheduling.plan import StepPlan, View
from cluster.engine.scheduling.sequence import SequenceState
from cluster.types import RequestId
from tests.conformance.engine_kit import config


def random_state(rng: random.Random, n: int) -> SequenceState:
    """A sequence that waits."""
    return SequenceState(
        (RequestId(f"r{n}"), rng.choice((0, 0, 0, 1))),
        rng.choice((-10, 0, 0, 0, 10)),
        float(rng.randrange(6)),
        tokens=rng.randrange(1, 60),
        started=rng.random() < 0.3,
    )


def start(state: SequenceState, block_size: int, rng: random.Random, *, in_prefill: float = 0.35) -> None:
    """Make it a running one: in prefill, or decoding with or without a block for its next token."""
    state.started = True
    state.pushed_out = rng.choice((0, 0, 1, 2))
    if rng.random() < in_prefill and state.tokens > 1:
        state.computed = rng.randrange(state.tokens - 1)
        state.blocks = -(-(state.tokens + 1) // block_size)
    else:
        state.computed = state.tokens - 1
        state.blocks = max(1, -(-(state.tokens - rng.randrange(2)) // block_size))
        state.yields = rng.choice((0, 0, 1, 2, 3))


def random_view(rng: random.Random, order: Order) -> tuple[View, EngineConfig]:
    slots = rng.choice((1, 2, 3, 4, 6, 8, 24))
    block_size = rng.choice((1, 4, 16))
    settings = config(
        slots=slots,
        step_token_budget=rng.choice((slots, slots + 1, 2 * slots, 40)),
        block_size_tokens=block_size,
        blocks=1000,
        max_model_len=64,
        max_recomputes=rng.choice((0, 1, 2, 2)),
    )
    states = [random_state(rng, n) for n in range(rng.randrange(1, slots + 8))]
    running = states[: rng.choice((slots, rng.randrange(slots + 1)))]
    in_prefill = rng.choice((0.05, 0.35))
    for state in running:
        start(state, block_size, rng, in_prefill=in_prefill)
    for state in states:
        state.key = order.key(state)
    used = sum(s.blocks for s in running)
    fits_one = -(-settings.max_model_len // block_size)
    blocks_free = max(fits_one - used, rng.choice((0, 0, 1, 2, 5, 20)))
    line = sorted(states, key=lambda s: s.key)
    view = View([s for s in line if not s.blocks], [s for s in line if s.blocks], blocks_free)
    return view, settings


def snapshot(states: Sequence[SequenceState]) -> list[tuple[object, ...]]:
    return [tuple(getattr(s, name) for name in SequenceState.__slots__) for s in states]


def check_plan(view: View, settings: EngineConfig, order: Order, plan: StepPlan) -> None:
    """Every law that can be seen in one plan."""
    waiting, running = set(view.waiting), set(view.running)
    victims = [p.victim for p in plan.preempted]
    admitted = [a.sequence for a in plan.admitted]
    ran = [c.sequence for c in plan.chunks]
    size = settings.block_size_tokens

    # Everybody is in one place only.
    assert len(set(victims)) == len(victims)
    assert set(victims) <= running
    assert admitted == list(view.waiting[: len(admitted)]), "somebody was overtaken"
    after = (running - set(victims)) | set(admitted)
    assert len(set(ran)) == len(ran)
    assert set(ran) <= after, "a victim, or one that waits, was given a part of the step"
    assert set(plan.yielded) <= after - set(ran)
    if plan.blocked is not None:
        assert plan.blocked in waiting - set(admitted)

    # Slots, budget and blocks.
    assert len(after) <= settings.slots
    assert sum(c.tokens for c in plan.chunks) <= settings.step_token_budget
    given = {a.sequence: a.blocks for a in plan.admitted}
    for chunk in plan.chunks:
        given[chunk.sequence] = given.get(chunk.sequence, 0) + chunk.blocks
    assert sum(given.values()) <= view.blocks_free + sum(v.blocks for v in victims)
    for chunk in plan.chunks:
        state = chunk.sequence
        assert 1 <= chunk.tokens <= state.tokens - state.computed
        assert chunk.draws == (chunk.tokens == state.tokens - state.computed)
        assert (state.blocks + given[state]) * size >= state.computed + chunk.tokens
    for admission in plan.admitted:
        assert admission.blocks * size >= admission.sequence.tokens + 1

    # Who may be preempted, and for whom.
    for victim, urgent in plan.preempted:
        if urgent is not None:
            assert urgent in admitted
            assert order.may_preempt(urgent, victim)
            assert victim.pushed_out < settings.max_recomputes
        for state in admitted:
            assert state.key < victim.key, "somebody behind a victim took its place"
    for victim, urgent in plan.preempted:
        if urgent is None:
            assert all(s.key < victim.key for s in running - set(victims)), "not the last in order"

    # Decodes go first, but for those that yield.
    decodes = {s for s in running - set(victims) if s.tokens - s.computed == 1}
    assert decodes - set(plan.yielded) <= set(ran)
    prefill = [c for c in plan.chunks if c.sequence not in decodes]
    for state in plan.yielded:
        assert state in decodes
        assert state.yields < 4
        assert any(not order.may_preempt(state, c.sequence) for c in prefill), "yielded to nobody, or to less urgent"

    # Prefill goes in order, and there is always progress.
    behind = sorted((after - decodes), key=lambda s: s.key)
    assert [c.sequence for c in prefill] == behind[: len(prefill)]
    assert all(c.draws for c in prefill[:-1])
    if after:
        assert plan.chunks
    assert after, "there is work, and none of it can run"
