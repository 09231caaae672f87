"""How many replicas a model is to have, and which one goes.

Owns: both decisions and the next step towards them. Pure. Imports the measured load.

Up is fast: what is asked, with what waits in the routers spread over `drain_backlog_s`, is above `utilisation` of what the
replicas do at their full batch, for `up_after_s`. Down is slow: the highest demand of `down_after_s` fits into fewer at
`spare_utilisation`. Between the two lies the band in which nothing is done, so that a steady load with noise in it turns
round at most once in `down_after_s`. One is added too where too few requests of a class have their first token within its
`first_token_slo_s`, and none goes while that is so. Before any replica has been full, nobody knows what one does: one is added where
requests wait, and one taken away in each `down_after_s` where what runs would fill at most `spare_utilisation` of the slots
of the others. Where that was wrong, requests wait, and what one does is known from then on.

One that is to go first retires: it drains as for an operator, whose drains are told apart by `ReplicaLoad.retiring`, and
takes work again as long as it is there if it turns out to be needed. Empty, it is told to leave; Serve puts another in its
place, and it is this one, just starting, that Serve takes away when its target is lowered: asked before, it would pick one
by its own rules, at work or not. What an operator drains is kept, and counts as not there.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cluster.config import ScaleConfig
from cluster.control.demand import ModelLoad, ReplicaLoad
from cluster.types import ReplicaId, ReplicaState

PEAKS = 60
"""The highest demands of so many parts of `down_after_s` are kept."""


@dataclass(frozen=True, slots=True)
class ScaleState:
    """What a decision knows of those before it. A successor begins with how many replicas there are."""

    wanted: int
    """Replicas that are to take work."""
    since_s: float
    """When this was begun, or a replica was added last, or taken away while nobody knew what one does."""
    fewer_s: float = -math.inf
    """When fewer were there for the last time."""
    short_since_s: float | None = None
    """Since when more have been needed."""
    peaks: tuple[tuple[int, float, float], ...] = ()
    """(number of the part of time, highest demand per second in it, replicas occupied at most), oldest first."""


@dataclass(frozen=True, slots=True)
class Verdict:
    state: ScaleState
    why: str
    """It changes, or nothing does."""
    numbers: dict[str, float]


def decide(load: ModelLoad, config: ScaleConfig, now_s: float, state: ScaleState) -> Verdict:
    """How many replicas are to take work: `Verdict.state.wanted`."""
    have = state.wanted
    if not load.routers:
        return _stays(state, "no router is connected, so that nobody knows what waits", load)
    if (bounded := min(max(have, config.min), config.max)) != have:
        return _changed(state, bounded, now_s, "the bounds of the profile", load)
    state = replace(state, peaks=_peaks(state.peaks, load, now_s, config.down_after_s))
    needed = _needed(load, config, have)
    if sum(not r.retiring for r in load.replicas) < have:
        state = replace(state, fewer_s=now_s)
    if not have:
        wake = min(max(needed, 1), config.max)
        return (
            _changed(state, wake, now_s, "a request waits", load)
            if load.queued
            else _stays(state, "nothing waits", load)
        )
    if needed <= have:
        state = replace(state, short_since_s=None)
    elif have < config.max:
        short_since_s = now_s if state.short_since_s is None else state.short_since_s
        if now_s - short_since_s < config.up_after_s:
            why = "demand is above what they do, but has not been for long"
            return _stays(replace(state, short_since_s=short_since_s), why, load, needed=needed)
        return _changed(state, min(needed, config.max), now_s, "demand is above what they do", load)
    else:
        return _stays(state, "demand is above what they do, and there may be no more", load, needed=needed)

    if config.min == 0 and load.idle_s >= config.idle_after_s and now_s - state.fewer_s >= config.idle_after_s:
        return _changed(state, 0, now_s, "there is no work", load)
    if have <= max(config.min, 1):
        return _stays(state, "there are as few as there may be", load)
    if load.demand_per_s is None:
        return _stays(state, "demand is not measured yet", load)
    if now_s - state.since_s < config.down_after_s:
        return _stays(state, "none goes so soon after one was added, or after this controller began", load)
    peak_per_s = max(demand for _, demand, _ in state.peaks)
    enough = max(_enough(load, config, state, peak_per_s), needed, config.min, 1)
    if enough < have:
        why = "fewer do all that was asked lately"
        return _changed(state, enough, now_s, why, load, peak_per_s=peak_per_s)
    return _stays(state, "as many are needed for what was asked lately", load, peak_per_s=peak_per_s)


def _needed(load: ModelLoad, config: ScaleConfig, have: int) -> int:
    """Replicas that what is asked and what waits keep at `utilisation`, and first tokens in time."""
    least, backlog = 0, load.queued_service
    if sum(r.state is ReplicaState.READY for r in load.replicas) < have:  # what starts is yet to work at it
        least, backlog = have if load.queued else 0, 0.0
    elif _late_for_want_of_replicas(load, config, have) or (backlog and load.full_per_s is None):
        least = have + 1
    if load.full_per_s is None or load.demand_per_s is None:
        return least
    asked_per_s = load.demand_per_s + backlog / config.drain_backlog_s
    return max(least, _whole(asked_per_s / (config.utilisation * load.full_per_s)))


def _late_for_want_of_replicas(load: ModelLoad, config: ScaleConfig, have: int) -> bool:
    """Too few first tokens come in time, of replicas that are in use by half of `spare_utilisation` at least. Where they
    are not, it is for another reason (prompts too long for the aim, say), and more replicas would not help."""
    if load.attained is None or load.attained >= config.attainment or not have:
        return False
    if load.full_per_s is not None:
        in_use = (load.demand_per_s or 0.0) / (have * load.full_per_s)
    else:
        in_use = (load.occupied or 0.0) / have
    return in_use >= config.spare_utilisation / 2


def _enough(load: ModelLoad, config: ScaleConfig, state: ScaleState, peak_per_s: float) -> int:
    """Replicas that the highest demand keeps at `spare_utilisation`."""
    if load.full_per_s is not None:
        return _whole(peak_per_s / (config.spare_utilisation * load.full_per_s))
    occupied = max(occupied for _, _, occupied in state.peaks)
    return max(state.wanted - 1, _whole(occupied / config.spare_utilisation))


def _whole(replicas: float) -> int:
    return math.ceil(replicas - 1e-9)


def _peaks(
    peaks: tuple[tuple[int, float, float], ...], load: ModelLoad, now_s: float, over_s: float
) -> tuple[tuple[int, float, float], ...]:
    part, demand, occupied = math.floor(now_s * PEAKS / over_s), load.demand_per_s or 0.0, load.occupied or 0.0
    if peaks and peaks[-1][0] == part:
        *_, (_, highest, most) = peaks
        if demand <= highest and occupied <= most:
            return peaks
        return (*peaks[:-1], (part, max(demand, highest), max(occupied, most)))
    return (*(p for p in peaks if p[0] >= part - PEAKS), (part, demand, occupied))


def _changed(state: ScaleState, wanted: int, now_s: float, why: str, load: ModelLoad, **more: float) -> Verdict:
    since_s = now_s if wanted > state.wanted or load.full_per_s is None else state.since_s
    after = replace(state, wanted=wanted, since_s=since_s, short_since_s=None)
    return Verdict(after, why, _numbers(load, **{"from": state.wanted}, to=wanted, **more))


def _stays(state: ScaleState, why: str, load: ModelLoad, **more: float) -> Verdict:
    return Verdict(state, why, _numbers(load, **more))


def _numbers(load: ModelLoad, **more: float) -> dict[str, float]:
    """By which it is decided; what is not measured is not among them."""
    measured = {
        "demand_per_s": load.demand_per_s,
        "of_one_per_s": load.full_per_s,
        "occupied": load.occupied,
        "queued": load.queued,
        "queued_service": load.queued_service,
        "attained": load.attained,
        "idle_s": load.idle_s,
    }
    return {name: round(value, 2) for name, value in (more | measured).items() if value is not None}


# --- the next step ---


@dataclass(frozen=True, slots=True)
class Deployed:
    """What Serve has of a model."""

    target: int
    """So many it keeps."""
    running: frozenset[ReplicaId]
    starting: int
    """That are not ready yet. Where too many are there, these it stops first."""


@dataclass(frozen=True, slots=True)
class SetTarget:
    """Serve is to keep so many."""

    replicas: int


@dataclass(frozen=True, slots=True)
class Retire:
    replica_id: ReplicaId


@dataclass(frozen=True, slots=True)
class TakeWorkAgain:
    replica_id: ReplicaId


@dataclass(frozen=True, slots=True)
class TellToLeave:
    """It is empty."""

    replica_id: ReplicaId


Step = SetTarget | Retire | TakeWorkAgain | TellToLeave


def next_step(load: ModelLoad, wanted: int, serve: Deployed, replicas_max: int) -> Step | None:
    """What is to be done now, where `wanted` are to take work. One replica goes at a time."""
    here = [r for r in load.replicas if r.replica_id in serve.running]
    retiring = [r for r in here if r.retiring]
    have = serve.target - set_aside(load, serve) - len(retiring)
    if have < wanted:
        if retiring:
            return TakeWorkAgain(max(retiring, key=lambda r: (r.requests, r.replica_id)).replica_id)
        more = min(serve.target + wanted - have, replicas_max)
        return SetTarget(more) if more > serve.target else None
    if retiring:
        empty = [r for r in retiring if r.state is ReplicaState.DRAINING and not r.requests]
        return TellToLeave(empty[0].replica_id) if empty else None
    # Where one that runs for Serve does not report, it has left a moment ago, and Serve is about to see it.
    if have == wanted or len(here) < len(serve.running):
        return None
    if serve.starting:
        return SetTarget(serve.target - min(have - wanted, serve.starting))
    ready = [r for r in here if r.state is ReplicaState.READY]
    return Retire(first_to_go(ready).replica_id) if ready else None


def set_aside(load: ModelLoad, serve: Deployed) -> int:
    """How many an operator keeps from work."""
    draining = (r for r in load.replicas if r.state is ReplicaState.DRAINING and not r.retiring)
    return sum(r.replica_id in serve.running for r in draining)


def first_to_go(replicas: Sequence[ReplicaLoad]) -> ReplicaLoad:
    """The one with least to move, of those that leave no zone and no machine without one while another has several."""
    zones = Counter(r.zone for r in replicas)
    machines = Counter((r.zone, r.machine) for r in replicas)
    able = [r for r in replicas if zones[r.zone] > 1] or list(replicas)
    able = [r for r in able if machines[r.zone, r.machine] > 1] or able
    return min(able, key=lambda r: (r.blocks, r.requests, -r.generation.number, r.replica_id))
