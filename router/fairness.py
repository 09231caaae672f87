"""Fairness between tenants: who of those that wait in one band has been served least.

Owns: the virtual token counters of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), and the order
between tenants; within one it is by rank (router/rank.py). Imports the queue's values. Single writer.

Service is counted in tokens, weighted: `prompt_token_weight` x prompt tokens when a request is sent out for the first
time, `output_token_weight` x output tokens as they come. What of a prompt the replica found in its cache, and so did not
compute, is told with the first token, and its charge is given back then. A tenant's counter is what it was charged over
its weight. Next is the tenant with the least counter among those with work waiting; where they are level, the one whose
next request ranks first. A tenant that had nothing waiting is lifted to the least counter of those that wait, or where
nobody waits, of the last one that did: idle time earns nothing.

What is given back. An attempt that is over before its first token has given the tenant nothing: its charge is taken
back, but never below what the tenant was lifted to meanwhile, or idle time would earn after all. The same goes for what
was not computed of a prompt. A request that goes on after its first token has been charged for its prompt already and is
not charged again. It goes before new work of its band, whosever it is.

The bound. Let all replicas together have S slots, and let P and T be the longest prompt and output in tokens of a
request: M = S x (P + T) is what the fleet's batches hold. The router binds late: a request of this band is sent out
only into a slot that no other of its band or above holds, so a tenant has at most S requests that are begun and not
ended (those that an engine paused for more urgent work keep their slot against their own band; those that were lost
go first). From the moment at which a tenant was last the least, its counter grows by one prompt and by the outputs of
at most S requests; what is taken back from it are the prompts of others of the S, each once, whole or in part. So with
w the larger of the two weights, the counters of two tenants that wait differ by at most w x M over the smaller tenant's
weight, and over any time in which both wait, what they got over their weights differs by at most twice that.

Memory. A tenant with nothing waiting and nothing open is forgotten once its counter is at most the least to which any
tenant can ever be lifted: were it remembered, it would be lifted to that or more when it came back. That level is the
least of (counter - what can still be taken back) over those that wait, and it never falls. Beyond MAX_IDLE tenants the
least counters are forgotten all the same, which forgives each at most its distance to that level.

Several routers. Each adds to its counters what the others have told that they charged (router/gates.py), so that all count
the same but for what has not been told yet; and a tenant that begins to wait is lifted to the least of those that wait on
any of them. A band that hears of the others for the first time lifts everybody who stands below their least to it: what
was got before is not counted against anyone, and whoever has been served less than that by this router alone is forgiven
that difference, once. So the bound above holds for all routers together with what they serve until they have heard of
each other in addition: routers x (period of demands + period of gates) x their rate.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping
from itertools import islice

from cluster.types import RequestId
from router.queue import FifoBand, Waiting, key_of

MAX_IDLE = 10_000
"""Tenants per band that are remembered without having work."""


class _Tenant:
    """One tenant in one band."""

    __slots__ = ("counter", "entry", "line", "open", "outstanding", "refundable", "since", "total", "weight")

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.counter = 0.0
        self.open = 0
        """Attempts that are begun and not ended."""
        self.outstanding = 0.0
        """Of `counter`, what was charged for attempts that have no token yet."""
        self.refundable = 0.0
        """Of that, what is taken off the counter if they never have one."""
        self.total = 0.0
        """Of `counter`, what it got through this router, in all."""
        self.since = 0
        """Number of the demand that told of `total` first; 0: none has yet."""
        self.line = FifoBand()
        self.entry: tuple[float, float, float, RequestId, str] | None = None
        """Its valid key in the band's heap."""


_Nobody = tuple[None, None]
_NOBODY: _Nobody = (None, None)


