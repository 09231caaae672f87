"""Llumnix: dispatch to the replica with the greatest freeness, and live migration from the least free to the most free.

Owns: both choices. Imports the router's views and the values of the simulator. Sources: Sun et al., "Llumnix: Dynamic
Scheduling for Large Language Model Serving", OSDI 2024 (arXiv 2406.03243), sections 4.4.1 to 4.4.3, and the defaults of its
source (github.com/AlibabaPAI/llumnix: polled every 50 ms, pairs at each poll, threshold 3.0, shortest running request).

    freeness = (blocks of the pool - virtual usage) / running requests

The virtual usage of a running request is the blocks that it holds; of those that wait it is the demand of the first alone;
and the high-priority requests of a replica have a headroom beside them: so much that the replica looks full from a target
load on, which keeps others away and their steps short. The paper sets the target by the speed of decoding, at 1,600 of
13,616 tokens; here it is an eighth of the pool.

Migration: replicas below the threshold are sources, those above it targets; the least free is paired with the most free, and
so on. Of a source one request at a time moves, of those that run the one of the lowest priority, and of these the shortest.
It is copied while it runs, and stands still for the last stage, as production's own moves do.

What differs: what is polled of a replica is exact and comes without delay; of a draining replica production's own code moves
the requests, for every policy; a target is refused where production's router would not reserve it. Invariant: nothing waits
in the router while a replica takes work.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence

from cluster.types import EngineLoad, ReplicaId
from ops.sim.policies.usable import usable
from ops.sim.values import Instance, Migration
from router.routing import Need, Placement
from router.view import ReplicaView

HIGH_PRIORITY = 1
"""From this priority on a request has a headroom."""
TARGET_LOAD = 1 / 8
"""Of the pool: beyond it a replica with high-priority requests looks full."""
POLLED_EVERY_S = 0.05
FREENESS_MIN = 3.0
"""Blocks for each running request: below it a replica is a source, above it a target."""


class Llumnix:
    """Implements `ops.sim.values.MigratingPolicy`."""

    name = "llumnix"
    period_s = POLLED_EVERY_S

    def __init__(self) -> None:
        self._instances: Mapping[ReplicaId, Instance] = {}

    def place(self, need: Need, views: Sequence[ReplicaView], now_s: float, rng: random.Random) -> Placement | None:
        del now_s
        rated = [(self._freeness(view, load), view, load) for view, load in usable(need, views)]
        if not rated:
            return None
        most = max(free for free, _, _ in rated)
        _, view, load = rng.choice([one for one in rated if one[0] == most])
        return Placement(view.replica_id, need.blocks(load.block_size_tokens))

    def _freeness(self, view: ReplicaView, load: EngineLoad) -> float:
        """As its last report says, with what has been sent there since."""
        instance = self._instances.get(view.replica_id)
        levels = (*load.running, *view.unreported)
        return freeness(
            load.blocks_total,
            load.blocks_free - sum(level.blocks for level in view.unreported),
            0 if instance is None or not load.waiting else instance.first_blocks,
            sum(level.requests for level in levels),
            urgent=any(level.priority >= HIGH_PRIORITY for level in levels),
        )

    def observe(self, instances: Mapping[ReplicaId, Instance]) -> None:
        self._instances = instances

    def migrate(self, busy: Collection[ReplicaId]) -> list[Migration]:
        rated = sorted(
            (freeness_of(instance), instance.replica_id)
            for instance in self._instances.values()
            if instance.replica_id not in busy
        )
        sources = [(free, name) for free, name in rated if free < FREENESS_MIN]
        targets = [(free, name) for free, name in reversed(rated) if free > FREENESS_MIN]
        return [
            Migration(source, target, identity)
            for (_, source), (_, target) in zip(sources, targets, strict=False)
            if (identity := self._instances[source].shortest) is not None
        ]


def freeness(blocks_total: int, blocks_free: int, first_blocks: int, running: int, *, urgent: bool) -> float:
    """The greater, the more room each request there has; below 0 where more is asked for than there is.

    Args:
        first_blocks: What the first that waits asks for.
        urgent: A request of high priority is there.
    """
    headroom = (1 - TARGET_LOAD) * blocks_total if urgent else 0.0
    return (blocks_free - first_blocks - headroom) / max(1, running)


def freeness_of(instance: Instance) -> float:
    return freeness(
        instance.blocks_total,
        instance.blocks_free,
        instance.first_blocks,
        instance.running,
        urgent=instance.priority_max is not None and instance.priority_max >= HIGH_PRIORITY,
    )
