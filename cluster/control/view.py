"""One model as the controller sees it: its replicas, what has no place on them, and what was proposed lately.

Owns: these values, and how a replica's status becomes one. Pure: all that was told before is an argument. Imports the
messages. Invariants: what a replica has not told is `None` or absent, never zero load; two views of the same events are
equal, in whatever order replicas came.

What a request takes is told apart from what it frees. It takes all blocks of its tokens and of the output that is
expected, on a replica that has none of them; it frees those that nobody shares (`HeldRequest.blocks`): of what it frees
never more is assumed. Blocks that running work is still to fill are no room: a router counts them too.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import NamedTuple

import msgspec

from cluster.messages import HeldRequest, Propose, RosterEntry, Standing, Unplaced
from cluster.types import EngineLoad, Generation, ReplicaId, ReplicaReport, ReplicaState, RequestId, RouterId

STEPS_WINDOW_S = 0.5
"""Over so long the steps of a replica are counted."""


class Steps(msgspec.Struct, frozen=True, gc=False):
    """How long a replica's steps take, by how many it made while something ran."""

    since_s: float
    steps_total: int
    """As it was then."""
    busy: bool
    """Something ran then."""
    step_s: float | None = None
    """Mean of the last whole window; None while unknown, and where nothing runs."""


class Stalled(msgspec.Struct, frozen=True, gc=False):
    """A request that waits on its replica."""

    order: tuple[int, bool, RequestId]
    """The least goes back first: the most urgent, and of equals what has kept its blocks."""
    held: HeldRequest
    takes: int
    """Blocks, where it goes."""
    since_s: float
    """It was first seen to wait."""


