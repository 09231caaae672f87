"""The whole line in one process: controller, router and replicas over real sockets, real engines, no Ray.

Owns: composing and ending it. What Ray adds (processes, restarts, health checks) is tested in tests/ray and tests/e2e.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from cluster.clock import SystemClock
from cluster.messages import ToController
from cluster.metrics import REPLICAS_READY, Metric
from cluster.model import ModelFolder
from cluster.ports import EnginePort
from cluster.types import ReplicaId
from deployments.controller_link import Find
from deployments.controller_server import ROLES, ControllerServer
from deployments.replica_process import ReplicaProcess
from deployments.router_process import RouterProcess
from deployments.settings import Instance, Profile
from deployments.transport import Acceptor
from router.core import RouterCore

T = TypeVar("T")
Load = Callable[[ModelFolder], EnginePort]


@dataclass
class Line:
    """A running line. `url` is the router's; `model` and `core` are of its first model."""

    url: str
    model: ModelFolder
    router: RouterProcess
    controller: ControllerServer
    replicas: list[ReplicaProcess]
    acceptor: Acceptor
    client: httpx.AsyncClient
    find: Find
    """Where the controller is."""

    async def metric(self, metric: Metric, **labels: str) -> float:
        return await read_metric(self.client, metric, **labels)

    @property
    def core(self) -> RouterCore:
        return self.router.cores[self.model.name]

    async def ready_replicas(self) -> float:
        return await self.metric(REPLICAS_READY)

    def blocks_used(self) -> list[int]:
        loads = [replica.engine.progress().load for replica in self.replicas]
        return [load.blocks_total - load.blocks_free for load in loads]


async def read_metric(client: httpx.AsyncClient, metric: Metric, **labels: str) -> float:
    """Sum of a metric's samples that carry these labels (counters: the total), as a router says it."""
    text = (await client.get("/metrics")).text
    names = {metric.name, f"{metric.name}_total"}
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name in names and labels.items() <= sample.labels.items()
    )


async def until(
    observe: Callable[[], Awaitable[T]], holds: Callable[[T], object], within_s: float = 30.0
) -> tuple[T, float]:
    """Observe again and again until `holds`; returns what was seen and after how many seconds.

    For state that no event tells of, as another process sees it. Raises AssertionError after `within_s`.
    """
    started = time.monotonic()
    while True:
        seen = await observe()
        waited_s = time.monotonic() - started
        if holds(seen):
            return seen, waited_s
        assert waited_s < within_s, f"not within {within_s} s; last seen: {seen!r}"
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def running_line(
    models: ModelFolder | Sequence[ModelFolder], profile: Profile, folder: Path, load: Load | None = None
) -> AsyncIterator[Line]:
    """Start `profile` on its model or `models`; its secret is kept in `folder`. `load` makes the engines (default: the
    embedded one). Replicas are numbered in the order of the models."""
    from cluster.engine.torch.build import build_embedded_engine, prepare_process

    prepare_process()
    secret_path = folder / "secret"
    secret_path.write_text("0123456789abcdef" * 4)
    profile = profile.model_copy(update={"router": profile.router.model_copy(update={"port": 0})})
    paths = tuple(model.path for model in ([models] if isinstance(models, ModelFolder) else models))
    instance = Instance(profile=profile, model_folders=paths, secret_path=secret_path)
    served = instance.models()

    server = ControllerServer(instance.secret(), SystemClock(), control=instance.profile.control)
    decode = msgspec.msgpack.Decoder(ToController).decode
    acceptor = Acceptor(server.identity, ROLES, decode, server.accept, profile.transport)
    address = await acceptor.listen("127.0.0.1", 0, instance.secret())

    async def find() -> tuple[str, int]:
        return address

    def embedded(opened: ModelFolder) -> EnginePort:
        return build_embedded_engine(opened, served[opened.name].config.engine, SystemClock())

    def died(why: str) -> None:
        raise AssertionError(f"an engine died: {why}")

    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(acceptor.close)
        replicas = []
        each = [model.folder for model in served.values() for _ in range(model.config.replicas)]
        for number, model in enumerate(each):
            replica = ReplicaProcess(instance, model, ReplicaId(f"replica-{number}"), find, load or embedded, died)
            stack.push_async_callback(replica.close)
            await replica.start("127.0.0.1")
            replicas.append(replica)
        router = RouterProcess(instance, find)
        stack.push_async_callback(router.close)
        await router.start()
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=router.url, timeout=60))
        line = Line(router.url, each[0], router, server, replicas, acceptor, client, find)
        await until(lambda: line.ready_replicas(), lambda ready: ready == len(each))
        yield line
