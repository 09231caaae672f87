"""A histogram that costs next to nothing to count into.

Owns: the counts. Imports nothing of ours, and no metrics library: who shows it translates. Invariant: the counts add up to
the observations, each in the first bucket whose bound it does not exceed.

One thread counts. Others may read `snapshot` meanwhile: it may lack what is being counted at that moment.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple


class Snapshot(NamedTuple):
    """A histogram at one moment."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    """Of each bucket alone, not of those below it; the last is of what exceeds every bound."""
    total: float
    """The sum of all values."""


class Tally:
    """Values by bucket, in the unit of its bounds."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds`: the largest value of each bucket, ascending."""
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def snapshot(self) -> Snapshot:
        return Snapshot(self._bounds, tuple(self._counts), self._total)
