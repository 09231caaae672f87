"""An engine that takes the steps of the modelled backend's requests at less cost, and several at once where it can.

Owns: what of a step is known beforehand, which steps are steady, and which tokens have been told. It is
production's engine: every step in which anything is decided is `Engine.step`. Imports cluster.engine. Invariant: after each
step, and after `run_steady(n)`, all is as after so many steps of `Engine` itself, but for the text and the chances of
tokens, which are not asked for here (tests/sim/test_steady.py compares).

Known beforehand is the token of a sequence that decodes and does not end with it: it gets that in its turn, and there is no
row, no output and no delta of it. Steady is a step in which this holds of all that decode, the first prompt in order does
not come to its end with what the decodes leave it of the budget, there is a free block for each that needs one, and nobody
who waits can come in: all slots are taken, or the prompts ahead of it leave it no token. Whether the next step is steady
does not depend on how many were taken at once before it. What such steps will be is in ops/sim/course.py.
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
from cluster.types import EngineLoad, Preempted, ReplicaId, RequestId, TokenDelta
from ops.sim.backend import END_TOKEN, ModelledBackend
from ops.sim.course import EVERY_STEP, Course, Turn, course_of
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
        self._course = Course(0, ())
        """The steady steps that lie ahead, as they were told last, but for those that have been taken."""
        self._decoding: list[Live] = []
        """Who decodes in them, in order."""

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

    def steady_ms(self, most: int) -> list[float]:
        """How long each of the next steps takes that are steady, as far as is known; none where the next one may not be."""
        book, states, config = self._book, self._book.running.items, self._limits.config
        if not states or book.ended or book.frozen or len(self.moves) or not _is_plain(config):
            return []
        first = book.waiting.items[0] if book.waiting.items else None
        if first is not None and self._shut(first, states):
            first = None
        if first is not None and len(states) + book.running.prompt_tokens < config.step_token_budget:
            return []  # no more than that is ahead of it
        steps, decoding, prompts = self._known_ahead(most)
        course = course_of(steps, [live.state for live in decoding], prompts, first, config, self._order)
        if not course.steps:
            return []
        self._course, self._decoding = course, decoding
        return course.steps_ms(self._modelled)

    def _known_ahead(self, most: int) -> tuple[int, list[Live], list[SequenceState]]:
        """How many of the next `most` tokens are known of each that decodes, with blocks for all; who decodes; and whose
        prompts run. 0 where the next step may not be steady: the others may not be all then."""
        steps, lives, size = most, self._book.live, self.config.block_size_tokens
        decoding: list[Live] = []
        prompts: list[SequenceState] = []
        for state in self._book.running.items:
            tokens, computed = state.tokens, state.computed
            live = lives[state.identity]
            if tokens - computed > 1:
                if live.scores is not None or tokens > state.blocks * size:
                    return 0, decoding, prompts
                prompts.append(state)
                continue
            output = live.output
            left = (
                min(output[-1], state.limit_tokens - tokens) - 1 if len(output) > len(live.request.emitted_ids) else 0
            )
            # What has been swapped in has its full blocks still to be registered, all at once.
            if left < 1 or (live.registered < computed // size and self.config.prefix_cache):
                return 0, decoding, prompts
            steps = min(steps, left)
            decoding.append(live)
        free = self.pool.blocks_free
        if len(decoding) * (1 + steps // size) > free:  # else there are enough, wherever each is in its last block
            while steps and sum([_lacks(live.state, steps, size) for live in decoding]) > free:
                steps //= 2
        return steps, decoding, prompts

    def load_after(self, steps: int) -> EngineLoad:
        """The load when so many of them have been taken."""
        return self._course.load_after(steps, self.load())

    def run_steady(self, steps: int) -> None:
        """Take so many of those that `steady_ms` has told last and that have not been taken."""
        course = self._course
        self._course = course.after(steps)
        self._gained = []
        size, gained = self.config.block_size_tokens, 0
        lives, yields = list(self._decoding), course.yields
        kept: list[tuple[int, int, int]] = []
        """(step, 0 to grow or 1 to register, row): what is done in the order of the steps."""
        turn, taken = EVERY_STEP, steps
        for row, live in enumerate(lives):
            state = live.state
            if yields:
                turn = course.turn_of(state)
                taken = turn.taken_until(steps)
            tokens = state.tokens
            if 1 < tokens % size < size - taken and tokens + taken + 1 <= state.predicted_tokens:
                # It neither needs a block nor fills one, nor is more expected of it.
                last = live.output[-1]
                live.output.extend(range(last - 1, last - 1 - taken, -1))
                state.tokens = tokens + taken
                state.computed += taken
            else:
                kept.extend(_kept(state, row, turn, taken, size))
                self._advance(live, taken)
            state.yields = turn.yields_after(steps) if turn is not EVERY_STEP else 0
            gained += taken
        if course.prompt is not None:
            course.prompt.yields = 0
            kept.extend((step, 1, len(lives)) for step in range(steps))
            lives.append(self._book.of(course.prompt))
        for step, phase, row in sorted(kept):
            live = lives[row]
            if phase == 0:
                self._memory.grow(live.state, 1)
                self._book.grown(live.state, 1)
            elif live.state is course.prompt:
                self._run_chunk(live, course.chunks[step % 2])
            else:
                self._register(live)
        self._count.steps += steps
        self._count.tokens += gained
        self._batch_rows = max(self._batch_rows, len(self._book.running))

    def _run_chunk(self, live: Live, tokens: int) -> None:
        """Of a prompt that does not come to its end with it."""
        state = live.state
        if tokens > 1 or state.computed < state.prompt_tokens:
            self._count.prefill_tokens += tokens
        self._book.ran(state, tokens)
        state.computed += tokens
        self._memory.register(live)

    def stands_behind_lesser(self) -> Identity | None:
        """The first that waits, where less urgent work runs and it has not been counted as one that may push nobody out."""
        waiting, running = self._book.waiting.items, self._book.running.items
        if not waiting or not running or waiting[0].blocked_counted:
            return None
        return waiting[0].identity if self._order.may_preempt(waiting[0], running[-1]) else None

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
        state, size, left = live.state, self.config.block_size_tokens, steps
        while left:
            # Its length is estimated anew where it fills a block or outgrows what was expected of it.
            to_block = size - state.tokens % size
            to_expected = max(1, int(state.predicted_tokens) - state.tokens)
            taken = min(left, to_block, to_expected)
            last = live.output[-1]
            live.output.extend(range(last - 1, last - 1 - taken, -1))
            left -= taken
            state.tokens += taken
            state.computed += taken
            if state.tokens % size == 0 or state.tokens + 1 > state.predicted_tokens:
                self._intake.predict(live)  # no order that is plain goes by it

    def _register(self, live: Live) -> None:
        """One more of its blocks is full."""
        if self.config.prefix_cache:
            self.pool.register(
                self.pool.table(live.state.identity)[live.registered], live.hashes.of(live.registered, live.tokens)
            )
            live.registered += 1


def instance_of(engine: SteadyEngine, replica_id: ReplicaId) -> Instance:
    """What a policy that migrates polls."""
    running, waiting = engine._book.running.items, engine._book.waiting.items
    begun = [state for state in running if state.tokens > state.prompt_tokens]
    shortest = min(begun, key=lambda state: (state.priority, state.tokens, state.identity), default=None)
    first = waiting[0] if waiting else None
    return Instance(
        replica_id=replica_id,
        blocks_total=engine.pool.blocks_total,
        blocks_free=engine.pool.blocks_free,
        first_blocks=0 if first is None else -(-first.tokens // engine.config.block_size_tokens) - first.blocks,
        running=len(running),
        priority_max=max((state.priority for state in running), default=None),
        shortest=None if shortest is None else shortest.identity,
    )


def _is_plain(config: EngineConfig) -> bool:
    """Whether nothing in its order follows from lengths that are estimated anew."""
    fcfs = config.order is Order.PRIORITY and config.within_class is WithinClass.FCFS
    return (fcfs or config.order is Order.FCFS) and config.mode is BatchingMode.CONTINUOUS


def _lacks(state: SequenceState, steps: int, size: int) -> int:
    """Blocks that one that decodes takes in so many steps."""
    return max(0, -(-(state.tokens + steps - 1) // size) - state.blocks)


def _kept(state: SequenceState, row: int, turn: Turn, steps: int, size: int) -> list[tuple[int, int, int]]:
    """When one that decodes takes blocks, and when they are full, in so many steps of its own."""
    tokens, held = state.tokens, state.blocks * size
    grows = [(turn.step_of(max(0, end - tokens + 1)), 0, row) for end in range(held, tokens + steps - 1, size)]
    full = range(-(-tokens // size) * size, tokens + steps, size)
    return grows + [(turn.step_of(end - tokens), 1, row) for end in full]
