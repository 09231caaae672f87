"""The controller's side of every router and replica: the rendezvous, and the whole picture for `forebay status`.

Owns: who is connected and what each last reported, and when gates are handed out and proposals made (cluster/control
decides which, and whether this controller leads). Imports `cluster` and the transport; no Ray.

Invariants: it holds nothing that its successor does not rebuild from the first hellos and reports, so that it can be
killed at any moment; where it does not lead it hears all, and says and does nothing; while it leads its generation is
later than any that it has been told of; nothing is decided by what waited to be read while this process stood still; a
proposal that cannot be sent at once is dropped.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from cluster.config import ControlConfig
from cluster.control.demand import Meter
from cluster.control.gates import PERIOD_S
from cluster.control.happenings import ReplicaSeen, ScaleSeen
from cluster.control.leader import BEAT_S, SETTLE_S, SILENT_S, Term, decide
from cluster.control.loop import WEIGH_FOR_S, Control
from cluster.control.routers import Routers
from cluster.messages import (
    ClusterStatus,
    DrainAsk,
    DrainOrder,
    DrainTold,
    Follows,
    Granted,
    Hello,
    KubernetesStatus,
    Leads,
    Leave,
    Left,
    ReplicaHere,
    ReplicaStatus,
    ReplicaSummary,
    Roster,
    RosterEntry,
    RouterDemand,
    RouterStatus,
    ScaleStatus,
    StatusRequest,
    Stays,
    ToController,
    Unplaced,
    Weigh,
)
from cluster.ports import Clock
from cluster.types import DrainedBy, Generation, PodRef, ReplicaId, ReplicaReport, ReplicaState, RouterId
from deployments.exposition import ControllerFigures, Kind
from deployments.transport import Identity, Link

LOG = logging.getLogger("forebay.controller")

ROLES = frozenset({"router", "replica"})
_LATE_S = 0.5
"""A tick that is later has no part in anything: what has come meanwhile is still to be read."""
_SCALE_TOLD_EVERY_S = 1.0
_TICK_CPU_S = 0.01
"""A tick that takes more is told."""
_VOUCHED_S = SILENT_S - BEAT_S - 0.05
"""A peer that was heard so lately had a beat, and less than SILENT_S ago: it does not tell anybody yet that it hears none."""


@dataclass(eq=False)
class _Peer:
    """LinkHandler of one router or replica."""

    server: ControllerServer
    link: Link
    role: str
    sender_id: str
    entry: RosterEntry | None = None
    pid: int = 0
    pod: PodRef | None = None
    drained_by: tuple[DrainedBy, ...] = ()
    told: dict[DrainedBy, DrainOrder | Leave] = field(default_factory=dict)
    """What a replica was told last, for each that decides about it."""
    report: ReplicaReport | None = None
    reported_at: float | None = None
    router: RouterStatus | None = field(default=None)
    word: Follows | None = None
    heard_s: float = -math.inf
    ungranted: bool = False
    """A replica that has no generation yet."""

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
        place: int = 0,
    ) -> None:
        """
        Args:
            meters: Of the models whose number of replicas follows what is asked of them (deployments/scaler.py).
            place: Its number among the controllers, from 0.
        """
        self._meters = meters or {}
        self._secret = secret
        self._clock = clock
        self.registry = CollectorRegistry()
        """Of what this controller measures of itself."""
        self._figures = ControllerFigures(self.registry)
        self._started_at = clock.monotonic()
        self._term = Term(place, uuid.uuid4().hex)
        self._leads_since_s = self._beat_s = self._ticked_s = -math.inf
        self._replica_generation_highest = 0
        self._peers: set[_Peer] = set()
        self._voters: dict[str, _Peer] = {}
        """By the sender, on its latest link: those that have said whom they follow."""
        self._routers = Routers()
        self._router_peers: dict[RouterId, _Peer] = {}
        """The latest link of each router."""
        self._control, self._tick_s = Control(control), control.tick_s
        self._ticking: asyncio.TimerHandle | None = None
        self._handed_out_s = -math.inf
        self._handing_out: asyncio.TimerHandle | None = None
        self._scale: dict[str, tuple[ScaleStatus, float]] = {}
        """Of each model with scale, what was decided last, and when routers were told."""
        self.kubernetes_status: Callable[[], KubernetesStatus | None] = lambda: None
        """How this controller stands with Kubernetes (deployments/kube/operator.py), where it has to do with it."""

    def identity(self, hello: Hello) -> Identity:
        """Who we are towards this peer."""
        del hello
        return Identity(role="controller", sender_id="controller", secret=self._secret)

    @property
    def leads(self) -> bool:
        return self._term.leads is not None

    @property
    def generation(self) -> Generation | None:
        """As which this controller leads; None: it does not."""
        return self._term.leads

    def accept(self, link: Link, hello: Hello) -> _Peer:
        peer = _Peer(self, link, hello.role, hello.sender_id)
        self._peers.add(peer)
        if self._ticking is None:
            self._tick_soon()
        if hello.role == "replica":
            if hello.generation is None:
                peer.ungranted = True
            else:
                self._replica_generation_highest = max(self._replica_generation_highest, hello.generation.number)
        else:
            self._router_peers[RouterId(peer.sender_id)] = peer
            self._routers.joined(RouterId(peer.sender_id))
            for meter in self._meters.values():
                meter.router_here(RouterId(peer.sender_id))
        self._welcome(peer)
        return peer

    def peer_gone(self, peer: _Peer) -> None:
        self._peers.discard(peer)
        if self._voters.get(peer.sender_id) is peer:
            del self._voters[peer.sender_id]
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
        peer.heard_s = self._clock.monotonic()
        match message:
            case Follows():
                peer.word = message
                self._voters[peer.sender_id] = peer
            case ReplicaHere(entry=entry, pid=pid, pod=pod):
                peer.entry, peer.pid, peer.pod, peer.ungranted = entry, pid, pod, False
                highest = max(self._replica_generation_highest, entry.generation.number)
                self._replica_generation_highest = highest
                self._tell_routers()
            case ReplicaStatus(report=report, held=held, retiring=retiring):
                peer.report, peer.reported_at = report, self._clock.monotonic()
                peer.drained_by = message.drained_by
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
                    if self.leads:
                        self._routers.heard(router_id, message, self._clock.monotonic())
                    if message.model in self._meters:
                        self._meters[message.model].router(router_id, message, self._clock.monotonic())
                    self._hand_out_soon()
            case Unplaced():
                router_id = RouterId(peer.sender_id)
                if self._router_peers.get(router_id) is peer:
                    self._control.unplaced(router_id, message, self._clock.monotonic())
            case Stays():
                self._control.stays(message)
            case Left():
                self._control.left(message, self._clock.monotonic())
            case StatusRequest(ask_id=ask_id):
                if self._term.leads is not None:
                    peer.link.send(self._status(ask_id, self._term.leads))
            case DrainAsk():
                if self.leads:
                    peer.link.send(self._drain(message))

    # --- who leads ---

    def _take_stock(self, now_s: float) -> None:
        """Lead, or stop, or go on."""
        words = [p.word for p in self._voters.values() if p.word is not None and now_s - p.heard_s <= SILENT_S]
        before, self._term = self._term, decide(self._term, words, now_s)
        leads = self._term.leads
        if leads == before.leads:
            if leads is not None and now_s - self._beat_s >= BEAT_S:
                self._beat(leads, now_s)
            return
        if leads is None:
            LOG.warning("stands by: generation %d has a successor", before.leads.number if before.leads else 0)
            return
        LOG.info("leads, as generation %d", leads.number)
        self._leads_since_s = self._beat_s = now_s
        self._routers = Routers()
        for router_id in self._router_peers:
            self._routers.joined(router_id)
        for peer in self._peers:
            self._welcome(peer)

    def _beat(self, leads: Generation, now_s: float) -> None:
        self._beat_s = now_s
        for peer in self._peers:
            if not peer.link.congested:
                peer.link.send(Leads(leads))

    def _welcome(self, peer: _Peer) -> None:
        """What is said first to each peer, once this controller leads."""
        if self._term.leads is None:
            return
        peer.link.send(Leads(self._term.leads))
        if peer.ungranted:
            self._replica_generation_highest += 1
            peer.link.send(Granted(generation=Generation(self._replica_generation_highest, uuid.uuid4().hex)))
        elif peer.role == "router":
            peer.link.send(self._roster())
            self._hand_out_soon()

    def vouched_by(self, running: frozenset[ReplicaId]) -> bool:
        """Whether this controller leads beyond doubt, so that another can be told by none of these replicas that it may:
        most of them, or of the routers where there are none, have just said that they follow it and hear it.

        What cannot refuse an older one (Ray Serve) is told nothing without.
        """
        now_s = self._clock.monotonic()
        if self._term.leads is None or now_s - self._ticked_s > _LATE_S:
            return False
        word = Follows(self._term.leads, heard=True)
        vouching = {
            peer.entry.replica_id if peer.entry else peer.sender_id
            for peer in self._voters.values()
            if peer.word == word and now_s - peer.heard_s <= _VOUCHED_S
        }
        voters: frozenset[str] = running or frozenset(self._router_peers)
        return 2 * len(vouching & voters) > len(voters)

    # --- gates ---

    def _hand_out_soon(self) -> None:
        """Now, or a period after the last time."""
        if self._handing_out is None and self.leads:
            wait_s = max(0.0, self._handed_out_s + PERIOD_S - self._clock.monotonic())
            self._handing_out = asyncio.get_running_loop().call_later(wait_s, self._hand_out)

    def _hand_out(self) -> None:
        self._handing_out = None
        if not self.leads:
            return
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
        if now_s - due_s > _LATE_S:
            LOG.warning("nothing is decided: this process stood still for %.1f s", now_s - due_s)
            return
        self._ticked_s = now_s
        self._take_stock(now_s)
        if self._term.leads is not None and now_s - self._leads_since_s >= SETTLE_S:
            self._propose(self._term.leads, now_s)
        self._figures.ticked(self._clock.monotonic() - now_s)

    def _propose(self, leads: Generation, now_s: float) -> None:
        began_s = time.thread_time()
        proposals = self._control.tick(now_s)
        for proposal in proposals:
            peer = self._router_peers.get(proposal.router_id)
            if peer is not None and not peer.link.congested:
                peer.link.send(proposal.message(leads))
                self._figures.decided(Kind.CALL_BACK if proposal.target is None else Kind.MOVE)
        for model in self._control.to_weigh(now_s):
            for peer in self._peers:
                if peer.entry is not None and peer.entry.model == model:
                    peer.link.send(Weigh(WEIGH_FOR_S))
                    self._figures.decided(Kind.WEIGH)
        took_s = time.thread_time() - began_s
        if proposals or took_s > _TICK_CPU_S:
            LOG.debug("a tick took %.1f ms of CPU and made %d proposals", took_s * 1000, len(proposals))

    # --- drain and scale ---

    def tell_replica(self, replica_id: ReplicaId, message: DrainOrder | Leave) -> None:
        """Whoever has gone needs to be told nothing. What is said again, for it is not done yet, is decided once."""
        by = DrainedBy.NODE if isinstance(message, DrainOrder) and message.node else DrainedBy.SCALE
        for peer in self._peers:
            if peer.entry is not None and peer.entry.replica_id == replica_id:
                peer.link.send(message)
                before, peer.told[by] = peer.told.get(by), message
                if before == message:
                    continue
                self._figures.decided(Kind.LEAVE if isinstance(message, Leave) else _kind_of(message.drain))

    def _drain(self, ask: DrainAsk) -> DrainTold:
        """Tell those that are meant. Whether a replica drains is its own state: a successor reads it in its reports."""
        meant = [
            p
            for p in self._peers
            if p.entry is not None and ask.name and ask.name in (p.entry.replica_id, p.entry.host, p.entry.node)
        ]
        for peer in meant:
            peer.link.send(DrainOrder(ask.drain))
            self._figures.decided(_kind_of(ask.drain))
        return DrainTold(ask.ask_id, tuple(sorted(p.entry.replica_id for p in meant if p.entry is not None)))

    def replicas(self) -> dict[ReplicaId, ReplicaSeen]:
        """Those that have reported, as far as people are told of what becomes of them."""
        return {
            p.entry.replica_id: ReplicaSeen(
                p.entry.generation, p.entry.model, p.entry.node, p.pod, frozenset(p.drained_by)
            )
            for p in self._peers
            if p.entry is not None and p.report is not None
        }

    def scales(self) -> dict[str, ScaleSeen]:
        """What was decided last about each model with scale."""
        return {model: ScaleSeen(status.now.wanted, status.now.why) for model, (status, _) in self._scale.items()}

    def scaled(self, status: ScaleStatus) -> None:
        """What was decided about a model's number of replicas; routers hear of it when it changes, and now and then."""
        now_s = self._clock.monotonic()
        before, told_s = self._scale.get(status.model, (None, -math.inf))
        if (
            before is not None
            and before.now.wanted == status.now.wanted
            and (before.kept, before.trouble) == (status.kept, status.trouble)
            and now_s - told_s < _SCALE_TOLD_EVERY_S
        ):
            self._scale[status.model] = status, told_s
            return
        self._scale[status.model] = status, now_s
        if before is not None and before.now.wanted != status.now.wanted:
            self._figures.decided(Kind.SCALE)
        for peer in self._router_peers.values():
            if not peer.link.congested:
                peer.link.send(status)

    # --- the roster and the whole picture ---

    def _tell_routers(self) -> None:
        if not self.leads:
            return
        roster = self._roster()
        for peer in self._peers:
            if peer.role == "router":
                peer.link.send(roster)

    def _roster(self) -> Roster:
        return Roster(entries=tuple(sorted((p.entry for p in self._peers if p.entry), key=lambda e: e.replica_id)))

    def _status(self, ask_id: int, leads: Generation) -> ClusterStatus:
        now = self._clock.monotonic()
        replicas = sorted((p for p in self._peers if p.entry), key=lambda p: p.entry.replica_id if p.entry else "")
        return ClusterStatus(
            ask_id=ask_id,
            controller_generation=leads,
            controller_pid=os.getpid(),
            uptime_s=now - self._started_at,
            replicas=tuple(
                ReplicaSummary(
                    entry=p.entry,
                    pid=p.pid,
                    report=p.report,
                    report_age_s=None if p.reported_at is None else now - p.reported_at,
                    drained_by=p.drained_by,
                    pod=p.pod,
                )
                for p in replicas
                if p.entry
            ),
            routers=tuple(sorted((p.router for p in self._peers if p.router), key=lambda r: r.router_id)),
            scale=tuple(self._scale[model][0] for model in sorted(self._scale)),
            kubernetes=self.kubernetes_status(),
        )


def _kind_of(drain: bool) -> Kind:
    return Kind.DRAIN if drain else Kind.TAKE_WORK
