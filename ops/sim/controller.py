"""The controller's part of a simulation: gates and proposals, through production's `Routers` and `Control`.

Owns: when demands, statuses, gates and proposals travel, and the controller's lives. Imports cluster.control. Invariants:
as in deployments/controller_server.py, gates are handed out when something is heard, at most once a period, and until
nothing is left to say; proposals are made with each tick; what was sent to one life is not heard by the next, which knows
nothing at first and has a higher generation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cluster.config import ControlConfig
from cluster.control.gates import DEMAND_PERIOD_S, PERIOD_S
from cluster.control.loop import WEIGH_FOR_S, Control
from cluster.control.routers import Routers
from cluster.messages import HeldRequest, Left, Propose, RosterEntry, RouterDemand, Stays, Unplaced
from cluster.types import Generation, ReplicaId, ReplicaReport, ReplicaState, RouterId
from ops.sim.events import VirtualLoop
from ops.sim.links import Weather
from ops.sim.log import EventLog
from router.core import RouterCore
from router.proposals import Verdict


@dataclass(eq=False, slots=True)
class _Life:
    generation: Generation
    control: Control | None
    routers: Routers = field(default_factory=Routers)
    reports: dict[ReplicaId, ReplicaReport] = field(default_factory=dict)


class SimController:
    """Gates are for several routers; proposals are made where there is a configuration for them."""

    def __init__(
        self,
        cores: Sequence[RouterCore],
        model: str,
        control: ControlConfig | None,
        loop: VirtualLoop,
        delay_s: float,
        log: EventLog,
        weigh: Callable[[float], None],
    ) -> None:
        """`weigh`: have all replicas say for so long what they hold."""
        self._cores = {RouterId(f"router-{k}"): core for k, core in enumerate(cores)}
        self._model = model
        self._control = control
        self._loop = loop
        self._delay_s = delay_s
        self._log = log
        self._weigh = weigh
        self._lives = 0
        self._life: _Life | None = None
        """None: there is no controller."""
        self._due_s: dict[ReplicaId, float] = {}
        """When what a replica told last comes."""
        self._handed_out_s = -math.inf
        self._handing_out = False

    @property
    def needed(self) -> bool:
        return self._control is not None or self._several

    @property
    def _several(self) -> bool:
        return len(self._cores) > 1

    def begin(self) -> None:
        self.start()
        self._ask()
        if self._control is not None:
            self._tick(self._control.tick_s)

    def start(self) -> None:
        """A new one, which knows nothing. Its routers and replicas find it."""
        self._lives += 1
        generation = Generation(self._lives, f"controller/{self._lives}")
        self._life = _Life(generation, None if self._control is None else Control(self._control))
        for router_id in self._cores:
            self._life.routers.joined(router_id)
        self._hand_out_soon()

    def stop(self) -> None:
        self._life = None

    # --- what it is told ---

    def status(
        self, entry: RosterEntry, report: ReplicaReport, held: tuple[HeldRequest, ...] | None, weather: Weather
    ) -> None:
        """Of a replica, every report period."""
        if self._life is None:
            return
        due_s = max(self._loop.now_s + self._delay_s + weather.delay_s, self._due_s.get(entry.replica_id, 0.0))
        self._due_s[entry.replica_id] = due_s  # in order, as a link brings them
        for _ in range(weather.copies_of_status()):
            self._loop.at(due_s, self._observed, self._life, entry, report, held)

    def _observed(
        self, life: _Life, entry: RosterEntry, report: ReplicaReport, held: tuple[HeldRequest, ...] | None
    ) -> None:
        if life is self._life:
            life.reports[entry.replica_id] = report
            if life.control is not None:
                life.control.replica(entry, report, held, self._loop.now_s)

    def gone(self, entry: RosterEntry, in_s: float) -> None:
        """The link of a replica ends, and the controller sees it in so many seconds."""
        self._loop.at(self._loop.now_s + in_s, self._gone, entry)

    def _gone(self, entry: RosterEntry) -> None:
        life = self._life
        if life is None:
            return
        report = life.reports.get(entry.replica_id)
        if report is not None and report.generation == entry.generation:
            del life.reports[entry.replica_id]
        if life.control is not None:
            life.control.replica_gone(entry.replica_id, entry.generation)

    def _ask(self) -> None:
        """Every DEMAND_PERIOD_S: what waits on each router, and what has no place there."""
        due_s = self._loop.now_s + self._delay_s
        for router_id, core in self._cores.items():
            demand = core.demand(self._model) if self._several else None
            if self._life is None:
                continue
            if demand is not None:
                core.told(demand)
                self._loop.at(due_s, self._heard, self._life, router_id, demand)
            if self._control is not None and (unplaced := core.unplaced(self._model)) is not None:
                self._loop.at(due_s, self._heard_unplaced, self._life, router_id, unplaced)
            for settled in core.settled():
                self._loop.at(due_s, self._heard_settled, settled)
        self._loop.at(self._loop.now_s + DEMAND_PERIOD_S, self._ask)

    def _heard(self, life: _Life, router_id: RouterId, demand: RouterDemand) -> None:
        if life is self._life:
            life.routers.heard(router_id, demand, self._loop.now_s)
            self._hand_out_soon()

    def _heard_unplaced(self, life: _Life, router_id: RouterId, unplaced: Unplaced) -> None:
        if life is self._life and life.control is not None:
            life.control.unplaced(router_id, unplaced, self._loop.now_s)

    # --- gates ---

    def _hand_out_soon(self) -> None:
        if self._several and not self._handing_out:
            self._handing_out = True
            self._loop.at(max(self._loop.now_s, self._handed_out_s + PERIOD_S), self._hand_out)

    def _hand_out(self) -> None:
        self._handing_out = False
        if self._life is None:
            return
        self._handed_out_s = now_s = self._loop.now_s
        routers = self._life.routers
        for router_id, gates in routers.hand_out(now_s, self._free_slots, _can_take):
            self._loop.at(now_s + self._delay_s, self._cores[router_id].hear, gates)
        if not routers.settled:
            self._hand_out_soon()

    def _free_slots(self, model: str) -> int:
        del model  # there is one
        assert self._life is not None
        free = 0
        for report in self._life.reports.values():
            if report.state is ReplicaState.READY:
                taken = sum(level.requests for level in (*report.load.running, *report.load.waiting))
                free += max(0, report.load.slots_total - taken)
        return free

    # --- proposals ---

    def _tick(self, period_s: float) -> None:
        life, now_s = self._life, self._loop.now_s
        if life is not None and life.control is not None:
            for proposal in life.control.tick(now_s):
                self._log.say(
                    "proposed", proposal.request_id, proposal.source, proposal.target, proposal.for_request_id
                )
                self.propose(proposal.router_id, proposal.message(life.generation))
            for _ in life.control.to_weigh(now_s):  # there is one model
                self._loop.at(now_s + self._delay_s, self._weigh, WEIGH_FOR_S)
        self._loop.at(now_s + period_s, self._tick, period_s)

    def propose(self, router_id: RouterId, message: Propose) -> None:
        self._loop.at(self._loop.now_s + self._delay_s, self._proposed, router_id, message)

    def _proposed(self, router_id: RouterId, message: Propose) -> None:
        verdict = self._cores[router_id].propose(message) or Verdict.GONE
        if verdict.stays and message.for_request_id is not None:
            told = Stays(message.request_id, message.attempt, message.for_request_id)
            self._loop.at(self._loop.now_s + self._delay_s, self._heard_settled, told)

    def _heard_settled(self, told: Stays | Left) -> None:
        if self._life is None or self._life.control is None:
            return
        if isinstance(told, Stays):
            self._life.control.stays(told)
        else:
            self._life.control.left(told, self._loop.now_s)


def _can_take(router_id: RouterId) -> bool:
    del router_id
    return True
