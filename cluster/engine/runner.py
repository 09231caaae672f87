"""An engine in a thread of its own.

Owns: the thread, its inbox, and what others may see of it while a step runs. Imports cluster.engine.engine and
cluster.ports. Invariants: only that thread touches the engine; no call from outside waits for a step; each turn that
changed something gives one result; whoever asked for a request is told its end, or of the engine's death.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar, assert_never

import msgspec

from cluster.engine.engine import Engine
from cluster.engine.kv_cache import IntegrityError
from cluster.engine.moves import Moves
from cluster.engine.runner_moves import RunnerMoves
from cluster.engine.scheduling.sequence import Identity
from cluster.ports import Clock, EngineProgress, StepResult
from cluster.types import Refusal, RefusalReason, Request, RequestId

log = logging.getLogger(__name__)

T = TypeVar("T")

CALLS_MAX = 64
"""Calls about moves that may wait for a step to end."""


class EngineStoppedError(RuntimeError):
    """The engine's thread has ended, so the call will never be made."""


class EngineBusyError(RuntimeError):
    """Too many calls are waiting for the step that runs."""


@dataclass(frozen=True, slots=True)
class _Add:
    request: Request
    attempt: int


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: RequestId
    attempt: int


@dataclass(frozen=True, slots=True)
class _Call:
    """A question about an attempt. `make` settles a future, and raises only what the engine must not survive."""

    identity: Identity
    make: Callable[[Moves], None]
    give_up: Callable[[Exception], None]


