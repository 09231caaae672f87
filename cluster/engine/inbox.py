"""What an engine has been asked from other threads and has not come to yet.

Owns: the queue of commands with its bounds, which attempts are here, and the refusals that are still to be told. Imports
cluster. Invariants: nothing here waits; an attempt is in the queue or in the engine at most once, `max_held` of them in
all, each aborted at most once; every call's answer is settled by whoever takes it out, or by `close`, also if that one stops
halfway.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from cluster.engine.scheduling.sequence import Identity
from cluster.ports import ImportRefusal
from cluster.types import Refusal, RefusalReason, Request, RequestId

C = TypeVar("C")
"""How an engine makes a call."""

CALLS_MAX = 64
"""Calls that may be waiting or under way."""
NOBODY: Identity = (RequestId(""), 0)
"""For a call that is about no attempt in particular."""


class EngineStoppedError(RuntimeError):
    """The engine's thread has ended, so the call will never be made."""


class EngineBusyError(RuntimeError):
    """Too many calls are waiting for the step that runs."""


@dataclass(frozen=True, slots=True)
class Add:
    request: Request
    attempt: int


@dataclass(frozen=True, slots=True)
class Abort:
    identity: Identity


@dataclass(frozen=True, slots=True)
class Call(Generic[C]):
    """A question about an attempt."""

    identity: Identity
    make: C
    answer: Future[Any]

    def give_up(self, why: str) -> None:
        """It will never be made."""
        if self.answer.set_running_or_notify_cancel():
            self.answer.set_exception(EngineStoppedError(why))


@dataclass(frozen=True, slots=True)
class Taken(Generic[C]):
    commands: deque[Add | Abort | Call[C]]
    """Whoever carries them out takes each from the left first: those that are left when the inbox is closed are given up."""
    refused: list[Refusal]
    answered_adds: int
    """Adds that need not go to the engine: refused, or repeats."""


class Inbox(Generic[C]):
    """`max_held` bounds adds: one beyond it is refused as FULL, an abort of anything that is not here is dropped. (A
    refusal that is not yet delivered is two ids, and its asker waits for it.) CALLS_MAX bounds calls.

    `changed` is called in the asker's thread whenever there is something to take; it must not block.
    """

    def __init__(self, max_held: int, changed: Callable[[], None]) -> None:
        self._max_held = max_held
        self._changed = changed
        self._lock = threading.Lock()
        """Guards all that follows; never held across a call of others."""
        self._queue: deque[Add | Abort | Call[C]] = deque()
        self._taken: deque[Add | Abort | Call[C]] = deque()
        """What is left of those that were taken last."""
        self._attempts: dict[Identity, bool] = {}
        """Held here or in the engine; True once its abort is on the way."""
        self._refused: list[Refusal] = []
        self._answered_adds = 0
        self._calls = 0
        self._closed = False

    # --- any thread ---

    def add(self, request: Request, attempt: int) -> None:
        identity = (request.request_id, attempt)
        with self._lock:
            if identity in self._attempts:
                self._answered_adds += 1
            elif len(self._attempts) >= self._max_held:
                self._answered_adds += 1
                self._refused.append(Refusal(request.request_id, attempt, RefusalReason.FULL))
            else:
                self._attempts[identity] = False
                self._queue.append(Add(request, attempt))
        self._changed()

    def abort(self, request_id: RequestId, attempt: int) -> None:
        identity = (request_id, attempt)
        with self._lock:
            if self._attempts.get(identity) is not False:
                return
            self._attempts[identity] = True
            self._queue.append(Abort(identity))
        self._changed()

    def ask(self, identity: Identity, make: C) -> Future[Any]:
        """The answer fails with EngineStoppedError once the inbox is closed, with EngineBusyError where too many wait."""
        call = Call(identity, make, Future())
        with self._lock:
            closed, busy = self._closed, self._calls >= CALLS_MAX
            if not closed and not busy:
                self._queue.append(call)
                self._calls += 1
        if closed:
            call.give_up("the engine's thread has ended")
        elif busy:
            call.answer.set_exception(EngineBusyError(f"{CALLS_MAX} calls are waiting already"))
        else:
            self._changed()
        return call.answer

    # --- the engine's thread ---

    @property
    def pending(self) -> bool:
        """Whether there is anything to take."""
        return bool(self._queue or self._answered_adds)

    def take(self) -> Taken[C]:
        """All that has come, in order. Each call that is among it is reported to `called` when it has been made."""
        with self._lock:
            taken = Taken(self._queue, self._refused, self._answered_adds)
            self._taken = self._queue
            self._queue, self._refused, self._answered_adds = deque(), [], 0
        return taken

    def called(self) -> None:
        """A call that was taken has been made."""
        with self._lock:
            self._calls -= 1

    def reserve(self, identity: Identity) -> ImportRefusal | None:
        """Hold a place for an attempt that comes by a move."""
        with self._lock:
            if identity in self._attempts:
                return ImportRefusal.KNOWN
            if len(self._attempts) >= self._max_held:
                return ImportRefusal.FULL
            self._attempts[identity] = False
        return None

    def hold(self, identity: Identity) -> None:
        """The engine has this attempt, and has counted it against its bound itself."""
        with self._lock:
            self._attempts.setdefault(identity, False)

    def forget(self, identities: Iterable[Identity]) -> None:
        """The engine has these no more."""
        with self._lock:
            for identity in identities:
                self._attempts.pop(identity, None)

    def close(self, why: str) -> None:
        """Nothing is taken any more: every call that waits, or comes later, fails. Called by whoever takes."""
        with self._lock:
            self._closed = True
            calls = [command for command in (*self._taken, *self._queue) if isinstance(command, Call)]
        for call in calls:
            call.give_up(f"the engine's thread has ended: {why}")
