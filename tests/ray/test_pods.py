"""The chart's pods as processes of this machine: what helm renders, started as KubeRay and a kubelet would.

Each pod has a network namespace, and a root that it cannot write but for its emptyDirs; Ray starts by the pod's own command
in its own environment, and Serve is told what KubeRay would tell it. Not as there: one user, no limits, no policies.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
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
    engine: {blocks: 1024, max_model_len: 4096}
drain: {seconds: 30, replaceSeconds: 3}
ray:
  objectStoreBytes: 83886080
  env: {RAY_BACKEND_LOG_LEVEL: debug, RAY_gcs_rpc_server_reconnect_timeout_s: "3"}
"""
"""Beside the example of one node. Who misses GCS for longer than the streams last ends, as after a minute in production."""
STREAMS, TOKENS = 4, 3500
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
        command = self._inside(self.container[name])
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stderr

    def _inside(self, handler: Manifest) -> list[str]:
        _, *words = handler["exec"]["command"]
        return ["ip", "netns", "exec", self.host.name, sys.executable, *words]

    def told_to_end(self, token: str) -> subprocess.Popen[str] | None:
        """As a kubelet does: what is to run before is run, and returned; where there is none, SIGTERM at once."""
        assert self.process is not None
        if "lifecycle" not in self.container:
            self.process.terminate()
            return None
        asked = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
        return subprocess.Popen(self._inside(self.container["lifecycle"]["preStop"]), env=asked, text=True)

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


@dataclass
class Cluster:
    """The chart's pods, and Forebay on them."""

    pods: dict[str, Pod]
    manifests: list[Manifest]
    folder: Path
    token: str
    secret: str
    dashboard: httpx.Client

    @property
    def url(self) -> str:
        return f"http://{self.pods['router'].host.address}:8000"


@pytest.fixture(scope="module")
def cluster(tiny_model: ModelFolder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if why := cannot():
        pytest.skip(why)
    if Path(sys.prefix).is_relative_to("/tmp"):
        pytest.skip("the pods have /tmp for themselves: the environment must lie elsewhere")
    if not (TOOLS / "helm").is_file():
        pytest.skip("needs helm: `make deploy-tools`")
    folder = tmp_path_factory.mktemp("pods")
    values = folder / "values.yaml"
    values.write_text(VALUES)
    manifests = list(yaml.safe_load_all(template("one-node", values_file=values).stdout))
    made = groups(manifests)
    token, secret = secrets.token_hex(32), secrets.token_hex(32)
    for name, content in (("cluster/secret", secret), ("ray/auth_token", token)):
        path = folder / "secrets" / name
        path.parent.mkdir(parents=True)
        path.write_text(content)
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(network(len(made), [0] * (len(made) - 1)))
        pods = {name: Pod(host, group) for host, (name, group) in zip(hosts, made.items(), strict=True)}
        head = pods["head"]
        for pod in pods.values():
            stack.callback(pod.end)
        head.start(head.host, folder, tiny_model, token)
        head.passes("startupProbe")
        for pod in pods.values():
            if pod is not head:
                pod.start(head.host, folder, tiny_model, token)
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
        yield Cluster(pods, manifests, folder, token, secret, dashboard)


def test_the_charts_pods_serve_each_actor_is_in_its_own_and_no_log_has_a_secret(cluster: Cluster) -> None:
    pods, dashboard, token = cluster.pods, cluster.dashboard, cluster.token
    head = pods["head"]
    asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "ignore_eos": True}
    answer = httpx.post(f"{cluster.url}/v1/completions", json=asked, timeout=60).raise_for_status().json()
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
    written = {name: text for pod in pods.values() for name, text in pod.logs(cluster.folder).items()}
    assert len(written) > 3 * len(pods), "each pod's, and Ray's in it"
    assert any(answer["id"] in text for text in written.values()), "the router's are among them"
    for name, text in written.items():
        assert not [what for what in (token, cluster.secret, PROMPT) if what in text], name


def test_streams_that_run_when_the_whole_cluster_is_deleted_end_whole_and_the_head_goes_last(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """As when KubeRay has made a new one: all pods are told to end at the same time. It ends the module's cluster."""
    streams = [Streaming(cluster.url) for _ in range(STREAMS)]
    for stream in streams:
        assert stream.begun.wait(60)
    told_s = time.monotonic()
    stopping = {name: pod.told_to_end(cluster.token) for name, pod in cluster.pods.items()}
    assert not any(stream.ended for stream in streams), "they run as the pods are told"
    (before_end,) = [hook for hook in stopping.values() if hook is not None]
    for stream in streams:
        stream.thread.join(60)
    streamed_s = time.monotonic() - told_s
    for name, pod in cluster.pods.items():
        if name != "head":
            assert pod.process is not None
            pod.process.wait(90)
    workers_s = time.monotonic() - told_s
    assert before_end.wait(30) == 0
    head_s = time.monotonic() - told_s
    with capsys.disabled():
        print(
            f"\n[pods] a cluster that is deleted: streams ended {streamed_s:.1f} s after, "
            f"their pods {workers_s:.1f} s, the head let go {head_s:.1f} s"
        )
    assert [stream.said for stream in streams] == [TOKENS] * STREAMS
    grace_s = {
        name: pod.group["template"]["spec"]["terminationGracePeriodSeconds"] for name, pod in cluster.pods.items()
    }
    assert head_s < grace_s["head"]
    assert workers_s < grace_s["router"]


class Streaming:
    """A long answer, read as it comes by a thread of its own."""

    def __init__(self, url: str) -> None:
        self.begun = threading.Event()
        self.said = 0
        """Tokens that its end states; 0 where it has none."""
        self._url = url
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    @property
    def ended(self) -> bool:
        return not self.thread.is_alive()

    def _read(self) -> None:
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
        body |= {"stream_options": {"include_usage": True}}
        with httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=120) as answer:
            for line in answer.iter_lines():
                self.begun.set()
                if not line.startswith("data: {"):
                    continue
                if usage := json.loads(line.removeprefix("data: ")).get("usage"):
                    self.said = usage["completion_tokens"]
