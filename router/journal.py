"""The journal of one live request: what its client has, from which it can be continued anywhere.

Owns: fencing of deltas by (attempt, index), the emitted token ids, and the bounded list of decisions about the request.
Imports types only. Invariants: emitted ids are consecutive from 0 and never change; a delta of another attempt than the
current one changes nothing; nothing is taken past a gap.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from cluster.types import FinishReason, Request, TokenDelta, TokenLogprob

MAX_DECISIONS = 64
"""Decisions kept per request: the first half and the latest half of them."""


class Scores(msgspec.Struct, frozen=True):
    """What a delta says beside its text, to a client that asked for logprobs."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    """One per token."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """Those of the prompt, with the first that a request has; never again, whatever becomes of its attempts."""


class Accepted(msgspec.Struct, frozen=True):
    """New to the client: these ids, whose text is `text`; `finish` ends the attempt."""

    token_ids: tuple[int, ...]
    text: str
    finish: FinishReason | None
    scores: Scores | None = None


@dataclass(frozen=True, slots=True)
class Stale:
    """Of an attempt that is not the current one."""


@dataclass(frozen=True, slots=True)
class Repeat:
    """All of it is journaled already."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Tokens from `index` on are missing; the delta was not taken and will come again with the answer."""

    index: int


@dataclass(frozen=True, slots=True)
class Broken:
    """No correct replica says this: the attempt cannot be trusted."""

    why: str


_STALE, _REPEAT = Stale(), Repeat()


class Journal:
    """What one request has emitted, over all its attempts."""

    __slots__ = (
        "_attempt",
        "_awaited_prompt",
        "_emitted",
        "_last_attempt",
        "_max_tokens",
        "_plain_below",
        "_scored",
        "attempts",
    )

    def __init__(self, request: Request) -> None:
        sampling = request.sampling
        self._max_tokens = sampling.max_tokens
        self._scored = sampling.logprobs is not None
        self._awaited_prompt = len(request.prompt_ids) - 1 if sampling.prompt_logprobs is not None else 0
        self._plain_below = 0 if self._scored or self._awaited_prompt else sampling.max_tokens
        """Tokens of a lower index have nothing to say but themselves."""
        self._emitted: list[int] = []
        self._last_attempt = 0
        self._attempt: int | None = None
        self.attempts = 0
        """Attempts begun so far."""

    @property
    def attempt(self) -> int | None:
        """The attempt whose deltas count; None while the request is with no replica."""
        return self._attempt

    @property
    def next_index(self) -> int:
        return len(self._emitted)

    @property
    def awaits_prompt(self) -> bool:
        """Whether the logprobs of the prompt have been asked for and have not come."""
        return self._awaited_prompt > 0

    @property
    def complete(self) -> bool:
        """Whether no attempt could add anything."""
        return len(self._emitted) >= self._max_tokens and not self._awaited_prompt

    @property
    def emitted_ids(self) -> tuple[int, ...]:
        return tuple(self._emitted)

    def promise(self) -> int:
        """A number for an attempt that may take the open one's place. No other attempt gets it, whatever comes of it."""
        self._last_attempt += 1
        return self._last_attempt

    def begin(self, promised: int | None = None) -> int:
        """Open the next attempt and return its number; the first is 1."""
        assert self._attempt is None, "one attempt at a time"
        self._attempt = self.promise() if promised is None else promised
        self.attempts += 1
        return self._attempt

    def close(self) -> None:
        """The current attempt is over: whatever it still says is stale."""
        self._attempt = None

    def take_next(self, delta: TokenDelta, below: int) -> bool:
        """Journal a delta that is what almost all are: the one next token of the open attempt, unscored, no end and at an
        index below `below`. False: nothing was taken, and `accept` judges it."""
        emitted = self._emitted
        have = len(emitted)
        if (
            delta.index != have
            or have >= below
            or have >= self._plain_below
            or delta.attempt != self._attempt
            or delta.finish is not None
            or len(delta.token_ids) != 1
            or len(delta.pieces) != 1
        ):
            return False
        emitted.append(delta.token_ids[0])
        return True

    def accept(self, delta: TokenDelta) -> Accepted | Stale | Repeat | Gap | Broken:
        """Judge a delta, and journal what is new in it."""
        if delta.attempt != self._attempt:
            return _STALE
        count, have = len(delta.token_ids), len(self._emitted)
        if count != len(delta.pieces):
            return Broken(f"{count} tokens with {len(delta.pieces)} pieces of text")
        if delta.index > have:
            return Gap(have)
        end = delta.index + count
        if end > self._max_tokens:
            return Broken(f"token {end} where max_tokens is {self._max_tokens}")
        if end < have or (
            end == have and delta.finish is None and not (self._awaited_prompt and delta.prompt_logprobs)
        ):
            return _REPEAT if delta.finish is None else Broken(f"finished at {end}, with {have} tokens sent before")
        skip = have - delta.index
        scores = None
        if self._scored or self._awaited_prompt:
            if why := self._unscored(delta):
                return Broken(why)
            prompt_logprobs = delta.prompt_logprobs if self._awaited_prompt else ()
            scores = Scores(delta.token_ids[skip:], delta.logprobs[skip:], prompt_logprobs)
            self._awaited_prompt -= len(prompt_logprobs)
            if not self._scored and not self._awaited_prompt:
                self._plain_below = self._max_tokens
        token_ids, pieces = (delta.token_ids[skip:], delta.pieces[skip:]) if skip else (delta.token_ids, delta.pieces)
        self._emitted.extend(token_ids)
        return Accepted(token_ids, pieces[0] if len(pieces) == 1 else "".join(pieces), delta.finish, scores)

    def _unscored(self, delta: TokenDelta) -> str:
        """What is missing of the logprobs that were asked for; empty where nothing is."""
        if self._scored and len(delta.logprobs) != len(delta.token_ids):
            return f"{len(delta.token_ids)} tokens with {len(delta.logprobs)} logprobs"
        whole = delta.finish in (FinishReason.STOP, FinishReason.LENGTH) or delta.token_ids or delta.prompt_logprobs
        if self._awaited_prompt and whole and len(delta.prompt_logprobs) != self._awaited_prompt:
            return f"{len(delta.prompt_logprobs)} logprobs of a prompt that has {self._awaited_prompt}"
        return ""


class Decision(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One thing that was decided about a request, with the numbers used; `at_ms` counts from its arrival."""

    at_ms: int
    event: str
    replica: str = ""
    why: str = ""
    numbers: dict[str, float] = {}  # msgspec copies it for each instance


class DecisionLog:
    """The decisions about one request in order, bounded: of too many, the middle is left out and counted."""

    __slots__ = ("_first", "_latest", "left_out")

    def __init__(self) -> None:
        self._first: list[Decision] = []
        self._latest: list[Decision] = []
        self.left_out = 0

    def add(self, decision: Decision) -> None:
        half = MAX_DECISIONS // 2
        if len(self._first) < half:
            self._first.append(decision)
            return
        self._latest.append(decision)
        if len(self._latest) > half:
            del self._latest[0]
            self.left_out += 1

    @property
    def decisions(self) -> tuple[Decision, ...]:
        return (*self._first, *self._latest)
