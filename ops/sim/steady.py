"""An engine that can take several steps at once where nothing is to be decided in them.

Owns: when that is so, and the taking of such steps. It is production's engine: every step in which anything is decided is
`Engine.step`. Imports cluster.engine. Invariant: after `run_steady(n)` all is as after n calls of `step` over the modelled
backend, but for the text and the chances of tokens, which are not asked for there (tests/sim/test_steady.py compares).

Steady is a step in which each running sequence decodes one token that does not end it, there is a free block for each
that needs one, and nobody who waits can come in. Whether the next step is steady does not depend on how many were taken
at once before it.
"""

from __future__ import annotations

from cluster.config import BatchingMode, EngineConfig, Order, WithinClass
from cluster.engine.engine import Engine
from cluster.engine.live import Live
from cluster.engine.scheduling.sequence import Identity, SequenceState
from cluster.types import TokenDelta


class SteadyEngine(Engine):
    """Its requests are the modelled backend's: the token after k is k - 1, and 0 ends it."""

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

    def run_steady(self, steps: int) -> list[TokenDelta]:
        """Take that many steady steps; one delta of each sequence."""
        states = list(self._book.running.items)
        size = self.config.block_size_tokens
        lives = [self._book.of(state) for state in states]
        kept: list[tuple[int, int, int]] = []
        """(step, 0 to grow or 1 to register, row): what is done in the order of the steps."""
        deltas = []
        for row, (state, live) in enumerate(zip(states, lives, strict=True)):
            tokens, blocks = state.tokens, state.blocks
            kept.extend((max(0, end - tokens + 1), 0, row) for end in _ends(blocks * size, tokens + steps - 1, size))
            kept.extend((end - tokens, 1, row) for end in _ends(-(-tokens // size) * size, tokens + steps, size))
            deltas.append(self._advance(live, steps))
        for _, phase, row in sorted(kept):
            if phase == 0:
                self._memory.grow(states[row], 1)
                self._book.grown(states[row], 1)
            else:
                self._register(lives[row])
        self._count.steps += steps
        self._count.tokens += steps * len(states)
        self._batch_rows = max(self._batch_rows, len(states))
        return deltas

    def stands_behind_lesser(self) -> Identity | None:
        """The first that waits, where less urgent work runs and it has not been counted as one that may push nobody out."""
        waiting, running = self._book.waiting.items, self._book.running.items
        if not waiting or not running or waiting[0].blocked_counted:
            return None
        return waiting[0].identity if self._order.may_preempt(waiting[0], running[-1]) else None

    @property
    def empty(self) -> bool:
        """Whether it holds nothing and owes nothing."""
        return not len(self._book) and not len(self.moves) and self.pool.blocks_free == self.pool.blocks_total

    def _shut(self, first: SequenceState, running: list[SequenceState]) -> bool:
        """Whether the first that waits, and so everybody behind it, finds no slot and may push nobody out."""
        full = len(running) >= self._limits.config.slots and first.leader is None
        return full and not self._order.may_preempt(first, running[-1])

    def _advance(self, live: Live, steps: int) -> TokenDelta:
        state, size, index = live.state, self.config.block_size_tokens, len(live.output)
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
        request_id, attempt = state.identity
        return TokenDelta(request_id, attempt, index, tuple(live.output[index:]), ("",) * steps)

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
