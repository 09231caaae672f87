"""Writes ops/docs/metrics.md: every metric, by who shows it.

    python -m ops.metrics_page

Owns: that page, which is made of what the processes register and of cluster/metrics.py. A test holds page and code together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric as Family

from cluster import metrics as names
from cluster.metrics import Metric
from cluster.ports import EngineProgress
from cluster.types import EngineLoad, Outcome, PreemptionMeans, RefusalReason
from deployments.exposition import ControllerFigures, Kind, ReplicaFigures
from deployments.kube.figures import Figures, KubernetesFigures
from router.errors import AT_THE_DOOR
from router.metrics_sink import ADMITTED, QUEUED, REFUSED_AT_ARRIVAL, ControllerMetrics, DoorMetrics, RouterMetrics
from router.moving import MoveOutcome
from router.outliers import Fault
from router.proposals import Verdict
from router.retries import Retry
from router.returns import RETURNS
from router.view import Condition

PAGE = Path(__file__).parent / "docs" / "metrics.md"

_HEAD = """\
# Metrics

Made by `python -m ops.metrics_page` of cluster/metrics.py; a test fails where it is not as the code has it.

Each process shows what it knows at `/metrics`, in Prometheus' text form:

- a **router** beside its API (a key is asked for where `router.auth` is `keys`, unless `router.open_metrics` says otherwise);
- a **replica** and a **controller** on ports of their own, which the profile names: `metrics.replica_port` and
  `metrics.controller_port`. Without them they listen nowhere. 0 takes a free port, which the log names. Of a machine with
  several replicas each takes the first free one of `metrics.replica_ports` ports from `metrics.replica_port` on; one that finds
  none shows nothing until one is free.

Replicas and controllers answer one scrape at a time, at most 20 a second: whoever asks, however often or slowly, delays no
step. A router's gauges are computed when it is asked.

A counter `x` is shown as `x_total`, a histogram as `x_bucket`, `x_sum` and `x_count`. Times are in seconds, *tokens* are the
model's, *weighted* ones count a prompt's and an output's by `router.prompt_token_weight` and `router.output_token_weight`.
Every value of a label that comes from the profile or from the table at the end is there from the start, at 0, in all
counters and in the histograms of requests: a rate sees the first event.
"""
_VALUES = """
## Values of labels

`priority_class` is one of `router.classes`, `tenant` one of `router.tenants` or `other`, `replica` one of the roster and gone
with it, `model` and `model_name` one of the profile's.

| label | of | values |
| --- | --- | --- |
"""


_WATCH_ENDS = ("agreed", "gone", "failed")


class Shown(NamedTuple):
    """Who shows it."""

    title: str
    said: str
    registry: CollectorRegistry


class Values(NamedTuple):
    """What a label can be."""

    label: str
    metrics: tuple[Metric, ...]
    values: tuple[str, ...]


def all_shown() -> tuple[Shown, ...]:
    """As each kind of process registers it."""
    core, router, replica, controller, kubernetes = (CollectorRegistry() for _ in range(5))
    RouterMetrics(core)
    DoorMetrics(router)
    ControllerMetrics(router)
    load = EngineLoad(slots_total=1, blocks_total=1, blocks_free=1, block_size_tokens=1)
    replica.register(ReplicaFigures("", lambda: EngineProgress(load=load, alive=True, step_age_s=None)))
    ControllerFigures(controller)
    kubernetes.register(KubernetesFigures(lambda: Figures(0.0, dict.fromkeys(_WATCH_ENDS, 0), 0, False, 0, 0)))
    return (
        Shown(
            "A router, of each model", f"All have the label `{names.MODEL_LABEL}` beside those that are named.", core
        ),
        Shown("A router, of itself", "", router),
        Shown(
            "A replica",
            "The names of vLLM's server, so that gateways and dashboards made for it work, and ours.",
            replica,
        ),
        Shown("A controller", "", controller),
        Shown("A controller that watches Kubernetes' nodes", "", kubernetes),
    )


def all_values() -> tuple[Values, ...]:
    preemptions = names.PREEMPTIONS
    return (
        Values("outcome", (names.REQUESTS,), _each(Outcome)),
        Values("decision", (names.ADMISSIONS,), (ADMITTED, QUEUED, *REFUSED_AT_ARRIVAL)),
        Values("decision", (names.DECISION,), ("arrival", "dispatch")),
        Values("attained", (names.SLO_FIRST_TOKENS,), ("true", "false")),
        Values("cause", (preemptions,), ("urgent", "kv_full")),
        Values("means", (preemptions,), _each(PreemptionMeans)),
        Values("outcome", (names.RETRIES,), _each(Retry)),
        Values("outcome", (names.MOVES,), _each(MoveOutcome)),
        Values("outcome", (names.PROPOSALS,), _each(Verdict)),
        Values("reason", (names.REFUSALS,), _each(RefusalReason)),
        Values("reason", (names.CONTINUED,), _each(RETURNS)),
        Values("fault", (names.EJECTIONS,), _each(Fault)),
        Values("status", (names.TURNED_AWAY,), tuple(dict.fromkeys(str(status) for status, _ in AT_THE_DOOR))),
        Values("code", (names.TURNED_AWAY,), tuple(code for _, code in AT_THE_DOOR)),
        Values("kind", (names.FENCED,), ("stale", "repeat")),
        Values("condition", (names.REPLICAS,), _each(Condition)),
        Values("figure", (names.SCALE,), ("wanted", *names.SCALE_FIGURES)),
        Values("kind", (names.TICK_DECISIONS,), _each(Kind)),
        Values("ended", (names.KUBERNETES_WATCHES,), _WATCH_ENDS),
        Values("outcome", (names.KUBERNETES_EVENTS,), ("written", "dropped")),
    )


def _each(values: Iterable[StrEnum]) -> tuple[str, ...]:
    return tuple(value.value for value in values)


def page() -> str:
    known = {metric.name: metric for metric in vars(names).values() if isinstance(metric, Metric)}
    parts = [_HEAD]
    for title, said, registry in all_shown():
        parts.append(f"\n## {title}\n\n{said + 2 * chr(10) if said else ''}| name | kind | labels | meaning |\n")
        parts.append("| --- | --- | --- | --- |\n")
        parts += [_row(family, known[family.name]) for family in _in_order(registry, known)]
    parts.append(_VALUES)
    for label, metrics, values in all_values():
        parts.append(f"| `{label}` | {_code(m.name for m in metrics)} | {_code(values)} |\n")
    return "".join(parts)


def _in_order(registry: CollectorRegistry, known: dict[str, Metric]) -> Iterator[Family]:
    """As cluster/metrics.py has them."""
    families = {family.name: family for family in registry.collect()}
    return (families[name] for name in known if name in families)


def _row(family: Family, metric: Metric) -> str:
    return f"| `{metric.name}` | {family.type} | {_code(metric.labels)} | {metric.help} |\n"


def _code(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
