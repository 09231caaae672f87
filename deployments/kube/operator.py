"""A controller's part in Kubernetes: what is seen of nodes becomes drains, and what happens becomes Events.

Owns: when what cluster/control decides (nodes.py, lease.py, happenings.py) is asked and done, and the threads in which the
API server is waited for. Imports the controller's server only as what it needs of it (`Orders`).

Invariants: the controller's loop never waits for the API server; a controller that does not lead orders nothing and writes
nothing, though it watches, so that it can lead at once; one thread watches and one makes calls, one at a time; what waits
to be written is bounded (happenings.py); whatever Kubernetes does or does not do, the controller goes on.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from collections.abc import Mapping
from typing import Protocol

from cluster.config import KubernetesConfig
from cluster.control.happenings import Chronicle, EventBook, Picture, ReplicaSeen, ScaleSeen, Written
from cluster.control.nodes import Drain, NodeBook, NodesView, Placed, Taker, Told, in_words, takers, wanted
from cluster.messages import DrainOrder, KubernetesStatus, NodeStatus
from cluster.ports import Clock
from cluster.types import DrainedBy, Generation, PodRef, ReplicaId
from deployments.controller_server import ControllerServer
from deployments.kube.api import KubeApi, KubeError
from deployments.kube.calls import CONFLICT, Calls, pause_after
from deployments.kube.figures import Figures, KubernetesFigures
from deployments.kube.lease_writer import LeaseWriter
from deployments.kube.objects import event_body, holder_of
from deployments.kube.watcher import Changed, Gone, Listed, Observation, Watcher

_log = logging.getLogger("forebay.kubernetes")

_TICK_S = 0.5
"""What is seen of nodes is acted on at once; this is for replicas that come, and for what happens."""
_WRITE_S = 0.25
_TOLD_NODES = 50
_SERVERS_OWN = 500
"""Errors from here on are the API server's own."""


class Orders(Protocol):
    """What there is, who leads, and who tells replicas: the controller's server."""

    @property
    def generation(self) -> Generation | None: ...

    def replicas(self) -> Mapping[ReplicaId, ReplicaSeen]: ...

    def scales(self) -> Mapping[str, ScaleSeen]: ...

    def tell_replica(self, replica_id: ReplicaId, message: DrainOrder) -> None: ...


