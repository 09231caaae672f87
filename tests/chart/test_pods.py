"""What runs in the pods: that Ray hears SIGTERM, and what the probes ask."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tests.chart.conftest import Manifest, groups, of_kind, pods, rendered

RAYLET, GCS = "/api/local_raylet_healthz", "/api/gcs_healthz"


def test_every_group_has_probes_of_its_own_and_none_waits_for_serves_proxy(manifests: list[Manifest]) -> None:
    """KubeRay gives a group that has none one that asks port 8000 of every worker for /-/healthz."""
    for name, group in groups(manifests).items():
        (container,) = group["template"]["spec"]["containers"]
        component = group["template"]["metadata"]["labels"]["app.kubernetes.io/component"]
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            command = container[probe]["exec"]["command"]
            assert command[:3] == ["python", "-m", "deployments.probe"], name
            asked = ["/" + url.split("/", 3)[3] for url in command[3:]]
            ready = ["/ready"] if component == "router" and probe == "readinessProbe" else []
            assert asked == [RAYLET, *([GCS] if component == "head" else []), *ready], (name, probe)
            assert container[probe]["timeoutSeconds"] > 2 * len(asked), "each may take four seconds, not all at once"
        assert container["startupProbe"]["periodSeconds"] * container["startupProbe"]["failureThreshold"] >= 1800


def test_a_router_that_leaves_is_out_of_the_balancer_before_it_stops_listening(manifests: list[Manifest]) -> None:
    (container,) = groups(manifests)["router"]["template"]["spec"]["containers"]
    probe, url = container["readinessProbe"], container["readinessProbe"]["exec"]["command"][-1]
    (port,) = [port["containerPort"] for port in container["ports"] if port["name"] == "http"]
    assert url == f"http://127.0.0.1:{port}/ready"
    assert probe["failureThreshold"] == 1
    assert 3 * probe["periodSeconds"] <= 15


@pytest.mark.parametrize("name", ["head", "router", "model-llama-3-8b"])
def test_ray_is_the_first_process_of_its_pod_and_has_its_parameters_as_they_are_meant(
    name: str, tmp_path: Path
) -> None:
    group = groups(rendered("8xa100", "controllers.replicas=0"))[name]
    (container,) = group["template"]["spec"]["containers"]
    assert group["template"]["metadata"]["annotations"] == {"ray.io/overwrite-container-cmd": "true"}
    # As KubeRay puts it together, by name; what is overwritten finds it in this variable.
    parameters = sorted(group["rayStartParams"].items())
    generated = "ray start " + " ".join(f" --{key}={value} " for key, value in parameters)
    ray = tmp_path / "ray"
    ray.write_text(f"#!{sys.executable}\nimport json, os, sys\nprint(json.dumps([os.getpid(), sys.argv[1:]]))\n")
    ray.chmod(0o755)
    process = subprocess.Popen(
        [*container["command"], *container["args"]],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "KUBERAY_GEN_RAY_START_CMD": generated},
        stdout=subprocess.PIPE,
    )
    said, _ = process.communicate(timeout=20)
    pid, arguments = json.loads(said)
    assert pid == process.pid, "a shell would keep SIGTERM from it"
    given = dict(argument.removeprefix("--").split("=", 1) for argument in arguments[1:])
    assert arguments[0] == "start"
    assert given == {key: value.strip("'") for key, value in parameters}
    assert all(isinstance(count, int) for count in json.loads(given["resources"]).values())


def test_names_of_ports_are_names_of_services(manifests: list[Manifest]) -> None:
    """RFC 6335, which pods, Services and policies are held to when they are made, and a RayCluster's pods no sooner."""
    named = [port for pod in pods(manifests).values() for c in pod["spec"]["containers"] for port in c.get("ports", ())]
    assert named
    for port in named:
        name = port["name"]
        assert len(name) <= 15, name
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name), name
        assert re.search("[a-z]", name), name
    by_name = {port["name"] for port in named}
    for policy in of_kind(manifests, "NetworkPolicy"):
        for rule in policy["spec"]["ingress"]:
            for port in rule.get("ports", ()):
                assert port["port"] in by_name, "a port that some pod has"


class _Answers(BaseHTTPRequestHandler):
    codes: dict[str, int]

    def do_GET(self) -> None:
        self.send_response(self.codes[self.path])
        self.end_headers()

    def log_message(self, *words: object) -> None:
        pass


@pytest.mark.parametrize(
    ("codes", "status", "said"),
    [
        ({RAYLET: 200, "/ready": 200}, 0, ""),
        ({RAYLET: 200, "/ready": 503}, 1, "/ready answers 503"),
        ({RAYLET: 500, "/ready": 200}, 1, f"{RAYLET} answers 500"),
        (None, 1, "refused"),
    ],
)
def test_the_probe_of_a_router_is_what_raylet_and_router_say(
    codes: dict[str, int] | None, status: int, said: str
) -> None:
    (container,) = groups(rendered("8xa100"))["router"]["template"]["spec"]["containers"]
    _, *words = container["readinessProbe"]["exec"]["command"]
    handler = type("Answers", (_Answers,), {"codes": codes})
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        here = f"http://127.0.0.1:{server.server_port}"
        if codes is None:
            server.shutdown()
            server.server_close()
        words = [word if "://" not in word else f"{here}/{word.split('/', 3)[3]}" for word in words]
        ended = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=30, check=False)
        if codes is not None:
            server.shutdown()
    assert (ended.returncode, said in ended.stderr) == (status, True)
