"""Serve on a Ray cluster that runs, as an operator of one would use it.

    python -m tests.ray.deploy FOLDER ADDRESS run INSTANCE_FILE    # deploys, also over what is deployed, as an upgrade does
    python -m tests.ray.deploy FOLDER ADDRESS scale DEPLOYMENT     # has Serve keep so many replicas as each line of input says

FOLDER is the instance's own (its token lies there), ADDRESS that of its cluster. `run` ends when Serve says that what is
deployed runs. `scale` prints a line once it is connected and after each that Serve has heard, and ends with its input.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from deployments.settings import Instance


def main(folder: Path, address: str, verb: str, *words: str) -> None:
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(folder / "ray-token"), RAY_USAGE_STATS_ENABLED="0")
    import ray
    from ray import serve

    from deployments.app import APPLICATION, build, kept_by_serve

    ray.init(address=address, namespace="forebay", log_to_driver=False, logging_level=logging.ERROR)
    if verb == "run":
        (instance_file,) = words
        instance = Instance.model_validate_json(Path(instance_file).read_bytes())
        serve.start(proxy_location="Disabled")
        serve.run_many(
            [
                serve.RunTarget(
                    target=build(instance, kept_by_serve()),
                    name=APPLICATION,
                    route_prefix=None,
                    external_scaler_enabled=True,
                )
            ]
        )
    else:
        from ray.serve._private.common import DeploymentID
        from ray.serve.context import _get_global_client

        (deployment,) = words
        client = _get_global_client()
        assert client is not None, "Serve does not run there"
        print("connected", flush=True)
        for line in sys.stdin:
            # What the REST call of an external scaler comes to; that needs Ray's dashboard.
            name, replicas = DeploymentID(deployment, APPLICATION), int(line)
            ray.get(client._controller.update_deployment_replicas.remote(name, replicas))
            print(f"told to keep {replicas}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
