"""Deploys again on the Ray cluster of a running instance, as an upgrade does.

    python -m tests.ray.redeploy FOLDER ADDRESS INSTANCE_FILE

FOLDER is the instance's own (its token lies there), ADDRESS that of its cluster. Ends when Serve says that what is deployed runs.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from deployments.settings import Instance


def redeploy(folder: Path, address: str, instance: Instance) -> None:
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(folder / "ray-token"), RAY_USAGE_STATS_ENABLED="0")
    import ray
    from ray import serve

    from deployments.app import APPLICATION, build

    ray.init(address=address, namespace="forebay", log_to_driver=False, logging_level=logging.ERROR)
    serve.run(build(instance), name=APPLICATION, route_prefix=None)


if __name__ == "__main__":
    redeploy(Path(sys.argv[1]), sys.argv[2], Instance.model_validate_json(Path(sys.argv[3]).read_bytes()))