class TenantBand:
    """The waiting requests of one priority, tenants in fair order. A `queue.Band`.

    The heap has one valid key per tenant with work, no greater than its present one: counters grow with every token, so
    a key is brought up to date only when it surfaces.
    """

    __slots__ = (
        "_aligned",
        "_changed",
        "_continued",
        "_heap",
        "_last",
        "_line_weight",
        "_members",
        "_others_last",
        "_others_least",
        "_sweep_at",
        "_tenants",
        "_weights",
        "sent",
    )

    def __init__(self, weights: Mapping[str, float]) -> None:
        """`weights` by tenant; one that is not there weighs 1."""
        self._weights = weights
        self.sent = 0
        """Attempts begun, in all."""
        self._tenants: dict[str, _Tenant] = {}
        self._heap: list[tuple[float, float, float, RequestId, str]] = []
        self._continued = FifoBand()
        self._members = 0
        """Not counting what goes on."""
        self._line_weight = 0.0
        """Weights of the tenants with new work waiting."""
        self._last: _Tenant | None = None
        """The tenant whose new work left last."""
        self._changed: dict[str, None] = {}
        """Tenants whose `total` the other routers have not been told as it is now."""
        self._others_least: float | None = None
        """The least counter of those that wait on other routers; None where nobody is known to."""
        self._others_last = 0.0
        self._aligned = False
        """Its counters are on the other routers' scale."""
        self._sweep_at = 64

    # --- the queue's side ---

    def __len__(self) -> int:
        return self._members + len(self._continued)

    def push(self, waiting: Waiting) -> None:
        if waiting.continued:
            self._continued.push(waiting)
            return
        name = waiting.tenant
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._make(name)
        if not len(tenant.line):
            self._lift(tenant)
            self._line_weight += tenant.weight
        tenant.line.push(waiting)
        self._members += 1
        entry = tenant.entry
        if entry is None or (waiting.rank, waiting.arrived_unix_s) <= entry[1:3]:
            tenant.entry = (tenant.counter, *key_of(waiting), name)
            heapq.heappush(self._heap, tenant.entry)

    def peek(self) -> Waiting | None:
        if len(self._continued):
            return self._continued.peek()
        return self._least()[1]

    def remove(self, waiting: Waiting) -> None:
        if waiting.continued:
            self._continued.remove(waiting)
            return
        tenant = self._tenants[waiting.tenant]
        tenant.line.remove(waiting)
        self._members -= 1
        if not len(tenant.line):
            tenant.entry = None
            self._line_weight = self._line_weight - tenant.weight if self._members else 0.0
            self._last = tenant
        if len(self._heap) > 2 * len(self._tenants) + 64:
            self._heap = [t.entry for t in self._tenants.values() if t.entry is not None]
            heapq.heapify(self._heap)

    # --- what they got ---

    def begin(self, name: str, charge: float) -> None:
        """An attempt is sent out; `charge` is for the prompt, 0 where that has been charged already."""
        tenant = self._tenants.get(name)
        if tenant is None:  # what goes on may be of a tenant that was forgotten with its band
            tenant = self._make(name)
        self.sent += 1
        tenant.open += 1
        self._charge(name, tenant, charge / tenant.weight)
        tenant.outstanding += charge / tenant.weight
        tenant.refundable += charge / tenant.weight

    def add(self, name: str, service: float) -> None:
        """Tokens have come of one of its open attempts."""
        tenant = self._tenants[name]
        self._charge(name, tenant, service / tenant.weight)

    def keep(self, name: str, charge: float, saved: float = 0.0) -> None:
        """An attempt has its first token: its charge stays, but for what its prompt's cached part was charged."""
        tenant = self._tenants[name]
        if saved:
            self._give_back(name, tenant, saved)
        tenant.outstanding = max(0.0, tenant.outstanding - (charge - saved) / tenant.weight)
        tenant.refundable = min(tenant.refundable, tenant.outstanding)

    def end(self, name: str, refund: float) -> None:
        """An attempt is over; `refund` is its charge, where that is to be taken back."""
        tenant = self._tenants[name]
        tenant.open -= 1
        if refund:
            self._give_back(name, tenant, refund)

    # --- the other routers ---

    @property
    def level(self) -> float:
        """The least counter of those that wait here; where nobody does, of the last that did."""
        least, _ = self._least()
        if least is not None:
            return least.counter
        return self._others_last if self._last is None else self._last.counter

    def changed(self, number: int, most: int) -> list[tuple[str, int, float]]:
        """Tenants whose service has changed since it was told, at most so many: name, since which demand, and total.

        Args:
            number: Of the demand that tells it.
        """
        told = []
        for name in list(islice(self._changed, most)):
            tenant = self._tenants.get(name)
            if tenant is None:
                del self._changed[name]
                continue
            tenant.since = tenant.since or number
            told.append((name, tenant.since, tenant.total))
        return told

    def told(self, name: str, total: float) -> None:
        """It has been said that a tenant got so much."""
        tenant = self._tenants.get(name)
        if tenant is None or tenant.total == total:
            self._changed.pop(name, None)

    def learn(self, name: str, service: float) -> None:
        """It got so much more, over its weight, through another router; less where that was taken back."""
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._make(name)
        tenant.counter += service
        if service < 0:
            self._fell(name, tenant)

    def hear(self, level: float, *, waits: bool) -> None:
        """Where the other routers stand: the least of those that wait there, or if nobody does, their last."""
        self._others_least = level if waits else None
        self._others_last = max(self._others_last, level)
        if not self._aligned:
            self._aligned = True
            for tenant in self._tenants.values():  # keys in the heap may be less than the counters
                tenant.counter = max(tenant.counter, level)

    def alone(self, *, apart: bool) -> None:
        """The others are not heard of for now; `apart`: for so long that they count as met anew."""
        self._others_least = None
        if apart:
            self._aligned = False

    def ahead(self, most: int, charge: Callable[[Waiting], float]) -> list[tuple[Waiting, float, float]]:
        """The next ones, in the order in which they go if nothing else comes: each with its tenant's counter as it is now
        and what that will grow by. What goes on has a counter of minus infinity.

        Args:
            charge: What sending it out is charged.
        """
        first = [(w, -math.inf, 0.0) for w in islice(self._continued.first(most), most)]
        entries: list[tuple[float, float, float, RequestId, str]] = []
        while len(entries) < most and self._least()[0] is not None:
            entries.append(heapq.heappop(self._heap))
        for entry in entries:
            heapq.heappush(self._heap, entry)
        lines: list[tuple[float, float, float, RequestId, str, Waiting, Iterator[Waiting]]] = []
        for *_, name in entries:
            line = self._tenants[name].line.first(most)
            head = next(line)
            lines.append((self._tenants[name].counter, *key_of(head), name, head, line))
        heapq.heapify(lines)
        while lines and len(first) < most:
            counter, *_, name, head, line = lines[0]
            tenant = self._tenants[name]
            grows = charge(head) / tenant.weight
            first.append((head, tenant.counter, grows))
            following = next(line, None)
            if following is None:
                heapq.heappop(lines)
            else:
                heapq.heapreplace(lines, (counter + grows, *key_of(following), name, following, line))
        return first

    # --- small reads ---

    def counters(self, name: str) -> tuple[float, float]:
        """A tenant's counter and the least of those that wait, to explain an order with."""
        (least, _), tenant = self._least(), self._tenants.get(name)
        own = self._floor() if tenant is None else tenant.counter
        return own, own if least is None else least.counter

    def weight(self, name: str) -> float:
        return self._weights.get(name, 1.0)

    def waiting_weight(self, name: str) -> tuple[float, float]:
        """The weight of one tenant, and of all that would have new work waiting with one more request of it."""
        tenant = self._tenants.get(name)
        weight = self._weights.get(name, 1.0)
        waits = tenant is not None and len(tenant.line) > 0
        return weight, self._line_weight if waits else self._line_weight + weight

    @property
    def open(self) -> bool:
        """Whether anything of it waits or runs."""
        return len(self) > 0 or any(t.open for t in self._tenants.values())

    # --- inner workings ---

    def _least(self) -> tuple[_Tenant, Waiting] | _Nobody:
        """The tenant that is served next of those with new work, and its next request."""
        heap = self._heap
        while heap:
            entry = heap[0]
            tenant = self._tenants.get(entry[4])
            if tenant is None or tenant.entry is not entry:
                heapq.heappop(heap)
                continue
            head = tenant.line.peek()
            assert head is not None, "a tenant has a valid key exactly while it has new work"
            if entry[0] == tenant.counter and entry[3] == head.request_id:
                return tenant, head
            tenant.entry = (tenant.counter, *key_of(head), entry[4])
            heapq.heapreplace(heap, tenant.entry)
        return _NOBODY

    def _give_back(self, name: str, tenant: _Tenant, refund: float) -> None:
        given = min(refund / tenant.weight, tenant.refundable)
        tenant.outstanding = max(0.0, tenant.outstanding - refund / tenant.weight)
        tenant.refundable = min(tenant.refundable - given, tenant.outstanding)
        self._charge(name, tenant, -given)
        self._fell(name, tenant)

    def _charge(self, name: str, tenant: _Tenant, service: float) -> None:
        tenant.counter += service
        tenant.total += service
        self._changed[name] = None

    def _fell(self, name: str, tenant: _Tenant) -> None:
        """Its counter is less than its key may say."""
        head = tenant.line.peek()
        if head is not None:
            tenant.entry = (tenant.counter, *key_of(head), name)
            heapq.heappush(self._heap, tenant.entry)

    def _floor(self) -> float:
        """To what a tenant is lifted that begins to wait."""
        least, _ = self._least()
        others = self._others_least
        if least is not None:
            return least.counter if others is None else min(least.counter, others)
        if others is not None:
            return others
        return self._others_last if self._last is None else max(self._last.counter, self._others_last)

    def _lift(self, tenant: _Tenant) -> None:
        if not self._members and self._last is tenant and self._others_least is None:
            return  # nobody else has waited since: there is nothing to catch up with
        floor = self._floor()
        tenant.counter = max(tenant.counter, floor)
        tenant.refundable = min(tenant.refundable, tenant.counter - floor)

    def _make(self, name: str) -> _Tenant:
        if len(self._tenants) >= self._sweep_at:
            self._sweep()
        tenant = self._tenants[name] = _Tenant(self._weights.get(name, 1.0))
        tenant.counter = self._floor()
        return tenant

    def _sweep(self) -> None:
        """Forget whom it is safe to forget, in time proportional to what has been added since the last sweep."""
        waiting = [t for t in self._tenants.values() if len(t.line)]
        level = min((t.counter - t.refundable for t in waiting), default=None)
        if level is None:
            level = self._last.counter - self._last.refundable if self._last is not None else 0.0
        if self._others_least is not None:
            level = min(level, self._others_least)
        idle = {n: t for n, t in self._tenants.items() if not len(t.line) and not t.open and not t.outstanding}
        for name, tenant in idle.items():
            if tenant.counter <= level:
                del self._tenants[name]
                self._changed.pop(name, None)
        left = sorted((t.counter, n) for n, t in idle.items() if n in self._tenants)
        for _, name in left[: max(0, len(left) - MAX_IDLE)]:
            del self._tenants[name]
            self._changed.pop(name, None)
        self._sweep_at = max(64, 2 * len(self._tenants))
