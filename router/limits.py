"""What one key may ask for, and how much of that is left.

Owns: whether a request is within the limits of its key, and the counts from which that is decided. Imports errors and
admission's `Retry-After`. Time is an argument everywhere. Invariants: in any time t a key is given at most
burst + rate x t; what a request took beyond its use goes back once, when it ends; a key's counts are forgotten once they
say what they would say of a key never seen.

Each router counts for itself.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import msgspec

from cluster.types import Outcome
from router.admission import retry_after_s
from router.errors import DROPPED_HEADER, ApiError
from router.outcomes import Ending

BURST_S = 1.0
"""Requests that were not made for so long may be made at once; one always may."""
TOKENS_BURST_S = 60.0
STREAMS_RETRY_S = 1.0
"""When another stream ends is not known."""
FORGET_EVERY_S = 60.0
DROPPED_REASON = "rejected-rate-limited"

_REQUESTS_HEADERS = ("x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests")
_TOKENS_HEADERS = ("x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens")
_Rate = Annotated[float, msgspec.Meta(gt=0, le=1e6)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=10**12)]


class Limits(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Of one key; None has no limit."""

    requests_per_s: _Rate | None = None
    tokens_per_min: _Count | None = None
    """Prompt and output together: the prompt once, the output of every choice."""
    max_streams: _Count | None = None
    """Requests that are being answered at once, streamed or whole, each with all its choices."""


NO_LIMITS = Limits()


class Limit(StrEnum):
    """The names of `Limits`, as a client is told them."""

    REQUESTS = "requests_per_s"
    TOKENS = "tokens_per_min"
    STREAMS = "max_streams"


@dataclass(frozen=True, slots=True)
class Exceeded:
    limit: Limit
    wait_s: float
    """Until it would be let in; endless where it never would."""


class Bucket:
    """Fills at a rate up to its burst, and is full at first. Time never runs backwards in it."""

    __slots__ = ("_at_s", "_level", "_rate_per_s", "burst")

    def __init__(self, rate_per_s: float, burst: float, now_s: float) -> None:
        self._rate_per_s = rate_per_s
        self.burst = burst
        self._level = burst
        self._at_s = now_s

    def level(self, now_s: float) -> float:
        return min(self.burst, self._level + max(0.0, now_s - self._at_s) * self._rate_per_s)

    def take(self, amount: float, now_s: float) -> float:
        """Take so much, or nothing where it holds less; returns in how many seconds it will hold it, 0 where it did."""
        level = self.level(now_s)
        if amount > level:
            return math.inf if amount > self.burst else (amount - level) / self._rate_per_s
        self._set(level - amount, now_s)
        return 0.0

    def give(self, amount: float, now_s: float) -> None:
        """Put back what was taken."""
        self._set(self.level(now_s) + amount, now_s)

    def figures(self, now_s: float) -> tuple[str, str, str]:
        """The most that it holds, what it holds, and in how many seconds it is full."""
        level = self.level(now_s)
        return str(int(self.burst)), str(int(level)), f"{(self.burst - level) / self._rate_per_s:.3f}s"

    def _set(self, level: float, now_s: float) -> None:
        self._level = level  # what is above the burst is cut off where it is read
        self._at_s = max(self._at_s, now_s)


class _Account:
    """The counts of one key."""

    __slots__ = ("limits", "requests", "streams", "tokens")

    def __init__(self, limits: Limits, now_s: float) -> None:
        self.streams = 0
        self.adopt(limits, now_s)

    def adopt(self, limits: Limits, now_s: float) -> None:
        """Count by these from now on."""
        rate, minute = limits.requests_per_s, limits.tokens_per_min
        self.limits = limits
        self.requests = None if rate is None else Bucket(rate, max(1.0, rate * BURST_S), now_s)
        self.tokens = None if minute is None else Bucket(minute / TOKENS_BURST_S, minute, now_s)

    def begin(self, now_s: float) -> Exceeded | None:
        """Count one request, or nothing."""
        most = self.limits.max_streams
        if most is not None and self.streams >= most:
            return Exceeded(Limit.STREAMS, STREAMS_RETRY_S)
        if self.requests is not None and (wait_s := self.requests.take(1, now_s)):
            return Exceeded(Limit.REQUESTS, wait_s)
        self.streams += 1
        return None

    def charge(self, tokens: int, now_s: float) -> Exceeded | None:
        """Take so many tokens, or none."""
        if self.tokens is not None and (wait_s := self.tokens.take(tokens, now_s)):
            return Exceeded(Limit.TOKENS, wait_s)
        return None

    def end(self, unused_tokens: int, now_s: float) -> None:
        self.streams -= 1
        if self.tokens is not None:
            self.tokens.give(unused_tokens, now_s)

    def is_as_new(self, now_s: float) -> bool:
        full = all(b is None or b.level(now_s) >= b.burst for b in (self.requests, self.tokens))
        return full and not self.streams


