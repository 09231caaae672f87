"""What a replica still owes one router: the tokens of its attempts, and how far each has been sent.

Owns: the log of every attempt of one router, and the bound on what is unsent. Imports `cluster.types` only; no sockets.

A step never waits for a slow router: tokens are recorded here and leave when the link can take them, as many steps to a
frame as have gathered. A log stays until its attempt is forgotten, so that any part can be sent again. What is unsent
is bounded in bytes; beyond the bound the most backlogged attempts are given up, one after the other.

Invariant: for each attempt, sent tokens + unsent tokens = recorded tokens, in order.
"""

from __future__ import annotations

from collections import OrderedDict

from cluster.types import FinishReason, RequestId, TokenDelta

AttemptKey = tuple[RequestId, int]

_TOKEN_BYTES = 4
"""Charged for a token beside its text; the msgpack of an id is at most five."""


class _AttemptLog:
    """All tokens of one attempt, with the index up to which they have been sent."""

    __slots__ = (
        "attempt",
        "choice",
        "error",
        "finish",
        "finish_sent",
        "first_index",
        "ids",
        "pieces",
        "request_id",
        "sent",
    )

    def __init__(self, request_id: RequestId, attempt: int, first_index: int) -> None:
        self.request_id = request_id
        self.attempt = attempt
        self.choice = 0
        self.first_index = first_index
        self.ids: list[int] = []
        self.pieces: list[str] = []
        self.sent = 0
        """Tokens of `ids` that have been put in a frame."""
        self.finish: FinishReason | None = None
        self.finish_sent = False
        self.error = ""

    @property
    def unsent_bytes(self) -> int:
        return sum(len(p) + _TOKEN_BYTES for p in self.pieces[self.sent :])

    def take(self) -> TokenDelta:
        start, self.sent = self.sent, len(self.ids)
        self.finish_sent = self.finish is not None
        return TokenDelta(
            request_id=self.request_id,
            choice=self.choice,
            attempt=self.attempt,
            index=self.first_index + start,
            token_ids=tuple(self.ids[start:]),
            pieces=tuple(self.pieces[start:]),
            finish=self.finish,
            error=self.error,
        )


class Outbox:
    """The logs of one router's attempts.

    `finished_kept` attempts that have ended and been sent are kept for a resend, the oldest dropped first; the router
    continues a request whose log was dropped from its journal.
    """

    def __init__(self, max_unsent_bytes: int, finished_kept: int = 1024) -> None:
        self._max_unsent_bytes = max_unsent_bytes
        self._finished_kept = finished_kept
        self._logs: dict[AttemptKey, _AttemptLog] = {}
        self._dirty: dict[AttemptKey, _AttemptLog] = {}
        self._finished: OrderedDict[AttemptKey, None] = OrderedDict()
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
        log.ids.extend(delta.token_ids)
        log.pieces.extend(delta.pieces)
        self._unsent_bytes += sum(len(p) + _TOKEN_BYTES for p in delta.pieces)
        if delta.finish is not None:
            log.finish = delta.finish
            log.error = delta.error
            self._finished[key] = None
        self._dirty[key] = log
        return True

    def rewind(self, request_id: RequestId, attempt: int, choice: int, index: int) -> bool:
        """Send again from token `index` on. False if this attempt, choice or index is not known."""
        log = self._logs.get((request_id, attempt))
        if log is None or choice != log.choice:
            return False
        position = index - log.first_index
        if not 0 <= position <= len(log.ids):
            return False
        before = log.unsent_bytes
        log.sent = position
        log.finish_sent = False
        self._unsent_bytes += log.unsent_bytes - before
        self._dirty[request_id, attempt] = log
        return True

    def take(self) -> tuple[TokenDelta, ...]:
        """All that is unsent, one delta an attempt; from here on it counts as sent."""
        deltas = tuple(log.take() for log in self._dirty.values())
        self._dirty.clear()
        self._unsent_bytes = 0
        while len(self._finished) > self._finished_kept:
            key, _ = self._finished.popitem(last=False)
            self._logs.pop(key, None)
        return deltas

    def forget(self, request_id: RequestId, attempt: int) -> None:
        """Drop a log and what is unsent of it."""
        key = (request_id, attempt)
        log = self._logs.pop(key, None)
        if log is None:
            return
        self._unsent_bytes -= log.unsent_bytes
        self._dirty.pop(key, None)
        self._finished.pop(key, None)

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
