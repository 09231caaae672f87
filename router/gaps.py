"""Gaps in what replicas have sent: what is missing is asked for again, a few times.

Owns: which attempts have a gap open. Imports types only. Invariant: a gap is open only while its attempt is.
"""

from __future__ import annotations

from cluster.types import RequestId

RESEND_ASKS = 3
"""Times that one gap is asked for before the attempt is given up."""


class Gaps:
    """Open gaps: times asked, and when last."""

    __slots__ = ("_asked",)

    def __init__(self) -> None:
        self._asked: dict[RequestId, tuple[int, float]] = {}

    def __len__(self) -> int:
        return len(self._asked)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._asked

    def ask(self, request_id: RequestId, now_s: float) -> bool:
        """Whether to ask now, for the first time or again; False: it has been asked for often enough."""
        asked, _ = self._asked.get(request_id, (0, 0.0))
        if asked >= RESEND_ASKS:
            return False
        self._asked[request_id] = (asked + 1, now_s)
        return True

    def close(self, request_id: RequestId) -> None:
        """It has been filled, or its attempt is over."""
        self._asked.pop(request_id, None)

    def unanswered(self, since_s: float) -> list[RequestId]:
        """Those that were last asked for before `since_s`."""
        return [request_id for request_id, (_, at_s) in self._asked.items() if at_s < since_s]
