"""Replicas: whether there are any, whether they last, and whether their memory suffices.

Owns: those alerts. Pure. Invariant: what several routers see of one replica counts once.
"""

from __future__ import annotations

from cluster.metrics import (
    EJECTIONS,
    ENGINE_DEATHS,
    MOVES,
    PREEMPTIONS,
    REPLICA_BLOCKS,
    REPLICA_BLOCKS_FREE,
    REPLICA_REPORT_AGE,
    REPLICA_URGENT_BLOCKED,
    REPLICAS,
    REPLICAS_READY,
    REQUESTS,
    SCALE,
)
from cluster.types import PreemptionMeans
from ops.alerts.query import OF_CLASS, OF_MODEL, OF_REPLICA, Part, labels_of, over, part_of, series, total_of
from ops.alerts.rules import Alert, Group, Severity, duration
from ops.alerts.settings import AlertSettings
from router.moving import MoveOutcome
from router.view import Condition

KV_FULL = "kv_full"
"""The cause of a preemption for which no urgent work asked."""
WANTED = "wanted"
"""The figure of `forebay_scale` that says how many replicas there are to be."""
OUT = (Condition.NO_REPORT, Condition.STUCK, Condition.EJECTED)
"""Those that report and are no use, or have never reported; of the others ForebayReportsStale tells."""
COSTLY = (PreemptionMeans.SWAP, PreemptionMeans.RECOMPUTE)
"""A pause costs nothing but the slot."""


def replicas_group(settings: AlertSettings) -> Group:
    alerts = (
        _none_ready(),
        _flapping(settings),
        _out(settings),
        _stale(settings),
        _kv_pressure(settings),
        _urgent_blocked(settings),
        _thrash(settings),
        _moves_failing(settings),
    )
    return Group(name="forebay-replicas", rules=alerts)


def _none_ready() -> Alert:
    return Alert(
        name="ForebayNoReplicaReady",
        severity=Severity.CRITICAL,
        expression=f"{over('max', OF_MODEL, series(REPLICAS_READY))} == 0\n"
        f"unless on {labels_of(OF_MODEL)}\n{over('max', OF_MODEL, series(SCALE, figure=WANTED))} == 0",
        for_s=60,
        summary="No replica of {{ $labels.model }} takes work",
        description="{{ $value | humanize }} replicas take work, and one at least is wanted. Requests wait, and are refused "
        "once none has come for router.no_replica_grace_s.",
    )


def _flapping(settings: AlertSettings) -> Alert:
    window = duration(settings.flap_window_s)
    put_out, lost = series(EJECTIONS, Part.TOTAL), series(ENGINE_DEATHS, Part.TOTAL)
    both = f"sum without (fault) (increase({put_out}[{window}]) or increase({lost}[{window}]))"
    return Alert(
        name="ForebayReplicaFlapping",
        severity=Severity.WARNING,
        expression=f"{over('max', OF_MODEL, both)} >= {settings.flaps}",
        for_s=60,
        summary="Replicas of {{ $labels.model }} come and go",
        description='{{ $value | printf "%.0f" }} times in the last '
        f"{window} one was lost with requests running on it, or was put out for its faults; {settings.flaps} is too often.",
    )


def _out(settings: AlertSettings) -> Alert:
    """On the average of a window, since one that is put out is let in for a moment between two times."""
    window = duration(settings.window_s)
    shown = f"avg_over_time({series(REPLICAS, condition=OUT)}[{window}])"
    return Alert(
        name="ForebayReplicasOut",
        severity=Severity.WARNING,
        expression=f"{over('max', (*OF_MODEL, 'condition'), shown)} >= {settings.out_replicas:g}",
        for_s=60,
        summary="Replicas of {{ $labels.model }} get no work: {{ $labels.condition }}",
        description="On the average of the last "
        f'{window} {{{{ $value | printf "%.1f" }}}} of them were sent nothing new, and take the place of one that works.',
    )


