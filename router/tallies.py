"""Histograms that are counted without a metrics library, as one that Prometheus reads.

Owns: that translation, when it is asked for. Imports the names and the counts. Invariant: counting into them takes no lock
and looks no label up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from cluster.metrics import Metric
from cluster.tally import Snapshot


class Tallies(Collector):
    """One family. Register it where the others are."""

    def __init__(self, metric: Metric, read: Callable[[], Mapping[tuple[str, ...], Snapshot]]) -> None:
        """`read`: what there is to show, by the values of the metric's labels."""
        self._metric = metric
        self._read = read

    def collect(self) -> Iterable[Family]:
        family = HistogramMetricFamily(self._metric.name, self._metric.help, labels=self._metric.labels)
        for labels, (bounds, counts, total) in self._read().items():
            ends = (*map(floatToGoString, bounds), "+Inf")
            buckets = list(zip(ends, accumulate(counts), strict=True))
            family.add_metric(labels, buckets=buckets, sum_value=total)
        yield family
