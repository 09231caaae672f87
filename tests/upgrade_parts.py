"""A router or a replica as a process that its signals end, as tests/upgrade.py starts it.

    python -m tests.upgrade_parts router INSTANCE_FILE CONTROLLER_PORT
    python -m tests.upgrade_parts replica INSTANCE_FILE CONTROLLER_PORT REPLICA_ID STEP_MS

Owns: nothing but the composition; what SIGTERM means is deployments/lifecycle.py's. Each says one line once it can be used.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from urllib.parse import urlsplit

import uvloop

from cluster.clock import SystemClock
from cluster.engine.runner import EngineRunner
from cluster.model import ModelFolder
from cluster.ports import EnginePort
from cluster.types import ReplicaId
from deployments.lifecycle import run_until_told
from deployments.replica_process import ReplicaProcess
from deployments.router_process import RouterProcess
from deployments.settings import Instance
from ops.bench.router_wire import Listening, say
from tests.padded import PaddedBackend, engine_over


async def router(instance: Instance, controller_port: int) -> None:
    async def find() -> tuple[str, int]:
        return "127.0.0.1", controller_port

    process = RouterProcess(instance, find)
    await process.start()
    port = urlsplit(process.url).port
    say(Listening(() if port is None else (port,)))
    await run_until_told(process)


async def replica(instance: Instance, controller_port: int, replica_id: ReplicaId, step_s: float) -> None:
    from cluster.engine.torch.backend import TorchBackend
    from cluster.engine.torch.build import prepare_process

    async def find() -> tuple[str, int]:
        return "127.0.0.1", controller_port

    prepare_process()
    (served,) = instance.models().values()
    config = served.config.engine

    def load(model: ModelFolder) -> EnginePort:
        return EngineRunner(
            engine_over(PaddedBackend(TorchBackend(model, config), step_s), model, config), SystemClock()
        )

    process = ReplicaProcess(instance, served.folder, replica_id, find, load, _die)
    await process.start("127.0.0.1")
    await process.meet_routers()
    say(Listening(()))
    await run_until_told(process)


def _die(why: str) -> None:
    print(f"engine dead, leaving: {why}", file=sys.stderr, flush=True)
    os._exit(1)


def main(role: str, instance_file: str, controller_port: str, *rest: str) -> None:
    instance = Instance.model_validate_json(Path(instance_file).read_bytes())
    if role == "router":
        uvloop.run(router(instance, int(controller_port)))
    else:
        replica_id, step_ms = rest
        asyncio.run(replica(instance, int(controller_port), ReplicaId(replica_id), float(step_ms) / 1000))


if __name__ == "__main__":
    main(*sys.argv[1:])
