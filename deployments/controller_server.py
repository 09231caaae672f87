"""The controller's side of every router and replica: the rendezvous, and the whole picture for `forebay status`.

Owns: who is connected and what each last reported. Imports `cluster` and the transport; no Ray. It observes and
introduces; it decides nothing yet.

Invariant: it holds nothing that its successor does not rebuild from the first hellos and reports, so that it can be
killed at any moment. Its generation is higher than any that its peers have seen.
"""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass, field

from cluster.messages import (
    ClusterStatus,
    Granted,
    Hello,
    ReplicaHere,
    ReplicaStatus,
    ReplicaSummary,
    Roster,
    RosterEntry,
    RouterStatus,
    StatusRequest,
    ToController,
)
from cluster.ports import Clock
from cluster.types import Generation, ReplicaReport
from deployments.transport import Identity, Link

ROLES = frozenset({"router", "replica"})


@dataclass(eq=False)
class _Peer:
    """LinkHandler of one router or replica."""

    server: ControllerServer
    link: Link
    role: str
    entry: RosterEntry | None = None
    pid: int = 0
    report: ReplicaReport | None = None
    reported_at: float | None = None
    router: RouterStatus | None = field(default=None)

    def message(self, message: ToController) -> None:
        self.server.message(self, message)

    def writable(self) -> None:
        """Rosters are small and rare; nothing is held back."""

    def closed(self, reason: str) -> None:
        del reason
        self.server.peer_gone(self)


class ControllerServer:
    """State of one controller incarnation."""

    def __init__(self, secret: bytes, clock: Clock) -> None:
        self._secret = secret
        self._clock = clock
        self._started_at = clock.monotonic()
        self._generation = Generation(1, uuid.uuid4().hex)
        self._replica_generation_highest = 0
        self._peers: set[_Peer] = set()

    def identity(self, hello: Hello) -> Identity:
        """Who we are towards this peer: of a later generation than any controller that it has seen."""
        seen = hello.controller_generation_seen
        own = self._generation
        if seen is not None and seen.uuid != own.uuid and seen.number >= own.number:
            self._generation = Generation(seen.number + 1, own.uuid)
        return Identity(role="controller", sender_id="controller", secret=self._secret, generation=self._generation)

    def accept(self, link: Link, hello: Hello) -> _Peer:
        peer = _Peer(self, link, hello.role)
        self._peers.add(peer)
        if hello.role == "replica":
            if hello.generation is None:
                self._replica_generation_highest += 1
                link.send(Granted(generation=Generation(self._replica_generation_highest, uuid.uuid4().hex)))
            else:
                self._replica_generation_highest = max(self._replica_generation_highest, hello.generation.number)
        else:
            link.send(self._roster())
        return peer

    def peer_gone(self, peer: _Peer) -> None:
        self._peers.discard(peer)
        if peer.entry is not None:
            self._tell_routers()

    def message(self, peer: _Peer, message: ToController) -> None:
        match message:
            case ReplicaHere(entry=entry, pid=pid):
                peer.entry, peer.pid = entry, pid
                self._tell_routers()
            case ReplicaStatus(report=report):
                peer.report, peer.reported_at = report, self._clock.monotonic()
            case RouterStatus():
                peer.router = message
            case StatusRequest(ask_id=ask_id):
                peer.link.send(self._status(ask_id))

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
