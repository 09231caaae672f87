"""How long requests became over what was predicted of them when an engine took them.

Owns: that count, by class. Imports the buckets. Invariants: each request that ended by itself counts once, with what was
predicted of it before its first token; the classes are bounded, whatever requests say.

The engine's thread counts, others may read `told` meanwhile.
"""

from __future__ import annotations

from cluster.metrics import RATIO_BUCKETS
from cluster.tally import Snapshot, Tally

MAX_CLASSES = 64
OTHER_CLASSES = "other"
"""Stands for all beyond these."""


class Foretold:
    """One engine's."""

    __slots__ = ("_tallies",)

    def __init__(self) -> None:
        self._tallies: dict[str, Tally] = {}

    def ended(self, priority_class: str, output_over_predicted: float) -> None:
        tally = self._tallies.get(priority_class)
        if tally is None:
            name = priority_class if len(self._tallies) < MAX_CLASSES else OTHER_CLASSES
            tally = self._tallies.setdefault(name, Tally(RATIO_BUCKETS))
        tally.observe(output_over_predicted)

    def told(self) -> tuple[tuple[str, Snapshot], ...]:
        """By class."""
        return tuple((name, tally.snapshot()) for name, tally in self._tallies.copy().items())
