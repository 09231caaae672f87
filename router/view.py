"""What this router knows of the replicas: their last reports, its own reservations and the state of each link.

Owns: the reservation of capacity and the condition of a replica. Imports cluster and nothing of ours beside. Single
writer. Invariants: a replica's reservations are exactly the attempts that this router has open there; a report that is
missing is None and never a load of zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import msgspec

from cluster.config import RouterConfig
from cluster.ports import ReplicaPort
from cluster.types import (
    EngineLoad,
    Generation,
    PriorityLoad,
    ReplicaId,
    ReplicaReport,
    ReplicaState,
    RequestId,
)


class Condition(StrEnum):
    """Whether new work may be sent to a replica, and if not, why. Idle is none of the bad ones."""

    ROUTABLE = "routable"
    NO_REPORT = "no_report"
    LINK_DOWN = "link_down"
    DRAINING = "draining"
    SILENT = "silent"
    """No report for a while; its work is left with it."""
    FENCED = "fenced"
    """No report for so long that its work goes on elsewhere."""
    STUCK = "stuck"
    """It reports, but its step is older than a step can be."""
    BACKING_OFF = "backing_off"
    """It refused an attempt; its next report decides."""


class OwnLoad(msgspec.Struct, frozen=True):
    """Predicted blocks of this router's open attempts of one priority on one replica.

    Reports count blocks as they are filled, a prompt piece by piece; the prediction counts them from the start.
    """

    priority: int
    active_blocks: int
    parked_blocks: int
    """Of attempts that the engine has preempted and not resumed."""


class SharedLoad(msgspec.Struct, frozen=True):
    """Running attempts of this router that a minimum share sent out at one moment, past what waited then.

    They are out of reach of what had arrived by then, and ordinary work to whatever came later.
    """

    priority: int
    requests: int
    blocks: int
    since_s: float
    """Monotonic."""


class ReplicaView(msgspec.Struct, frozen=True, kw_only=True):
    """A replica at one moment, as decisions see it."""

    replica_id: ReplicaId
    condition: Condition
    load: EngineLoad | None
    """None until the first report."""
    observed_at_s: float | None = None
    """Local monotonic time of the report that `load` is from."""
    own: tuple[OwnLoad, ...] = ()
    unreported: tuple[PriorityLoad, ...] = ()
    """This router's attempts that `load` does not count yet."""
    shared: tuple[SharedLoad, ...] = ()


@dataclass(slots=True)
class Reservation:
    """Capacity that one open attempt holds in this router's view."""

    attempt: int
    sequence: int
    priority: int
    blocks: int
    parked: bool = False
    shared_s: float | None = None
    """When a minimum share sent it out past more urgent work, if one did."""


class Replica:
    """One incarnation of one replica."""

    def __init__(self, port: ReplicaPort, now_s: float, changed: dict[ReplicaId, None]) -> None:
        """`changed` is told whenever there may be more room here than before, or less."""
        self.port = port
        self.replica_id: ReplicaId = port.replica_id
        self.generation: Generation = port.generation
        self._link_up = True
        self._backing_off = False
        self.report: ReplicaReport | None = None
        self.reservations: dict[RequestId, Reservation] = {}
        self.left_behind: set[tuple[RequestId, int]] = set()
        """Attempts that were given up while the link could not carry the abort; aborted when it is up again."""
        self._heard_at_s = now_s
        self._observed_at_s: float | None = None
        self._changed = changed
        self._view: ReplicaView | None = None
        self._change()

    @property
    def link_up(self) -> bool:
        return self._link_up

    @link_up.setter
    def link_up(self, up: bool) -> None:
        self._link_up = up
        self._change()

    def observe(self, report: ReplicaReport, now_s: float) -> None:
        self.report = report
        self._heard_at_s = self._observed_at_s = now_s
        self._backing_off = False
        self._change()

    def back_off(self) -> None:
        """It refused an attempt for want of room: nothing new is sent until its next report."""
        self._backing_off = True
        self._change()

    def reserve(self, request_id: RequestId, reservation: Reservation) -> None:
        assert request_id not in self.reservations, "one attempt of a request at a time"
        self.reservations[request_id] = reservation
        self._change()

    def release(self, request_id: RequestId) -> None:
        del self.reservations[request_id]
        self._change()

    def grow(self, request_id: RequestId, blocks: int) -> None:
        """The attempt has outgrown its prediction."""
        self.reservations[request_id].blocks = blocks
        self._change()

    def park(self, request_id: RequestId, parked: bool) -> None:
        """The engine preempted this attempt, or it runs again."""
        self.reservations[request_id].parked = parked
        self._change()

    def take_left_behind(self) -> list[tuple[RequestId, int]]:
        """The link is up again: what must be aborted there now."""
        taken = sorted(self.left_behind)
        self.left_behind.clear()
        return taken

    @property
    def block_size_tokens(self) -> int:
        """Tokens per block; only asked of a replica that has reported."""
        assert self.report is not None
        return self.report.load.block_size_tokens

    def abort(self, request_id: RequestId, attempt: int) -> None:
        """End an attempt there, now or as soon as the link is up again."""
        if self._link_up:
            self.port.abort(request_id, attempt)
        else:
            self.left_behind.add((request_id, attempt))

    def condition(self, config: RouterConfig, now_s: float) -> Condition:
        silence_s = now_s - self._heard_at_s
        report = self.report
        if silence_s > config.fenced_after_s:
            return Condition.FENCED
        if not self._link_up:
            return Condition.LINK_DOWN
        if report is None:
            return Condition.NO_REPORT
        if report.state is ReplicaState.DRAINING:
            return Condition.DRAINING
        if silence_s > config.silent_after_s:
            return Condition.SILENT
        if report.step_age_s is not None and report.step_age_s > config.step_age_limit_s:
            return Condition.STUCK
        if self._backing_off:
            return Condition.BACKING_OFF
        return Condition.ROUTABLE

    def view(self, config: RouterConfig, now_s: float) -> ReplicaView:
        condition = self.condition(config, now_s)
        if self._view is None or self._view.condition is not condition:
            self._view = ReplicaView(
                replica_id=self.replica_id,
                condition=condition,
                load=self.report.load if self.report is not None else None,
                observed_at_s=self._observed_at_s,
                own=self._own(),
                unreported=self.unreported(),
                shared=self._shared(),
            )
        return self._view

    def _change(self) -> None:
        self._view = None
        self._changed[self.replica_id] = None

    def _own(self) -> tuple[OwnLoad, ...]:
        active: dict[int, int] = {}
        parked: dict[int, int] = {}
        for r in self.reservations.values():
            side = parked if r.parked else active
            side[r.priority] = side.get(r.priority, 0) + r.blocks
        return tuple(OwnLoad(p, active.get(p, 0), parked.get(p, 0)) for p in sorted(active.keys() | parked.keys()))

    def unreported(self) -> tuple[PriorityLoad, ...]:
        """Attempts sent there that its last report does not count."""
        applied = self.report.applied_sequence if self.report is not None else 0
        loads: dict[int, tuple[int, int]] = {}
        for r in self.reservations.values():
            if r.sequence > applied:
                requests, blocks = loads.get(r.priority, (0, 0))
                loads[r.priority] = (requests + 1, blocks + r.blocks)
        return tuple(PriorityLoad(p, *loads[p]) for p in sorted(loads))

    def _shared(self) -> tuple[SharedLoad, ...]:
        return tuple(
            SharedLoad(r.priority, 1, r.blocks, r.shared_s)
            for r in self.reservations.values()
            if r.shared_s is not None and not r.parked
        )
