"""What becomes free when sequences give up their blocks, one after another.

Owns: the count of it, where blocks are shared. Imports cluster.engine.scheduling. Invariant: a block becomes free with
the last of its holders, whoever that is, and is counted once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from cluster.engine.scheduling.sequence import SequenceState

Shared: TypeAlias = Sequence[tuple[int, int]]
"""Blocks of one sequence that others hold too, each with the number of all its holders."""


class Giving:
    """Who has given up its blocks, in a plan or in a part of one. Each call takes time for one sequence's blocks."""

    __slots__ = ("_given", "_shared")

    def __init__(self, shared: Callable[[SequenceState], Shared]) -> None:
        self._shared = shared
        self._given: dict[int, int] = {}
        """Shared block -> how many of its holders have given it up."""

    def copy(self) -> Giving:
        """To try something out."""
        other = Giving(self._shared)
        other._given = dict(self._given)
        return other

    def gain(self, state: SequenceState) -> int:
        """Blocks that become free if it gives up its own now."""
        shared, given = self._shared(state), self._given
        return state.blocks - len(shared) + sum(holders - given.get(block, 0) == 1 for block, holders in shared)

    def give(self, state: SequenceState) -> None:
        for block, _ in self._shared(state):
            self._given[block] = self._given.get(block, 0) + 1

    def take_back(self, state: SequenceState) -> None:
        """It has given up its blocks, and now has not."""
        for block, _ in self._shared(state):
            self._given[block] -= 1
