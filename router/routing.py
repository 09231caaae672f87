"""The choice of a replica for one request: filter, score, pick.

Owns: that decision and the arithmetic of free capacity and of victims. Pure: it reads views and returns a value;
chance is an argument. Which replicas are looked at is `fleet`'s. Invariants: what is placed is sent to a routable
replica that could hold all of it; victims are strictly lower in priority, and none is counted for two; no two suspects
are on one replica, and where one is tried alone nobody else is.

Capacity as work of priority p sees it on one replica:
- slots in use: what runs, what this router has sent and the report does not count yet, and what waits there at
  priority >= p (it goes first; what waits below p does not).
- blocks in use: the larger of what the report says (with the unreported added) and what this router predicts for its
  own attempts, since a report counts a prompt only as it is filled; of work below p only what may be running.
Which of several is taken: work below p gives way, so that it costs p little, while what is as urgent goes before it there or
takes its part of every step. So replicas are compared by such work alone (*ahead*), and all else that is there counts for a
small part (LESSER) of how full they are. First comes what stands before a request's first token: the prompts of such work that
are still to be run, in steps of the replica, less what a replica is favoured by: twice what of the request's own prompt is held
there (`dispatch.SPARED`). One step counts for as much as a replica full of work: fullness decides where the wait is about the same. In a
simulation of 8 A100s at 0.9 load, with batch work filling them, p99 TTFT of the second class was 3.05 s by fullness alone and
0.91 s so. (Compared by all that is there alike, urgent work crowds where little of anything is, and its prompts wait for each
other: longer for all than by either.)

What is in use below p can always be taken, from what runs and, cheaper, from what waits there paused and has kept its
blocks: lower work alone never keeps p from a replica that could hold it. The one exception is work that a minimum share
sent out ahead of what waited then (`SharedLoad`): who had arrived by then stands behind it and cannot take its place.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

import msgspec

from cluster.types import EngineLoad, PriorityLoad, ReplicaId
from router.suspects import Trial
from router.view import Condition, ReplicaView, Used

LESSER = 1 / 16
"""Of a replica's fullness, what work counts for that is less urgent than who is placed."""
MEMO_MAX = 8
"""Priorities that a view keeps in its memo: clients may name any."""


