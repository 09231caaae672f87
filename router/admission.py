"""Whether a request is let in, made to wait or sent away, decided at its arrival.

Owns: that decision, what it predicts from, and `Retry-After`. Pure. Invariants: a request is rejected for its queue only
when it would have to wait; what has not been measured refuses nobody; `Retry-After` is whole seconds in 1..60, never
the same for everybody.

The prediction. A class is served at its measured drain; while more urgent work waits and that drain is slower, or not
known, at its minimum share of all that drains, which it gets once its next request has waited `ageing_after_s`. In front of a request
stands, in service, what its band holds; but of each other tenant no more, for its weight, than what the request's own
tenant has there with it, since tenants of a band are served evenly.

Who is sent out at once still waits on its replica until the prompts there that are as urgent have been run. Where that is
longer than its class's longest wait it is refused, and the sooner the longer its own prompt is, since the next one waits for
that too: of all that might be refused under overload, the longest spare the others most. Even the longest is let in where it
begins within half of the wait. The replica that placement prefers may be one that begins late, for what it holds of the prompt
or for who would give way elsewhere: nobody is refused for that while another with a place would begin in time, and goes there
(router/fleet.py, `place_among`; of a large fleet as many are looked at as of a small one).
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from cluster.config import PriorityClass
from cluster.types import Outcome
from router.routing import Need
from router.terms import NO_TERMS, Terms

RETRY_CAP_S = 60
NO_REPLICA_RETRY_S = 5.0
"""About what a replica takes to come back."""
UNMEASURED_RETRY_S = 5.0
"""Of a queue whose drain is not known yet."""
DRAINING_RETRY_S = 1.0
"""Another router takes it at once."""
JITTER = 0.2
WAIT_MARGIN = 0.9
"""What is predicted to wait longer than this part of its class's longest wait is refused: rates are never quite known."""


class RequestFacts(msgspec.Struct, frozen=True):
    """What admission needs of a request, or of several that stand and fall together."""

    need: Need
    """Of each."""
    size_bytes: int
    """Of each."""
    priority_class: PriorityClass
    count: int = 1
    service: int = 0
    """Of each: what serving it is expected to take."""
    output_tokens: int = 1
    """What it will make at least, or is stated to make."""
    age_s: float = 0.0
    """What has passed since its arrival."""
    terms: Terms = NO_TERMS


class Pace(msgspec.Struct, frozen=True):
    """How the request's class is being served. Rates are in service per second; None: not measured."""

    backlog: int = 0
    """Service that waits in the class."""
    ahead: float = 0.0
    """Of that, what stands in front of the request."""
    drain_per_s: float | None = None
    """Measured of the class."""
    share_per_s: float | None = None
    """Its minimum share of what is measured of all classes; None too where nothing more urgent waits."""
    ageing_after_s: float = 0.0
    first_token_s: float | None = None
    """From being sent out to the first token."""
    next_token_s: float | None = None
    prompts: Prompts | None = None
    """On the replica that it is sent to at once, one that begins it in time where one was found; None too where it is sent nowhere
    yet."""


class Prompts(msgspec.Struct, frozen=True):
    """What a replica takes to run the prompts of what is as urgent there, and the request's own."""

    ahead_s: float
    own_s: float


NOT_MEASURED = Pace()


class AdmissionView(msgspec.Struct, frozen=True):
    """The router at the moment of the decision."""

    draining: bool
    leaving: bool
    """No replica takes work, nor may come back to taking it."""
    too_large: bool
    """No replica could ever hold it."""
    room: bool
    """A replica holds it now."""
    ahead_requests: int
    """Queued at this priority or above: a new one goes behind them, or in between."""
    class_requests: int
    class_bytes: int
    tenant_requests: int = 0
    """Of the request's tenant, in this class."""
    tenant_bytes: int = 0
    longest_wait_s: float = math.inf
    pace: Pace = NOT_MEASURED


@dataclass(frozen=True, slots=True)
class Admit:
    """It starts at once; of several the first does."""


ADMIT = Admit()


@dataclass(frozen=True, slots=True)
class Queue:
    """It waits behind `ahead_requests`."""

    ahead_requests: int


@dataclass(frozen=True, slots=True)
class Reject:
    """`error` says more than the outcome does; `numbers` are what it was decided by."""

    outcome: Outcome
    retry_after_s: int | None
    error: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)


def decide(facts: RequestFacts, view: AdmissionView, rng: random.Random) -> Admit | Queue | Reject:
    """Judge one arrival. Of several requests that arrive as one, all are let in or none.

    With no replica that takes or may come back to taking work it is rejected at once; while one is only out of reach
    for the moment (its link is being re-established, it is silent, it has not reported yet) it may wait.
    """
    if view.draining:
        return Reject(Outcome.REJECTED_DRAINING, retry_after_s(DRAINING_RETRY_S, rng))
    if view.leaving:
        return Reject(Outcome.REJECTED_NO_REPLICA, retry_after_s(NO_REPLICA_RETRY_S, rng))
    if view.too_large:
        return Reject(Outcome.REJECTED_TOO_LARGE, None)
    starts = not view.ahead_requests and view.room
    waiting = facts.count - 1 if starts else facts.count
    refused = _over_bounds(facts, view, waiting) or _too_late(facts, view, starts=starts)
    if refused is not None:
        pace = view.pace
        wait_s = backlog_seconds(pace.backlog, pace.drain_per_s) + (pace.prompts.ahead_s if pace.prompts else 0.0)
        outcome, error, numbers = refused
        numbers |= {"backlog": pace.backlog, "drain_per_s": round(pace.drain_per_s or 0.0, 1)}
        return Reject(outcome, retry_after_s(wait_s, rng), error, numbers)
    return ADMIT if starts else Queue(view.ahead_requests)


