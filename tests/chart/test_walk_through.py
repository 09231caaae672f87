"""The page ops/docs/kubernetes.md, carried out: its commands as they stand there, against an API server.

Of what a cluster would do with it, only what the server keeps can be seen: nothing runs.
"""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chart.conftest import RELEASE, ROOT, TOOLS, kubectl
from tests.chart.test_install import Objects, objects

pytestmark = pytest.mark.slow

PAGE = (ROOT / "ops" / "docs" / "kubernetes.md").read_text(encoding="utf-8")
STEPS = ("Install", "Upgrade", "Roll back", "Remove")
SECRET_MAX_BYTES = 2**20
"""Of Kubernetes, and so of what helm keeps of a release."""
RAY = "RayService", f"{RELEASE}-forebay"


def steps() -> dict[str, str]:
    """What each section of the page has to be typed, by its title."""
    sections = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
    return {title: "\n".join(re.findall(r"```sh\n(.*?)```", sections[title], re.DOTALL)) for title in STEPS}


@pytest.fixture
def place(kubeconfig: Path, tmp_path: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """A folder that looks like the checkout, and an environment in which the page's names are set."""
    (tmp_path / "helm").symlink_to(ROOT / "helm")
    (tmp_path / ".venv").symlink_to(sys.prefix)
    namespace = f"forebay-test-{os.urandom(4).hex()}"
    names = re.findall(r"(\w+)=", re.findall(r"```sh\nexport (.*)\n```", PAGE)[0])
    values = [namespace, "registry.example/walked", f"sha256:{os.urandom(32).hex()}"]
    environment = os.environ | dict(zip(names, values, strict=True))
    environment |= {
        "KUBECONFIG": str(kubeconfig),
        "PATH": f"{TOOLS}:{os.environ['PATH']}",
        "HELM_CACHE_HOME": str(tmp_path / "cache"),
    }
    yield tmp_path, environment
    kubectl(kubeconfig, "delete", "namespace", namespace, "--ignore-not-found", "--wait=false")


def walk(step: str, place: tuple[Path, dict[str, str]]) -> str:
    folder, environment = place
    ended = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", steps()[step]],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def secrets_of(kubeconfig: Path, namespace: str) -> tuple[dict[str, str], list[str]]:
    """What the page's own Secrets hold; and what helm has kept of each revision, unpacked."""
    told = json.loads(kubectl(kubeconfig, "get", "secrets", "--namespace", namespace, "--output", "json"))
    values: dict[str, str] = {}
    kept: list[str] = []
    for secret in told["items"]:
        data = {key: base64.b64decode(value) for key, value in secret["data"].items()}
        if "release" in data:
            assert len(data["release"]) < SECRET_MAX_BYTES
            kept.append(gzip.decompress(base64.b64decode(data["release"])).decode())
        else:
            values |= {f"{secret['metadata']['name']}/{key}": value.decode().strip() for key, value in data.items()}
    return values, kept


def serving(there: Objects) -> str:
    """What Serve is told."""
    return str(there[RAY]["spec"]["serveConfigV2"])


def test_the_page_is_walked_from_install_to_removal(kubeconfig: Path, place: tuple[Path, dict[str, str]]) -> None:
    _, environment = place
    namespace = environment["NAMESPACE"]
    said = walk("Install", place)
    first = objects(kubeconfig, namespace)
    kinds = {kind for kind, _ in first}
    assert kinds >= {"RayService", "Service", "NetworkPolicy", "PodMonitor", "PrometheusRule", "ConfigMap"}
    ray = first[RAY]["spec"]["rayClusterConfig"]
    images = {
        c["image"]
        for group in (ray["headGroupSpec"], *ray["workerGroupSpecs"])
        for c in group["template"]["spec"]["containers"]
    }
    assert images == {f"{environment['IMAGE']}@{environment['DIGEST']}"}

    said += walk("Upgrade", place)
    second = objects(kubeconfig, namespace)
    assert '"max_queue_s": 300' in serving(second)
    assert '"max_queue_s"' not in serving(first)
    changed = {name for name in first | second if first.get(name) != second.get(name)}
    assert changed == {RAY}, "what was chosen at the start stays"
    assert second[RAY]["spec"]["rayClusterConfig"] == ray, "no pod changes: it is rolled out in place"

    said += walk("Roll back", place)
    assert objects(kubeconfig, namespace) == first

    values, kept = secrets_of(kubeconfig, namespace)
    assert len(kept) == 3
    (key,) = re.findall(r"fb-[0-9a-f]{12}-[0-9a-f]{48}", said)
    values["the client's key"] = key
    assert all(len(value) >= 32 for value in values.values())
    everything = [*kept, json.dumps([*first.values(), *second.values()]), said.replace(key, "")]
    for what, value in values.items():
        for form in (value, base64.b64encode(value.encode()).decode(), json.dumps(value)[1:-1]):
            assert not any(form in text for text in everything), what

    walk("Remove", place)
    assert objects(kubeconfig, namespace) == {}
