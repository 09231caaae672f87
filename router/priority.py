"""Which class a priority belongs to.

Owns: that one rule. Imports config only. Invariant: the priority of a class belongs to that class.
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.config import PriorityClass


def class_of(classes: Sequence[PriorityClass], priority: int) -> PriorityClass:
    """The most urgent class that `priority` reaches, or the least urgent class where it reaches none."""
    reached = [c for c in classes if c.priority <= priority]
    if reached:
        return max(reached, key=lambda c: c.priority)
    return min(classes, key=lambda c: c.priority)
