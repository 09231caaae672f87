"""A replica without Ray: one engine, one listener for routers, one link to the controller.

Owns: the composition and the life cycle; what is said on the links is replica_server.py's. The engine runs in a thread
of this process. deployments/replica.py wraps it for Serve; tests run it as it is.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from cluster.clock import SystemClock
from cluster.messages import DrainOrder, FromController, Granted, Leave, ReplicaHere, ReplicaStatus, RosterEntry, Weigh
from cluster.model import ModelFolder
from cluster.ports import EnginePort
from cluster.types import DrainedBy, Generation, PodRef, ReplicaId
from deployments.controller_link import ControllerLinks, Find
from deployments.exposition import Exposition, ReplicaFigures, exposed
from deployments.replica_server import ROLES, ReplicaServer, decode
from deployments.settings import Instance
from deployments.tasks import raise_if_ended
from deployments.transport import Acceptor, Identity

_MEET_S = 10.0
_MEET_POLL_S = 0.05
_REFUSING_S = 0.2
"""What routers sent before they read that this replica takes nothing new is on its way at most so long, and is refused
by name; lost with the link, it would count as work that an engine died of."""


class ReplicaProcess:
    """One incarnation of a replica of `model`. `load` makes its engine, in a thread; `on_death` hears why the engine
    ended, `on_leave` that it is to end, retired and empty."""

    def __init__(
        self,
        instance: Instance,
        model: ModelFolder,
        replica_id: ReplicaId,
        find: Find,
        load: Callable[[ModelFolder], EnginePort],
        on_death: Callable[[str], None],
        on_leave: Callable[[], None] = lambda: None,
        standby: Find | None = None,
    ) -> None:
        """`find` finds a controller and `standby` the other, where there are two."""
        self._profile = instance.profile
        self._id = replica_id
        self._load = load
        self._on_death = on_death
        self._on_leave = on_leave
        self._secret = instance.secret()
        self._model = model
        self._granted: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._here: ReplicaHere | None = None
        self._acceptor: Acceptor | None = None
        self._exposition: Exposition | None = None
        self._controllers = ControllerLinks(
            (find,) if standby is None else (find, standby),
            self._hello_identity,
            lambda: () if self._here is None else (self._here,),
            self._from_controller,
            SystemClock(),
            self._profile.transport,
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._leaving = False
        self._ordered: asyncio.Task[None] | None = None
        """A drain that this replica was ordered, not one that ends it."""
        self._drained_by: set[DrainedBy] = set()
        """Who has ordered it and not taken it back."""

    async def start(self, host: str, zone: str = "", node: str = "", pod: PodRef | None = None) -> None:
        """Load the engine, get a generation, listen on `host`, and tell the controller where, in which `zone`, on which
        Kubernetes `node` and in which `pod`."""
        self._tasks.append(asyncio.create_task(self._controllers.run(), name="controller links"))
        # Loading takes seconds, in a thread so that health checks and the link to the controller go on.
        self.engine = await asyncio.to_thread(self._load, self._model)
        generation = await self._granted
        identity = Identity("replica", self._id, self._secret, self._model.identity, generation)
        transport = self._profile.transport
        self.server = ReplicaServer(self.engine, self._id, generation, transport, SystemClock(), identity)
        self.server.start(self._on_death)
        self._acceptor = Acceptor(lambda _: identity, ROLES, decode, self.server.accept, transport)
        host, port = await self._acceptor.listen(host, 0, self._secret)
        self._exposition = self._exposed(host)
        entry = RosterEntry(self._id, generation, host, port, self._model.name, zone, node)
        self._here = ReplicaHere(entry=entry, pid=os.getpid(), pod=pod)
        self._controllers.tell(self._here)
        self._tasks.append(asyncio.create_task(self._tick(), name="tick"))

    def _exposed(self, host: str) -> Exposition:
        registry = CollectorRegistry()
        registry.register(ReplicaFigures(self._model.name, self.engine.progress))
        ports = self._profile.metrics
        key = "metrics.replica_port and replica_ports"
        return exposed(registry, key, host, ports.replica_port, ports.replica_ports)

    async def meet_routers(self) -> None:
        """Return once as many routers are linked as there are, or after `_MEET_S`: until then this replica is of no use
        to anybody, and none may be ended for it."""
        for _ in range(round(_MEET_S / _MEET_POLL_S)):
            if self.server.routers >= self._profile.routers:
                return
            await asyncio.sleep(_MEET_POLL_S)

    def _hello_identity(self) -> Identity:
        generation = self._granted.result() if self._granted.done() else None
        return Identity("replica", self._id, self._secret, generation=generation)

    def _from_controller(self, message: FromController) -> None:
        match message:
            case Granted(generation=generation):
                if not self._granted.done():
                    self._granted.set_result(generation)
            case DrainOrder():
                self._order(message)
            case Leave():
                self._leave()
            case Weigh(for_s=for_s):
                self.server.weigh(for_s)
            case _:
                pass  # for routers

    def _order(self, order: DrainOrder) -> None:
        """Somebody has asked for a drain, or has taken that back; whoever leaves anyway heeds neither. It drains until all
        that have asked for it have taken it back. But what drains for another reason does not retire with that, and an
        operator's word, either way, is the last about retiring."""
        if self._acceptor is None or self._leaving:
            return
        by = DrainedBy.NODE if order.node else DrainedBy.SCALE if order.retire else DrainedBy.OPERATOR
        if by is DrainedBy.SCALE and order.drain and self._drained_by:
            return
        if by is DrainedBy.OPERATOR:
            self._drained_by.discard(DrainedBy.SCALE)
        (self._drained_by.add if order.drain else self._drained_by.discard)(by)
        if self._drained_by and self._ordered is None:
            self._ordered = asyncio.create_task(self._empty(), name="ordered drain")
        elif not self._drained_by and self._ordered is not None:
            self._ordered.cancel()
            self._ordered = None
            self.server.take_work(True)

    def _leave(self) -> None:
        """Nothing comes any more where the drain is over: it is not taken back from here on."""
        retires = DrainedBy.SCALE in self._drained_by
        if retires and not self._leaving and self._ordered is not None and self._ordered.done():
            self._leaving = True
            self._on_leave()

    async def _tick(self) -> None:
        while True:
            self.server.tick()
            report = self.server.report(None)
            held = self.server.held(report.load)
            status = ReplicaStatus(
                report,
                held,
                retiring=DrainedBy.SCALE in self._drained_by,
                by_operator=DrainedBy.OPERATOR in self._drained_by,
                by_node=DrainedBy.NODE in self._drained_by,
            )
            self._controllers.tell(status)
            await asyncio.sleep(self._profile.transport.report_period_s)

    def check(self) -> None:
        """Raises RuntimeError where the engine has ended or a step does not, or nobody reports any more."""
        raise_if_ended(self._tasks)
        if ailment := self._ails():
            raise RuntimeError(ailment)

    def _ails(self) -> str | None:
        """Why the engine gives nothing more; None while it does."""
        progress = self.engine.progress()
        if not progress.alive:
            return f"the engine has ended: {progress.failure}"
        limit_s = self._profile.health.step_age_limit_s
        if progress.step_age_s is not None and progress.step_age_s > limit_s:
            return f"a step has run for {progress.step_age_s:.1f} s, over the limit of {limit_s} s"
        return None

    async def drain(self) -> None:
        """Empty this replica for good, before it is closed."""
        self._leaving = True
        await self._empty()

    async def _empty(self) -> None:
        """Take nothing new and finish what ends within `health.hand_back_after_s`; hand the rest back to its routers,
        which go on with it elsewhere. Leaves off where the engine gives nothing more: its routers see that it is lost."""
        if self._acceptor is None or self._ails() is not None:
            return
        loop, health = asyncio.get_running_loop(), self._profile.health
        began_s, patience_s = loop.time(), min(health.hand_back_after_s, health.drain_timeout_s)
        drained = asyncio.create_task(self.server.drain(), name="drain")
        try:
            while not drained.done() and self._ails() is None:
                if loop.time() >= began_s + patience_s:
                    self.server.hand_back()
                await asyncio.wait({drained}, timeout=self._profile.transport.report_period_s)
            if drained.done():
                await drained
                await asyncio.sleep(began_s + _REFUSING_S - loop.time())
        finally:
            drained.cancel()

    async def close(self) -> None:
        """End the links and the engine."""
        tasks = [*self._tasks, *([] if self._ordered is None else [self._ordered])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._exposition is not None:
            await asyncio.to_thread(self._exposition.close)
        if self._acceptor is not None:
            await self.server.close()
            await self._acceptor.close()
            await asyncio.to_thread(self.engine.stop)
