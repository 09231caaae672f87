"""The replicas that this router has links to, one incarnation of each.

Owns: which incarnation counts. Imports the view only. Invariant: per replica id there is at most one, the latest that
was linked; what an earlier one says is not heard.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cluster.config import RouterConfig
from cluster.ports import ReplicaPort
from cluster.types import Generation, ReplicaId
from router.view import Condition, Replica, ReplicaView


@dataclass(frozen=True, slots=True)
class Known:
    """The link of an incarnation that is known is up again."""

    replica: Replica


@dataclass(frozen=True, slots=True)
class New:
    """A new incarnation; `replaced` is the one that it ends."""

    replica: Replica
    replaced: Replica | None


@dataclass(frozen=True, slots=True)
class Old:
    """An incarnation that a later one has replaced."""


class Fleet:
    """The current incarnation of each replica."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._replicas: dict[ReplicaId, Replica] = {}

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas.values())

    def __getitem__(self, replica_id: ReplicaId) -> Replica:
        return self._replicas[replica_id]

    def current(self, replica_id: ReplicaId, generation: Generation) -> Replica | None:
        """That incarnation, if it is the current one."""
        replica = self._replicas.get(replica_id)
        return replica if replica is not None and replica.generation == generation else None

    def linked(self, port: ReplicaPort, now_s: float) -> Known | New | Old:
        """Take note of a link that is up."""
        replica = self._replicas.get(port.replica_id)
        if replica is not None and replica.generation == port.generation:
            replica.port, replica.link_up = port, True
            return Known(replica)
        if replica is not None and port.generation.number < replica.generation.number:
            return Old()
        new = self._replicas[port.replica_id] = Replica(port, now_s)
        return New(new, replica)

    def forget(self, replica: Replica) -> None:
        """It is gone for good; one that has been replaced is forgotten already."""
        if self._replicas.get(replica.replica_id) is replica:
            del self._replicas[replica.replica_id]

    def views(self, now_s: float) -> list[ReplicaView]:
        return [replica.view(self._config, now_s) for replica in self]

    def fenced(self, now_s: float) -> list[Replica]:
        """Those whose work must go on elsewhere."""
        return [r for r in self if r.reservations and r.condition(self._config, now_s) is Condition.FENCED]
