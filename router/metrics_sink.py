"""The router's metrics as prometheus objects.

Owns: their creation in one registry and the translation of the router's events into them. Names and labels come from
`cluster.metrics` alone; label values are classes of the config, enums, and replicas of the roster, so they are bounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from cluster import metrics as names
from cluster.metrics import LATENCY_BUCKETS_SECONDS, PREEMPTION_BUCKETS, RATIO_BUCKETS, Metric
from cluster.types import Outcome, PreemptionMeans, RefusalReason, ReplicaId
from router.view import Condition, ReplicaView


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
        self._in_flight = gauge(names.IN_FLIGHT)
        self._preemptions, self._continued = counter(names.PREEMPTIONS), counter(names.CONTINUED)
        self._request_preemptions = histogram(names.PREEMPTIONS_PER_REQUEST, PREEMPTION_BUCKETS)
        self._over_stated = histogram(names.OUTPUT_OVER_STATED, RATIO_BUCKETS)
        self._fenced, self._gaps = counter(names.FENCED), counter(names.GAPS)
        self._refusals = counter(names.REFUSALS)
        self._replicas_ready = gauge(names.REPLICAS_READY)
        self._slots, self._running = gauge(names.REPLICA_SLOTS), gauge(names.REPLICA_RUNNING)
        self._waiting = gauge(names.REPLICA_WAITING)
        self._blocks, self._blocks_free = gauge(names.REPLICA_BLOCKS), gauge(names.REPLICA_BLOCKS_FREE)
        self._blocks_cached = gauge(names.REPLICA_BLOCKS_CACHED)
        self._replicas_shown: set[ReplicaId] = set()
        self._tokens_out_of: dict[str, Counter] = {}

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

    def class_load(self, priority_class: str, *, queued: int, queued_bytes: int, in_flight: int) -> None:
        self._queued.labels(priority_class).set(queued)
        self._queued_bytes.labels(priority_class).set(queued_bytes)
        self._in_flight.labels(priority_class).set(in_flight)

    def replicas(self, views: Iterable[ReplicaView]) -> None:
        """Show these replicas and no others: one that is gone leaves no series behind."""
        ready = 0
        shown: set[ReplicaId] = set()
        for view in views:
            ready += view.condition is Condition.ROUTABLE
            load = view.load
            if load is None:
                continue
            shown.add(view.replica_id)
            self._slots.labels(view.replica_id).set(load.slots_total)
            self._running.labels(view.replica_id).set(sum(level.requests for level in load.running))
            self._waiting.labels(view.replica_id).set(sum(level.requests for level in load.waiting))
            self._blocks.labels(view.replica_id).set(load.blocks_total)
            self._blocks_free.labels(view.replica_id).set(load.blocks_free)
            self._blocks_cached.labels(view.replica_id).set(load.blocks_cached)
        of_replicas = (self._slots, self._running, self._waiting, self._blocks, self._blocks_free, self._blocks_cached)
        for gone in self._replicas_shown - shown:
            for metric in of_replicas:
                metric.remove(gone)
        self._replicas_shown = shown
        self._replicas_ready.set(ready)
