"""Replicas that fail: they are put out for a while, and let in again by way of one request at a time.

Owns: what is held against a replica, and when that puts it out. Pure: values in, a value out; chance is an argument.
Invariant: a replica's record is bounded.

What counts are faults of different requests in a row: none of them is held against a replica once a request has ended well
there. (Broken links have a window of time instead: between two of them requests may well end.) An error that an engine
reports may be the fault of the request as well as of the replica, so errors of one tenant alone count half, and one of a
request that has erred on another replica puts this one out only together with a later fault (`losses`). What a client
does (400s, 429s, hanging up, reading slowly) and what a replica has the right to say (full, draining) is no fault.

A replica that is put out keeps the work that it has. When its time is over it is half open: it gets one request, and
the next when that is over; the first that has a token lets it in, a fault puts it out for longer. That at most half of
the replicas are out at once is the fleet's to see to.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from cluster.config import RouterConfig
from cluster.types import RequestId

JITTER = 0.2
"""A replica is out for up to so much less than its time, so that those put out together do not return together."""


class Fault(StrEnum):
    ENGINE_ERROR = "engine_error"
    """It ended a request with an error."""
    BROKEN = "broken"
    """It said what no correct replica says."""
    GAP = "gap"
    """Tokens were missing, and it did not send them when asked."""
    OVERFLOW = "overflow"
    """It gave up a stream for want of room for its tokens."""
    LINK = "link"
    """The link to it broke."""


class Mark(NamedTuple):
    """One fault. Times are monotonic."""

    at_s: float
    fault: Fault
    request_id: RequestId | None = None
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Record:
    """What is held against one incarnation of a replica."""

    marks: tuple[Mark, ...] = ()
    out_until_s: float | None = None
    """While it is put out; past that moment it is half open."""
    times_out: int = 0
    """In a row."""
    let_in_s: float = 0.0
    """When it was let in last."""


CLEAN = Record()


def after_fault(
    record: Record, mark: Mark, config: RouterConfig, rng: random.Random, *, may_put_out: bool, probe: bool
) -> Record:
    """What the record is then.

    Args:
        may_put_out: It would not be one too many.
        probe: It was the one request that a half open replica gets. Other work that it still has says nothing new.
    """
    now_s = mark.at_s
    if record.out_until_s is not None:
        half_open = now_s >= record.out_until_s
        return _put_out(record, now_s, config, rng) if half_open and (probe or mark.fault is Fault.LINK) else record
    since_s = now_s - config.outlier_window_s
    kept = [m for m in record.marks if m.at_s >= since_s and (m.request_id is None or m.request_id != mark.request_id)]
    record = replace(record, marks=(*kept, mark)[-2 * config.outlier_faults :])
    if may_put_out and _weight(record) >= config.outlier_faults:
        return _put_out(record, now_s, config, rng)
    return record


def after_success(record: Record, now_s: float, *, probe: bool) -> Record:
    """A request has ended well there, or the one request that it gets has had a token."""
    if record.out_until_s is None:
        return replace(record, marks=tuple(m for m in record.marks if m.fault is Fault.LINK))
    return let_in(record, now_s) if probe and now_s >= record.out_until_s else record


def let_in(record: Record, now_s: float) -> Record:
    """Nothing is held against it but that it was out."""
    return Record(times_out=record.times_out, let_in_s=now_s)


def _weight(record: Record) -> float:
    errors = [m for m in record.marks if m.fault is Fault.ENGINE_ERROR]
    of_one = len({m.tenant for m in errors}) == 1
    return len(record.marks) - (len(errors) / 2 if of_one else 0)


def _put_out(record: Record, now_s: float, config: RouterConfig, rng: random.Random) -> Record:
    again = record.out_until_s is not None or now_s < record.let_in_s + config.out_longest_s
    times = record.times_out + 1 if again else 1
    for_s = min(config.out_longest_s, config.out_for_s * 2.0 ** min(times - 1, 60))
    return Record(out_until_s=now_s + for_s * rng.uniform(1 - JITTER, 1), times_out=times, let_in_s=record.let_in_s)
