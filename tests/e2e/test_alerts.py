"""The rendered rules in a real Prometheus that scrapes a real line: each selector finds what it is about, and an alert goes
all the way to who is to be told, and is taken back."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.config import DEFAULT_CLASSES
from cluster.metrics import SCALE
from cluster.model import ModelFolder
from deployments.settings import Profile
from ops.alerts.__main__ import RULES_FILE
from ops.alerts.catalog import all_groups
from ops.alerts.query import series
from ops.alerts.replicas import WANTED
from ops.alerts.settings import AlertSettings
from tests.alertmanager import alertmanager, needs_alertmanager, webhook
from tests.alerts.kit import ALERTS
from tests.line import until
from tests.processes import running_cluster
from tests.prometheus import needs_prometheus, prometheus, query

pytestmark = [pytest.mark.slow, needs_prometheus, needs_alertmanager]

GONE, LEAK = ALERTS["ForebayControllerGone"], ALERTS["ForebayJournalLeak"]
CLASSES = [c.model_dump() | {"first_token_slo_s": 60.0 if c.name == "interactive" else None} for c in DEFAULT_CLASSES]
PROFILE = Profile.model_validate(
    {
        "engine": {"slots": 8, "step_token_budget": 256, "blocks": 256, "max_model_len": 512},
        "router": {"classes": CLASSES},
    }
)
NOT_HERE = {series(SCALE, figure=WANTED)}
"""Of models with `scale` alone, which needs Serve."""
SELECTORS = {
    selector
    for group in all_groups(AlertSettings())
    for rule in group.rules
    for selector in re.findall(r"forebay_\w+(?:\{[^}]*\})?", re.sub(r"\w+:forebay_\w+:\w+", "", rule.expression))
}
TELL_S = 30.0
"""For scrapes, evaluations and messages on a busy machine."""


async def rules(url: str) -> list[dict[str, Any]]:
    async with httpx.AsyncClient() as client:
        groups = (await client.get(f"{url}/api/v1/rules")).json()["data"]["groups"]
    return [rule for group in groups for rule in group["rules"]]


async def test_a_killed_controller_is_told_of_with_its_page_and_taken_back_once_another_leads(
    tiny_model: ModelFolder, tmp_path: Path
) -> None:
    async with (
        webhook() as hook,
        alertmanager(hook, tmp_path) as told,
        running_cluster(tiny_model, PROFILE, tmp_path, step_s=0.01, replicas=1) as cluster,
        prometheus(cluster.urls, tmp_path, [RULES_FILE], told) as url,
    ):

        async def health() -> set[str]:
            return {rule["health"] for rule in await rules(url)}

        async def unmatched() -> list[str]:
            return [selector for selector in sorted(SELECTORS - NOT_HERE) if not await query(url, selector)]

        async def alerts() -> list[dict[str, Any]]:
            return await query(url, "ALERTS")

        await until(health, {"ok"}.__eq__)
        await until(unmatched, [].__eq__)
        strays = f"{LEAK.expression.rpartition('>')[0]} == 0"
        assert await query(url, strays), "journal, queue, replicas and suspects are counted alike, label by label"
        await until(alerts, [].__eq__)  # until its first scrape, Prometheus misses routers

        killed_s = time.time()
        cluster.controller.kill()

        def is_gone(alert: dict[str, Any]) -> bool:
            return bool(alert["labels"]["alertname"] == GONE.name)

        fired = await hook.heard(is_gone, GONE.for_s + TELL_S)
        waited_s = time.time() - killed_s
        assert waited_s >= GONE.for_s, "not before its time"
        assert fired["status"] == "firing"
        assert fired["labels"] == {"alertname": GONE.name, "job": "forebay", "severity": "critical"}
        assert fired["annotations"] == {
            "summary": GONE.summary,
            "description": GONE.description.replace("{{ $value | humanize }}", "0"),
            "runbook_url": "ops/runbooks/ForebayControllerGone.md",
        }
        answer = await cluster.client.post(
            "/v1/completions", json={"model": tiny_model.name, "prompt": "a", "max_tokens": 4}
        )
        assert answer.status_code == 200, "the page says that requests are served meanwhile"

        await cluster.start_controller()
        back_s = time.time()
        over = await hook.heard(lambda alert: is_gone(alert) and alert["status"] == "resolved", TELL_S)
        print(f"told {waited_s:.1f} s after the kill, taken back {time.time() - back_s:.1f} s after another began")
        assert over["labels"] == fired["labels"]
        assert over["endsAt"] > fired["startsAt"]
        assert {alert["labels"]["alertname"] for alert in hook.alerts} == {GONE.name}, "and of nothing else"
