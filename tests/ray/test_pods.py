"""The chart's pods as processes of this machine: what helm renders, started as KubeRay and a kubelet would.

Each pod has a network namespace, and a root that it cannot write but for its emptyDirs; Ray starts by the pod's own command
in its own environment, and Serve is told what KubeRay would tell it. Not as there: one user, no limits, no policies.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from cluster.model import ModelFolder
from tests.chart.conftest import ROOT, TOOLS, Manifest, groups, serve_config, template
from tests.ray.hosts import Host, cannot, network

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

VALUES = """
modelStore: {mountPath: /mnt/models}
models:
  - name: tiny
    model: /mnt/models/tiny
    replicas: 1
    gpu: {count: 0}
    engine: {blocks: 256, max_model_len: 256}
ray: {objectStoreBytes: 83886080, env: {RAY_BACKEND_LOG_LEVEL: debug}}
"""
"""Beside the example of one node."""
PROMPT = "the merger with Halvorsen is off"
ENTER = """
set -euo pipefail
mount -t tmpfs none /mnt
mkdir -p /mnt/models/tiny /mnt/forebay
mount --bind "$MODEL" /mnt/models/tiny
mount --bind "$SOURCE" /mnt/forebay
mkdir /mnt/secrets; cp -r "$SECRETS"/. /mnt/secrets
mount -t tmpfs none /run
mkdir /run/forebay; cp -r /mnt/secrets/. /run/forebay
mount -t tmpfs none /tmp
mount -o remount,bind,ro /
grep -qE '^[^ ]+ / [^ ]+ ro[, ]' /proc/self/mounts
cd /tmp
exec "$@"
"""
"""In a mount namespace of its own: what the pod's volumes are, and nothing else that can be written."""


