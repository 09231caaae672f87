"""An engine without a model: it carries plans out on literal sequences, and each of them keeps every law.

What the engine does with tokens and tensors is left out; what is scheduled, and when, is all here.
"""

from __future__ import annotations

from collections.abc import Callable

from cluster.config import EngineConfig
from cluster.engine.scheduling.choose import order_for, planner_for
from cluster.engine.scheduling.plan import Cost, StepPlan, View
from cluster.engine.scheduling.sequence import Line, SequenceState
from cluster.types import PreemptionMeans
from tests.conformance.plan_laws import Memory, Scene, check_plan, first_position


class Machine:
    def __init__(self, settings: EngineConfig, predict: Predict | None = None) -> None:
        self.settings = settings
        self.order = order_for(settings)
        self.planner = planner_for(settings.mode)
        self.cost = Cost(1.0, 4.0)
        self.predict = predict
        self.memory = Memory(settings.blocks)
        self.waiting, self.running = Line(), Line()
        self.host_blocks_free = settings.host_blocks
        self.batch_rows = 0
        self.means: dict[PreemptionMeans, int] = dict.fromkeys(PreemptionMeans, 0)
        self.overtaken = self.shared = 0

    @property
    def live(self) -> list[SequenceState]:
        return [*self.waiting.items, *self.running.items]

    def add(self, state: SequenceState) -> None:
        state.key = self.order.key(state)
        self.waiting.add(state, state.blocks)

    def step(self) -> tuple[StepPlan, list[SequenceState]]:
        """Returns the plan, and who has made its last token."""
        if not self.running.items:
            self.batch_rows = 0
        view = View(
            self.waiting.items,
            self.running.items,
            len(self.memory.free()),
            self.host_blocks_free,
            self.cost,
            self.memory.cached_blocks,
            self.memory.unheld_blocks,
            self.batch_rows,
            self.waiting.holding,
            self.memory.shared_blocks,
        )
        plan = self.planner(view, self.settings, self.order)
        starts = {c.sequence: first_position(plan, c.sequence, self.settings.block_size_tokens) for c in plan.chunks}
        check_plan(Scene(view, self.settings, self.order, self.memory), plan)
        self._preempt(plan)
        self._admit(plan)
        ended = self._run(plan, starts)
        for line in (self.waiting, self.running):
            line.check_integrity(lambda state: state.blocks)
        return plan, ended

    def _preempt(self, plan: StepPlan) -> None:
        for victim, urgent, means in plan.preempted:
            self.means[means] += 1
            (self.running if victim.running else self.waiting).remove(victim, victim.blocks)
            if means is not PreemptionMeans.PAUSE:
                if means is PreemptionMeans.SWAP:
                    victim.host_blocks = victim.blocks
                    self.host_blocks_free -= victim.blocks
                else:
                    victim.computed = 0
                    victim.pushed_out += urgent is not None
                victim.blocks = 0
            victim.running, victim.yields = False, 0
            self.add(victim)

    def _admit(self, plan: StepPlan) -> None:
        for admission in plan.admitted:
            state = admission.sequence
            self.waiting.remove(state, state.blocks)
            self.shared += admission.source is not None
            state.computed = first_position(plan, state, self.settings.block_size_tokens)
            self.host_blocks_free += state.host_blocks
            state.host_blocks = state.overtaken = 0
            state.blocks = len(self.memory.tables[state])
            state.started = state.running = True
            state.key = self.order.key(state)
            self.running.add(state, state.blocks)
        for state in plan.overtaken:
            state.overtaken += 1
            self.overtaken += 1
        self.batch_rows = max(self.batch_rows, len(self.running))

    def _run(self, plan: StepPlan, starts: dict[SequenceState, int]) -> list[SequenceState]:
        ended = []
        for state in plan.yielded:
            state.yields += 1
        for chunk in plan.chunks:
            state = chunk.sequence
            assert state.computed == starts[state]
            self.running.remove(state, state.blocks)
            state.blocks = len(self.memory.tables[state])
            state.computed += chunk.tokens
            state.yields = 0
            state.tokens += chunk.draws
            if state.tokens >= state.limit_tokens:
                ended.append(state)
                del self.memory.tables[state]
                state.blocks = 0
                continue
            if self.predict is not None:
                state.predicted_tokens = self.predict(state)
            state.key = self.order.key(state)
            self.running.add(state, state.blocks)
        for state in self.live:
            if state.leader in ended:
                state.leader = None
        return ended


Predict = Callable[[SequenceState], float]
