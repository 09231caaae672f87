"""The laws of the dashboards as they are rendered: the files are the code's, every panel can be read, and every query asks for what
there is. That queries return data is tested against a live Prometheus, in tests/e2e/test_dashboards.py."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster import metrics
from cluster.metrics import MODEL_LABEL, Metric
from ops.alerts.catalog import all_alerts
from ops.alerts.settings import RUNBOOKS, AlertSettings
from ops.dashboards import __main__ as command
from ops.dashboards import render
from ops.dashboards.panels import CLASS_COLOURS
from ops.dashboards.queries import gauge, quantile, selector
from tests.prometheus import PROMTOOL, needs_prometheus

DOCUMENTS = {one.name: render.document(one) for one in render.DASHBOARDS}
METRICS = {metric.name: metric for metric in vars(metrics).values() if isinstance(metric, Metric)}
NOT_SHOWN = {
    metrics.SERVER_CACHE.name: "its figures are labels, for gateways; the blocks are shown as they are used"
} | {
    metric.name: "a controller shows it only where it watches Kubernetes' nodes, which no test's line has to look at"
    for name, metric in vars(metrics).items()
    if name.startswith("KUBERNETES_")
}
SUFFIX = re.compile(r"_(total|bucket|sum|count)$")
SELECTOR = re.compile(r"([a-z0-9_:]+)\{([^}]*)\}")


def panels(*, of: str | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, document in DOCUMENTS.items():
        if of in {None, name}:
            yield from ((name, panel) for panel in document["panels"] if panel["type"] != "row")


def expressions() -> list[str]:
    return [target["expr"] for _, panel in panels() for target in panel["targets"]]


def selectors() -> Iterator[tuple[Metric, str, list[str]]]:
    """Each metric that is asked for, what is behind its name, and the labels that it is selected by."""
    for expression in expressions():
        for name, matchers in SELECTOR.findall(expression):
            bare = name if name in METRICS else SUFFIX.sub("", name)
            yield METRICS[bare], name.removeprefix(bare), re.findall(r"(\w+)(?:=~|=)\"", matchers)


def test_the_files_in_the_chart_are_what_the_code_renders() -> None:
    assert render.differing() == [], "run python -m ops.dashboards"


def test_a_file_that_is_changed_missing_or_too_many_is_told_and_put_right(tmp_path: Path) -> None:
    names = sorted(render.rendered())
    assert render.differing(tmp_path) == render.write(tmp_path) == names
    assert render.write(tmp_path) == []
    (tmp_path / names[0]).write_text("{}")
    (tmp_path / names[1]).unlink()
    (tmp_path / "older.json").write_text("{}")
    assert render.differing(tmp_path) == sorted([*names[:2], "older.json"])
    render.write(tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == render.rendered()


def test_check_fails_where_a_file_is_not_up_to_date_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "FOLDER", tmp_path)
    monkeypatch.setattr(sys, "argv", ["ops.dashboards", "--check"])
    assert command.main() == 1
    assert "queue.json: is not up to date" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    render.write(tmp_path)
    assert command.main() == 0


def test_addresses_stay_and_nothing_is_in_them_that_one_grafana_gave() -> None:
    assert [document["uid"] for document in DOCUMENTS.values()] == [
        "forebay-overview",
        "forebay-queue",
        "forebay-replicas",
        "forebay-decisions",
        "forebay-batch",
    ]
    for name, document in DOCUMENTS.items():
        assert not {"id", "version"} & document.keys()
        numbers = [panel["id"] for panel in document["panels"]]
        assert numbers == list(range(1, len(numbers) + 1)), "a link to a panel stays one"
        assert document == json.loads((render.FOLDER / f"{name}.json").read_text())


def test_every_panel_says_what_it_shows_in_what_unit_and_what_its_series_are() -> None:
    for name, document in DOCUMENTS.items():
        titles = [panel["title"] for _, panel in panels(of=name)]
        assert len(set(titles)) == len(titles)
        assert document["description"]
    for _, panel in panels():
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        for target in panel["targets"]:
            assert target["legendFormat"]
            assert target["datasource"] == panel["datasource"]
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            kept = {label for labels in re.findall(r" by \(([^)]*)\)", target["expr"]) for label in labels.split(", ")}
            assert shown <= kept, f"{panel['title']}: {shown - kept} is not kept by the query"


def test_panels_fill_their_rows_and_none_lies_on_another() -> None:
    for name, document in DOCUMENTS.items():
        taken: dict[int, int] = {}
        for panel in document["panels"]:
            place = panel["gridPos"]
            for y in range(place["y"], place["y"] + place["h"]):
                assert taken.get(y, 0) == place["x"], (name, panel["title"])
                taken[y] = place["x"] + place["w"]
        assert set(taken.values()) == {24}, name
        assert sorted(taken) == list(range(len(taken))), name


def test_queries_ask_for_metrics_and_labels_that_there_are_and_each_metric_is_shown() -> None:
    asked = set()
    for metric, suffix, labels in selectors():
        asked.add(metric.name)
        known = {*metric.labels, MODEL_LABEL, "job"}
        assert set(labels) <= known, f"{metric.name}: {set(labels) - known}"
        assert labels[0] == "job", "so that several releases can be told apart"
        assert suffix in {"", "_total", "_bucket", "_sum", "_count"}
    assert METRICS.keys() - asked == NOT_SHOWN.keys()
    for expression in expressions():
        for name in re.findall(r"\b(?:forebay_|vllm:)\w+", expression):
            assert f"{name}{{" in expression, f"{name} is not filtered by the variables"


def test_where_nothing_is_measured_a_panel_is_empty_and_not_zero() -> None:
    for expression in expressions():
        assert not re.search(r"vector\(|\bor\b|absent", expression), expression


def test_a_class_has_one_colour_everywhere() -> None:
    for _, panel in panels():
        if panel["type"] != "timeseries":
            continue
        assert panel["fieldConfig"]["defaults"]["color"] == {"mode": "palette-classic-by-name"}
        colours = {
            override["matcher"]["options"]: prop["value"]["fixedColor"]
            for override in panel["fieldConfig"]["overrides"]
            for prop in override["properties"]
            if prop["id"] == "color"
        }
        assert colours == {f"/^{name}\\b/": colour for name, colour in CLASS_COLOURS.items()}
        for target in panel["targets"]:
            legend = target["legendFormat"]
            assert "{{priority_class}}" not in legend or legend.startswith("{{priority_class}}")


def test_dashboards_lead_to_each_other_and_to_the_runbook_of_an_alert() -> None:
    alerts = {alert.name for alert in all_alerts(AlertSettings())}
    led_to = set()
    for document in DOCUMENTS.values():
        others, runbooks = document["links"]
        assert (others["type"], others["tags"], others["keepTime"]) == ("dashboards", ["forebay"], True)
        assert (document["tags"], runbooks["url"]) == (["forebay"], "${runbooks}")
    for _, panel in panels():
        for link in panel.get("links", ()):
            name = re.fullmatch(r"\$\{runbooks\}/(\w+)\.md", link["url"])
            assert name is not None
            led_to.add(name[1])
    assert len(led_to) > 10
    assert led_to <= alerts


def test_runbooks_and_pages_name_dashboards_and_rows_that_there_are() -> None:
    rows = {
        document["title"].removeprefix("Forebay / "): {p["title"] for p in document["panels"] if p["type"] == "row"}
        for document in DOCUMENTS.values()
    }
    ops = Path(render.__file__).parents[1]
    named = 0
    for page in (ops / "runbooks").glob("*.md"):
        for title, row in re.findall(r"Dashboard \*([^*]+)\*(?:, row \*([^*]+)\*)?", page.read_text()):
            named += 1
            assert title in rows, f"{page.name}: there is no dashboard {title!r}"
            assert not row or row in rows[title], f"{page.name}: {title} has no row {row!r}"
    assert named > 10
    table = re.findall(r"^\| ([A-Z][^|]*) \|", (ops / "docs" / "dashboards.md").read_text(), re.MULTILINE)
    assert table == list(rows)


def test_the_chart_finds_where_the_address_of_the_runbooks_stands() -> None:
    """It puts the value of monitoring.runbooksUrl there, in the text of the file."""
    for text in render.rendered().values():
        assert text.count(f'"query": "{RUNBOOKS}"') == 1


def test_every_variable_is_used_and_every_use_is_one() -> None:
    grafana = {"__rate_interval", "__range"}
    for name, document in DOCUMENTS.items():
        variables = {variable["name"] for variable in document["templating"]["list"]}
        text = json.dumps([panel for _, panel in panels(of=name)] + document["links"])
        used = set(re.findall(r"\$\{?(\w+)\}?", text))
        assert used - grafana <= variables
        assert variables - used <= {"replica", "objective"}, "no single replica is shown on each, nor an SLO"


@needs_prometheus
def test_promtool_reads_every_query(tmp_path: Path) -> None:
    """As rules, with a window of time and an objective in their places."""
    plain = [re.sub(r"\$\{?(__\w+)\}?", "1m", one).replace("$objective", "0.99") for one in expressions()]
    rules = [{"record": f"query:{number}", "expr": expression} for number, expression in enumerate(plain)]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    done = subprocess.run([str(PROMTOOL), "check", "rules", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(plain)} rules found" in done.stdout


def test_a_label_that_a_metric_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="forebay_queued_requests has no label 'replica'"):
        gauge(metrics.QUEUED, "replica")
    with pytest.raises(ValueError, match="has no label 'tenant'"):
        selector(metrics.TTFT, tenant="acme")


def test_queries_are_what_they_are_to_be() -> None:
    chosen = 'job=~"$job", model=~"$model", priority_class=~"$priority_class"'
    assert gauge(metrics.QUEUED, "priority_class") == f"sum by (priority_class) (forebay_queued_requests{{{chosen}}})"
    assert quantile(0.99, metrics.TTFT, "priority_class") == (
        "histogram_quantile(0.99, sum by (priority_class, le) (rate("
        f"forebay_ttft_seconds_bucket{{{chosen}}}[$__rate_interval])))"
    )
    assert selector(metrics.TURNED_AWAY, "_total", status="429") == (
        'forebay_requests_turned_away_total{job=~"$job", status="429"}'
    )
    assert selector(metrics.REQUESTS, every="priority_class", outcome="~rejected_.*") == (
        'forebay_requests{job=~"$job", model=~"$model", outcome=~"rejected_.*"}'
    )
