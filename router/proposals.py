"""Whether a proposal of the controller still fits.

Owns: that decision. Pure. Imports messages only. Invariants: it is done only as the controller saw it: of the attempt that
is open, on that incarnation, by the latest controller that was met; nobody is called back for who is not more urgent,
unless it waits where it is anyway; nothing is owed, and what is refused is not put off.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum, auto

from cluster.messages import Propose
from cluster.types import Generation


class Verdict(StrEnum):
    MOVES = "moves"
    CALLED_BACK = "called_back"
    """To its place in the queue."""
    STALE = "stale"
    """Of a controller that has a successor."""
    GONE = "gone"
    """The attempt is not there any more."""
    BUSY = "busy"
    """It moves already, may have killed an engine, has all its tokens, or misses some that its client waits for."""
    RESTS = "rests"
    """It has left a replica on a proposal a moment ago."""
    SERVED = "served"
    """What it was to make room for does not wait for it any more."""
    RUNS = "runs"
    """It was to be called back, and runs for nobody's good but its own."""
    NO_PLACE = "no_place"
    """There is none for it where it was to go."""

    @property
    def stays(self) -> bool:
        """Nothing is done."""
        return self not in (Verdict.MOVES, Verdict.CALLED_BACK)


class Demand(Enum):
    """What a proposal is to make room for, as it stands now."""

    NONE = auto()
    """It is for no other request's sake."""
    WAITS = auto()
    OVER = auto()


@dataclass(frozen=True, slots=True)
class Found:
    """What a proposal finds."""

    newest: Generation | None
    """Of the controllers that were met; None before the first."""
    demand: Demand
    is_open: bool = False
    """Its attempt is the one that counts and is open on that incarnation of its source; else no more is known of it."""
    busy: bool = False
    whole: bool = False
    """Its client has all that its replica told, and that can be reached: only so it can move."""
    rests: bool = False
    below_demand: bool = False
    """It is strictly less urgent than what it is to make room for."""
    waits: bool = False
    """It has had no token of its attempt, or was preempted since."""
    has_place: bool = False
    """At the target; of one that is to be called back for nobody's sake, on some other replica."""


def judge(propose: Propose, found: Found) -> Verdict:
    """What becomes of it."""
    newest, generation = found.newest, propose.generation
    verdict = Verdict.CALLED_BACK if propose.target is None else Verdict.MOVES
    if newest is not None and generation < newest:
        verdict = Verdict.STALE
    elif not found.is_open:
        verdict = Verdict.GONE
    elif found.busy or (propose.target is not None and not found.whole):
        verdict = Verdict.BUSY
    elif found.rests:
        verdict = Verdict.RESTS
    elif found.demand is Demand.OVER:
        verdict = Verdict.SERVED
    elif propose.target is None and found.demand is Demand.WAITS:
        if not (found.waits or found.below_demand):
            verdict = Verdict.RUNS
    elif propose.target is None and not found.waits:
        verdict = Verdict.RUNS
    elif not found.has_place:
        verdict = Verdict.NO_PLACE
    return verdict
