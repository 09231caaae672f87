"""Any sequence of adds, aborts, steps and moved blocks: blocks are conserved, and every output is as if alone."""

from __future__ import annotations

import random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cluster.config import BatchingMode, Order
from cluster.engine.engine import Engine
from cluster.types import FinishReason, Request
from tests.conformance.engine_kit import (
    Output,
    backend_for,
    collect,
    config,
    engine,
    gather,
    request,
    undisturbed,
)
from tests.stateful.permute import permute_blocks


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        mode=st.sampled_from(BatchingMode),
        order=st.sampled_from(Order),
        slots=st.integers(1, 6),
        budget=st.integers(6, 24),
        block_size=st.sampled_from([1, 3, 4]),
        spare_blocks=st.integers(0, 16),
        max_recomputes=st.integers(0, 3),
    )
    def begin(
        self,
        mode: BatchingMode,
        order: Order,
        slots: int,
        budget: int,
        block_size: int,
        spare_blocks: int,
        max_recomputes: int,
    ) -> None:
        self.settings = config(
            mode=mode,
            order=order,
            slots=slots,
            step_token_budget=budget,
            block_size_tokens=block_size,
            max_model_len=32,
            blocks=-(-32 // block_size) + spare_blocks,
            max_recomputes=max_recomputes,
        )
        self.backend = backend_for(self.settings)
        self.engine: Engine = engine(self.settings, self.backend)
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, Output] = {}
        self.aborted: set[str] = set()

    @rule(
        prompt=st.integers(1, 31),
        max_tokens=st.integers(1, 24),
        priority=st.sampled_from([-10, 0, 0, 10]),
        temperature=st.sampled_from([0.0, 1.0]),
        stop=st.sampled_from([(), ("e",), ("th", "a b")]),
        ignore_eos=st.booleans(),
    )
    def add(
        self, prompt: int, max_tokens: int, priority: int, temperature: float, stop: tuple[str, ...], ignore_eos: bool
    ) -> None:
        n = len(self.requests)
        r = request(
            f"r{n}",
            prompt=prompt,
            max_tokens=max_tokens,
            priority=priority,
            arrived=float(n % 5),
            temperature=temperature,
            seed=n,
            stop=stop,
            ignore_eos=ignore_eos,
        )
        assert self.engine.add(r, 0) is None
        self.requests[r.request_id] = r

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        r = self.requests[data.draw(st.sampled_from(sorted(self.requests)))]
        live = not (self.outputs.get(r.request_id, Output()).ends or r.request_id in self.aborted)
        assert self.engine.abort(r.request_id, 0) == live
        if live:
            self.aborted.add(r.request_id)

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            gather(self.engine.step(), self.outputs)
            self.engine.check_integrity()

    @rule(seed=st.integers(0, 1000))
    def move_live_blocks(self, seed: int) -> None:
        permute_blocks(self.engine, self.backend.move_blocks, random.Random(seed))

    @invariant()
    def books_are_right(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        collect(self.engine, self.outputs)
        load = self.engine.load()
        assert (load.blocks_free, load.running, load.waiting) == (self.settings.blocks, (), ())
        assert self.outputs.keys() == self.requests.keys()
        for name, r in self.requests.items():
            got, alone = self.outputs[name], undisturbed(r, max_model_len=32)
            assert got.ends == 1
            if name in self.aborted:
                assert got.finish is FinishReason.ABORT
                assert got.token_ids == alone.token_ids[: len(got.token_ids)]
                assert alone.text.startswith(got.text)
            else:
                assert (got.token_ids, got.text, got.finish) == (alone.token_ids, alone.text, alone.finish)


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
