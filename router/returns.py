"""Why a request that has not ended is taken from a replica and goes on at its old place.

Owns: that list. Imports what replicas refuse with, which are reasons too. Invariant: whoever sends a request back names one of
these, so that each has a series from the start.
"""

from __future__ import annotations

from enum import StrEnum

from cluster.types import RefusalReason


class Return(StrEnum):
    LOST = "lost"
    """The replica is gone, or its link for too long."""
    REPLACED = "replaced"
    """Another incarnation of the replica has come."""
    FENCED = "fenced"
    """The replica has been silent for too long."""
    ABORTED = "aborted"
    """The replica gave it up."""
    BROKEN = "broken"
    """What came of it does not fit what had come before."""
    GAP = "gap"
    """What is missing of it did not come when it was asked for again."""
    PREEMPTED = "preempted"
    """It is a suspect, which is not to pause there."""
    DISPLACED = "displaced"
    """It is a suspect, and a more urgent one is tried in its place."""
    DRAINED = "drained"
    """The replica is being emptied, and it cannot move."""
    CALLED_BACK = "called_back"
    """The controller proposed it."""
    MOVE = "move"
    """Its move was granted, and came to nothing."""


RETURNS: tuple[Return | RefusalReason, ...] = (*Return, *RefusalReason)
