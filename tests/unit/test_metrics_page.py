"""ops/docs/metrics.md, cluster/metrics.py and what processes register are one."""

from __future__ import annotations

from collections import Counter

from cluster import metrics as names
from cluster.metrics import Metric
from ops.metrics_page import PAGE, all_shown, all_values, page

KNOWN = {name: metric for name, metric in vars(names).items() if isinstance(metric, Metric)}


def test_the_page_is_what_the_code_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m ops.metrics_page"


def test_every_name_stands_once_and_is_shown_by_one_kind_of_process_and_nothing_else_is() -> None:
    assert len({metric.name for metric in KNOWN.values()}) == len(KNOWN)
    shown = Counter(family.name for process in all_shown() for family in process.registry.collect())
    assert shown == Counter(metric.name for metric in KNOWN.values())


def test_labels_whose_values_are_named_are_labels_of_these_metrics() -> None:
    assert all(label in metric.labels for label, metrics, _ in all_values() for metric in metrics)
