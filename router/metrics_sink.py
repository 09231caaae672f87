"""The router's metrics as prometheus objects.

Owns: their creation in one registry and the translation of the router's events into them. Names and labels come from
`cluster.metrics` alone; label values are classes of the config, enums, and replicas of the roster, so they are bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from cluster import metrics as names
from cluster.metrics import LATENCY_BUCKETS_SECONDS, PREEMPTION_BUCKETS, RATIO_BUCKETS, Metric
from cluster.types import EngineLoad, Outcome, PreemptionMeans, RefusalReason, ReplicaId
from router.view import Condition, ReplicaView

REPLICA_GAUGES: tuple[tuple[Metric, Callable[[EngineLoad], int]], ...] = (
    (names.REPLICA_SLOTS, lambda load: load.slots_total),
    (names.REPLICA_RUNNING, lambda load: sum(level.requests for level in load.running)),
    (names.REPLICA_WAITING, lambda load: sum(level.requests for level in load.waiting)),
    (names.REPLICA_BLOCKS, lambda load: load.blocks_total),
    (names.REPLICA_BLOCKS_FREE, lambda load: load.blocks_free),
    (names.REPLICA_BLOCKS_CACHED, lambda load: load.blocks_cached),
    (names.REPLICA_HOST_BLOCKS_FREE, lambda load: load.host_blocks_free),
)
REPLICA_TOTALS: tuple[tuple[Metric, Callable[[EngineLoad], int]], ...] = (
    (names.REPLICA_URGENT_BLOCKED, lambda load: load.urgent_blocked_total),
    (names.REPLICA_PREFILL_TOKENS, lambda load: load.prefill_tokens_total),
    (names.REPLICA_PREFIX_HIT_TOKENS, lambda load: load.prefix_hit_tokens_total),
    (names.REPLICA_PADDING_TOKENS, lambda load: load.padding_tokens_total),
)


class RouterMetrics:
    """One set per router process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(m: Metric) -> Counter:
            return Counter(m.name, m.help, m.labels, registry=registry)

        def gauge(m: Metric) -> Gauge:
            return Gauge(m.name, m.help, m.labels, registry=registry)

        def histogram(m: Metric, buckets: Sequence[float] = LATENCY_BUCKETS_SECONDS) -> Histogram:
            return Histogram(m.name, m.help, m.labels, buckets=buckets, registry=registry)

        self._requests = counter(names.REQUESTS)
        self._ttft, self._tpot = histogram(names.TTFT), histogram(names.TPOT)
        self._e2e, self._queue_wait = histogram(names.E2E), histogram(names.QUEUE_WAIT)
        self._tokens_out, self._tokens_in = counter(names.TOKENS_OUT), counter(names.TOKENS_IN)
        self._queued, self._queued_bytes = gauge(names.QUEUED), gauge(names.QUEUED_BYTES)
        self._queued_service, self._drain = gauge(names.QUEUED_SERVICE), gauge(names.DRAIN)
        self._in_flight = gauge(names.IN_FLIGHT)
        self._shared = counter(names.SHARED)
        self._served = counter(names.SERVED)
        self._served_others = self._served.labels(names.OTHER_TENANTS)
        self._served_to: dict[str, Counter] = {}
        self._preemptions, self._continued = counter(names.PREEMPTIONS), counter(names.CONTINUED)
        self._request_preemptions = histogram(names.PREEMPTIONS_PER_REQUEST, PREEMPTION_BUCKETS)
        self._over_stated = histogram(names.OUTPUT_OVER_STATED, RATIO_BUCKETS)
        self._fenced, self._gaps = counter(names.FENCED), counter(names.GAPS)
        self._refusals = counter(names.REFUSALS)
        self._replicas_ready = gauge(names.REPLICAS_READY)
        self._replica_gauges = [(gauge(metric), figure) for metric, figure in REPLICA_GAUGES]
        self._replica_totals = [(counter(metric), figure) for metric, figure in REPLICA_TOTALS]
        self._replicas_shown: dict[ReplicaId, EngineLoad] = {}
        """With the load that was last seen, from which totals have been counted on."""
        self._tokens_out_of: dict[str, Counter] = {}

    def name_tenants(self, tenants: Iterable[str]) -> None:
        """Show these by their names; all others are one."""
        self._served_to = {tenant: self._served.labels(tenant) for tenant in tenants}

    def accepted(self, priority_class: str, prompt_tokens: int) -> None:
        self._tokens_in.labels(priority_class).inc(prompt_tokens)

    def first_dispatch(self, priority_class: str, waited_seconds: float) -> None:
        self._queue_wait.labels(priority_class).observe(waited_seconds)

    def first_token(self, priority_class: str, ttft_seconds: float) -> None:
        self._ttft.labels(priority_class).observe(ttft_seconds)

    def tokens(self, priority_class: str, count: int) -> None:
        """Called for every delta, so the labelled child is looked up in a plain dictionary."""
        child = self._tokens_out_of.get(priority_class)
        if child is None:
            child = self._tokens_out_of[priority_class] = self._tokens_out.labels(priority_class)
        child.inc(count)

    def ended(self, priority_class: str, outcome: Outcome, preemptions: int) -> None:
        self._requests.labels(priority_class, outcome.value).inc()
        self._request_preemptions.labels(priority_class).observe(preemptions)

    def stated(self, priority_class: str, output_over_stated: float) -> None:
        self._over_stated.labels(priority_class).observe(output_over_stated)

    def finished(self, priority_class: str, e2e_seconds: float, tpot_seconds: float | None) -> None:
        """`tpot_seconds` is None for fewer than two tokens."""
        self._e2e.labels(priority_class).observe(e2e_seconds)
        if tpot_seconds is not None:
            self._tpot.labels(priority_class).observe(tpot_seconds)

    def preempted(self, priority_class: str, means: PreemptionMeans, *, for_urgent: bool) -> None:
        self._preemptions.labels(priority_class, "urgent" if for_urgent else "kv_full", means.value).inc()

    def continued(self, reason: str) -> None:
        self._continued.labels(reason).inc()

    def fenced(self, kind: str, count: int = 1) -> None:
        """`kind` is stale or repeat."""
        self._fenced.labels(kind).inc(count)

    def gap(self) -> None:
        self._gaps.inc()

    def refused(self, reason: RefusalReason) -> None:
        self._refusals.labels(reason.value).inc()

    def shared(self, priority_class: str) -> None:
        self._shared.labels(priority_class).inc()

    def served(self, tenant: str, service: float) -> None:
        self._served_to.get(tenant, self._served_others).inc(service)

    def class_load(
        self,
        priority_class: str,
        *,
        queued: int,
        queued_bytes: int,
        queued_service: int,
        in_flight: int,
        drain_per_s: float | None,
    ) -> None:
        """A drain that has not been measured is not shown."""
        self._queued.labels(priority_class).set(queued)
        self._queued_bytes.labels(priority_class).set(queued_bytes)
        self._queued_service.labels(priority_class).set(queued_service)
        self._in_flight.labels(priority_class).set(in_flight)
        if drain_per_s is not None:
            self._drain.labels(priority_class).set(drain_per_s)

    def replicas(self, views: Iterable[ReplicaView]) -> None:
        """Show these replicas and no others: one that is gone leaves no series behind."""
        ready = 0
        shown: dict[ReplicaId, EngineLoad] = {}
        for view in views:
            ready += view.condition is Condition.ROUTABLE
            load = view.load
            if load is None:
                continue
            before = self._replicas_shown.get(view.replica_id)
            shown[view.replica_id] = load
            if load == before:
                continue
            for gauge, figure in self._replica_gauges:
                gauge.labels(view.replica_id).set(figure(load))
            for total, figure in self._replica_totals:
                now, then = figure(load), 0 if before is None else figure(before)
                total.labels(view.replica_id).inc(now - then if now >= then else now)  # less: it has started anew
        for gone in self._replicas_shown.keys() - shown.keys():
            for metric, _ in (*self._replica_gauges, *self._replica_totals):
                metric.remove(gone)
        self._replicas_shown = shown
        self._replicas_ready.set(ready)
