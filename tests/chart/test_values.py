"""Values that cannot be are refused before anything is made, by a message that names the key."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

from ops.chart_schema import OF_THE_CHART, SCHEMA, definitions
from tests.chart.conftest import CHART, EXAMPLES, helm, of_kind, rendered, template


@pytest.mark.parametrize("values", EXAMPLES)
def test_every_example_passes_helms_linter(values: str) -> None:
    helm("lint", "--strict", CHART, "--values", EXAMPLES[values])


REFUSED = {
    "mode=rayjob": "/mode': value must be one of 'rayservice', 'raycluster'",
    "router.replica=3": "/router': additional properties 'replica' not allowed",
    "routers.replicas=3": "additional properties 'routers' not allowed",
    "models[0].engin.slots=3": "/models/0': additional properties 'engin' not allowed",
    "models[1].engine.slot=3": "/models/1/engine': additional properties 'slot' not allowed",
    "models[0].scale.maximum=3": "/models/0/scale': additional properties 'maximum' not allowed",
    "models[0].gpu.count=2": "/models/0/gpu/count': maximum: got 2, want 1",
    "models[0].replicas=0": "/models/0/replicas': minimum: got 0, want 1",
    "models[0].name=Llama_3": "/models/0/name': 'Llama_3' does not match pattern",
    "profile.router.max_queue_seconds=3": "/profile/router': additional properties 'max_queue_seconds' not allowed",
    "profile.router.host=0.0.0.0": "/profile/router': additional properties 'host' not allowed",
    "profile.health.drain_timeout_s=5": "/profile/health': additional properties 'drain_timeout_s' not allowed",
    "profile.control.tick_s=0": "/profile/control/tick_s': exclusiveMinimum: got 0, want 0",
    "startup.modelLoadSeconds=600": "/startup/modelLoadSeconds': minimum: got 600, want 1,800",
    "image.uid=0": "/image/uid': minimum: got 0, want 1",
    "image.digest=sha256:12": "/image/digest': 'sha256:12' does not match pattern",
    "ray.env.RAY_AUTH_MODE=disabled": "RAY_AUTH_MODE",
    "ray.env.RAY_AUTH_TOKEN=x": "RAY_AUTH_TOKEN",
    "ray.env.AWS_SECRET_ACCESS_KEY=x": "AWS_SECRET_ACCESS_KEY",
    "gcs.redis.address=redis:6379": "/gcs/redis/address': 'redis:6379' does not match pattern",
    "gcs.redis.address=redis://user:word@redis:6379": "/gcs/redis/address': 'redis://user:word@redis:6379' does not match",
    "monitoring.prometheusRules.enabled=true": "/monitoring': additional properties 'prometheusRules' not allowed",
    "monitoring.runbooksUrl=https://x.example/": "/monitoring/runbooksUrl': ",
    'monitoring.runbooksUrl=https://a/"b': "/monitoring/runbooksUrl': ",
    "monitoring.ports.controller=9464": "monitoring.ports.model and monitoring.ports.controller are both 9464",
    "monitoring.ports.model=8080": "monitoring.ports.model (8080) is a port of Ray's",
    "router.port=8265": "router.port (8265) is a port of Ray's",
    "monitoring.ports.controller=10002": "/monitoring/ports/controller': maximum: got 10,002, want 9,999",
    "networkPolicy.clients[0].cidr=10.0.0.0/8": "/networkPolicy/clients/0': additional properties 'cidr' not allowed",
    "secrets.rayToken.name=": "secrets.rayToken.name must be given",
    "secrets.cluster.name=": "secrets.cluster.name must be given",
    "secrets.keys.name=": "secrets.keys.name must be given, or router.auth: none",
    "modelStore.claimName=": "modelStore.claimName must be given",
    "image.repository=": "image.repository must be given",
    "image.digest=": "image.tag or image.digest must be given",
    "models=null": "models must name at least one",
    "models[0].replicas=7": "models[0].replicas (7) must be between scale.min (3), one at least, and scale.max (6)",
    "models[0].replicas=2": "models[0].replicas (2) must be between scale.min (3)",
    "models[1].name=llama-3-8b": "models[1].name: llama-3-8b names two models",
    "models[1].model=/data/llama": "models[1].model: /data/llama must be a folder below modelStore.mountPath (/models)",
    "models[1].minAvailable=2": "models[1].minAvailable (2) must be below the fewest pods that it has (2)",
    "models[1].zones={a,b,c}": "models[1].replicas (2) must be a multiple of its 3 zones",
    "models[0].zones={a,b,c,d,e,f}": "models[0].replicas (3) must be a multiple of its 6 zones",
    "models[0].zones={a,b,c},models[0].scale.min=1": "models[0].scale.min (1) must be a multiple of its 3 zones",
    "router.minAvailable=2": "router.minAvailable (2) must be below router.replicas (2)",
    "router.drainNoticeSeconds=8": "router.drainNoticeSeconds (8) must be at least three times",
    "drain.seconds=15": "drain.seconds (15) must be longer than router.drainNoticeSeconds (15)",
}
"""What is set otherwise in the example of eight A100s, and what helm says."""


@pytest.mark.parametrize("setting", REFUSED)
def test_what_cannot_be_is_refused_by_a_message_that_names_the_key(setting: str) -> None:
    refused = template("8xa100", setting, check=False)
    assert refused.returncode != 0
    assert REFUSED[setting] in refused.stderr


def test_a_chart_without_values_says_what_it_needs() -> None:
    refused = helm("template", "x", CHART, check=False)
    assert "must be given" in refused.stderr


@pytest.mark.parametrize("mode", ["rayservice", "raycluster"])
def test_helms_linter_says_each_value_that_is_missing_and_nothing_else_is_wrong(mode: str) -> None:
    """What `fail` says is no error to the linter: with nothing it has to render all the same."""
    linted = helm("lint", "--strict", CHART, "--set", f"mode={mode}", check=False)
    assert linted.returncode == 0, linted.stdout
    for key in (
        "image.repository", "image.tag or image.digest", "secrets.rayToken.name", "secrets.cluster.name", "secrets.keys.name",
        "modelStore.claimName",
    ):  # fmt: skip
        assert f"{key} must be given" in linted.stderr
    assert "models must name at least one" in linted.stderr


def test_scaling_pods_needs_a_model_that_scales() -> None:
    refused = template("one-node", "autoscaling.enabled=true", check=False)
    assert "autoscaling.enabled: no entry of models has scale" in refused.stderr


def test_the_schema_of_settings_is_productions() -> None:
    assert json.loads(SCHEMA.read_text())["$defs"] == definitions(), "run `python -m ops.chart_schema`"
    # A key that the chart sets is one that there is.
    assert all(key in model.model_fields for model, keys in OF_THE_CHART.items() for key in keys)


def open_objects(schema: Any, at: str = "") -> list[str]:
    """Places where the schema lets any key be."""
    if isinstance(schema, list):
        return [place for n, part in enumerate(schema) for place in open_objects(part, f"{at}/{n}")]
    if not isinstance(schema, dict):
        return []
    found = [at] if "properties" in schema and schema.get("additionalProperties") is not False else []
    return found + [place for key, part in schema.items() for place in open_objects(part, f"{at}/{key}")]


def test_every_object_of_the_schema_refuses_what_it_does_not_know() -> None:
    schema = json.loads(SCHEMA.read_text())
    assert schema["additionalProperties"] is False
    assert open_objects(schema) == []


def keys_of(values: Any, schema: Any, at: str = "") -> set[str]:
    """Of default values, down to where they are lists or Kubernetes' own."""
    if not isinstance(values, dict) or not schema.get("properties"):
        return {at}
    return {key for name, value in values.items() for key in keys_of(value, schema["properties"][name], f"{at}.{name}")}


