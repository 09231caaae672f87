"""What an order is: who goes first, and who may push whom out.

Owns: the interface of all orders. Imports cluster.engine.scheduling.sequence. Invariant, held by the conformance suite
over every order: keys are total; nobody may push out an equal; whoever may be pushed out stands behind the one who
pushes; and if one may be pushed out, so may all behind it.
"""

from __future__ import annotations

from typing import Protocol

from cluster.engine.scheduling.sequence import SequenceState, SortKey


class Order(Protocol):
    def key(self, state: SequenceState) -> SortKey:
        """Sort key among waiting and among running sequences; the smaller goes first.

        Except under srpt: among equals in urgency (neither may push out the other), one that has started goes before
        one that has not. Preempted and continued work is never overtaken by new work of its own urgency, whatever that
        one's arrival stamp.
        """
        ...

    def may_preempt(self, urgent: SequenceState, victim: SequenceState) -> bool:
        """Whether `urgent` may take the slot, the blocks or the step budget of `victim`. Both have a key."""
        ...


def place(state: SequenceState) -> SortKey:
    """The end of every key: started before new, then arrival, then id."""
    return (0 if state.started else 1, state.arrived_unix_s, *state.identity)
