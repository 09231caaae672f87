"""The core's state as others read it: bands and replicas for `forebay status`, gauges for Prometheus.

Owns: those summaries. Reads the queue, the live requests and the views, and changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import islice

from cluster.config import PriorityClass
from cluster.messages import BandStatus, MoveStatus, Unroutable
from router.dispatch import Dispatcher
from router.live import Live
from router.metrics_sink import RouterMetrics
from router.moves import Move
from router.moving import Stage
from router.priority import class_of
from router.queue import BandQueue, Charge
from router.view import Condition, ReplicaView

MOVES_SHOWN = 64
"""Each status names no more: it goes to the controller twice a second."""


def band_statuses(
    classes: Sequence[PriorityClass], queue: BandQueue, lives: Collection[Live], now_s: float
) -> tuple[BandStatus, ...]:
    """Each priority that has queued or running work, most urgent first; a suspect that is set aside counts as queued."""
    running = Counter(live.request.priority for live in lives if live.replica_id is not None)
    waiting = Counter(live.request.priority for live in lives if live.replica_id is None)
    oldest_s: dict[int, float] = {}
    for live in lives:
        if live.replica_id is None:
            priority = live.request.priority
            oldest_s[priority] = max(oldest_s.get(priority, 0.0), now_s - live.arrived_s)
    queued = dict(queue.bands())
    nothing = Charge()
    return tuple(
        BandStatus(
            priority=priority,
            priority_class=class_of(classes, priority).name,
            queued_requests=waiting[priority],
            queued_bytes=queued.get(priority, nothing).size_bytes,
            running_requests=running[priority],
            oldest_s=round(oldest_s[priority], 3) if priority in oldest_s else None,
        )
        for priority in sorted(waiting.keys() | running.keys(), reverse=True)
    )


def move_statuses(moves: Iterable[Move], now_s: float) -> tuple[MoveStatus, ...]:
    """Those under way, of the first MOVES_SHOWN that began."""
    under_way = (move for move in moves if move.stage is not Stage.OFF)
    return tuple(
        MoveStatus(
            request_id=move.live.request.request_id,
            priority_class=move.live.priority_class.name,
            source=move.source.replica_id,
            target=move.target.replica_id,
            stage=move.stage.name.lower(),
            age_s=round(now_s - move.begun_s, 3),
            why=move.why,
        )
        for move in islice(under_way, MOVES_SHOWN)
    )


def unroutable(views: Sequence[ReplicaView]) -> tuple[Unroutable, ...]:
    """Those that are sent nothing new, and why."""
    return tuple(Unroutable(v.replica_id, v.condition.value) for v in views if v.condition is not Condition.ROUTABLE)


def show(
    metrics: RouterMetrics,
    classes: Sequence[PriorityClass],
    dispatcher: Dispatcher,
    lives: Collection[Live],
    views: Sequence[ReplicaView],
    now_s: float,
) -> None:
    """Set the gauges: of every class, those with no work too, of the tenants, of the journal and of the replicas."""
    in_flight: Counter[str] = Counter()
    since_s: dict[str, float] = {}
    journal_bytes = 0
    for live in lives:
        name = live.account.priority_class
        journal_bytes += live.size_bytes
        if live.replica_id is not None:
            in_flight[name] += 1
        elif live.suspicion is None and live.queued_s < since_s.get(name, now_s):  # a suspect is not in the queue
            since_s[name] = live.queued_s
    for priority_class in classes:
        name, charge = priority_class.name, dispatcher.queue.of_class(priority_class.name)
        metrics.queue.show_class(
            name,
            queued=charge.requests,
            queued_bytes=charge.size_bytes,
            queued_service=charge.service,
            oldest_s=now_s - since_s.get(name, now_s),
            in_flight=in_flight[name],
            drain_per_s=dispatcher.drain_per_s(name, now_s),
        )
    metrics.queue.show_tenants(dispatcher.queue.by_tenant())
    metrics.queue.show_journal(len(lives), journal_bytes)
    metrics.replicas(views, now_s)