class Need(msgspec.Struct, frozen=True, gc=False):
    """What one request asks of a replica."""

    priority: int
    tokens: int
    """Prompt and the output that is expected: what is reserved."""
    tokens_max: int
    """Prompt and all output that it may have: what a replica must be able to hold at all."""
    arrived_s: float = math.inf
    """Monotonic. Later than that, and no work was sent out past it."""
    trial: Trial = Trial.NONE
    """What else may be where it goes."""
    prompt_tokens: int = 0
    """Known ones, to be run before the next is drawn, where none of them is held."""

    def untried(self) -> Need:
        """The same of a request that is no suspect."""
        return msgspec.structs.replace(self, trial=Trial.NONE)

    def blocks(self, block_size_tokens: int) -> int:
        return -(-self.tokens // block_size_tokens)

    def blocks_max(self, block_size_tokens: int) -> int:
        return -(-self.tokens_max // block_size_tokens)

    def implies(self, other: Need) -> bool:
        """Whether no replica that has no place for this one has a place for `other`."""
        return (
            other.priority <= self.priority
            and other.tokens >= self.tokens
            and other.tokens_max >= self.tokens_max
            and other.arrived_s <= self.arrived_s
            and other.trial >= self.trial
        )


class Pool(NamedTuple):
    """What a replica has when it is empty."""

    slots_total: int
    blocks_total: int
    block_size_tokens: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Send it there. `victims` is how many running requests the engine will have to preempt for it."""

    replica_id: ReplicaId
    blocks: int
    victims: int = 0
    score: float = field(default=0.0, compare=False)
    """Steps ahead and fullness together, as the module says, less what it is favoured by: the least was taken."""
    free: bool = field(default=True, compare=False)
    """Nothing there has to give way, neither what runs nor what paused work has kept."""


@dataclass(frozen=True, slots=True)
class _Level:
    """Running work of one priority that could be preempted."""

    priority: int
    requests: int
    blocks: int


NO_FAVOUR: Mapping[ReplicaId, float] = {}
_Candidate = tuple[ReplicaView, EngineLoad, float, float]
"""A replica where others would give way, its load, how much stands ahead there, and its score."""
_ahead_of: Callable[[_Candidate], float] = itemgetter(2)


def choose(
    need: Need,
    views: Sequence[ReplicaView],
    rng: random.Random,
    favour: Mapping[ReplicaId, float] = NO_FAVOUR,
    *,
    pushing: bool = False,
    free: bool = False,
) -> Placement | None:
    """Where `need` goes now, or None: it stays queued.

    A replica that holds it freely is preferred, the least score first. Otherwise one whose strictly lower running work makes
    room: with least that is as urgent, then fewest victims, then the least urgent ones, then the least score. Ties are drawn
    from `rng`.

    Args:
        favour: What is taken off a replica's score.
        pushing: Only where others give way.
        free: Only where nobody does.
    """
    block_size = wanted = wanted_max = 0
    candidates: list[_Candidate] = []
    ties: list[tuple[ReplicaId, EngineLoad]] = []
    least, priority = math.inf, need.priority
    for view in views:  # few calls: this runs for every replica that is looked at
        load = view.load
        if load is None or view.condition is not Condition.ROUTABLE:
            continue
        if load.block_size_tokens != block_size:
            block_size = load.block_size_tokens
            wanted, wanted_max = need.blocks(block_size), need.blocks_max(block_size)
        if wanted_max > load.blocks_total or not load.slots_total:
            continue
        if (need.trial or view.trial) and not _may_try(need.trial, view, load):
            continue
        used = view.memo.get(priority)
        slots, blocks, lower, slots_ahead, blocks_ahead, prompts, tokens_a_step = (
            _used(need, view, load) if used is None else used
        )
        steps = (prompts + need.prompt_tokens) / tokens_a_step if tokens_a_step else 0.0
        slots, blocks = slots + 1, blocks + wanted
        # Parked work of any priority counts: of two with a free slot the one without a backlog is taken.
        slots_full, blocks_full = (slots + lower) / load.slots_total, blocks / load.blocks_total
        full = slots_full if slots_full > blocks_full else blocks_full
        slots_full, blocks_full = (slots_ahead + 1) / load.slots_total, (blocks_ahead + wanted) / load.blocks_total
        ahead = slots_full if slots_full > blocks_full else blocks_full
        score = steps + ahead + LESSER * (full - ahead)
        ahead += steps
        if favour:
            favoured = favour.get(view.replica_id, 0.0)
            ahead, score = ahead - favoured, score - favoured
        if slots <= load.slots_total and blocks <= load.blocks_total:
            if pushing:
                continue
            if score < least:
                least = score
                ties.clear()
            if score == least:
                ties.append((view.replica_id, load))
        elif not ties:
            candidates.append((view, load, ahead, score))
    if ties:
        replica_id, load = ties[0] if len(ties) == 1 else rng.choice(sorted(ties))
        return Placement(replica_id, need.blocks(load.block_size_tokens), score=least)
    if free:
        return None
    costs: list[tuple[tuple[float, int, int, float], ReplicaId, EngineLoad]] = []
    candidates.sort(key=_ahead_of)
    for view, load, ahead, score in candidates:  # victims are dear to find, and what stands ahead decides first
        if costs and ahead > costs[0][0][0]:
            break
        plan = _victims(need, view, load)
        if plan is not None:
            costs.append(((ahead, *plan, score), view.replica_id, load))
    if not costs:
        return None
    cheapest = min(cost for cost, _, _ in costs)
    chosen = sorted((replica_id, load) for cost, replica_id, load in costs if cost == cheapest)
    replica_id, load = chosen[0] if len(chosen) == 1 else rng.choice(chosen)
    _, victims, _, score = cheapest
    return Placement(replica_id, need.blocks(load.block_size_tokens), victims=victims, score=score, free=False)


def too_large(need: Need, pools: Collection[Pool]) -> bool:
    """Whether some pool sizes are known and not one of them could ever hold it. Nothing known says nothing."""
    return bool(pools) and not any(_could_hold(need, pool) for pool in pools)


def pool_of(load: EngineLoad) -> Pool:
    return Pool(load.slots_total, load.blocks_total, load.block_size_tokens)


def _could_hold(need: Need, pool: Pool | EngineLoad) -> bool:
    return pool.slots_total > 0 and need.blocks_max(pool.block_size_tokens) <= pool.blocks_total


def _may_try(trial: Trial, view: ReplicaView, load: EngineLoad) -> bool:
    """Whether a request may run beside what is there, for what either is suspected of."""
    if trial is Trial.ALONE:
        return not (load.running or load.waiting or view.unreported or view.own)
    return view.trial is Trial.NONE or (trial is Trial.NONE and view.trial is Trial.APART)


def prompts_ahead(priority: int, view: ReplicaView) -> int:
    """Tokens of prompts there that are run before one of `priority` that comes now."""
    load, tokens = view.load, 0
    if load is None:
        return 0
    for levels in (load.running, load.waiting, view.unreported):
        for level in levels:
            if level.priority >= priority:
                tokens += level.prompt_tokens
    return tokens


def steps_of(prompt_tokens: int, need: Need, view: ReplicaView) -> float:
    """How many so many tokens of its prompt fill there; 0 where that is not known."""
    if view.load is None:
        return 0.0
    tokens_a_step = _used(need, view, view.load)[-1]
    return prompt_tokens / tokens_a_step if tokens_a_step else 0.0


def _tokens_a_step(slots: int, slots_ahead: int, step_tokens: int) -> float:
    """Of a prompt, as a replica's steps run it: everyone as urgent who decodes there has a token of each, and all others of
    every second one; an eighth is left at least (cluster/engine/scheduling/continuous.py). 0 where steps are not told."""
    return max(step_tokens / 8, step_tokens - (slots + slots_ahead) / 2)


def _used(need: Need, view: ReplicaView, load: EngineLoad) -> Used:
    """Where a minimum share has sent nothing, the same for every need of a priority."""
    if (known := view.memo.get(need.priority)) is not None:
        return known
    lower = sum(level.requests for level in load.waiting if level.priority < need.priority)
    blocks = max(_blocks_reported(view, load), _blocks_predicted(need, view, load))
    slots, (slots_ahead, blocks_ahead) = _slots_used(need, view, load), _ahead(need, view, load)
    prompts, tokens_a_step = prompts_ahead(need.priority, view), _tokens_a_step(slots, slots_ahead, load.step_tokens)
    used = slots, blocks, lower, slots_ahead, blocks_ahead, prompts, tokens_a_step
    if not view.shared:
        if len(view.memo) >= MEMO_MAX:
            view.memo.clear()
        view.memo[need.priority] = used
    return used


def _ahead(need: Need, view: ReplicaView, load: EngineLoad) -> tuple[int, int]:
    """Requests there that are as urgent, and their blocks: as reported or as predicted, whichever are more."""
    requests = blocks = predicted = 0
    for levels in (load.running, load.waiting, view.unreported):
        for level in levels:
            if level.priority >= need.priority:
                requests += level.requests
                blocks += level.blocks
    for own in view.own:
        if own.priority >= need.priority:
            predicted += own.active_blocks + own.parked_blocks
    return requests, max(blocks, predicted)


def _slots_used(need: Need, view: ReplicaView, load: EngineLoad) -> int:
    slots = 0
    for level in load.running:  # plain loops: this runs whenever a replica has changed
        slots += level.requests
    for level in view.unreported:
        slots += level.requests
    for level in load.waiting:
        if level.priority >= need.priority:
            slots += level.requests
        elif view.shared:
            slots += _shared_ahead(need, view, load, level)
    return slots


def _shared_ahead(need: Need, view: ReplicaView, load: EngineLoad, waiting: PriorityLoad) -> int:
    """Of lower work that waits there, what a minimum share sent: it goes before whatever had arrived by then. As much
    of what runs of its priority as may be is taken for work that was so sent."""
    shared = sum(s.requests for s in view.shared if s.priority == waiting.priority and need.arrived_s <= s.since_s)
    running = sum(level.requests for level in load.running if level.priority == waiting.priority)
    return min(waiting.requests, max(0, shared - running))


def _blocks_reported(view: ReplicaView, load: EngineLoad) -> int:
    blocks = load.blocks_total - load.blocks_free
    for level in view.unreported:
        blocks += level.blocks
    return blocks


def _blocks_predicted(need: Need, view: ReplicaView, load: EngineLoad) -> int:
    predicted = 0
    for own in view.own:
        if own.priority >= need.priority:
            predicted += own.active_blocks + own.parked_blocks
        elif any(level.priority == own.priority for level in (*load.running, *view.unreported)):
            predicted += own.active_blocks
    return predicted


def _victims(need: Need, view: ReplicaView, load: EngineLoad) -> tuple[int, int] | None:
    """(how many more victims than are claimed already, the most urgent priority among them), or None: not enough.

    What is over capacity before this request is claimed by work that goes first, and it takes the same victims from
    the bottom up; the difference is this request's own. What lower work has kept while it is paused goes before
    anybody who runs, and is nobody's place.
    """
    levels = _preemptible(need, view, load)
    slots_over = _slots_used(need, view, load) - load.slots_total
    kept = sum(level.blocks for level in load.waiting if level.priority < need.priority)
    blocks_over = max(_blocks_reported(view, load) - kept, _blocks_predicted(need, view, load)) - load.blocks_total
    before = _take(levels, slots_over, blocks_over)
    after = _take(levels, slots_over + 1, blocks_over + need.blocks(load.block_size_tokens))
    if before is None or after is None:
        return None
    return after[0] - before[0], after[1]


def _preemptible(need: Need, view: ReplicaView, load: EngineLoad) -> list[_Level]:
    """Lower running work by priority, least urgent first; blocks by the larger of the two measures, too."""
    requests: dict[int, int] = {}
    blocks: dict[int, int] = {}
    for level in (*load.running, *view.unreported):
        requests[level.priority] = requests.get(level.priority, 0) + level.requests
        blocks[level.priority] = blocks.get(level.priority, 0) + level.blocks
    for own in view.own:
        blocks[own.priority] = max(blocks.get(own.priority, 0), own.active_blocks)
    for shared in view.shared:
        if need.arrived_s <= shared.since_s and shared.priority in requests:
            requests[shared.priority] -= shared.requests
            blocks[shared.priority] = max(0, blocks[shared.priority] - shared.blocks)
    return [_Level(p, requests[p], blocks[p]) for p in sorted(requests) if p < need.priority and requests[p] > 0]


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
