"""Shortest job first: who is expected to put out least is started first; what has started is not interrupted.

Imports cluster.engine.scheduling. Sequences are still preempted, last in order first, when the KV pool runs out.
"""

from __future__ import annotations

from cluster.engine.scheduling.ageing import Ageing
from cluster.engine.scheduling.sequence import SequenceState, SortKey


class Sjf:
    """Started work goes before new, and is never overtaken by it; within both, the earlier virtual deadline over the
    expected output goes first (see `Ageing` for how long a long request can be passed by short ones)."""

    def __init__(self, ageing: Ageing) -> None:
        self._ageing = ageing

    def key(self, state: SequenceState) -> SortKey:
        return shortest_first(state, self._ageing)

    def may_preempt(self, urgent: SequenceState, victim: SequenceState) -> bool:  # noqa: ARG002
        return False


def shortest_first(state: SequenceState, ageing: Ageing) -> SortKey:
    """Started before new, then the virtual deadline, arrival and id."""
    deadline_s = ageing.deadline_s(state.arrived_unix_s, state.predicted_tokens - state.prompt_tokens)
    return (0 if state.started else 1, deadline_s, state.arrived_unix_s, *state.identity)
