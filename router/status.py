"""The core's state as others read it: bands and replicas for `forebay status`, gauges for Prometheus.

Owns: those summaries. Reads the queue, the live requests and the views, and changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from cluster.config import PriorityClass
from cluster.messages import BandStatus, Unroutable
from router.dispatch import Dispatcher
from router.live import Live
from router.metrics_sink import RouterMetrics
from router.priority import class_of
from router.queue import BandQueue, Charge
from router.view import Condition, ReplicaView


def band_statuses(
    classes: Sequence[PriorityClass], queue: BandQueue, lives: Collection[Live]
) -> tuple[BandStatus, ...]:
    """Each priority that has queued or running work, most urgent first; a suspect that is set aside counts as queued."""
    running = Counter(live.request.priority for live in lives if live.replica_id is not None)
    waiting = Counter(live.request.priority for live in lives if live.replica_id is None)
    queued = dict(queue.bands())
    nothing = Charge()
    return tuple(
        BandStatus(
            priority=priority,
            priority_class=class_of(classes, priority).name,
            queued_requests=waiting[priority],
            queued_bytes=queued.get(priority, nothing).size_bytes,
            running_requests=running[priority],
        )
        for priority in sorted(waiting.keys() | running.keys(), reverse=True)
    )


def unroutable(views: Sequence[ReplicaView]) -> tuple[Unroutable, ...]:
    """Those that are sent nothing new, and why."""
    return tuple(Unroutable(v.replica_id, v.condition.value) for v in views if v.condition is not Condition.ROUTABLE)


def show_classes(
    metrics: RouterMetrics,
    classes: Sequence[PriorityClass],
    dispatcher: Dispatcher,
    lives: Collection[Live],
    now_s: float,
) -> None:
    """Set the gauges of every class, those with no work too."""
    in_flight = Counter(live.priority_class.name for live in lives if live.replica_id is not None)
    for priority_class in classes:
        name, charge = priority_class.name, dispatcher.queue.of_class(priority_class.name)
        metrics.class_load(
            name,
            queued=charge.requests,
            queued_bytes=charge.size_bytes,
            queued_service=charge.service,
            in_flight=in_flight[name],
            drain_per_s=dispatcher.drain_per_s(name, now_s),
        )
