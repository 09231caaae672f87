"""What the metrics of a router's core say of its replicas.

Owns: those series, one set for each replica of the roster. Names and labels come from `cluster.metrics`. Invariants: a
replica that is gone leaves none behind; what is not known is absent and never 0; totals only rise.
"""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge

from cluster import metrics as names
from cluster.config import PriorityClass
from cluster.metrics import Metric
from cluster.types import EngineLoad, ReplicaId
from router.priority import class_of
from router.view import Condition, ReplicaView

GAUGES: tuple[tuple[Metric, Callable[[EngineLoad], int]], ...] = (
    (names.REPLICA_SLOTS, lambda load: load.slots_total),
    (names.REPLICA_RUNNING, lambda load: sum(level.requests for level in load.running)),
    (names.REPLICA_WAITING, lambda load: sum(level.requests for level in load.waiting)),
    (names.REPLICA_BLOCKS, lambda load: load.blocks_total),
    (names.REPLICA_BLOCKS_FREE, lambda load: load.blocks_free),
    (names.REPLICA_BLOCKS_CACHED, lambda load: load.blocks_cached),
    (names.REPLICA_HOST_BLOCKS_FREE, lambda load: load.host_blocks_free),
)
TOTALS: tuple[tuple[Metric, Callable[[EngineLoad], int]], ...] = (
    (names.REPLICA_URGENT_BLOCKED, lambda load: load.urgent_blocked_total),
    (names.REPLICA_PREFILL_TOKENS, lambda load: load.prefill_tokens_total),
    (names.REPLICA_PREFIX_HIT_TOKENS, lambda load: load.prefix_hit_tokens_total),
    (names.REPLICA_PADDING_TOKENS, lambda load: load.padding_tokens_total),
)


class ReplicaMetrics:
    """One set per core."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(m: Metric) -> Gauge:
            return Gauge(m.name, m.help, m.labels, registry=registry)

        self._conditions, self._ready = gauge(names.REPLICAS), gauge(names.REPLICAS_READY)
        self._ejected = gauge(names.REPLICAS_EJECTED)
        self._report_age, self._class_blocks = gauge(names.REPLICA_REPORT_AGE), gauge(names.REPLICA_CLASS_BLOCKS)
        self._gauges = [(gauge(metric), figure) for metric, figure in GAUGES]
        self._totals = [(Counter(m.name, m.help, m.labels, registry=registry), figure) for m, figure in TOTALS]
        self._shown: dict[ReplicaId, EngineLoad] = {}
        """With the load that was last seen, from which totals have been counted on."""

    def show(self, views: Sequence[ReplicaView], classes: Sequence[PriorityClass], now_s: float) -> None:
        """Show these replicas and no others, and what each class of `classes` holds there."""
        conditions = Count(view.condition for view in views)
        for condition in Condition:
            self._conditions.labels(condition.value).set(conditions[condition])
        self._ready.set(conditions[Condition.ROUTABLE])
        self._ejected.set(conditions[Condition.EJECTED])
        shown: dict[ReplicaId, EngineLoad] = {}
        for view in views:
            load, replica_id = view.load, view.replica_id
            if load is None or view.observed_at_s is None:
                continue
            self._report_age.labels(replica_id).set(max(0.0, now_s - view.observed_at_s))
            before = self._shown.get(replica_id)
            shown[replica_id] = load
            if load != before:
                self._show_load(replica_id, load, before, classes)
        for gone in self._shown.keys() - shown.keys():
            self._forget(gone)
        self._shown = shown

    def _show_load(
        self, replica_id: ReplicaId, load: EngineLoad, before: EngineLoad | None, classes: Sequence[PriorityClass]
    ) -> None:
        for gauge, figure in self._gauges:
            gauge.labels(replica_id).set(figure(load))
        for total, figure in self._totals:
            now, then = figure(load), 0 if before is None else figure(before)
            total.labels(replica_id).inc(now - then if now >= then else now)  # less: it has started anew
        blocks: Count[str] = Count()
        for level in (*load.running, *load.waiting):
            if classes:
                blocks[class_of(classes, level.priority).name] += level.blocks
        for priority_class in classes:
            self._class_blocks.labels(replica_id, priority_class.name).set(blocks[priority_class.name])

    def _forget(self, replica_id: ReplicaId) -> None:
        for metric in (self._report_age, *(m for m, _ in self._gauges), *(m for m, _ in self._totals)):
            metric.remove(replica_id)
        self._class_blocks.remove_by_labels({"replica": replica_id})
