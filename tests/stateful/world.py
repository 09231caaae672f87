"""Two engines, and everything that can happen to a request on them.

Owns: what may be done when, and the laws that hold after each deed and at the end. Who decides what is done is the
test's: hypothesis, or a seeded generator.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.config import EngineConfig
from cluster.engine.engine import Engine
from cluster.engine.live import Live
from cluster.engine.scheduling.plan import Preemption
from cluster.types import EngineState, FinishReason, PreemptionMeans, Request, RequestId
from tests.conformance.arithmetic_backend import ArithmeticBackend
from tests.conformance.engine_kit import (
    Output,
    backend_for,
    begins,
    engine,
    prompt_of,
    request,
    same,
    undisturbed,
    vocab_size,
)
from tests.stateful.permute import permute_blocks

TENANTS = ("acme", "zeta")


@dataclass
class Move:
    """One that is under way: the target has the first `sent` blocks."""

    source: int
    target: int
    attempt: int
    """On the target."""
    sent: int = 0
    state: EngineState | None = None
    """Once it is frozen."""


class CopyError(RuntimeError):
    """Blocks could not be copied."""


class Unreliable(ArithmeticBackend):
    """Every third copy of blocks fails, half-way where something is written."""

    calls = 0

    def copy_block(self, source: int, target: int) -> None:
        super().copy_block(source, target)
        self._may_fail()

    def save_blocks(self, blocks: Sequence[int]) -> memoryview:
        self._may_fail()
        return super().save_blocks(blocks)

    def load_blocks(self, blocks: Sequence[int], saved: memoryview) -> None:
        some = len(blocks) // 2
        super().load_blocks(blocks[:some], saved[: some * self.kv_block_bytes])
        self._may_fail()
        super().load_blocks(blocks, saved)

    def _may_fail(self) -> None:
        self.calls += 1
        if self.calls % 3 == 0:
            raise CopyError


def unreliable(settings: EngineConfig) -> Unreliable:
    return Unreliable(settings.blocks, settings.block_size_tokens, vocab_size())


class World:
    """Engines 0 and 1. Each deed checks the books of both; each token that is told is put to its request's output."""

    def __init__(
        self, settings: EngineConfig, make_backend: Callable[[EngineConfig], ArithmeticBackend] = backend_for
    ) -> None:
        self.settings = settings
        self.backends = [make_backend(settings), make_backend(settings)]
        self.engines: list[Engine] = [engine(settings, backend) for backend in self.backends]
        self.requests: dict[str, Request] = {}
        self.at: dict[str, tuple[int, int]] = {}
        """Engine and attempt of each that has not ended."""
        self.moves: dict[str, Move] = {}
        self.outputs: dict[str, Output] = {}
        self.aborted: set[str] = set()
        self.moved = self.preempted = 0

    # --- deeds ---

    def add(self, on: int, r: Request) -> None:
        assert self.engines[on].add(r, 0) is None
        self.requests[r.request_id] = r
        self.outputs[r.request_id] = Output()
        self.at[r.request_id] = (on, 0)
        self.check()

    def abort(self, name: str) -> None:
        on, attempt = self.at[name]
        assert self.engines[on].abort(RequestId(name), attempt)
        self.aborted.add(name)
        del self.at[name]
        if (move := self.moves.pop(name, None)) is not None:
            assert self.engines[move.target].abort(RequestId(name), move.attempt)
        self.check()

    def step(self, on: int) -> None:
        result = self.engines[on].step()
        self.preempted += len(result.preempted)
        for delta in result.deltas:
            output = self.outputs[delta.request_id]
            output.take(delta)
            if delta.finish is None:
                continue
            self.at.pop(delta.request_id, None)
            if (move := self.moves.pop(delta.request_id, None)) is not None:  # it ended before it was frozen
                assert self.engines[move.target].moves.import_abort(delta.request_id, move.attempt)
        load = result.load
        assert sum(p.requests for p in load.running) <= self.settings.slots
        self.check()

    def preempt(self, name: str, means: PreemptionMeans) -> bool:
        """As if a plan had said so; False where a plan could not."""
        on, attempt = self.at[name]
        live = self.engines[on]._book.live[RequestId(name), attempt]
        if not self._may_preempt(self.engines[on], live, means):
            return False
        self.engines[on]._preempt(Preemption(live.state, None, means))
        self.preempted += 1
        self.check()
        return True

    def move_on(self, name: str, *, cancel: bool) -> None:
        """One deed of a move: begin, send what is full, freeze, or finish; or call it off."""
        on, attempt = self.at[name]
        request_id = RequestId(name)
        move = self.moves.get(name)
        if move is None:
            move = Move(on, 1 - on, attempt + 1)
            refusal = self.engines[move.target].moves.import_begin(request_id, move.attempt, "arithmetic", 1)
            if refusal is None:
                self.moves[name] = move
        elif cancel:
            self._cancel(name, move)
        elif move.state is None:
            self._send(request_id, attempt, move)
            if move.sent and self.engines[on].moves.exportable_blocks(request_id, attempt) == move.sent:
                move.state = self.engines[on].moves.freeze(request_id, attempt)
                assert move.state is not None
        else:
            self._send(request_id, attempt, move)
            self._commit(name, attempt, move, move.state)
        self.check()

    def shuffle_blocks(self, on: int, rng: random.Random) -> None:
        permute_blocks(self.engines[on], self.backends[on].move_blocks, rng)
        self.check()

    def finish(self) -> None:
        """Nothing more happens to anybody: all end, as if they had been alone."""
        for name, move in [*self.moves.items()]:
            self._cancel(name, move)
        for on, target in enumerate(self.engines):
            for _ in range(100_000):
                if not target.has_work:
                    break
                self.step(on)
            load = target.load()
            assert (load.blocks_free, load.running, load.waiting) == (self.settings.blocks, (), ())
            assert load.host_blocks_free == self.settings.host_blocks
        assert not self.at
        for name, r in self.requests.items():
            got, alone = self.outputs[name], undisturbed(r, max_model_len=self.settings.max_model_len)
            assert got.ends == 1, name
            if name in self.aborted:
                assert got.finish is FinishReason.ABORT
                assert begins(got, alone), name
            else:
                assert same(got, alone), name

    # --- laws ---

    def check(self) -> None:
        for target in self.engines:
            target.check_integrity()
            load = target.load()
            used = {b for table in target.pool._tables.values() for b in table}
            assert load.blocks_free == self.settings.blocks - len(used)
            for state in target._book.states():
                if not state.host_blocks and not state.blocks:
                    assert state.computed == 0
                leader = state.leader
                assert leader is None or (leader.leader is None and leader.identity in target._book.live)

    # --- parts of deeds ---

    def _may_preempt(self, on: Engine, live: Live, means: PreemptionMeans) -> bool:
        state = live.state
        if state.identity in on._book.frozen or not state.blocks:
            return False
        if means is PreemptionMeans.PAUSE:
            return state.running
        return means is PreemptionMeans.RECOMPUTE or 0 < state.blocks <= on.load().host_blocks_free

    def _send(self, request_id: RequestId, attempt: int, move: Move) -> None:
        """What is final is sent; where the target has no room for it, or it cannot be copied, it goes without."""
        source, target = self.engines[move.source].moves, self.engines[move.target].moves
        count = source.exportable_blocks(request_id, attempt) - move.sent
        if count > 0:
            with contextlib.suppress(CopyError):
                data = source.export_blocks(request_id, attempt, move.sent, count)
                if target.import_blocks(request_id, move.attempt, move.sent, data) is None:
                    move.sent += count

    def _commit(self, name: str, attempt: int, move: Move, state: EngineState) -> None:
        source, target = self.engines[move.source], self.engines[move.target]
        assert target.moves.import_commit(state, move.attempt) is None
        assert source.moves.release(RequestId(name), attempt)
        self.at[name] = (move.target, move.attempt)
        del self.moves[name]
        self.moved += 1

    def _cancel(self, name: str, move: Move) -> None:
        on, attempt = self.at[name]
        assert self.engines[move.target].moves.import_abort(RequestId(name), move.attempt)
        assert self.engines[on].moves.thaw(RequestId(name), attempt) is (move.state is not None)
        del self.moves[name]


