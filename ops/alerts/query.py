"""PromQL over the metrics of `cluster.metrics`, and over no others.

Owns: how a metric, a part of it and its labels become a selector, and the labels that alerts are told apart by. Pure.
Invariant: what is selected by is a label that the metric has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from cluster.metrics import MODEL_LABEL, Metric
from ops.alerts.rules import duration

SCOPE = ("namespace", "job")
"""What Prometheus knows a release by: several may be in one. A label that is not there is empty, and no harm."""
OF_ROUTER = (*SCOPE, "instance")
OF_MODEL = (*SCOPE, MODEL_LABEL)
OF_CLASS = (*OF_MODEL, "priority_class")
OF_REPLICA = (*OF_MODEL, "replica")


class Part(StrEnum):
    """What Prometheus adds to the name of what is no gauge."""

    GAUGE = ""
    TOTAL = "_total"
    COUNT = "_count"


@dataclass(frozen=True, slots=True)
class Not:
    """Any value but these."""

    values: tuple[str, ...]


Match = str | Sequence[str] | Not


def series(metric: Metric, part: Part = Part.GAUGE, /, **labels: Match) -> str:
    """Its selector, by a value, one of several, or none of several.

    Raises:
        ValueError: the metric has no such label.
    """
    if unknown := labels.keys() - {*metric.labels, MODEL_LABEL}:
        raise ValueError(f"{metric.name} has no label {', '.join(sorted(unknown))}; it has {', '.join(metric.labels)}")
    matchers = ",".join(f"{name}{_matcher(match)}" for name, match in labels.items())
    return f"{metric.name}{part}" + (f"{{{matchers}}}" if matchers else "")


def _matcher(match: Match) -> str:
    if isinstance(match, str):
        return f'="{match}"'
    sign, values = ("!~", match.values) if isinstance(match, Not) else ("=~", match)
    return f'{sign}"{"|".join(values)}"'


def labels_of(labels: Sequence[str]) -> str:
    return f"({', '.join(labels)})"


def over(function: str, labels: Sequence[str], expression: str) -> str:
    """`sum by (…) (expression)`."""
    return f"{function} by {labels_of(labels)} ({expression})"


def total_of(labels: Sequence[str], selector: str, window_s: int) -> str:
    """How much counters have risen in the last `window_s`, all routers together."""
    return over("sum", labels, f"increase({selector}[{duration(window_s)}])")


def part_of(labels: Sequence[str], some: str, every: str, window_s: int, *, above: float, least: int) -> str:
    """Of the counters `every`, the part that is `some`, where it is above a bound and is not just one or two.

    Args:
        above: The bound. It may be more than 1 where `some` are counted otherwise than `every`.
        least: So many of `some` say something.
    """
    counted = total_of(labels, some, window_s)
    return (
        f"{counted}\n/\n{total_of(labels, every, window_s)} > {above:g}\n"
        f"and on {labels_of(labels)}\n{counted} >= {least}"
    )
