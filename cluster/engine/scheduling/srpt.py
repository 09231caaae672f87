"""Shortest remaining processing time: who is expected to need least from now on goes first, and pushes out.

Imports cluster.engine.scheduling.
"""

from __future__ import annotations

from cluster.engine.scheduling.ageing import Ageing
from cluster.engine.scheduling.sequence import SequenceState, SortKey


class Srpt:
    """Sorts by the virtual deadline over the tokens that are expected to be still to come when the key is made: that is
    when a sequence begins to wait or to run, and at each block that it fills.

    One pushes out another whose deadline is later by more than a margin, given in tokens, which keeps two that need
    about as much from taking turns. In place of "started before new" holds: new work goes before started work, and takes
    its place, only if it needs so many fewer tokens than that one still does, by more than the margin and by what that
    one's earlier arrival counts for, and only if it arrived at most `longest_wait_s` later (see `Ageing`). Of equal
    deadlines the one that has started goes first.
    """

    def __init__(self, ageing: Ageing, margin_tokens: float) -> None:
        self._ageing = ageing
        self._margin_s = margin_tokens / ageing.tokens_per_s

    def key(self, state: SequenceState) -> SortKey:
        deadline_s = self._ageing.deadline_s(state.arrived_unix_s, state.predicted_tokens - state.tokens)
        return (deadline_s, 0 if state.started else 1, state.arrived_unix_s, *state.identity)

    def may_preempt(self, urgent: SequenceState, victim: SequenceState) -> bool:
        return _deadline_s(urgent) + self._margin_s < _deadline_s(victim)


def _deadline_s(state: SequenceState) -> float:
    deadline_s = state.key[0]
    assert isinstance(deadline_s, float)
    return deadline_s
