"""The controller's loop: what it hears becomes a view, and what follows from the view is proposed.

Owns: the soft state of one controller incarnation, which is the last that each replica and each router told and what was
proposed lately. Imports the two decisions, the view and the messages; no clock and no socket: who drives it says what
time it is. Single writer.

Invariants: nothing here is needed by a successor, which is told all of it again within a report's period; the same events
give the same proposals, in whatever order replicas and routers came; memory is bounded by the replicas, the routers and
what may be proposed within the longest time that is looked back.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque

from cluster.config import ControlConfig
from cluster.control import preempt, rebalance
from cluster.control.gates import DEMAND_PERIOD_S
from cluster.control.view import ClusterView, Demand, Proposal, Replica, Underway, observe
from cluster.messages import HeldRequest, Left, RosterEntry, Stays, Unplaced
from cluster.types import Generation, ReplicaId, ReplicaReport, RequestId, RouterId

GONE_AFTER_S = 3 * DEMAND_PERIOD_S
"""A demand is gone once two tellings of it in a row have not come; the third period is for a late one."""
WEIGH_EVERY_S = 1.0
"""So often replicas are told that something fits nowhere."""
WEIGH_FOR_S = 2.5
"""So long that is heeded: one telling may be lost."""


class Control:
    """State of one controller incarnation."""

    def __init__(self, config: ControlConfig) -> None:
        self._config = config
        self._models: dict[str, _Model] = {}
        """Those that have a replica."""
        self._model_of: dict[ReplicaId, str] = {}

    def replica(
        self, entry: RosterEntry, report: ReplicaReport, held: tuple[HeldRequest, ...] | None, now_s: float
    ) -> None:
        """A status has come.

        Args:
            held: None where nothing on it is worth weighing.
        """
        replica_id = entry.replica_id
        known = self._known(replica_id)
        if known is not None and known.entry.generation > entry.generation:
            return
        if known is not None and known.entry.generation != entry.generation:
            self.replica_gone(replica_id, known.entry.generation)
            known = None
        model = self._models.get(entry.model)
        if model is None:
            model = self._models[entry.model] = _Model(self._config)
        model.put(replica_id, observe(known, entry, report, held, now_s))
        self._model_of[replica_id] = entry.model

    def replica_gone(self, replica_id: ReplicaId, generation: Generation) -> None:
        """Its link has ended."""
        known = self._known(replica_id)
        if known is None or known.entry.generation != generation:
            return
        name = self._model_of.pop(replica_id)
        if self._models[name].drop(replica_id):
            del self._models[name]

    def unplaced(self, router_id: RouterId, told: Unplaced, now_s: float) -> None:
        """A router's first has no place."""
        model = self._models.get(told.model)
        if model is not None:
            model.demands[router_id] = Demand(router_id, told, now_s)

    def stays(self, told: Stays) -> None:
        """A router did not do what was proposed."""
        for model in self._models.values():
            model.stays(told)

    def left(self, told: Left, now_s: float) -> None:
        """A router has done what was proposed."""
        for model in self._models.values():
            model.left(told, now_s)

    def router_gone(self, router_id: RouterId) -> None:
        """Its link has ended, and its demands with it."""
        for model in self._models.values():
            model.demands.pop(router_id, None)

    def tick(self, now_s: float) -> tuple[Proposal, ...]:
        """What is to be proposed now."""
        proposals: list[Proposal] = []
        for name in sorted(self._models):
            proposals += self._models[name].tick(now_s)
        return tuple(proposals)

    def to_weigh(self, now_s: float) -> tuple[str, ...]:
        """Models of which something fits nowhere and whose replicas are to say for WEIGH_FOR_S what they hold, now."""
        return tuple(name for name in sorted(self._models) if self._models[name].is_to_be_weighed(now_s))

    def _known(self, replica_id: ReplicaId) -> Replica | None:
        name = self._model_of.get(replica_id)
        return None if name is None else self._models[name].replicas[replica_id]


