"""The choice of a replica for one request: filter, score, pick.

Owns: that decision and the arithmetic of free capacity and of victims. Pure: it reads views and returns a value;
chance is an argument. Invariants: what is placed is sent to a routable replica that could hold all of it; victims are
strictly lower in priority, and none is counted for two.

Capacity as work of priority p sees it on one replica:
- slots in use: what runs, what this router has sent and the report does not count yet, and what waits there at
  priority >= p (it goes first; what waits below p does not).
- blocks in use: the larger of what the report says (with the unreported added) and what this router predicts for its
  own attempts, since a report counts a prompt only as it is filled; of work below p only what may be running.
What is in use below p can always be taken, from what runs and, cheaper, from what waits there paused and has kept its
blocks: lower work alone never keeps p from a replica that could hold it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.types import EngineLoad, ReplicaId
from router.view import Condition, ReplicaView


@dataclass(frozen=True, slots=True)
class Need:
    """What one request asks of a replica."""

    priority: int
    tokens: int
    """Prompt and the output that is expected: what is reserved."""
    tokens_max: int
    """Prompt and all output that it may have: what a replica must be able to hold at all."""

    def blocks(self, block_size_tokens: int) -> int:
        return -(-self.tokens // block_size_tokens)

    def blocks_max(self, block_size_tokens: int) -> int:
        return -(-self.tokens_max // block_size_tokens)


@dataclass(frozen=True, slots=True)
class Placement:
    """Send it there. `victims` is how many running requests the engine will have to preempt for it."""

    replica_id: ReplicaId
    blocks: int
    victims: int = 0


@dataclass(frozen=True, slots=True)
class _Level:
    """Running work of one priority that could be preempted."""

    priority: int
    requests: int
    blocks: int


def choose(need: Need, views: Sequence[ReplicaView], rng: random.Random) -> Placement | None:
    """Where `need` goes now, or None: it stays queued.

    A replica that holds it freely is preferred, the least loaded first. Otherwise the one whose strictly lower running
    work makes room: fewest victims, then the least urgent ones, then the least loaded. Ties are drawn from `rng`.
    """
    candidates = [(v, v.load) for v in views if v.condition is Condition.ROUTABLE and v.load is not None]
    candidates = [(v, load) for v, load in candidates if _could_hold(need, load)]
    free = [(_fraction(need, v, load), v, load) for v, load in candidates if _fits(need, v, load)]
    if free:
        least = min(fraction for fraction, _, _ in free)
        ties = sorted((v.replica_id, load) for fraction, v, load in free if fraction == least)
        replica_id, load = ties[0] if len(ties) == 1 else rng.choice(ties)
        return Placement(replica_id, need.blocks(load.block_size_tokens))
    costs: list[tuple[tuple[int, int, float], ReplicaId, EngineLoad]] = []
    for view, load in candidates:
        plan = _victims(need, view, load)
        if plan is not None:
            costs.append(((*plan, _fraction(need, view, load)), view.replica_id, load))
    if not costs:
        return None
    cheapest = min(cost for cost, _, _ in costs)
    chosen = sorted((replica_id, load) for cost, replica_id, load in costs if cost == cheapest)
    replica_id, load = chosen[0] if len(chosen) == 1 else rng.choice(chosen)
    return Placement(replica_id, need.blocks(load.block_size_tokens), victims=cheapest[0])


def too_large(need: Need, views: Sequence[ReplicaView]) -> bool:
    """Whether some pool sizes are known and not one of them could ever hold it. Nothing known says nothing."""
    loads = [v.load for v in views if v.load is not None]
    return bool(loads) and not any(_could_hold(need, load) for load in loads)


def _could_hold(need: Need, load: EngineLoad) -> bool:
    return load.slots_total > 0 and need.blocks_max(load.block_size_tokens) <= load.blocks_total


def _slots_used(need: Need, view: ReplicaView, load: EngineLoad) -> int:
    running = sum(level.requests for level in load.running) + sum(level.requests for level in view.unreported)
    return running + sum(level.requests for level in load.waiting if level.priority >= need.priority)


def _blocks_used(need: Need, view: ReplicaView, load: EngineLoad) -> int:
    return max(_blocks_reported(view, load), _blocks_predicted(need, view, load))


def _blocks_reported(view: ReplicaView, load: EngineLoad) -> int:
    return load.blocks_total - load.blocks_free + sum(level.blocks for level in view.unreported)


def _blocks_predicted(need: Need, view: ReplicaView, load: EngineLoad) -> int:
    runs = {level.priority for level in (*load.running, *view.unreported)}
    predicted = 0
    for own in view.own:
        if own.priority >= need.priority:
            predicted += own.active_blocks + own.parked_blocks
        elif own.priority in runs:
            predicted += own.active_blocks
    return predicted


def _fits(need: Need, view: ReplicaView, load: EngineLoad) -> bool:
    slots = _slots_used(need, view, load) + 1
    blocks = _blocks_used(need, view, load) + need.blocks(load.block_size_tokens)
    return slots <= load.slots_total and blocks <= load.blocks_total


def _fraction(need: Need, view: ReplicaView, load: EngineLoad) -> float:
    """How full the replica would be: of its slots or its blocks, whichever is fuller. Parked work of any priority
    counts, so that of two with a free slot the one without a backlog is taken."""
    parked = sum(level.requests for level in load.waiting if level.priority < need.priority)
    slots = (_slots_used(need, view, load) + parked + 1) / load.slots_total
    blocks = (_blocks_used(need, view, load) + need.blocks(load.block_size_tokens)) / load.blocks_total
    return max(slots, blocks)


def _victims(need: Need, view: ReplicaView, load: EngineLoad) -> tuple[int, int] | None:
    """(how many more victims than are claimed already, the most urgent priority among them), or None: not enough.

    What is over capacity before this request is claimed by work that goes first, and it takes the same victims from
    the bottom up; the difference is this request's own. What lower work has kept while it is paused goes before
    anybody who runs, and is nobody's place.
    """
    levels = _preemptible(need.priority, view, load)
    slots_over = _slots_used(need, view, load) - load.slots_total
    kept = sum(level.blocks for level in load.waiting if level.priority < need.priority)
    blocks_over = max(_blocks_reported(view, load) - kept, _blocks_predicted(need, view, load)) - load.blocks_total
    before = _take(levels, slots_over, blocks_over)
    after = _take(levels, slots_over + 1, blocks_over + need.blocks(load.block_size_tokens))
    if before is None or after is None:
        return None
    return after[0] - before[0], after[1]


def _preemptible(priority: int, view: ReplicaView, load: EngineLoad) -> list[_Level]:
    """Lower running work by priority, least urgent first; blocks by the same measure as `_blocks_used` counts them."""
    requests: dict[int, int] = {}
    blocks: dict[int, int] = {}
    for level in (*load.running, *view.unreported):
        requests[level.priority] = requests.get(level.priority, 0) + level.requests
        blocks[level.priority] = blocks.get(level.priority, 0) + level.blocks
    own = {o.priority: o.active_blocks for o in view.own}
    return [_Level(p, requests[p], max(blocks[p], own.get(p, 0))) for p in sorted(requests) if p < priority]


def _take(levels: Sequence[_Level], slots_over: int, blocks_over: int) -> tuple[int, int] | None:
    """Fewest victims from the bottom up that bring both excesses to nothing, each counted at its level's mean size.

    Returns (victims, priority of the last one taken), or None where all of them are not enough.
    """
    victims, highest = 0, levels[0].priority if levels else 0
    for level in levels:
        if slots_over <= 0 and blocks_over <= 0:
            break
        for_blocks = -(-blocks_over * level.requests // level.blocks) if blocks_over > 0 and level.blocks else 0
        taken = min(level.requests, max(slots_over, for_blocks, 0))
        if taken:
            victims, highest = victims + taken, level.priority
            slots_over -= taken
            blocks_over -= taken * level.blocks // level.requests
    return (victims, highest) if slots_over <= 0 and blocks_over <= 0 else None
