"""ops/docs/metrics.md, cluster/metrics.py and what processes register are one."""

from __future__ import annotations

import ast
from collections import Counter
from itertools import product
from pathlib import Path

import router
from cluster import metrics as names
from cluster.config import DEFAULT_CLASSES, RouterConfig, TenantConfig
from cluster.metrics import Metric
from ops.metrics_page import PAGE, all_shown, all_values, page
from router.errors import AT_THE_DOOR, ApiError
from tests.unit.fake_replica import Bench

KNOWN = {name: metric for name, metric in vars(names).items() if isinstance(metric, Metric)}


def test_the_page_is_what_the_code_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m ops.metrics_page"


def test_every_name_stands_once_and_is_shown_by_one_kind_of_process_and_nothing_else_is() -> None:
    assert len({metric.name for metric in KNOWN.values()}) == len(KNOWN)
    shown = Counter(family.name for process in all_shown() for family in process.registry.collect())
    assert shown == Counter(metric.name for metric in KNOWN.values())


def test_labels_whose_values_are_named_are_labels_of_these_metrics() -> None:
    assert all(label in metric.labels for label, metrics, _ in all_values() for metric in metrics)


def test_every_counter_is_there_at_0_for_all_that_it_can_count_before_anything_happens() -> None:
    """Those of a replica are there when it is."""
    classes = tuple(c.model_copy(update={"first_token_slo_s": 1.0}) for c in DEFAULT_CLASSES)
    bench = Bench(RouterConfig(classes=classes, tenants=(TenantConfig(name="named"),)))
    values = {(label, metric.name): told for label, metrics, told in all_values() for metric in metrics}
    of_profile = {
        "priority_class": tuple(c.name for c in classes),
        "tenant": ("named", names.OTHER_TENANTS),
    }
    core, *others = (process.registry for process in all_shown())
    known = {metric.name: metric for metric in KNOWN.values()}
    shown = {f.name: f for registry in (bench.registry, *others) for f in registry.collect() if f.type == "counter"}
    assert shown.keys() == {f.name for registry in (core, *others) for f in registry.collect() if f.type == "counter"}
    for name, family in shown.items():
        labels = known[name].labels
        if "replica" in labels:
            continue
        expected = set(product(*(of_profile.get(label) or values[label, name] for label in labels)))
        if known[name] is names.TURNED_AWAY:  # a code goes with one status
            expected = {(str(status), code) for status, code in AT_THE_DOOR}
        totals = [sample for sample in family.samples if sample.name == f"{name}_total"]
        assert {tuple(sample.labels[label] for label in labels): sample.value for sample in totals} == dict.fromkeys(
            expected, 0
        ), name


NOT_AT_THE_DOOR = {
    (403, "not_an_operator"),
    (404, "replica_not_found"),
    (404, "request_not_found"),
    (431, "headers_too_large"),
    (500, "internal_error"),
    (503, "no_controller"),
    (503, "not_ready"),
}
"""Errors that are no answer to a request for tokens, or come before it is one, or are the server's own fault."""


def test_every_error_in_the_router_s_code_is_one_that_is_counted_from_the_start_or_is_named_here() -> None:
    found = set[tuple[int, str]]()
    for path in Path(router.__file__).parent.glob("*.py"):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == ApiError.__name__:
                status = ast.literal_eval(call.args[0])
                code = next((ast.literal_eval(k.value) for k in call.keywords if k.arg == "code"), None)
                found.add((status, ApiError(status, "", code=code).word))
    assert found == set(AT_THE_DOOR) | NOT_AT_THE_DOOR
