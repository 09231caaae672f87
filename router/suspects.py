"""Which request may have killed an engine, and how that is found out without losing many engines or any bystander.

Owns: that decision, and what a suspect must show to be cleared. Pure. Imports types only. Invariant: nobody is blamed
for an engine that anybody else may have killed.

When an engine dies, all that ran there are suspects. A suspect is tried where no other suspect is; if its engine dies
again, it was probably the one, but whoever ran beside it may have been (two requests that kill are seldom alone), so all of
them are suspects now, and it is tried once more alone. A request whose engine dies under it alone, when it was a
suspect already, is blamed.

Several routers. What the others run, a router does not see in time: they are told to keep away. A replica refuses (FULL) a
second suspect beside one that is tried, whoever sends it, and beside one that is tried alone everything; it reports the
trials of the others. Where there are other routers nobody is blamed but for a death in a trial alone, and only if the
replica has said that the trial has begun: one that it never took up may have been on its way to another's work.

The bound. Let m of the live requests kill whatever engine runs them, at the same token each time. Each kills at most
once unsuspected, once as a suspect among others and once alone; and when one of the m is blamed, another that was
held suspect for the same deaths is cleared with the bystanders and may begin anew. So at most 2m + 1 engines die of
each, m(2m + 1) in all: three of one, ten of two. One that was paused by the last report is no suspect, once. If it ran
again in a step whose frame was lost with the engine, that death is one more: 2m + 2 of each, four of one, twelve of two.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum

from cluster.types import RequestId

CLEARED_AFTER_TOKENS = 3
"""Tokens beyond those that had come when its engine died. A request that kills at some token gives the ones before it
again wherever it goes on, but only those that were lost with the engine: those of its last frame. Each one more makes the
trial of every innocent longer."""


class Trial(IntEnum):
    """What else may be on the replica where a request goes; the stricter the higher."""

    NONE = 0
    APART = 1
    """No other suspect."""
    ALONE = 2
    """Nothing at all."""


def may_join(trial: Trial, tried: Trial, *, occupied: bool) -> bool:
    """Whether a request whose trial is `trial` may be begun on a replica, for what it or others there are suspected of.

    Args:
        tried: The strictest trial there.
        occupied: Whether anything is there.
    """
    if trial is Trial.ALONE:
        return not occupied
    return tried is Trial.NONE or (trial is Trial.NONE and tried is Trial.APART)


@dataclass(frozen=True, slots=True)
class Suspicion:
    """What a live request is suspected of."""

    deaths: frozenset[int]
    """Of engines, by number: those that it may have caused."""
    trial: Trial
    cleared_at: int
    """With so many output tokens it is no suspect any more."""


@dataclass(frozen=True, slots=True)
class Present:
    """A request that ran on an engine when that died."""

    request_id: RequestId
    tokens: int
    """Output tokens that had come."""
    suspicion: Suspicion | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """Who killed the engine, if that is known; if not, who may have."""

    blamed: RequestId | None
    suspects: dict[RequestId, Suspicion]


def judge(death: int, there: Sequence[Present], *, strangers: bool) -> Verdict:
    """An engine died; it is death number `death`.

    Args:
        there: What this router had running on it.
        strangers: Whether requests of other routers may have run there.
    """
    if len(there) == 1:
        before = there[0].suspicion
        if before is not None and not strangers:
            return Verdict(there[0].request_id, {})
    return Verdict(None, {present.request_id: _suspicion(death, present) for present in there})


def _suspicion(death: int, present: Present) -> Suspicion:
    before = present.suspicion
    return Suspicion(
        deaths=frozenset((death,)) if before is None else before.deaths | {death},
        trial=Trial.APART if before is None else Trial.ALONE,
        cleared_at=present.tokens + CLEARED_AFTER_TOKENS,
    )


def without(suspicion: Suspicion, explained: Collection[int]) -> Suspicion | None:
    """What is left of it when it is known who caused these deaths."""
    deaths = suspicion.deaths.difference(explained)
    if not deaths:
        return None
    return (
        suspicion if len(deaths) == len(suspicion.deaths) else Suspicion(deaths, suspicion.trial, suspicion.cleared_at)
    )
