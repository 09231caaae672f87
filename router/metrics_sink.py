"""The router's metrics as prometheus objects.

Owns: their creation in one registry and the translation of the router's events into them. Names and labels come from
`cluster.metrics` alone; label values are classes and tenants of the config, enums, and replicas of the roster, so they are
bounded. Invariants: a counter of such values has each of them from the start, at 0, so that a rate sees the first event;
gauges are set when somebody asks, and nothing is for that while requests run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import product

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from cluster import metrics as names
from cluster.config import PriorityClass, RouterConfig
from cluster.messages import ScaleStatus
from cluster.metrics import (
    DECISION_BUCKETS_SECONDS,
    ITL_BUCKETS_SECONDS,
    LATENCY_BUCKETS_SECONDS,
    PREEMPTION_BUCKETS,
    RATIO_BUCKETS,
    Metric,
)
from cluster.tally import Tally
from cluster.types import Outcome, PreemptionMeans, RefusalReason
from router.errors import AT_THE_DOOR, ApiError
from router.metrics_queue import QueueMetrics
from router.metrics_replicas import ReplicaMetrics
from router.moving import MoveOutcome
from router.outliers import Fault
from router.proposals import Verdict
from router.retries import Retry
from router.returns import RETURNS, Return
from router.tallies import Tallies
from router.view import ReplicaView

ADMITTED, QUEUED = "admitted", "queued"
"""Of what is decided at arrival; else it is the outcome of who is refused."""
REFUSED_AT_ARRIVAL = tuple(outcome for outcome in Outcome if outcome.value.startswith("rejected_"))


class DoorMetrics:
    """Of what is answered before it is any core's. One set per router process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        metric = names.TURNED_AWAY
        self._turned_away = cache(Counter(metric.name, metric.help, metric.labels, registry=registry).labels)
        for status, code in AT_THE_DOOR:
            self._turned_away(str(status), code)

    def turned_away(self, error: ApiError) -> None:
        """Codes are words of this program, so they are bounded."""
        self._turned_away(str(error.status), error.word).inc()


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


class _Asked(Collector):
    """Has the gauges set when the series of its registry are asked for; of the collectors it is the first."""

    def __init__(self) -> None:
        self.show: Callable[[], None] = lambda: None

    def collect(self) -> Iterable[Family]:
        self.show()
        return ()


