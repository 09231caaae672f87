"""One engine: requests in, tokens out, a step at a time.

Owns: the order of a step (plan, carry out, run, commit), and what is counted in it. Who stands where is the book's
(book.py), keys and values are the memory's (kv_memory.py), a request's own state is live.py's. Imports cluster and
cluster.engine, never a backend. It has no thread and no clock (see runner.py). Invariants: each accepted attempt ends
exactly once, or is released to the engine that it was moved to; its output does not depend on what else runs, on
preemption, or on where it was cut and resumed; blocks are conserved (`check_integrity`).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, assert_never

from cluster.config import EngineConfig
from cluster.engine.batch_run import Ran, run_batch
from cluster.engine.book import Book
from cluster.engine.intake import Intake
from cluster.engine.kv_cache import BlockPool, IntegrityError
from cluster.engine.kv_memory import KvMemory
from cluster.engine.limits import FittingLimits
from cluster.engine.live import Live
from cluster.engine.moves import Moves
from cluster.engine.scheduling.choose import order_for, planner_for
from cluster.engine.scheduling.plan import Admission, Chunk, Cost, Preemption, StepPlan, View
from cluster.engine.scheduling.sequence import Identity, SequenceState
from cluster.engine.text import TextCodec
from cluster.foretold import Foretold
from cluster.ports import Backend, Row, RowOutput, StepResult
from cluster.types import (
    EngineLoad,
    FinishReason,
    Preempted,
    PreemptionMeans,
    Refusal,
    RefusalReason,
    Request,
    RequestId,
    TokenDelta,
)

log = logging.getLogger(__name__)

FAILURES_IN_A_ROW_MAX = 3
DEFAULT_COST = Cost(prefill_token_s=3e-3, swap_block_s=3e-4)
"""Of a small model on one CPU core, where nothing has been measured: a swapped block costs a tenth of a token."""


class EngineBrokenError(RuntimeError):
    """The backend fails again and again; the engine cannot go on."""


class Part(NamedTuple):
    """One request's part of a step that is about to run."""

    live: Live
    tokens: int
    row: Row


@dataclass(slots=True)
class _Counters:
    steps: int = 0
    tokens: int = 0
    preemptions: int = 0
    urgent_blocked: int = 0
    prefill_tokens: int = 0
    padding_tokens: int = 0


