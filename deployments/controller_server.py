"""The controller's side of every router and replica: the rendezvous, and the whole picture for `forebay status`.

Owns: who is connected and what each last reported, and when gates are handed out and proposals made (cluster/control
decides which). Imports `cluster` and the transport; no Ray.

Invariants: it holds nothing that its successor does not rebuild from the first hellos and reports, so that it can be
killed at any moment; its generation is higher than any that its peers have seen; nothing is proposed by what waited to be
read while this process stood still; a proposal that cannot be sent at once is dropped.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field

from cluster.config import ControlConfig
from cluster.control.demand import Meter
from cluster.control.gates import PERIOD_S
from cluster.control.loop import Control
from cluster.control.routers import Routers
from cluster.messages import (
    ClusterStatus,
    DrainAsk,
    DrainOrder,
    DrainTold,
    Granted,
    Hello,
    Leave,
    ReplicaHere,
    ReplicaStatus,
    ReplicaSummary,
    Roster,
    RosterEntry,
    RouterDemand,
    RouterStatus,
    StatusRequest,
    ToController,
    Unplaced,
)
from cluster.ports import Clock
from cluster.types import Generation, ReplicaId, ReplicaReport, ReplicaState, RouterId
from deployments.transport import Identity, Link

LOG = logging.getLogger("forebay.controller")

ROLES = frozenset({"router", "replica"})
_LATE_S = 0.5
"""A tick that is later has no part in anything: what has come meanwhile is still to be read."""
_TICK_CPU_S = 0.01
"""A tick that takes more is told."""


@dataclass(eq=False)
class _Peer:
    """LinkHandler of one router or replica."""

    server: ControllerServer
    link: Link
    role: str
    sender_id: str
    entry: RosterEntry | None = None
    pid: int = 0
    report: ReplicaReport | None = None
    reported_at: float | None = None
    router: RouterStatus | None = field(default=None)

    def message(self, message: ToController) -> None:
        self.server.message(self, message)

    def writable(self) -> None:
        """Rosters are small and rare; nothing is held back. Gates wait for the next period."""

    def closed(self, reason: str) -> None:
        del reason
        self.server.peer_gone(self)


class ControllerServer:
    """State of one controller incarnation."""

    def __init__(
        self,
        secret: bytes,
        clock: Clock,
        meters: Mapping[str, Meter] | None = None,
        control: ControlConfig = ControlConfig(),  # noqa: B008  # frozen
    ) -> None:
        """`meters`: of the models whose number of replicas follows what is asked of them (deployments/scaler.py)."""
        self._meters = meters or {}
        self._secret = secret
        self._clock = clock
        self._started_at = clock.monotonic()
        self._generation = Generation(1, uuid.uuid4().hex)
        self._replica_generation_highest = 0
        self._peers: set[_Peer] = set()
        self._routers = Routers()
        self._router_peers: dict[RouterId, _Peer] = {}
        """The latest link of each router."""
        self._control, self._tick_s = Control(control), control.tick_s
        self._ticking: asyncio.TimerHandle | None = None
        self._handed_out_s = -math.inf
        self._handing_out: asyncio.TimerHandle | None = None

    def identity(self, hello: Hello) -> Identity:
        """Who we are towards this peer: of a later generation than any controller that it has seen."""
        seen = hello.controller_generation_seen
        own = self._generation
        if seen is not None and seen.uuid != own.uuid and seen.number >= own.number:
            self._generation = Generation(seen.number + 1, own.uuid)
        return Identity(role="controller", sender_id="controller", secret=self._secret, generation=self._generation)

    def accept(self, link: Link, hello: Hello) -> _Peer:
        peer = _Peer(self, link, hello.role, hello.sender_id)
        self._peers.add(peer)
        if self._ticking is None:
            self._tick_soon()
        if hello.role == "replica":
            if hello.generation is None:
                self._replica_generation_highest += 1
                link.send(Granted(generation=Generation(self._replica_generation_highest, uuid.uuid4().hex)))
            else:
                self._replica_generation_highest = max(self._replica_generation_highest, hello.generation.number)
        else:
            link.send(self._roster())
            self._router_peers[RouterId(peer.sender_id)] = peer
            self._routers.joined(RouterId(peer.sender_id))
            for meter in self._meters.values():
                meter.router_here(RouterId(peer.sender_id))
            self._hand_out_soon()
        return peer

    def peer_gone(self, peer: _Peer) -> None:
        self._peers.discard(peer)
        if peer.entry is not None:
            self._tell_routers()
            self._control.replica_gone(peer.entry.replica_id, peer.entry.generation)
            if peer.entry.model in self._meters:
                self._meters[peer.entry.model].replica_gone(peer.entry.replica_id, peer.entry.generation)
        router_id = RouterId(peer.sender_id)
        if self._router_peers.get(router_id) is peer:
            del self._router_peers[router_id]
            self._routers.left(router_id)
            self._control.router_gone(router_id)
            for meter in self._meters.values():
                meter.router_gone(router_id)

    def message(self, peer: _Peer, message: ToController) -> None:
        match message:
            case ReplicaHere(entry=entry, pid=pid):
                peer.entry, peer.pid = entry, pid
                self._tell_routers()
            case ReplicaStatus(report=report, held=held, retiring=retiring):
                peer.report, peer.reported_at = report, self._clock.monotonic()
                if peer.entry is not None:
                    self._control.replica(peer.entry, report, held, peer.reported_at)
                if peer.entry is not None and peer.entry.model in self._meters:
                    meter = self._meters[peer.entry.model]
                    meter.replica(peer.entry, report, retiring=retiring, now_s=peer.reported_at)
            case RouterStatus():
                peer.router = message
            case RouterDemand():
                router_id = RouterId(peer.sender_id)
                if self._router_peers.get(router_id) is peer:
                    self._routers.heard(router_id, message, self._clock.monotonic())
                    if message.model in self._meters:
                        self._meters[message.model].router(router_id, message, self._clock.monotonic())
                    self._hand_out_soon()
            case Unplaced():
                router_id = RouterId(peer.sender_id)
                if self._router_peers.get(router_id) is peer:
                    self._control.unplaced(router_id, message, self._clock.monotonic())
            case StatusRequest(ask_id=ask_id):
                peer.link.send(self._status(ask_id))
            case DrainAsk():
                peer.link.send(self._drain(message))

    # --- gates ---

    def _hand_out_soon(self) -> None:
        """Now, or a period after the last time."""
        if self._handing_out is None:
            wait_s = max(0.0, self._handed_out_s + PERIOD_S - self._clock.monotonic())
            self._handing_out = asyncio.get_running_loop().call_later(wait_s, self._hand_out)

    def _hand_out(self) -> None:
        self._handing_out = None
        self._handed_out_s = now_s = self._clock.monotonic()
        for router_id, gates in self._routers.hand_out(now_s, self._free_slots, self._can_take):
            self._router_peers[router_id].link.send(gates)
        if not self._routers.settled:
            self._hand_out_soon()

    def _can_take(self, router_id: RouterId) -> bool:
        return not self._router_peers[router_id].link.congested

    def _free_slots(self, model: str) -> int:
        free = 0
        for peer in self._peers:
            if peer.entry is None or peer.entry.model != model or peer.report is None:
                continue
            if peer.report.state is ReplicaState.READY:
                load = peer.report.load
                taken = sum(level.requests for level in (*load.running, *load.waiting))
                free += max(0, load.slots_total - taken)
        return free

    # --- proposals ---

    def _tick_soon(self) -> None:
        due_s = self._clock.monotonic() + self._tick_s
        self._ticking = asyncio.get_running_loop().call_later(self._tick_s, self._tick, due_s)

    def _tick(self, due_s: float) -> None:
        """As long as anybody is connected."""
        self._ticking = None
        if not self._peers:
            return
        self._tick_soon()
        now_s = self._clock.monotonic()
        if now_s - due_s <= _LATE_S:
            self._propose(now_s)
        else:
            LOG.warning("nothing is proposed: this process stood still for %.1f s", now_s - due_s)

    def _propose(self, now_s: float) -> None:
        began_s = time.thread_time()
        proposals = self._control.tick(now_s)
        for proposal in proposals:
            peer = self._router_peers.get(proposal.router_id)
            if peer is not None and not peer.link.congested:
                peer.link.send(proposal.message(self._generation))
        took_s = time.thread_time() - began_s
        if proposals or took_s > _TICK_CPU_S:
            LOG.debug("a tick took %.1f ms of CPU and made %d proposals", took_s * 1000, len(proposals))

    # --- drain and scale ---

    def tell_replica(self, replica_id: ReplicaId, message: DrainOrder | Leave) -> None:
        """Whoever has gone needs to be told nothing."""
        for peer in self._peers:
            if peer.entry is not None and peer.entry.replica_id == replica_id:
                peer.link.send(message)

    def _drain(self, ask: DrainAsk) -> DrainTold:
        """Tell those that are meant. Whether a replica drains is its own state: a successor reads it in its reports."""
        meant = [p for p in self._peers if p.entry is not None and ask.name in (p.entry.replica_id, p.entry.host)]
        for peer in meant:
            peer.link.send(DrainOrder(ask.drain))
        return DrainTold(ask.ask_id, tuple(sorted(p.entry.replica_id for p in meant if p.entry is not None)))

    # --- the roster and the whole picture ---

    def _tell_routers(self) -> None:
        roster = self._roster()
        for peer in self._peers:
            if peer.role == "router":
                peer.link.send(roster)

    def _roster(self) -> Roster:
        return Roster(entries=tuple(sorted((p.entry for p in self._peers if p.entry), key=lambda e: e.replica_id)))

    def _status(self, ask_id: int) -> ClusterStatus:
        now = self._clock.monotonic()
        replicas = sorted((p for p in self._peers if p.entry), key=lambda p: p.entry.replica_id if p.entry else "")
        return ClusterStatus(
            ask_id=ask_id,
            controller_generation=self._generation,
            controller_pid=os.getpid(),
            uptime_s=now - self._started_at,
            replicas=tuple(
                ReplicaSummary(
                    entry=p.entry,
                    pid=p.pid,
                    report=p.report,
                    report_age_s=None if p.reported_at is None else now - p.reported_at,
                )
                for p in replicas
                if p.entry
            ),
            routers=tuple(sorted((p.router for p in self._peers if p.router), key=lambda r: r.router_id)),
        )
