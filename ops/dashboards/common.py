"""What several dashboards show alike.

Owns: those panels and queries. Imports the names of cluster.metrics. Invariant: one figure is asked for in one way, wherever it is
shown.
"""

from __future__ import annotations

from cluster import metrics
from cluster.metrics import Metric
from ops.dashboards.panels import SECONDS, Panel, Query, lines
from ops.dashboards.queries import gauge, quantile, sum_of

CLASS, OF_CLASS = "priority_class", "{{priority_class}}"
"""The label, and the legend that it makes."""
_PARTS = ((0.5, "p50"), (0.99, "p99"))


def quantiles(metric: Metric, label: str | None = None) -> list[Query]:
    """The median and the 99th percentile of a histogram, of each value of a label."""
    by, legend = ((), "") if label is None else ((label,), f"{{{{{label}}}}} ")
    return [Query(quantile(part, metric, *by), f"{legend}{name}") for part, name in _PARTS]


def latency(title: str, reading: str, metric: Metric, *, width: int = 8) -> Panel:
    """How long something took, by class."""
    return lines(title, reading, SECONDS, *quantiles(metric, CLASS), width=width)


def blocks_of_classes() -> Query:
    """KV blocks that each class holds, on all replicas that are chosen."""
    held = gauge(metrics.REPLICA_CLASS_BLOCKS, CLASS, "replica", over="max")
    return Query(sum_of(held, CLASS), OF_CLASS)
