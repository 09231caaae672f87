"""The controller as a Serve deployment: a thin wrapper that listens and answers where."""

from __future__ import annotations

from typing import Any

import msgspec

from cluster.clock import SystemClock
from cluster.messages import ToController
from deployments.controller_server import ROLES, ControllerServer
from deployments.process import configure_logging, listen_host
from deployments.settings import Instance
from deployments.transport import Acceptor


class Controller:
    """One per cluster; Serve starts it again when it dies, and nothing waits for it."""

    async def __init__(self, instance_fields: dict[str, Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        instance = Instance.model_validate(instance_fields)
        configure_logging(instance)
        secret = instance.secret()
        server = ControllerServer(secret, SystemClock())
        decode = msgspec.msgpack.Decoder(ToController).decode
        self._acceptor = Acceptor(server.identity, ROLES, decode, server.accept, instance.profile.transport)
        self._address = await self._acceptor.listen(listen_host(instance), 0, secret)

    async def address(self) -> tuple[str, int]:
        """Where routers and replicas connect."""
        return self._address

    async def __del__(self) -> None:
        if hasattr(self, "_acceptor"):
            await self._acceptor.close()
