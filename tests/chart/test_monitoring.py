"""What Prometheus and Grafana are given: the rendered alerts and dashboards as they are, where values ask for them."""

from __future__ import annotations

import json
import re

import pytest
import yaml

from tests.chart.conftest import CHART, RELEASE, ROOT, of_kind, rendered, serve_config, template

FILES = CHART / "files"
DASHBOARDS = {path.name: path for path in (FILES / "dashboards").glob("*.json")}
CONFIG_MAP_MAX_BYTES = 2**20
"""Of Kubernetes."""
HALF = CONFIG_MAP_MAX_BYTES // 2
ON = ("monitoring.prometheusRule.enabled=true", "monitoring.dashboards.enabled=true")


def test_nothing_of_it_is_made_unless_asked_for() -> None:
    made = rendered("one-node")
    assert not [m for kind in ("PodMonitor", "PrometheusRule", "ConfigMap") for m in of_kind(made, kind)]
    (application,) = serve_config(made)["applications"]
    assert application["args"]["profile"]["router"]["open_metrics"] is False


def test_the_rules_are_those_of_the_file_each_with_its_runbook_where_values_say() -> None:
    groups = yaml.safe_load((FILES / "alerts.yaml").read_text())["groups"]
    (rule,) = of_kind(rendered("one-node", *ON), "PrometheusRule")
    assert rule["spec"] == {"groups": groups}, "braces and all"
    url = "https://git.example/runbooks"
    (linked,) = of_kind(rendered("one-node", *ON, f"monitoring.runbooksUrl={url}"), "PrometheusRule")
    alerts = {
        entry["alert"]: (entry["annotations"], plain["annotations"])
        for group, was in zip(linked["spec"]["groups"], groups, strict=True)
        for entry, plain in zip(group["rules"], was["rules"], strict=True)
        if "alert" in entry
    }
    assert alerts
    for name, (said, plain) in alerts.items():
        assert said == plain | {"runbook_url": f"{url}/{name}.md"}
        assert (ROOT / plain["runbook_url"]).is_file(), "without a value the link is the page's place in the repository"


def test_each_dashboard_is_a_config_map_that_the_sidecar_takes() -> None:
    settings = ("monitoring.dashboards.annotations.grafana_folder=Forebay", "monitoring.dashboards.labels.team=llm")
    made = of_kind(rendered("one-node", *ON, *settings), "ConfigMap")
    assert DASHBOARDS
    assert {name for config_map in made for name in config_map["data"]} == set(DASHBOARDS)
    for config_map in made:
        ((name, text),) = config_map["data"].items()
        assert text == DASHBOARDS[name].read_text(), "braces and all"
        assert json.loads(text)["panels"]
        assert config_map["metadata"]["name"] == f"{RELEASE}-forebay-dashboard-{name.removesuffix('.json')}"
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", config_map["metadata"]["name"])
        assert config_map["metadata"]["labels"].items() >= {"grafana_dashboard": "1", "team": "llm"}.items()
        assert config_map["metadata"]["annotations"] == {"grafana_folder": "Forebay"}


def test_dashboards_link_to_the_runbooks_where_values_say() -> None:
    url = "https://git.example/runbooks"
    for config_map in of_kind(rendered("one-node", *ON, f"monitoring.runbooksUrl={url}"), "ConfigMap"):
        ((name, text),) = config_map["data"].items()
        (variable,) = [v for v in json.loads(text)["templating"]["list"] if v["name"] == "runbooks"]
        assert variable["query"] == url
        assert text.replace(url, "ops/runbooks") == DASHBOARDS[name].read_text(), "and nothing else is changed"


def test_a_dashboard_fits_in_a_config_map_with_room_to_grow() -> None:
    assert max(path.stat().st_size for path in DASHBOARDS.values()) < HALF


def test_a_name_in_the_rules_is_no_template_of_helms() -> None:
    """It renders with values in which nothing but the rules could have such a word."""
    text = template("one-node", *ON).stdout
    for braces in ("{{ $value", "{{ $labels."):
        assert text.count(braces) == (FILES / "alerts.yaml").read_text().count(braces) > 0


@pytest.mark.parametrize("enabled", ["true", "false"])
def test_prometheus_needs_no_key_for_routers_where_it_is_told_to_ask_them(enabled: str) -> None:
    made = rendered("8xa100", f"monitoring.podMonitor.enabled={enabled}")
    (application,) = serve_config(made)["applications"]
    assert application["args"]["profile"]["router"]["open_metrics"] is (enabled == "true")


def test_the_ports_of_values_are_where_replicas_and_controllers_listen() -> None:
    made = rendered("one-node", "monitoring.ports.model=9001", "monitoring.ports.controller=9002")
    (application,) = serve_config(made)["applications"]
    assert application["args"]["profile"]["metrics"] == {"replica_port": 9001, "controller_port": 9002}
