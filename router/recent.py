"""What was decided last, about whichever request, for whoever watches the router.

Owns: that memory, its sequence numbers, and the forms in which it is asked for and told. Imports the journal's values
and the one form of errors. Single writer. Invariants: nothing of what a request says is in it; it is bounded in decisions and in bytes, the oldest goes
first; numbers rise by one with each decision, so that who asks on from where it was knows how many it has missed.

A decision is kept as it was made, with words that live elsewhere anyway: it is made into what is told when it is asked for.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Annotated

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cluster.types import Request
from router.errors import ApiError
from router.journal import Decision

DECISIONS_MAX = 4096
BYTES_MAX = 4 * 2**20
BYTES_PER_DECISION = 384
"""Of keeping one, with the words that it shares with its request and would outlive it."""
BYTES_PER_NUMBER = 128
"""With its name, which may have come with a proposal."""
ASKED_MAX = 1000
"""Decisions in one answer."""
_NAME_CHARS = 64
"""Of a parameter's name, told back to who asked with it."""

Note = Callable[[Request, Decision, float], None]
"""(what it is about, what was decided, when by the monotonic clock)."""


class DecisionsQuery(BaseModel):
    """What of the newest decisions is asked for."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    after: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = Field(
        None, description="`last` of an earlier answer: tell what came after it. Absent, the newest are told."
    )
    limit: int = Field(200, ge=1, le=ASKED_MAX, description="Decisions to tell, of more the newest.")

    @classmethod
    def of(cls, pairs: Iterable[tuple[str, str]]) -> DecisionsQuery:
        """What the names and values of a query ask for.

        Raises:
            ApiError: 400 naming the parameter.
        """
        given: dict[str, str] = {}
        for name, value in pairs:
            if given.setdefault(name, value) != value:
                raise ApiError(400, f"{name} is given twice, with two values.", param=name, code="invalid_value")
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            name = str(first["loc"][0])
            if name not in cls.model_fields:
                name = name[:_NAME_CHARS]
                raise ApiError(400, f"Unknown parameter {name!r}.", param=name, code="unknown_parameter") from None
            raise ApiError(400, f"Invalid {name!r}: {first['msg']}.", param=name, code="invalid_value") from None


class Told(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One decision, as it is told."""

    sequence: int
    at_unix_s: float
    request_id: str
    tenant: str
    priority_class: str
    model: str
    event: str
    replica: str = ""
    why: str = ""
    numbers: dict[str, float] = {}  # msgspec copies it for each instance


class RecentDecisions(msgspec.Struct, frozen=True, kw_only=True):
    """The newest decisions of one router, the oldest of them first."""

    feed: str
    """Another one: the router has started anew, and its numbers too."""
    last: int
    """Number of the newest decision that was ever made; 0 before the first. Ask on with `after` set to it."""
    missed: int
    """Made after the one that was asked on from, and not told: forgotten by now, or above the limit."""
    decisions: tuple[Told, ...]


_Kept = tuple[float, str, str, str, str, Decision]
"""When, the request's id, its tenant, its class, its model, what."""


class Recent:
    """The newest decisions of all models of one router."""

    __slots__ = ("_bytes", "_bytes_max", "_decisions_max", "_kept", "feed", "last")

    def __init__(self, decisions_max: int = DECISIONS_MAX, bytes_max: int = BYTES_MAX) -> None:
        self.feed = uuid.uuid4().hex[:12]
        self.last = 0
        self._decisions_max = decisions_max
        self._bytes_max = bytes_max
        self._bytes = 0
        self._kept: deque[_Kept] = deque()

    def __len__(self) -> int:
        return len(self._kept)

    def noting(self, model: str) -> Note:
        """What takes the decisions about this model's requests."""

        def note(request: Request, decision: Decision, now_s: float) -> None:
            self._kept.append((now_s, request.request_id, request.tenant, request.priority_class, model, decision))
            self._bytes += _size_bytes(decision)
            self.last += 1
            while len(self._kept) > self._decisions_max or self._bytes > self._bytes_max:
                self._bytes -= _size_bytes(self._kept.popleft()[-1])

        return note

    def after(self, sequence: int | None, limit: int, unix_minus_monotonic_s: float) -> RecentDecisions:
        """The newest `limit` of what came after `sequence`; of all, where that is None or has not been reached yet.

        Args:
            unix_minus_monotonic_s: Added to the times, which are of the monotonic clock.
        """
        if sequence is not None and sequence > self.last:  # of another router, or of this one before it started anew
            sequence = None
        wanted = self.last if sequence is None else self.last - sequence
        count = min(wanted, limit, len(self._kept))
        first = self.last - count + 1
        newest = islice(self._kept, len(self._kept) - count, None)
        return RecentDecisions(
            feed=self.feed,
            last=self.last,
            missed=0 if sequence is None else wanted - count,
            decisions=tuple(_told(number, kept, unix_minus_monotonic_s) for number, kept in enumerate(newest, first)),
        )


def _size_bytes(decision: Decision) -> int:
    return BYTES_PER_DECISION + len(decision.why) * 4 + BYTES_PER_NUMBER * len(decision.numbers)


def _told(sequence: int, kept: _Kept, unix_minus_monotonic_s: float) -> Told:
    at_s, request_id, tenant, priority_class, model, decision = kept
    return Told(
        sequence=sequence,
        at_unix_s=round(at_s + unix_minus_monotonic_s, 3),
        request_id=request_id,
        tenant=tenant,
        priority_class=priority_class,
        model=model,
        event=decision.event,
        replica=decision.replica,
        why=decision.why,
        numbers=decision.numbers,
    )
