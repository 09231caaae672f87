"""The replicas: which of them serve, what runs on them, and what their memory is filled with.

Owns: that dashboard. Imports the names of cluster.metrics. Invariant: what every router says of a replica counts once.
"""

from __future__ import annotations

from cluster import metrics
from cluster.metrics import MODEL_LABEL
from ops.dashboards.common import CLASS, OF_CLASS, blocks_of_classes
from ops.dashboards.frame import Dashboard, Row
from ops.dashboards.panels import (
    BLOCKS,
    COUNT,
    PER_MINUTE,
    REPLICAS,
    REQUESTS,
    SECONDS,
    SHARE,
    TOKENS_PER_S,
    Query,
    Step,
    lines,
)
from ops.dashboards.queries import gauge, per_minute, rate, ratio, sum_of

_REPLICA = "replica"
_OF_REPLICA = "{{replica}}"
_LATE_S, _SILENT_S = 0.5, 1.0
"""Five times the age that a report has before the next; and silent_after_s as it is by default."""


def _of_replica(metric: metrics.Metric) -> str:
    return gauge(metric, _REPLICA, over="max")


def _rate_of_replica(metric: metrics.Metric) -> str:
    return rate(metric, _REPLICA, over="max")


_BLOCKS, _FREE = _of_replica(metrics.REPLICA_BLOCKS), _of_replica(metrics.REPLICA_BLOCKS_FREE)
_HIT, _RUN = (_rate_of_replica(m) for m in (metrics.REPLICA_PREFIX_HIT_TOKENS, metrics.REPLICA_PREFILL_TOKENS))

_STATE = Row(
    "State",
    (
        lines(
            "Replicas, by condition",
            "What the routers make of them; where they differ, the larger number. Only `routable` ones get new work.",
            REPLICAS,
            Query(sum_of(gauge(metrics.REPLICAS, "condition", MODEL_LABEL, over="max"), "condition"), "{{condition}}"),
            stacked=True,
        ),
        lines(
            "Age of the last report",
            "Replicas report ten times a second. Silent from router.silent_after_s on, when nothing new is sent there.",
            SECONDS,
            Query(_of_replica(metrics.REPLICA_REPORT_AGE), _OF_REPLICA),
            limits=(Step(_LATE_S, "orange"), Step(_SILENT_S, "red")),
            runbook="ForebayReportsStale",
        ),
        lines(
            "Lost with work on them",
            "Replicas that went without handing back what they had; it goes on elsewhere. Suspects ran on one as it died.",
            PER_MINUTE,
            Query(per_minute(metrics.ENGINE_DEATHS, MODEL_LABEL, over="max"), "{{model}}"),
            Query(gauge(metrics.SUSPECTS), "suspects now", COUNT),
            width=4,
            runbook="ForebayReplicaFlapping",
        ),
        lines(
            "Put out for faults",
            "By the fault that did it, and how many are out now. They are let in again by way of one request.",
            PER_MINUTE,
            Query(per_minute(metrics.EJECTIONS, "fault"), "{{fault}}"),
            Query(sum_of(gauge(metrics.REPLICAS_EJECTED, MODEL_LABEL, over="max")), "out now", COUNT),
            width=4,
            runbook="ForebayReplicasOut",
        ),
    ),
)
_LOAD = Row(
    "Load",
    (
        lines(
            "Running over slots",
            "At 1 every step serves as many as it can.",
            SHARE,
            Query(ratio(_of_replica(metrics.REPLICA_RUNNING), _of_replica(metrics.REPLICA_SLOTS)), _OF_REPLICA),
            width=6,
            most=1,
        ),
        lines(
            "Running",
            "Requests in the batch.",
            REQUESTS,
            Query(_of_replica(metrics.REPLICA_RUNNING), _OF_REPLICA),
            stacked=True,
            width=6,
        ),
        lines(
            "Waiting there",
            "Held and not running: preempted, or let in a moment ago. Work waits in the routers, not here.",
            REQUESTS,
            Query(_of_replica(metrics.REPLICA_WAITING), _OF_REPLICA),
            stacked=True,
            width=6,
        ),
        lines(
            "On replicas, by class",
            "Requests that were dispatched and have not ended.",
            REQUESTS,
            Query(gauge(metrics.IN_FLIGHT, CLASS), OF_CLASS),
            stacked=True,
            width=6,
        ),
    ),
)
_MEMORY = Row(
    "KV cache",
    (
        lines(
            "KV blocks in use",
            "Held by requests; what is only cached counts as free. Near 1 the less urgent are preempted.",
            SHARE,
            Query(f"1 - {ratio(_FREE, _BLOCKS)}", _OF_REPLICA),
            most=1,
            runbook="ForebayKvPressure",
        ),
        lines(
            "KV blocks, by class",
            "Held by running and paused requests on all replicas that are chosen.",
            BLOCKS,
            blocks_of_classes(),
            stacked=True,
        ),
        lines(
            "Cached",
            "The part of all blocks that is free and still holds a prefix that may be wanted again.",
            SHARE,
            Query(ratio(_of_replica(metrics.REPLICA_BLOCKS_CACHED), _BLOCKS), _OF_REPLICA),
            most=1,
        ),
        lines(
            "Prefix hits",
            "The part of prompt tokens that was found computed. It falls where replicas are many and prompts have nothing in "
            "common.",
            SHARE,
            Query(f"{_HIT} / ({_HIT} + {_RUN})", _OF_REPLICA),
            most=1,
        ),
        lines(
            "Prompt tokens that were run",
            "With what was computed again after a preemption or a loss. Padding is run for nobody, in padding modes alone.",
            TOKENS_PER_S,
            Query(_RUN, _OF_REPLICA),
            Query(_rate_of_replica(metrics.REPLICA_PADDING_TOKENS), "{{replica}} padding"),
            stacked=True,
        ),
        lines(
            "Room in host memory",
            "Blocks that preempted work may be swapped out to. At 0 it is computed again.",
            BLOCKS,
            Query(_of_replica(metrics.REPLICA_HOST_BLOCKS_FREE), _OF_REPLICA),
            width=4,
        ),
        lines(
            "Urgent work that had to wait",
            "No victim could be preempted again. To be 0.",
            PER_MINUTE,
            Query(f"60 * {_rate_of_replica(metrics.REPLICA_URGENT_BLOCKED)}", _OF_REPLICA),
            width=4,
            runbook="ForebayUrgentBlocked",
        ),
    ),
)
_SERVERS = Row(
    "As the replicas say it themselves (profile: metrics.replica_port)",
    (
        lines(
            "Running, by model",
            "Under the name that gateways and dashboards for model servers know.",
            REQUESTS,
            Query(gauge(metrics.SERVER_RUNNING, "model_name"), "{{model_name}}"),
        ),
        lines(
            "Waiting, by model",
            "Held and not running.",
            REQUESTS,
            Query(gauge(metrics.SERVER_WAITING, "model_name"), "{{model_name}}"),
        ),
        lines(
            "KV cache in use, by model",
            "Of the fullest replica.",
            SHARE,
            Query(gauge(metrics.SERVER_KV_USAGE, "model_name", over="max"), "{{model_name}}"),
            most=1,
        ),
    ),
)

REPLICAS_AND_KV = Dashboard(
    "replicas",
    "Replicas and KV",
    "Which replicas serve, what runs on them, and what fills their memory.",
    (_STATE, _LOAD, _MEMORY, _SERVERS),
)
