"""Prometheus, for tests: a process on a free port that scrapes every second and keeps its data in the test's folder."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from deployments.checks import free_ports
from tests.programs import serving

_PATHS = "/usr/sbin:/usr/local/bin:/usr/local/sbin"
PROMETHEUS = shutil.which("prometheus") or shutil.which("prometheus", path=_PATHS)
PROMTOOL = shutil.which("promtool") or shutil.which("promtool", path=_PATHS)
SCRAPE_INTERVAL_S = 1
"""Between two scrapes, and between two evaluations of rules."""

needs_prometheus = pytest.mark.skipif(
    PROMETHEUS is None or PROMTOOL is None, reason="prometheus is not installed (Debian: apt-get install prometheus)"
)


@contextlib.asynccontextmanager
async def prometheus(
    targets: Sequence[str] | Mapping[str, Sequence[str]],
    folder: Path,
    rules: Sequence[Path] = (),
    alertmanager: str | None = None,
) -> AsyncIterator[str]:
    """The URL of a Prometheus, once it answers.

    Args:
        targets: URLs whose /metrics it scrapes, as the job `forebay`; or several jobs' by name. One that does not answer
            is no error, as Prometheus sees it.
        folder: Where its configuration, data and log lie.
        rules: Files of rules.
        alertmanager: URL of the one that it tells.

    Raises:
        AssertionError: it did not start; its log is named.
    """
    assert PROMETHEUS is not None
    config, log = folder / "prometheus.yml", folder / "prometheus.log"
    config.write_text(yaml.safe_dump(_config(targets, rules, alertmanager)))
    address = f"127.0.0.1:{free_ports('127.0.0.1', 1)}"
    url = f"http://{address}"
    command = (
        PROMETHEUS,
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'prometheus-data'}",
        f"--web.listen-address={address}",
        "--web.enable-lifecycle",
    )
    async with serving(command, log, f"{url}/-/ready"):
        yield url


def _config(
    targets: Sequence[str] | Mapping[str, Sequence[str]], rules: Sequence[Path], alertmanager: str | None
) -> dict[str, Any]:
    jobs = targets if isinstance(targets, Mapping) else {"forebay": targets}
    config: dict[str, Any] = {
        "global": {"scrape_interval": f"{SCRAPE_INTERVAL_S}s", "evaluation_interval": f"{SCRAPE_INTERVAL_S}s"},
        "rule_files": [str(path) for path in rules],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": [_address(url) for url in urls]}]}
            for job, urls in jobs.items()
        ],
    }
    if alertmanager is not None:
        told = {"static_configs": [{"targets": [_address(alertmanager)]}]}
        config["alerting"] = {"alertmanagers": [told]}
    return config


def _address(url: str) -> str:
    return url.removeprefix("http://").rstrip("/")


async def query(url: str, expression: str, at_unix_s: float | None = None) -> list[dict[str, Any]]:
    """What an instant query returns: one dict with `metric` and `value` (or `values`) for each series.

    Raises:
        AssertionError: Prometheus answers with an error; its words are named.
    """
    fields = {"query": expression} | ({} if at_unix_s is None else {"time": str(at_unix_s)})
    return await _asked(f"{url}/api/v1/query", fields)


async def query_range(
    url: str, expression: str, start_unix_s: float, end_unix_s: float, step_s: float
) -> list[dict[str, Any]]:
    """What a query over a range of time returns: one dict with `metric` and `values` for each series.

    Raises:
        AssertionError: as `query`.
    """
    fields = {"query": expression, "start": str(start_unix_s), "end": str(end_unix_s), "step": str(step_s)}
    return await _asked(f"{url}/api/v1/query_range", fields)


async def _asked(endpoint: str, fields: Mapping[str, str]) -> list[dict[str, Any]]:
    async with httpx.AsyncClient(timeout=30, verify=False) as client:  # reading certificates takes long
        answer = (await client.post(endpoint, data=dict(fields))).json()
    assert answer["status"] == "success", f"{fields['query']}: {answer.get('error')}"
    result: list[dict[str, Any]] = answer["data"]["result"]
    return result
