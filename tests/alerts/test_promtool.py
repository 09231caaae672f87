"""Each alert fires when it should, after its time, with its figure; and does not where it is just not true."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ops.alerts.__main__ import RULES_FILE
from tests.alerts.cases import CASES
from tests.alerts.kit import ALERTS, Case, judged
from tests.prometheus import PROMTOOL, needs_prometheus

pytestmark = needs_prometheus


def test_prometheus_takes_the_rules() -> None:
    assert PROMTOOL is not None
    command = [PROMTOOL, "check", "rules", "--lint-fatal", str(RULES_FILE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.alert}-{case.law.replace(' ', '_')}")
def test_an_alert_fires_at_its_time_and_for_no_less(case: Case, tmp_path: Path) -> None:
    assert not (against := judged(case, tmp_path)), against


def test_each_alert_is_shown_to_fire_not_to_fire_early_and_not_for_a_near_miss() -> None:
    fires = {case.alert for case in CASES if any(case.at.values())}
    early = {case.alert for case in CASES if any(case.at.values()) and not all(case.at.values())}
    missed = {case.alert for case in CASES if not any(case.at.values())}
    assert fires == early == missed == ALERTS.keys()
