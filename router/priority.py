"""Which class a priority belongs to.

Owns: that one rule. Imports config only. Invariant: the priority of a class belongs to that class.
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.config import PriorityClass


def class_of(classes: Sequence[PriorityClass], priority: int) -> PriorityClass:
    """The most urgent class that `priority` reaches, or the least urgent class where it reaches none."""
    return classes[reached([c.priority for c in classes], priority)]


def reached(priorities: Sequence[int], priority: int) -> int:
    """The same of the classes' priorities: its index."""
    indices = range(len(priorities))
    below = [i for i in indices if priorities[i] <= priority]
    return max(below, key=priorities.__getitem__) if below else min(indices, key=priorities.__getitem__)