def _stale(settings: AlertSettings) -> Alert:
    return Alert(
        name="ForebayReportsStale",
        severity=Severity.WARNING,
        expression=f"{over('max', OF_REPLICA, series(REPLICA_REPORT_AGE))} > {settings.report_age_s:g}",
        for_s=60,
        summary="Replica {{ $labels.replica }} of {{ $labels.model }} does not report",
        description="A router's last report of it is {{ $value | humanizeDuration }} old; they come ten times a second, and "
        f"after {settings.report_age_s:g} s its work goes on elsewhere.",
    )


def _kv_pressure(settings: AlertSettings) -> Alert:
    free, every = (over("sum", OF_MODEL, series(metric)) for metric in (REPLICA_BLOCKS_FREE, REPLICA_BLOCKS))
    preempted = total_of(OF_MODEL, series(PREEMPTIONS, Part.TOTAL, cause=KV_FULL), settings.window_s)
    most = settings.kv_full_per_min * settings.window_s / 60
    return Alert(
        name="ForebayKvPressure",
        severity=Severity.WARNING,
        expression=f"1 - {free}\n/\n{every} > {settings.kv_part:g}\n"
        f"and on {labels_of(OF_MODEL)}\n{preempted} > {most:g}",
        for_s=600,
        summary="Replicas of {{ $labels.model }} run out of KV blocks",
        description="{{ $value | humanizePercentage }} of the KV blocks are in use, and more than "
        f"{most:g} running requests were preempted in the last {duration(settings.window_s)} because there was no block "
        "for their next token.",
    )


def _urgent_blocked(settings: AlertSettings) -> Alert:
    """Each router counts on from what a replica reports: of one replica all say the same."""
    risen = f"increase({series(REPLICA_URGENT_BLOCKED, Part.TOTAL)}[{duration(settings.window_s)}])"
    return Alert(
        name="ForebayUrgentBlocked",
        severity=Severity.WARNING,
        expression=f"{over('sum', OF_MODEL, over('max', OF_REPLICA, risen))} >= {settings.urgent_blocked}",
        for_s=60,
        summary="Urgent requests wait on replicas of {{ $labels.model }}: nobody may be preempted again",
        description='{{ $value | printf "%.0f" }} urgent requests had to wait in the last '
        f"{duration(settings.window_s)}, since those who would make room have been recomputed engine.max_recomputes times.",
    )


def _thrash(settings: AlertSettings) -> Alert:
    return Alert(
        name="ForebayPreemptionThrash",
        severity=Severity.WARNING,
        expression=part_of(
            OF_CLASS,
            series(PREEMPTIONS, Part.TOTAL, means=COSTLY),
            series(REQUESTS, Part.TOTAL),
            settings.window_s,
            above=settings.preemptions_per_request,
            least=settings.events_min,
        ),
        for_s=600,
        summary="{{ $labels.priority_class }} requests for {{ $labels.model }} are preempted again and again",
        description="{{ $value | humanize }} preemptions that gave up keys and values for each request that ended in the last "
        f"{duration(settings.window_s)}; more than {settings.preemptions_per_request:g} means that work is done twice.",
    )


def _moves_failing(settings: AlertSettings) -> Alert:
    return Alert(
        name="ForebayMovesFailing",
        severity=Severity.WARNING,
        expression=part_of(
            OF_MODEL,
            series(MOVES, Part.TOTAL, outcome=MoveOutcome.FAILED),
            series(MOVES, Part.TOTAL),
            settings.window_s,
            above=settings.moves_failed_part,
            least=settings.events_min,
        ),
        for_s=300,
        summary="Moves of requests for {{ $labels.model }} fail",
        description="{{ $value | humanizePercentage }} of the moves of the last "
        f"{duration(settings.window_s)} were granted and not taken; the requests went on from the journal, computed again.",
    )
