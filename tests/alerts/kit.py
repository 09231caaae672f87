"""Series and what alerts make of them, judged by promtool.

Owns: what a case is, and the file that promtool reads. A case states the figures of an alert's texts; the words around them
are the alert's own.
"""

from __future__ import annotations

import functools
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cluster.metrics import Metric
from ops.alerts.__main__ import RULES_FILE
from ops.alerts.catalog import all_alerts
from ops.alerts.query import Part, series
from ops.alerts.rules import Alert
from ops.alerts.settings import AlertSettings
from tests.prometheus import PROMTOOL

SETTINGS = AlertSettings()
ALERTS = {alert.name: alert for alert in all_alerts(SETTINGS)}
SCOPE = {"namespace": "llm", "job": "llm/forebay"}
ROUTER, OTHER = "10.0.0.1:8000", "10.0.0.2:8000"
MODEL = "small"
_VALUE = re.compile(r"\{\{ \$value \| [^}]+ \}\}")
_LABEL = re.compile(r"\{\{ \$labels\.(\w+) \}\}")


def told(
    metric: Metric, values: str, part: Part = Part.GAUGE, /, instance: str = ROUTER, **labels: str
) -> tuple[str, str]:
    """A series as one router shows it, and its values in promtool's words: `0+2x10` is 0, 2, … 20. A metric that is of no
    model takes model="" as a label, which is none."""
    name = series(metric, part, **labels)
    every = SCOPE | {"instance": instance, "model": MODEL} | labels
    shown = ",".join(f'{label}="{value}"' for label, value in every.items())
    return f"{name.partition('{')[0]}{{{shown}}}", values


@dataclass(frozen=True, slots=True)
class Fires:
    """One alert: whose, and its figure as its texts tell it."""

    value: str
    labels: Mapping[str, str]
    scoped: bool = True
    """Of the release that the series are of; else of none."""


@dataclass(frozen=True, slots=True)
class Case:
    """Series, and at which moments an alert fires, and for what."""

    law: str
    alert: str
    told: Sequence[tuple[str, str]]
    at: Mapping[str, Sequence[Fires]]
    """By the moment: `12m`. Nothing fires where the list is empty."""
    interval: str = "1m"
    """Between two samples, and between two evaluations."""


def judged(case: Case, folder: Path) -> str:
    """What promtool has against it; nothing where all is as stated."""
    assert PROMTOOL is not None
    rules, path = folder / "rules.yaml", folder / "tests.yaml"
    rules.write_text(yaml.safe_dump({"groups": [_group_of(case.alert)]}, width=2**16))
    path.write_text(yaml.safe_dump(_document(case, rules), width=2**16))
    command = [PROMTOOL, "test", "rules", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


@functools.cache
def _group_of(name: str) -> Any:
    """Of the rendered file, the group that has this alert: the others would only take time."""
    groups = yaml.safe_load(RULES_FILE.read_text(encoding="utf-8"))["groups"]
    return next(group for group in groups if any(rule.get("alert") == name for rule in group["rules"]))


def _document(case: Case, rules: Path) -> dict[str, Any]:
    alert = ALERTS[case.alert]
    return {
        "rule_files": [str(rules)],
        "evaluation_interval": case.interval,
        "tests": [
            {
                "interval": case.interval,
                "input_series": [{"series": name, "values": values} for name, values in case.told],
                "alert_rule_test": [
                    {"eval_time": moment, "alertname": alert.name, "exp_alerts": [_shown(alert, one) for one in fires]}
                    for moment, fires in case.at.items()
                ],
            }
        ],
    }


def _shown(alert: Alert, fires: Fires) -> dict[str, Any]:
    labels = {**(SCOPE if fires.scoped else {}), **fires.labels}

    def filled(text: str) -> str:
        return _VALUE.sub(fires.value, _LABEL.sub(lambda found: labels[found[1]], text))

    return {
        "exp_labels": {"severity": alert.severity.value, **labels},
        "exp_annotations": {
            "summary": filled(alert.summary),
            "description": filled(alert.description),
            "runbook_url": f"ops/runbooks/{alert.name}.md",
        },
    }
