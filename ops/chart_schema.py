"""Keeps the Helm chart's schema in step with the settings that its values are passed on to.

    python -m ops.chart_schema

Owns: `$defs` of helm/forebay/values.schema.json, which are made of the models in cluster/config.py, less the keys that the
chart sets by itself. All else in that file is written by hand.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic.json_schema import models_json_schema

from cluster.config import (
    Config,
    ControlConfig,
    EngineConfig,
    HealthConfig,
    KubernetesConfig,
    RouterConfig,
    ScaleConfig,
    TransportConfig,
)

SCHEMA = Path(__file__).parents[1] / "helm" / "forebay" / "values.schema.json"
OF_THE_CHART: Mapping[type[Config], tuple[str, ...]] = {
    EngineConfig: (),
    ScaleConfig: (),
    TransportConfig: (),
    ControlConfig: ("standby",),
    HealthConfig: ("start_timeout_s", "drain_timeout_s"),
    KubernetesConfig: ("kubeconfig", "namespace", "name"),
    RouterConfig: ("host", "port", "auth", "keys_file", "keys_pepper_file", "open_metrics", "drain_notice_s"),
}
"""Keys that values of another name stand for: set in both places they would disagree."""


def definitions() -> dict[str, Any]:
    """As `$defs` are to be."""
    _, schema = models_json_schema([(model, "validation") for model in OF_THE_CHART])
    made: dict[str, Any] = schema["$defs"]
    for model, keys in OF_THE_CHART.items():
        for key in keys:
            del made[model.__name__]["properties"][key]
    return made


def main() -> None:
    schema = json.loads(SCHEMA.read_text()) | {"$defs": definitions()}
    SCHEMA.write_text(json.dumps(schema, indent=2) + "\n")


if __name__ == "__main__":
    main()