class _Model:
    """What is known of one model."""

    def __init__(self, config: ControlConfig) -> None:
        self._config = config
        self.replicas: dict[ReplicaId, Replica] = {}
        self.demands: dict[RouterId, Demand] = {}
        """The latest of each router."""
        self._order: tuple[ReplicaId, ...] | None = ()
        """Of the replicas; None: to be sorted anew."""
        self._lately: deque[Underway] = deque()
        self._look_back_s = max(config.proposal_expiry_s, config.pair_rest_s)
        self._left: OrderedDict[RequestId, tuple[float, int]] = OrderedDict()
        """The longest ago first."""
        self._rest_s = max(config.proposal_expiry_s, config.request_rest_s)
        self._parked: deque[tuple[float, RequestId]] = deque()
        self._parks: Counter[RequestId] = Counter()
        self._weighed_s = -math.inf
        """When its replicas were last told to say what they hold."""

    def is_to_be_weighed(self, now_s: float) -> bool:
        if not self.demands or now_s - self._weighed_s < WEIGH_EVERY_S:
            return False
        self._weighed_s = now_s
        return True

    def put(self, replica_id: ReplicaId, replica: Replica) -> None:
        if replica_id not in self.replicas:
            self._order = None
        self.replicas[replica_id] = replica

    def drop(self, replica_id: ReplicaId) -> bool:
        """Whether it was the last."""
        del self.replicas[replica_id]
        self._order = None
        return not self.replicas

    def stays(self, told: Stays) -> None:
        """It makes no room, and another may be asked at once; itself only after the rest of who was asked in vain."""
        number = self._asked(told)
        if number is None:
            return
        underway = self._lately[number]
        del self._lately[number]
        park = underway.at_s, told.request_id
        if underway.parks and park in self._parked:  # it may be forgotten already
            self._parked.remove(park)
            self._uncount_park(told.request_id)

    def left(self, told: Left, now_s: float) -> None:
        """Its room is there, or soon."""
        number = self._asked(told)
        if number is not None and self._lately[number].left_s is None:
            self._lately[number] = self._lately[number]._replace(left_s=now_s)

    def _asked(self, told: Stays | Left) -> int | None:
        """The place of the proposal in question in `_lately`."""
        asked = (told.request_id, told.attempt, told.for_request_id)
        for number, (_, proposal, *_) in enumerate(self._lately):
            if (proposal.request_id, proposal.attempt, proposal.for_request_id) == asked:
                return number
        return None

    def _look_who_left(self, now_s: float) -> None:
        """See whether the reports count by now what has left for a demand."""
        for number, underway in enumerate(self._lately):
            if underway.left_s is not None and underway.shown_s is None:
                self._lately[number] = self._with_reports(underway, underway.left_s, now_s)

    def _with_reports(self, underway: Underway, left_s: float, now_s: float) -> Underway:
        proposal = underway.proposal
        source = self._current(proposal.source, proposal.source_generation)
        if source is not None:
            if source.observed_at_s <= left_s:
                return underway
            steps = source.load.steps_total
            if underway.steps_total is None:
                return underway._replace(left_s=source.observed_at_s, steps_total=steps)
            if steps == underway.steps_total and source.running:
                return underway
        if proposal.target is not None and proposal.target_generation is not None:
            target = self._current(proposal.target, proposal.target_generation)
            if target is not None and target.observed_at_s <= left_s:
                return underway
        return underway._replace(shown_s=now_s)

    def _current(self, replica_id: ReplicaId, generation: Generation) -> Replica | None:
        replica = self.replicas.get(replica_id)
        return replica if replica is not None and replica.entry.generation == generation else None

    def tick(self, now_s: float) -> tuple[Proposal, ...]:
        self._forget(now_s)
        if self.demands:
            self._look_who_left(now_s)
        if self._order is None:
            self._order = tuple(sorted(self.replicas))
        view = ClusterView(
            replicas=tuple(map(self.replicas.__getitem__, self._order)),
            demands=tuple(self.demands[router_id] for router_id in sorted(self.demands)),
            lately=tuple(self._lately),
            left=self._left,
            parks=self._parks,
        )
        proposed = preempt.decide(view, self._config, now_s)
        if not proposed:  # what leaves for a demand is to be counted first
            proposed = rebalance.decide(view, self._config, now_s)
        for underway in proposed:
            request_id = underway.proposal.request_id
            self._lately.append(underway)
            self._left[request_id] = now_s, underway.proposal.attempt
            self._left.move_to_end(request_id)
            if underway.parks:
                self._parked.append((now_s, request_id))
                self._parks[request_id] += 1
        return tuple(underway.proposal for underway in proposed)

    def _forget(self, now_s: float) -> None:
        for router_id in [r for r, demand in self.demands.items() if now_s - demand.told_at_s > GONE_AFTER_S]:
            del self.demands[router_id]
        while self._lately and now_s - self._lately[0].at_s > self._look_back_s:
            self._lately.popleft()
        while self._left and now_s - next(iter(self._left.values()))[0] > self._rest_s:
            self._left.popitem(last=False)
        while self._parked and now_s - self._parked[0][0] > self._config.parks_window_s:
            _, request_id = self._parked.popleft()
            self._uncount_park(request_id)

    def _uncount_park(self, request_id: RequestId) -> None:
        self._parks[request_id] -= 1
        if not self._parks[request_id]:
            del self._parks[request_id]