def test_every_key_of_the_schema_has_a_default_that_the_file_of_values_shows() -> None:
    schema, values = json.loads(SCHEMA.read_text()), yaml.safe_load((CHART / "values.yaml").read_text())
    for name, part in schema["properties"].items():
        if name != "global":  # helm's own
            assert name in values, name
            keys_of(values[name], part)  # raises KeyError for one that the schema lacks
            assert set(part.get("properties", {})) <= set(values[name] or {}) or part["type"] == "array", name
    said = (CHART / "values.yaml").read_text()
    model = schema["properties"]["models"]["items"]["properties"]
    assert all(re.search(rf"#\s+(- )?{key}:", said) for key in model), "each key of a model is told in a comment"


def test_raycluster_mode_deploys_by_a_job_and_a_change_by_another_job() -> None:
    plain = rendered("8xa100", "mode=raycluster")
    changed = rendered("8xa100", "mode=raycluster", "profile.router.max_queue_s=60")
    assert not of_kind(plain, "RayService")
    names = [of_kind(manifests, "Job")[0]["metadata"]["name"] for manifests in (plain, changed, plain)]
    assert names[0] == names[2] != names[1], "a Job does not change"
    (container,) = of_kind(plain, "Job")[0]["spec"]["template"]["spec"]["containers"]
    assert container["command"] == [
        "serve", "deploy", "--address", "http://serving-forebay-head-svc.llm.svc.cluster.local:8265",
        "/etc/forebay/serve.yaml",
    ]  # fmt: skip
