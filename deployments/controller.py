"""The controller as a Serve deployment: a thin wrapper that listens and answers where."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from cluster.clock import SystemClock
from cluster.control.demand import Meter
from cluster.messages import ToController
from deployments.controller_server import ROLES, ControllerServer
from deployments.exposition import exposed
from deployments.garbage import settle
from deployments.process import configure_logging, listen_host
from deployments.scaler import Scaled, scalers
from deployments.settings import Environment, Instance
from deployments.tasks import raise_if_ended
from deployments.transport import Acceptor


class Controller:
    """One that leads, and one that stands by where the profile says so; Serve starts each again when it dies, and nothing
    waits for it."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, instance_fields: dict[str, Any], application: str, scaled_fields: list[dict[str, Any]], place: int
    ) -> None:
        """
        Args:
            scaled_fields: Of each `scaler.Scaled`.
            place: Its number among the controllers, from 0.
        """
        instance = Instance.model_validate(instance_fields)
        configure_logging(instance)
        secret = instance.secret()
        clock, router = SystemClock(), instance.profile.router
        scaled = [Scaled.model_validate(fields) for fields in scaled_fields]
        weights = router.prompt_token_weight, router.output_token_weight
        meters = {s.model: Meter(*weights, clock.monotonic(), s.scale.average_s) for s in scaled}
        server = ControllerServer(secret, clock, meters, instance.profile.control, place)
        decode = msgspec.msgpack.Decoder(ToController).decode
        self._acceptor = Acceptor(server.identity, ROLES, decode, server.accept, instance.profile.transport)
        self._address = await self._acceptor.listen(listen_host(instance), 0, secret)
        port = instance.profile.metrics.controller_port
        self._exposition = exposed(server.registry, "metrics.controller_port", self._address[0], port)
        self._tasks = [
            asyncio.create_task(scaler.run(), name="scaler")
            for scaler in scalers(scaled, meters, instance.serve, application, server, clock)
        ]
        if (kubernetes := instance.profile.kubernetes) is not None:
            from deployments.kube.operator import in_kubernetes

            operator = in_kubernetes(kubernetes, server, clock, Environment().pod_ref)
            self._tasks.append(asyncio.create_task(operator.run(), name="kubernetes"))
        settle()

    async def address(self) -> tuple[str, int]:
        """Where routers and replicas connect."""
        return self._address

    async def check_health(self) -> None:
        """Serve asks this again and again; raising replaces this controller."""
        raise_if_ended(self._tasks)

    async def __del__(self) -> None:
        tasks = getattr(self, "_tasks", ())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if hasattr(self, "_exposition"):
            await asyncio.to_thread(self._exposition.close)
        if hasattr(self, "_acceptor"):
            await self._acceptor.close()
