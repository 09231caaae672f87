"""Alerts name what there is: metrics, labels, their values, pages; and the chart's file is what the code says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import typer
import yaml
from prometheus_client import CollectorRegistry
from pydantic import BaseModel, ValidationError

from cluster import metrics
from cluster.config import (
    DEFAULT_CLASSES,
    ControlConfig,
    EngineConfig,
    HealthConfig,
    RouterConfig,
    ScaleConfig,
    TransportConfig,
)
from cluster.messages import ScaleDecision, ScaleStatus
from cluster.metrics import MODEL_LABEL, Metric
from ops import cli
from ops.alerts.__main__ import RULES_FILE, main
from ops.alerts.catalog import all_alerts, all_groups
from ops.alerts.query import Not, Part, series
from ops.alerts.rules import Severity, duration
from ops.alerts.settings import AlertSettings
from ops.alerts.slo import FAST, SLOW, Burn
from ops.dashboards.render import DASHBOARDS
from router.metrics_sink import RouterMetrics

ROOT = Path(__file__).parents[2]
RUNBOOKS = ROOT / "ops" / "runbooks"
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in RUNBOOKS.glob("*.md")}
SETTINGS = AlertSettings()
ALERTS = {alert.name: alert for alert in all_alerts(SETTINGS)}
RULES = [rule for group in all_groups(SETTINGS) for rule in group.rules]
METRICS = {metric.name: metric for metric in vars(metrics).values() if isinstance(metric, Metric)}
SECTIONS = (
    "What it means", "What users see", "How to look", "Likely causes", "What to do", "When to ignore it",
)  # fmt: skip
OF_PROFILE: dict[str, type[BaseModel]] = {
    "router": RouterConfig,
    "control": ControlConfig,
    "transport": TransportConfig,
    "health": HealthConfig,
    "engine": EngineConfig,
    "scale": ScaleConfig,
}
ADDED = {"namespace", "job", "instance", MODEL_LABEL}
"""Labels that the scrape and the exposition add."""


def of_metrics(text: str) -> list[tuple[Metric, str]]:
    """Each metric that PromQL, or a page, names, with its matchers."""
    found = re.findall(r"(?<![\w:])(forebay_[a-z_]+)(\{[^}]*\})?", re.sub(r"\w+:forebay_\w+:\w+", "", text))
    bare = [(re.sub("_(total|count)$", "", name), matchers) for name, matchers in found]
    return [(METRICS[name], matchers) for name, matchers in bare]


def test_the_charts_file_is_what_the_code_says(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--check"]) == 0
    other = tmp_path / "files" / "alerts.yaml"
    assert main(["--check"], other) == 1
    assert "run python -m ops.alerts" in capsys.readouterr().err
    assert not other.exists()
    assert main([], other) == 0
    assert other.read_bytes() == RULES_FILE.read_bytes()
    other.write_text("groups: []")
    assert main(["--check"], other) == 1


def test_alerts_select_by_metrics_and_labels_that_there_are() -> None:
    for rule in RULES:
        for metric, matchers in of_metrics(rule.expression):
            assert set(re.findall(r"(\w+)[=!]", matchers)) <= {*metric.labels, MODEL_LABEL}, rule.name
        every = {label for metric, _ in of_metrics(rule.expression) for label in metric.labels} | ADDED
        assert {
            name for by in re.findall(r"(?:by|on) \(([^)]*)\)", rule.expression) for name in by.split(", ")
        } <= every


def test_what_alerts_select_by_are_values_that_the_router_shows() -> None:
    registry = CollectorRegistry()
    classes = tuple(c.model_copy(update={"first_token_slo_s": 1.0}) for c in DEFAULT_CLASSES)
    router = RouterMetrics(registry)
    router.begin(RouterConfig(classes=classes), lambda: None)
    router.scaled(ScaleStatus("m", ScaleDecision(0.0, 1, 1, "", {}), kept=1))
    shown: dict[tuple[str, str], set[str]] = {}
    for sample in (sample for family in registry.collect() for sample in family.samples):
        for label, value in sample.labels.items():
            shown.setdefault((sample.name, label), set()).add(value)
    of_conditions, of_queue = ("forebay_replicas", "condition"), ("forebay_queued_oldest_seconds", "priority_class")
    for rule in RULES:
        for name, matchers in re.findall(r"(?<!:)\b(forebay_\w+)\{([^}]*)\}", rule.expression):
            for label, values in re.findall(r'(\w+)(?:=|=~|!~)"([^"]*)"', matchers):
                if (name, label) not in (of_conditions, of_queue):  # gauges, set when there is something
                    assert set(values.split("|")) <= shown[name, label], f"{rule.name}: {name}{{{label}}}"


def test_bounds_of_waits_are_of_classes_that_there_are() -> None:
    assert {wait.priority_class for wait in SETTINGS.waits} < {c.name for c in DEFAULT_CLASSES}
    assert SETTINGS.other_waits_s < RouterConfig().max_queue_s == SETTINGS.starved_window_s
    assert SETTINGS.starved_after_s == 10 * RouterConfig().ageing_after_s
    assert SETTINGS.report_age_s == RouterConfig().fenced_after_s


def test_a_label_that_a_metric_does_not_have_cannot_be_selected_by() -> None:
    assert series(metrics.SCALE, figure="wanted", model="m") == 'forebay_scale{figure="wanted",model="m"}'
    assert series(metrics.REQUESTS, Part.TOTAL, outcome=("a", "b")) == 'forebay_requests_total{outcome=~"a|b"}'
    assert series(metrics.QUEUED, priority_class=Not(("a", "b"))) == 'forebay_queued_requests{priority_class!~"a|b"}'
    with pytest.raises(ValueError, match="forebay_requests has no label decision; it has priority_class, outcome"):
        series(metrics.REQUESTS, decision="queued")


@pytest.mark.parametrize(
    ("seconds", "written"), [(30, "30s"), (90, "90s"), (60, "1m"), (5400, "90m"), (3600, "1h"), (259_200, "3d")]
)
def test_durations_are_written_as_prometheus_writes_them(seconds: int, written: str) -> None:
    assert duration(seconds) == written


def spent(burn: Burn) -> float:
    """The part of the budget of 30 days that is gone when the long window has burnt at the factor."""
    return burn.factor * burn.long_s / (30 * 86_400)


def test_burn_rates_spend_the_stated_parts_of_the_budget() -> None:
    """As in Google's SRE workbook, chapter 5: 2 % in an hour, 5 % in six, 10 % in a day and in three; the short window is a
    twelfth of the long one."""
    assert [spent(burn) for burn in (*FAST, *SLOW)] == pytest.approx([0.02, 0.05, 0.1, 0.1])
    assert all(burn.long_s == 12 * burn.short_s for burn in (*FAST, *SLOW))


def test_an_objective_that_no_fast_burn_could_be_seen_of_is_refused() -> None:
    least = AlertSettings(objective=0.94)
    assert all(burn.factor * (1 - least.objective) < 1 for burn in (*FAST, *SLOW))
    for objective in (0.93, 1.0):
        with pytest.raises(ValidationError):
            AlertSettings(objective=objective)


def test_each_alert_tells_its_figure_and_each_text_is_one_line() -> None:
    for alert in ALERTS.values():
        assert "$value" in alert.description, alert.name
        assert "\n" not in alert.summary + alert.description, alert.name


def test_each_alert_has_a_page_and_each_page_an_alert() -> None:
    assert PAGES.keys() == ALERTS.keys()
    for alert in ALERTS.values():
        link = alert.rendered("ops/runbooks")["annotations"]["runbook_url"]
        assert (ROOT / link).is_file()


@pytest.mark.parametrize("name", sorted(PAGES))
def test_a_page_says_what_there_is_to_say(name: str) -> None:
    page, alert = PAGES[name], ALERTS[name]
    assert page.startswith(f"# {name}\n\n{alert.severity}, after {duration(alert.for_s)} ·")
    sections = re.findall(r"^## (.+?)\n(.+?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    assert tuple(title for title, _ in sections) == SECTIONS
    assert all(text.strip() for _, text in sections)


def keys_of(section: str, model: type[BaseModel]) -> Iterator[str]:
    """Dotted, those of sections within it too."""
    for name, field in model.model_fields.items():
        yield f"{section}.{name}"
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from keys_of(f"{section}.{name}", kind)


def keys_in(values: Any, before: str = "") -> Iterator[str]:
    """Dotted, of the chart's values."""
    for name, value in values.items() if isinstance(values, dict) else ():
        yield before + name
        yield from keys_in(value, f"{before}{name}.")


