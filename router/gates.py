"""What this router tells the controller and what it does with the answer: the gate, and what other routers served.

Owns: the gate that is in force, the demand that asks for the next, and how much of each other router's service has been
counted here. Imports the queue, the tenants' counters and the messages; no socket. Single writer. Invariants: a gate keeps
back only what is sent out, and not for longer than EXPIRES_S after it came; each piece of service that another router
tells of is counted once, however often it is told; memory is bounded by the bands and tenants that the others tell of,
and at most OTHERS_MAX of these.

Others' service is told in totals since the other router started, so a message that is lost or repeated does no harm, and
a controller that starts anew changes nothing. What a router had served before it was first heard of is not counted, nor
what passes while nothing is heard for APART_S: neither is anybody's debt (see `fairness`, "Several routers").
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import NamedTuple

from cluster.control.gates import EXPIRES_S
from cluster.messages import (
    BandDemand,
    BandLevel,
    FirstTokens,
    Gate,
    Gates,
    RouterDemand,
    RouterService,
    TenantService,
    Waiter,
)
from cluster.types import RequestId, RouterId
from router.bands import FairShares
from router.queue import BandQueue, Waiting

APART_S = 5.0
"""Nothing heard for so long: the others are met anew."""
BANDS_MAX = 16
"""Bands that a demand tells of."""
HEADS_MAX = 32
SERVICE_MAX = 256
OTHERS_MAX = 100_000
"""Totals of other routers that are remembered, over all bands; beyond it the ones longest unchanged are met anew."""
ROUTERS_MAX = 1024
"""Routers that are remembered, each start of one being another; the one met first is met anew."""
RATE_WINDOW_S = 0.2


class Place(NamedTuple):
    """What there is for the first that waits."""

    reached: bool
    """Some replica takes work."""
    room: bool
    """It could be sent out, were it not for the gate."""
    slot: bool
    """A replica has a slot that nothing runs in."""


class GateKeeper:
    """One per core."""

    def __init__(self, queue: BandQueue, tenants: FairShares, charge: Callable[[Waiting], float], now_s: float) -> None:
        """`charge`: what sending a request out is charged."""
        self._queue = queue
        self._tenants = tenants
        self._charge = charge
        self._gate: Gate | None = None
        self._heard_s = -math.inf
        self._waiting_elsewhere: tuple[BandLevel, ...] = ()
        self._known: dict[RouterId, int] = {}
        """Of each router that is heard of, the number of the demand from which on it has been."""
        self._counted: OrderedDict[tuple[RouterId, int, str], TenantService] = OrderedDict()
        self._sent_service_of: dict[RouterId, float] = {}
        self._number = 1
        self._sent = 0
        self._sent_service = 0.0
        self._open: dict[RequestId, float] = {}
        """Service over the tenant's weight of each open attempt."""
        self._open_service = 0.0
        self._first_tokens: dict[str, list[int]] = {}
        """By class, those in time and those late."""
        self._sent_told = 0
        self._sent_per_s = 0.0
        self._told_s = now_s
        self._told_waiting = False
        self._first: RequestId | None = None
        self._first_since_s = now_s
        self._held_since_s: float | None = None

    # --- the gate ---

    def gate(self, now_s: float) -> Gate | None:
        """The gate that is in force."""
        return self._gate if now_s - self._heard_s <= EXPIRES_S else None

    def lets_out(self, priority: int, now_s: float) -> bool:
        gate = self.gate(now_s)
        if gate is None or priority > gate.priority:
            return True
        band = self._tenants.known(priority)
        return priority == gate.priority and (0 if band is None else band.sent) < gate.sent_max

    def routers_waiting(self, lowest: float, below: float) -> int:
        """How many other routers have work waiting in bands of these priorities, `below` not among them."""
        return max((b.routers_waiting for b in self._waiting_elsewhere if lowest <= b.priority < below), default=0)

    def sent(self, waiting: Waiting, weight: float) -> None:
        """An attempt begins, of a tenant of this weight."""
        self._sent += 1
        self._sent_service += waiting.service
        self._open[waiting.request_id] = waiting.service / weight
        self._open_service += waiting.service / weight

    def ended(self, request_id: RequestId) -> None:
        """The open attempt is over."""
        service = self._open.pop(request_id, 0.0)
        self._open_service = self._open_service - service if self._open else 0.0

    def first_token(self, priority_class: str, *, in_time: bool) -> None:
        """A request of a class with an aim for it has had its first token."""
        counts = self._first_tokens.setdefault(priority_class, [0, 0])
        counts[0 if in_time else 1] += 1

    # --- what is told ---

    def demand(self, model: str, place: Callable[[Waiting], Place], now_s: float) -> RouterDemand | None:
        """What there is to tell now; None for nothing.

        Args:
            place: What there is for a request.
        """
        self._forget_stale(now_s)
        keep = math.exp((self._told_s - now_s) / RATE_WINDOW_S)
        if now_s > self._told_s:
            rate = (self._sent - self._sent_told) / (now_s - self._told_s)
            self._sent_per_s = keep * self._sent_per_s + (1 - keep) * rate
            self._told_s, self._sent_told = now_s, self._sent
        service = tuple(self._changed())
        head = self._queue.peek()
        found = None if head is None else place(head)
        waiting = head is not None and found is not None and found.reached
        if head is None and not self._told_waiting and not service:
            return None
        self._look_at(head, found, now_s)
        return RouterDemand(
            model=model,
            number=self._number,
            bands=tuple(self._bands(reached=waiting)),
            heads=tuple(self._heads(head)) if head is not None and waiting else (),
            first_for_s=now_s - self._first_since_s,
            blocked=waiting and found is not None and found.slot and not found.room,
            held_s=0.0 if self._held_since_s is None else now_s - self._held_since_s,
            sent_per_s=self._sent_per_s,
            sent_service=self._sent_service,
            open_service=self._open_service,
            service=service,
            queued=sum(charge.requests for _, charge in self._queue.bands()),
            queued_service=sum(charge.service for _, charge in self._queue.bands()),
            first_tokens=tuple(FirstTokens(name, *counts) for name, counts in self._first_tokens.items()),
        )

    def told(self, demand: RouterDemand) -> None:
        """It is on its way to the controller."""
        self._number = demand.number + 1
        self._told_waiting = demand.queued > 0
        for s in demand.service:
            band = self._tenants.known(s.priority)
            if band is not None:
                band.told(s.tenant, s.total)

    def _look_at(self, head: Waiting | None, found: Place | None, now_s: float) -> None:
        """Since when the first has been the first, and since when nothing but a gate has held back whoever was."""
        first = None if head is None else head.request_id
        if first != self._first:
            self._first, self._first_since_s = first, now_s
        if head is None or found is None or not found.room or self.lets_out(head.priority, now_s):
            self._held_since_s = None
        elif self._held_since_s is None:
            self._held_since_s = now_s

    def _changed(self) -> Iterable[TenantService]:
        left = SERVICE_MAX
        for priority, band in self._tenants:
            for name, since, total in band.changed(self._number, left):
                left -= 1
                yield TenantService(priority, name, since, total)
            if not left:
                return

    def _bands(self, *, reached: bool) -> Iterable[BandDemand]:
        waiting = {priority: charge.requests for priority, charge in self._queue.bands()} if reached else {}
        others = [priority for priority, _ in self._tenants if priority not in waiting]
        for priority in (*waiting, *others)[:BANDS_MAX]:
            band = self._tenants.known(priority)
            if band is not None:
                yield BandDemand(priority, waiting.get(priority, 0), band.sent, band.level)

    def _heads(self, head: Waiting) -> Iterable[Waiter]:
        for w, counter, charge in self._tenants.band(head.priority).ahead(HEADS_MAX, self._charge):
            yield Waiter(w.tenant, counter, w.rank, w.arrived_unix_s, charge)

    # --- what is heard ---

    def hear(self, gates: Gates, now_s: float) -> float:
        """Take what the controller says; returns the service that others have sent out since it was heard last."""
        self._forget_stale(now_s)
        self._gate, self._heard_s, self._waiting_elsewhere = gates.gate, now_s, gates.levels
        # Before the levels: what is counted now is in them.
        sent = sum(self._count(other) for other in gates.others)
        self._tenants.hear({b.priority: (b.level, b.routers_waiting > 0) for b in gates.levels})
        return sent

    def _count(self, other: RouterService) -> float:
        known_from = self._known.setdefault(other.router_id, other.number)
        if len(self._known) > ROUTERS_MAX:
            gone = next(iter(self._known))
            del self._known[gone], self._sent_service_of[gone]
        for s in other.service:
            key = (other.router_id, s.priority, s.tenant)
            before = self._counted.get(key)
            if before is not None and before.since == s.since:
                new = s.total - before.total
            else:
                new = s.total if s.since >= known_from else 0.0
            self._counted[key] = s
            self._counted.move_to_end(key)
            if new:
                self._tenants.band(s.priority).learn(s.tenant, new)
        while len(self._counted) > OTHERS_MAX:
            self._counted.popitem(last=False)
        sent_before = self._sent_service_of.get(other.router_id, other.sent_service)
        self._sent_service_of[other.router_id] = other.sent_service
        return max(0.0, other.sent_service - sent_before)

    def _forget_stale(self, now_s: float) -> None:
        silent_s = now_s - self._heard_s
        if silent_s > EXPIRES_S and self._waiting_elsewhere:
            self._waiting_elsewhere = ()
            self._tenants.alone(apart=False)
        if silent_s > APART_S and self._known:
            self._tenants.alone(apart=True)
            self._known.clear()
            self._counted.clear()
            self._sent_service_of.clear()
