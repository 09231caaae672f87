"""The router's metrics as prometheus objects.

Owns: their creation in one registry and the translation of the router's events into them. Names and labels come from
`cluster.metrics` alone; label values are classes of the config, enums, and replicas of the roster, so they are bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from cluster import metrics as names
from cluster.messages import ScaleStatus
from cluster.metrics import LATENCY_BUCKETS_SECONDS, PREEMPTION_BUCKETS, RATIO_BUCKETS, Metric
from cluster.types import EngineLoad, Outcome, PreemptionMeans, RefusalReason, ReplicaId
from router.errors import ApiError
from router.moving import MoveOutcome
from router.outliers import Fault
from router.proposals import Verdict
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


class DoorMetrics:
    """Of what is answered before it is any core's. One set per router process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        metric = names.TURNED_AWAY
        self._turned_away = cache(Counter(metric.name, metric.help, metric.labels, registry=registry).labels)

    def turned_away(self, error: ApiError) -> None:
        """Codes are words of this program, so they are bounded; an error without one counts by its type."""
        self._turned_away(str(error.status), error.body.code or error.body.type).inc()


class ControllerMetrics:
    """Of the controllers as a router process sees them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        leads, standbys, generation, refused = (
            names.CONTROLLER_LEADS, names.CONTROLLER_STANDBYS, names.CONTROLLER_GENERATION, names.CONTROLLER_REFUSED
        )  # fmt: skip
        self._leads, self._standbys, self._generation = (
            Gauge(metric.name, metric.help, registry=registry) for metric in (leads, standbys, generation)
        )
        self._refused = Counter(refused.name, refused.help, registry=registry)
        self._refused_told = 0

    def show(self, generation: int, standbys: int, refused: int, *, led: bool) -> None:
        """`refused`: in all."""
        self._leads.set(led)
        self._standbys.set(standbys)
        self._generation.set(generation)
        self._refused.inc(refused - self._refused_told)
        self._refused_told = refused


class RouterMetrics:
    """One set per core."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(m: Metric) -> Counter:
            return Counter(m.name, m.help, m.labels, registry=registry)

        def gauge(m: Metric) -> Gauge:
            return Gauge(m.name, m.help, m.labels, registry=registry)

        def histogram(m: Metric, buckets: Sequence[float] = LATENCY_BUCKETS_SECONDS) -> Histogram:
            return Histogram(m.name, m.help, m.labels, buckets=buckets, registry=registry)

        # What every request tells: a child is looked up once for its labels.
        self._requests = cache(counter(names.REQUESTS).labels)
        self._ttft, self._tpot = cache(histogram(names.TTFT).labels), cache(histogram(names.TPOT).labels)
        self._e2e, self._queue_wait = cache(histogram(names.E2E).labels), cache(histogram(names.QUEUE_WAIT).labels)
        self._tokens_out = cache(counter(names.TOKENS_OUT).labels)
        self._tokens_in = cache(counter(names.TOKENS_IN).labels)
        self._request_preemptions = cache(histogram(names.PREEMPTIONS_PER_REQUEST, PREEMPTION_BUCKETS).labels)
        self._queued, self._queued_bytes = gauge(names.QUEUED), gauge(names.QUEUED_BYTES)
        self._queued_service, self._drain = gauge(names.QUEUED_SERVICE), gauge(names.DRAIN)
        self._in_flight = gauge(names.IN_FLIGHT)
        self._shared = counter(names.SHARED)
        self._served = counter(names.SERVED)
        self._served_others = self._served.labels(names.OTHER_TENANTS)
        self._served_to: dict[str, Counter] = {}
        self._preemptions, self._continued = counter(names.PREEMPTIONS), counter(names.CONTINUED)
        self._proposals, self._scale = counter(names.PROPOSALS), gauge(names.SCALE)
        self._moves, self._move_pause = counter(names.MOVES), histogram(names.MOVE_PAUSE)
        self._over_stated = histogram(names.OUTPUT_OVER_STATED, RATIO_BUCKETS)
        self._engine_deaths, self._suspects = counter(names.ENGINE_DEATHS), gauge(names.SUSPECTS)
        self._fenced, self._gaps = counter(names.FENCED), counter(names.GAPS)
        self._gate_held, self._gate_shut = counter(names.GATE_HELD), gauge(names.GATE_SHUT)
        self._refusals = counter(names.REFUSALS)
        self._replicas_ready, self._replicas_ejected = gauge(names.REPLICAS_READY), gauge(names.REPLICAS_EJECTED)
        self._ejections = counter(names.EJECTIONS)
        self._replica_gauges = [(gauge(metric), figure) for metric, figure in REPLICA_GAUGES]
        self._replica_totals = [(counter(metric), figure) for metric, figure in REPLICA_TOTALS]
        self._replicas_shown: dict[ReplicaId, EngineLoad] = {}
        """With the load that was last seen, from which totals have been counted on."""

    def name_tenants(self, tenants: Iterable[str]) -> None:
        """Show these by their names; all others are one."""
        self._served_to = {tenant: self._served.labels(tenant) for tenant in tenants}

    def accepted(self, priority_class: str, prompt_tokens: int) -> None:
        self._tokens_in(priority_class).inc(prompt_tokens)

    def first_dispatch(self, priority_class: str, waited_seconds: float) -> None:
        self._queue_wait(priority_class).observe(waited_seconds)

    def first_token(self, priority_class: str, ttft_seconds: float) -> None:
        self._ttft(priority_class).observe(ttft_seconds)

    def tokens(self, priority_class: str, count: int) -> None:
        self._tokens_out(priority_class).inc(count)

    def ended(self, priority_class: str, outcome: Outcome, preemptions: int) -> None:
        self._requests(priority_class, outcome).inc()
        self._request_preemptions(priority_class).observe(preemptions)

    def stated(self, priority_class: str, output_over_stated: float) -> None:
        self._over_stated.labels(priority_class).observe(output_over_stated)

    def finished(self, priority_class: str, e2e_seconds: float, tpot_seconds: float | None) -> None:
        """`tpot_seconds` is None for fewer than two tokens."""
        self._e2e(priority_class).observe(e2e_seconds)
        if tpot_seconds is not None:
            self._tpot(priority_class).observe(tpot_seconds)

    def preempted(self, priority_class: str, means: PreemptionMeans, *, for_urgent: bool) -> None:
        self._preemptions.labels(priority_class, "urgent" if for_urgent else "kv_full", means.value).inc()

    def continued(self, reason: str) -> None:
        self._continued.labels(reason).inc()

    def moved(self, outcome: MoveOutcome) -> None:
        """What came of a move."""
        self._moves.labels(outcome.value).inc()

    def move_paused(self, pause_seconds: float) -> None:
        self._move_pause.observe(pause_seconds)

    def proposed(self, verdict: Verdict) -> None:
        """What became of a proposal."""
        self._proposals.labels(verdict.value).inc()

    def scaled(self, status: ScaleStatus) -> None:
        """How many replicas there are to be, and by which figures."""
        self._scale.clear()
        self._scale.labels("wanted").set(status.now.wanted)
        for figure in names.SCALE_FIGURES:
            if figure in status.now.numbers:
                self._scale.labels(figure).set(status.now.numbers[figure])

    def engine_died(self) -> None:
        self._engine_deaths.inc()

    def ejected(self, fault: Fault) -> None:
        self._ejections.labels(fault.value).inc()

    def suspects(self, count: int) -> None:
        self._suspects.set(count)

    def fenced(self, kind: str, count: int = 1) -> None:
        """`kind` is stale or repeat."""
        self._fenced.labels(kind).inc(count)

    def gap(self) -> None:
        self._gaps.inc()

    def refused(self, reason: RefusalReason) -> None:
        self._refusals.labels(reason.value).inc()

    def shared(self, priority_class: str) -> None:
        self._shared.labels(priority_class).inc()

    def held_by_gate(self, priority_class: str) -> None:
        self._gate_held.labels(priority_class).inc()

    def gate(self, priority_class: str, *, shut: bool) -> None:
        self._gate_shut.labels(priority_class).set(shut)

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
        ready = ejected = 0
        shown: dict[ReplicaId, EngineLoad] = {}
        for view in views:
            ready += view.condition is Condition.ROUTABLE
            ejected += view.condition is Condition.EJECTED
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
        self._replicas_ejected.set(ejected)
