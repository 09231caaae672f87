"""Who leaves a replica that drains, and where each can go.

Owns: that decision. Pure; chance is an argument. Imports routing and views. Invariants: whoever moves pushes nobody out,
goes to a replica that takes work and takes no place that more urgent work waits for, and to none that it has erred on where
another has a place; of each replica no more than `moves_at_once` requests are under way.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from cluster.types import EngineLoad, ReplicaId, RequestId
from router.routing import Need, Placement, choose
from router.view import ReplicaView


class Resident(msgspec.Struct, frozen=True, gc=False):
    """A request that is open on the replica that drains."""

    request_id: RequestId
    priority: int
    arrived_unix_s: float
    begun: bool
    """It has had a token."""
    reported: bool
    """The replica's last report counts it."""
    parked: bool
    movable: bool
    """It has no move yet, and nothing is open about it."""


@dataclass(frozen=True, slots=True)
class Leaving:
    """Of both, the most urgent first."""

    called_back: tuple[RequestId, ...]
    """They only wait there: to their place in the queue."""
    to_move: tuple[RequestId, ...]
    """Each as soon as there is a place for it."""


def who_leaves(residents: Sequence[Resident], load: EngineLoad | None, waits_above: int | None) -> Leaving:
    """Who of the residents is to go.

    Args:
        waits_above: Of the most urgent work that waits for a place anywhere: nothing less urgent may take one. None
            where nothing waits.
    """
    order = sorted(residents, key=lambda r: (-r.priority, r.arrived_unix_s, r.request_id))
    moving = tuple(
        r.request_id for r in order if r.begun and r.movable and (waits_above is None or r.priority >= waits_above)
    )
    waiting = set[RequestId]()
    for level in load.waiting if load is not None else ():
        # A report says how many wait, not who: those that began before have kept their place, and the latest come last.
        there = [r for r in order if r.priority == level.priority]
        count = level.requests - sum(r.parked for r in there)
        unbegun = [r.request_id for r in there if not r.begun and r.reported]
        waiting.update(unbegun[max(0, len(unbegun) - max(0, count)) :])
    return Leaving(tuple(r.request_id for r in order if r.request_id in waiting), moving)


def place_to_go(
    need: Need,
    views: Sequence[ReplicaView],
    arriving: Mapping[ReplicaId, int],
    moves_at_once: int,
    rng: random.Random,
    erred_on: Collection[ReplicaId] = (),
) -> Placement | None:
    """Where a request goes that nobody is to give way for.

    Args:
        arriving: Moves under way to each.
        erred_on: Those that have ended an attempt of it with an error.
    """
    able = [view for view in views if arriving.get(view.replica_id, 0) < moves_at_once]
    others = [view for view in able if view.replica_id not in erred_on] if erred_on else able
    placement = choose(need, others, rng, free=True)
    return choose(need, able, rng, free=True) if placement is None and len(others) < len(able) else placement