@dataclass
class Pod:
    host: Host
    group: Manifest
    process: subprocess.Popen[str] | None = None

    @property
    def container(self) -> Manifest:
        (container,) = self.group["template"]["spec"]["containers"]
        return dict(container)

    def start(self, head: Host, folder: Path, model: ModelFolder, token: str) -> None:
        parameters = dict(self.group["rayStartParams"])
        # What KubeRay adds.
        parameters |= {"block": "true", "dashboard-agent-listen-port": "52365", "metrics-export-port": "8080"}
        is_head = self.host is head
        parameters |= {"dashboard-host": "0.0.0.0"} if is_head else {"address": f"{head.address}:6379"}
        flags = " ".join(f" --{k} " if v == "true" else f" --{k}={v} " for k, v in sorted(parameters.items()))
        environment = {
            entry["name"]: entry.get("value") or (token if entry["name"] == "RAY_AUTH_TOKEN" else "")
            for entry in self.container["env"]
        }
        environment |= {
            "KUBERAY_GEN_RAY_START_CMD": f"ray start {'--head' if is_head else ''} {flags}",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": "/mnt/forebay",
            "PYTHONDONTWRITEBYTECODE": "1",
            "MODEL": str(model.path),
            "SOURCE": str(ROOT),
            "SECRETS": str(folder / "secrets"),
        }
        command = [*self.container["command"], *self.container["args"]]
        self.process = self.host.start(
            "unshare", "--mount", "bash", "-c", ENTER, "pod", *command,
            environment=environment, log=folder / f"{self.host.name}.log",
        )  # fmt: skip

    def logs(self, folder: Path) -> dict[str, str]:
        """All that its processes have written, Ray's too, while it runs."""
        assert self.process is not None
        own = folder / f"{self.host.name}.log"
        rays = Path(f"/proc/{self.process.pid}/root/tmp/ray").glob("session_*/logs/**/*")
        return {str(path): path.read_text(errors="replace") for path in (own, *rays) if path.is_file()}

    def end(self) -> None:
        self.host.end()
        if self.process is not None:
            self.process.wait(30)

    def probe(self, name: str) -> str:
        """What it says; empty where all is well."""
        _, *words = self.container[name]["exec"]["command"]
        command = ["ip", "netns", "exec", self.host.name, sys.executable, *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stderr

    def passes(self, name: str) -> None:
        """Probed again and again until it does, at a pace that leaves the machine to Ray."""
        for _ in range(240):
            if not (said := self.probe(name)):
                return
            time.sleep(0.5)
        raise AssertionError(f"{self.host.name}: {said}")


def asked_with(token: str, words: list[str]) -> int:
    """The exit code of a command of Ray's that somebody runs who has this token, or none."""
    environment = os.environ | (
        {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token} if token else {"RAY_AUTH_MODE": "disabled"}
    )
    command = [str(Path(sys.executable).with_name("ray")), *words]
    return subprocess.run(command, env=environment, capture_output=True, timeout=60, check=False).returncode


def test_the_charts_pods_serve_each_actor_is_in_its_own_and_no_log_has_a_secret(
    tiny_model: ModelFolder, tmp_path: Path
) -> None:
    if why := cannot():
        pytest.skip(why)
    if Path(sys.prefix).is_relative_to("/tmp"):
        pytest.skip("the pods have /tmp for themselves: the environment must lie elsewhere")
    if not (TOOLS / "helm").is_file():
        pytest.skip("needs helm: `make deploy-tools`")
    values = tmp_path / "values.yaml"
    values.write_text(VALUES)
    manifests = list(yaml.safe_load_all(template("one-node", values_file=values).stdout))
    made = groups(manifests)
    token, secret = secrets.token_hex(32), secrets.token_hex(32)
    for name, content in (("cluster/secret", secret), ("ray/auth_token", token)):
        path = tmp_path / "secrets" / name
        path.parent.mkdir(parents=True)
        path.write_text(content)
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(network(len(made), [0] * (len(made) - 1)))
        pods = {name: Pod(host, group) for host, (name, group) in zip(hosts, made.items(), strict=True)}
        head = pods["head"]

        for pod in pods.values():
            stack.callback(pod.end)
        head.start(head.host, tmp_path, tiny_model, token)
        head.passes("startupProbe")
        for pod in pods.values():
            if pod is not head:
                pod.start(head.host, tmp_path, tiny_model, token)
        for pod in pods.values():
            pod.passes("startupProbe")
        assert "ready" in pods["router"].probe("readinessProbe"), "nothing is served yet"
        dashboard = httpx.Client(
            base_url=f"http://{head.host.address}:8265", headers={"Authorization": f"Bearer {token}"}, timeout=30
        )
        stack.enter_context(dashboard)
        config = serve_config(manifests)
        config["applications"][0]["args"]["log_level"] = "DEBUG"
        dashboard.put("/api/serve/applications/", json=config).raise_for_status()
        pods["router"].passes("readinessProbe")
        asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "ignore_eos": True}
        url = f"http://{pods['router'].host.address}:8000"
        answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=60).raise_for_status().json()
        assert answer["usage"]["completion_tokens"] == 8
        serve: dict[str, Any] = dashboard.get("/api/serve/applications/").raise_for_status().json()
        where = {
            name: {replica["node_ip"] for replica in deployment["replicas"]}
            for name, deployment in serve["applications"]["forebay"]["deployments"].items()
        }
        assert where == {
            "Controller": {head.host.address},
            "Router": {pods["router"].host.address},
            "Replica-0-tiny": {pods["model-tiny"].host.address},
        }
        for name, port, series in (("model-tiny", 9464, "vllm:num_requests_running"), ("head", 9465, "forebay_")):
            assert series in httpx.get(f"http://{pods[name].host.address}:{port}/metrics", timeout=10).text, name
        assert httpx.get(f"{dashboard.base_url}/api/serve/applications/", timeout=10).status_code == 401
        rays = {
            "GCS": ["status", "--address", f"{head.host.address}:6379"],
            "dashboard": ["job", "list", "--address", str(dashboard.base_url)],
        }
        for what, words in rays.items():
            assert asked_with(token, words) == 0, f"{what}: who has the token is served"
            for other in ("", secrets.token_hex(32)):
                assert asked_with(other, words) != 0, f"{what} serves whoever comes"
        written = {name: text for pod in pods.values() for name, text in pod.logs(tmp_path).items()}
        assert len(written) > 3 * len(pods), "each pod's, and Ray's in it"
        assert any(answer["id"] in text for text in written.values()), "the router's are among them"
        for name, text in written.items():
            assert not [what for what in (token, secret, PROMPT) if what in text], name
