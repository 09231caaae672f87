"""When live requests run out of time.

Owns: that order. Imports types only. Invariant: a request has at most one time in each `Timers`, and memory is in
proportion to the requests that have one.
"""

from __future__ import annotations

import heapq
import math

from cluster.types import RequestId


class Timers:
    """Times by request, earliest first: O(log n) to set, O(1) to clear."""

    __slots__ = ("_at_s", "_heap")

    def __init__(self) -> None:
        self._at_s: dict[RequestId, float] = {}
        self._heap: list[tuple[float, RequestId]] = []
        """With times that have been cleared or changed since; they are dropped as they surface."""

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._at_s

    def __len__(self) -> int:
        return len(self._at_s)

    def set(self, request_id: RequestId, at_s: float) -> None:
        self._at_s[request_id] = at_s
        heapq.heappush(self._heap, (at_s, request_id))
        if len(self._heap) > 2 * len(self._at_s) + 16:
            self._heap = [(at, name) for name, at in self._at_s.items()]
            heapq.heapify(self._heap)

    def clear(self, request_id: RequestId) -> None:
        self._at_s.pop(request_id, None)

    def due(self, now_s: float) -> list[RequestId]:
        """Those whose time has come, earliest first; they have none any more."""
        due: list[RequestId] = []
        while self._heap and self._heap[0][0] <= now_s:
            at_s, request_id = heapq.heappop(self._heap)
            if self._at_s.get(request_id) == at_s:
                del self._at_s[request_id]
                due.append(request_id)
        return due


class Deadlines:
    """Of live requests: by when each must have left the queue, and by when it must have ended."""

    __slots__ = ("_end_by", "_start_by")

    def __init__(self) -> None:
        self._start_by = Timers()
        """Of each without a token since it began to wait; one that returns without a token keeps its time."""
        self._end_by = Timers()

    def waits(self, request_id: RequestId, start_by_s: float, end_by_s: float) -> None:
        """It begins to wait, or waits again. An endless time is none."""
        if request_id not in self._start_by:
            self._start_by.set(request_id, start_by_s)
        if end_by_s < math.inf and request_id not in self._end_by:
            self._end_by.set(request_id, end_by_s)

    def started(self, request_id: RequestId) -> None:
        """It has a token: should it wait again, it has its whole time again."""
        self._start_by.clear(request_id)

    def forget(self, request_id: RequestId) -> None:
        """It has ended."""
        self._start_by.clear(request_id)
        self._end_by.clear(request_id)

    def over(self, now_s: float) -> list[RequestId]:
        """Those that must have ended by now; told once."""
        return self._end_by.due(now_s)

    def late(self, now_s: float) -> list[RequestId]:
        """Those without a token that must have left the queue by now. They are told again until they have one or end:
        one that has been sent out in time may come back."""
        due = self._start_by.due(now_s)
        for request_id in due:
            self._start_by.set(request_id, now_s)
        return due
