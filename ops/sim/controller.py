"""The controller's part of a simulation: gates, through production's `Routers`.

Owns: when demands and gates travel. Imports cluster.control. Invariant: as in deployments/controller_server.py, gates are
handed out when something is heard, at most once a period, and until nothing is left to say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from cluster.control.gates import DEMAND_PERIOD_S, PERIOD_S
from cluster.control.routers import Routers
from cluster.messages import RouterDemand
from cluster.types import ReplicaReport, ReplicaState, RouterId
from ops.sim.events import VirtualLoop
from router.core import RouterCore


class SimController:
    """There is work for it with several routers only."""

    def __init__(
        self,
        cores: Sequence[RouterCore],
        model: str,
        reports: Callable[[], list[ReplicaReport]],
        loop: VirtualLoop,
        delay_s: float,
    ) -> None:
        """`reports`: the last of each replica."""
        self._cores = {RouterId(f"router-{k}"): core for k, core in enumerate(cores)}
        self._model = model
        self._reports = reports
        self._loop = loop
        self._delay_s = delay_s
        self._routers: Routers | None = None
        """None: there is no controller."""
        self._handed_out_s = -math.inf
        self._handing_out = False

    def start(self) -> None:
        """A new one, which knows nothing. Its routers find it."""
        self._routers = Routers()
        for router_id in self._cores:
            self._routers.joined(router_id)
        self._hand_out_soon()

    def stop(self) -> None:
        self._routers = None

    def ask(self) -> None:
        """Every DEMAND_PERIOD_S: what waits on each router."""
        for router_id, core in self._cores.items():
            demand = core.demand(self._model)
            if demand is not None and self._routers is not None:
                core.told(demand)
                self._loop.at(self._loop.now_s + self._delay_s, self._heard, self._routers, router_id, demand)
        self._loop.at(self._loop.now_s + DEMAND_PERIOD_S, self.ask)

    def _heard(self, by: Routers, router_id: RouterId, demand: RouterDemand) -> None:
        if by is self._routers:
            by.heard(router_id, demand, self._loop.now_s)
            self._hand_out_soon()

    def _hand_out_soon(self) -> None:
        if not self._handing_out:
            self._handing_out = True
            self._loop.at(max(self._loop.now_s, self._handed_out_s + PERIOD_S), self._hand_out)

    def _hand_out(self) -> None:
        self._handing_out = False
        if self._routers is None:
            return
        self._handed_out_s = now_s = self._loop.now_s
        for router_id, gates in self._routers.hand_out(now_s, self._free_slots, _can_take):
            self._loop.at(now_s + self._delay_s, self._cores[router_id].hear, gates)
        if not self._routers.settled:
            self._hand_out_soon()

    def _free_slots(self, model: str) -> int:
        del model  # there is one
        free = 0
        for report in self._reports():
            if report.state is ReplicaState.READY:
                taken = sum(level.requests for level in (*report.load.running, *report.load.waiting))
                free += max(0, report.load.slots_total - taken)
        return free


def _can_take(router_id: RouterId) -> bool:
    del router_id
    return True
