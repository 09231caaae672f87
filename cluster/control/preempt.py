"""Who leaves a replica so that a request has room there that has none anywhere.

Owns: that decision, for demands that routers told: the first of a queue that fits on no replica, whoever its engine would
preempt there. Pure: it reads a view and returns proposals. Imports the view and the account of its room.

Invariants: what leaves is enough, by the blocks that each frees and no more than those; nobody gives up keys and values for
what is not strictly more urgent, and no oftener than `max_parks` in `parks_window_s`; who moves goes to where there is room
without anybody giving way; without any one of those who leave it would not be enough; while proposals for a demand are on
their way it has no others. What has left is on its way until reports show it; where growth has then undone the room, more
leave at once.

A set of requests costs the seconds that they lose by it: one that moves, its pause and the time that its blocks are copied;
one that goes back to its queue, the time to compute its keys and values again and, where it ran, its wait. A request moves
where there is room for it. Less urgent requests alone are looked at first. Where those of no replica are enough, requests
of any priority may leave, but the others only by a move: what is free in several places is brought together in one
(de-fragmentation, as Llumnix migrates for a queueing request's sake, OSDI 24; there by empty space alone, here at the
least cost).

The set is the cheapest over all replicas where no more than EXACT_MAX requests could leave one and no more than SEARCH_MAX
replicas come into question. Of more replicas those are looked at that have least to free; of more requests on one, those
are taken that cost least for what they free, and whoever then proves superfluous stays, the dearest first. Room on a third
replica is given to those who move in the order of what they take, the largest first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

import msgspec

from cluster.config import ControlConfig
from cluster.control.room import Room
from cluster.control.view import ClusterView, Proposal, Replica, Underway, blocks_of, frees, takes
from cluster.messages import HeldRequest, Standing, Unplaced
from cluster.types import ReplicaId, RequestId

UNPLACED_TICKS = 2
"""A demand must be older than that: the router and the engines settle the others among themselves."""
EXACT_MAX = 10
SEARCH_MAX = 16
SEEN_S = 0.25
"""What reports show a router has seen after so long, and has told what it has no place for all the same: replicas report
every 100 ms, and routers tell every 50."""
STEPS_MAX = 4_000
"""Of all searches in a tick; beyond it the best so far is taken."""
STEPS_OF_A_SET = 10
"""So many steps of the search take as long as one set that is looked at with its targets."""
SIMILAR_S = 1e-9
"""Costs that differ by less are one."""


class _Lacks(NamedTuple):
    """What a replica lacks for a demand."""

    blocks: int
    slots: int


class _Victim(msgspec.Struct, gc=False):
    """A request that may leave."""

    held: HeldRequest
    blocks: int
    """That it frees of those that are lacking."""
    slots: int
    takes: int
    """Blocks where it moves."""
    moved_s: float
    """Infinite: there is no room for it anywhere."""
    parked_s: float
    """Infinite: it may not be parked."""
    least_s: float
    """Of the two."""
    for_use_s: float
    """`least_s` by the part that it frees of what is lacking."""


@dataclass(frozen=True, slots=True)
class _Leaves:
    victim: _Victim
    target: Replica | None
    cost_s: float


@dataclass(frozen=True, slots=True)
class _Plan:
    replica: Replica
    lacks: _Lacks
    leave: tuple[_Leaves, ...]
    cost_s: float

    @property
    def rank(self) -> tuple[float, int, int, ReplicaId]:
        """The least is the best: the cheapest, of equals the one whose most urgent is least so, then of fewest."""
        urgent = max(leaves.victim.held.priority for leaves in self.leave)
        return round(self.cost_s / SIMILAR_S) * SIMILAR_S, urgent, len(self.leave), self.replica.replica_id


@dataclass(slots=True)
class _Asked:
    """Who was lately asked to leave for a demand."""

    made_on: ReplicaId
    """Where the last that left was shown to have."""
    shown_s: float = -math.inf
    """When that was."""
    all_shown: bool = True
    at_s: set[float] = field(default_factory=set)
    """When any were asked."""


def decide(view: ClusterView, config: ControlConfig, now_s: float) -> tuple[Underway, ...]:
    """Who is to leave now for one of the demands: the most urgent that can be helped, of equals who has waited longest.

    The next is for the next tick, which counts what leaves for this one.
    """
    asked = _asked_lately(view, config, now_s)
    due = [
        d
        for d in view.demands
        if d.waits_s(now_s) > UNPLACED_TICKS * config.tick_s
        and ((own := asked.get(d.told.request_id)) is None or own.all_shown)
    ]
    if not due:
        return ()
    tick = _Tick(Room(view, config, now_s), config)
    in_vain: list[Unplaced] = []
    for demand in sorted(due, key=lambda d: (-d.told.priority, -d.waits_s(now_s), d.told.request_id)):
        told, waits_s = demand.told, demand.waits_s(now_s)
        own = asked.get(told.request_id)  # room that was made for it is no other's
        if own is None and any(t.priority >= told.priority and t.blocks <= told.blocks for t in in_vain):
            continue
        if own is not None and demand.told_at_s < _reported_s(view, own.made_on):
            continue  # it may be what has taken the room since
        # Where room was made for it and its router has seen that by now, it is not enough; until then it may be, however long
        # it has waited. A router to which all room is not enough (it has lost its links, say) empties no replica after replica.
        is_patient = waits_s <= config.proposal_expiry_s
        if own is not None:
            is_patient = demand.told_at_s - own.shown_s <= SEEN_S or len(own.at_s) > 1
        search = _Search(told, tick)
        plan = search.plan(is_patient=is_patient)
        if plan is not None:
            return tuple(_underway(told, waits_s, plan, leaves, now_s) for leaves in plan.leave)
        if not search.sees_room:
            in_vain.append(told)
    return ()


def _asked_lately(view: ClusterView, config: ControlConfig, now_s: float) -> Mapping[RequestId, _Asked]:
    """By demand; none for which nobody was."""
    found: dict[RequestId, _Asked] = {}
    for underway in view.lately:
        proposal, shown_s = underway.proposal, underway.shown_s
        if proposal.for_request_id is None or now_s - underway.at_s > config.proposal_expiry_s:
            continue
        asked = found.setdefault(proposal.for_request_id, _Asked(proposal.source))
        asked.at_s.add(underway.at_s)
        if shown_s is None:
            asked.all_shown = False
        elif shown_s >= asked.shown_s:  # which of them is the last is not in the order of the proposals
            asked.shown_s, asked.made_on = shown_s, proposal.source
    return found


def _reported_s(view: ClusterView, replica_id: ReplicaId) -> float:
    return next((r.observed_at_s for r in view.replicas if r.replica_id == replica_id), -math.inf)


class _Row(msgspec.Struct, gc=False):
    """A replica as a demand of some priority sees it."""

    blocks_left: int
    slots_left: int
    with_lower: int
    """Blocks that would be left without the less urgent, at most."""
    with_all: int
    """Without all that it tells of one by one."""
    made_free_for: Set[RequestId] | None
    """Demands that room was lately made for there."""
    replica: Replica


class _Tick:
    """What the searches of a tick have in common."""

    def __init__(self, room: Room, config: ControlConfig) -> None:
        self.room = room
        self.config = config
        self.steps_left = STEPS_MAX
        self.most_left = max((room.left(t)[1] for t in room.targets), default=0)
        """No replica has room for more than that."""
        self._rows: dict[int, list[_Row]] = {}

    def rows(self, priority: int) -> list[_Row]:
        """Replicas that could be made free for some demand of this priority, with least to free first."""
        rows = self._rows.get(priority)
        if rows is None:
            rows = []
            for replica in self.room.live:  # few calls: this runs for every replica
                above, load = replica.waits_above, replica.load
                if above is not None and above >= priority:
                    continue
                slots, left = self.room.left(replica)
                with_lower = load.blocks_free
                for level in load.running:
                    if level.priority < priority:
                        with_lower += level.blocks
                for level in load.waiting:  # all less urgent
                    with_lower += level.blocks
                made_free_for = self.room.made_free.get(replica.replica_id)
                rows.append(_Row(left, slots, with_lower, left + replica.listed_frees, made_free_for, replica))
            rows.sort(key=attrgetter("blocks_left"), reverse=True)  # equals stay in the order of their ids
            self._rows[priority] = rows
        return rows


class _Search:
    """For one demand."""

    def __init__(self, told: Unplaced, tick: _Tick) -> None:
        self._told = told
        self._tick = tick
        self._room, self._config = tick.room, tick.config
        self._best: _Plan | None = None
        self._rows = [
            row for row in tick.rows(told.priority) if not row.made_free_for or row.made_free_for == {told.request_id}
        ]
        self.sees_room = any(row.blocks_left >= told.blocks and row.slots_left > 0 for row in self._rows)
        """A replica seems to have the room already."""

    def plan(self, is_patient: bool) -> _Plan | None:
        if self.sees_room and is_patient:
            # Its router knows of something there that the report does not count yet. That lasts no longer than what is on
            # its way: later the others are looked at.
            return None
        for among_all in (False, True):
            if among_all and not self._tick.most_left:
                return None
            self._look_at_all(among_all)
            if self._best is not None:
                return self._best
        return None

    def _look_at_all(self, among_all: bool) -> None:
        wanted, looked_at = self._told.blocks, 0
        for row in self._rows:
            if row.with_all < wanted or (row.with_lower < wanted and not among_all):
                continue
            lacks = _Lacks(wanted - row.blocks_left, 1 - row.slots_left)
            if lacks.blocks <= 0 and lacks.slots <= 0:
                continue
            if looked_at == SEARCH_MAX or self._tick.steps_left <= 0:
                return
            self._tick.steps_left -= len(row.replica.held)
            victims = self._victims(row.replica, lacks, among_all)
            if _are_enough(victims, lacks):
                looked_at += 1
                self._look(row.replica, lacks, victims)

    def _victims(self, replica: Replica, lacks: _Lacks, among_all: bool) -> list[_Victim]:
        """Who may leave and would be of use; what costs least for it first."""
        room, config, load = self._room, self._config, replica.load
        again_s = config.request_rest_s  # whoever was asked for in vain: rather others
        found = []
        for held in replica.held:
            lower = held.priority < self._told.priority
            if not (lower or among_all) or room.rests(held, again_s):
                continue
            runs = held.standing is Standing.RUNS
            blocks, slots = min(frees(held, load), lacks.blocks), int(runs and lacks.slots > 0)
            if blocks <= 0 and not slots:
                continue
            moved_s, parked_s, needed = math.inf, math.inf, takes(held, load)
            if needed <= self._tick.most_left:
                moved_s = config.move_pause_s + blocks_of(held.tokens, load) * config.move_block_s
            if lower and room.may_park(held):
                parked_s = held.tokens * config.recompute_token_s + (config.park_delay_s if runs else 0.0)
            least_s = min(moved_s, parked_s)
            if least_s < math.inf:
                blocks = max(0, blocks)
                use = blocks / max(1, lacks.blocks) + slots / max(1, lacks.slots)
                found.append(_Victim(held, blocks, slots, needed, moved_s, parked_s, least_s, least_s / use))
        found.sort(key=lambda v: (v.for_use_s, v.held.priority, v.held.request_id))
        return found

    # --- the sets of one replica ---

    def _look(self, replica: Replica, lacks: _Lacks, victims: list[_Victim]) -> None:
        if len(victims) <= EXACT_MAX:
            self._look_exactly(replica, lacks, victims, [], 0.0, lacks)
            return
        while _are_enough(victims, lacks):
            taken = _cheapest_for_use(victims, lacks)
            stuck = self._consider(replica, lacks, taken)
            if stuck is None:
                return
            victims = [v for v in victims if v is not stuck]

    def _look_exactly(
        self,
        replica: Replica,
        lacks: _Lacks,
        victims: Sequence[_Victim],
        taken: list[_Victim],
        cost_s: float,
        still: _Lacks,
    ) -> None:
        """All sets of `taken` and some of `victims` that `still` is lacking, but for those that cannot be the cheapest."""
        self._tick.steps_left -= 1
        if self._tick.steps_left < 0 or (self._best is not None and cost_s > self._best.cost_s + SIMILAR_S):
            return
        if still.blocks <= 0 and still.slots <= 0:
            if not _superfluous(taken, lacks):
                self._consider(replica, lacks, taken)
            return
        if not _are_enough(victims, still):
            return
        first, rest = victims[0], victims[1:]
        with_first = _Lacks(still.blocks - first.blocks, still.slots - first.slots)
        self._look_exactly(replica, lacks, rest, [*taken, first], cost_s + first.least_s, with_first)
        self._look_exactly(replica, lacks, rest, taken, cost_s, still)

    def _consider(self, replica: Replica, lacks: _Lacks, taken: Sequence[_Victim]) -> _Victim | None:
        """Keep this set where it is the best so far. Returns who stands in its way: only to be moved, and without room."""
        self._tick.steps_left -= STEPS_OF_A_SET
        coming: dict[ReplicaId, tuple[int, int]] = {}
        leave = []
        for victim in sorted(taken, key=lambda v: (-v.takes, v.held.request_id)):
            target = self._target(replica, victim, coming)
            cost_s = victim.parked_s if target is None else victim.moved_s
            if cost_s == math.inf:
                return victim
            if target is not None:
                requests, blocks = coming.get(target.replica_id, (0, 0))
                coming[target.replica_id] = requests + 1, blocks + victim.takes
            leave.append(_Leaves(victim, target, cost_s))
        plan = _Plan(replica, lacks, tuple(leave), math.fsum(leaves.cost_s for leaves in leave))
        if self._best is None or plan.rank < self._best.rank:
            self._best = plan
        return None

    def _target(self, source: Replica, victim: _Victim, coming: Mapping[ReplicaId, tuple[int, int]]) -> Replica | None:
        """Where it moves, beside those of its set that go there."""
        if victim.moved_s == math.inf:
            return None
        room = self._room

        def fits(target: Replica) -> bool:
            requests, blocks = coming.get(target.replica_id, (0, 0))
            slots_left, blocks_left = room.left(target)
            return slots_left > requests and blocks_left >= blocks + victim.takes

        return room.best(source, victim.held.priority, victim.takes, fits)


def _are_enough(victims: Sequence[_Victim], lacks: _Lacks) -> bool:
    blocks, slots = lacks
    for victim in victims:
        blocks -= victim.blocks
        slots -= victim.slots
    return blocks <= 0 and slots <= 0


def _superfluous(taken: Sequence[_Victim], lacks: _Lacks) -> bool:
    """Whether one of them may as well stay."""
    return any(_are_enough([v for v in taken if v is not one], lacks) for one in taken)


def _cheapest_for_use(victims: Sequence[_Victim], lacks: _Lacks) -> list[_Victim]:
    """As many of the first as are enough, without those that then prove superfluous."""
    taken: list[_Victim] = []
    for victim in victims:
        taken.append(victim)
        if _are_enough(taken, lacks):
            break
    for victim in sorted(taken, key=lambda v: (-v.least_s, v.held.request_id)):
        others = [v for v in taken if v is not victim]
        if _are_enough(others, lacks):
            taken = others
    return taken


def _underway(told: Unplaced, waits_s: float, plan: _Plan, leaves: _Leaves, now_s: float) -> Underway:
    held, source, target = leaves.victim.held, plan.replica, leaves.target
    more_urgent = held.priority < told.priority
    who = "a more urgent request" if more_urgent else "a request"
    proposal = Proposal(
        router_id=held.router_id,
        request_id=held.request_id,
        attempt=held.attempt,
        source=source.replica_id,
        source_generation=source.entry.generation,
        target=target.replica_id if target is not None else None,
        target_generation=target.entry.generation if target is not None else None,
        for_request_id=told.request_id,
        why=f"it makes room on {source.replica_id} for {who} that fits nowhere",
        numbers={
            "demand_blocks": float(told.blocks),
            "demand_priority": float(told.priority),
            "demand_waits_s": waits_s,
            "blocks_lacking": float(max(0, plan.lacks.blocks)),
            "blocks_freed": float(held.blocks),
            "leave_with_it": float(len(plan.leave) - 1),
            "cost_s": leaves.cost_s,
        },
    )
    goes_to = target.replica_id if target is not None else None
    return Underway(now_s, proposal, held.standing, held.blocks, goes_to, leaves.victim.takes)
