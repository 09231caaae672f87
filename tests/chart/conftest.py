"""The chart, rendered by helm. Tools come from `make deploy-tools`; without them these tests are skipped.

FOREBAY_TEST_CRDS names a folder with the CRDs of KubeRay and of prometheus-operator, one a file; FOREBAY_TEST_KUBECONFIG a
kubeconfig of a cluster, or of an API server alone, in which the tests may make and delete namespaces, and these CRDs.
"""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tenacity import Retrying, stop_after_delay, wait_fixed

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "forebay"
TOOLS = ROOT / ".venv-deploy" / "bin"
EXAMPLES = {path.stem: path for path in sorted((CHART / "examples").glob("*.yaml"))}
VARIANTS = [
    *((name, ()) for name in EXAMPLES),
    *((name, ("mode=raycluster",)) for name in EXAMPLES),
    ("one-node", ("kubernetesAccess.enabled=true",)),
    ("8xa100", ("autoscaling.enabled=true", "controllers.replicas=1", "image.pullSecrets={registry}")),
]
"""Of values: an example, and what is set otherwise."""
RELEASE, NAMESPACE = "serving", "llm"
Manifest = dict[str, Any]


def helm(*words: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run([TOOLS / "helm", *words], capture_output=True, text=True, timeout=60, check=check)


def template(
    values: str, *settings: str, values_file: Path | None = None, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Of an example, and what a file and settings say otherwise."""
    changes: list[str | Path] = [word for setting in settings for word in ("--set", setting)]
    if values_file is not None:
        changes += ["--values", values_file]
    words = ("template", RELEASE, CHART, "--namespace", NAMESPACE, "--values", EXAMPLES[values])
    return helm(*words, *changes, check=check)


@functools.cache
def rendered(values: str, *settings: str) -> list[Manifest]:
    """Once for each; to be read only."""
    manifests = yaml.load_all(template(values, *settings).stdout, yaml.CSafeLoader)
    return [manifest for manifest in manifests if manifest]


def of_kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] == kind]


def ray_cluster(manifests: list[Manifest]) -> Manifest:
    """Its spec."""
    (ray,) = of_kind(manifests, "RayService") + of_kind(manifests, "RayCluster")
    spec: Manifest = ray["spec"]["rayClusterConfig"] if ray["kind"] == "RayService" else ray["spec"]
    return spec


def groups(manifests: list[Manifest]) -> dict[str, Manifest]:
    """The head's group, named head, and the groups of workers."""
    spec = ray_cluster(manifests)
    return {"head": spec["headGroupSpec"]} | {group["groupName"]: group for group in spec["workerGroupSpecs"]}


def pods(manifests: list[Manifest]) -> dict[str, Manifest]:
    """Every template of a pod, by the group or Job that makes them."""
    found = {name: group["template"] for name, group in groups(manifests).items()}
    return found | {job["metadata"]["name"]: job["spec"]["template"] for job in of_kind(manifests, "Job")}


def serve_config(manifests: list[Manifest]) -> Manifest:
    """What Serve is told, however it comes to it."""
    services = of_kind(manifests, "RayService")
    (text,) = (
        [services[0]["spec"]["serveConfigV2"]]
        if services
        else [m["data"]["serve.yaml"] for m in of_kind(manifests, "ConfigMap") if "serve.yaml" in m["data"]]
    )
    config: Manifest = yaml.load(text, yaml.CSafeLoader)
    return config


@pytest.fixture(scope="session", autouse=True)
def _tools() -> None:
    if not (TOOLS / "helm").is_file():
        pytest.skip("needs helm: `make deploy-tools`")


@pytest.fixture(params=VARIANTS, ids=lambda variant: "-".join((variant[0], *variant[1])))
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    values, settings = request.param
    return rendered(values, *settings)


@pytest.fixture(scope="session")
def crds() -> Path:
    folder = os.environ.get("FOREBAY_TEST_CRDS")
    if not folder:
        pytest.skip("needs CRDs: FOREBAY_TEST_CRDS is not set")
    return Path(folder).resolve()


@pytest.fixture(scope="session")
def kubeconfig(crds: Path) -> Path:
    """Of a server that has the CRDs."""
    told = os.environ.get("FOREBAY_TEST_KUBECONFIG")
    if not told:
        pytest.skip("needs an API server: FOREBAY_TEST_KUBECONFIG is not set")
    path = Path(told).resolve()
    names = ("rayservices", "rayclusters", "podmonitors", "prometheusrules")
    files = [word for name in names for word in ("-f", crds / f"{name}.yaml")]
    kubectl(path, "apply", "--server-side", "--force-conflicts", *files)
    # It gives up at once where the server has not given a new kind a status yet.
    for attempt in Retrying(stop=stop_after_delay(30), wait=wait_fixed(0.1), reraise=True):
        with attempt:
            kubectl(path, "wait", "--for=condition=Established", "--timeout=30s", *files)
    return path


def kubectl(kubeconfig: Path, *words: str | Path) -> str:
    command = [TOOLS / "kubectl", "--kubeconfig", kubeconfig, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.fixture
def namespace(kubeconfig: Path) -> Iterator[str]:
    name = f"forebay-test-{os.urandom(4).hex()}"
    kubectl(kubeconfig, "create", "namespace", name)
    yield name
    kubectl(kubeconfig, "delete", "namespace", name, "--wait=false")