class RouterMetrics:
    """One set per core."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(m: Metric) -> Counter:
            return Counter(m.name, m.help, m.labels, registry=registry)

        def gauge(m: Metric) -> Gauge:
            return Gauge(m.name, m.help, m.labels, registry=registry)

        def histogram(m: Metric, buckets: Sequence[float] = LATENCY_BUCKETS_SECONDS) -> Histogram:
            return Histogram(m.name, m.help, m.labels, buckets=buckets, registry=registry)

        self._asked = _Asked()
        registry.register(self._asked)
        # What every request tells: a child is looked up once for its labels.
        self._requests = cache(counter(names.REQUESTS).labels)
        self._admissions = cache(counter(names.ADMISSIONS).labels)
        self._slo, self._slo_target = cache(counter(names.SLO_FIRST_TOKENS).labels), gauge(names.SLO_FIRST_TOKEN_TARGET)
        self._ttft, self._tpot = cache(histogram(names.TTFT).labels), cache(histogram(names.TPOT).labels)
        self._e2e, self._queue_wait = cache(histogram(names.E2E).labels), cache(histogram(names.QUEUE_WAIT).labels)
        self._tokens_out = cache(counter(names.TOKENS_OUT).labels)
        self._tokens_in = cache(counter(names.TOKENS_IN).labels)
        self._request_preemptions = cache(histogram(names.PREEMPTIONS_PER_REQUEST, PREEMPTION_BUCKETS).labels)
        # What every token or every frame tells.
        self._gaps: dict[str, Tally] = {}
        self.arrival_s, self.dispatch_s = Tally(DECISION_BUCKETS_SECONDS), Tally(DECISION_BUCKETS_SECONDS)
        """Time that the decision about an arrival took, and a turn over what waits."""
        registry.register(Tallies(names.ITL, lambda: {(name,): gaps.snapshot() for name, gaps in self._gaps.items()}))
        decisions = {("arrival",): self.arrival_s, ("dispatch",): self.dispatch_s}
        registry.register(Tallies(names.DECISION, lambda: {name: t.snapshot() for name, t in decisions.items()}))
        self._shared = counter(names.SHARED)
        self._served = counter(names.SERVED)
        self._served_others = self._served.labels(names.OTHER_TENANTS)
        self._served_to: dict[str, Counter] = {}
        self._preemptions, self._continued = counter(names.PREEMPTIONS), counter(names.CONTINUED)
        self._retries = counter(names.RETRIES)
        self._proposals, self._scale = counter(names.PROPOSALS), gauge(names.SCALE)
        self._moves, self._move_pause = counter(names.MOVES), histogram(names.MOVE_PAUSE)
        self._over_stated = histogram(names.OUTPUT_OVER_STATED, RATIO_BUCKETS)
        self._engine_deaths, self._suspects = counter(names.ENGINE_DEATHS), gauge(names.SUSPECTS)
        self._fenced, self._gap_count = counter(names.FENCED), counter(names.GAPS)
        self._gate_held, self._gate_shut = counter(names.GATE_HELD), gauge(names.GATE_SHUT)
        self._queued_limit = gauge(names.QUEUED_BYTES_LIMIT)
        self._refusals = counter(names.REFUSALS)
        self._ejections = counter(names.EJECTIONS)
        self._classes: tuple[PriorityClass, ...] = ()
        self.queue, self._replicas = QueueMetrics(registry), ReplicaMetrics(registry)

    def begin(self, config: RouterConfig, show: Callable[[], None]) -> None:
        """Show what there can be by this configuration, at 0. Tenants that it names are shown by their names, all others
        are one. `show` sets the gauges: it is called whenever the registry is read."""
        self._asked.show = show
        self._classes = config.classes
        self.queue.named = frozenset(tenant.name for tenant in config.tenants)
        self._served_to = {tenant: self._served.labels(tenant) for tenant in self.queue.named}
        for name in (c.name for c in config.classes):
            self._gaps[name] = Tally(ITL_BUCKETS_SECONDS)
            for labels in (
                self._ttft, self._tpot, self._e2e, self._queue_wait, self._tokens_out, self._tokens_in,
                self._request_preemptions, self._shared.labels, self._gate_held.labels, self._gate_shut.labels,
                self._over_stated.labels,
            ):  # fmt: skip
                labels(name)
            for outcome in Outcome:
                self._requests(name, outcome)
            for decision in (ADMITTED, QUEUED, *REFUSED_AT_ARRIVAL):
                self._admissions(name, decision)
            for cause, means in product(("urgent", "kv_full"), PreemptionMeans):
                self._preemptions.labels(name, cause, means.value)
        for priority_class in config.classes:
            self._queued_limit.labels(priority_class.name).set(priority_class.max_queued_bytes)
            if priority_class.first_token_slo_s is not None:
                self._slo_target.labels(priority_class.name).set(priority_class.first_token_slo_s)
                for attained in ("true", "false"):
                    self._slo(priority_class.name, attained)
        for kind in ("stale", "repeat"):
            self._fenced.labels(kind)
        for counter, values in (
            (self._proposals, Verdict),
            (self._retries, Retry),
            (self._moves, MoveOutcome),
            (self._refusals, RefusalReason),
            (self._ejections, Fault),
            (self._continued, RETURNS),
        ):
            for value in values:
                counter.labels(value.value)

    def gaps(self, priority_class: str) -> Tally:
        """Where the seconds between two arrivals of tokens of a request are counted."""
        return self._gaps[priority_class]

    def judged(self, priority_class: str, decision: str, count: int) -> None:
        """What was decided of `count` requests at arrival: ADMITTED, QUEUED, or an outcome."""
        self._admissions(priority_class, decision).inc(count)

    def promised(self, priority_class: str, *, attained: bool) -> None:
        """Whether the first token came within what the class promises."""
        self._slo(priority_class, "true" if attained else "false").inc()

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

    def continued(self, reason: Return | RefusalReason) -> None:
        self._continued.labels(reason.value).inc()

    def erred(self, verdict: Retry) -> None:
        """An engine has ended an attempt with an error."""
        self._retries.labels(verdict.value).inc()

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
        self._gap_count.inc()

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

    def replicas(self, views: Sequence[ReplicaView], now_s: float) -> None:
        """Show these replicas and no others."""
        self._replicas.show(views, self._classes, now_s)
