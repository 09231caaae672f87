"""An engine in a thread of its own.

Owns: the thread, and what others may see of it while a step runs. Imports cluster.engine.engine and cluster.ports.
Invariants: only that thread touches the engine; no call from outside waits for a step; each turn that changed something
gives one result; whoever asked for a request is told its end, or of the engine's death.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeAlias, assert_never

import msgspec

from cluster.engine.engine import Engine
from cluster.engine.inbox import NOBODY, Abort, Add, Call, Inbox
from cluster.engine.kv_cache import IntegrityError
from cluster.engine.moves import Moves
from cluster.engine.runner_moves import RunnerMoves
from cluster.engine.scheduling.sequence import Identity
from cluster.ports import Clock, EngineProgress, HeldAttempt, StepResult
from cluster.types import Request, RequestId

log = logging.getLogger(__name__)

MovesCall: TypeAlias = Callable[[Moves], Any]


class EngineRunner:
    """`cluster.ports.EnginePort` over an `Engine`.

    What is asked of it is bounded by what the engine may hold (see inbox.py). The engine's books are checked each time it
    becomes idle; if they are wrong, the thread dies rather than go on.
    """

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock
        self._woken = threading.Event()
        self._inbox: Inbox[MovesCall] = Inbox(engine.config.max_held, self._woken.set)
        self._moves = RunnerMoves(self._inbox.ask, engine.moves.kv_format)
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._load = engine.load()
        self._step_began_s: float | None = None
        self._alive = False
        self._failure = ""

    @property
    def moves(self) -> RunnerMoves:
        return self._moves

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
        self._inbox.add(request, attempt)

    def abort(self, request_id: RequestId, attempt: int) -> None:
        self._inbox.abort(request_id, attempt)

    def held(self, limit: int) -> Future[tuple[HeldAttempt, ...]]:
        return self._inbox.ask(NOBODY, lambda moves: moves.held(limit))

    def progress(self) -> EngineProgress:
        began_s = self._step_began_s
        return EngineProgress(
            load=self._load,
            alive=self._alive,
            step_age_s=None if began_s is None else max(0.0, self._clock.monotonic() - began_s),
            failure=self._failure,
            foretold=self._engine.foretold.told(),
        )

    def stop(self) -> None:
        """End the thread after the step that runs; returns when it has ended. Not to be called from a callback."""
        self._stopping = True
        self._woken.set()
        if self._thread is not None:
            self._thread.join()
        else:
            self._end()

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
        self._inbox.close(self._failure or "it was stopped")

    def _next_turn(self) -> bool:
        """Wait until there is something to do. False when it is to stop."""
        while not (self._stopping or self._inbox.pending or self._engine.has_work):
            self._woken.wait()
            self._woken.clear()
        return not self._stopping

    def _turn(self, on_result: Callable[[StepResult], None]) -> None:
        taken = self._inbox.take()
        refused = taken.refused
        self._engine.adds_total += taken.answered_adds
        ended: list[Identity] = []
        anything_asked = bool(taken.commands)
        while taken.commands:
            command = taken.commands.popleft()
            match command:
                case Add(request, attempt):
                    if refusal := self._engine.add(request, attempt):
                        refused.append(refusal)
                        ended.append((request.request_id, attempt))
                case Abort(identity):
                    self._engine.abort(*identity)
                    if not self._engine.holds(identity):
                        ended.append(identity)
                case Call():
                    make_call(command, self._engine, self._inbox)
                case _:
                    assert_never(command)
        if self._engine.has_work:
            self._step_began_s = self._clock.monotonic()
            result = self._engine.step()
            self._step_began_s = None
        elif anything_asked or refused or taken.answered_adds:
            result = self._engine.result()
        else:
            return
        if refused:
            result = msgspec.structs.replace(result, refusals=tuple(refused))
        self._load = result.load
        ended.extend((d.request_id, d.attempt) for d in result.deltas if d.finish is not None)
        self._inbox.forget(ended)
        on_result(result)
        if not self._engine.has_work:
            self._engine.check_integrity()


def make_call(call: Call[MovesCall], engine: Engine, inbox: Inbox[MovesCall]) -> None:
    """Make a call between two steps, and keep track of the attempts that are here."""
    before = engine.holds(call.identity)
    try:
        _settle(call, engine)
    finally:
        inbox.called()
    after = engine.holds(call.identity)
    if after and not before:
        inbox.hold(call.identity)
    elif before and not after:
        inbox.forget((call.identity,))


def _settle(call: Call[MovesCall], engine: Engine) -> None:
    if not call.answer.set_running_or_notify_cancel():
        return
    try:
        answer = call.make(engine.moves)
    except IntegrityError as error:
        call.answer.set_exception(error)
        raise
    except Exception as error:  # the asker's affair
        call.answer.set_exception(error)
    else:
        call.answer.set_result(answer)
