"""What every process of a deployment on Ray sets up for itself."""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import Any

import ray
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from deployments.controller_link import Find
from deployments.settings import Instance

_FIND_TIMEOUT_S = 5.0


def configure_logging(instance: Instance) -> None:
    """Our loggers write to the worker's standard error, which Ray keeps in a file per process."""
    logger = logging.getLogger("forebay")
    logger.setLevel(instance.log_level)
    logger.propagate = False
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
        logger.addHandler(handler)


def listen_host(instance: Instance) -> str:
    """The address of this node that links are accepted on."""
    if instance.profile.listen == "loopback":
        return "127.0.0.1"
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def controller_finder(controller: DeploymentHandle[Any]) -> Find:
    """Asks Serve for the controller's address: the only thing that ever goes through a Ray call."""

    async def find() -> tuple[str, int]:
        async with asyncio.timeout(_FIND_TIMEOUT_S):
            try:
                host, port = await controller.address.remote()
            except (ray.exceptions.RayError, RayServeException) as error:
                raise TimeoutError(f"Serve knows no controller now: {error}") from error
        return host, port

    return find
