"""A router without Ray: its HTTP listener, its links to replicas and one to the controller.

Owns: the composition and the life cycle of `router.core` and `router.app`. deployments/router.py wraps it for Serve;
tests run it as it is.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import socket
import uuid
from collections.abc import Coroutine
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry

from cluster.clock import SystemClock
from cluster.messages import ClusterStatus, FromController, Granted, Roster, RosterEntry, RouterStatus, StatusRequest
from cluster.model import ModelFolder
from cluster.types import Generation, RouterId
from deployments.controller_link import ControllerLink, Find
from deployments.http_server import BACKLOG, uvicorn_config
from deployments.replica_link import ReplicaLink
from deployments.settings import Instance, open_keys
from deployments.tasks import raise_if_ended
from deployments.transport import Identity
from router.app import build_app
from router.core import RouterCore
from router.keys import KeyRing
from router.metrics_sink import RouterMetrics

_TICK_S = 0.1
_KEYS_REFRESH_S = 2.0
_LATE_S = 0.5
_STATUS_EVERY_TICKS = 5
_STATUS_TIMEOUT_S = 1.0


class RouterProcess:
    """Serves HTTP once started; /ready tells when a replica can be used."""

    def __init__(self, instance: Instance, find: Find) -> None:
        self._profile = profile = instance.profile
        self._id = RouterId(f"router-{uuid.uuid4().hex[:12]}")
        self._secret = instance.secret()
        self._model = ModelFolder.open(instance.model_folder, profile.served_name)
        self._clock = SystemClock()
        self._keys = open_keys(profile.router)
        registry = CollectorRegistry()
        self.core = RouterCore(profile.router, self._clock, random.Random(), RouterMetrics(registry))
        self._roster: frozenset[RosterEntry] = frozenset()
        self._links: dict[RosterEntry, ReplicaLink | None] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._asks: dict[int, asyncio.Future[ClusterStatus]] = {}
        self._ask_ids = itertools.count()
        self._add_numbers = itertools.count(1)
        self._vital: list[asyncio.Task[None]] = []
        """Tasks without which this process is of no use."""
        self._controller = ControllerLink(
            find, self._hello_identity, lambda: None, self._from_controller, profile.transport
        )
        app = build_app(
            core=self.core,
            model=self._model,
            max_model_len=min(profile.engine.max_model_len, self._model.max_position_embeddings),
            config=profile.router,
            registry=registry,
            cluster_status=self._cluster_status,
            identify=None if self._keys is None else self._keys.identify,
        )
        self._http = uvicorn.Server(uvicorn_config(app))
        self._http_task: asyncio.Task[None] | None = None
        self.url = ""

    async def start(self) -> None:
        """Listen for HTTP and look for the controller. Raises OSError where the port cannot be had."""
        host = self._profile.router.host
        sock = _bind(host, self._profile.router.port)
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{sock.getsockname()[1]}"
        self._http_task = asyncio.create_task(self._http.serve(sockets=[sock]), name="http")
        self._vital = [
            self._http_task,
            self._spawn(self._controller.run(), "controller link"),
            self._spawn(self._tick(), "tick"),
        ]
        if self._keys is not None:
            self._vital.append(self._spawn(_refresh(self._keys), "keys"))

    def _spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- the controller and the roster ---

    def _hello_identity(self, seen: Generation | None) -> Identity:
        return Identity("router", self._id, self._secret, controller_generation_seen=seen)

    def _from_controller(self, message: FromController) -> None:
        match message:
            case Roster(entries=entries):
                self._roster = frozenset(entries)
                for entry in self._roster - self._links.keys():
                    # None until the task runs: an entry is met once.
                    self._links[entry] = None
                    self._spawn(self._keep_link(entry), f"link to {entry.replica_id}")
            case ClusterStatus(ask_id=ask_id):
                ask = self._asks.get(ask_id)
                if ask is not None and not ask.done():
                    ask.set_result(message)
            case Granted():
                pass  # for replicas

    async def _keep_link(self, entry: RosterEntry) -> None:
        """Link to a replica, again and again for as long as the roster names it: one that was out of reach for a while
        (a stalled process, a cut network) is used again. Absence from the roster ends no link, only the trying."""
        identity = Identity("router", self._id, self._secret, self._model.identity)
        transport = self._profile.transport
        try:
            while entry in self._roster:
                link = ReplicaLink(entry, identity, self.core, transport, self._add_numbers)
                self._links[entry] = link
                await link.run()
                await asyncio.sleep(transport.backoff_max_s)
        finally:
            del self._links[entry]

    async def _cluster_status(self) -> ClusterStatus | None:
        """The controller's picture; None where it does not answer within a second."""
        ask_id = next(self._ask_ids)
        ask: asyncio.Future[ClusterStatus] = asyncio.get_running_loop().create_future()
        self._asks[ask_id] = ask
        try:
            if not self._controller.send(StatusRequest(ask_id=ask_id)):
                return None
            async with asyncio.timeout(_STATUS_TIMEOUT_S):
                return await ask
        except TimeoutError:
            return None
        finally:
            del self._asks[ask_id]

    async def _tick(self) -> None:
        ticked_s = self._clock.monotonic()
        for count in itertools.count():
            late_s = self._clock.monotonic() - ticked_s
            ticked_s += late_s
            # After a pause of this process (a suspended machine, a stopped process) reports wait in the sockets:
            # silence that we did not listen to says nothing. The next tick, 100 ms on, has read them.
            if late_s < _LATE_S:
                self.core.tick()
            if count % _STATUS_EVERY_TICKS == 0:
                self._controller.send(
                    RouterStatus(
                        router_id=self._id,
                        observed_unix_s=self._clock.unix(),
                        url=self.url,
                        pid=os.getpid(),
                        bands=self.core.bands(),
                    )
                )
            await asyncio.sleep(_TICK_S)

    def check(self) -> None:
        """Raises RuntimeError where a task has ended without which this process is of no use."""
        raise_if_ended(self._vital)

    async def drain(self) -> None:
        """Refuse new requests; return when every accepted one has ended. Raises TimeoutError after
        `health.drain_timeout_s`."""
        self.core.begin_drain()
        async with asyncio.timeout(self._profile.health.drain_timeout_s):
            await self.core.drained()

    async def close(self) -> None:
        """End the listener and every link."""
        if self._http_task is not None:
            self._http.should_exit = True
            await self._http_task
        for link in list(self._links.values()):
            if link is not None:
                link.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _refresh(keys: KeyRing) -> None:
    """A file that changes is read in a thread: it may lie on a slow volume."""
    while True:
        await asyncio.sleep(_KEYS_REFRESH_S)
        await asyncio.to_thread(keys.refresh)


def _bind(host: str, port: int) -> socket.socket:
    """SO_REUSEPORT, so that the next router can listen before this one has ended."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    # Inherited by accepted connections; asyncio sets it only on sockets made with a protocol number.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        sock.bind((host, port))
        # From here on connections are taken, and wait for the server that starts within milliseconds.
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock
