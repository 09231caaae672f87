"""A Ray cluster as an operator of one has it, with its dashboard and nothing on it.

    python -m tests.ray.head FOLDER RESOURCES

FOLDER is its own: the token, ray-token, lies there. RESOURCES is JSON, by name. It prints the dashboard's URL once it runs
and ends with its input.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path


def main(folder: Path, resources: dict[str, float]) -> None:
    os.environ.update(
        RAY_AUTH_MODE="token",
        RAY_AUTH_TOKEN_PATH=str(folder / "ray-token"),
        RAY_USAGE_STATS_ENABLED="0",
        RAY_prestart_worker_first_driver="0",
        RAY_worker_niceness="0",
        OMP_NUM_THREADS="1",
    )
    import ray

    context = ray.init(
        address="local",
        num_cpus=0,
        resources=resources,
        include_dashboard=True,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=80 * 2**20,
        _temp_dir=str(folder / "ray"),
    )
    # As `ray start` leaves it: jobs look there for their cluster, where a machine has several.
    (folder / "ray" / "ray_current_cluster").write_text(context.address_info["gcs_address"])  # type: ignore[attr-defined]
    print(f"http://{context.dashboard_url}", flush=True)
    sys.stdin.read()
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
