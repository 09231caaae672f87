"""How the traffic of each class is served, and whether it keeps what was promised to it.

Owns: the dashboard to begin with. Imports the objective and the burn rates of the alerts, which it draws as they judge.
"""

from __future__ import annotations

from cluster import metrics
from cluster.metrics import MODEL_LABEL
from ops.alerts.rules import duration
from ops.alerts.settings import OBJECTIVE
from ops.alerts.slo import FAST
from ops.dashboards.common import CLASS, OF_CLASS, latency
from ops.dashboards.frame import OBJECTIVE_VARIABLE, Dashboard, Row
from ops.dashboards.panels import (
    COUNT,
    REPLICAS,
    REQUESTS,
    REQUESTS_PER_S,
    SECONDS,
    SHARE,
    TIMES,
    TOKENS_PER_S,
    Query,
    Step,
    figure,
    lines,
)
from ops.dashboards.queries import RATE_WINDOW, gauge, increase, rate, ratio, sum_of


def _part(attained: str, window: str = RATE_WINDOW) -> str:
    """Of the first tokens that there is an SLO for."""
    metric = metrics.SLO_FIRST_TOKENS
    return ratio(rate(metric, CLASS, window=window, attained=attained), rate(metric, CLASS, window=window))


def _burn(window: str) -> str:
    return f"{_part('false', window)} / (1 - ${OBJECTIVE_VARIABLE})"


_NOW = Row(
    "Now",
    (
        figure(
            "Controller",
            "1: every router is linked to a controller that leads. 0: one is not; it goes on alone, without gates and moves.",
            COUNT,
            Query(gauge(metrics.CONTROLLER_LEADS, over="min"), "leads"),
            steps=(Step(0, "red"), Step(1, "green")),
            runbook="ForebayControllerGone",
        ),
        figure(
            "Replicas that take work",
            "As the router that sees fewest says it.",
            REPLICAS,
            Query(sum_of(gauge(metrics.REPLICAS_READY, MODEL_LABEL, over="min")), "ready"),
            steps=(Step(0, "red"), Step(1, "green")),
            runbook="ForebayNoReplicaReady",
        ),
        figure("Running", "Requests on replicas now.", REQUESTS, Query(gauge(metrics.IN_FLIGHT), "in flight")),
        figure("Waiting", "Requests in the routers' queues now.", REQUESTS, Query(gauge(metrics.QUEUED), "queued")),
        figure("Output", "Tokens that clients are sent.", TOKENS_PER_S, Query(rate(metrics.TOKENS_OUT), "output")),
        figure(
            "First tokens in time",
            "Of the classes with an SLO, in the whole time that is shown; refused, expired and lost requests count as late.",
            SHARE,
            Query(
                ratio(increase(metrics.SLO_FIRST_TOKENS, attained="true"), increase(metrics.SLO_FIRST_TOKENS)),
                "in time",
            ),
            steps=(Step(0, "red"), Step(OBJECTIVE, "green")),
        ),
    ),
)
_TRAFFIC = Row(
    "Traffic",
    (
        lines(
            "Requests ended, by class",
            "What comes to an end, however it does. A gap between this and what arrives is the queue that grows.",
            REQUESTS_PER_S,
            Query(rate(metrics.REQUESTS, CLASS), OF_CLASS),
            stacked=True,
        ),
        lines(
            "Requests ended, by outcome",
            "`finished` is the good one, `cancelled` the client's own. What is rejected was refused at arrival; what expired "
            "had waited in vain.",
            REQUESTS_PER_S,
            Query(rate(metrics.REQUESTS, "outcome"), "{{outcome}}"),
            stacked=True,
            runbook="ForebayRequestsFailing",
        ),
        lines(
            "Turned away at the door",
            "Answered with an error before a queue is reached, by status and code: no key, a limit, a wrong body.",
            REQUESTS_PER_S,
            Query(rate(metrics.TURNED_AWAY, "status", "code"), "{{status}} {{code}}"),
            stacked=True,
        ),
        lines(
            "Output tokens, by class",
            "The height is what the replicas make in all; batch is to take what the others leave.",
            TOKENS_PER_S,
            Query(rate(metrics.TOKENS_OUT, CLASS), OF_CLASS),
            stacked=True,
            width=12,
        ),
        lines(
            "Prompt tokens, by class",
            "Of accepted requests, whether computed or found in a cache.",
            TOKENS_PER_S,
            Query(rate(metrics.TOKENS_IN, CLASS), OF_CLASS),
            stacked=True,
            width=12,
        ),
    ),
)
_LATENCY = Row(
    "Latency, by class (p50 dashed)",
    (
        latency(
            "Time to first token", "From arrival to the first token that the client is sent.", metrics.TTFT, width=12
        ),
        latency(
            "Time per output token",
            "Of whole requests: from the first token to the end, over the tokens between. A preemption or a move is in it.",
            metrics.TPOT,
            width=12,
        ),
        latency(
            "Between tokens",
            "Between two arrivals at the router of one request's tokens. The 99th percentile shows steps that prompts made "
            "long, preemptions and moves.",
            metrics.ITL,
            width=12,
        ),
        latency(
            "Whole request",
            "From arrival to the end of finished requests; it grows with their length.",
            metrics.E2E,
            width=12,
        ),
    ),
)
_SLO = Row(
    "SLO of the first token",
    (
        lines(
            "In time, by class",
            "The part of first tokens that came within the class's target. Classes without a target are absent.",
            SHARE,
            Query(_part("true"), OF_CLASS),
            most=1,
            runbook="ForebaySloBurnSlow",
        ),
        lines(
            "Burn rate, by class",
            "How fast the errors that the objective allows are spent: at 1 they last exactly as long as its period. The alert "
            "calls people above " + " or ".join(f"{burn.factor:g} over {duration(burn.long_s)}" for burn in FAST) + ".",
            TIMES,
            *(Query(_burn(duration(burn.long_s)), f"{OF_CLASS} {duration(burn.long_s)}") for burn in FAST),
            limits=[Step(burn.factor, "red") for burn in sorted(FAST, key=lambda burn: burn.factor)],
            runbook="ForebaySloBurnFast",
        ),
        lines(
            "Target, by class",
            "first_token_slo_s of the profile.",
            SECONDS,
            Query(gauge(metrics.SLO_FIRST_TOKEN_TARGET, CLASS, over="max"), OF_CLASS),
        ),
    ),
)

OVERVIEW = Dashboard(
    "overview",
    "Overview",
    "How each class is served, and whether it keeps its promise. Begin here.",
    (_NOW, _TRAFFIC, _LATENCY, _SLO),
)