def test_settings_that_pages_name_are_those_of_a_profile_or_of_the_chart() -> None:
    named = {name for page in PAGES.values() for name in re.findall(r"`([a-zA-Z_]+(?:\.[a-zA-Z_]+)+)(?:: \w+)?`", page)}
    of_profile = {key for section, model in OF_PROFILE.items() for key in keys_of(section, model)}
    of_chart = set(keys_in(yaml.safe_load((ROOT / "helm" / "forebay" / "values.yaml").read_text(encoding="utf-8"))))
    assert {"router.fenced_after_s", "engine.vllm.gpu_memory_utilization", "drain.seconds"} < named
    assert named <= of_profile | of_chart


def test_commands_that_pages_name_are_there_with_their_options() -> None:
    named = {line for page in PAGES.values() for line in re.findall(r"`forebay ([^`]+)`", page)}
    assert {"status", "explain REQUEST_ID", "drain NAME --undo"} < named
    forebay = typer.main.get_command(cli.app)
    for line in named:
        command: Any = forebay
        for word in line.split():
            if word.startswith("--"):
                assert word in {option for one in command.params for option in (*one.opts, *one.secondary_opts)}, line
            elif word.islower() and hasattr(command, "commands"):
                command = command.commands[word]


@pytest.mark.parametrize("name", sorted(PAGES))
def test_metrics_pages_and_dashboards_that_a_page_names_are_there(name: str) -> None:
    page = PAGES[name]
    of_metrics(" ".join(re.findall(r"`(forebay_[^`]+)`", page)))
    assert set(re.findall(r"\]\((\w+)\.md\)", page)) <= PAGES.keys()
    for title, row in re.findall(r"Dashboard \*([^*]+)\*(?:,\s+row\s+\*([^*]+)\*)?", page):
        (dashboard,) = (one for one in DASHBOARDS if one.title == title)
        assert not row or row in {one.title for one in dashboard.rows}, f"{title}: {row}"


