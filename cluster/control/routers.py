"""What the controller has heard from the routers, and what each of them is still to be told.

Owns: the latest demand of each router and model, and what of the others' service is on its way. Imports the decision and
the messages; no sockets. Single writer. Invariants: nothing here is needed by a successor, which hears all that counts
within a period; memory is bounded by the routers and, for each, by PENDING_MAX tenants.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from cluster.control.gates import EXPIRES_S, decide, levels
from cluster.messages import Gates, RouterDemand, RouterService, TenantService, Waiter
from cluster.types import RouterId

PENDING_MAX = 8192
"""Totals kept for a router that does not read. Beyond them all are dropped: each comes again as it changes."""


@dataclass(slots=True)
class _Heard:
    demand: RouterDemand
    at_s: float


@dataclass(slots=True)
class _Pending:
    """Of one router for another."""

    number: int
    sent_service: float
    service: dict[tuple[int, str], TenantService] = field(default_factory=dict)


@dataclass(slots=True)
class _Router:
    heard: dict[str, _Heard] = field(default_factory=dict)
    """By model."""
    pending: dict[tuple[str, RouterId], _Pending] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    """Models for which it has a gate."""
    new: bool = True
    """It has been told nothing yet."""


class Routers:
    """The routers that are connected."""

    def __init__(self) -> None:
        self._routers: dict[RouterId, _Router] = {}

    def joined(self, router_id: RouterId) -> None:
        self._routers[router_id] = _Router()

    def left(self, router_id: RouterId) -> None:
        """It is gone. What it held back of the others is open with the next gates."""
        self._routers.pop(router_id, None)
        for other in self._routers.values():
            other.pending = {key: told for key, told in other.pending.items() if key[1] != router_id}

    def heard(self, router_id: RouterId, demand: RouterDemand, now_s: float) -> None:
        heads = tuple(_by_one_clock(waiter, now_s - demand.observed_unix_s) for waiter in demand.heads)
        timed = msgspec.structs.replace(demand, heads=heads, observed_unix_s=now_s)
        self._routers[router_id].heard[demand.model] = _Heard(timed, now_s)
        for other_id, other in self._routers.items():
            if other_id == router_id:
                continue
            pending = other.pending.setdefault((demand.model, router_id), _Pending(demand.number, 0.0))
            pending.sent_service = demand.sent_service
            if len(pending.service) + len(demand.service) > PENDING_MAX:
                pending.service.clear()
            pending.service.update(((s.priority, s.tenant), s) for s in demand.service)

    def hand_out(
        self, now_s: float, free_slots: Callable[[str], int], can_take: Callable[[RouterId], bool]
    ) -> list[tuple[RouterId, Gates]]:
        """What each router is to be told now. One that cannot take anything now is told later.

        Args:
            free_slots: Of the replicas of a model, see `decide`.
        """
        said = []
        for model in sorted({model for r in self._routers.values() for model in (*r.heard, *r.gated)}):
            latest = {r: router.heard[model] for r, router in self._routers.items() if model in router.heard}
            demands = {r: heard.demand for r, heard in latest.items()}
            counting = {r: heard.demand for r, heard in latest.items() if now_s - heard.at_s <= EXPIRES_S}
            decision = decide(counting if len(self._routers) > 1 else {}, free_slots(model))
            for router_id, router in self._routers.items():
                gate = decision.gate(router_id)
                if gate is None and model not in router.gated and not self._news(router, model):
                    continue
                if not can_take(router_id):
                    continue
                (router.gated.discard if gate is None else router.gated.add)(model)
                of_others = levels(demands, counting, router_id)
                said.append((router_id, Gates(model, gate, of_others, self._take(router, model))))
        for router_id, _ in said:
            self._routers[router_id].new = False
        return said

    @property
    def settled(self) -> bool:
        """Whether there is nothing to say before something is heard."""
        return not any(router.gated or router.pending for router in self._routers.values())

    def _news(self, router: _Router, model: str) -> bool:
        return router.new or any(key[0] == model for key in router.pending)

    def _take(self, router: _Router, model: str) -> tuple[RouterService, ...]:
        mine = [key for key in router.pending if key[0] == model]
        taken = [(key[1], router.pending.pop(key)) for key in mine]
        return tuple(
            RouterService(r, pending.number, pending.sent_service, tuple(pending.service.values()))
            for r, pending in taken
        )


def _by_one_clock(waiter: Waiter, shift_s: float) -> Waiter:
    """Its times by the clock here; they are as exact as the link is quick. (Under fcfs the rank is no time, and level.)"""
    rank = waiter.rank + shift_s if waiter.rank else waiter.rank
    return msgspec.structs.replace(waiter, rank=rank, arrived_unix_s=waiter.arrived_unix_s + shift_s)
