"""Requests that wait for a replica: strict bands by priority, an exchangeable order within each.

Owns: who waits, in which order, and what each class is charged for it. Imports nothing of ours but types. Single
writer. Invariant: the charge of a class is exactly the requests and bytes of its members; members are charged while
they are here and at no other time. A request that returns after a refusal or a loss has its old key, so its old place,
and always has room: bounds are asked about at admission (`admission.decide`), never here, so a return may carry a class
over its bound and new arrivals wait for that to pass.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from cluster.types import RequestId


@dataclass(frozen=True, slots=True)
class Waiting:
    """One member of the queue. `size_bytes` is what it is charged."""

    request_id: RequestId
    priority: int
    priority_class: str
    arrived_unix_s: float
    size_bytes: int


class Band(Protocol):
    """The order within one priority. A fairer one than first come, first served can take its place."""

    def push(self, waiting: Waiting) -> None: ...

    def peek(self) -> Waiting | None:
        """The next one; it stays the next until something is pushed or removed."""
        ...

    def remove(self, request_id: RequestId) -> None: ...

    def __len__(self) -> int: ...


class FifoBand:
    """First come, first served, by (arrived, id): O(log n) push, amortised O(log n) remove.

    A removed key stays in the heap until it surfaces or more than half of the heap is such keys.
    """

    __slots__ = ("_heap", "_members")

    def __init__(self) -> None:
        self._heap: list[tuple[float, RequestId]] = []
        self._members: dict[RequestId, Waiting] = {}

    def push(self, waiting: Waiting) -> None:
        self._members[waiting.request_id] = waiting
        heapq.heappush(self._heap, (waiting.arrived_unix_s, waiting.request_id))

    def peek(self) -> Waiting | None:
        while self._heap:
            arrived_unix_s, request_id = self._heap[0]
            member = self._members.get(request_id)
            if member is not None and member.arrived_unix_s == arrived_unix_s:
                return member
            heapq.heappop(self._heap)
        return None

    def remove(self, request_id: RequestId) -> None:
        del self._members[request_id]
        if len(self._heap) > 2 * len(self._members) + 16:
            self._heap = [(m.arrived_unix_s, m.request_id) for m in self._members.values()]
            heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._members)


@dataclass(slots=True)
class Charge:
    """What the members of one class or band amount to."""

    requests: int = 0
    size_bytes: int = 0


class BandQueue:
    """All waiting requests; `peek` is the oldest of the most urgent band that has any."""

    def __init__(self, make_band: Callable[[], Band] = FifoBand) -> None:
        self._make_band = make_band
        self._members: dict[RequestId, Waiting] = {}
        self._bands: dict[int, tuple[Band, Charge]] = {}
        self._priorities: list[int] = []
        """Priorities of the bands, ascending."""
        self._classes: dict[str, Charge] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._members

    def push(self, waiting: Waiting) -> None:
        """Add a request, new or returning.

        Raises:
            ValueError: it is already here.
        """
        if waiting.request_id in self._members:
            raise ValueError(f"{waiting.request_id} is already queued")
        self._members[waiting.request_id] = waiting
        entry = self._bands.get(waiting.priority)
        if entry is None:
            entry = self._bands[waiting.priority] = (self._make_band(), Charge())
            self._priorities.insert(bisect_left(self._priorities, waiting.priority), waiting.priority)
        band, band_charge = entry
        band.push(waiting)
        for charge in (band_charge, self._classes.setdefault(waiting.priority_class, Charge())):
            charge.requests += 1
            charge.size_bytes += waiting.size_bytes

    def peek(self) -> Waiting | None:
        if not self._priorities:
            return None
        head = self._bands[self._priorities[-1]][0].peek()
        assert head is not None, "a band is dropped with its last member"
        return head

    def remove(self, request_id: RequestId) -> Waiting:
        """Take a request out, wherever it stands.

        Raises:
            KeyError: it is not here.
        """
        waiting = self._members.pop(request_id)
        band, band_charge = self._bands[waiting.priority]
        band.remove(request_id)
        for charge in (band_charge, self._classes[waiting.priority_class]):
            charge.requests -= 1
            charge.size_bytes -= waiting.size_bytes
        if not len(band):
            del self._bands[waiting.priority]
            del self._priorities[bisect_left(self._priorities, waiting.priority)]
        return waiting

    def of_class(self, priority_class: str) -> Charge:
        return self._classes.get(priority_class, Charge())

    def at_or_above(self, priority: int) -> int:
        """How many members a new request of `priority` would stand behind."""
        start = bisect_left(self._priorities, priority)
        return sum(self._bands[p][1].requests for p in self._priorities[start:])

    def bands(self) -> Iterator[tuple[int, Charge]]:
        """Each priority with members and its charge, most urgent first."""
        for priority in reversed(self._priorities):
            yield priority, self._bands[priority][1]
