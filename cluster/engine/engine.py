"""One engine: requests in, tokens out, a step at a time.

Owns: the live sequences, what happens to them in a step (plan, allocate, run, commit) and how each ends. Imports cluster
and cluster.engine, never a backend. It has no thread and no clock (see runner.py). Invariants: each accepted attempt
ends exactly once; its output does not depend on what else runs, on preemption, or on where it was cut and resumed;
blocks are conserved (`check_integrity`).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from cluster.config import EngineConfig
from cluster.engine.chance import uniform
from cluster.engine.kv_cache import BlockPool, IntegrityError
from cluster.engine.scheduling.choose import order_for, planner_for
from cluster.engine.scheduling.plan import Chunk, Preemption, StepPlan, View
from cluster.engine.scheduling.sequence import Identity, Line, SequenceState
from cluster.engine.text import TextCodec, TextStage
from cluster.ports import Backend, Row, SampleSpec, StepResult
from cluster.types import (
    EngineLoad,
    FinishReason,
    Preempted,
    Refusal,
    RefusalReason,
    Request,
    RequestId,
    TokenDelta,
)

log = logging.getLogger(__name__)

FAILURES_IN_A_ROW_MAX = 3
CHOICE = 0
"""A request is one choice; `n` of them are `n` requests."""


class EngineBrokenError(RuntimeError):
    """The backend fails again and again; the engine cannot go on."""


class _Live:
    """A request in progress: its scheduling state, its tokens and its text."""

    __slots__ = ("request", "state", "text", "token_ids")

    def __init__(self, request: Request, attempt: int, text: TextStage) -> None:
        self.request = request
        self.token_ids = list(request.prompt_ids)
        self.text = text
        self.state = SequenceState(
            (request.request_id, attempt),
            request.priority,
            request.arrived_unix_s,
            tokens=len(request.prompt_ids),
            started=bool(request.emitted_ids),
        )

    @property
    def output_tokens(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_ids)

    def delta(
        self,
        index: int,
        token_ids: tuple[int, ...] = (),
        pieces: tuple[str, ...] = (),
        finish: FinishReason | None = None,
        error: str = "",
    ) -> TokenDelta:
        request_id, attempt = self.state.identity
        return TokenDelta(request_id, CHOICE, attempt, index, token_ids, pieces, finish, error)

    def end(self, finish: FinishReason, error: str = "") -> TokenDelta:
        """An end that comes without a token."""
        return self.delta(self.output_tokens, finish=finish, error=error)


class Engine:
    """Holds up to `config.max_held` requests and runs up to `config.slots` of them in each step.

    A token of `eos_token_ids` ends a request (unless `ignore_eos`); it counts as output and has no text of its own.
    A request whose prompt and `max_tokens` exceed `max_model_len` ends with LENGTH at that length.
    """

    def __init__(
        self, config: EngineConfig, backend: Backend, text_codec: TextCodec, eos_token_ids: Collection[int]
    ) -> None:
        self.config = config
        self.pool: BlockPool[Identity] = BlockPool(config.blocks, config.block_size_tokens)
        self.adds_total = 0
        """Requests offered so far. Whoever answers some in front of the engine counts them here."""
        self._backend = backend
        self._codec = text_codec
        self._eos = frozenset(eos_token_ids)
        self._order = order_for(config.order)
        self._planner = planner_for(config.mode)
        self._live: dict[Identity, _Live] = {}
        self._waiting = Line()
        self._running = Line()
        self._ended: list[TokenDelta] = []
        """Ends that came about outside a step; the next result carries them."""
        self._failures_in_a_row = 0
        self._steps_total = self._tokens_total = self._preemptions_total = self._urgent_blocked_total = 0

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do or to say."""
        return bool(self._live or self._ended)

    def add(self, request: Request, attempt: int) -> Refusal | None:
        """Take a request; a repeat of an attempt that is live is ignored.

        `request.emitted_ids` go through the text stage silently. A request that can never run here, or that its
        `emitted_ids` end already, is taken and ends with the next result: with ERROR for an empty prompt, for a token
        id that the model does not have, and for a prompt that leaves no room for output in `max_model_len` (which the
        pool is known to hold).

        Returns:
            A FULL refusal if `max_held` requests are held.
        """
        self.adds_total += 1
        identity = (request.request_id, attempt)
        if identity in self._live:
            return None
        if len(self._live) + len(self._ended) >= self.config.max_held:
            return Refusal(request.request_id, attempt, RefusalReason.FULL)
        live = _Live(request, attempt, self._codec.stage(request.sampling.stop))
        error = self._never_runs(request)
        finish = FinishReason.ERROR if error else FinishReason.LENGTH if self._at_limit(live) else None
        for token_id in request.emitted_ids:
            if finish is None:
                _, finish = self._advance(live, token_id)
        if finish is not None:
            self._ended.append(live.delta(len(request.emitted_ids), finish=finish, error=error))
            return None
        self._live[identity] = live
        self._wait(live.state)
        return None

    def abort(self, request_id: RequestId, attempt: int) -> bool:
        """End an attempt now; its blocks are free when this returns. False if it is not live (it may just have ended)."""
        live = self._live.get((request_id, attempt))
        if live is None:
            return False
        self._remove(live)
        self._ended.append(live.end(FinishReason.ABORT))
        return True

    def step(self) -> StepResult:
        """Plan, allocate, run and commit one step; without live requests, only tell what ended since the last one.

        If the backend raises, all requests of that batch end with ERROR (which of them is guilty is not known), for
        some of their keys and values may not have been written; requests that were not in it go on.

        Raises:
            EngineBrokenError: it raised in the third step in a row. Nothing is said of the last batch: its requests are
                lost with the engine, and can be continued elsewhere.
            IntegrityError: book-keeping contradicts itself.
        """
        deltas, self._ended = self._ended, []
        preempted: tuple[Preempted, ...] = ()
        if self._live:
            view = View(self._waiting.items, self._running.items, self.pool.blocks_free)
            plan = self._planner(view, self.config, self._order)
            preempted = tuple(self._preempt(p) for p in plan.preempted)
            self._admit(plan)
            deltas.extend(self._run(plan.chunks))
        return StepResult(load=self.load(), deltas=tuple(deltas), preempted=preempted)

    def load(self) -> EngineLoad:
        """`blocks` of running work are those that it holds; of waiting work, those that it needs to be admitted."""
        return EngineLoad(
            slots_total=self.config.slots,
            blocks_total=self.pool.blocks_total,
            blocks_free=self.pool.blocks_free,
            block_size_tokens=self.pool.block_size_tokens,
            running=self._running.loads(),
            waiting=self._waiting.loads(),
            adds_total=self.adds_total,
            steps_total=self._steps_total,
            tokens_total=self._tokens_total,
            preemptions_total=self._preemptions_total,
            urgent_blocked_total=self._urgent_blocked_total,
        )

    def check_integrity(self) -> None:
        """Recompute every redundant fact from its owner.

        Raises:
            IntegrityError: two of them disagree.
        """
        self.pool.check_integrity({s.identity: s.computed for s in self._running.items})
        if self._live.keys() != {s.identity for line in (self._waiting, self._running) for s in line.items}:
            raise IntegrityError("a live request is in no line, or a line holds one that has ended")
        if len(self._live) != len(self._waiting) + len(self._running):
            raise IntegrityError("a request both waits and runs")
        for state in self._waiting.items:
            if state.blocks or state.computed:
                raise IntegrityError("a waiting request holds blocks")
        for line in (self._waiting, self._running):
            line.check_integrity(self._counts_for)
        for live in self._live.values():
            if live.state.tokens != len(live.token_ids):
                raise IntegrityError("a sequence's length is not its number of tokens")
            if live.state.blocks != len(self.pool.table(live.state.identity)):
                raise IntegrityError("a sequence's number of blocks is not that of its table")

    # --- carrying out a plan ---

    def _preempt(self, preemption: Preemption) -> Preempted:
        state, urgent = preemption
        lost_tokens = state.computed
        self._running.remove(state, state.blocks)
        blocks_freed = self.pool.free(state.identity)
        state.blocks = state.computed = state.yields = 0
        if urgent is not None:
            state.pushed_out += 1
        self._wait(state)
        self._preemptions_total += 1
        request_id, attempt = state.identity
        return Preempted(
            request_id, attempt, urgent.identity[0] if urgent is not None else None, blocks_freed, lost_tokens
        )

    def _admit(self, plan: StepPlan) -> None:
        for state, blocks in plan.admitted:
            self._waiting.remove(state, self._counts_for(state))
            self.pool.allocate(state.identity, blocks)
            state.blocks = blocks
            state.started = True
            state.key = self._order.key(state)
            self._running.add(state, blocks)
        for state in plan.yielded:
            state.yields += 1
        if plan.blocked is not None and not plan.blocked.blocked_counted:
            plan.blocked.blocked_counted = True
            self._urgent_blocked_total += 1

    def _run(self, chunks: Sequence[Chunk]) -> list[TokenDelta]:
        if not chunks:
            raise IntegrityError("there is work and the plan runs none of it")
        rows = [self._row(chunk) for chunk in chunks]
        try:
            drawn = self._backend.run(rows)
            if len(drawn) != sum(chunk.draws for chunk in chunks):
                raise RuntimeError(f"the backend drew {len(drawn)} tokens for {len(chunks)} rows")
        except Exception as error:
            return self._fail(chunks, error)
        self._failures_in_a_row = 0
        self._steps_total += 1
        return self._commit(chunks, drawn)

    def _row(self, chunk: Chunk) -> Row:
        state = chunk.sequence
        live = self._live[state.identity]
        if chunk.blocks:
            self.pool.allocate(state.identity, chunk.blocks)
            state.blocks += chunk.blocks
            self._running.grow(state, chunk.blocks)
        end = state.computed + chunk.tokens
        sample = None
        if chunk.draws:
            s = live.request.sampling
            chance = uniform(s.seed, CHOICE, live.output_tokens) if s.temperature > 0 else 0.0
            sample = SampleSpec(temperature=s.temperature, top_p=s.top_p, top_k=s.top_k, uniform=chance)
        return Row(
            token_ids=tuple(live.token_ids[state.computed : end]),
            start=state.computed,
            block_table=self.pool.table(state.identity)[: self.pool.blocks_for(end)],
            sample=sample,
        )

    def _commit(self, chunks: Sequence[Chunk], drawn: Sequence[int | None]) -> list[TokenDelta]:
        tokens = iter(drawn)
        deltas: list[TokenDelta] = []
        for chunk in chunks:
            state = chunk.sequence
            state.computed += chunk.tokens
            state.yields = 0
            if not chunk.draws:
                continue
            live = self._live[state.identity]
            token_id, index = next(tokens), live.output_tokens
            if token_id is None:
                self._remove(live)
                deltas.append(
                    live.end(FinishReason.ERROR, "the model computed no numbers for this request's next token")
                )
                continue
            piece, finish = self._advance(live, token_id)
            if finish is not None:
                self._remove(live)
            deltas.append(live.delta(index, (token_id,), (piece,), finish))
            self._tokens_total += 1
        return deltas

    def _fail(self, chunks: Sequence[Chunk], error: Exception) -> list[TokenDelta]:
        self._failures_in_a_row += 1
        log.error("backend failed on a batch of %d rows", len(chunks), exc_info=error)
        if self._failures_in_a_row >= FAILURES_IN_A_ROW_MAX:
            raise EngineBrokenError(
                f"the backend failed {self._failures_in_a_row} times in a row: {error!r}"
            ) from error
        deltas: list[TokenDelta] = []
        for chunk in chunks:
            live = self._live[chunk.sequence.identity]
            self._remove(live)
            deltas.append(
                live.end(FinishReason.ERROR, f"the engine failed on this request's batch ({type(error).__name__})")
            )
        return deltas

    # --- one sequence ---

    def _advance(self, live: _Live, token_id: int) -> tuple[str, FinishReason | None]:
        """Append an output token. Returns the text that became certain with it and whether it ended the sequence."""
        live.token_ids.append(token_id)
        live.state.tokens += 1
        if token_id in self._eos and not live.request.sampling.ignore_eos:
            return live.text.finish(), FinishReason.STOP
        piece = live.text.push(token_id)
        if not live.text.stopped and self._at_limit(live):
            piece += live.text.finish()
            if not live.text.stopped:
                return piece, FinishReason.LENGTH
        return piece, FinishReason.STOP if live.text.stopped else None

    def _at_limit(self, live: _Live) -> bool:
        return (
            live.output_tokens >= live.request.sampling.max_tokens or len(live.token_ids) >= self.config.max_model_len
        )

    def _never_runs(self, request: Request) -> str:
        """Why a request can never run here; empty if it can."""
        if not request.prompt_ids:
            return "the prompt has no tokens"
        vocab_size = self._backend.vocab_size
        if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= vocab_size:
            return f"the prompt has a token id that this model does not have: its ids are 0..{vocab_size - 1}"
        if len(request.prompt_ids) >= self.config.max_model_len:
            return (
                f"the prompt has {len(request.prompt_ids)} tokens, which leaves no room for output in the "
                f"{self.config.max_model_len} that this model is served with"
            )
        return ""

    def _wait(self, state: SequenceState) -> None:
        state.key = self._order.key(state)
        self._waiting.add(state, self._counts_for(state))

    def _remove(self, live: _Live) -> None:
        state = live.state
        del self._live[state.identity]
        (self._running if state.blocks else self._waiting).remove(state, self._counts_for(state))
        if state.blocks:
            self.pool.free(state.identity)

    def _counts_for(self, state: SequenceState) -> int:
        """Blocks of a sequence in the load report: those it holds, or those it needs to be admitted."""
        return state.blocks or self.pool.blocks_for(state.tokens + 1)
