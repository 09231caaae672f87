"""Llumnix's dispatch: to the replica with the greatest freeness.

Owns: that choice. Imports the router's views. Source: Sun et al., "Llumnix: Dynamic Scheduling for Large Language Model
Serving", OSDI 2024 (arXiv 2406.03243).

    freeness = (blocks of the pool - virtual usage) / running requests

The virtual usage of a running request is the blocks that it holds, that of a queued one the blocks that it asks for, and
the high-priority requests of a replica have a headroom beside them: so much that the replica looks full from a target load
on, which keeps others away and their steps short. The paper sets the target by the speed of decoding; here it is an eighth
of the pool.

What is missing: its migration, which moves requests from the replica with the least freeness to the one with the most, and
empties replicas. What differs: of queued requests a report tells how many there are; each is taken to ask for as many blocks
as the mean of those that this router has there. Invariant: nothing waits in the router while a replica takes work.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from cluster.types import EngineLoad
from ops.sim.policies.usable import outstanding, usable
from router.routing import Need, Placement
from router.view import ReplicaView

HIGH_PRIORITY = 1
"""From this priority on a request has a headroom."""
TARGET_LOAD = 1 / 8
"""Of the pool: beyond it a replica with high-priority requests looks full."""


class Llumnix:
    """Implements `ops.sim.values.Policy`."""

    name = "llumnix"

    def place(self, need: Need, views: Sequence[ReplicaView], now_s: float, rng: random.Random) -> Placement | None:
        del now_s
        rated = [(freeness(view, load), view, load) for view, load in usable(need, views)]
        if not rated:
            return None
        most = max(free for free, _, _ in rated)
        _, view, load = rng.choice([one for one in rated if one[0] == most])
        return Placement(view.replica_id, need.blocks(load.block_size_tokens))


def freeness(view: ReplicaView, load: EngineLoad) -> float:
    """The greater, the more room each request there has; below 0 where more is asked for than there is."""
    queued = sum(level.requests for level in load.waiting)
    open_requests = outstanding(view, load)
    held = sum(own.active_blocks + own.parked_blocks for own in view.own)
    asked = sum(level.blocks for level in view.unreported) + (queued * held / open_requests if queued else 0.0)
    urgent = any(level.priority >= HIGH_PRIORITY for level in (*load.running, *view.unreported))
    headroom = (1 - TARGET_LOAD) * load.blocks_total if urgent else 0.0
    running = sum(level.requests for level in (*load.running, *view.unreported))
    return (load.blocks_free - asked - headroom) / max(1, running)
