"""Deployed by Serve's config file, as `serve deploy` and KubeRay do: one REST call to Ray's dashboard."""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.model import ModelFolder
from deployments.checks import free_ports
from tests.ray.conftest import Endpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PLACES = {"forebay_router": 1, "forebay_controller": 1, "forebay_model_tiny": 2}
"""As the chart's pods have them, here all on one node."""
LIMIT_S = 120.0


@dataclass
class Head:
    folder: Path
    dashboard: httpx.Client

    def put(self, args: dict[str, Any]) -> None:
        application = {
            "name": "forebay",
            "route_prefix": None,
            "import_path": "deployments.serve_app:build_app",
            "external_scaler_enabled": True,
            "args": args,
        }
        config = {"proxy_location": "Disabled", "applications": [application]}
        self.dashboard.put("/api/serve/applications/", json=config).raise_for_status()

    def until(self, status: str, deployed_after: float = 0.0) -> dict[str, Any]:
        """The application, once it is said to be so, of what was deployed after that time of Serve's."""
        end = time.monotonic() + LIMIT_S
        while True:
            told = self.dashboard.get("/api/serve/applications/").raise_for_status().json()
            application: dict[str, Any] = told["applications"]["forebay"]
            if application["status"] == status and application["last_deployed_time_s"] > deployed_after:
                return application
            assert time.monotonic() < end, application
            time.sleep(0.1)


@pytest.fixture
def head() -> Iterator[Head]:
    # Short: Ray puts sockets deep below it.
    folder = Path(tempfile.mkdtemp(prefix="fb-"))
    token = secrets.token_hex(32)
    for name, content in (("ray-token", token), ("secret", secrets.token_hex(32))):
        (folder / name).touch(mode=0o600)
        (folder / name).write_text(content)
    command = [sys.executable, "-m", "tests.ray.head", str(folder), json.dumps(PLACES)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        url = next(line.strip() for line in process.stdout if line.startswith("http"))
        with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=30) as dashboard:
            yield Head(folder, dashboard)
    finally:
        process.stdin.close()
        with process.stdout as output:
            output.read()
        process.wait(60)
        shutil.rmtree(folder)


def test_a_config_file_deploys_what_is_asked_and_rolls_out_a_change_and_says_by_its_key_what_cannot_be(
    head: Head, tiny_model: ModelFolder
) -> None:
    router = {"port": free_ports("127.0.0.1", 1)}
    model = {
        "model": str(tiny_model.path),
        "served_name": "tiny",
        "resource": "forebay_model_tiny",
        "replicas": 1,
        "scale": {"min": 1, "max": 2},
        "engine": {"blocks": 256, "max_model_len": 256, "slots": 8, "step_token_budget": 64},
    }
    profile = {
        "models": [model],
        "router": router,
        "router_resource": "forebay_router",
        "controller_resource": "forebay_controller",
    }
    args = {
        "profile": profile,
        "secret_path": str(head.folder / "secret"),
        "dashboard_url": str(head.dashboard.base_url),
        "token_path": str(head.folder / "ray-token"),
    }
    head.put(args | {"profile": profile | {"router": router | {"max_queue": 3}}})
    assert "args: profile.router.max_queue: Extra inputs" in head.until("DEPLOY_FAILED")["message"]

    head.put(args)
    application = head.until("RUNNING")
    assert {name: d["deployment_config"]["num_replicas"] for name, d in application["deployments"].items()} == {
        "Controller": 1,
        "Router": 1,
        "Replica-0-tiny": 1,
    }
    endpoint = Endpoint(f"http://127.0.0.1:{router['port']}")
    asked = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 8, "ignore_eos": True}
    answer = httpx.post(f"{endpoint.url}/v1/completions", json=asked, timeout=60).raise_for_status().json()
    assert answer["usage"]["completion_tokens"] == 8
    # The scaler asks Serve through the dashboard, with the token.
    end = time.monotonic() + LIMIT_S
    while not (scale := (endpoint.status()["cluster"] or {"scale": []})["scale"]) or scale[0]["kept"] is None:
        assert time.monotonic() < end, endpoint.status()
        time.sleep(0.1)
    assert (scale[0]["model"], scale[0]["kept"], scale[0]["trouble"]) == ("tiny", 1, "")

    # There is one place for each: none can come before the old one has gone.
    deployed = application["last_deployed_time_s"]
    old = [replica["pid"] for deployment in application["deployments"].values() for replica in deployment["replicas"]]
    head.put(args | {"profile": profile | {"router": router | {"max_queue_s": 60}}})
    application = head.until("RUNNING", deployed)
    new = [replica["pid"] for deployment in application["deployments"].values() for replica in deployment["replicas"]]
    assert len(new) == 3
    assert not set(old) & set(new)
    httpx.post(f"{endpoint.url}/v1/completions", json=asked, timeout=60).raise_for_status()
