"""An engine that takes the steps of the modelled backend's requests at less cost, and several at once where it can.

Owns: what of a step is known beforehand, when several can be taken at once, and which tokens have been told. It is
production's engine: every step in which anything is decided is `Engine.step`. Imports cluster.engine. Invariant: after each
step, and after `run_steady(n)`, all is as after so many steps of `Engine` itself, but for the text and the chances of
tokens, which are not asked for here (tests/sim/test_steady.py compares).

Known beforehand is the token of a sequence that decodes and does not end with it: it gets that in its turn, and there is no
row, no output and no delta of it. Steady is a step in which this holds of all that run, there is a free block for each that
needs one, and nobody who waits can come in. Whether the next step is steady does not depend on how many were taken at once
before it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from cluster.config import BatchingMode, EngineConfig, Order, WithinClass
from cluster.engine.engine import Engine, Part
from cluster.engine.live import Live
from cluster.engine.scheduling.plan import Chunk, Cost
from cluster.engine.scheduling.sequence import Identity, SequenceState
from cluster.engine.text import TextCodec
from cluster.ports import RowOutput, StepResult
from cluster.types import Preempted, ReplicaId, RequestId, TokenDelta
from ops.sim.backend import END_TOKEN, ModelledBackend
from ops.sim.values import Instance


class SteadyEngine(Engine):
    """Its requests are the modelled backend's: the token after k is k - 1, and 0 ends it.

    Of an attempt's tokens the first is in its step's result, and the last with all that was not told before. What is between
    them is told when it is asked for (`untold`).
    """

    def __init__(
        self,
        config: EngineConfig,
        backend: ModelledBackend,
        text_codec: TextCodec,
        eos_token_ids: Collection[int],
        cost: Cost,
        *,
        known: bool = True,
    ) -> None:
        """`known`: make use of what is known beforehand."""
        super().__init__(config, backend, text_codec, eos_token_ids, cost)
        self._modelled = backend
        self._known = known and config.mode is BatchingMode.CONTINUOUS
        self._told: dict[Identity, tuple[Live, int]] = {}
        """Of each attempt of which a token was told, the index after the last that was."""
        self._gained: list[Live] = []
        """Who has got a token in the last step and had one before."""

    # --- telling ---

    def untold(self, *, step_runs: bool = False) -> tuple[TokenDelta, ...]:
        """Of each attempt the tokens that have not been told: they are now. `step_runs`: without those of the last step,
        whose time is not over."""
        coming = {live.state.identity for live in self._gained} if step_runs else ()
        deltas = [self._untold_of(identity, identity in coming) for identity in self._told]
        return tuple([delta for delta in deltas if delta is not None])

    def untold_of(self, identity: Identity) -> TokenDelta | None:
        """The same of one, between two steps; None where there are none."""
        return self._untold_of(identity, False) if identity in self._told else None

    def _untold_of(self, identity: Identity, one_coming: bool) -> TokenDelta | None:
        live, start = self._told[identity]
        end = len(live.output) - one_coming
        if start >= end:
            return None
        self._told[identity] = live, end
        return TokenDelta(*identity, start, tuple(live.output[start:end]), ("",) * (end - start))

    def whole(self, end: TokenDelta) -> TokenDelta:
        """The end of an attempt with all of its tokens that were not told."""
        told = self._told.pop((end.request_id, end.attempt), None)
        if told is None or told[1] == end.index:
            return end
        live, start = told
        token_ids = tuple(live.output[start:])
        return msgspec.structs.replace(end, index=start, token_ids=token_ids, pieces=("",) * len(token_ids))

    def forget(self, identity: Identity) -> None:
        """Nothing more is told of it."""
        self._told.pop(identity, None)

    def abort(self, request_id: RequestId, attempt: int) -> bool:
        self.forget((request_id, attempt))
        return super().abort(request_id, attempt)

    def _commit_row(self, part: Part, output: RowOutput) -> TokenDelta | None:
        delta = super()._commit_row(part, output)
        if delta is None:
            return None
        identity = (delta.request_id, delta.attempt)
        if identity in self._told:
            self._gained.append(part.live)
            return delta if delta.finish is not None else None
        if delta.finish is None:
            self._told[identity] = part.live, delta.index + len(delta.token_ids)
        return delta

    # --- one step ---

    def step(self) -> StepResult:
        self._gained = []
        return super().step()

    def _run_chunks(self, chunks: Sequence[Chunk], padding_tokens: int) -> tuple[list[Preempted], list[TokenDelta]]:
        if not self._known:
            return super()._run_chunks(chunks, padding_tokens)
        lives, memory, book = self._book.live, self._memory, self._book
        turns: list[Live | None] = []
        """In order; None is the turn of a part."""
        parts: list[Part] = []
        contexts = 0
        for chunk in chunks:
            state = chunk.sequence
            live = lives[state.identity]
            output = live.output
            # Known is a token that is neither its attempt's first nor its last.
            if (
                chunk.tokens == 1
                and output
                and output[-1] - 1 > END_TOKEN
                and state.tokens - state.computed == 1
                and state.tokens + 1 < state.limit_tokens
                and live.scores is None
                and len(output) > len(live.request.emitted_ids)
            ):
                if chunk.blocks:
                    memory.grow(state, chunk.blocks)
                    book.grown(state, chunk.blocks)
                contexts += state.computed
                turns.append(live)
            else:
                parts.append(self._part(chunk))
                turns.append(None)
        known = len(turns) - len(parts)
        self._modelled.beside(known, contexts)
        if parts:
            ran = self._run(parts, padding_tokens)
            shed = self._shed(parts, ran)
            made = iter([*zip(parts, (ran.outputs[i] for i in range(len(parts))), strict=True)])
        else:
            self._modelled.run(())
            self._count.steps += 1
            shed, made = [], iter(())
        deltas: list[TokenDelta] = []
        size, gained = self.config.block_size_tokens, self._gained
        for turn in turns:
            if turn is None:
                if (delta := self._commit_row(*next(made))) is not None:
                    deltas.append(delta)
                continue
            state, output = turn.state, turn.output
            gained.append(turn)
            output.append(output[-1] - 1)
            state.yields = 0
            state.computed += 1
            state.tokens = tokens = state.tokens + 1
            if state.computed // size > turn.registered:
                memory.register(turn)
            if tokens % size == 0 or tokens + 1 > state.predicted_tokens:
                self._estimate_again(turn)
        self._count.tokens += known
        return shed, deltas

    # --- several steps ---

    def steady_steps(self, most: int) -> int:
        """How many of the next steps are steady, as far as is known; 0 where the next one may not be."""
        book, states = self._book, self._book.running.items
        if not states or book.ended or book.frozen or len(self.moves) or not _is_plain(self.config):
            return 0
        if (waiting := book.waiting.items) and not self._shut(waiting[0], states):
            return 0
        steps, lives, size = most, book.live, self.config.block_size_tokens
        for state in states:
            live = lives[state.identity]
            output = live.output
            # What has been swapped in has its full blocks still to be registered, all at once.
            if state.tokens - state.computed != 1 or len(output) <= len(live.request.emitted_ids):
                return 0
            if live.registered < state.computed // size and self.config.prefix_cache:
                return 0
            left = min(output[-1], state.limit_tokens - state.tokens) - 1
            if left < steps:
                if left < 1:
                    return 0
                steps = left
        free = self.pool.blocks_free
        while steps and sum(max(0, -(-(s.tokens + steps - 1) // size) - s.blocks) for s in states) > free:
            steps //= 2
        return steps

    def steady_contexts(self) -> tuple[int, int]:
        """Of the next steady step: how many sequences decode, and all tokens before the new ones."""
        states = self._book.running.items
        return len(states), sum(state.computed for state in states)

    def run_steady(self, steps: int) -> None:
        """Take that many steady steps."""
        self._gained = []
        states = list(self._book.running.items)
        size = self.config.block_size_tokens
        lives = [self._book.of(state) for state in states]
        kept: list[tuple[int, int, int]] = []
        """(step, 0 to grow or 1 to register, row): what is done in the order of the steps."""
        for row, (state, live) in enumerate(zip(states, lives, strict=True)):
            tokens, blocks = state.tokens, state.blocks
            kept.extend((max(0, end - tokens + 1), 0, row) for end in _ends(blocks * size, tokens + steps - 1, size))
            kept.extend((end - tokens, 1, row) for end in _ends(-(-tokens // size) * size, tokens + steps, size))
            self._advance(live, steps)
        for _, phase, row in sorted(kept):
            if phase == 0:
                self._memory.grow(states[row], 1)
                self._book.grown(states[row], 1)
            else:
                self._register(lives[row])
        self._count.steps += steps
        self._count.tokens += steps * len(states)
        self._batch_rows = max(self._batch_rows, len(states))

    def stands_behind_lesser(self) -> Identity | None:
        """The first that waits, where less urgent work runs and it has not been counted as one that may push nobody out."""
        waiting, running = self._book.waiting.items, self._book.running.items
        if not waiting or not running or waiting[0].blocked_counted:
            return None
        return waiting[0].identity if self._order.may_preempt(waiting[0], running[-1]) else None

    def instance(self, replica_id: ReplicaId) -> Instance:
        """What a policy that migrates polls."""
        running, waiting = self._book.running.items, self._book.waiting.items
        begun = [state for state in running if state.tokens > state.prompt_tokens]
        shortest = min(begun, key=lambda state: (state.priority, state.tokens, state.identity), default=None)
        first = waiting[0] if waiting else None
        return Instance(
            replica_id=replica_id,
            blocks_total=self.pool.blocks_total,
            blocks_free=self.pool.blocks_free,
            first_blocks=0 if first is None else -(-first.tokens // self.config.block_size_tokens) - first.blocks,
            running=len(running),
            priority_max=max((state.priority for state in running), default=None),
            shortest=None if shortest is None else shortest.identity,
        )

    @property
    def unanswered_tokens(self) -> int:
        """That have been computed of prompts whose answers have not begun."""
        return sum(state.computed for state in self._book.states() if state.tokens <= state.prompt_tokens)

    @property
    def empty(self) -> bool:
        """Whether it holds nothing and owes nothing."""
        return not len(self._book) and not len(self.moves) and self.pool.blocks_free == self.pool.blocks_total

    def _shut(self, first: SequenceState, running: list[SequenceState]) -> bool:
        """Whether the first that waits, and so everybody behind it, finds no slot and may push nobody out."""
        full = len(running) >= self._limits.config.slots and first.leader is None
        return full and not self._order.may_preempt(first, running[-1])

    def _advance(self, live: Live, steps: int) -> None:
        state, size = live.state, self.config.block_size_tokens
        last, left = live.output[-1], steps
        state.yields = 0
        while left:
            # Its length is estimated anew where it fills a block or outgrows what was expected of it.
            to_block = size - state.tokens % size
            to_expected = max(1, int(state.predicted_tokens) - state.tokens)
            taken = min(left, to_block, to_expected)
            ids = range(last - 1, last - 1 - taken, -1)
            live.output.extend(ids)
            last -= taken
            left -= taken
            state.tokens += taken
            state.computed += taken
            if state.tokens % size == 0 or state.tokens + 1 > state.predicted_tokens:
                self._estimate_again(live)

    def _register(self, live: Live) -> None:
        """One more of its blocks is full."""
        if self.config.prefix_cache:
            self.pool.register(
                self.pool.table(live.state.identity)[live.registered], live.hashes.of(live.registered, live.tokens)
            )
            live.registered += 1


def _is_plain(config: EngineConfig) -> bool:
    """Whether nothing in its order follows from lengths that are estimated anew."""
    fcfs = config.order is Order.PRIORITY and config.within_class is WithinClass.FCFS
    return (fcfs or config.order is Order.FCFS) and config.mode is BatchingMode.CONTINUOUS


def _ends(first: int, last: int, size: int) -> range:
    """Multiples of `size` from `first` to below `last`."""
    return range(first, last, size)
