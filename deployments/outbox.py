"""What a replica still owes one router: the tokens of its attempts, and how far each has been sent.

Owns: the log of every attempt of one router, and the bound on what is unsent. Imports `cluster.types` only; no sockets.

A step never waits for a slow router: tokens are recorded here and leave when the link can take them, as many steps to a
frame as have gathered. A log stays until its attempt is forgotten, so that any part can be sent again, with the logprobs
that it had. What is unsent is bounded in bytes; beyond the bound the most backlogged attempts are given up, one after
the other.

Invariant: for each attempt, sent tokens + unsent tokens = recorded tokens, in order.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from cluster.types import FinishReason, RequestId, TokenDelta, TokenLogprob

AttemptKey = tuple[RequestId, int]

_TOKEN_BYTES = 4
"""Charged for a token beside its text; the msgpack of an id is at most five."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(TokenLogprob).decode


class _AttemptLog:
    """All tokens of one attempt, with the index up to which they have been sent."""

    __slots__ = (
        "attempt",
        "cached_tokens",
        "error",
        "finish",
        "first_index",
        "ids",
        "logprobs",
        "pieces",
        "prompt_logprobs",
        "prompt_sent",
        "request_id",
        "sent",
    )

    def __init__(self, request_id: RequestId, attempt: int, first_index: int) -> None:
        self.request_id = request_id
        self.attempt = attempt
        self.first_index = first_index
        self.ids: list[int] = []
        self.pieces: list[str] = []
        self.logprobs: list[bytes] = []
        """Of each token, where the request asked for them; encoded, an eighth of what the objects hold."""
        self.prompt_logprobs: list[bytes] = []
        self.prompt_sent = False
        self.sent = 0
        """Tokens of `ids` that have been put in a frame."""
        self.finish: FinishReason | None = None
        self.error = ""
        self.cached_tokens = 0

    @property
    def unsent_bytes(self) -> int:
        pieces, logprobs = self.pieces[self.sent :], self.logprobs[self.sent :]
        size = sum(map(len, pieces)) + _TOKEN_BYTES * len(pieces) + sum(map(len, logprobs))
        return size if self.prompt_sent else size + sum(map(len, self.prompt_logprobs))

    @property
    def held_bytes(self) -> int:
        """All that it holds, by the same measure."""
        parts = (self.pieces, self.logprobs, self.prompt_logprobs)
        return sum(sum(map(len, part)) for part in parts) + _TOKEN_BYTES * len(self.ids)

    def record(self, delta: TokenDelta) -> int:
        """Add a step's tokens; returns the bytes that they are charged."""
        if not self.ids:
            self.cached_tokens = delta.cached_tokens
        self.ids.extend(delta.token_ids)
        self.pieces.extend(delta.pieces)
        size = sum(map(len, delta.pieces)) + _TOKEN_BYTES * len(delta.pieces)
        if delta.logprobs:
            logprobs = [_encode(logprob) for logprob in delta.logprobs]
            self.logprobs.extend(logprobs)
            size += sum(map(len, logprobs))
        if delta.prompt_logprobs:
            self.prompt_logprobs = [_encode(logprob) for logprob in delta.prompt_logprobs]
            size += sum(map(len, self.prompt_logprobs))
        if delta.finish is not None:
            self.finish, self.error = delta.finish, delta.error
        return size

    def rewind(self, position: int) -> None:
        """What lies from token `position` on is unsent again, and before the first token what is said of the prompt."""
        self.sent = position
        self.prompt_sent = self.prompt_sent and position > 0

    def take(self) -> TokenDelta:
        start, self.sent = self.sent, len(self.ids)
        prompt_logprobs = () if self.prompt_sent else tuple(map(_decode, self.prompt_logprobs))
        self.prompt_sent = self.prompt_sent or bool(prompt_logprobs)
        return TokenDelta(
            request_id=self.request_id,
            attempt=self.attempt,
            index=self.first_index + start,
            token_ids=tuple(self.ids[start:]),
            pieces=tuple(self.pieces[start:]),
            finish=self.finish,
            error=self.error,
            logprobs=tuple(map(_decode, self.logprobs[start:])),
            prompt_logprobs=prompt_logprobs,
            cached_tokens=self.cached_tokens if start == 0 else 0,
        )


