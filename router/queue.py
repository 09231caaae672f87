"""Requests that wait for a replica: strict bands by priority, an exchangeable order within each.

Owns: who waits, in which order, and what each class and each tenant in it is charged for it. Imports nothing of ours
but types. Single writer. Invariant: a charge is exactly the requests, bytes and service of its members; members are
charged while they are here and at no other time. A request that returns after a refusal or a loss has its old key, so
its old place, and always has room: bounds are asked about at admission (`admission.decide`), never here, so a return
may carry a class over its bound and new arrivals wait for that to pass.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import msgspec

from cluster.types import RequestId


class Waiting(msgspec.Struct, frozen=True, gc=False):
    """One member of the queue. `size_bytes` is what it is charged.

    It holds strings and numbers only, so that the garbage collector need not look at a million of them.
    """

    request_id: RequestId
    priority: int
    priority_class: str
    arrived_unix_s: float
    size_bytes: int
    tenant: str = ""
    rank: float = 0.0
    """Orders a tenant's own requests, least first; of equals the one that arrived first goes first."""
    continued: bool = False
    """An attempt of it was lost or ended before it was complete: it goes before new work of its band."""
    service: int = 0
    """What serving it from here on is expected to take; see `fairness`."""
    since_s: float = 0.0
    """Monotonic time at which it began to wait, this time."""


class Band(Protocol):
    """The order within one priority. Any can take another's place."""

    def push(self, waiting: Waiting) -> None: ...

    def peek(self) -> Waiting | None:
        """The next one; it stays the next until something is pushed, removed or charged."""
        ...

    def remove(self, waiting: Waiting) -> None: ...

    def __len__(self) -> int: ...


class FifoBand:
    """Least rank first, then first come, first served, by (rank, arrived, id).

    What comes in order stands in a row, which costs the same however long it is; the rest stands in a heap beside it.
    What is removed from within either is marked, and is dropped as it surfaces or when half of all is marked.
    """

    __slots__ = ("_count", "_gone", "_heap", "_number", "_row")

    def __init__(self) -> None:
        self._row: deque[_Entry] = deque()
        self._heap: list[_Entry] = []
        self._gone: dict[RequestId, int] = {}
        """Entries of a request with a number up to this one were removed."""
        self._number = 0
        self._count = 0

    def push(self, waiting: Waiting) -> None:
        self._number += 1
        self._count += 1
        entry = (waiting.rank, waiting.arrived_unix_s, waiting.request_id, self._number, waiting)
        if not self._row or entry > self._row[-1]:
            self._row.append(entry)
        else:
            heapq.heappush(self._heap, entry)

    def peek(self) -> Waiting | None:
        if self._gone:
            self._surface()
        if self._heap and (not self._row or self._heap[0] < self._row[0]):
            return self._heap[0][4]
        return self._row[0][4] if self._row else None

    def remove(self, waiting: Waiting) -> None:
        self._count -= 1
        request_id = waiting.request_id
        if self._row and self._row[0][2] == request_id:
            self._row.popleft()
        elif self._heap and self._heap[0][2] == request_id:
            heapq.heappop(self._heap)
        else:
            self._gone[request_id] = self._number
            if len(self._row) + len(self._heap) > 2 * self._count + 16:
                self._row = deque(entry for entry in self._row if not self._is_gone(entry))
                self._heap = [entry for entry in self._heap if not self._is_gone(entry)]
                heapq.heapify(self._heap)
                self._gone.clear()

    def first(self, most: int) -> Iterator[Waiting]:
        """The next ones in order; at most so many, and fewer where much that was removed from within lies between."""
        entries = islice(heapq.merge(self._row, self._heap_in_order()), 4 * most)
        return (entry[4] for entry in entries if not self._is_gone(entry))

    def _heap_in_order(self) -> Iterator[_Entry]:
        """Each is less than its two children: of those whose parent was yielded, the least is next."""
        heap = self._heap
        open_ = [(heap[0], 0)] if heap else []
        while open_:
            entry, at = heapq.heappop(open_)
            yield entry
            for child in (2 * at + 1, 2 * at + 2):
                if child < len(heap):
                    heapq.heappush(open_, (heap[child], child))

    def __len__(self) -> int:
        return self._count

    def _is_gone(self, entry: _Entry) -> bool:
        return entry[3] <= self._gone.get(entry[2], 0)

    def _surface(self) -> None:
        while self._row and self._is_gone(self._row[0]):
            self._row.popleft()
        while self._heap and self._is_gone(self._heap[0]):
            heapq.heappop(self._heap)
        if not self._row and not self._heap:
            self._gone.clear()


