"""The Lease that shows who leads. Pure.

Owns: when a controller that leads takes the Lease, renews it, or leaves it to another. Imports ids; no Kubernetes.

The Lease follows and never decides: who leads is settled by what routers and replicas hear (leader.py), which goes on
where the API server does not, and a controller that cannot write the Lease leads all the same. It is there for people
(`kubectl get lease`), and as a fence for what routers and replicas cannot refuse: Events are written by its holder alone.
Where two controllers lead, because the older has not heard of the younger yet, the younger takes the Lease, for its
generation is later; the older sees that and writes nothing, and what it tells replicas they refuse. Where the one that
leads cannot reach the API server, the Lease runs out and nobody takes it, for nobody else leads: nodes stay as they were
last known, and no Event is written.

Invariants: a holder of a later generation that renews is never put out; one that has stopped is, once it has not renewed
for as long as it said that it would (by the clock of whoever waits, from when it saw the last change): generations begin
anew with a new cluster, and the Lease of the one before must not last.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from cluster.types import Generation


@dataclass(frozen=True, slots=True)
class LeaseSeen:
    """A Lease as it was read last."""

    holder: str
    """Empty where it was given back."""
    generation: Generation | None
    """As which its holder leads; None where it does not say."""
    lasts_s: float
    """As its holder said."""
    changed_at_s: float
    """When it was first seen as it is now."""


class Step(StrEnum):
    MAKE = "make"
    """There is none."""
    TAKE = "take"
    RENEW = "renew"
    LEAVE = "leave"
    """It is another's, who is later and renews it."""


def next_step(seen: LeaseSeen | None, holder: str, leads: Generation, now_s: float) -> Step:
    """What `holder`, who leads as `leads`, does with the Lease."""
    if seen is None:
        return Step.MAKE
    if seen.holder == holder:
        return Step.RENEW
    if not seen.holder or seen.generation is None or seen.generation < leads:
        return Step.TAKE
    return Step.TAKE if now_s - seen.changed_at_s > seen.lasts_s else Step.LEAVE


def written(generation: Generation) -> str:
    """For the Lease."""
    return f"{generation.number}/{generation.uuid}"


def read(text: str) -> Generation | None:
    """What `written` made; None where it is something else."""
    number, slash, uuid = text.partition("/")
    return (
        Generation(int(number), uuid) if slash and number.isascii() and number.isdigit() and len(number) < 19 else None
    )
