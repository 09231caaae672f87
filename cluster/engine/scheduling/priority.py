"""Higher priority first; within a priority first come first served, or shortest job first; strictly lower work may be
pushed out.

Imports cluster.config and cluster.engine.scheduling.
"""

from __future__ import annotations

from typing import assert_never

from cluster.config import WithinClass
from cluster.engine.scheduling.ageing import Ageing
from cluster.engine.scheduling.order import place
from cluster.engine.scheduling.sequence import SequenceState, SortKey
from cluster.engine.scheduling.sjf import shortest_first


class Priority:
    """Within a priority started work goes before new, whichever comes `within_class`."""

    def __init__(self, within_class: WithinClass, ageing: Ageing) -> None:
        self._within_class = within_class
        self._ageing = ageing

    def key(self, state: SequenceState) -> SortKey:
        match self._within_class:
            case WithinClass.FCFS:
                return (-state.priority, *place(state))
            case WithinClass.SJF:
                return (-state.priority, *shortest_first(state, self._ageing))
            case _:
                assert_never(self._within_class)

    def may_preempt(self, urgent: SequenceState, victim: SequenceState) -> bool:
        return urgent.priority > victim.priority
