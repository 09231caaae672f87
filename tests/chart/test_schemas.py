"""Every manifest against the schemas of Kubernetes, strict, and of the CRDs."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.chart.conftest import TOOLS, Manifest, groups, pods, rendered, template

CUSTOM = {
    "RayService": "rayservices",
    "RayCluster": "rayclusters",
    "PodMonitor": "podmonitors",
    "PrometheusRule": "prometheusrules",
}


@pytest.mark.parametrize("version", ["1.29", "1.37"])
def test_kubernetes_own_kinds_are_valid_and_have_no_key_that_there_is_not(
    version: str, manifests: list[Manifest], tmp_path: Path
) -> None:
    """The pods, too, which nobody checks within a RayCluster."""
    made = [manifest for manifest in manifests if manifest["kind"] not in CUSTOM]
    made += [
        {"apiVersion": "v1", "kind": "Pod", "metadata": pod["metadata"] | {"name": f"p{n}"}, "spec": pod["spec"]}
        for n, pod in enumerate(pods(manifests).values())
    ]
    file = tmp_path / "made.yaml"
    file.write_text(yaml.safe_dump_all(made))
    command: list[str | Path] = [TOOLS / "kubernetes-validate", "--strict", "--kubernetes-version", version, file]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@functools.cache
def schema_of(crds: Path, plural: str, version: str) -> Any:
    definition = yaml.load((crds / f"{plural}.yaml").read_text(), yaml.CSafeLoader)
    (schema,) = [v["schema"]["openAPIV3Schema"] for v in definition["spec"]["versions"] if v["name"] == version]
    return strict(schema)


def strict(schema: Any) -> Any:
    """An API server refuses keys that a schema does not have; the schema itself does not say so."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    held = {key: strict(part) for key, part in schema.items()}
    if "x-kubernetes-int-or-string" in schema:
        held.pop("type", None)
    is_object = isinstance(schema.get("properties"), dict) and schema.get("type") == "object"
    if is_object and not schema.get("x-kubernetes-preserve-unknown-fields"):
        held.setdefault("additionalProperties", False)
    return held


def test_kinds_of_kuberay_and_of_prometheus_operator_are_valid_and_have_no_key_that_there_is_not(
    crds: Path, manifests: list[Manifest]
) -> None:
    made = [manifest for manifest in manifests if manifest["kind"] in CUSTOM]
    assert made
    for manifest in made:
        _, version = manifest["apiVersion"].split("/")
        schema = dict(schema_of(crds, CUSTOM[manifest["kind"]], version))
        schema["properties"] = schema["properties"] | {"metadata": {}}
        jsonschema.Draft202012Validator(schema).validate(manifest)


def test_the_longest_names_are_still_labels() -> None:
    """KubeRay puts the name of a group into a label of its pods; it shortens the names of the pods by itself."""
    model, zone = "m" * 30, "z" * 26
    made = groups(rendered("8xa100", f"models[1].name={model}", f"models[1].zones={{{zone}}}"))
    assert max(map(len, made)) == len(f"model-{model}-{zone}") <= 63
    for setting in (f"models[1].name={model}m", f"models[1].zones={{{zone}z}}"):
        assert "does not match pattern" in template("8xa100", setting, check=False).stderr
