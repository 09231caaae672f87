"""A router without Ray: its HTTP listener, its links to replicas and one to the controller.

Owns: the composition and the life cycle of a `router.core` for each model and of `router.app`. deployments/router.py wraps it for Serve;
tests run it as it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import random
import uuid
from collections.abc import Callable, Coroutine
from typing import Any

from prometheus_client import CollectorRegistry

from cluster.clock import SystemClock
from cluster.control.gates import DEMAND_PERIOD_S
from cluster.messages import (
    ClusterStatus,
    DrainAsk,
    DrainOrder,
    DrainTold,
    FromController,
    Gates,
    Granted,
    Leave,
    Message,
    Propose,
    Roster,
    RosterEntry,
    RouterStatus,
    ScaleStatus,
    StatusRequest,
    Stays,
    Weigh,
)
from cluster.types import ReplicaId, RouterId
from deployments.controller_link import ControllerLinks, Find
from deployments.keys import open_keys
from deployments.listener import Listener, Port, stand_by_for_port, take_port
from deployments.open_files import allow_many_connections
from deployments.replica_link import ReplicaLink
from deployments.settings import Instance, url_of
from deployments.tasks import raise_if_ended
from deployments.transport import Identity
from router.app import build_app
from router.core import RouterCore
from router.exposition import ByModel
from router.keys import KeyRing
from router.metrics_sink import ControllerMetrics, RouterMetrics
from router.pools import Pool, Pools
from router.proposals import Verdict

_log = logging.getLogger("forebay.router")

_TICK_S = 0.1
_TAKE_OVER_S = 60.0
"""A router that is to replace another and finds no replica says that it has started after this all the same."""
_LAST_WORDS_S = 2.0
"""Before the end of the time to drain: what is left is told, and clients read it."""
_KEYS_REFRESH_S = 2.0
_LATE_S = 0.5
_STATUS_EVERY_TICKS = 5
_ANSWER_TIMEOUT_S = 1.0


class RouterProcess:
    """Serves HTTP once started; /ready tells when a replica can be used."""

    def __init__(self, instance: Instance, find: Find, standby: Find | None = None) -> None:
        """`find` finds a controller and `standby` the other, where there are two."""
        self._profile = profile = instance.profile
        self._id = RouterId(f"router-{uuid.uuid4().hex[:12]}")
        self._secret = instance.secret()
        self._clock = SystemClock()
        self._keys = open_keys(profile.router)
        registries: dict[str, CollectorRegistry] = {}
        self._pools: dict[str, Pool] = {}
        for name, served in instance.models().items():
            registries[name] = CollectorRegistry()
            scale = served.config.scale
            wakes = scale is not None and scale.min == 0
            metrics = RouterMetrics(registries[name])
            core = RouterCore(profile.router, self._clock, random.Random(), metrics, wakes=wakes)
            self._pools[name] = Pool(
                served.folder, core, served.config.engine.max_model_len, profile.router, served.config.aliases
            )
        self.cores = {name: pool.core for name, pool in self._pools.items()}
        """One for each model. They share no replica, and so no capacity: no head of one ever stands before another's."""
        registry = CollectorRegistry()
        registry.register(ByModel(registries))
        self._roster: frozenset[RosterEntry] = frozenset()
        self._strangers: frozenset[RosterEntry] = frozenset()
        """Of the roster, those of models that are not served here."""
        self._links: dict[RosterEntry, ReplicaLink | None] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._asks: dict[int, asyncio.Future[ClusterStatus | DrainTold]] = {}
        self._ask_ids = itertools.count()
        self._add_numbers = itertools.count(1)
        self._vital: list[asyncio.Task[None]] = []
        """Tasks without which this process is of no use."""
        finds = (find,) if standby is None else (find, standby)
        self._controllers = ControllerLinks(
            finds, self._hello_identity, lambda: (), self._from_controller, self._clock, profile.transport
        )
        self._controller_metrics = ControllerMetrics(registry)
        app = build_app(
            pools=Pools(tuple(self._pools.values())),
            config=profile.router,
            registry=registry,
            cluster_status=self._cluster_status,
            drain=self._drain_replicas,
            identify=None if self._keys is None else self._keys.identify,
        )
        self._listener = Listener(app)
        self._port: Port | None = None
        self._draining: asyncio.Task[None] | None = None
        self.url = ""
        """Empty while it stands by."""

    async def start(self) -> None:
        """Look for the controller and listen for HTTP. Where each port has a router already, this one stands by for the
        first that is given up, and returns when it could serve.

        Raises:
            OSError: the port cannot be had.
        """
        allow_many_connections()
        port = take_port(*self._ports)
        self._vital = [
            self._spawn(self._controllers.run(), "controller links"),
            self._spawn(self._tick(), "tick"),
            self._spawn(self._tell_demand(), "demand"),
        ]
        if self._keys is not None:
            self._vital.append(self._spawn(_refresh(self._keys), "keys"))
        if port is not None:
            self._vital.append(self._listen(port))
        else:
            self._vital.append(self._spawn(self._stand_by(), "standby"))
            for _ in range(round(_TAKE_OVER_S / _TICK_S)):
                if all(core.ready for core in self.cores.values()):
                    break
                await asyncio.sleep(_TICK_S)

    @property
    def _ports(self) -> tuple[str, int, int]:
        profile = self._profile
        return profile.router.host, profile.router.port, profile.routers_of_a_machine

    def _listen(self, port: Port) -> asyncio.Task[None]:
        self._port = port
        self.url = url_of(self._profile.router.host, port.number)
        return self._listener.start(port)

    async def _stand_by(self) -> None:
        await self._listen(await stand_by_for_port(*self._ports))

    def _spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- the controller and the roster ---

    def _hello_identity(self) -> Identity:
        return Identity("router", self._id, self._secret)

    def _from_controller(self, message: FromController) -> None:
        match message:
            case Roster(entries=entries):
                self._roster = frozenset(entries)
                for entry in self._roster - self._links.keys() - self._strangers:
                    if entry.model not in self._pools:
                        _log.warning("%s serves %r, which is none of ours", entry.replica_id, entry.model)
                        continue
                    # None until the task runs: an entry is met once.
                    self._links[entry] = None
                    self._spawn(self._keep_link(entry), f"link to {entry.replica_id}")
                self._strangers = frozenset(e for e in self._roster if e.model not in self._pools)
            case ClusterStatus(ask_id=ask_id) | DrainTold(ask_id=ask_id):
                ask = self._asks.get(ask_id)
                if ask is not None and not ask.done():
                    ask.set_result(message)
            case Gates(model=name):
                if name in self.cores:
                    self.cores[name].hear(message)
            case Propose(for_request_id=for_request_id):
                # One has that replica, or it is gone.
                verdicts = (core.propose(message) for core in self.cores.values())
                verdict = next((v for v in verdicts if v is not None), Verdict.GONE)
                if verdict.stays and for_request_id is not None:
                    self._controllers.ask(Stays(message.request_id, message.attempt, for_request_id))
            case ScaleStatus(model=name):
                if name in self.cores:
                    self.cores[name].scaled(message)
            case Granted() | DrainOrder() | Leave() | Weigh():
                pass  # for replicas

    async def _keep_link(self, entry: RosterEntry) -> None:
        """Link to a replica, again and again for as long as the roster names it: one that was out of reach for a while
        (a stalled process, a cut network) is used again. Absence from the roster ends no link, only the trying."""
        pool = self._pools[entry.model]
        identity = Identity("router", self._id, self._secret, pool.identity)
        transport, refused = self._profile.transport, ""
        try:
            while entry in self._roster:
                link = ReplicaLink(entry, identity, pool.core, transport, self._add_numbers)
                self._links[entry] = link
                await link.run()
                if link.refused and link.refused != refused:  # said once, however often it is tried
                    _log.warning("%s of %s is not used: %s", entry.replica_id, entry.model, link.refused)
                refused = link.refused
                await asyncio.sleep(transport.backoff_max_s)
        finally:
            del self._links[entry]

    async def _cluster_status(self) -> ClusterStatus | None:
        """The controller's picture; None where it does not answer within a second."""
        answer = await self._ask_controller(StatusRequest)
        return answer if isinstance(answer, ClusterStatus) else None

    async def _drain_replicas(self, name: str, drain: bool) -> tuple[ReplicaId, ...] | None:
        """The replicas of this name or host, which have been told; None where the controller does not answer."""
        answer = await self._ask_controller(lambda ask_id: DrainAsk(ask_id, name, drain))
        return answer.replica_ids if isinstance(answer, DrainTold) else None

    async def _ask_controller(self, question: Callable[[int], Message]) -> ClusterStatus | DrainTold | None:
        ask_id = next(self._ask_ids)
        ask: asyncio.Future[ClusterStatus | DrainTold] = asyncio.get_running_loop().create_future()
        self._asks[ask_id] = ask
        try:
            if not self._controllers.ask(question(ask_id)):
                return None
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
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
                for core in self.cores.values():
                    core.tick()
            if count % _STATUS_EVERY_TICKS == 0:
                links = self._controllers
                standbys = links.linked - links.leader_linked
                self._controller_metrics.show(links.generation, standbys, links.refused, led=links.leader_linked)
                links.tell(
                    RouterStatus(
                        router_id=self._id,
                        observed_unix_s=self._clock.unix(),
                        url=self.url,
                        pid=os.getpid(),
                        models=tuple(pool.status for pool in self._pools.values()),
                        standbys=standbys,
                    )
                )
            await asyncio.sleep(_TICK_S)

    async def _tell_demand(self) -> None:
        """What waits here, for the one order of all routers. What could not be told is told the next time."""
        while True:
            for name, core in self.cores.items():
                demand = core.demand(name)
                if demand is not None and self._controllers.tell(demand):
                    core.told(demand)
                if (unplaced := core.unplaced(name)) is not None:
                    self._controllers.tell(unplaced)
                for settled in core.settled():
                    self._controllers.ask(settled)
            await asyncio.sleep(DEMAND_PERIOD_S)

    def check(self) -> None:
        """Raises RuntimeError where a task has ended without which this process is of no use."""
        raise_if_ended(self._vital)

    async def drain(self) -> None:
        """Leave, in phases, within `health.drain_timeout_s`; called again, it waits for the same.

        Say so, and serve all the same until a balancer has seen it (`router.drain_notice_s`); take no more connections;
        finish what has come; tell what is left when the time is nearly over.
        """
        if self._draining is None:
            self._draining = self._spawn(self._drain(), "drain")
        await asyncio.shield(self._draining)

    async def _drain(self) -> None:
        limit_s = self._profile.health.drain_timeout_s
        over_s = asyncio.get_running_loop().time() + limit_s
        for core in self.cores.values():
            core.retire()
        self._listener.announce_end()
        notice = asyncio.create_task(asyncio.sleep(self._profile.drain_notice_s))
        if self._port is not None:
            await self._port.give_up()
        await notice
        await self._listener.stop_listening()
        try:
            async with asyncio.timeout_at(over_s - min(_LAST_WORDS_S, limit_s / 4)):
                await self._finished()
        except TimeoutError:
            for core in self.cores.values():
                core.shut_down()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(over_s):
                    await self._finished()

    async def _finished(self) -> None:
        """Return when nothing is live and nobody is connected any more."""
        for core in self.cores.values():
            await core.drained()
        await self._listener.emptied()

    async def close(self) -> None:
        """End the listener and every link."""
        await self._listener.close()
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
