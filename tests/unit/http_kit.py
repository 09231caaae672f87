"""A router's HTTP side for tests: a real server on loopback over a core and one fake replica.

Owns: starting and ending it, and the few ways to ask it something.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import uvicorn
from prometheus_client import CollectorRegistry

from cluster.clock import SystemClock
from cluster.config import RouterConfig
from cluster.messages import ClusterStatus
from cluster.model import ModelFolder
from cluster.types import Outcome, ReplicaId, Request
from deployments.http_protocol import HEAD_TIMEOUT_S
from deployments.http_server import uvicorn_config
from router.app import build_app
from router.auth import Guard, Identify
from router.core import RouterCore
from router.metrics_sink import RouterMetrics
from router.pools import Pool, Pools
from tests.unit.fake_replica import FakeReplica

MAX_LEN = 2000
HI = [{"role": "user", "content": "hi"}]
CHAT = {"model": "tiny-llama", "messages": HI, "max_tokens": 5}
TEXT = {"model": "tiny-llama", "prompt": "hello", "max_tokens": 5}


class Server(uvicorn.Server):
    """Says when it is up."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()


class World:
    """A core, one replica, and a server on a free port."""

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        self.app: Guard | None = None
        self.registry = CollectorRegistry()
        self.core = RouterCore(config, SystemClock(), random.Random(1), RouterMetrics(self.registry))
        self.replica = FakeReplica(self.core)
        self.port = 0
        self.cluster: ClusterStatus | None = None
        self.drains: list[tuple[str, bool]] = []
        self.meant: dict[str, tuple[ReplicaId, ...]] | None = None
        """The replicas that a name means to the controller; None where there is none."""

    def pools(self, model: ModelFolder) -> Pools:
        return Pools([Pool(model, self.core, MAX_LEN, self.config)])

    async def cluster_status(self) -> ClusterStatus | None:
        return self.cluster

    async def drain(self, name: str, drain: bool) -> tuple[ReplicaId, ...] | None:
        """The controller's answer, as the test gives it."""
        self.drains.append((name, drain))
        return None if self.meant is None else self.meant.get(name, ())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ended(self, outcome: Outcome, priority_class: str = "standard") -> float:
        labels = {"priority_class": priority_class, "outcome": outcome.value}
        return self.registry.get_sample_value("forebay_requests_total", labels) or 0.0

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait for something that the server brings about on this loop."""
        async with asyncio.timeout(10):
            while not condition():  # noqa: ASYNC110 - the server's own states have no event to wait for
                await asyncio.sleep(0.001)

    def held(self) -> Request:
        (held,) = self.replica.held.values()
        return held.request


@asynccontextmanager
async def serving(
    model: ModelFolder,
    *,
    auto: bool = True,
    connect: bool = True,
    identify: Identify | None = None,
    head_timeout_s: float = HEAD_TIMEOUT_S,
    **settings: Any,
) -> AsyncIterator[World]:
    # A machine that stalls must not make the replica look silent: it reports when the test lets it.
    world = World(RouterConfig(silent_after_s=600, fenced_after_s=900, **settings))
    app = world.app = build_app(
        pools=world.pools(model),
        config=world.config,
        registry=world.registry,
        cluster_status=world.cluster_status,
        drain=world.drain,
        identify=identify,
        rng=random.Random(2),
    )
    async with listening(app, head_timeout_s=head_timeout_s) as world.port:
        turning = asyncio.create_task(world.replica.run()) if auto else None
        if connect:
            world.replica.connect()
        try:
            yield world
        finally:
            if turning is not None:
                turning.cancel()


@asynccontextmanager
async def listening(app: Guard, *, head_timeout_s: float = HEAD_TIMEOUT_S, port: int = 0) -> AsyncIterator[int]:
    """Serve an application on `port`, or on a free one, which is returned."""
    listener = socket.create_server(("127.0.0.1", port))
    # asyncio sets it only on sockets that name TCP as their protocol, which these do not; accepted ones inherit it.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    server = Server(uvicorn_config(app, head_timeout_s=head_timeout_s, graceful_s=1))
    serve = asyncio.create_task(server.serve(sockets=[listener]))
    await server.up.wait()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await serve


def client(world: World) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=world.url + "/v1", api_key="none", max_retries=0)


def plain_client(world: World, **settings: Any) -> httpx.AsyncClient:
    """Without TLS: reading certificates would take longer than most of these tests."""
    return httpx.AsyncClient(base_url=world.url, verify=False, **settings)


async def events(response: httpx.Response) -> list[str]:
    text = (await response.aread()).decode()
    assert text.endswith("\n\n")
    lines = text[:-2].split("\n\n")
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    return [line.removeprefix("data: ") for line in lines]


async def post(world: World, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    async with plain_client(world) as http:
        return await http.post(path, json=body, headers={k.replace("_", "-"): v for k, v in headers.items()})


async def raw_post(world: World, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
    raw = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(raw)}\r\n\r\n"
    writer.write(head.encode() + raw)
    await writer.drain()
    return reader, writer
