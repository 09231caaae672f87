"""A replica as a Serve deployment: a thin wrapper around replica_process.py."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from cluster.clock import SystemClock
from cluster.model import ModelFolder
from cluster.ports import EnginePort
from cluster.types import ReplicaId
from deployments.engines import build_engine
from deployments.garbage import settle
from deployments.process import configure_logging, controller_finder, listen_host
from deployments.replica_process import ReplicaProcess
from deployments.settings import Environment, Instance

LOG = logging.getLogger("forebay.replica")


class Replica:
    """Ready for routers once it is constructed."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, instance_fields: dict[str, Any], model_name: str, controllers: list[DeploymentHandle[Any]]
    ) -> None:
        instance = Instance.model_validate(instance_fields)
        configure_logging(instance)
        model = instance.model(model_name)

        def load(folder: ModelFolder) -> EnginePort:
            return build_engine(folder, model.config.engine, SystemClock())

        replica_id = ReplicaId(serve.get_replica_context().replica_id.unique_id)
        find, *standby = map(controller_finder, controllers)
        self._process = ReplicaProcess(instance, model.folder, replica_id, find, load, _die, self._retire, *standby)
        here = Environment()
        await self._process.start(listen_host(instance), here.zone, here.node, here.pod_ref)
        settle()
        await self._process.meet_routers()

    def _retire(self) -> None:
        self._ending = asyncio.create_task(self._end(), name="end")

    async def _end(self) -> None:
        """Not by Serve, which would choose by itself which one goes."""
        LOG.info("retired and empty, leaving")
        try:
            await self._process.close()
        finally:
            logging.shutdown()
            os._exit(0)

    async def check_health(self) -> None:
        """Serve asks every second; raising replaces this replica."""
        self._process.check()

    async def __del__(self) -> None:
        """Serve awaits this before it ends the replica: work that has begun is finished first."""
        if hasattr(self, "_process"):
            try:
                await self._process.drain()
            finally:
                await self._process.close()


def _die(why: str) -> None:
    """The engine is dead. Ending the process closes every link at once: routers know in milliseconds, and Serve
    starts another in about two seconds, against four for a failing health check."""
    LOG.critical("engine dead, leaving: %s", why)
    logging.shutdown()
    os._exit(1)
