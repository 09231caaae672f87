"""Any sequence of deeds on two engines: blocks are conserved, and every output is as if alone."""

from __future__ import annotations

import random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from cluster.config import BatchingMode, Order, WithinClass
from cluster.types import PreemptionMeans
from tests.conformance.engine_kit import config
from tests.stateful.world import World, any_request


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        mode=st.sampled_from(BatchingMode),
        order=st.sampled_from(Order),
        within_class=st.sampled_from(WithinClass),
        slots=st.integers(1, 6),
        budget=st.integers(6, 24),
        block_size=st.sampled_from([1, 3, 4]),
        spare_blocks=st.integers(0, 16),
        host_blocks=st.sampled_from([0, 5, 64]),
        max_recomputes=st.integers(0, 3),
        prefix_cache=st.booleans(),
    )
    def begin(
        self,
        mode: BatchingMode,
        order: Order,
        within_class: WithinClass,
        slots: int,
        budget: int,
        block_size: int,
        spare_blocks: int,
        host_blocks: int,
        max_recomputes: int,
        prefix_cache: bool,
    ) -> None:
        self.world = World(
            config(
                mode=mode,
                order=order,
                within_class=within_class,
                slots=slots,
                step_token_budget=budget,
                block_size_tokens=block_size,
                max_model_len=32,
                blocks=-(-32 // block_size) + spare_blocks,
                host_blocks=host_blocks,
                max_recomputes=max_recomputes,
                prefix_cache=prefix_cache,
            )
        )

    @rule(seed=st.integers(0, 10_000), on=st.integers(0, 1))
    def add(self, seed: int, on: int) -> None:
        for r in any_request(random.Random(seed), len(self.world.requests), self.world.settings):
            self.world.add(on, r)

    @rule(steps=st.integers(1, 6), on=st.integers(0, 1))
    def step(self, steps: int, on: int) -> None:
        for _ in range(steps):
            self.world.step(on)

    @precondition(lambda self: self.world.at)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.world.abort(data.draw(st.sampled_from(sorted(self.world.at))))

    @precondition(lambda self: self.world.at)
    @rule(data=st.data(), means=st.sampled_from(PreemptionMeans))
    def preempt(self, data: st.DataObject, means: PreemptionMeans) -> None:
        self.world.preempt(data.draw(st.sampled_from(sorted(self.world.at))), means)

    @precondition(lambda self: self.world.at)
    @rule(data=st.data(), cancel=st.sampled_from([False, False, True]), deeds=st.integers(1, 4))
    def move(self, data: st.DataObject, cancel: bool, deeds: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.world.at)))
        for _ in range(deeds):
            self.world.move_on(name, cancel=cancel)

    @rule(seed=st.integers(0, 1000), on=st.integers(0, 1))
    def shuffle_blocks(self, seed: int, on: int) -> None:
        self.world.shuffle_blocks(on, random.Random(seed))

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.finish()


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
