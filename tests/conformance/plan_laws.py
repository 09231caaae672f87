"""The laws that a plan keeps, whatever the batching mode and the order; and random views to try them on.

A view is drawn together with a `Memory`, which says which block is whose: blocks are shared, cached, paused with and
swapped out, and a plan is carried out on it block by block, so that no count of the planner's own is believed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cluster.config import BatchingMode, EngineConfig
from cluster.engine.scheduling.admission import LOOK_AHEAD
from cluster.engine.scheduling.order import Order
from cluster.engine.scheduling.plan import Cost, StepPlan, View
from cluster.engine.scheduling.sequence import SequenceState
from cluster.types import PreemptionMeans, RequestId
from tests.conformance.engine_kit import config

LONGEST = 64

OrderMaker = Callable[[EngineConfig], Order]


@dataclass
class Memory:
    """Which blocks are in whose table, which are free, and which of a waiting sequence's prefix are cached."""

    total: int
    tables: dict[SequenceState, tuple[int, ...]] = field(default_factory=dict)
    cached: dict[SequenceState, tuple[int, ...]] = field(default_factory=dict)

    def held(self) -> set[int]:
        return {block for table in self.tables.values() for block in table}

    def free(self) -> set[int]:
        return set(range(self.total)) - self.held()

    def cached_blocks(self, state: SequenceState) -> int:
        return len(self.cached.get(state, ()))

    def unheld_blocks(self, state: SequenceState) -> int:
        return len(set(self.cached.get(state, ())) - self.held())

    def shared_blocks(self, state: SequenceState) -> list[tuple[int, int]]:
        holders = Counter(b for table in self.tables.values() for b in table)
        return [(b, holders[b]) for b in self.tables[state] if holders[b] > 1]

    def carry_out(self, plan: StepPlan, settings: EngineConfig) -> None:
        """As the engine would; fails where a block is taken that is not there."""
        size = settings.block_size_tokens
        for victim, _, means in plan.preempted:
            if means is not PreemptionMeans.PAUSE:
                del self.tables[victim]
        for admission in plan.admitted:  # before anybody takes fresh ones
            state, source = admission.sequence, admission.source
            assert not (admission.cached and (state in self.tables or source))
            if source is not None:
                self.tables[state] = self.tables[source][: (state.prompt_tokens - 1) // size]
                assert len(self.tables[source]) * size >= state.prompt_tokens - 1
            elif state not in self.tables:
                assert admission.cached <= len(self.cached.get(state, ()))
                self.tables[state] = self.cached.get(state, ())[: admission.cached]
        for admission in plan.admitted:
            self._take(admission.sequence, admission.blocks)
        for chunk in plan.chunks:
            self._take(chunk.sequence, chunk.blocks)
            start = first_position(plan, chunk.sequence, size)
            assert len(self.tables[chunk.sequence]) * size >= start + chunk.tokens, "no block for a token"

    def _take(self, state: SequenceState, blocks: int) -> None:
        free = sorted(self.free())
        assert 0 <= blocks <= len(free), f"{blocks} blocks taken, {len(free)} free"
        self.tables[state] += tuple(free[:blocks])


def first_position(plan: StepPlan, state: SequenceState, size: int) -> int:
    """Where a sequence goes on once the plan's admissions have been carried out."""
    for admission in plan.admitted:
        if admission.sequence is state:
            if admission.source is not None:
                return state.prompt_tokens - 1
            return max(state.computed, admission.cached * size)
    return state.computed


@dataclass
class Scene:
    view: View
    settings: EngineConfig
    order: Order
    memory: Memory


def random_state(rng: random.Random, n: int) -> SequenceState:
    """A sequence that waits."""
    tokens = rng.randrange(1, 60)
    started = rng.random() < 0.3
    return SequenceState(
        (RequestId(f"r{n}"), rng.choice((0, 0, 0, 1))),
        rng.choice((-10, 0, 0, 0, 10)),
        float(rng.randrange(6)),
        tokens=tokens,
        started=started,
        prompt_tokens=rng.randrange(1, tokens + 1) if started else tokens,
        limit_tokens=(limit := rng.randrange(tokens + 1, LONGEST + 1)),
        predicted_tokens=rng.uniform(tokens + 1, limit),
    )


def start(state: SequenceState, block_size: int, rng: random.Random, *, in_prefill: float = 0.35) -> None:
    """Make it one that runs, or did: in prefill, or decoding with or without a block for its next token."""
    state.started = True
    state.pushed_out = rng.choice((0, 0, 1, 2))
    if rng.random() < in_prefill and state.tokens > 1:
        state.computed = rng.randrange(state.tokens - 1)
        state.blocks = -(-(state.tokens + 1) // block_size)
    else:
        state.computed = state.tokens - 1
        state.blocks = max(1, -(-(state.tokens - rng.randrange(2)) // block_size))
        state.yields = rng.choice((0, 0, 1))


def random_scene(rng: random.Random, mode: BatchingMode, make_order: OrderMaker) -> Scene:
    slots = rng.choice((1, 2, 3, 4, 6, 8, 24))
    size = rng.choice((1, 4, 16))
    states = [random_state(rng, n) for n in range(rng.randrange(1, slots + 8))]
    running = states[: rng.choice((0, slots, rng.randrange(slots + 1)))]
    paused = [s for s in states[len(running) :] if rng.random() < 0.2]
    in_prefill = rng.choice((0.05, 0.35))
    for state in [*running, *paused]:
        start(state, size, rng, in_prefill=in_prefill)
        if mode is not BatchingMode.CONTINUOUS:
            state.blocks = -(-state.limit_tokens // size)
    for state in running:
        state.running = True
    for state in paused:
        state.yields = 0
    memory = _lay_out([*running, *paused], size, rng)
    memory.total = max(memory.total + rng.choice((0, 0, 1, 2, 5, 20)), -(-LONGEST // size))
    settings = config(
        mode=mode,
        slots=slots,
        step_token_budget=rng.choice((slots, slots + 1, 2 * slots, 40)),
        block_size_tokens=size,
        blocks=memory.total,
        max_model_len=LONGEST,
        max_recomputes=rng.choice((0, 1, 2, 2)),
        max_overtakes=rng.choice((0, 1, 4)),
    )
    order = make_order(settings)
    waiting = [s for s in states if s not in running]
    for state in waiting:
        state.overtaken = rng.choice((0, 0, 0, 3))
        if not state.blocks:
            _remember(state, waiting, running, paused, memory, size, rng)
    for state in states:
        state.key = order.key(state)
    line = sorted(states, key=lambda s: s.key)
    view = View(
        [s for s in line if s in waiting],
        [s for s in line if s in running],
        len(memory.free()),
        rng.choice((0, 3, 100)),
        Cost(1.0, rng.choice((0.5, 4.0, 40.0))),
        memory.cached_blocks,
        memory.unheld_blocks,
        rng.randrange(len(running), slots + 3) if running else 0,
        rng.choice((None, [s for s in line if s in paused])),
        memory.shared_blocks,
    )
    return Scene(view, settings, order, memory)


def _lay_out(holders: Sequence[SequenceState], size: int, rng: random.Random) -> Memory:
    """Tables, some of which begin with another's blocks that are full."""
    memory = Memory(0)
    for state in holders:
        shared: tuple[int, ...] = ()
        if memory.tables and rng.random() < 0.3:
            other = rng.choice(list(memory.tables))
            full = min(state.computed, other.computed) // size
            shared = memory.tables[other][: rng.randrange(full + 1)]
        own = state.blocks - len(shared)
        memory.tables[state] = shared + tuple(range(memory.total, memory.total + own))
        memory.total += own
    return memory


def _remember(
    state: SequenceState,
    waiting: Sequence[SequenceState],
    running: Sequence[SequenceState],
    paused: Sequence[SequenceState],
    memory: Memory,
    size: int,
    rng: random.Random,
) -> None:
    """Make a waiting one that holds nothing swapped out, or a sibling, or one with a cached beginning; or leave it."""
    what = rng.random()
    if what < 0.15 and state.tokens > 1:
        state.started = True
        state.computed = rng.randrange(1, state.tokens)
        state.host_blocks = -(-(state.tokens + 1) // size)
    elif what < 0.3:
        leaders = [s for s in [*running, *paused, *waiting] if s is not state and s.leader is None]
        if leaders and not any(s.leader is state for s in waiting):
            state.leader = rng.choice(leaders)
            state.leader.prompt_tokens = state.prompt_tokens = min(state.prompt_tokens, state.leader.prompt_tokens)
            if not state.started:
                state.tokens = state.prompt_tokens
    elif what < 0.6:
        most = (state.tokens - 1) // size
        if rng.random() < 0.5 and memory.tables:
            other = rng.choice(list(memory.tables))
            found = memory.tables[other][: min(most, other.computed // size)]
        else:
            free = sorted(memory.free())
            found = tuple(free[: min(most, len(free))])
        memory.cached[state] = found


def snapshot(states: Sequence[SequenceState]) -> list[tuple[object, ...]]:
    return [tuple(getattr(s, name) for name in SequenceState.__slots__) for s in states]


def check_plan(scene: Scene, plan: StepPlan) -> None:
    """Every law that can be seen in one plan of any mode. Carries it out on the scene's memory."""
    view, settings = scene.view, scene.settings
    waiting, running = set(view.waiting), set(view.running)
    victims = {p.victim for p in plan.preempted}
    lost = {p.victim for p in plan.preempted if p.means is not PreemptionMeans.PAUSE}
    admitted = [a.sequence for a in plan.admitted]
    ran = [c.sequence for c in plan.chunks]

    # Everybody is in one place only.
    assert len(victims) == len(plan.preempted)
    assert all(v in running or (v in waiting and v.blocks) for v in victims)
    assert all(v in running for v in victims - lost), "one that waits was paused"
    assert len(set(admitted)) == len(admitted)
    assert set(admitted) <= waiting - victims
    after = (running - victims) | set(admitted)
    assert len(set(ran)) == len(ran)
    assert set(ran) <= after, "a victim, or one that waits, was given a part of the step"
    assert set(plan.yielded) <= after - set(ran)
    if plan.blocked is not None:
        assert plan.blocked in waiting - set(admitted)

    # Slots, budget, host memory and blocks.
    assert len(after) <= settings.slots
    assert sum(c.tokens for c in plan.chunks) + plan.padding_tokens <= settings.step_token_budget
    swapped = [p.victim.blocks for p in plan.preempted if p.means is PreemptionMeans.SWAP]
    assert sum(swapped) <= view.host_blocks_free
    for chunk in plan.chunks:
        left = chunk.sequence.tokens - first_position(plan, chunk.sequence, settings.block_size_tokens)
        assert 1 <= chunk.tokens <= left
        assert chunk.draws == (chunk.tokens == left)
    for admission in plan.admitted:
        if admission.source is not None:
            assert admission.source is admission.sequence.leader
            assert admission.source not in lost
            assert admission.source.computed >= admission.sequence.prompt_tokens - 1
    scene.memory.carry_out(plan, settings)
    for state in admitted:
        most = state.limit_tokens if settings.mode is not BatchingMode.CONTINUOUS else state.tokens + 1
        assert len(scene.memory.tables[state]) * settings.block_size_tokens >= min(most, state.limit_tokens)

    _check_preempted(scene, plan, admitted)
    _check_in_order(scene, plan, admitted)
    assert after, "there is work, and nobody runs"
    assert plan.chunks, "somebody runs, and nothing of it"
    match settings.mode:
        case BatchingMode.STATIC:
            _check_static(scene, plan, after)
        case BatchingMode.DYNAMIC:
            _check_dynamic(scene, plan, after)
        case BatchingMode.CONTINUOUS:
            _check_continuous(scene, plan, after)


def _check_preempted(scene: Scene, plan: StepPlan, admitted: Sequence[SequenceState]) -> None:
    """Who may be preempted, for whom, and by what means."""
    view, settings, order = scene.view, scene.settings, scene.order
    running = set(view.running)
    holders = sorted([s for s in [*view.waiting, *view.running] if s.blocks], key=lambda s: s.key)
    room_for_all = sum(s.blocks for s in holders) <= view.host_blocks_free
    for victim, urgent, means in plan.preempted:
        if urgent is not None:
            assert urgent in admitted
            assert order.may_preempt(urgent, victim)
            if means is PreemptionMeans.RECOMPUTE:
                assert victim.pushed_out < settings.max_recomputes
        else:
            assert means is not PreemptionMeans.PAUSE, "paused for nobody"
        swap_s, recompute_s = victim.blocks * view.cost.swap_block_s, victim.computed * view.cost.prefill_token_s
        if means is PreemptionMeans.SWAP and not (urgent and victim.pushed_out >= settings.max_recomputes):
            assert swap_s <= recompute_s, "the dearer means"
        if means is PreemptionMeans.RECOMPUTE and room_for_all:
            assert recompute_s < swap_s or not victim.computed, "the dearer means"
        for state in admitted:
            assert state.key < victim.key, "somebody behind a victim took its place"
    # Who loses its slot because the pool ran out is the last in order of all that run, and nobody behind it has blocks.
    ran_out = [p.victim for p in plan.preempted if p.urgent is None and p.victim in running]
    stay = running - {p.victim for p in plan.preempted}
    for victim in ran_out:
        assert all(s.key < victim.key for s in stay), "not the last in order"
        paused_behind = {s for s in view.waiting if s.blocks and s.key > victim.key}
        assert paused_behind <= {p.victim for p in plan.preempted}, (
            "one that waits kept blocks, one that runs lost its own"
        )
    if holders and holders[0] in {p.victim for p in plan.preempted}:
        assert any(s.key < holders[0].key for s in admitted), (
            "the first of all was a victim, and for nobody ahead of it"
        )


def _waits_for_sibling(state: SequenceState, plan: StepPlan) -> bool:
    leader = state.leader
    if leader is None or state.blocks or state.host_blocks or state.prompt_tokens <= 1:
        return False
    lost = {p.victim for p in plan.preempted if p.means is not PreemptionMeans.PAUSE}
    return not leader.blocks or leader.computed < state.prompt_tokens - 1 or leader in lost


def _check_in_order(scene: Scene, plan: StepPlan, admitted: Sequence[SequenceState]) -> None:
    """Nobody is passed but siblings that wait, the spared, and those that are too large, which is counted."""
    view, settings, order = scene.view, scene.settings, scene.order
    siblings_wait = settings.mode is not BatchingMode.STATIC
    counted = dict.fromkeys(view.waiting, 0)
    for state in plan.overtaken:
        counted[state] += 1
    passed: dict[SequenceState, int] = {}
    for n, state in enumerate(view.waiting):
        if state in admitted:
            continue
        behind = [s for s in view.waiting[n + 1 :] if s in admitted]
        if siblings_wait and _waits_for_sibling(state, plan):
            lost_later = state.leader in {p.victim for p in plan.preempted}
            assert lost_later or not counted[state], "one that only waits for a sibling was overtaken"
            continue
        if plan.blocked is not None:
            behind = [s for s in behind if not (s.blocks and s.key > plan.blocked.key)]
        assert state not in {p.victim for p in plan.preempted} or not behind
        for s in behind:
            assert not order.may_preempt(state, s), "a less urgent one slipped past"
            assert s.started or not state.started, "new work overtook started work"
        passed[state] = len(behind)
    for state, times in passed.items():
        if plan.blocked is None:
            assert counted[state] == times, "passed and not counted"
        assert counted[state] == 0 or state.overtaken + counted[state] <= settings.max_overtakes
    for state in admitted:
        assert not counted[state]
    first = next(iter(passed), None)
    if first is not None and plan.blocked is None:
        line = list(view.waiting)
        looked = [s for s in line[line.index(first) :] if not (siblings_wait and _waits_for_sibling(s, plan))]
        assert not set(looked[LOOK_AHEAD + 1 :]) & set(admitted)


def _check_static(scene: Scene, plan: StepPlan, after: set[SequenceState]) -> None:
    view = scene.view
    assert not (view.running and (plan.admitted or plan.preempted)), "somebody joined or left a running batch"
    assert not plan.yielded
    rows = min(max(len(after), view.batch_rows if view.running else 0), scene.settings.step_token_budget)
    _check_rectangle(scene, plan, after, rows)


def _check_dynamic(scene: Scene, plan: StepPlan, after: set[SequenceState]) -> None:
    size = scene.settings.block_size_tokens
    joining = {s for s in after if s.tokens - first_position(plan, s, size) > 1}
    assert set(plan.yielded) == (after - joining if joining else set()), "decodes run, or stand still, together"
    if scene.view.running and all(s.tokens - s.computed == 1 for s in scene.view.running):
        stood_still = any(s.yields for s in scene.view.running)
        assert not (stood_still and plan.yielded), "decodes stand still for one batch of joiners after another"
    batch = joining or after
    assert {c.sequence for c in plan.chunks} <= batch
    _check_rectangle(scene, plan, batch, len(batch))


def _check_rectangle(scene: Scene, plan: StepPlan, batch: set[SequenceState], rows: int) -> None:
    """Rows x columns tokens are computed, as many columns as the budget and the longest allow; all draw at once."""
    size, budget = scene.settings.block_size_tokens, scene.settings.step_token_budget
    left = {s: s.tokens - first_position(plan, s, size) for s in batch}
    columns = min(max(left.values()), budget // rows)
    assert sum(c.tokens for c in plan.chunks) + plan.padding_tokens == rows * columns
    draws = [c.draws for c in plan.chunks]
    assert all(draws) or not any(draws)
    assert all(draws) == (columns == max(left.values()))
    if all(draws):
        assert {c.sequence for c in plan.chunks} == batch
    ran = {c.sequence: c.tokens for c in plan.chunks}
    assert max(n - ran.get(s, 0) for s, n in left.items()) == max(left.values()) - columns, "the longest was held up"


def _check_continuous(scene: Scene, plan: StepPlan, after: set[SequenceState]) -> None:
    view, settings, order = scene.view, scene.settings, scene.order
    size = settings.block_size_tokens
    assert not plan.padding_tokens
    decodes = {s for s in after if s.tokens - first_position(plan, s, size) == 1}
    ran = {c.sequence for c in plan.chunks}
    assert decodes - set(plan.yielded) <= ran, "a decode was left out"
    prefill = [c for c in plan.chunks if c.sequence not in decodes]
    for state in plan.yielded:
        assert state in decodes
        assert not state.yields, "it stands still for the second time"
        assert any(not order.may_preempt(state, c.sequence) for c in prefill), "yielded to nobody, or to less urgent"
    if plan.yielded:
        assert sum(c.tokens for c in plan.chunks) == settings.step_token_budget, "yielded for nothing"
    behind = sorted(after - decodes, key=lambda s: s.key)
    assert [c.sequence for c in prefill] == behind[: len(prefill)], "prefill out of order"
    assert all(c.draws for c in prefill[:-1])
    waiting_decodes = [s for s in view.waiting if s in after and s in decodes]
    assert all(s in ran or s in plan.yielded for s in waiting_decodes)
