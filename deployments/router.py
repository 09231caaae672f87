"""The router as a Serve deployment: a thin wrapper around router_process.py.

Serve's HTTP proxy is not used; Serve starts this process, watches it and starts it again.
"""

from __future__ import annotations

from collections.abc import Callable
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import ray
from ray.serve.handle import DeploymentHandle

from deployments.garbage import settle
from deployments.process import configure_logging, controller_finder
from deployments.router_process import RouterProcess
from deployments.settings import Instance, url_of


def reached_at(url: str, node_address: Callable[[], str]) -> str:
    """The address for others of what listens at `url`: of one that listens on every address of its node, the node's."""
    told = urlsplit(url)
    if told.hostname is None or told.port is None:
        return ""
    try:
        everywhere = ip_address(told.hostname).is_unspecified
    except ValueError:  # a name
        everywhere = False
    return url_of(node_address() if everywhere else told.hostname, told.port)


class Router:
    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, instance_fields: dict[str, Any], controllers: list[DeploymentHandle[Any]], replicas: object
    ) -> None:
        del replicas  # named only so that the application has them
        instance = Instance.model_validate(instance_fields)
        configure_logging(instance)
        self._process = RouterProcess(instance, *map(controller_finder, controllers))
        await self._process.start()
        settle()

    async def drain(self) -> None:
        """Leave, while the replicas still work."""
        await self._process.drain()

    async def address(self) -> str:
        """Where others of the cluster reach it; empty while it stands by."""
        return reached_at(self._process.url, ray.util.get_node_ip_address)

    async def check_health(self) -> None:
        """Serve asks every second; raising replaces this router."""
        self._process.check()

    async def __del__(self) -> None:
        """Serve awaits this before it ends the router: what clients have sent is answered first."""
        if hasattr(self, "_process"):
            try:
                await self._process.drain()
            finally:
                await self._process.close()
