"""First come, first served: priority plays no part and nobody is pushed out for anybody.

Imports cluster.engine.scheduling. Sequences are still preempted, last in order first, when the KV pool runs out.
"""

from __future__ import annotations

from cluster.engine.scheduling.order import place
from cluster.engine.scheduling.sequence import SequenceState, SortKey


class Fcfs:
    def key(self, state: SequenceState) -> SortKey:
        return place(state)

    def may_preempt(self, urgent: SequenceState, victim: SequenceState) -> bool:  # noqa: ARG002
        return False
