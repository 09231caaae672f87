"""PromQL over Forebay's metrics.

Owns: how a query names a metric, its labels and the variables of a dashboard. Imports cluster.metrics, which alone knows
names and labels, and lists here only which series are not a model's. Invariants: a label that a metric does not have is
refused when the dashboards are made; no query has a fallback constant: where nothing is measured, a panel says so.
"""

from __future__ import annotations

from cluster import metrics
from cluster.metrics import MODEL_LABEL, Metric

JOB = "job"
"""Prometheus's own label of what it scrapes: tells several releases apart."""
LE = "le"
"""Prometheus's own label of a histogram's buckets."""
RATE_WINDOW = "$__rate_interval"
"""Grafana's: four scrapes at least, so that a rate always has two of them."""
RANGE = "$__range"
"""Grafana's: the whole time that is shown."""

_NOT_OF_A_MODEL = frozenset(
    {
        metrics.TURNED_AWAY,
        metrics.CONTROLLER_LEADS,
        metrics.CONTROLLER_STANDBYS,
        metrics.CONTROLLER_GENERATION,
        metrics.CONTROLLER_REFUSED,
        metrics.TICK,
        metrics.TICK_DECISIONS,
    }
)
"""Of a whole router or controller. What a replica shows by itself names its model in a label of its own."""
_MODEL_NAME = "model_name"
_FILTERED = ("priority_class", "replica")
"""Labels with a variable of the same name, which every metric that has the label is filtered by."""


def model_label(metric: Metric) -> str | None:
    """The label that says which model's a series is; None where it is of all."""
    if _MODEL_NAME in metric.labels:
        return _MODEL_NAME
    return None if metric in _NOT_OF_A_MODEL else MODEL_LABEL


def selector(metric: Metric, suffix: str = "", *, every: str = "", **where: str) -> str:
    """The series of a metric that the dashboard's variables choose.

    Args:
        suffix: What Prometheus puts behind the name: `_total`, `_bucket`, `_sum`, `_count`.
        every: A label of which all values are meant, whatever is chosen.
        where: Values that labels must have; one that begins with `~` is a regular expression.

    Raises:
        ValueError: the metric does not have such a label.
    """
    model = model_label(metric)
    matchers = [f'{JOB}=~"${JOB}"']
    if model is not None and every != MODEL_LABEL:
        matchers.append(f'{model}=~"${MODEL_LABEL}"')
    heeded = [label for label in _FILTERED if label in metric.labels and label != every and label not in where]
    matchers += [f'{label}=~"${label}"' for label in heeded]
    for label, value in where.items():
        _check(metric, label)
        matchers.append(f'{label}=~"{value[1:]}"' if value.startswith("~") else f'{label}="{value}"')
    return f"{metric.name}{suffix}{{{', '.join(matchers)}}}"


def gauge(metric: Metric, *by: str, over: str = "sum", every: str = "", **where: str) -> str:
    """What a gauge says, put together by labels.

    Args:
        by: Labels that are kept; none makes one series.
        over: How the rest is put together: `sum` where each router has a part of it, `max` where each says the same.
        every, where: As of `selector`.
    """
    return _over(over, metric, by, selector(metric, every=every, **where))


def rate(
    metric: Metric,
    *by: str,
    suffix: str = "_total",
    window: str = RATE_WINDOW,
    over: str = "sum",
    every: str = "",
    **where: str,
) -> str:
    """How fast a counter grows, per second; arguments as those of `gauge`."""
    return _over(over, metric, by, f"rate({selector(metric, suffix, every=every, **where)}[{window}])")


def per_minute(metric: Metric, *by: str, over: str = "sum", **where: str) -> str:
    """The same per minute, for what happens seldom."""
    return f"60 * {rate(metric, *by, over=over, **where)}"


def increase(metric: Metric, *by: str, over: str = "sum", **where: str) -> str:
    """By how much a counter has grown in the whole time that is shown."""
    return _over(over, metric, by, f"increase({selector(metric, '_total', **where)}[{RANGE}])")


def quantile(part: float, metric: Metric, *by: str) -> str:
    """A quantile of a histogram, from 0 to 1."""
    return f"histogram_quantile({part:g}, {rate(metric, *by, LE, suffix='_bucket')})"


def mean(metric: Metric, *by: str) -> str:
    """The mean of what a histogram has seen."""
    return ratio(rate(metric, *by, suffix="_sum"), rate(metric, *by, suffix="_count"))


def sum_of(expression: str, *by: str) -> str:
    """Over what was put together by more labels before, so that what each router says counts once."""
    return f"sum by ({', '.join(by)}) ({expression})" if by else f"sum({expression})"


def ratio(part: str, whole: str) -> str:
    """Both of the same labels. Nothing where the whole is 0."""
    return f"{part} / {whole}"


def _over(how: str, metric: Metric, by: tuple[str, ...], expression: str) -> str:
    for label in by:
        _check(metric, label)
    return f"{how} by ({', '.join(by)}) ({expression})" if by else f"{how}({expression})"


def _check(metric: Metric, label: str) -> None:
    if label not in {*metric.labels, model_label(metric), JOB, LE}:
        raise ValueError(f"{metric.name} has no label {label!r}, only {', '.join(metric.labels) or 'none'}")
