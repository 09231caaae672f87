"""What a scheduling decision may know of a sequence, and the lines that sequences stand in.

Owns: `SequenceState` and the sorted `Line`. Imports cluster.types and the integrity error. Invariant: a sequence's key
changes only while it stands in no line, so that a line stays sorted without being sorted again.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from itertools import pairwise
from operator import attrgetter
from typing import TypeAlias

from cluster.engine.kv_cache import IntegrityError
from cluster.types import PriorityLoad, RequestId

SortKey: TypeAlias = tuple[float | str, ...]
"""Ascending: the smaller goes first. Ends in (request id, attempt), so that no two are equal."""

Identity: TypeAlias = tuple[RequestId, int]
"""(request id, attempt): what names a sequence in an engine."""

_key_of: Callable[[SequenceState], SortKey] = attrgetter("key")


class SequenceState:
    """One sequence as the scheduler sees it. Only the engine's commit changes it, never a plan.

    A plain class with slots: a plan reads a few hundred of these in each step.
    """

    __slots__ = (
        "arrived_unix_s",
        "blocked_counted",
        "blocks",
        "computed",
        "host_blocks",
        "identity",
        "key",
        "leader",
        "limit_tokens",
        "overtaken",
        "predicted_tokens",
        "priority",
        "prompt_tokens",
        "pushed_out",
        "running",
        "started",
        "tokens",
        "yields",
    )

    def __init__(
        self,
        identity: Identity,
        priority: int,
        arrived_unix_s: float,
        *,
        tokens: int = 0,
        started: bool = False,
        prompt_tokens: int | None = None,
        limit_tokens: int | None = None,
        predicted_tokens: float | None = None,
    ) -> None:
        self.identity = identity
        self.priority = priority
        self.arrived_unix_s = arrived_unix_s
        self.tokens = tokens
        """Prompt and output so far."""
        self.prompt_tokens = tokens if prompt_tokens is None else prompt_tokens
        self.limit_tokens = tokens + 1 if limit_tokens is None else limit_tokens
        """The most that prompt and output can become."""
        self.predicted_tokens = float(self.limit_tokens if predicted_tokens is None else predicted_tokens)
        """What prompt and output are expected to become; between `tokens` + 1 and `limit_tokens`. Some orders make a key
        of it: when it has changed the sequence is placed anew."""
        self.started = started
        """It has run before, here or on another engine: it continues rather than begins."""
        self.running = False
        """It has a slot."""
        self.computed = 0
        """Positions whose keys and values are in its blocks, or in host memory. `tokens - computed` is 1 for a decode."""
        self.blocks = 0
        """KV blocks that it holds. A waiting one may hold some: it was paused, or came with them."""
        self.host_blocks = 0
        """Blocks of host memory that it was swapped out to; it then holds no others."""
        self.leader: SequenceState | None = None
        """A live sibling that is to compute the common prompt first; never one that itself has a leader."""
        self.overtaken = 0
        """Smaller requests that have passed it since it was last admitted."""
        self.pushed_out = 0
        """Times it was to be recomputed for more urgent work; never falls."""
        self.yields = 0
        """Steps in a row in which this decode gave its token of the budget to prefill."""
        self.blocked_counted = False
        """It has been counted as an urgent request that found no victim."""
        self.key: SortKey = ()

    @property
    def prompt_left(self) -> int:
        """Known tokens that are to be run before the last one, with which the next is drawn; 0 of a decode."""
        left = self.tokens - self.computed - 1
        return left if left > 0 else 0

    def expect(self, output_tokens: float) -> None:
        """So much output is expected in all; where it has more already, or may not have so much, as near to it as can be."""
        expected = self.prompt_tokens + output_tokens
        self.predicted_tokens = min(max(expected, self.tokens + 1.0), float(self.limit_tokens))


class Line:
    """Sequences sorted by their keys, with the load of each priority kept up to date.

    Adding and removing cost a binary search and a shift of pointers: a few microseconds at 10,000.
    """

    __slots__ = ("_loads", "holding", "items")

    def __init__(self) -> None:
        self.items: list[SequenceState] = []
        self.holding: list[SequenceState] = []
        """Those that were added with blocks, in the same order: of a line that waits, the paused."""
        self._loads: dict[int, list[int]] = {}
        """priority -> [requests, blocks, tokens of prompts left]"""

    def __len__(self) -> int:
        return len(self.items)

    def add(self, state: SequenceState, blocks: int) -> None:
        """Put a sequence in its place; `blocks` is what it counts for in the load."""
        insort(self.items, state, key=_key_of)
        if blocks:
            insort(self.holding, state, key=_key_of)
        load = self._loads.setdefault(state.priority, [0, 0, 0])
        load[0] += 1
        load[1] += blocks
        load[2] += state.prompt_left

    def grow(self, state: SequenceState, blocks: int) -> None:
        """A member that was added with blocks counts for `blocks` more."""
        self._loads[state.priority][1] += blocks

    def ran(self, state: SequenceState, prompt_tokens: int) -> None:
        """Of a member's prompt so much less is left; its state says so already, or will."""
        self._loads[state.priority][2] -= prompt_tokens

    def remove(self, state: SequenceState, blocks: int) -> None:
        """Take a member out; `blocks` is what it counted for.

        Raises:
            IntegrityError: it is not where its key says.
        """
        for line in (self.items, self.holding) if blocks else (self.items,):
            index = bisect_left(line, state.key, key=_key_of)
            if index == len(line) or line[index] is not state:
                raise IntegrityError("a sequence is not in its line where its key says")
            del line[index]
        load = self._loads[state.priority]
        load[0] -= 1
        load[1] -= blocks
        load[2] -= state.prompt_left
        if not load[0]:
            del self._loads[state.priority]

    @property
    def prompt_tokens(self) -> int:
        """What is left of all members' prompts."""
        return sum([load[2] for load in self._loads.values()])

    def loads(self) -> tuple[PriorityLoad, ...]:
        """Most urgent first."""
        return tuple(PriorityLoad(p, *self._loads[p]) for p in sorted(self._loads, reverse=True))

    def check_integrity(self, counts_for: Callable[[SequenceState], int]) -> None:
        """Compare the order with the keys, and the loads and who holds blocks with `counts_for` of each member.

        Raises:
            IntegrityError: they disagree.
        """
        if not all(a.key < b.key for a, b in pairwise(self.items)):
            raise IntegrityError("a line is out of order")
        if self.holding != [state for state in self.items if counts_for(state)]:
            raise IntegrityError("a line does not know who in it holds blocks")
        loads: dict[int, list[int]] = {}
        for state in self.items:
            load = loads.setdefault(state.priority, [0, 0, 0])
            load[0] += 1
            load[1] += counts_for(state)
            load[2] += state.prompt_left
        if loads != self._loads:
            raise IntegrityError("a line's load is not the sum of its sequences")