def begins_freely(count: int, terms: Terms, longest_wait_s: float | None, *, starts: bool) -> bool:
    """Whether nothing stands against it but that the router drains, however its class is being served: it is one alone,
    starts at once, and no time is stated by it or its class."""
    return starts and count == 1 and terms.ttft_slo_s is None and terms.timeout_s is None and longest_wait_s is None


_Refused = tuple[Outcome, str, dict[str, float]]


def _over_bounds(facts: RequestFacts, view: AdmissionView, waiting: int) -> _Refused | None:
    """Whether the class, or its tenant's part of it, has no room for `waiting` more."""
    if not waiting:
        return None
    requests_max, bytes_max = facts.priority_class.max_queued_requests, facts.priority_class.max_queued_bytes
    more_bytes = waiting * facts.size_bytes
    if view.class_requests + waiting > requests_max or view.class_bytes + more_bytes > bytes_max:
        return Outcome.REJECTED_QUEUE_FULL, "", _filled(view.class_requests, requests_max, view.class_bytes, bytes_max)
    own_max = max(1, math.floor(facts.terms.queue_share * requests_max))
    own_bytes_max = math.floor(facts.terms.queue_share * bytes_max)
    if view.tenant_requests + waiting > own_max or view.tenant_bytes + more_bytes > own_bytes_max:
        error = "Your part of this priority class's queue is full; try again later."
        numbers = _filled(view.tenant_requests, own_max, view.tenant_bytes, own_bytes_max)
        return Outcome.REJECTED_QUEUE_FULL, error, numbers
    return None


def _filled(requests: int, requests_max: int, size_bytes: int, bytes_max: int) -> dict[str, float]:
    return {"queued": requests, "bound": requests_max, "queued_bytes": size_bytes, "bound_bytes": bytes_max}


def _too_late(facts: RequestFacts, view: AdmissionView, *, starts: bool) -> _Refused | None:
    """Whether it cannot be begun within its class's longest wait, or not be served within its own times."""
    pace, terms = view.pace, facts.terms
    wait_s = 0.0 if starts else predicted_wait_s(pace, facts.service)
    if wait_s is not None and wait_s > WAIT_MARGIN * view.longest_wait_s:
        numbers = {"predicted_wait_s": round(wait_s, 1), "longest_wait_s": view.longest_wait_s, "ahead": pace.ahead}
        return Outcome.REJECTED_WAIT, "", numbers
    prompts = pace.prompts
    if prompts is not None and not begins_in_time(prompts, view.longest_wait_s):
        numbers = {"prompts_ahead_s": round(prompts.ahead_s, 2), "own_prompt_s": round(prompts.own_s, 2)}
        return Outcome.REJECTED_WAIT, "", numbers | {"longest_wait_s": view.longest_wait_s}
    first_token_s = facts.age_s + (wait_s or 0.0) + (pace.first_token_s or 0.0)
    end_s = first_token_s + (facts.output_tokens - 1) * (pace.next_token_s or 0.0)
    for name, predicted_s, allowed_s in (
        ("first_token", first_token_s, terms.ttft_slo_s),
        ("end", end_s, terms.timeout_s),
    ):
        if allowed_s is not None and predicted_s > allowed_s:
            numbers = {f"predicted_{name}_s": round(predicted_s, 2), f"allowed_{name}_s": allowed_s}
            what = name.replace("_", " ")
            error = (
                f"Its {what} is expected {predicted_s:.2f} s after it came, and it allows {allowed_s:g} s: "
                "allow more time or try again later."
            )
            return Outcome.REJECTED_DEADLINE, error, numbers | {"ahead": pace.ahead}
    return None


def predicted_wait_s(pace: Pace, service: int) -> float | None:
    """How long a request of `service` will wait for a replica; None where nothing has been measured."""
    waits_s = []
    if pace.drain_per_s:
        waits_s.append((pace.ahead + service) / pace.drain_per_s)
    if pace.share_per_s:
        waits_s.append(max(pace.ageing_after_s, (pace.ahead + service) / pace.share_per_s))
    return min(waits_s, default=None)


def begins_in_time(prompts: Prompts, longest_wait_s: float) -> bool:
    """Whether a replica where these are run begins the request soon enough for it to be let in."""
    return prompts.ahead_s <= begun_within_s(longest_wait_s, prompts.own_s)


def begun_within_s(longest_wait_s: float, own_prompt_s: float) -> float:
    """How long the prompts ahead of a request may take on its replica for it to be let in."""
    return max(WAIT_MARGIN * longest_wait_s - own_prompt_s, longest_wait_s / 2)


def evenly_ahead(backlog: int, own: int, weight: float, waiting_weight: float) -> float:
    """Service in front of a request in a band whose tenants are served evenly.

    Args:
        backlog: Of the whole band.
        own: Of the request's tenant, the request with it.
        weight: The tenant's.
        waiting_weight: Of all tenants that wait, this one with them.
    """
    return min(float(backlog), own * waiting_weight / weight)


def backlog_seconds(backlog: float, drain_per_s: float | None) -> float:
    """How long a queue takes to drain at its measured rate; endless where nothing drains, a guess where nothing has been
    measured."""
    if not backlog:
        return 0.0
    if drain_per_s is None:
        return UNMEASURED_RETRY_S
    return backlog / drain_per_s if drain_per_s > 0 else math.inf


def retry_after_s(wait_s: float, rng: random.Random) -> int:
    """Whole seconds in 1..60, spread by ±20 % so that clients that were sent away together do not return together."""
    capped_s = min(wait_s, RETRY_CAP_S / (1 + JITTER))
    return max(1, min(RETRY_CAP_S, round(capped_s * rng.uniform(1 - JITTER, 1 + JITTER))))
