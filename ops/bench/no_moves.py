"""The part of a `cluster.ports.ReplicaPort` by which requests move, where none does."""

from __future__ import annotations

from cluster.messages import RosterEntry
from cluster.types import RequestId


class NoMoves:
    @property
    def entry(self) -> RosterEntry:
        raise NotImplementedError("nothing is moved")

    def move(self, request_id: RequestId, attempt: int, number: int, target: RosterEntry) -> None:
        raise NotImplementedError("nothing is moved")

    def call_off(self, request_id: RequestId, attempt: int) -> None:
        raise NotImplementedError("nothing is moved")

    def grant(self, request_id: RequestId, attempt: int, index: int) -> int:
        raise NotImplementedError("nothing is moved")

    def release(self, request_id: RequestId, attempt: int) -> None:
        raise NotImplementedError("nothing is moved")
