"""The suspects among a router's live requests, and those of them that wait for a replica to be tried on.

Owns: who is suspect, and who is set aside. Imports `live` and the pure decision. Single writer. Invariants: the suspects
are exactly the live requests with a suspicion; one that is set aside is neither queued nor open anywhere.

A suspect is set aside when it is its turn and a replica has room for it, but none that it may be tried on: it must not
stand in the way of others meanwhile. It comes back at its old place as soon as there is a replica for it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping

from cluster.types import RequestId
from router.live import Live
from router.suspects import Present, Suspicion, Trial, judge, without

SET_ASIDE = "set aside"
_Place = tuple[int, float, float, RequestId]
"""In the order of the queue."""


class Trials:
    """Suspects by their id, and the lines of those set aside."""

    __slots__ = ("_deaths", "_lines", "_suspects", "waiting")

    def __init__(self) -> None:
        self._deaths = 0
        self._suspects: dict[RequestId, Live] = {}
        self._lines: dict[Trial, list[_Place]] = {Trial.APART: [], Trial.ALONE: []}
        self.waiting = 0
        """How many are set aside."""

    def __len__(self) -> int:
        return len(self._suspects)

    # --- who is suspect ---

    def died(self, there: Mapping[RequestId, Live], replica: str, now_s: float, *, strangers: bool) -> Live | None:
        """An engine died under these. Returns who is blamed for it, if anybody."""
        self._deaths += 1
        present = [Present(name, live.journal.next_index, live.suspicion) for name, live in there.items()]
        verdict = judge(self._deaths, present, strangers=strangers)
        for request_id, suspicion in verdict.suspects.items():
            live = there[request_id]
            self._suspects[request_id] = live
            live.suspicion = suspicion
            live.decided(
                now_s,
                "suspected",
                replica=replica,
                why=f"its engine died; to be tried {suspicion.trial.name.lower()}",
                suspects=len(present),
                deaths=len(suspicion.deaths),
                cleared_at=suspicion.cleared_at,
            )
        if verdict.blamed is None:
            return None
        blamed = there[verdict.blamed]
        assert blamed.suspicion is not None
        deaths = blamed.suspicion.deaths | {self._deaths}
        blamed.suspicion = Suspicion(deaths, Trial.ALONE, blamed.suspicion.cleared_at)
        blamed.decided(now_s, "blamed", replica=replica, why="its engine died again", deaths=len(deaths))
        return blamed

    def explained_by(self, blamed: Live) -> list[Live]:
        """Those that are suspects for no other deaths than those that `blamed` caused."""
        assert blamed.suspicion is not None
        explained, innocent = blamed.suspicion.deaths, []
        for live in self._suspects.values():
            assert live.suspicion is not None
            left = without(live.suspicion, explained)
            if left is not None:
                live.suspicion = left
            elif live is not blamed:
                innocent.append(live)
        return innocent

    def cleared(self, live: Live, why: str, now_s: float) -> bool:
        """It is no suspect any more. Returns whether it had been set aside."""
        live.suspicion = None
        live.decided(now_s, "cleared", why=why, emitted=live.journal.next_index)
        return self.forget(live)

    def forget(self, live: Live) -> bool:
        """It has ended, or is cleared. Returns whether it had been set aside."""
        if self._suspects.pop(live.request.request_id, None) is None:
            return False
        return self._take(live)

    # --- who is set aside ---

    def set_aside(self, live: Live, now_s: float) -> None:
        """It may be so again and again before it has been tried: that is told once."""
        assert live.suspicion is not None
        if live.last_event != SET_ASIDE:
            live.decided(now_s, SET_ASIDE, why=f"to be tried {live.suspicion.trial.name.lower()}", waiting=self.waiting)
        insort(self._lines[live.suspicion.trial], _place(live))
        self.waiting += 1

    def least_urgent(self) -> Live | None:
        """Of those that are being tried."""
        tried = [live for live in self._suspects.values() if live.replica_id is not None]
        return min(tried, key=lambda live: (live.request.priority, live.request.request_id), default=None)

    def first(self, trial: Trial) -> Live | None:
        """The first in line for a trial of this kind."""
        line = self._lines[trial]
        return self._suspects[line[0][3]] if line else None

    def bring_back(self, live: Live) -> None:
        taken = self._take(live)
        assert taken, "only who was set aside comes back"

    def _take(self, live: Live) -> bool:
        place = _place(live)
        for line in self._lines.values():
            at = bisect_left(line, place)
            if at < len(line) and line[at] == place:
                del line[at]
                self.waiting -= 1
                return True
        return False


def _place(live: Live) -> _Place:
    return -live.request.priority, live.rank, live.request.arrived_unix_s, live.request.request_id