class Operator:
    """Of one controller."""

    def __init__(
        self, config: KubernetesConfig, orders: Orders, clock: Clock, rng: random.Random, pod: PodRef | None = None
    ) -> None:
        """
        Args:
            pod: The controller's own; None where it does not run in one.
        """
        self._config = config
        self._orders = orders
        self._clock = clock
        self._rng = rng
        self._pod = pod
        self._who = socket.gethostname() if pod is None else pod.name
        self._nodes = NodeBook()
        self._told: dict[ReplicaId, Told] = {}
        self._takers: dict[ReplicaId, Taker] = {}
        self._acts_as: tuple[Generation, float] | None = None
        """As which this controller ordered last, and since when it could."""
        self._listed = False
        self._going = 0
        self._led: Generation | None = None
        """As which this controller led when it last looked; what follows is of that time alone."""
        self._chronicle = Chronicle()
        self._events: tuple[EventBook, int] = EventBook(config.events_per_minute, ""), 0
        """The book, and the Events that those before it dropped: replaced at once, for other threads read both."""
        self._written = self._failures = 0
        self._events_due_s = 0.0
        self._calls = Calls(KubeApi(config, rng))
        self._lease = LeaseWriter(config, self._calls, self._who, clock, rng)
        self._loop = asyncio.get_running_loop()
        self._watcher = Watcher(KubeApi(config, rng), config, self._seen_from_thread, clock, rng)

    async def run(self) -> None:
        """Until cancelled."""
        self._watcher.start()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._look(), name="look at nodes")
                group.create_task(self._write(), name="write to Kubernetes")
        finally:
            self._watcher.stop()
            await self._lease.give_back()
            self._calls.close()

    def status(self) -> KubernetesStatus:
        """For whoever asks this controller."""
        going = sorted(self._nodes.going.items())[:_TOLD_NODES]
        figures = self.figures()
        return KubernetesStatus(
            nodes=len(self._nodes.reasons) if self._listed else None,
            going=tuple(NodeStatus(name, in_words(reasons)) for name, reasons in going),
            heard_s=figures.watch_age_s,
            lease_holder=self._lease.holder,
            holds_lease=figures.lease_held,
            events_written=figures.events_written,
            events_dropped=figures.events_dropped,
            trouble=self._watcher.trouble or self._lease.trouble,
        )

    def figures(self) -> Figures:
        """For any thread."""
        heard_s = self._watcher.heard_s
        events, dropped_before = self._events
        return Figures(
            watch_age_s=None if heard_s is None else self._clock.monotonic() - heard_s,
            watches=dict(self._watcher.ended),
            nodes_going=self._going,
            lease_held=self._lease.holds,
            events_written=self._written,
            events_dropped=dropped_before + events.dropped,
        )

    # --- nodes ---

    def _seen_from_thread(self, observation: Observation) -> bool:
        try:
            self._loop.call_soon_threadsafe(self._seen, observation)
        except RuntimeError:  # the loop has ended
            return False
        return True

    def _seen(self, observation: Observation) -> None:
        now_s = self._clock.monotonic()
        match observation:
            case Listed(nodes):
                self._nodes.listed(nodes, now_s)
                self._listed = True
            case Changed(name, reasons):
                self._nodes.changed(name, reasons, now_s)
            case Gone(name):
                self._nodes.gone(name)
        self._going = len(self._nodes.going)
        self._act()

    async def _look(self) -> None:
        while True:
            self._act()
            self._observe()
            await asyncio.sleep(_TICK_S)

    def _act(self) -> None:
        """Tell replicas what follows from their nodes."""
        leads = self._orders.generation
        if leads is None:
            self._acts_as = None
            return
        now_s, replicas = self._clock.monotonic(), self._orders.replicas()
        if self._acts_as is None or self._acts_as[0] != leads:
            self._acts_as = leads, now_s
            self._takers = {}
        self._told = {replica_id: told for replica_id, told in self._told.items() if replica_id in replicas}
        node = frozenset({DrainedBy.NODE})
        placed = [
            Placed(replica_id, seen.model, seen.node, seen.drained_by >= node, bool(seen.drained_by - node))
            for replica_id, seen in replicas.items()
        ]
        self._takers = takers(self._takers, placed, self._nodes.reasons, now_s)
        view = NodesView(
            self._nodes.reasons, self._nodes.clear_since_s, placed, self._told, self._takers, self._acts_as[1]
        )
        for order in wanted(view, self._config, now_s):
            before = self._told.get(order.replica_id)
            if before is None or before.drain != order.drain:  # else it is said again
                _log_order(order)
            self._told[order.replica_id] = Told(order.drain, now_s)
            self._orders.tell_replica(order.replica_id, DrainOrder(order.drain, node=True))

    # --- events and the lease ---

    def _observe(self) -> None:
        """Note what has happened since it was looked last, while this controller leads."""
        leads = self._orders.generation
        if leads != self._led:
            self._led = leads
            events, dropped_before = self._events
            name = "" if leads is None else f"{self._config.name}.{leads.uuid[:12]}"
            self._chronicle = Chronicle()
            self._events = EventBook(self._config.events_per_minute, name), dropped_before + events.dropped
        if leads is None:
            return
        going = {name: in_words(reasons) for name, reasons in self._nodes.going.items()}
        events, _ = self._events
        picture = Picture(leads, self._orders.replicas(), self._orders.scales(), going)
        for happening in self._chronicle.observe(picture, self._clock.monotonic()):
            events.note(happening, self._clock.monotonic(), self._clock.unix())

    async def _write(self) -> None:
        while True:
            leads = self._orders.generation
            await self._lease.turn(leads)
            (events, _), now_s = self._events, self._clock.monotonic()
            if leads is not None and leads == self._led and self._lease.holds and now_s >= self._events_due_s:
                event = events.due(now_s)
                if event is not None and await self._write_event(event, events, leads):
                    continue  # perhaps there is another
            await asyncio.sleep(_WRITE_S)

    async def _write_event(self, event: Written, events: EventBook, leads: Generation) -> bool:

        def write(api: KubeApi) -> None:
            if event.count == 1:
                api.write_event(event_body(self._config, event, self._pod, holder_of(self._who, leads)))
            else:
                api.count_event(event.name, event.count, event.at_unix_s)

        try:
            await self._calls.make(write)
        except KubeError as error:
            if error.status is None or error.status >= _SERVERS_OWN:
                events.again(event)
            elif error.status != CONFLICT:  # else it is there: the answer was lost, the first time
                events.failed(event)
            pause_s = pause_after(self._failures, self._config, self._rng)
            self._failures += 1
            self._events_due_s = self._clock.monotonic() + pause_s
            _log.warning("the Event %s is not written: %s", event.happening.reason, error)
            return False
        self._failures = 0
        self._written += 1
        return True


def _log_order(order: Drain) -> None:
    if order.drain:
        _log.info("%s drains, for node %s goes: %s", order.replica_id, order.node, in_words(order.reasons))
        return
    why = "no other would take its work" if order.reasons else "which has no notice any more"
    _log.info("%s does not drain for node %s: %s", order.replica_id, order.node, why)


def in_kubernetes(config: KubernetesConfig, server: ControllerServer, clock: Clock, pod: PodRef | None) -> Operator:
    """The part of a controller in Kubernetes, which shows in its status and its metrics; to be run. In the controller's
    loop."""
    operator = Operator(config, server, clock, random.Random(), pod)
    server.kubernetes_status = operator.status
    server.registry.register(KubernetesFigures(operator.figures))
    return operator
