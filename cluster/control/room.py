"""What room there is on a model's replicas, with what is on its way counted, and who is to be left alone.

Owns: that account, as a tick begins. Pure: made from a view. Imports the view. Invariants: no room is given again while an
earlier proposal for it is on its way; none is given where as urgent work waits, nor where room is being made for a demand,
nor on a replica that drains, is silent or stands still; nobody is to give way but where that is asked for.

What is on its way counts on both sides until it expires, also where a report counts it already: so a target is never
taken for emptier than it is, nor a source for fuller.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

from cluster.config import ControlConfig
from cluster.control.view import ClusterView, Replica, Underway, fullness
from cluster.messages import HeldRequest
from cluster.types import EngineLoad, ReplicaId

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
        self._made_free: set[ReplicaId] = set()
        for underway in view.lately:
            self._count(underway)
        self._work: dict[int, tuple[Counter[str], Counter[str]]] = {}
        self._least_urgent: int | None = None
        """That runs anywhere; None: not looked for yet."""
        stale_s = config.stale_after_s
        self.live = [
            r for r in view.replicas if r.ready and now_s - r.observed_at_s <= stale_s and r.step_age_s <= stale_s
        ]
        """Replicas to and from which something may be proposed; by id."""
        self.targets = [r for r in self.live if r.slots_left > 0 and min(self.left(r)) > 0]
        """Those with a slot and blocks: only they can have room for anything. The emptiest first, of equals by id."""
        self.targets.sort(key=self.full_at_most)

    # --- what is there ---

    def left(self, replica: Replica) -> tuple[int, int]:
        """Slots and blocks there, without those for what is on its way."""
        arriving = self._arriving.get(replica.replica_id)
        if arriving is None:
            return replica.slots_left, replica.blocks_left
        return replica.slots_left - arriving[0], replica.blocks_left - arriving[1]

    def full_at_most(self, replica: Replica, requests: int = 0, blocks: int = 0) -> float:
        """With all that may come, and so much besides."""
        arriving = self._arriving.get(replica.replica_id)
        if arriving is None and not requests:
            return replica.fullness
        come, with_blocks = arriving or (0, 0)
        return _full(replica, come + requests, with_blocks + blocks)

    def full_at_least(self, replica: Replica, requests: int = 0, blocks: int = 0) -> float:
        """Without all that may leave, and without so much besides."""
        leaving = self._leaving.get(replica.replica_id)
        if leaving is None and not requests:
            return replica.fullness
        left, with_blocks = leaving or (0, 0)
        return _full(replica, -left - requests, -with_blocks - blocks)

    def _has_room(self, replica: Replica, priority: int, blocks: int) -> bool:
        """Whether a target has the blocks for a request that nobody is to give way for."""
        if replica.waits_above is not None and replica.waits_above >= priority:
            return False
        return self.left(replica)[1] >= blocks and replica.replica_id not in self._made_free

    def best(self, source: Replica, priority: int, blocks: int, allowed: Allowed) -> Replica | None:
        """Where a request of `source` goes that takes so many blocks: the emptiest that has the room; of those that are
        nearly as empty one whose machine, then zone, has least work that is as urgent, so that one failure takes less of it.
        """
        near: list[Replica] = []
        limit = 0.0
        for replica in self.targets:
            if near and (len(near) == NEARLY_MAX or self.full_at_most(replica) > limit):
                break
            if replica is not source and self._has_room(replica, priority, blocks) and allowed(replica):
                if not near:
                    limit = self.full_at_most(replica) + NEARLY
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
        if self._least_urgent is None:
            running = (level.priority for replica in self.live for level in replica.load.running)
            self._least_urgent = min(running, default=priority)
        if priority <= self._least_urgent:
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
                and replica.replica_id not in self._made_free
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

    def is_made_free(self, replica_id: ReplicaId) -> bool:
        """Room there is for a demand."""
        return replica_id in self._made_free

    def _count(self, underway: Underway) -> None:
        proposal, ago_s = underway.proposal, self._now_s - underway.at_s
        if proposal.target is not None and ago_s <= self._config.pair_rest_s:
            self._resting_pairs.add((min(proposal.source, proposal.target), max(proposal.source, proposal.target)))
        if ago_s > self._config.proposal_expiry_s:
            return
        requests, blocks = self._leaving.get(proposal.source, (0, 0))
        self._leaving[proposal.source] = requests + 1, blocks + underway.frees_blocks
        if underway.goes_to is not None:
            requests, blocks = self._arriving.get(underway.goes_to, (0, 0))
            self._arriving[underway.goes_to] = requests + 1, blocks + underway.takes_blocks
        if proposal.for_request_id is not None:
            self._made_free.add(proposal.source)

    def _work_at(self, priority: int) -> tuple[Counter[str], Counter[str]]:
        """Requests that are as urgent, by machine and by zone."""
        if priority not in self._work:
            machines, zones = Counter[str](), Counter[str]()
            for replica in self._view.replicas:
                count = _as_urgent(replica.load, priority)
                machines[replica.entry.machine] += count
                zones[replica.entry.zone] += count
            self._work[priority] = machines, zones
        return self._work[priority]


def _full(replica: Replica, requests: int, blocks: int) -> float:
    load = replica.load
    return fullness(load, replica.requests + requests, load.blocks_total - load.blocks_free + blocks)


def _as_urgent(load: EngineLoad, priority: int) -> int:
    count = 0
    for level in load.running:
        if level.priority >= priority:
            count += level.requests
    for level in load.waiting:
        if level.priority >= priority:
            count += level.requests
    return count
