"""Which of the controllers acts. Pure.

Owns: what a router or a replica makes of the controllers that it is linked to (`Follower`), and what a controller makes of
what these say (`decide`). Imports the messages; no clock and no socket: who asks says what time it is.

Controllers are not linked to each other. Each router and each replica is linked to all of them, hears from the one that
leads every BEAT_S, and tells all whom it follows and whether it hears that one. A controller that is told by most that
nobody is heard leads, with a generation later than any that it was told of; told of a later one than its own, it stops. So
a cut between two controllers is nothing, one that is cut off from its routers and replicas has a successor, and of two
that lead all the same each router and each replica does what the later one says, which the older learns from any of them.

Invariants: whom a follower follows only ever gets later; what comes from any other controller is not done.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from cluster.messages import Follows
from cluster.types import Generation

BEAT_S = 0.25
SILENT_S = 1.0
"""Whoever has led and not been heard for so long is taken to be gone; one whose link ends is, at once."""
CONFIRM_S = 0.2
"""Nobody must have been heard for so long: while a controller takes over, some have met it and others not yet."""
SETTLE_S = 0.5
"""Whoever begins to lead moves and orders nothing for so long: what the one before has had done shows by then."""
FIRST_WAIT_S = 1.0
"""Where several start at once, each but the first leaves so much time to the one before it."""


class Follower:
    """Of a router or a replica. Single writer. Its controllers are numbered from 0."""

    def __init__(self) -> None:
        self.newest: Generation | None = None
        """The latest that has led."""
        self._leads: dict[int, Generation] = {}
        """What each that is linked has last said of itself."""
        self._heard_s: dict[int, float] = {}

    def met(self, place: int, generation: Generation, now_s: float) -> None:
        """It says that it leads."""
        self._leads[place] = generation
        self._heard_s[place] = now_s
        if self.newest is None or generation > self.newest:
            self.newest = generation

    def lost(self, place: int) -> None:
        """The link to it has ended."""
        self._leads.pop(place, None)
        self._heard_s.pop(place, None)

    def stood_still(self, now_s: float) -> None:
        """This process did not listen until now: that it has heard nobody says nothing."""
        for place in self._heard_s:
            self._heard_s[place] = now_s

    @property
    def leader(self) -> int | None:
        """Whose word counts; None where it is not linked."""
        for place, generation in self._leads.items():
            if generation == self.newest:
                return place
        return None

    def word(self, now_s: float) -> Follows:
        """What every controller is to know."""
        leader = self.leader
        return Follows(self.newest, leader is not None and now_s - self._heard_s[leader] <= SILENT_S)


@dataclass(frozen=True, slots=True)
class Term:
    """Where a controller stands."""

    place: int
    """Its number: the first that starts leads."""
    uuid: str
    leads: Generation | None = None
    """As what it leads; None: it stands by."""
    newest: Generation | None = None
    """The latest that it was told of, or was itself."""
    stood_by: bool = False
    """It has known another to be heard: it need leave no time to anybody."""
    unheard_since_s: float | None = None
    """Since when most hear nobody."""


def decide(term: Term, words: Collection[Follows], now_s: float) -> Term:
    """Where it stands from now on.

    Args:
        words: The latest of each router and replica that is linked to it.
    """
    told = [w.generation for w in words if w.generation is not None]
    newest = max(told if term.newest is None else (*told, term.newest), default=None)
    if term.leads is not None:
        if newest == term.leads:
            return term
        return replace(term, leads=None, newest=newest, unheard_since_s=None)
    # Who has met nobody yet is new, and about to.
    known = [w for w in words if w.generation is not None] or words
    heard = sum(w.heard for w in known)
    if 2 * heard >= len(known):
        return replace(term, newest=newest, unheard_since_s=None, stood_by=term.stood_by or heard > 0)
    since_s = now_s if term.unheard_since_s is None else term.unheard_since_s
    if now_s - since_s < CONFIRM_S + (0.0 if term.stood_by else term.place * FIRST_WAIT_S):
        return replace(term, newest=newest, unheard_since_s=since_s)
    own = Generation(1 if newest is None else newest.number + 1, term.uuid)
    return replace(term, leads=own, newest=own, unheard_since_s=None)
