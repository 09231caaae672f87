"""What was decided about work that had its place already: moved, preempted, continued; and by whom.

Owns: that dashboard. Imports the names of cluster.metrics.
"""

from __future__ import annotations

from cluster import metrics
from ops.dashboards.common import CLASS, OF_CLASS, quantiles
from ops.dashboards.frame import Dashboard, Row
from ops.dashboards.panels import COUNT, PER_MINUTE, REPLICAS, SECONDS, TIMES, TOKENS_PER_S, Query, Step, lines
from ops.dashboards.queries import gauge, per_minute

_MOVES = Row(
    "Moves, continuations and retries",
    (
        lines(
            "Moves, by outcome",
            "`moved` kept its keys and values. After `refused`, `called_off` and `ended` nothing was lost; `failed` went on from "
            "the journal.",
            PER_MINUTE,
            Query(per_minute(metrics.MOVES, "outcome"), "{{outcome}}"),
            stacked=True,
            width=6,
            runbook="ForebayMovesFailing",
        ),
        lines(
            "Pause of a move (p50 dashed)",
            "How long its client got nothing: from the word that it stands still to its first token elsewhere.",
            SECONDS,
            *quantiles(metrics.MOVE_PAUSE),
            width=6,
        ),
        lines(
            "Continued elsewhere, by reason",
            "Begun anew from the journal, with nothing lost, but computed again.",
            PER_MINUTE,
            Query(per_minute(metrics.CONTINUED, "reason"), "{{reason}}"),
            stacked=True,
            width=6,
        ),
        lines(
            "Errors of engines, by what was decided",
            "`retried`: tried once more, and unseen by its client unless `failed_again`. `budget_spent`: more of them fail than "
            "router.retry_share allows for.",
            PER_MINUTE,
            Query(per_minute(metrics.RETRIES, "outcome"), "{{outcome}}"),
            stacked=True,
            width=6,
            runbook="ForebayRequestsFailing",
        ),
    ),
)
_PREEMPTIONS = Row(
    "Preemptions",
    (
        lines(
            "Preemptions, by cause and means",
            "`urgent`: for a request that is more urgent; `kv_full`: for want of blocks. `pause` and `swap` are cheap, "
            "`recompute` is not.",
            PER_MINUTE,
            Query(per_minute(metrics.PREEMPTIONS, "cause", "means"), "{{cause}}, {{means}}"),
            stacked=True,
            runbook="ForebayPreemptionThrash",
        ),
        lines(
            "Preemptions, by class",
            "The least urgent are to be the ones.",
            PER_MINUTE,
            Query(per_minute(metrics.PREEMPTIONS, CLASS), OF_CLASS),
            stacked=True,
        ),
        lines(
            "Proposals of the controller",
            "What became of them: `moves` and `called_back` were followed, the others had been overtaken.",
            PER_MINUTE,
            Query(per_minute(metrics.PROPOSALS, "outcome"), "{{outcome}}"),
            stacked=True,
        ),
    ),
)
_CONTROLLER = Row(
    "Controller",
    (
        lines(
            "Linked to one that leads",
            "The router that is worst off. At 0 it goes on alone.",
            COUNT,
            Query(gauge(metrics.CONTROLLER_LEADS, over="min"), "leads"),
            Query(gauge(metrics.CONTROLLER_STANDBYS, over="min"), "standbys"),
            width=6,
            runbook="ForebayRouterAlone",
        ),
        lines(
            "Generation",
            "One more for each controller that takes the lead. Steps mean that it is replaced.",
            COUNT,
            Query(gauge(metrics.CONTROLLER_GENERATION, over="max"), "generation"),
            width=6,
            runbook="ForebayControllerGone",
        ),
        lines(
            "Tick (p50 dashed)",
            "Observe, decide, act. To be well below control.tick_s. From the controller's own port (metrics.controller_port).",
            SECONDS,
            *quantiles(metrics.TICK),
            width=6,
        ),
        lines(
            "Ordered and proposed, by kind",
            "From the controller's own port.",
            PER_MINUTE,
            Query(per_minute(metrics.TICK_DECISIONS, "kind"), "{{kind}}"),
            width=6,
        ),
        lines(
            "Of superseded controllers",
            "Messages that were not heeded. Some at a change of the lead, none else.",
            PER_MINUTE,
            Query(per_minute(metrics.CONTROLLER_REFUSED), "not heeded"),
        ),
        lines(
            "Deltas dropped and asked for again",
            "`stale` are of an attempt that is over, `repeat` came twice; gaps were asked for again. Fencing at work: no client "
            "sees them.",
            PER_MINUTE,
            Query(per_minute(metrics.FENCED, "kind"), "{{kind}}"),
            Query(per_minute(metrics.GAPS), "gaps"),
        ),
        lines(
            "Time that a decision takes (p50 dashed)",
            "Of a router: `arrival` is admission and placement of one request, `dispatch` a turn over what waits.",
            SECONDS,
            *quantiles(metrics.DECISION, "decision"),
        ),
    ),
)
_SCALE = Row(
    "Scale (models with `scale`) and predictions",
    (
        lines(
            "Replicas wanted, ready and filled",
            "`wanted` above `ready`: they are starting, or there is no room for them. `filled`: as many as all that runs and "
            "waits on replicas would fill.",
            REPLICAS,
            Query(gauge(metrics.SCALE, "model", over="max", figure="wanted"), "{{model}} wanted"),
            Query(gauge(metrics.REPLICAS_READY, "model", over="min"), "{{model}} ready"),
            Query(gauge(metrics.SCALE, "model", over="max", figure="occupied"), "{{model}} filled"),
            width=6,
        ),
        lines(
            "Demand and what one replica does",
            "Weighted tokens per second; wanted follows from the two.",
            TOKENS_PER_S,
            *(
                Query(gauge(metrics.SCALE, "model", over="max", figure=name), f"{{{{model}}}} {said}")
                for name, said in (("demand_per_s", "demand"), ("of_one_per_s", "of one replica"))
            ),
            width=6,
        ),
        lines(
            "Output over predicted, by class (p50 dashed)",
            "1: as long as was predicted at arrival. Far above, replicas run full; far below, they stay empty. From the "
            "replicas' own ports (metrics.replica_port).",
            TIMES,
            *quantiles(metrics.OUTPUT_OVER_PREDICTED, CLASS),
            limits=(Step(1, "green"),),
            width=6,
        ),
        lines(
            "Output over stated, by class (p50 dashed)",
            "Of clients that state the length they expect: 1 is as stated.",
            TIMES,
            *quantiles(metrics.OUTPUT_OVER_STATED, CLASS),
            limits=(Step(1, "green"),),
            width=6,
        ),
    ),
)

DECISIONS = Dashboard(
    "decisions",
    "Decisions",
    "What was moved, preempted and continued, why, and who decided it. Of one request, `forebay explain` says it with numbers.",
    (_MOVES, _PREEMPTIONS, _CONTROLLER, _SCALE),
)
