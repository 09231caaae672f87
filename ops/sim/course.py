"""What the steady steps that lie ahead of an engine will be.

Owns: who runs in each of them, how many there are as far as one prompt and the decodes that yield to it say, and how long
each takes. Imports cluster.engine.scheduling and the modelled backend. Pure but for what is asked of the backend, which
is so, too. Invariant: a course that has been followed for some steps is the course of what is left of it.

In all of its steps the same run: decodes, and at most one prompt, the first in order, which takes what they leave of the
budget and does not come to its end. Where decodes yield to it, none does in two steps in a row, so that all is as it was
two steps before, but for the lengths.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import msgspec

from cluster.config import EngineConfig
from cluster.engine.scheduling.continuous import yielding
from cluster.engine.scheduling.order import Order
from cluster.engine.scheduling.sequence import SequenceState
from cluster.types import EngineLoad, PriorityLoad
from ops.sim.backend import ModelledBackend

NOBODY: Collection[SequenceState] = frozenset()


class Turn(NamedTuple):
    """The steps in which a decode runs."""

    first: int
    every: int
    """1, or 2 of one that yields in those between."""

    def taken_until(self, steps: int) -> int:
        """Of the first so many steps, those in which it runs."""
        return (steps - self.first + self.every - 1) // self.every

    def step_of(self, taken: int) -> int:
        """In which step it runs when it has run in so many."""
        return self.first + taken * self.every

    def yields_after(self, steps: int) -> int:
        """Whether it has yielded in the last of so many."""
        return (steps - 1 - self.first) % self.every


EVERY_STEP = Turn(0, 1)


class Course(NamedTuple):
    """Steps are counted from 0. What there are two of is of the even ones and of the odd."""

    steps: int
    decodes: Sequence[SequenceState]
    """In order."""
    resting: tuple[Collection[SequenceState], Collection[SequenceState]] = (NOBODY, NOBODY)
    """Those that yield. Nobody is in both."""
    prompt: SequenceState | None = None
    chunks: tuple[int, int] = (0, 0)
    """Tokens of the prompt that run."""

    def after(self, steps: int) -> Course:
        """What is left when so many have been taken."""
        left = self.steps - steps
        if not steps % 2:
            return self._replace(steps=left)
        return self._replace(steps=left, resting=self.resting[::-1], chunks=self.chunks[::-1])

    @property
    def yields(self) -> bool:
        """Whether anybody does."""
        return bool(self.resting[0] or self.resting[1])

    def turn_of(self, state: SequenceState) -> Turn:
        """When a decode runs."""
        if state in self.resting[0]:
            return Turn(1, 2)
        return Turn(0, 2) if state in self.resting[1] else EVERY_STEP

    def steps_ms(self, backend: ModelledBackend) -> list[float]:
        """How long each takes."""
        every = sum(state.computed for state in self.decodes)
        first, second = (every - sum(state.computed for state in resting) for resting in self.resting)
        contexts, rest = (first, second), tuple(map(len, self.resting))
        always = len(self.decodes) - sum(rest)
        behind = 0 if self.prompt is None else self.prompt.computed
        took_ms: list[float] = []
        for k in range(self.steps):
            odd = k % 2
            # Whoever rests in the others has run in every second step so far.
            context_tokens = contexts[odd] + k * always + k // 2 * rest[1 - odd]
            sequences = always + rest[1 - odd]
            took_ms.append(backend.beside_ms(sequences, context_tokens, self.chunks[odd], behind))
            behind += self.chunks[odd]
        return took_ms

    def load_after(self, steps: int, load: EngineLoad) -> EngineLoad:
        """What the load is when so many have been taken; `load` is what it is now."""
        grown: dict[int, int] = {}
        size, turn, taken, gained, yields = load.block_size_tokens, EVERY_STEP, steps, 0, self.yields
        for state in self.decodes:
            if yields:
                turn = self.turn_of(state)
                taken = turn.taken_until(steps)
            gained += taken
            blocks = -(-(state.tokens + taken - 1) // size) - state.blocks
            if blocks > 0:
                grown[state.priority] = grown.get(state.priority, 0) + blocks
        run, counted = self._prompt_tokens(steps)
        blocks, unregistered = sum(grown.values()), load.blocks_free - load.blocks_cached
        return msgspec.structs.replace(
            load,
            running=tuple([self._level_after(level, grown.get(level.priority, 0), run) for level in load.running]),
            blocks_free=load.blocks_free - blocks,
            blocks_cached=load.blocks_cached - max(0, blocks - unregistered),
            steps_total=load.steps_total + steps,
            tokens_total=load.tokens_total + gained,
            prefill_tokens_total=load.prefill_tokens_total + counted,
        )

    def _level_after(self, level: PriorityLoad, blocks: int, prompt_tokens: int) -> PriorityLoad:
        if self.prompt is None or self.prompt.priority != level.priority:
            prompt_tokens = 0
        if not blocks and not prompt_tokens:
            return level
        return msgspec.structs.replace(
            level, blocks=level.blocks + blocks, prompt_tokens=level.prompt_tokens - prompt_tokens
        )

    def _prompt_tokens(self, steps: int) -> tuple[int, int]:
        """Tokens of the prompt that run in the first so many steps, and those of them that count as prefill: not a single
        one of its output, which is computed again."""
        if self.prompt is None:
            return 0, 0
        run, counted, start = 0, 0, self.prompt.computed
        for k in range(steps):
            chunk = self.chunks[k % 2]
            if chunk > 1 or start + run < self.prompt.prompt_tokens:
                counted += chunk
            run += chunk
        return run, counted


def course_of(
    steps: int,
    decodes: Sequence[SequenceState],
    prompts: Sequence[SequenceState],
    first_waiting: SequenceState | None,
    config: EngineConfig,
    order: Order,
) -> Course:
    """As many of the next `steps` as are steady for all that prompts say; 0 where the next one is not.

    Args:
        decodes: All that run with one token left to run, in order; the next `steps` of each are known.
        prompts: All that run with more, in order.
        first_waiting: Who comes in as soon as the prompts ahead of it leave it a token of the budget; None: nobody does.
    """
    if not steps or not prompts:
        return Course(steps if first_waiting is None else 0, decodes)
    prompt, budget = prompts[0], config.step_token_budget
    wants = [(state, state.tokens - state.computed) for state in prompts]
    ahead = budget
    if first_waiting is not None:
        ahead = sum(tokens for state, tokens in wants if state.key < first_waiting.key)
        if first_waiting.tokens - first_waiting.computed == 1 or ahead < budget:
            return Course(0, decodes)
    resting, repeats = _resting(decodes, wants, budget, order)
    left = budget - len(decodes)
    chunks = left + len(resting[0]), left + len(resting[1])
    tokens, taken = wants[0][1], 0
    is_ahead = first_waiting is not None and prompt.key < first_waiting.key
    while taken < (steps if repeats else min(steps, 1)):
        chunk = chunks[taken % 2]
        if tokens <= chunk or ahead < budget:
            break
        tokens -= chunk
        ahead -= chunk if is_ahead else 0
        taken += 1
    return Course(taken, decodes, resting, prompt, chunks)


def _resting(
    decodes: Sequence[SequenceState], wants: Sequence[tuple[SequenceState, int]], budget: int, order: Order
) -> tuple[tuple[Collection[SequenceState], Collection[SequenceState]], bool]:
    """Who yields in the next step and in the one after it, if the first prompt comes to its end in neither; and whether it
    is these by turns from then on. (How much is left of the prompts plays no part where the first of them takes all.)"""
    left = budget - len(decodes)
    able = [state for state in decodes if not state.yields]
    now = yielding(order, budget, left, able, wants)
    if not now and len(able) == len(decodes):
        return (NOBODY, NOBODY), True
    then = yielding(order, budget, left, [state for state in decodes if state not in now], wants)
    again = yielding(order, budget, left, [state for state in decodes if state not in then], wants)
    return (now, then), again == now
