"""Whether a request is let in, made to wait or sent away, decided at its arrival.

Owns: that decision, and the drain rate from which `Retry-After` is computed. Pure but for `DrainRate`, which only
counts. Invariants: a request is rejected for its queue's bound only when it would have to wait; `Retry-After` is whole
seconds in 1..60, never the same for everybody.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.config import PriorityClass
from cluster.types import Outcome
from router.routing import Need, choose, too_large
from router.view import Condition, ReplicaView

RETRY_CAP_S = 60
NO_REPLICA_RETRY_S = 5.0
"""About what a replica takes to come back."""
DRAINING_RETRY_S = 1.0
"""Another router takes it at once."""
JITTER = 0.2


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What admission needs of a request, or of several that stand and fall together."""

    need: Need
    """Of each."""
    size_bytes: int
    """Of each."""
    priority_class: PriorityClass
    count: int = 1


@dataclass(frozen=True, slots=True)
class AdmissionView:
    """The router at the moment of the decision."""

    draining: bool
    replicas: Sequence[ReplicaView]
    ahead_requests: int
    """Queued at this priority or above: a new one goes behind them."""
    class_requests: int
    class_bytes: int
    drain_per_s: float
    """Measured departures of this class from the queue, per second."""


@dataclass(frozen=True, slots=True)
class Admit:
    """It starts at once; of several the first does."""


@dataclass(frozen=True, slots=True)
class Queue:
    """It waits behind `ahead_requests`."""

    ahead_requests: int


@dataclass(frozen=True, slots=True)
class Reject:
    outcome: Outcome
    retry_after_s: int | None


def decide(facts: RequestFacts, view: AdmissionView, rng: random.Random) -> Admit | Queue | Reject:
    """Judge one arrival. Of several requests that arrive as one, all are let in or none.

    With no replica that takes or may come back to taking work it is rejected at once; while one is only out of reach
    for the moment (its link is being re-established, it is silent, it has not reported yet) it may wait.
    """
    if view.draining:
        return Reject(Outcome.REJECTED_DRAINING, retry_after_s(DRAINING_RETRY_S, rng))
    if all(v.condition is Condition.DRAINING for v in view.replicas):
        return Reject(Outcome.REJECTED_NO_REPLICA, retry_after_s(NO_REPLICA_RETRY_S, rng))
    if too_large(facts.need, view.replicas):
        return Reject(Outcome.REJECTED_TOO_LARGE, None)
    starts = not view.ahead_requests and choose(facts.need, view.replicas, rng) is not None
    waiting = facts.count - 1 if starts else facts.count
    if waiting and (
        view.class_requests + waiting > facts.priority_class.max_queued_requests
        or view.class_bytes + waiting * facts.size_bytes > facts.priority_class.max_queued_bytes
    ):
        backlog_s = backlog_seconds(view.class_requests, view.drain_per_s)
        return Reject(Outcome.REJECTED_QUEUE_FULL, retry_after_s(backlog_s, rng))
    return Admit() if starts else Queue(view.ahead_requests)


def backlog_seconds(queued_requests: int, drain_per_s: float) -> float:
    """How long the queue takes to drain at its measured rate; endless where nothing drains."""
    return queued_requests / drain_per_s if drain_per_s > 0 else math.inf


def retry_after_s(wait_s: float, rng: random.Random) -> int:
    """Whole seconds in 1..60, spread by ±20 % so that clients that were sent away together do not return together."""
    capped_s = min(wait_s, RETRY_CAP_S / (1 + JITTER))
    return max(1, min(RETRY_CAP_S, round(capped_s * rng.uniform(1 - JITTER, 1 + JITTER))))


class DrainRate:
    """Departures per second, exponentially weighted over about `window_s`, unbiased from the first one on."""

    __slots__ = ("_count", "_since_s", "_updated_s", "_window_s")

    def __init__(self, now_s: float, window_s: float = 30.0) -> None:
        self._window_s = window_s
        self._since_s = self._updated_s = now_s
        self._count = 0.0

    def left(self, now_s: float) -> None:
        self._count = self._decayed(now_s) + 1
        self._updated_s = now_s

    def per_s(self, now_s: float) -> float:
        seen = 1 - math.exp(-(now_s - self._since_s) / self._window_s)
        return self._decayed(now_s) / (self._window_s * seen) if seen > 0 else 0.0

    def _decayed(self, now_s: float) -> float:
        return self._count * math.exp(-(now_s - self._updated_s) / self._window_s)