class Engine:
    """Holds up to `config.max_held` requests and runs up to `config.slots` of them in each step.

    A token of `eos_token_ids` ends a request (unless `ignore_eos`); it counts as output and has no text of its own.
    A request whose prompt and `max_tokens` exceed `max_model_len` ends with LENGTH at that length. One with `max_tokens`
    0 that asks for its prompt's scores runs its prompt and ends with LENGTH, without a token.
    """

    def __init__(
        self,
        config: EngineConfig,
        backend: Backend,
        text_codec: TextCodec,
        eos_token_ids: Collection[int],
        cost: Cost = DEFAULT_COST,
    ) -> None:
        self.config = config
        self.adds_total = 0
        """Requests offered so far. Whoever answers some in front of the engine counts them here."""
        self._backend = backend
        self._cost = cost
        self._order = order_for(config)
        self._planner = planner_for(config.mode)
        self._limits = FittingLimits(config)
        self._intake = Intake(config, text_codec, backend.vocab_size, eos_token_ids)
        self._book = Book(self._order)
        self._memory = KvMemory(config, backend)
        self.moves = Moves(config, self._book, self._memory, self._intake, backend)
        self._failures_in_a_row = 0
        self._batch_rows = 0
        self._stuck: tuple[int, int] | None = None
        """The situation in which a plan could run nothing."""
        self._count = _Counters()

    @property
    def pool(self) -> BlockPool[Identity]:
        return self._memory.pool

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do or to say. What is frozen or arriving needs no step, and may keep others
        from running until it goes, or somebody comes or ends."""
        book = self._book
        if not (book.waiting.items or book.running.items):
            return bool(book.ended)
        return bool(book.ended) or self._stuck != self._situation()

    def holds(self, identity: Identity) -> bool:
        """Whether an attempt is here: live, arriving, or with an end that is still to be told."""
        book = self._book
        return identity in book.live or identity in self.moves or identity in book.ended

    def add(self, request: Request, attempt: int) -> Refusal | None:
        """Take a request; a repeat of an attempt that is here is ignored.

        One that can never run here, or that its `emitted_ids` end already (see `Intake.take`), is taken and ends with
        the next result.

        Returns:
            A FULL refusal if `max_held` requests are held.
        """
        self.adds_total += 1
        if self.holds((request.request_id, attempt)):
            return None
        if len(self._book) + len(self.moves) >= self.config.max_held:
            return Refusal(request.request_id, attempt, RefusalReason.FULL)
        taken = self._intake.take(request, attempt)
        if isinstance(taken, TokenDelta):
            self._book.end(taken)
        else:
            self._book.add(taken)
        return None

    def abort(self, request_id: RequestId, attempt: int) -> bool:
        """End an attempt now, in whatever phase; its blocks are free when this returns. False if it is not live (it may
        just have ended). One whose import is not committed was never accepted: it goes without a word."""
        live = self._book.live.get((request_id, attempt))
        if live is None:
            return self.moves.import_abort(request_id, attempt)
        self._remove(live)
        self._book.end(live.end(FinishReason.ABORT))
        return True

    def step(self) -> StepResult:
        """Plan, carry out, run and commit one step; without work, only tell what ended since the last one.

        Requests that make the backend raise end with ERROR, each for itself; what did not fit in memory is preempted
        (see batch_run.py); keys and values that the backend fails to copy are computed again.

        Raises:
            EngineBrokenError: nothing could be run in three steps in a row. Nothing is said of the last batch: its
                requests are lost with the engine, and can be continued elsewhere.
            IntegrityError: book-keeping contradicts itself.
        """
        book = self._book
        deltas = book.take_ended()
        preempted: list[Preempted] = []
        if not book.running.items:
            self._batch_rows = 0
        if book.waiting.items or book.running.items:
            plan = self._planner(self._view(), self._limits.config, self._order)
            preempted.extend(self._preempt(p) for p in plan.preempted)
            kept_out = self._admit(plan.admitted)
            self._note(plan)
            chunks: Sequence[Chunk] = plan.chunks
            if kept_out:
                chunks = [chunk for chunk in chunks if chunk.sequence not in kept_out]
            if chunks:
                shed, made = self._run_chunks(chunks, plan.padding_tokens)
                preempted.extend(shed)
                deltas.extend(made)
            elif not preempted and not kept_out:
                self._wait_for_moves()
        return self.result(tuple(deltas), tuple(preempted))

    def result(self, deltas: tuple[TokenDelta, ...] = (), preempted: tuple[Preempted, ...] = ()) -> StepResult:
        """What is to be told now: the load, and what has become of the prefix cache since the last one."""
        prefixes = self._memory.take_prefix_change()
        return StepResult(load=self.load(), deltas=deltas, preempted=preempted, prefixes=prefixes)

    @property
    def foretold(self) -> Foretold:
        """How long requests became over what was predicted of them; may be read while a step runs."""
        return self._intake.foretold

    def load(self) -> EngineLoad:
        book, memory, count = self._book, self._memory, self._count
        return EngineLoad(
            slots_total=self._limits.config.slots,
            blocks_total=memory.pool.blocks_total,
            blocks_free=memory.pool.blocks_free,
            block_size_tokens=memory.pool.block_size_tokens,
            running=book.running.loads(),
            waiting=book.waiting.loads(),
            adds_total=self.adds_total,
            steps_total=count.steps,
            tokens_total=count.tokens,
            preemptions_total=count.preemptions,
            urgent_blocked_total=count.urgent_blocked,
            blocks_cached=memory.pool.blocks_cached,
            host_blocks_free=memory.host_blocks_free,
            prefix_hit_tokens_total=memory.hit_tokens_total,
            prefill_tokens_total=count.prefill_tokens,
            padding_tokens_total=count.padding_tokens,
            step_tokens=self._limits.config.step_token_budget,
        )

    def check_integrity(self) -> None:
        """Recompute every redundant fact from its owner.

        Raises:
            IntegrityError: two of them disagree.
        """
        self._book.check_integrity()
        self._memory.check_integrity(self._book.states(), self.moves.written())

    # --- carrying out a plan ---

    def _view(self) -> View:
        book, memory = self._book, self._memory
        return View(
            book.waiting.items,
            book.running.items,
            memory.pool.blocks_free,
            host_blocks_free=memory.host_blocks_free,
            cost=self._cost,
            cached_blocks=lambda state: memory.cached_blocks(book.of(state)),
            unheld_blocks=lambda state: memory.unheld_blocks(book.of(state)),
            batch_rows=self._batch_rows,
            paused=book.waiting.holding,
            shared=memory.shared_blocks,
        )

    def _preempt(self, preemption: Preemption) -> Preempted:
        state, urgent, means = preemption
        live = self._book.of(state)
        computed, blocks_freed = state.computed, 0
        if not state.blocks or (means is PreemptionMeans.PAUSE and not state.running):
            raise IntegrityError("a request that has nothing to lose is to be preempted")
        self._book.leave_line(live)
        match means:
            case PreemptionMeans.PAUSE:
                pass
            case PreemptionMeans.SWAP:
                blocks_freed = self._memory.swap_out(live)
                if state.computed < computed:  # the backend failed to copy it
                    means = PreemptionMeans.RECOMPUTE
            case PreemptionMeans.RECOMPUTE:
                blocks_freed = self._memory.drop(live)
            case _:
                assert_never(means)
        if means is PreemptionMeans.RECOMPUTE and urgent is not None:
            state.pushed_out += 1
        self._book.wait(live)
        if not state.blocks:
            self._book.siblings.lost_blocks(live)
        self._count.preemptions += 1
        request_id, attempt = state.identity
        return Preempted(
            request_id,
            attempt,
            urgent.identity[0] if urgent is not None else None,
            blocks_freed,
            computed - state.computed,
            means,
        )

    def _admit(self, admissions: Sequence[Admission]) -> set[SequenceState]:
        """All take what they share before any takes fresh blocks, which could be the very blocks of a prefix.

        Returns:
            Those that must wait on, for the backend failed to copy what they were to begin with. They compute it.
        """
        kept_out: set[SequenceState] = set()
        lives = [self._book.of(a.sequence) for a in admissions]
        for live, admission in zip(lives, admissions, strict=True):
            self._book.leave_line(live)
            self._memory.share(live, admission)
        for live, admission in zip(lives, admissions, strict=True):
            if self._memory.fill(live, admission):
                self._book.run(live)
            else:
                kept_out.add(live.state)
                self._book.wait(live)
                self._book.siblings.leave(live)
        return kept_out

    def _note(self, plan: StepPlan) -> None:
        self._batch_rows = max(self._batch_rows, len(self._book.running))
        for state in plan.yielded:
            state.yields += 1
        for state in plan.overtaken:
            state.overtaken += 1
        if plan.blocked is not None and not plan.blocked.blocked_counted:
            plan.blocked.blocked_counted = True
            self._count.urgent_blocked += 1

    def _wait_for_moves(self) -> None:
        """The plan does nothing: right only if what moves holds the blocks that are wanted."""
        if not self._book.frozen and not len(self.moves):
            raise IntegrityError("there is work and the plan runs none of it")
        self._stuck = self._situation()

    def _situation(self) -> tuple[int, int]:
        """Equal as long as nothing has happened that could let a plan do more: no block freed, nobody come or gone."""
        return self.pool.epoch, self._book.changes

    # --- running and committing it ---

    def _run_chunks(self, chunks: Sequence[Chunk], padding_tokens: int) -> tuple[list[Preempted], list[TokenDelta]]:
        """Returns who did not fit in memory, and what was made."""
        parts = [self._part(chunk) for chunk in chunks]
        ran = self._run(parts, padding_tokens)
        return self._shed(parts, ran), self._commit(parts, ran)

    def _part(self, chunk: Chunk) -> Part:
        state, tokens, blocks, draws = chunk.sequence, chunk.tokens, chunk.blocks, chunk.draws
        if blocks:
            self._memory.grow(state, blocks)
            self._book.grown(state, blocks)
        end = state.computed + tokens
        if draws is not (end == state.tokens) or tokens < 1:
            raise IntegrityError("a chunk is not what is left to run of its sequence")
        live = self._book.of(state)
        return Part(live, tokens, live.row(tokens, draws, self._memory.table(state, end)))

    def _run(self, parts: Sequence[Part], padding_tokens: int) -> Ran:
        last_first = sorted(range(len(parts)), key=lambda i: parts[i].live.state.key, reverse=True)
        ran = run_batch(self._backend, [part.row for part in parts], last_first, padding_tokens)
        self._count.padding_tokens += padding_tokens
        if ran.outputs:
            self._failures_in_a_row = 0
            self._count.steps += 1
            return ran
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= FAILURES_IN_A_ROW_MAX:
            raise EngineBrokenError(
                f"the backend failed in {self._failures_in_a_row} steps in a row: {ran.error!r}"
            ) from ran.error
        return ran

    def _shed(self, parts: Sequence[Part], ran: Ran) -> list[Preempted]:
        """Preempt what did not fit in memory, and plan smaller steps."""
        preempted = [self._preempt(Preemption(parts[i].live.state, None)) for i in ran.shed]
        if ran.shed:
            self._limits.did_not_fit(len(self._book.running), sum(parts[i].tokens for i in ran.outputs))
        elif not ran.failed:
            self._limits.fitted()
        return preempted

    def _commit(self, parts: Sequence[Part], ran: Ran) -> list[TokenDelta]:
        deltas: list[TokenDelta] = []
        for i, part in enumerate(parts):
            if (output := ran.outputs.get(i)) is not None:
                delta = self._commit_row(part, output)
                if delta is not None:
                    deltas.append(delta)
            elif (error := ran.failed.get(i)) is not None:
                why = f"the engine failed on this request ({type(error).__name__})"
                deltas.append(self._finish(part.live, part.live.end(FinishReason.ERROR, why)))
        return deltas

    def _commit_row(self, part: Part, output: RowOutput) -> TokenDelta | None:
        live, tokens, row = part
        state = live.state
        if left := state.prompt_left:
            self._book.ran(state, min(tokens, left))
        state.computed += tokens
        state.yields = 0
        if tokens > 1 or row.start < state.prompt_tokens:
            self._count.prefill_tokens += tokens
        if row.score is not None:
            live.take_scores(row.start, output.scores)
        if state.computed < state.tokens:
            self._memory.register(live)
            return None
        if row.sample is None:
            return self._finish(live, live.end(FinishReason.LENGTH))
        delta = live.take_drawn(output)
        if output.token_id is not None:
            self._count.tokens += 1
            self._memory.register(live)
        if delta.finish is not None:
            return self._finish(live, delta)
        if state.tokens % self.config.block_size_tokens == 0 or state.tokens + 1 > state.predicted_tokens:
            self._estimate_again(live)
        return delta

    def _finish(self, live: Live, delta: TokenDelta) -> TokenDelta:
        if delta.finish is FinishReason.ERROR:
            self._memory.forget(live)
        else:
            self._intake.learn(live)
        self._remove(live)
        return delta

    def _estimate_again(self, live: Live) -> None:
        self._intake.predict(live)
        self._book.place_again(live)

    def _remove(self, live: Live) -> None:
        self._book.remove(live)
        self._memory.drop(live)
