"""What requests meet: they wait, are refused, or end by no fault of their client.

Owns: those alerts. Pure. Invariant: what a request brought on itself counts nowhere: one that is too large, that asks for
what cannot be, or whose client left.
"""

from __future__ import annotations

from cluster.metrics import ADMISSIONS, QUEUE_WAIT, QUEUED_OLDEST, REPLICAS_READY, REQUESTS
from cluster.types import Outcome
from ops.alerts.query import OF_CLASS, OF_MODEL, Match, Not, Part, labels_of, over, part_of, series, total_of
from ops.alerts.rules import Alert, Group, Severity, duration
from ops.alerts.settings import AlertSettings

REFUSED = (Outcome.REJECTED_QUEUE_FULL, Outcome.REJECTED_WAIT, Outcome.REJECTED_NO_REPLICA)
"""For want of capacity. Not those that a router which leaves sends to another, nor those whose own times could not be met."""
FAILED = (
    Outcome.REPLICA_LOST,
    Outcome.ENGINE_ERROR,
    Outcome.QUARANTINED,
    Outcome.SHUT_DOWN,
)
"""By Forebay. What expires in the queue may be for times of its own, and where it is not ForebayQueueWaitLong tells."""
_WHERE = "{{ $labels.priority_class }} requests for {{ $labels.model }}"


def serving_group(settings: AlertSettings) -> Group:
    alerts = (_wait_long(settings), _starvation(settings), _refusals(settings), _failing(settings))
    return Group(name="forebay-serving", rules=alerts)


def _wait_long(settings: AlertSettings) -> Alert:
    named: list[tuple[Match, float]] = [(wait.priority_class, wait.wait_s) for wait in settings.waits]
    rest = (Not(tuple(wait.priority_class for wait in settings.waits)), settings.other_waits_s)
    bounds = ", ".join(f"{wait.wait_s:g} s for {wait.priority_class}" for wait in settings.waits)
    return Alert(
        name="ForebayQueueWaitLong",
        severity=Severity.WARNING,
        expression="\nor\n".join(
            f"{over('max', OF_CLASS, series(QUEUED_OLDEST, priority_class=match))} > {seconds:g}"
            for match, seconds in (*named, rest)
        ),
        for_s=120,
        summary=f"{_WHERE} wait long",
        description="The first of them has waited {{ $value | humanizeDuration }}. "
        f"Bounds: {bounds}, {settings.other_waits_s:g} s for others.",
    )


def _starvation(settings: AlertSettings) -> Alert:
    begun = total_of(OF_CLASS, series(QUEUE_WAIT, Part.COUNT), settings.starved_window_s)
    return Alert(
        name="ForebayStarvation",
        severity=Severity.CRITICAL,
        expression=f"{over('max', OF_CLASS, series(QUEUED_OLDEST))} > {settings.starved_after_s:g}\n"
        f"unless on {labels_of(OF_CLASS)}\n{begun} > 0\n"
        f"and on {labels_of(OF_MODEL)}\n{over('max', OF_MODEL, series(REPLICAS_READY))} > 0",
        for_s=120,
        summary=f"{_WHERE} starve: they wait, and none is begun",
        description="The first of them has waited {{ $value | humanizeDuration }}, "
        f"and none has been sent to a replica for {duration(settings.starved_window_s)}, though replicas take work. "
        "Even the least urgent class is to get its minimum share.",
    )


def _refusals(settings: AlertSettings) -> Alert:
    return Alert(
        name="ForebayRefusalsHigh",
        severity=Severity.WARNING,
        expression=part_of(
            OF_CLASS,
            series(ADMISSIONS, Part.TOTAL, decision=REFUSED),
            series(ADMISSIONS, Part.TOTAL),
            settings.window_s,
            above=settings.refused_part,
            least=settings.events_min,
        ),
        for_s=600,
        summary=f"Many {_WHERE} are refused",
        description="{{ $value | humanizePercentage }} of them were refused at arrival in the last "
        f"{duration(settings.window_s)} for want of capacity; more than {settings.refused_part:.0%} is too much.",
    )


def _failing(settings: AlertSettings) -> Alert:
    return Alert(
        name="ForebayRequestsFailing",
        severity=Severity.CRITICAL,
        expression=part_of(
            OF_CLASS,
            series(REQUESTS, Part.TOTAL, outcome=FAILED),
            series(REQUESTS, Part.TOTAL),
            settings.window_s,
            above=settings.failing_part,
            least=settings.events_min,
        ),
        for_s=60,
        summary=f"{_WHERE} fail",
        description="{{ $value | humanizePercentage }} of those that ended in the last "
        f"{duration(settings.window_s)} were ended by Forebay: {', '.join(FAILED)}. "
        f"More than {settings.failing_part:.0%} is too much.",
    )
