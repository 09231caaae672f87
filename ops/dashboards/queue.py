"""What waits in the routers, who is let in before whom, and what is refused.

Owns: that dashboard. Imports the names of cluster.metrics.
"""

from __future__ import annotations

from cluster import metrics
from ops.dashboards.common import CLASS, OF_CLASS, latency
from ops.dashboards.frame import Dashboard, Row
from ops.dashboards.panels import (
    BYTES,
    COUNT,
    PER_MINUTE,
    REQUESTS,
    REQUESTS_PER_S,
    SECONDS,
    TOKENS,
    TOKENS_PER_S,
    Query,
    lines,
)
from ops.dashboards.queries import gauge, per_minute, rate

_REFUSED = "~rejected_.*|expired_in_queue"

_QUEUE = Row(
    "Queue",
    (
        lines(
            "Waiting, by class",
            "Requests in the queues of all routers. Batch that waits is spare work; interactive that waits is too little room.",
            REQUESTS,
            Query(gauge(metrics.QUEUED, CLASS), OF_CLASS),
            stacked=True,
        ),
        lines(
            "The one that waits longest, by class",
            "0 where none waits. Near the class's longest wait, requests are about to expire.",
            SECONDS,
            Query(gauge(metrics.QUEUED_OLDEST, CLASS, over="max"), OF_CLASS),
            runbook="ForebayQueueWaitLong",
        ),
        latency(
            "Wait until a replica is given it (p50 dashed)", "From arrival to the first dispatch.", metrics.QUEUE_WAIT
        ),
        lines(
            "Work that waits, by class",
            "What serving the queue is expected to take, in weighted tokens: over the drain rate, how long it will take.",
            TOKENS,
            Query(gauge(metrics.QUEUED_SERVICE, CLASS), OF_CLASS),
            stacked=True,
        ),
        lines(
            "Drain rate, by class",
            "Weighted tokens of work that left the queue per second in which something waited. It is what waits are predicted "
            "by; absent until it has been measured.",
            TOKENS_PER_S,
            Query(gauge(metrics.DRAIN, CLASS), OF_CLASS),
        ),
        lines(
            "Bytes that wait, by class",
            "Bounded for each class by its max_queued_bytes.",
            BYTES,
            Query(gauge(metrics.QUEUED_BYTES, CLASS), OF_CLASS),
            stacked=True,
        ),
    ),
)
_ADMISSION = Row(
    "Admission",
    (
        lines(
            "Decided at arrival",
            "`admitted` begins at once, `queued` waits, the others are refused, and why.",
            REQUESTS_PER_S,
            Query(rate(metrics.ADMISSIONS, "decision"), "{{decision}}"),
            stacked=True,
        ),
        lines(
            "Refused or expired, by class",
            "To be expected of batch under load. Of interactive it means that there are too few replicas.",
            REQUESTS_PER_S,
            Query(rate(metrics.REQUESTS, CLASS, "outcome", outcome=_REFUSED), "{{priority_class}} {{outcome}}"),
            stacked=True,
            runbook="ForebayRefusalsHigh",
        ),
        lines(
            "Replicas that refused an attempt",
            "The request keeps its place and goes elsewhere. Many that are `full` mean that routers overrate what is free.",
            PER_MINUTE,
            Query(per_minute(metrics.REFUSALS, "reason"), "{{reason}}"),
            stacked=True,
        ),
    ),
)
_FAIRNESS = Row(
    "Fairness",
    (
        lines(
            "Waiting, by tenant",
            "Tenants that the profile does not name are one, `other`.",
            REQUESTS,
            Query(gauge(metrics.TENANT_QUEUED, "tenant"), "{{tenant}}"),
            stacked=True,
        ),
        lines(
            "Service, by tenant",
            "Weighted tokens that each was charged for. Of tenants that wait in one class it is as their weights.",
            TOKENS_PER_S,
            Query(rate(metrics.SERVED, "tenant"), "{{tenant}}"),
            stacked=True,
        ),
        lines(
            "Out of the minimum share, by class",
            "Attempts that went before more urgent work that waited. None while a class waits long: it starves.",
            PER_MINUTE,
            Query(per_minute(metrics.SHARED, CLASS), OF_CLASS),
            stacked=True,
            runbook="ForebayStarvation",
        ),
    ),
)
_GATES = Row(
    "Gates and journal",
    (
        lines(
            "Gate shut, by class",
            "1 where a router keeps the class back for more urgent work that waits on another.",
            COUNT,
            Query(gauge(metrics.GATE_SHUT, CLASS, over="max"), OF_CLASS),
            width=6,
            most=1,
        ),
        lines(
            "Held by a gate, by class",
            "Requests that a gate kept back, so that the order of the fleet is one.",
            PER_MINUTE,
            Query(per_minute(metrics.GATE_HELD, CLASS), OF_CLASS),
            width=6,
        ),
        lines(
            "Journal",
            "Live requests that routers could continue elsewhere. It follows the load; one that only grows is a fault.",
            REQUESTS,
            Query(gauge(metrics.JOURNAL_REQUESTS), "requests"),
            width=6,
            runbook="ForebayJournalLeak",
        ),
        lines(
            "Bytes of the journal",
            "What its requests were charged for, with what they emitted; and what all queues may hold.",
            BYTES,
            Query(gauge(metrics.JOURNAL_BYTES), "bytes"),
            Query(gauge(metrics.QUEUED_BYTES_LIMIT), "queues, at most"),
            width=6,
            runbook="ForebayJournalGrowth",
        ),
    ),
)

QUEUE = Dashboard(
    "queue",
    "Queue and fairness",
    "What waits, who goes first, and what is refused. A class that waits while less urgent work runs is a fault: ask "
    "`forebay explain` of one of its requests.",
    (_QUEUE, _ADMISSION, _FAIRNESS, _GATES),
)