class Replica(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A replica, by the last that it told."""

    replica_id: ReplicaId
    entry: RosterEntry
    ready: bool
    load: EngineLoad
    held: tuple[HeldRequest, ...]
    step_age_s: float
    observed_at_s: float
    steps: Steps
    stalled: tuple[Stalled, ...]
    """Of `held`, what waits; the first goes back first."""
    stalled_takes: int
    """The least that any of these takes; 0 where there is none."""
    running: int
    """Requests that run."""
    requests: int
    """That run or wait."""
    waits_above: int | None
    """The most urgent that waits there."""
    slots_left: int
    blocks_left: int
    """Free, and not to be filled by what is known to run there."""
    fullness: float
    longest_remaining: int
    """Of what is known to run there."""
    listed_frees: int
    """Of `blocks_left`, what would be there besides without all of `held`."""


class Demand(NamedTuple):
    """A request that fits on no replica."""

    router_id: RouterId
    told: Unplaced
    told_at_s: float

    def waits_s(self, now_s: float) -> float:
        return self.told.waits_s + now_s - self.told_at_s


class Proposal(msgspec.Struct, frozen=True, gc=False):
    """`messages.Propose` before the controller's generation is put to it, and whom it goes to."""

    router_id: RouterId
    request_id: RequestId
    attempt: int
    source: ReplicaId
    source_generation: Generation
    target: ReplicaId | None
    target_generation: Generation | None
    for_request_id: RequestId | None
    why: str
    numbers: dict[str, float]

    def message(self, generation: Generation) -> Propose:
        return Propose(
            generation=generation,
            request_id=self.request_id,
            attempt=self.attempt,
            source=self.source,
            source_generation=self.source_generation,
            target=self.target,
            target_generation=self.target_generation,
            for_request_id=self.for_request_id,
            why=self.why,
            numbers=self.numbers,
        )


class Underway(NamedTuple):
    """A proposal that was made, and what it changes where."""

    at_s: float
    proposal: Proposal
    standing: Standing
    """Of the request, when it was proposed."""
    frees_blocks: int
    """On its source."""
    goes_to: ReplicaId | None
    """Its target, or where there was room for it as it went back to its router; None: it makes room for a demand."""
    takes_blocks: int
    """There."""
    left_s: float | None = None
    """When its router said that it has left."""
    steps_total: int | None = None
    """Of its source, by the first report after that: what is let go of is free after the step that runs."""
    shown_s: float | None = None
    """When the reports of both sides counted that."""

    @property
    def parks(self) -> bool:
        """It gives up keys and values."""
        return self.proposal.target is None and self.standing is not Standing.WAITS


class ClusterView(msgspec.Struct, frozen=True):
    """One model."""

    replicas: tuple[Replica, ...]
    """By id."""
    demands: tuple[Demand, ...]
    """Those that still count."""
    lately: tuple[Underway, ...]
    """What may be on its way, or keeps a pair at rest."""
    left: Mapping[RequestId, tuple[float, int]]
    """When, and as which attempt, each was last proposed to leave, of those that may still rest."""
    parks: Mapping[RequestId, int]
    """How often each was lately proposed to give up its keys and values."""


def blocks_of(tokens: int, load: EngineLoad) -> int:
    return -(-tokens // load.block_size_tokens)


def takes(held: HeldRequest, load: EngineLoad) -> int:
    """Blocks for a request: of what it has said and was told, and of what it is still to say."""
    return blocks_of(held.tokens + held.to_compute_tokens + held.remaining_tokens, load)


def frees(held: HeldRequest, load: EngineLoad) -> int:
    """Of `Replica.blocks_left`, what is there besides once a request has left."""
    return held.blocks + (_to_fill(held, load) if held.standing is Standing.RUNS else 0)


def observe(
    before: Replica | None,
    entry: RosterEntry,
    report: ReplicaReport,
    held: tuple[HeldRequest, ...] | None,
    now_s: float,
) -> Replica:
    """A replica as it is by what it tells now.

    Args:
        before: The same incarnation, as it was last; None at first.
        held: None where nothing on it is worth weighing.
    """
    load, listed = report.load, held or ()
    since = {s.held.request_id: s.since_s for s in before.stalled} if before is not None else {}
    running = waiting = to_fill = longest = listed_frees = 0
    for level in load.running:  # plain loops: this runs for every report
        running += level.requests
    for level in load.waiting:
        waiting += level.requests
    stalled = []
    for h in listed:
        listed_frees += h.blocks
        if h.standing is Standing.RUNS:
            to_fill += _to_fill(h, load)
            longest = max(longest, h.remaining_tokens)
        else:
            order = (-h.priority, h.standing is Standing.WAITS, h.request_id)
            stalled.append(Stalled(order, h, takes(h, load), since.get(h.request_id, now_s)))
    stalled.sort(key=attrgetter("order"))
    return Replica(
        replica_id=entry.replica_id,
        entry=entry,
        ready=report.state is ReplicaState.READY,
        load=load,
        held=listed,
        step_age_s=report.step_age_s or 0.0,
        observed_at_s=now_s,
        steps=_steps(before.steps if before is not None else None, load.steps_total, running > 0, now_s),
        stalled=tuple(stalled),
        stalled_takes=min((one.takes for one in stalled), default=0),
        running=running,
        requests=running + waiting,
        waits_above=max((level.priority for level in load.waiting), default=None),
        slots_left=load.slots_total - running,
        blocks_left=load.blocks_free - to_fill,
        fullness=fullness(load, running + waiting, load.blocks_total - load.blocks_free),
        longest_remaining=longest,
        listed_frees=listed_frees + to_fill,
    )


def fullness(load: EngineLoad, requests: int, blocks: int) -> float:
    """How full a replica is with so much: what waits counts as what runs, so it may be more than 1."""
    of_slots = requests / (load.slots_total or 1)
    of_blocks = blocks / (load.blocks_total or 1)
    return of_slots if of_slots > of_blocks else of_blocks


def _to_fill(held: HeldRequest, load: EngineLoad) -> int:
    return takes(held, load) - blocks_of(held.tokens, load)


def _steps(before: Steps | None, steps_total: int, busy: bool, now_s: float) -> Steps:
    """Counted only over time in which something ran at both ends."""
    if before is None or not busy or not before.busy:
        return Steps(now_s, steps_total, busy)
    took_s, made = now_s - before.since_s, steps_total - before.steps_total
    if took_s < STEPS_WINDOW_S:
        return before
    return Steps(now_s, steps_total, busy, took_s / made if made > 0 else None)
