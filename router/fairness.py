"""Fairness between tenants: who of those that wait in one band has been served least.

Owns: the virtual token counters of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), and the order
between tenants and within one. Imports config and the queue's values. Single writer.

Service is counted in tokens, weighted: `prompt_token_weight` x prompt tokens when a request is sent out for the first
time, `output_token_weight` x output tokens as they come. (What of a prompt a replica finds in its cache is not known
when it is charged, and no report says it for one request: all of it is charged.) A tenant's counter is what it was
charged over its weight. Next is the tenant with the least counter among those with work waiting; where they are level,
the one whose next request ranks first. A tenant that had nothing waiting is lifted to the least counter of those that
wait, or where nobody waits, of the last one that did: idle time earns nothing.

What is given back. An attempt that is over before its first token has given the tenant nothing: its charge is taken
back, but never below what the tenant was lifted to meanwhile, or idle time would earn after all. A request that goes on
after its first token has been charged for its prompt already and is not charged again. It goes before new work of its
band, whosever it is.

The bound. Let all replicas together have S slots, and let P and T be the longest prompt and output in tokens of a
request: M = S x (P + T) is what the fleet's batches hold. The router binds late: a request of this band is sent out
only into a slot that no other of its band or above holds, so a tenant has at most S requests that are begun and not
ended (those that an engine paused for more urgent work keep their slot against their own band; those that were lost
go first). From the moment at which a tenant was last the least, its counter grows by one prompt and by the outputs of
at most S requests; what is taken back from it are the prompts of others of the S. So with w the larger of the two
weights, the counters of two tenants that wait differ by at most w x M over the smaller tenant's weight, and over any
time in which both wait, what they got over their weights differs by at most twice that.

Memory. A tenant with nothing waiting and nothing open is forgotten once its counter is at most the least to which any
tenant can ever be lifted: were it remembered, it would be lifted to that or more when it came back. That level is the
least of (counter - what can still be taken back) over those that wait, and it never falls. Beyond MAX_IDLE tenants the
least counters are forgotten all the same, which forgives each at most its distance to that level.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Mapping

from cluster.config import RouterConfig, WithinTenant
from cluster.types import Request, RequestId
from router.queue import FifoBand, Waiting, key_of
from router.terms import Terms

MAX_IDLE = 10_000
"""Tenants per band that are remembered without having work."""
MAX_IDLE_BANDS = 64
"""Bands that are remembered without having work: clients may name any priority."""


def rank_of(config: RouterConfig, request: Request, terms: Terms, expected_tokens: float) -> float:
    """Where a request stands among its tenant's own, least first; the same however often it returns.

    Under fcfs all are level, and the oldest goes first. Under sjf it is the time at which it would stand had it been
    expected to put out nothing: nobody is passed by who came `sjf_longest_overtake_s` later. Under deadline it is the
    time by which the first token is wanted, or else all of it, or else by which its class promises to begin it: all
    three are finite, so whoever comes later than that goes behind.

    Args:
        expected_tokens: Output that it will make; read under sjf only.
    """
    match config.within_tenant:
        case WithinTenant.FCFS:
            return 0.0
        case WithinTenant.SJF:
            later_s = min(expected_tokens / config.sjf_ageing_tokens_per_s, config.sjf_longest_overtake_s)
            return request.arrived_unix_s + later_s
        case WithinTenant.DEADLINE:
            allowed = (s for s in (terms.ttft_slo_s, terms.timeout_s) if s is not None)
            longest_s = next(c.longest_wait_s for c in config.classes if c.name == request.priority_class)
            return request.arrived_unix_s + next(allowed, longest_s or config.max_queue_s)


class _Tenant:
    """One tenant in one band."""

    __slots__ = ("counter", "entry", "line", "open", "outstanding", "refundable", "weight")

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.counter = 0.0
        self.open = 0
        """Attempts that are begun and not ended."""
        self.outstanding = 0.0
        """Of `counter`, what was charged for attempts that have no token yet."""
        self.refundable = 0.0
        """Of that, what is taken off the counter if they never have one."""
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

    __slots__ = ("_continued", "_heap", "_last", "_line_weight", "_members", "_sweep_at", "_tenants", "_weights")

    def __init__(self, weights: Mapping[str, float]) -> None:
        """`weights` by tenant; one that is not there weighs 1."""
        self._weights = weights
        self._tenants: dict[str, _Tenant] = {}
        self._heap: list[tuple[float, float, float, RequestId, str]] = []
        self._continued = FifoBand()
        self._members = 0
        """Not counting what goes on."""
        self._line_weight = 0.0
        """Weights of the tenants with new work waiting."""
        self._last: _Tenant | None = None
        """The tenant whose new work left last."""
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
        tenant.open += 1
        tenant.counter += charge / tenant.weight
        tenant.outstanding += charge / tenant.weight
        tenant.refundable += charge / tenant.weight

    def add(self, name: str, service: float) -> None:
        """Tokens have come of one of its open attempts."""
        tenant = self._tenants[name]
        tenant.counter += service / tenant.weight

    def keep(self, name: str, charge: float) -> None:
        """An attempt has its first token: its charge stays."""
        tenant = self._tenants[name]
        tenant.outstanding = max(0.0, tenant.outstanding - charge / tenant.weight)
        tenant.refundable = min(tenant.refundable, tenant.outstanding)

    def end(self, name: str, refund: float) -> None:
        """An attempt is over; `refund` is its charge, where that is to be taken back."""
        tenant = self._tenants[name]
        tenant.open -= 1
        if refund:
            given = min(refund / tenant.weight, tenant.refundable)
            tenant.outstanding = max(0.0, tenant.outstanding - refund / tenant.weight)
            tenant.refundable = min(tenant.refundable - given, tenant.outstanding)
            tenant.counter -= given
            head = tenant.line.peek()
            if head is not None:
                tenant.entry = (tenant.counter, *key_of(head), name)
                heapq.heappush(self._heap, tenant.entry)

    # --- small reads ---

    def counters(self, name: str) -> tuple[float, float]:
        """A tenant's counter and the least of those that wait, to explain an order with."""
        (least, _), tenant = self._least(), self._tenants.get(name)
        own = self._floor() if tenant is None else tenant.counter
        return own, own if least is None else least.counter

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

    def _floor(self) -> float:
        """To what a tenant is lifted that begins to wait."""
        least, _ = self._least()
        if least is not None:
            return least.counter
        return self._last.counter if self._last is not None else 0.0

    def _lift(self, tenant: _Tenant) -> None:
        if (
            not self._members and self._last is tenant
        ):  # nobody else has waited since: there is nothing to catch up with
            return
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
        idle = {n: t for n, t in self._tenants.items() if not len(t.line) and not t.open and not t.outstanding}
        for name, tenant in idle.items():
            if tenant.counter <= level:
                del self._tenants[name]
        left = sorted((t.counter, n) for n, t in idle.items() if n in self._tenants)
        for _, name in left[: max(0, len(left) - MAX_IDLE)]:
            del self._tenants[name]
        self._sweep_at = max(64, 2 * len(self._tenants))


class FairShares:
    """The tenant bands of every priority, those too in which nothing waits: what was got there is still owed for."""

    def __init__(self, config: RouterConfig) -> None:
        self._weights = {t.name: t.weight for t in config.tenants}
        self._bands: OrderedDict[int, TenantBand] = OrderedDict()
        """Least recently filled first."""

    def band(self, priority: int) -> TenantBand:
        """The band of a priority; it is the same one as long as anything of it waits or runs."""
        band = self._bands.get(priority)
        if band is None:
            if len(self._bands) >= MAX_IDLE_BANDS:
                idle = [p for p, b in self._bands.items() if not b.open]
                for old in idle[: len(self._bands) - MAX_IDLE_BANDS + 1]:
                    del self._bands[old]
            band = self._bands[priority] = TenantBand(self._weights)
        self._bands.move_to_end(priority)
        return band
