"""How a controller stands with Kubernetes, as metrics.

Owns: these series. Imports the names and the metrics library. Invariant: read in another thread than the controller's, so
only what changes at once is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from cluster import metrics as names


class Figures(NamedTuple):
    watch_age_s: float | None
    watches: Mapping[str, int]
    """By how they ended."""
    nodes_going: int
    lease_held: bool
    events_written: int
    events_dropped: int


class KubernetesFigures(Collector):
    """Asks `figures` whenever it is asked."""

    def __init__(self, figures: Callable[[], Figures]) -> None:
        self._figures = figures

    def collect(self) -> Iterable[Family]:
        figures = self._figures()
        events = {"written": figures.events_written, "dropped": figures.events_dropped}
        yield from _gauge(names.KUBERNETES_WATCH_AGE, figures.watch_age_s)
        yield from _gauge(names.KUBERNETES_NODES_GOING, figures.nodes_going)
        yield from _gauge(names.KUBERNETES_LEASE_HELD, figures.lease_held)
        yield from _counter(names.KUBERNETES_WATCHES, figures.watches)
        yield from _counter(names.KUBERNETES_EVENTS, events)


def _gauge(metric: names.Metric, value: float | None) -> Iterable[Family]:
    if value is not None:
        yield GaugeMetricFamily(metric.name, metric.help, value=value)


def _counter(metric: names.Metric, values: Mapping[str, int]) -> Iterable[Family]:
    family = CounterMetricFamily(metric.name, metric.help, labels=metric.labels)
    for label, value in values.items():
        family.add_metric((label,), value)
    yield family
