"""Which routers may send out what, so that all routers together are one queue.

Owns: the gates and what routers are told of each other's counters. Pure: it reads demands and returns values. Imports the
messages.

The front is the most urgent band in which anything waits on any router. What is above it is let out everywhere, what is
below it nowhere (but for minimum shares, which are the routers' own). Of the front itself the order of all routers
together is formed, as one router would form it (router/fairness.py): next is the tenant with the least counter, whose
counter grows by what its request is charged. The first of that order, as many as the fleet sends out until newer gates
are in force (`_let_out`), are let out, each by the router that has it. Where all that waits in the front waits on one
router that one has no gate: its own order is the whole order.

The order that this keeps: nothing goes before a more urgent request that a demand has told of, and within the front
nothing that is not among the first `_let_out`. What a demand has not told yet is at most DEMAND_PERIOD_S + PERIOD_S old.

What is let out beyond the work of the tenant that has had least is for the case that it has no more by then; where it has,
others may be quicker all the same to see a slot. So that this cannot add up, a tenant that has had more than the least by
all that the fleet holds is not let out: within one queue no two that wait ever differ by more (router/fairness.py).

Two exceptions. A first that has had a slot for BLOCKED_S and not the blocks is waiting for room to gather: it alone is let
out, or smaller requests would take that room for ever; what has not gathered it in GATHER_S is one of many again. And a
router that has had room for HELD_S for its first while nobody let out has used it (they do not reach that replica, or do
not know of it, or do not have what they say) is let one out: no slot stays empty for the sake of the order.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from cluster.messages import BandDemand, BandLevel, Gate, RouterDemand
from cluster.types import RouterId

DEMAND_PERIOD_S = 0.05
"""Routers tell what waits so often."""
PERIOD_S = 0.05
"""Gates are handed out so often."""
EXPIRES_S = 0.5
"""A gate and a demand count for so long; then it is as if there were none."""
PERIODS_AHEAD = 2.5
"""A demand is up to one period old when a gate follows from it, which is in force for another; half of one for the links."""
LET_OUT_MIN = 4
BLOCKED_S = 0.5
GATHER_S = 60.0
HELD_S = 0.5

Demands = Mapping[RouterId, RouterDemand]
"""The latest of each router, for one model; only those that still count."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A gate for each router that is to have one, and what all have in common."""

    front: int | None
    """None: nothing waits anywhere."""
    open: RouterId | None
    """The router that has all of the front, and no gate."""
    gates: Mapping[RouterId, Gate]
    """Of the other routers with work; those without any have `closed`."""

    def gate(self, router_id: RouterId) -> Gate | None:
        if self.front is None or router_id == self.open:
            return None
        return self.gates.get(router_id, Gate(self.front, 0))


def decide(demands: Demands, free_slots: int) -> Decision:
    """The gates that follow from what waits.

    Args:
        free_slots: Slots of all replicas that nothing runs in or waits for, as they last reported.
    """
    waiting = {r: d for r, d in demands.items() if d.bands and d.bands[0].waiting and d.heads}
    if not waiting:
        return Decision(None, None, {})
    front = max(d.bands[0].priority for d in waiting.values())
    at_front = {r: d for r, d in waiting.items() if d.bands[0].priority == front}
    sole = next(iter(at_front)) if len(at_front) == 1 else None
    held = max(0.0, sum(d.open_service for d in demands.values()))
    turns, first = _turns(at_front, 1, held)
    blocked = demands[first].blocked and BLOCKED_S < demands[first].first_for_s <= GATHER_S
    if sole is None and not blocked:
        sent_per_s = sum(d.sent_per_s for d in demands.values())
        turns, _ = _turns(at_front, _let_out(sent_per_s, free_slots), held)
    gates = {r: Gate(front, d.bands[0].sent + turns.get(r, 0)) for r, d in at_front.items() if r != sole}
    if not blocked:
        for r, demand in waiting.items():
            if demand.held_s > HELD_S and not turns.get(r, 0):
                gates[r] = Gate(demand.bands[0].priority, demand.bands[0].sent + 1)
    return Decision(front, sole, gates)


def _let_out(sent_per_s: float, free_slots: int) -> int:
    """How many of the front may go until newer gates are in force."""
    return max(LET_OUT_MIN, free_slots, math.ceil(sent_per_s * PERIODS_AHEAD * PERIOD_S))


def _turns(demands: Demands, count: int, held: float) -> tuple[dict[RouterId, int], RouterId]:
    """How many of the first `count` in the order of all each router has, and who has the very first.

    Where a router has more than it has told, what is left of `count` is given to it whole.

    Args:
        held: By how much a tenant may have had more than the least and still be let out.
    """
    lines: dict[tuple[str, bool], list[tuple[float, float, RouterId, float]]] = {}
    counters: dict[tuple[str, bool], float] = {}
    for router_id, demand in demands.items():
        for w in demand.heads:
            key = (w.tenant, math.isinf(w.counter))
            lines.setdefault(key, []).append((w.rank, w.arrived_unix_s, router_id, w.charge))
            # Of two routers that know a tenant the one that counts less has not heard of all that it got.
            counters[key] = max(counters.get(key, w.counter), w.counter)
    heap = []
    least = min((c for c in counters.values() if not math.isinf(c)), default=0.0)
    for key, line in lines.items():
        if counters[key] > least + held:
            continue
        line.sort(reverse=True)
        heap.append((counters[key], *line[-1][:3], key))
    heapq.heapify(heap)
    turns: dict[RouterId, int] = {}
    very_first = heap[0][3]
    left = count
    while heap and left:
        counter, _, _, router_id, key = heap[0]
        turns[router_id] = turns.get(router_id, 0) + 1
        left -= 1
        line = lines[key]
        *_, charge = line.pop()
        if line:
            heapq.heapreplace(heap, (counter + charge, *line[-1][:3], key))
        else:
            heapq.heappop(heap)
    if left:
        for router_id, demand in demands.items():
            if demand.bands[0].waiting > len(demand.heads):
                turns[router_id] = turns.get(router_id, 0) + left
    return turns, very_first


def levels(latest: Demands, counting: Collection[RouterId], of: RouterId) -> tuple[BandLevel, ...]:
    """How all routers but one stand in each band that any of them knows.

    Args:
        latest: The last demand of every router, however old: a router in which nothing happens says nothing.
        counting: Of these, whose still say what waits.
    """
    bands: dict[int, list[tuple[BandDemand, bool]]] = {}
    for router_id, demand in latest.items():
        if router_id != of:
            for band in demand.bands:
                waits = band.waiting > 0 and router_id in counting
                bands.setdefault(band.priority, []).append((band, waits))
    return tuple(_level(priority, bands[priority]) for priority in sorted(bands, reverse=True))


def _level(priority: int, bands: Sequence[tuple[BandDemand, bool]]) -> BandLevel:
    waiting = [band.level for band, waits in bands if waits]
    return BandLevel(priority, min(waiting) if waiting else max(band.level for band, _ in bands), len(waiting))