def test_the_page_of_all_alerts_is_what_they_are() -> None:
    page = (ROOT / "ops" / "docs" / "alerts.md").read_text(encoding="utf-8")
    rows = [line.strip("|").split(" | ")[:3] for line in page.splitlines() if line.startswith("| [")]
    expected = [[f"[{a.name}](../runbooks/{a.name}.md)", a.severity.value, duration(a.for_s)] for a in ALERTS.values()]
    assert [[cell.strip() for cell in row] for row in rows] == expected
    assert all(f"*{severity.value.title()}*" in page for severity in Severity)


def test_the_command_prints_the_charts_rules_with_links_and_objective_of_ones_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.run(["alerts"]) == 0
    assert capsys.readouterr().out == RULES_FILE.read_text(encoding="utf-8")
    assert cli.run(["alerts", "--runbooks", "https://pages.example/r/", "--objective", "0.999"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    rules = {rule["alert"]: rule for group in printed["groups"] for rule in group["rules"] if "alert" in rule}
    assert rules.keys() == ALERTS.keys()
    for name, rule in rules.items():
        assert rule["annotations"]["runbook_url"] == f"https://pages.example/r/{name}.md"
    assert "> 0.0144" in rules["ForebaySloBurnFast"]["expr"]  # 14.4 x 0.1 %
    assert "budget is 0.1%" in rules["ForebaySloBurnFast"]["annotations"]["description"]
    assert cli.run(["alerts", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == yaml.safe_load(RULES_FILE.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--objective", "0.5"], "--objective: 0.5 must be 0.94 at least and less than 1"),
        (["--objective", "1"], "--objective: 1 must be 0.94 at least and less than 1"),
        (["--runbooks", ""], "--runbooks: the address is empty"),
    ],
)
def test_what_cannot_be_is_one_line_that_names_the_option(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["alerts", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
