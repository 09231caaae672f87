"""What word of a live move means.

Owns: that decision, and the names of a move's stages and ends. Pure. Imports messages only. Invariants: a move is granted
at most once, only while its attempt is open on the source and its client has all that it told; before the grant the
attempt stays where it is, whatever goes wrong; after it the source's copy is never gone on with.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum, auto

from cluster.messages import MoveNotice, MoveStage


class Stage(Enum):
    ASKED = auto()
    """The source is told to send it and runs it meanwhile."""
    OFF = auto()
    """It stays for now; the source may not know yet."""
    GRANTED = auto()
    """It is open on the target, which has not said yet that it has it."""
    TAKEN = auto()
    """The target has it, and the client no token from there."""


class MoveOutcome(StrEnum):
    MOVED = "moved"
    REFUSED = "refused"
    """By the source or the target; it stayed."""
    CALLED_OFF = "called_off"
    """By the router; it stayed."""
    ENDED = "ended"
    """The request ended, or its attempt did, before the target had it."""
    FAILED = "failed"
    """The target did not take what it was granted; it went on from the journal."""


class Then(Enum):
    NOTHING = auto()
    GRANT = auto()
    CALL_OFF = auto()
    """Say to the source that it stays."""
    STAY = auto()
    """The source has said so."""
    ARRIVE = auto()
    GIVE_UP = auto()
    """Go on from the journal."""
    END_COPY = auto()
    """End the attempt of which the word is: it is not the one that counts."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What a notice finds."""

    stage: Stage | None
    """Of the move that it is about; None where there is none."""
    from_target: bool
    is_open: bool
    """The notice's attempt is the one that counts, and its replica has it."""
    tokens: int
    """That have come of the request."""
    whole: bool
    """Nothing else is open about the request: no gap, no suspicion."""
    target_takes: bool


def judge(notice: MoveNotice, found: Standing) -> Then:
    stage = found.stage
    match notice.stage:
        case MoveStage.FROZEN:
            if stage in (Stage.GRANTED, Stage.TAKEN):
                return Then.NOTHING  # a repeat
            if not found.is_open:
                return Then.END_COPY
            told = notice.index == found.tokens and found.whole
            return Then.GRANT if stage is Stage.ASKED and told and found.target_takes else Then.CALL_OFF
        case MoveStage.TAKEN:
            if found.from_target and stage is Stage.GRANTED:
                return Then.ARRIVE
            return Then.NOTHING if found.is_open else Then.END_COPY
        case MoveStage.OFF:
            if found.from_target:
                return Then.GIVE_UP if stage is Stage.GRANTED else Then.NOTHING
            return Then.STAY if stage is Stage.ASKED else Then.NOTHING
