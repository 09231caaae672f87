"""Routers and controllers: whether they are there, and whether a router keeps what it should have let go.

Owns: those alerts. Pure.
"""

from __future__ import annotations

from cluster.metrics import (
    CONTROLLER_LEADS,
    CONTROLLER_STANDBYS,
    IN_FLIGHT,
    JOURNAL_BYTES,
    JOURNAL_REQUESTS,
    QUEUED,
    QUEUED_BYTES_LIMIT,
    SUSPECTS,
)
from ops.alerts.query import OF_ROUTER, SCOPE, labels_of, over, series
from ops.alerts.rules import Alert, Group, Recording, Severity, duration
from ops.alerts.settings import AlertSettings

JOURNAL = f"router:{JOURNAL_BYTES.name}:sum"
LIMIT = f"router:{QUEUED_BYTES_LIMIT.name}:sum"
_LEADS, _STANDBYS = series(CONTROLLER_LEADS), series(CONTROLLER_STANDBYS)
_SEEN_S = 3600
"""A router that has been scraped within it is missed by its release; later, and from the start, by nobody's."""


def control_group(settings: AlertSettings) -> Group:
    return Group(
        name="forebay-control", rules=(_router_absent(), _controller_gone(), _router_alone(), _no_standby(settings))
    )


def journal_group(settings: AlertSettings) -> Group:
    sums = ((JOURNAL, JOURNAL_BYTES), (LIMIT, QUEUED_BYTES_LIMIT))
    recorded = (Recording(name=name, expression=over("sum", OF_ROUTER, series(metric))) for name, metric in sums)
    return Group(name="forebay-journal", rules=(*recorded, _growth(settings), _leak(settings)))


def _router_absent() -> Alert:
    """Every router shows whether a controller leads; nothing else does."""
    seen = f"last_over_time({_LEADS}[{duration(_SEEN_S)}])"
    return Alert(
        name="ForebayRouterAbsent",
        severity=Severity.CRITICAL,
        expression=f"{over('count', SCOPE, seen)}\nunless on {labels_of(SCOPE)}\n{over('count', SCOPE, _LEADS)}\n"
        f"or\nabsent_over_time({_LEADS}[{duration(_SEEN_S)}])",
        for_s=120,
        summary="No router of Forebay answers Prometheus",
        description="Of {{ $value | humanize }} that were seen in the last "
        f"{duration(_SEEN_S)}, or should have been, none shows metrics. Clients are not served, or Prometheus does not get in.",
    )


def _controller_gone() -> Alert:
    return Alert(
        name="ForebayControllerGone",
        severity=Severity.CRITICAL,
        expression=f"{over('max', SCOPE, _LEADS)} == 0",
        for_s=30,
        summary="No controller leads",
        description="{{ $value | humanize }} routers are linked to a controller that leads. Streams go "
        "on; routers keep no common order, nothing is moved for urgent work, drained or scaled, and no replica is met anew.",
    )


def _router_alone() -> Alert:
    return Alert(
        name="ForebayRouterAlone",
        severity=Severity.WARNING,
        expression=f"{over('max', OF_ROUTER, _LEADS)} == 0\n"
        f"and on {labels_of(SCOPE)}\n{over('max', SCOPE, _LEADS)} == 1",
        for_s=120,
        summary="Router {{ $labels.instance }} has no controller, others have",
        description="{{ $value | humanize }} controllers that lead are linked to it: it meets no new "
        "replica, and heeds no other router's urgent work.",
    )


def _no_standby(settings: AlertSettings) -> Alert:
    seen = f"max_over_time({_STANDBYS}[{duration(settings.standby_seen_s)}])"
    return Alert(
        name="ForebayNoStandby",
        severity=Severity.WARNING,
        expression=f"{over('max', SCOPE, _STANDBYS)} == 0\n"
        f"and on {labels_of(SCOPE)}\n{over('max', SCOPE, seen)} > 0\n"
        f"and on {labels_of(SCOPE)}\n{over('max', SCOPE, _LEADS)} == 1",
        for_s=300,
        summary="No controller stands by",
        description="{{ $value | humanize }} controllers stand by; one did within the last "
        f"{duration(settings.standby_seen_s)}. Should the one that leads end, there is none until Ray has started another.",
    )


def _growth(settings: AlertSettings) -> Alert:
    ahead = f"predict_linear({JOURNAL}[30m], {settings.journal_ahead_s})"
    return Alert(
        name="ForebayJournalGrowth",
        severity=Severity.WARNING,
        expression=f"{ahead} > {LIMIT}\nand\n{JOURNAL} > {settings.journal_part:g} * {LIMIT}",
        for_s=600,
        summary="The journal of router {{ $labels.instance }} grows",
        description="As it grows it has {{ $value | humanize1024 }}B of live requests in "
        f"{duration(settings.journal_ahead_s)}, more than its queues may hold: max_queued_bytes of all classes and models.",
    )


def _leak(settings: AlertSettings) -> Alert:
    by_class = "sum without (priority_class)"
    known = " - ".join((*(f"{by_class} ({series(metric)})" for metric in (QUEUED, IN_FLIGHT)), series(SUSPECTS)))
    return Alert(
        name="ForebayJournalLeak",
        severity=Severity.WARNING,
        expression=f"{series(JOURNAL_REQUESTS)} - {known} > {settings.journal_strays}",
        for_s=900,
        summary="Router {{ $labels.instance }} keeps requests for {{ $labels.model }} that are nowhere",
        description="{{ $value | humanize }} live requests are neither queued, nor on a replica, nor suspects; there should be "
        "none.",
    )
