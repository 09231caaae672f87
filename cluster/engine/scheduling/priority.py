"""Higher priority first, first come first served within a priority; strictly lower work may be pushed out.

Imports cluster.engine.scheduling.
"""

from __future__ import annotations

from cluster.engine.scheduling.order import place
from cluster.engine.scheduling.sequence import SequenceState, SortKey


class Priority:
    def key(self, state: SequenceState) -> SortKey:
        return (-state.priority, *place(state))

    def may_preempt(self, urgent: SequenceState, victim: SequenceState) -> bool:
        return urgent.priority > victim.priority
