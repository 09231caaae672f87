"""Replicas, requests and demands for the controller's tests, each with all that the controller is told of it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec

from cluster.control.view import ClusterView, Demand, Replica, Steps, Underway, observe
from cluster.messages import HeldRequest, RosterEntry, Standing, Unplaced
from cluster.types import (
    EngineLoad,
    Generation,
    PriorityLoad,
    ReplicaId,
    ReplicaReport,
    ReplicaState,
    RequestId,
    RouterId,
)

MODEL = "m"
ROUTER = RouterId("router")
BLOCK = 16
"""Tokens."""
LONG_AGO_S = -1000.0
NOW_S = 0.0


def request(
    name: str,
    *,
    priority: int = 0,
    standing: Standing = Standing.RUNS,
    blocks: int = 4,
    tokens: int | None = None,
    remaining: int = BLOCK,
    attempt: int = 1,
    to_compute: int = 0,
) -> HeldRequest:
    """`tokens` fill its blocks, where it is not said that it shares some."""
    if tokens is None:
        tokens = blocks * BLOCK
    return HeldRequest(RequestId(name), attempt, ROUTER, priority, standing, blocks, tokens, remaining, to_compute)


def waits(
    name: str, *, priority: int = 0, remaining: int = BLOCK, attempt: int = 1, to_compute: int = 3 * BLOCK
) -> HeldRequest:
    return request(
        name,
        priority=priority,
        standing=Standing.WAITS,
        blocks=0,
        remaining=remaining,
        attempt=attempt,
        to_compute=to_compute,
    )


def paused(name: str, *, priority: int = 0, blocks: int = 4, remaining: int = BLOCK) -> HeldRequest:
    return request(name, priority=priority, standing=Standing.PAUSED, blocks=blocks, remaining=remaining)


def entry(name: str, *, host: str = "", zone: str = "", generation: int = 1, model: str = MODEL) -> RosterEntry:
    return RosterEntry(ReplicaId(name), Generation(generation, "g"), host or f"host-{name}", 1, model, zone)


def load(
    held: Iterable[HeldRequest], *, slots: int, blocks: int, more: Iterable[PriorityLoad] = (), steps: int = 0
) -> EngineLoad:
    """What an engine says that holds these, and `more` that runs and is not told of one by one."""
    levels: dict[bool, Counter[int]] = {True: Counter(), False: Counter()}
    kept: dict[bool, Counter[int]] = {True: Counter(), False: Counter()}
    for h in held:
        levels[h.standing is Standing.RUNS][h.priority] += 1
        kept[h.standing is Standing.RUNS][h.priority] += h.blocks
    for level in more:
        levels[True][level.priority] += level.requests
        kept[True][level.priority] += level.blocks
    running, waiting = (
        tuple(PriorityLoad(p, levels[runs][p], kept[runs][p]) for p in sorted(levels[runs])) for runs in (True, False)
    )
    used = sum(level.blocks for level in (*running, *waiting))
    return EngineLoad(
        slots_total=slots,
        blocks_total=blocks,
        blocks_free=blocks - used,
        block_size_tokens=BLOCK,
        running=running,
        waiting=waiting,
        steps_total=steps,
    )


def report(
    of: RosterEntry, engine: EngineLoad, *, state: ReplicaState = ReplicaState.READY, step_age_s: float | None = None
) -> ReplicaReport:
    return ReplicaReport(
        replica_id=of.replica_id,
        generation=of.generation,
        state=state,
        observed_unix_s=0.0,
        load=engine,
        step_age_s=step_age_s,
    )


def replica(
    name: str,
    *held: HeldRequest,
    slots: int = 4,
    blocks: int = 1000,
    more: Iterable[PriorityLoad] = (),
    step_s: float | None = None,
    host: str = "",
    zone: str = "",
    state: ReplicaState = ReplicaState.READY,
    step_age_s: float | None = None,
    at_s: float = NOW_S,
    stalled_since_s: float = LONG_AGO_S,
) -> Replica:
    """As it is seen at `at_s`, after all that waits there has been seen to wait since `stalled_since_s`."""
    who = entry(name, host=host, zone=zone)
    told = report(who, load(held, slots=slots, blocks=blocks, more=more), state=state, step_age_s=step_age_s)
    seen = observe(observe(None, who, told, held, stalled_since_s), who, told, held, at_s)
    return msgspec.structs.replace(seen, steps=Steps(at_s, 0, seen.running > 0, step_s))


def demand(
    name: str = "urgent",
    *,
    priority: int = 10,
    blocks: int = 10,
    waits_s: float = 1.0,
    router: RouterId = ROUTER,
    at_s: float = NOW_S,
) -> Demand:
    return Demand(router, Unplaced(MODEL, RequestId(name), priority, blocks, waits_s), at_s)


def view(
    *replicas: Replica,
    demands: Iterable[Demand] = (),
    lately: Iterable[Underway] = (),
    parks: Mapping[RequestId, int] | None = None,
) -> ClusterView:
    in_order = sorted(replicas, key=lambda r: r.replica_id)
    before = tuple(lately)
    left = {u.proposal.request_id: (u.at_s, u.proposal.attempt) for u in before}
    return ClusterView(tuple(in_order), tuple(demands), before, left, parks or {})


def some_held(rng: random.Random, name: str, *, slots: int, blocks: int) -> tuple[HeldRequest, ...]:
    """What may be on one replica, all of it told."""
    held: list[HeldRequest] = []
    left, running = blocks, 0
    for number in range(rng.randint(0, slots + 3)):
        standing = rng.choice((Standing.RUNS, Standing.RUNS, Standing.PAUSED, Standing.WAITS))
        size = rng.randint(1, 12)
        if standing is not Standing.WAITS and (size > left or (standing is Standing.RUNS and running == slots)):
            standing = Standing.WAITS
        running += standing is Standing.RUNS
        if standing is Standing.WAITS:
            size = 0
        own = max(0, size - rng.choice((0, 0, 1, 2)))  # the others are shared
        left -= size
        held.append(
            request(
                f"{name}-{number}",
                priority=rng.choice((-10, 0, 10)),
                standing=standing,
                blocks=own,
                tokens=max(0, size * BLOCK - rng.randrange(BLOCK)),
                remaining=rng.choice((1, 10, 30, 100)),
                to_compute=1 if size else rng.randint(1, 8 * BLOCK),
            )
        )
    return tuple(held)


def some_fleet(seed: int, *, most: int = 4, room: float = 0.3) -> tuple[Replica, ...]:
    """Replicas of one model with all that they hold; of `room` of them little is in use.

    Drawn from one seed: drawn value by value, a fleet takes hypothesis as long as a hundred decisions.
    """
    rng = random.Random(seed)
    fleet = []
    for number in range(rng.randint(1, most)):
        name = f"r{number}"
        slots, blocks = rng.randint(1, 4), rng.randint(8, 40)
        held = some_held(rng, name, slots=slots, blocks=blocks)
        if rng.random() < room:
            held = tuple(h for h in held if h.standing is Standing.RUNS)[:1]
            slots += 1
        fleet.append(
            replica(
                name,
                *held,
                slots=slots,
                blocks=blocks,
                step_s=rng.choice((None, 0.01, 0.05, 0.2)),
                host=rng.choice(("h0", "h1")),
                state=ReplicaState.DRAINING if rng.random() < 0.1 else ReplicaState.READY,
            )
        )
    return tuple(fleet)


def shuffled(fleet: Iterable[Replica], seed: int) -> list[Replica]:
    other = list(fleet)
    random.Random(seed).shuffle(other)
    return other