class Lease:
    """One request's hold on its key's limits, from its arrival to `end`, which must come once in every ending."""

    __slots__ = ("_account", "_charged", "_ended", "_rng", "used_tokens")

    def __init__(self, account: _Account, rng: random.Random) -> None:
        self._account = account
        self._rng = rng
        self._charged = 0
        self._ended = False
        self.used_tokens = 0
        """Of those that were taken; what remains goes back at the end."""

    def charge(self, tokens: int, now_s: float) -> None:
        """Take the most tokens that the request may use.

        Raises:
            ApiError: 429 where the key has not so many left, 400 where it never will.
        """
        if exceeded := self._account.charge(tokens, now_s):
            raise _refusal(exceeded, self._account.limits, self._rng)
        self._charged += tokens

    def headers(self, now_s: float) -> list[tuple[str, str]]:
        """OpenAI's, of the limits that the key has."""
        headers: list[tuple[str, str]] = []
        if self._account.requests is not None:
            headers += zip(_REQUESTS_HEADERS, self._account.requests.figures(now_s), strict=True)
        if self._account.tokens is not None:
            headers += zip(_TOKENS_HEADERS, self._account.tokens.figures(now_s), strict=True)
        return headers

    def end(self, now_s: float) -> None:
        assert not self._ended, "a lease ends once"
        self._ended = True
        self._account.end(max(0, self._charged - self.used_tokens), now_s)


class Limiter:
    """The counts of every key that was seen lately."""

    def __init__(self, rng: random.Random) -> None:
        """`rng` spreads `Retry-After`."""
        self._rng = rng
        self._accounts: dict[str, _Account] = {}
        self._forget_at_s = -math.inf

    def __len__(self) -> int:
        return len(self._accounts)

    def begin(self, key_id: str, limits: Limits, now_s: float) -> Lease:
        """Take note of a request's arrival.

        Raises:
            ApiError: 429 where its key makes too many, or has too many being answered.
        """
        if now_s >= self._forget_at_s:
            self._forget(now_s)
        account = self._accounts.get(key_id)
        if account is None:
            account = self._accounts[key_id] = _Account(limits, now_s)
        elif account.limits != limits:
            account.adopt(limits, now_s)
        if exceeded := account.begin(now_s):
            raise _refusal(exceeded, limits, self._rng)
        return Lease(account, self._rng)

    def _forget(self, now_s: float) -> None:
        self._accounts = {key_id: a for key_id, a in self._accounts.items() if not a.is_as_new(now_s)}
        self._forget_at_s = now_s + FORGET_EVERY_S


def used_tokens(endings: Iterable[Ending | None]) -> int:
    """What the choices of one request count in the end, the prompt once.

    An answer that did not begin counts nothing, unless it was its client that ended it: the prompt may have been
    computed by then.
    """
    prompt = output = 0
    for ending in endings:
        if ending is not None and (ending.completion_tokens or ending.outcome in {Outcome.FINISHED, Outcome.CANCELLED}):
            prompt = ending.prompt_tokens
            output += ending.completion_tokens
    return prompt + output


def _refusal(exceeded: Exceeded, limits: Limits, rng: random.Random) -> ApiError:
    match exceeded.limit:
        case Limit.REQUESTS:
            may = f"make {limits.requests_per_s:g} requests a second"
        case Limit.TOKENS:
            may = f"use {limits.tokens_per_min} tokens a minute, prompt and max_tokens of each choice together"
        case Limit.STREAMS:
            may = f"have {limits.max_streams} requests answered at once"
    if math.isinf(exceeded.wait_s):
        message = f"This key may {may} ({exceeded.limit.value}); this request alone asks for more: lower max_tokens."
        return ApiError(400, message, param="max_tokens", code="request_too_large")
    message = f"This key may {may} ({exceeded.limit.value}); try again later."
    wait = str(retry_after_s(exceeded.wait_s, rng))
    headers = {"retry-after": wait, DROPPED_HEADER: DROPPED_REASON}
    return ApiError(429, message, code="rate_limit_exceeded", headers=headers)