class Outbox:
    """The logs of one router's attempts.

    `finished_kept` attempts that have ended and been sent, and at most `max_unsent_bytes` of them, are kept for a
    resend, the oldest dropped first; the router continues a request whose log was dropped from its journal.
    """

    def __init__(self, max_unsent_bytes: int, finished_kept: int = 1024) -> None:
        self._max_unsent_bytes = max_unsent_bytes
        self._finished_kept = finished_kept
        self._finished_bytes = 0
        self._logs: dict[AttemptKey, _AttemptLog] = {}
        self._dirty: dict[AttemptKey, _AttemptLog] = {}
        self._finished: OrderedDict[AttemptKey, int] = OrderedDict()
        """The bytes of each log that has its end, the oldest end first."""
        self._unsent_bytes = 0

    @property
    def unsent_bytes(self) -> int:
        return self._unsent_bytes

    @property
    def live(self) -> list[AttemptKey]:
        """Attempts that the engine still works on."""
        return [key for key, log in self._logs.items() if log.finish is None]

    def __contains__(self, key: AttemptKey) -> bool:
        return key in self._logs

    def open(self, request_id: RequestId, attempt: int, first_index: int) -> None:
        """Begin a log; its first token has index `first_index`."""
        self._logs[request_id, attempt] = _AttemptLog(request_id, attempt, first_index)

    def record(self, delta: TokenDelta) -> bool:
        """Add a step's tokens of one attempt. False if there is no such log (it was forgotten)."""
        key = (delta.request_id, delta.attempt)
        log = self._logs.get(key)
        if log is None or log.finish is not None:
            return False
        expected = log.first_index + len(log.ids)
        if delta.index != expected:
            raise AssertionError(f"attempt {key} went from token {expected} to {delta.index}")
        self._unsent_bytes += log.record(delta)
        if delta.finish is not None:
            self._finished[key] = held_bytes = log.held_bytes
            self._finished_bytes += held_bytes
        self._dirty[key] = log
        return True

    def rewind(self, request_id: RequestId, attempt: int, index: int) -> bool:
        """Send again from token `index` on. False if this attempt or index is not known."""
        log = self._logs.get((request_id, attempt))
        if log is None:
            return False
        position = index - log.first_index
        if not 0 <= position <= len(log.ids):
            return False
        before = log.unsent_bytes
        log.rewind(position)
        self._unsent_bytes += log.unsent_bytes - before
        self._dirty[request_id, attempt] = log
        return True

    def take(self) -> tuple[TokenDelta, ...]:
        """All that is unsent, one delta an attempt; from here on it counts as sent."""
        deltas = tuple(log.take() for log in self._dirty.values())
        self._dirty.clear()
        self._unsent_bytes = 0
        while len(self._finished) > self._finished_kept or self._finished_bytes > self._max_unsent_bytes:
            key, size = self._finished.popitem(last=False)
            self._finished_bytes -= size
            del self._logs[key]
        return deltas

    def forget(self, request_id: RequestId, attempt: int) -> None:
        """Drop a log and what is unsent of it."""
        key = (request_id, attempt)
        log = self._logs.pop(key, None)
        if log is None:
            return
        self._unsent_bytes -= log.unsent_bytes
        self._dirty.pop(key, None)
        self._finished_bytes -= self._finished.pop(key, 0)

    def overflowing(self) -> list[AttemptKey]:
        """The attempts to give up so that the bound holds again: most unsent bytes first, ties by id."""
        excess = self._unsent_bytes - self._max_unsent_bytes
        if excess <= 0:
            return []
        victims: list[AttemptKey] = []
        for key, log in sorted(self._dirty.items(), key=lambda item: (-item[1].unsent_bytes, item[0])):
            if excess <= 0:
                break
            victims.append(key)
            excess -= log.unsent_bytes
        return victims
