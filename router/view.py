"""What this router knows of the replicas: their last reports, its own reservations and the state of each link.

Owns: the reservation of capacity and the condition of a replica. Imports cluster and nothing of ours beside. Single
writer. Invariants: a replica's reservations are exactly the attempts that this router has open there, and beside them what
moves there counts; a report that is missing is None and never a load of zero.
"""

from __future__ import annotations

from collections.abc import Iterator
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
from router.outliers import CLEAN, Record
from router.suspects import Trial


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
    EJECTED = "ejected"
    """It failed again and again: it is put out, or has the one request that shall show whether it works again."""


class OwnLoad(msgspec.Struct, frozen=True):
    """Predicted blocks of this router's open attempts of one priority on one replica.

    Reports count blocks as they are filled, a prompt piece by piece; the prediction counts them from the start.
    """

    priority: int
    active_blocks: int
    parked_blocks: int
    """Of attempts that the engine has preempted and not resumed."""


class SharedLoad(msgspec.Struct, frozen=True):
    """Attempts of this or another router that a minimum share sent out at one moment, past what waited then.

    They are out of reach of what had arrived by then, and ordinary work to whatever came later.
    """

    priority: int
    requests: int
    blocks: int
    since_s: float
    """Monotonic."""


Used = tuple[int, int, int, int, int, int, float]
"""Of a replica, as work of one priority sees it: slots and blocks in use, the less urgent requests that wait there, slots and
blocks of what is as urgent, and of prompts the tokens that are run before its own and those that a step runs; of these 0
where it is not known."""


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
    trial: Trial = Trial.NONE
    """A suspect is being tried there."""
    memo: dict[int, Used] = {}  # msgspec copies it for each instance
    """For whoever looks at it: what is in use there as work of a priority sees it."""


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
    prompt_tokens: int = 0
    """Of its prompt and of what it has put out, those that are to be run there."""
    trial: Trial = Trial.NONE
    """It is a suspect, and what else may be there."""


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
        self.expected: dict[RequestId, Reservation] = {}
        """Of requests that move here; their attempts are not begun."""
        self._held: dict[int, list[int]] = {}
        """By priority: predicted blocks of attempts that run, of parked ones, and how many attempts."""
        self._own: tuple[OwnLoad, ...] | None = ()
        self._unreported: dict[RequestId, Reservation] = {}
        """Those that the last report does not count."""
        self._unreported_held: dict[int, list[int]] = {}
        """By priority: how many these are, their predicted blocks, and tokens of their prompts."""
        self._unreported_loads: tuple[PriorityLoad, ...] | None = ()
        self._marked: dict[RequestId, Reservation] = {}
        """Those that a minimum share sent, and suspects'."""
        self.left_behind: set[tuple[RequestId, int]] = set()
        """Attempts that were given up while the link could not carry the abort; aborted when it is up again."""
        self.probe: RequestId | None = None
        """Half open, it has this one request."""
        self._record = CLEAN
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

    @property
    def record(self) -> Record:
        """What is held against it."""
        return self._record

    @record.setter
    def record(self, record: Record) -> None:
        self._record = record
        if record.out_until_s is None:
            self.probe = None
        self._change()

    def observe(self, report: ReplicaReport, now_s: float) -> None:
        """Called for every frame: what its sums do not change for stays as it is."""
        before, self.report = self.report, report
        applied = report.applied_sequence
        if self._unreported and (before is None or applied != before.applied_sequence):
            for name, reservation in list(self._unreported.items()):
                if reservation.sequence <= applied:
                    self._reported(name)
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
        self._count(reservation, 1)
        if self.report is None or reservation.sequence > self.report.applied_sequence:
            self._not_reported(request_id, reservation)
        if reservation.shared_s is not None or reservation.trial:
            self._marked[request_id] = reservation
        if self._record.out_until_s is not None:
            self.probe = request_id
        self._change()

    def release(self, request_id: RequestId) -> None:
        self._count(self.reservations.pop(request_id), -1)
        self._reported(request_id)
        self._marked.pop(request_id, None)
        if self.probe == request_id:
            self.probe = None
        self._change()

    def expect(self, request_id: RequestId, reservation: Reservation) -> None:
        """A request moves here that is still open elsewhere: its place is not free. What its replica has reserved for it
        counts a second time, until it is here."""
        self.expected[request_id] = reservation
        self._count(reservation, 1)
        self._not_reported(request_id, reservation)
        self._change()

    def expect_no_more(self, request_id: RequestId) -> None:
        """It has come, or will not."""
        self._count(self.expected.pop(request_id), -1)
        self._reported(request_id)
        self._change()

    def grow(self, request_id: RequestId, blocks: int) -> None:
        """The attempt has outgrown its prediction."""
        reservation = self.reservations[request_id]
        unreported = self._unreported.get(request_id) is reservation
        self._count(reservation, -1)
        if unreported:
            self._reported(request_id)
        reservation.blocks = blocks
        self._count(reservation, 1)
        if unreported:
            self._not_reported(request_id, reservation)
        self._change()

    def park(self, request_id: RequestId, parked: bool) -> None:
        """The engine preempted this attempt, or it runs again."""
        reservation = self.reservations[request_id]
        self._count(reservation, -1)
        reservation.parked = parked
        self._count(reservation, 1)
        self._change()

    def cleared(self, request_id: RequestId) -> None:
        """The attempt is no suspect's any more."""
        self.reservations[request_id].trial = Trial.NONE
        self._change()

    def take_left_behind(self) -> list[tuple[RequestId, int]]:
        """The link is up again: what must be aborted there now."""
        taken = sorted(self.left_behind)
        self.left_behind.clear()
        return taken

    @property
    def step_age_s(self) -> float | None:
        """Of the step that ran when it last reported; None between steps."""
        return None if self.report is None else self.report.step_age_s

    @property
    def block_size_tokens(self) -> int:
        """Tokens per block; only asked of a replica that has reported."""
        assert self.report is not None
        return self.report.load.block_size_tokens

    def blocks_free_most(self) -> int:
        """No work, of whatever priority, finds more of them free (router/routing.py): others' count as reported, and this
        router's own that may be running as predicted."""
        if self.report is None:
            return 0
        load, running = self.report.load, {level.priority for level in self.report.load.running}
        reported = load.blocks_total - load.blocks_free
        for level in self.unreported():
            reported += level.blocks
            running.add(level.priority)
        predicted = sum(own.active_blocks for own in self._own_loads() if own.priority in running)
        return max(0, load.blocks_total - max(reported, predicted))

    def steps(self, prompt_tokens: float) -> float:
        """How many so many tokens of prompts fill; 0 where it does not tell how much a step runs."""
        step_tokens = 0 if self.report is None else self.report.load.step_tokens
        return prompt_tokens / step_tokens if step_tokens else 0.0

    def abort(self, request_id: RequestId, attempt: int) -> None:
        """End an attempt there, now or as soon as the link is up again."""
        if self._link_up:
            self.port.abort(request_id, attempt)
        else:
            self.left_behind.add((request_id, attempt))

    def let_go(self, request_id: RequestId, attempt: int) -> None:
        """What was frozen here is elsewhere by now."""
        if self._link_up:
            self.port.release(request_id, attempt)
        else:
            self.left_behind.add((request_id, attempt))

    def paused(self) -> list[RequestId]:
        """Attempts that are not in the step after its last report: what was paused then with every slot taken."""
        load = self.report.load if self.report is not None else None
        full = load is not None and sum(level.requests for level in load.running) >= load.slots_total
        return [name for name, reservation in self.reservations.items() if reservation.parked] if full else []

    @property
    def has_strangers(self) -> bool:
        """Whether requests of other routers may run there: they can, where there are others, but beside a trial alone
        that the replica has taken up."""
        report = self.report
        if report is None or not report.others:
            return False
        return not any(r.trial is Trial.ALONE and r.sequence == report.alone for r in self._marked.values())

    def trial_of(self, trial: Trial) -> Trial:
        """How a suspect is tried that is sent there now. An empty replica can keep the work of other routers away
        meanwhile: then one death says as much as two."""
        report = self.report
        empty = report is not None and not (report.load.running or report.load.waiting or self._held)
        return Trial.ALONE if report is not None and report.others and empty else trial

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
        until_s = self._record.out_until_s
        if until_s is not None and (now_s < until_s or self.probe is not None):
            return Condition.EJECTED
        return Condition.ROUTABLE

    def view(self, config: RouterConfig, now_s: float) -> ReplicaView:
        if self._view is not None and self._view.condition is Condition.ROUTABLE:
            silence_s = now_s - self._heard_at_s
            if silence_s <= config.silent_after_s and silence_s <= config.fenced_after_s:
                return self._view  # of a replica that takes work, silence alone would be news
        condition = self.condition(config, now_s)
        if self._view is None or self._view.condition is not condition:
            self._view = ReplicaView(
                replica_id=self.replica_id,
                condition=condition,
                load=self.report.load if self.report is not None else None,
                observed_at_s=self._observed_at_s,
                own=self._own_loads(),
                unreported=self.unreported(),
                shared=self._shared(),
                trial=self._trial(),
            )
        return self._view

    def _change(self) -> None:
        self._view = None
        self._changed[self.replica_id] = None

    def _count(self, reservation: Reservation, sign: int) -> None:
        """Keep the sums: a replica is looked at more often than an attempt begins there."""
        held = self._held.get(reservation.priority)
        if held is None:
            held = self._held[reservation.priority] = [0, 0, 0]
        held[reservation.parked] += sign * reservation.blocks
        held[2] += sign
        if not held[2]:
            del self._held[reservation.priority]
        self._own = None

    def _not_reported(self, request_id: RequestId, reservation: Reservation) -> None:
        self._reported(request_id)
        self._unreported[request_id] = reservation
        held = self._unreported_held.setdefault(reservation.priority, [0, 0, 0])
        held[0] += 1
        held[1] += reservation.blocks
        held[2] += reservation.prompt_tokens
        self._unreported_loads = None

    def _reported(self, request_id: RequestId) -> None:
        """Its replica counts it, or it is there no more."""
        reservation = self._unreported.pop(request_id, None)
        if reservation is None:
            return
        held = self._unreported_held[reservation.priority]
        held[0] -= 1
        held[1] -= reservation.blocks
        held[2] -= reservation.prompt_tokens
        if not held[0]:
            del self._unreported_held[reservation.priority]
        self._unreported_loads = None

    def _own_loads(self) -> tuple[OwnLoad, ...]:
        if self._own is None:
            self._own = tuple([OwnLoad(p, active, parked) for p, (active, parked, _) in sorted(self._held.items())])
        return self._own

    def unreported(self) -> tuple[PriorityLoad, ...]:
        """Attempts sent there that its last report does not count."""
        if self._unreported_loads is None:
            held = self._unreported_held
            self._unreported_loads = tuple([PriorityLoad(p, *held[p]) for p in sorted(held)])
        return self._unreported_loads

    def _trial(self) -> Trial:
        """The strictest of those there, of this router and of the others."""
        others = Trial.NONE if self.report is None or not self.report.trial else Trial(self.report.trial)
        return max(others, *(r.trial for r in self._marked.values())) if self._marked else others

    def _shared(self) -> tuple[SharedLoad, ...]:
        if not self._marked and (self.report is None or not self.report.shared):
            return ()
        own = (
            SharedLoad(r.priority, 1, r.blocks, r.shared_s)
            for r in self._marked.values()
            if r.shared_s is not None and not r.parked
        )
        return (*own, *self._shared_by_others())

    def _shared_by_others(self) -> Iterator[SharedLoad]:
        """Blocks are taken for the mean of what runs there of that priority."""
        if self.report is None or not self.report.shared:
            return
        assert self._observed_at_s is not None
        blocks = {
            level.priority: level.blocks // level.requests for level in self.report.load.running if level.requests
        }
        for work in self.report.shared:
            yield SharedLoad(work.priority, 1, blocks.get(work.priority, 0), self._observed_at_s - work.age_s)
