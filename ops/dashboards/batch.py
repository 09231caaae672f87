"""Work that nobody waits for: how much of it is done with what the others leave.

Owns: that dashboard. Imports the names of cluster.metrics. Invariant: it is of one class at first, whose name is `batch`.
"""

from __future__ import annotations

from cluster import metrics
from ops.dashboards.common import CLASS, OF_CLASS, blocks_of_classes, latency
from ops.dashboards.frame import Dashboard, Row
from ops.dashboards.panels import (
    BLOCKS,
    PER_MINUTE,
    REQUESTS,
    REQUESTS_PER_S,
    SECONDS,
    SHARE,
    TIMES,
    TOKENS_PER_S,
    Query,
    figure,
    lines,
)
from ops.dashboards.queries import gauge, mean, per_minute, quantile, rate, ratio

_SECONDS_LEFT = ratio(gauge(metrics.QUEUED_SERVICE, CLASS), gauge(metrics.DRAIN, CLASS))
_SHARE_OF_TOKENS = ratio(rate(metrics.TOKENS_OUT), rate(metrics.TOKENS_OUT, every=CLASS))
_FINISHED = ratio(rate(metrics.REQUESTS, CLASS, outcome="finished"), rate(metrics.REQUESTS, CLASS))

_NOW = Row(
    "Now",
    (
        figure("Output", "Tokens that are made.", TOKENS_PER_S, Query(rate(metrics.TOKENS_OUT), "output")),
        figure("Part of all output", "The rest is of other classes.", SHARE, Query(_SHARE_OF_TOKENS, "part")),
        figure("Waiting", "Requests in the routers' queues.", REQUESTS, Query(gauge(metrics.QUEUED), "queued")),
        figure("Running", "Requests on replicas.", REQUESTS, Query(gauge(metrics.IN_FLIGHT), "in flight")),
        figure(
            "Until the queue is served",
            "The work that waits, over the drain rate of now; nothing where no drain has been measured.",
            SECONDS,
            Query(f"max({_SECONDS_LEFT})", "left"),
        ),
        figure(
            "Finished",
            "Of what ended; the rest was refused, expired, or left by its client.",
            SHARE,
            Query(ratio(rate(metrics.REQUESTS, outcome="finished"), rate(metrics.REQUESTS)), "finished"),
        ),
    ),
)
_DONE = Row(
    "What is done",
    (
        lines(
            "Output tokens",
            "It falls where more urgent work comes, and takes what that leaves.",
            TOKENS_PER_S,
            Query(rate(metrics.TOKENS_OUT, CLASS), OF_CLASS),
            stacked=True,
        ),
        lines(
            "Part of all output over time",
            "Of the tokens of all classes.",
            SHARE,
            Query(_SHARE_OF_TOKENS, "part"),
            most=1,
        ),
        lines(
            "Requests ended, by outcome",
            "Those that are refused are to be sent again after the time that their answer says.",
            REQUESTS_PER_S,
            Query(rate(metrics.REQUESTS, "outcome"), "{{outcome}}"),
            stacked=True,
        ),
        lines(
            "Finished, of what ended",
            "Near 1 where clients pace themselves.",
            SHARE,
            Query(_FINISHED, OF_CLASS),
            most=1,
        ),
        latency("Whole request (p50 dashed)", "From arrival to the end; it grows with its length.", metrics.E2E),
        lines(
            "KV blocks that it holds",
            "On all replicas that are chosen: what more urgent work can have at once.",
            BLOCKS,
            blocks_of_classes(),
            stacked=True,
        ),
    ),
)
_WAITING = Row(
    "What waits, and what gives way",
    (
        lines(
            "Waiting over time",
            "Requests in the routers' queues.",
            REQUESTS,
            Query(gauge(metrics.QUEUED, CLASS), OF_CLASS),
        ),
        lines(
            "The one that waits longest",
            "Beyond the class's longest wait it ends unserved.",
            SECONDS,
            Query(gauge(metrics.QUEUED_OLDEST, CLASS, over="max"), OF_CLASS),
            runbook="ForebayStarvation",
        ),
        latency(
            "Wait until a replica is given it (p50 dashed)", "From arrival to the first dispatch.", metrics.QUEUE_WAIT
        ),
        lines(
            "Preemptions of a request",
            "The mean and the 99th percentile, from its arrival to its end. Beyond a few, too much is computed again.",
            TIMES,
            Query(mean(metrics.PREEMPTIONS_PER_REQUEST, CLASS), f"{OF_CLASS} mean"),
            Query(quantile(0.99, metrics.PREEMPTIONS_PER_REQUEST, CLASS), f"{OF_CLASS} p99"),
            runbook="ForebayPreemptionThrash",
        ),
        lines(
            "Preemptions, by means",
            "`pause` and `swap` keep what was computed.",
            PER_MINUTE,
            Query(per_minute(metrics.PREEMPTIONS, "means"), "{{means}}"),
            stacked=True,
        ),
        lines(
            "Out of the minimum share",
            "Attempts that went before more urgent work that waited: what keeps the class from starving.",
            PER_MINUTE,
            Query(per_minute(metrics.SHARED, CLASS), OF_CLASS),
        ),
    ),
)

BATCH = Dashboard(
    "batch",
    "Batch",
    "How much batch work is done with what the others leave, what waits, and how often it gives way. Another class may be "
    "chosen above.",
    (_NOW, _DONE, _WAITING),
    of_class="batch",
)
