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
from dataclasses import dataclass

import msgspec

from cluster.engine.engine import Engine
from cluster.engine.scheduling.sequence import Identity
from cluster.ports import Clock, EngineProgress, StepResult
from cluster.types import Refusal, RefusalReason, Request, RequestId

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Add:
    request: Request
    attempt: int


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: RequestId
    attempt: int


class EngineRunner:
    """`cluster.ports.EnginePort` over an `Engine`.

    The inbox is bounded by what the engine may hold: an attempt is in it or in the engine at most once, `max_held` of
    them in all, each aborted at most once; an add beyond that is refused as FULL, an abort of anything else is dropped.
    (A refusal that is not yet delivered is two ids, and its asker waits for it.)

    The engine's books are checked each time it becomes idle; if they are wrong, the thread dies rather than go on.
    """

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock
        self._changed = threading.Condition()
        """Guards what follows up to the next blank line; never held while the engine works."""
        self._inbox: deque[_Add | _Abort] = deque()
        self._attempts: dict[Identity, bool] = {}
        """Held here or in the engine; True once its abort is on the way."""
        self._answered_adds = 0
        """Adds that need not go to the engine: refused, or repeats."""
        self._refused: list[Refusal] = []
        self._stopping = False

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

    def _next_turn(self) -> bool:
        """Wait until there is something to do. False when it is to stop."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._stopping or self._inbox or self._answered_adds or self._engine.has_work,
            )
            return not self._stopping

    def _turn(self, on_result: Callable[[StepResult], None]) -> None:
        with self._changed:
            commands, self._inbox = self._inbox, deque()
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
        if self._engine.has_work:
            self._step_began_s = self._clock.monotonic()
            result = self._engine.step()
            self._step_began_s = None
        elif refused or answered_adds:
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