_Entry = tuple[float, float, RequestId, int, Waiting]
"""Numbered, so that no two compare beyond their numbers."""


def key_of(waiting: Waiting) -> tuple[float, float, RequestId]:
    """Orders requests of one tenant, and of a band whose tenants are level."""
    return waiting.rank, waiting.arrived_unix_s, waiting.request_id


@dataclass(slots=True)
class Charge:
    """What the members of one class, tenant or band amount to."""

    requests: int = 0
    size_bytes: int = 0
    service: int = 0


_NOTHING = Charge()
"""Of whoever has no members; never written to."""


class BandQueue:
    """All waiting requests; `peek` is the next of the most urgent band that has any."""

    def __init__(self, make_band: Callable[[int], Band] = lambda _: FifoBand()) -> None:
        """`make_band` is given the priority; it is asked again when a band that was empty fills anew."""
        self._make_band = make_band
        self._members: dict[RequestId, Waiting] = {}
        self._bands: dict[int, tuple[Band, Charge]] = {}
        self._priorities: list[int] = []
        """Priorities of the bands, ascending."""
        self._classes: dict[str, Charge] = {}
        self._tenants: dict[tuple[str, str], Charge] = {}
        """By class and tenant; only of those with members, so there are no more than members."""

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
            entry = self._bands[waiting.priority] = (self._make_band(waiting.priority), Charge())
            self._priorities.insert(bisect_left(self._priorities, waiting.priority), waiting.priority)
        band, band_charge = entry
        band.push(waiting)
        class_charge = self._classes.get(waiting.priority_class)
        if class_charge is None:
            class_charge = self._classes[waiting.priority_class] = Charge()
        key = (waiting.priority_class, waiting.tenant)
        tenant_charge = self._tenants.get(key)
        if tenant_charge is None:
            tenant_charge = self._tenants[key] = Charge()
        for charge in (band_charge, class_charge, tenant_charge):
            charge.requests += 1
            charge.size_bytes += waiting.size_bytes
            charge.service += waiting.service

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
        band.remove(waiting)
        key = (waiting.priority_class, waiting.tenant)
        tenant_charge = self._tenants[key]
        for charge in (band_charge, self._classes[waiting.priority_class], tenant_charge):
            charge.requests -= 1
            charge.size_bytes -= waiting.size_bytes
            charge.service -= waiting.service
        if not tenant_charge.requests:
            del self._tenants[key]
        if not band_charge.requests:
            del self._bands[waiting.priority]
            del self._priorities[bisect_left(self._priorities, waiting.priority)]
        return waiting

    @property
    def has_several_bands(self) -> bool:
        return len(self._priorities) > 1

    def of_class(self, priority_class: str) -> Charge:
        return self._classes.get(priority_class, _NOTHING)

    def of_tenant(self, priority_class: str, tenant: str) -> Charge:
        """What a tenant has waiting in one class."""
        return self._tenants.get((priority_class, tenant), _NOTHING)

    def by_tenant(self) -> dict[str, int]:
        """How many members each tenant has that has any."""
        members: dict[str, int] = {}
        for (_, tenant), charge in self._tenants.items():
            members[tenant] = members.get(tenant, 0) + charge.requests
        return members

    def at_or_above(self, priority: int) -> int:
        """How many members a new request of `priority` would stand behind."""
        if not self._priorities:
            return 0
        start = bisect_left(self._priorities, priority)
        return sum(self._bands[p][1].requests for p in self._priorities[start:])

    def bands(self) -> Iterator[tuple[int, Charge]]:
        """Each priority with members and its charge, most urgent first."""
        for priority in reversed(self._priorities):
            yield priority, self._bands[priority][1]

    def peek_below(self, priority: float) -> Waiting | None:
        """The next one of the most urgent band that is less urgent than `priority`."""
        below = bisect_left(self._priorities, priority)
        return self._bands[self._priorities[below - 1]][0].peek() if below else None