def any_request(rng: random.Random, n: int, settings: EngineConfig) -> list[Request]:
    """One to three choices of a random request; prompts of a tenant begin alike, and tenants have the same prompts."""
    longest = settings.max_model_len - 1
    common = prompt_of(f"system{rng.randrange(3)}", longest)[: rng.randrange(longest)]
    prompt = (common + prompt_of(f"p{n}", longest))[: rng.randrange(1, longest + 1)]
    choices = rng.choice((1, 1, 1, 2, 3))
    sampling = {
        "max_tokens": rng.randrange(1, 24),
        "temperature": rng.choice((0.0, 1.0)),
        "seed": rng.randrange(-5, 2**40),
        "stop": rng.choice(((), ("e",), ("th", "a b"))),
        "ignore_eos": rng.random() < 0.5,
        "min_tokens": rng.choice((0, 0, 3)),
        "frequency_penalty": rng.choice((0.0, 0.0, 0.7)),
        "logprobs": rng.choice((None, None, 1)),
        "prompt_logprobs": rng.choice((None, None, None, 1)),
    }
    return [
        request(
            f"r{n}c{choice}",
            prompt=prompt,
            priority=rng.choice((-10, 0, 0, 10)),
            arrived=float(n % 7),
            tenant=rng.choice(TENANTS),
            group=f"g{n}" if choices > 1 else "",
            choice=choice,
            **sampling,  # type: ignore[arg-type]
        )
        for choice in range(choices)
    ]
