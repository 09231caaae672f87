"""helm against a real API server, which knows the kinds, refuses unknown keys and keeps what it is given. It runs nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.chart.conftest import CHART, EXAMPLES, RELEASE, Manifest, helm, kubectl

KINDS = (
    "configmaps,jobs,networkpolicies,poddisruptionbudgets,podmonitors,prometheusrules,rayclusters,rayservices,rolebindings,"
    "roles,serviceaccounts,services"
)
Objects = dict[tuple[str, str], Manifest]


def objects(kubeconfig: Path, namespace: str) -> Objects:
    """What the release has, less what the server writes."""
    words = ("get", KINDS, "--namespace", namespace, "--output", "json", "--ignore-not-found")
    told = kubectl(kubeconfig, *words, "--selector", f"app.kubernetes.io/instance={RELEASE}")
    kept = {}
    for item in json.loads(told or '{"items": []}')["items"]:
        metadata = item["metadata"]
        for key in ("resourceVersion", "generation", "managedFields", "uid", "creationTimestamp"):
            metadata.pop(key, None)
        kept[item["kind"], metadata["name"]] = item
    return kept


@pytest.mark.parametrize("mode", ["rayservice", "raycluster"])
def test_installed_upgraded_rolled_back_and_gone(mode: str, kubeconfig: Path, namespace: str) -> None:
    def run(*words: str | Path) -> None:
        helm(*words, "--kubeconfig", kubeconfig, "--namespace", namespace)

    values = ("--values", EXAMPLES["8xa100"], "--set", f"mode={mode}")
    run("install", RELEASE, CHART, *values)
    first = objects(kubeconfig, namespace)
    assert {kind for kind, _ in first} >= {"Service", "NetworkPolicy", "PodDisruptionBudget", "PodMonitor"}
    run(
        "upgrade", RELEASE, CHART, *values, "--set", "router.replicas=5", "--set", "monitoring.podMonitor.enabled=false"
    )
    second = objects(kubeconfig, namespace)
    kind = {"rayservice": "RayService", "raycluster": "RayCluster"}[mode]
    ray = second[kind, f"{RELEASE}-forebay"]["spec"]
    (routers,) = [
        group["replicas"]
        for group in ray.get("rayClusterConfig", ray)["workerGroupSpecs"]
        if group["groupName"] == "router"
    ]
    assert routers == 5
    assert "PodMonitor" not in {kind for kind, _ in second}, "what the new values leave out goes"
    run("rollback", RELEASE, "1")
    assert objects(kubeconfig, namespace) == first
    run("uninstall", RELEASE)
    assert objects(kubeconfig, namespace) == {}


def test_two_releases_live_in_one_namespace(kubeconfig: Path, namespace: str) -> None:
    for release in ("one", "two"):
        helm(
            "install",
            release,
            CHART,
            "--values",
            EXAMPLES["one-node"],
            "--kubeconfig",
            kubeconfig,
            "--namespace",
            namespace,
        )
    listed = kubectl(kubeconfig, "get", "rayservices", "--namespace", namespace, "--output", "name").split()
    assert listed == ["rayservice.ray.io/one-forebay", "rayservice.ray.io/two-forebay"]


@pytest.mark.parametrize("values", EXAMPLES)
def test_the_server_takes_every_example(values: str, kubeconfig: Path, namespace: str) -> None:
    words = ("install", RELEASE, CHART, "--values", EXAMPLES[values], "--dry-run=server")
    helm(*words, "--kubeconfig", kubeconfig, "--namespace", namespace)