class EngineRunner:
    """`cluster.ports.EnginePort` over an `Engine`, and its `moves`.

    The inbox is bounded by what the engine may hold: an attempt is in it or in the engine at most once, `max_held` of
    them in all, each aborted at most once; an add beyond that is refused as FULL, an abort of anything else is dropped.
    (A refusal that is not yet delivered is two ids, and its asker waits for it.) Of calls about moves, CALLS_MAX.

    The engine's books are checked each time it becomes idle; if they are wrong, the thread dies rather than go on.
    """

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock
        self._changed = threading.Condition()
        """Guards what follows up to the next blank line; never held while the engine works."""
        self._inbox: deque[_Add | _Abort | _Call] = deque()
        self._calls = 0
        """Calls in the inbox."""
        self._attempts: dict[Identity, bool] = {}
        """Held here or in the engine; True once its abort is on the way."""
        self._answered_adds = 0
        """Adds that need not go to the engine: refused, or repeats."""
        self._refused: list[Refusal] = []
        self._stopping = False
        self._closed = False
        """No call will be made any more."""

        self.moves = RunnerMoves(self._ask, engine.moves.kv_format)
        self._thread: threading.Thread | None = None
        self._load = engine.load()
        self._step_began_s: float | None = None
        self._alive = False
        self._failure = ""

    def start(self, on_result: Callable[[StepResult], None], on_death: Callable[[str], None]) -> None:
        """Begin. Both callbacks are called in the engine's thread and must not block; one that raises ends it.

        Raises:
            RuntimeError: it was started before.
        """
        if self._thread is not None:
            raise RuntimeError("an engine runner starts once")
        self._alive = True
        # A daemon, so that a process that fails elsewhere can end without it.
        self._thread = threading.Thread(target=self._live, args=(on_result, on_death), name="engine", daemon=True)
        self._thread.start()

    def add(self, request: Request, attempt: int) -> None:
        identity = (request.request_id, attempt)
        with self._changed:
            if identity in self._attempts:
                self._answered_adds += 1
            elif len(self._attempts) >= self._engine.config.max_held:
                self._answered_adds += 1
                self._refused.append(Refusal(request.request_id, attempt, RefusalReason.FULL))
            else:
                self._attempts[identity] = False
                self._inbox.append(_Add(request, attempt))
            self._changed.notify()

    def abort(self, request_id: RequestId, attempt: int) -> None:
        with self._changed:
            if self._attempts.get((request_id, attempt)) is False:
                self._attempts[request_id, attempt] = True
                self._inbox.append(_Abort(request_id, attempt))
                self._changed.notify()

    def progress(self) -> EngineProgress:
        began_s = self._step_began_s
        return EngineProgress(
            load=self._load,
            alive=self._alive,
            step_age_s=None if began_s is None else max(0.0, self._clock.monotonic() - began_s),
            failure=self._failure,
        )

    def stop(self) -> None:
        """End the thread after the step that runs; returns when it has ended. Not to be called from a callback."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
        else:
            self._end()

    def _ask(self, identity: Identity, call: Callable[[Moves], T]) -> Future[T]:
        future: Future[T] = Future()
        asked = _Call(identity, lambda moves: _settle(future, call, moves), lambda error: _give_up(future, error))
        with self._changed:
            closed, busy = self._closed, self._calls >= CALLS_MAX
            if not closed and not busy:
                self._inbox.append(asked)
                self._calls += 1
                self._changed.notify()
        if closed:
            asked.give_up(EngineStoppedError("the engine's thread has ended"))
        elif busy:
            asked.give_up(EngineBusyError(f"{CALLS_MAX} calls are waiting already"))
        return future

    # --- in the engine's thread ---

    def _live(self, on_result: Callable[[StepResult], None], on_death: Callable[[str], None]) -> None:
        try:
            while self._next_turn():
                self._turn(on_result)
        except BaseException as error:  # whatever it was, the thread has ended and must say so
            log.critical("the engine's thread died", exc_info=error)
            self._failure = f"{type(error).__name__}: {error}"
            self._end()
            on_death(self._failure)
        else:
            self._end()

    def _end(self) -> None:
        self._step_began_s = None
        self._alive = False
        with self._changed:
            self._closed = True
            left = [command for command in self._inbox if isinstance(command, _Call)]
        for call in left:
            call.give_up(EngineStoppedError(f"the engine's thread has ended: {self._failure or 'it was stopped'}"))

    def _next_turn(self) -> bool:
        """Wait until there is something to do. False when it is to stop."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._stopping or self._inbox or self._answered_adds or self._engine.has_work,
            )
            return not self._stopping

    def _turn(self, on_result: Callable[[StepResult], None]) -> None:
        with self._changed:
            commands, self._inbox, self._calls = self._inbox, deque(), 0
            refused, self._refused = self._refused, []
            answered_adds, self._answered_adds = self._answered_adds, 0
        self._engine.adds_total += answered_adds
        ended: list[Identity] = []
        for command in commands:
            match command:
                case _Add(request, attempt):
                    if refusal := self._engine.add(request, attempt):
                        refused.append(refusal)
                        ended.append((request.request_id, attempt))
                case _Abort(request_id, attempt):
                    self._engine.abort(request_id, attempt)
                    if not self._engine.holds((request_id, attempt)):
                        ended.append((request_id, attempt))
                case _Call():
                    self._make(command)
                case _:
                    assert_never(command)
        if self._engine.has_work:
            self._step_began_s = self._clock.monotonic()
            result = self._engine.step()
            self._step_began_s = None
        elif commands or refused or answered_adds:
            result = StepResult(load=self._engine.load())
        else:
            return
        if refused:
            result = msgspec.structs.replace(result, refusals=tuple(refused))
        self._load = result.load
        ended.extend((d.request_id, d.attempt) for d in result.deltas if d.finish is not None)
        with self._changed:
            for identity in ended:
                self._attempts.pop(identity, None)
        on_result(result)
        if not self._engine.has_work:
            self._engine.check_integrity()

    def _make(self, call: _Call) -> None:
        """Make a call, and keep track of the attempts that are here."""
        before = self._engine.holds(call.identity)
        call.make(self._engine.moves)
        after = self._engine.holds(call.identity)
        with self._changed:
            if after and not before:
                self._attempts.setdefault(call.identity, False)
            elif before and not after:
                self._attempts.pop(call.identity, None)


def _settle(future: Future[T], call: Callable[[Moves], T], moves: Moves) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        answer = call(moves)
    except IntegrityError as error:
        future.set_exception(error)
        raise
    except Exception as error:  # the asker's affair
        future.set_exception(error)
    else:
        future.set_result(answer)


def _give_up(future: Future[T], error: Exception) -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(error)
