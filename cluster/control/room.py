"""What room there is on a model's replicas, with what is on its way counted, and who is to be left alone.

Owns: that account, as a tick begins. Pure: made from a view. Imports the view. Invariants: no room is given again while an
earlier proposal for it is on its way; none is given where as urgent work waits, nor where room is being made for a demand,
nor on a replica that drains, is silent or stands still; nobody is to give way but where that is asked for.

What is on its way counts on both sides until it expires, also where a report counts it already: so a target is never
taken for emptier than it is, nor a source for fuller. Only of what was to make room for a demand it is known when reports
count it; from then on only they count, and the room is still nobody else's.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping

from cluster.config import ControlConfig
from cluster.control.view import ClusterView, Replica, fullness
from cluster.messages import HeldRequest
from cluster.types import ReplicaId, RequestId

NEARLY = 0.05
"""Replicas whose fullness differs by no more count as equally full, and the other failure domain decides."""
NEARLY_MAX = 16
"""Of those no more are compared."""

Allowed = Callable[[Replica], bool]


class Room:
    """One tick's."""

    def __init__(self, view: ClusterView, config: ControlConfig, now_s: float) -> None:
        self._view = view
        self._config = config
        self._now_s = now_s
        self._arriving: dict[ReplicaId, tuple[int, int]] = {}
        """Requests and blocks."""
        self._leaving: dict[ReplicaId, tuple[int, int]] = {}
        self._resting_pairs: set[tuple[ReplicaId, ReplicaId]] = set()
        self.made_free: dict[ReplicaId, set[RequestId]] = {}
        """Where there is room for a demand, or is being made, and for which."""
        self._count_lately()
        self._work: dict[int, tuple[Mapping[str, int], Mapping[str, int]]] = {}
        self._least_urgent: int | None = None
        """That runs anywhere; None: not looked for yet."""
        stale_s = config.stale_after_s
        self.live = [
            r for r in view.replicas if r.ready and now_s - r.observed_at_s <= stale_s and r.step_age_s <= stale_s
        ]
        """Replicas to and from which something may be proposed; by id."""
        arriving = self._arriving
        targets = [
            r
            for r in self.live
            if r.slots_left > 0 and r.blocks_left > 0 and (r.replica_id not in arriving or min(self.left(r)) > 0)
        ]
        full = [self.full_at_most(r) for r in targets]
        order = sorted(range(len(targets)), key=full.__getitem__)
        self.targets = [targets[number] for number in order]
        """Those with a slot and blocks: only they can have room for anything. The emptiest first, of equals by id."""
        self._targets_full = [full[number] for number in order]

    # --- what is there ---

    def left(self, replica: Replica) -> tuple[int, int]:
        """Slots and blocks there, without those for what is on its way."""
        arriving = self._arriving.get(replica.replica_id)
        if arriving is None:
            return replica.slots_left, replica.blocks_left
        return replica.slots_left - arriving[0], replica.blocks_left - arriving[1]

    def full_at_most(self, replica: Replica) -> float:
        """With all that may come."""
        return self.full_with(replica, 0, 0) if replica.replica_id in self._arriving else replica.fullness

    def full_at_least(self, replica: Replica) -> float:
        """Without all that may leave."""
        return self.full_without(replica, 0, 0) if replica.replica_id in self._leaving else replica.fullness

    def full_with(self, replica: Replica, requests: int, blocks: int) -> float:
        """With all that may come, and so much besides."""
        come, with_blocks = self._arriving.get(replica.replica_id, (0, 0))
        load = replica.load
        used = load.blocks_total - load.blocks_free
        return fullness(load, replica.requests + come + requests, used + with_blocks + blocks)

    def full_without(self, replica: Replica, requests: int, blocks: int) -> float:
        """Without all that may leave, and without so much besides."""
        left, with_blocks = self._leaving.get(replica.replica_id, (0, 0))
        load = replica.load
        used = load.blocks_total - load.blocks_free
        return fullness(load, replica.requests - left - requests, used - with_blocks - blocks)

    def most_open(self, priority: int, allowed: Allowed) -> int:
        """Blocks of the one with most left where a request of this priority, or of any lower, could go."""
        most = 0
        for replica in self.targets:
            above = replica.waits_above
            if (above is None or above < priority) and replica.replica_id not in self.made_free and allowed(replica):
                most = max(most, self.left(replica)[1])
        return most

    def runs_below(self, priority: int) -> bool:
        """Whether anything runs that is less urgent, anywhere."""
        if self._least_urgent is None:
            running = (level.priority for replica in self.live for level in replica.load.running)
            self._least_urgent = min(running, default=priority)
        return priority > self._least_urgent

    def best(self, source: Replica, priority: int, blocks: int, allowed: Allowed) -> Replica | None:
        """Where a request of `source` goes that takes so many blocks: the emptiest that has the room; of those that are
        nearly as empty one whose machine, then zone, has least work that is as urgent, so that one failure takes less of it.
        """
        near: list[Replica] = []
        limit = math.inf
        for replica, full in zip(self.targets, self._targets_full, strict=True):
            if len(near) == NEARLY_MAX or full > limit:
                break
            above = replica.waits_above
            if (
                replica is not source
                and (above is None or above < priority)
                and self.left(replica)[1] >= blocks
                and replica.replica_id not in self.made_free
                and allowed(replica)
            ):
                if not near:
                    limit = full + NEARLY
                near.append(replica)
        if len(near) < 2:
            return near[0] if near else None
        machines, zones = self._work_at(priority)
        here = source.entry  # where the request itself counts

        def failing_together(replica: Replica) -> tuple[int, int]:
            there = replica.entry
            same_machine, same_zone = there.machine == here.machine, there.zone == here.zone
            return machines[there.machine] - same_machine, zones[there.zone] - same_zone

        return min(near, key=failing_together)  # they are in order, and the first of equals is taken

    def gives_way(self, source: Replica, priority: int, blocks: int, allowed: Allowed) -> Replica | None:
        """Where a request of `source` would run in the place of what is less urgent and runs there, the one with most left
        besides. As much as it takes is free or would be, and nothing as urgent waits."""
        if not self.runs_below(priority):
            return None
        most, found = -math.inf, None
        for replica in self.live:  # few calls: this runs for every replica
            above = replica.waits_above
            if replica is source or (above is not None and above >= priority):
                continue
            slots, left = self.left(replica)
            lower = 0
            for level in replica.load.running:
                if level.priority < priority:
                    lower += level.blocks
                    slots += level.requests
            if (
                lower
                and slots > 0
                and most < left + lower >= blocks
                and replica.replica_id not in self.made_free
                and allowed(replica)
            ):
                most, found = left + lower, replica
        return found

    # --- who is to be left alone ---

    def rests(self, held: HeldRequest, again_s: float) -> bool:
        """It is to leave already, or has left a place a moment ago.

        Args:
            again_s: So long after it was asked for in vain it may be asked for again: it is the same attempt still.
        """
        left_s, attempt = self._view.left.get(held.request_id, (-math.inf, 0))
        return self._now_s - left_s <= (again_s if attempt == held.attempt else self._config.request_rest_s)

    def pair_rests(self, one: ReplicaId, other: ReplicaId) -> bool:
        return (min(one, other), max(one, other)) in self._resting_pairs

    def may_park(self, held: HeldRequest) -> bool:
        return self._view.parks.get(held.request_id, 0) < self._config.max_parks

    def _count_lately(self) -> None:
        now_s, pair_rest_s = self._now_s, self._config.pair_rest_s
        expiry_s = self._config.proposal_expiry_s
        # No calls: these are hundreds, in each tick.
        for at_s, proposal, _, frees_blocks, goes_to, takes_blocks, _, _, shown_s in self._view.lately:
            ago_s, source = now_s - at_s, proposal.source
            if ago_s <= pair_rest_s and (target := proposal.target) is not None:
                self._resting_pairs.add((source, target) if source < target else (target, source))
            if ago_s > expiry_s:
                continue
            if (demand := proposal.for_request_id) is not None:
                self.made_free.setdefault(source, set()).add(demand)
            if shown_s is not None:
                continue
            requests, blocks = self._leaving.get(source, (0, 0))
            self._leaving[source] = requests + 1, blocks + frees_blocks
            if goes_to is not None:
                requests, blocks = self._arriving.get(goes_to, (0, 0))
                self._arriving[goes_to] = requests + 1, blocks + takes_blocks

    def _work_at(self, priority: int) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """Requests that are as urgent, by machine and by zone."""
        work = self._work.get(priority)
        if work is None:
            machines, zones = defaultdict[str, int](int), defaultdict[str, int](int)
            for replica in self._view.replicas:  # no calls: this runs for every replica
                load, count = replica.load, 0
                for level in load.running:
                    if level.priority >= priority:
                        count += level.requests
                for level in load.waiting:
                    if level.priority >= priority:
                        count += level.requests
                if count:
                    entry = replica.entry
                    machines[entry.machine] += count
                    zones[entry.zone] += count
            work = self._work[priority] = machines, zones
        return work
