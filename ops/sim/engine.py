"""An engine that runs by itself in virtual time.

Owns: when each step begins and ends, and when its result is told. Imports cluster.engine; the engine, its scheduler, its
KV memory and its inbox are production's. Invariants: what is asked while a step runs is done between it and the next, as
in cluster/engine/runner.py; whether steps are taken one by one or several at once shows in nothing that is told.

What says nothing but that one more token of a stream has come is held, and told with the end of that stream, or with the
first report `held_max_s` after the last of it: so a router hears of the middle of a stream later than in production, and of
all else at once: first tokens, ends, preemptions, refusals, and the load after each step that is not steady
(ops/sim/steady.py). The load after one that is steady, in which a prompt may have become shorter, is told with the next
report or the next step that is not: what a router knows of it is up to a report period and a half older than if each step
told it, for a report that comes within half a period of a frame is left out. With `held_max_s` 0 everything is told as
production does.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar, assert_never

import msgspec

from cluster.engine.inbox import Abort, Add, Call, EngineStoppedError, Inbox
from cluster.engine.runner import MovesCall, make_call
from cluster.engine.runner_moves import RunnerMoves
from cluster.ports import EngineProgress, HeldAttempt, StepResult
from cluster.types import EngineLoad, PrefixChange, Refusal, Request, RequestId
from ops.sim.backend import ModelledBackend
from ops.sim.events import VirtualLoop
from ops.sim.steady import SteadyEngine

T = TypeVar("T")

STEADY_MOST = 64
"""Steps that are taken at once; after them it is asked anew."""


class SimEngine:
    """Implements `ports.EnginePort`."""

    def __init__(
        self,
        engine: SteadyEngine,
        backend: ModelledBackend,
        loop: VirtualLoop,
        place: int,
        watch: Callable[[StepResult], None],
        *,
        fast_forward: bool,
        held_max_s: float,
    ) -> None:
        """`place`: among the engines whose steps end at one moment. `watch` is shown the result of each step in which
        something was decided."""
        self.engine = engine
        self._backend = backend
        self._loop = loop
        self._place = place
        self._watch = watch
        self._at_once = STEADY_MOST if fast_forward else 1
        self._held_max_s = held_max_s
        self._held_since_s = 0.0
        """When all that was held has been told last."""
        self._inbox: Inbox[MovesCall] = Inbox(engine.config.max_held, self._asked)
        self._moves = RunnerMoves(self._inbox.ask, engine.moves.kv_format)
        self._on_result: Callable[[StepResult], None] = _nobody
        self._load = self._held_load = engine.load()
        """As it has been told last, and as it is to be told with what is held."""
        self._alive = False
        self._began_s: float | None = None
        """Of the step that runs."""
        self._ends_s: list[float] = []
        """Of the steady steps that have begun or are to follow, and have not been taken."""
        self._turn = 0
        """The number of the event that is awaited; others have been overtaken."""
        self._waking = False
        self._held_prefixes: list[PrefixChange] = []
        self._readers: list[tuple[Callable[[SteadyEngine], Any], Future[Any]]] = []
        """Who asks what is here: answered between two steps. It changes nothing, so no step is taken by itself for it."""

    # --- ports.EnginePort ---

    @property
    def moves(self) -> RunnerMoves:
        return self._moves

    def start(self, on_result: Callable[[StepResult], None], on_death: Callable[[str], None]) -> None:
        del on_death  # an engine dies here with its replica
        self._on_result = on_result
        self._alive = True

    def add(self, request: Request, attempt: int) -> None:
        self._inbox.add(request, attempt)

    def abort(self, request_id: RequestId, attempt: int) -> None:
        self._inbox.abort(request_id, attempt)

    def held(self, limit: int) -> Future[tuple[HeldAttempt, ...]]:
        return self.read(lambda engine: engine.moves.held(limit))

    def progress(self) -> EngineProgress:
        age_s = None
        if self._began_s is not None:
            begun = bisect_right(self._ends_s, self._loop.now_s)
            age_s = self._loop.now_s - (self._ends_s[begun - 1] if begun else self._began_s)
        return EngineProgress(load=self._load, alive=self._alive, step_age_s=age_s, failure="")

    def stop(self) -> None:
        self.catch_up()
        self._ends_s.clear()
        self._alive = False
        self._turn += 1
        self._inbox.close("its replica is gone")
        for _, answer in self._readers:
            answer.set_exception(EngineStoppedError("its replica is gone"))
        self._readers.clear()

    # --- what the world asks ---

    def catch_up(self) -> None:
        """Take the steady steps that have ended by now: the engine is as after the last of them."""
        if not self._ends_s or self._ends_s[0] > self._loop.now_s:
            return
        now_s, ends_s = self._loop.now_s, self._ends_s
        ended = bisect_right(ends_s, now_s)
        self.engine.run_steady(ended)
        self._began_s = ends_s[ended - 1]
        del ends_s[:ended]
        self._hold(self.engine.result())

    def latest_load(self) -> EngineLoad:
        """After the last step that has ended, whether it has been told or not. No step is taken for it."""
        ended = bisect_right(self._ends_s, self._loop.now_s)
        return self.engine.load_after(ended) if ended else self._held_load

    def read(self, what: Callable[[SteadyEngine], T]) -> Future[T]:
        """Of the engine between two steps. `what` must change nothing."""
        answer: Future[T] = Future()
        self._readers.append((what, answer))
        if self._began_s is None and not self._waking:
            self._answer_readers()
        elif begins := self._ends_s[bisect_right(self._ends_s, self._loop.now_s) :]:
            self._loop.at(begins[0], self._answer_readers, place=self._place)
        return answer

    @property
    def idles(self) -> bool:
        """Whether it lies still though there is something to do, which must never be."""
        return self._alive and self._began_s is None and not self._waking and self.engine.has_work

    def tell(self) -> None:
        """With each report: the load after the last step that has ended; and what is held of those that have, if it has been
        held for long."""
        self._load = self.latest_load()
        if self._loop.now_s - self._held_since_s < self._held_max_s:
            return
        self.catch_up()
        self._held_since_s = self._loop.now_s
        # A step that is not steady has been taken when it begins, and one that is when it has ended.
        deltas = self.engine.untold(step_runs=self._began_s is not None and not self._ends_s)
        if deltas or self._held_prefixes:
            self._on_result(StepResult(load=self._load, deltas=deltas, prefixes=self._take_prefixes()))

    # --- turns ---

    def _asked(self) -> None:
        """Something has come: it is done between two steps."""
        if not self._alive or self._waking:
            return
        if self._began_s is None:
            self._waking = True
            self._loop.at(self._loop.now_s, self._begin)
        elif (begun := bisect_right(self._ends_s, self._loop.now_s) + 1) < len(self._ends_s):
            del self._ends_s[begun:]
            self._await_steady()

    def _begin(self) -> None:
        """Between two steps, or awake: do what has been asked, and begin the next step."""
        self._waking = False
        if not self._alive:
            return
        self._answer_readers()
        anything_asked = self._carry_out()
        engine, now_s = self.engine, self._loop.now_s
        if not engine.has_work:
            self._began_s = None
            if anything_asked is not None:
                result = msgspec.structs.replace(engine.result(), refusals=anything_asked)
                self._load = self._held_load = result.load
                self._tell(result)
            return
        self._began_s = now_s
        steady_ms: list[float] = []
        if anything_asked is None and self._held_max_s > 0:
            steady_ms = engine.steady_ms(self._at_once)
        if steady_ms and self._at_once > 1:
            end_s = now_s
            for step_ms in steady_ms:
                end_s += step_ms / 1000
                self._ends_s.append(end_s)
            self._await_steady()
            return
        result = engine.step()
        if anything_asked:
            result = msgspec.structs.replace(result, refusals=anything_asked)
        self._turn += 1
        end_s = now_s + self._backend.take_ms() / 1000
        self._loop.at(end_s, self._end_step, self._turn, result, bool(steady_ms), place=self._place)

    def _carry_out(self) -> tuple[Refusal, ...] | None:
        """Do what has been asked; returns the refusals, or None where nothing was asked."""
        if not self._inbox.pending:
            return None
        taken, engine = self._inbox.take(), self.engine
        engine.adds_total += taken.answered_adds
        refused, gone = taken.refused, []
        while taken.commands:
            command = taken.commands.popleft()
            match command:
                case Add(request, attempt):
                    if refusal := engine.add(request, attempt):
                        refused.append(refusal)
                        gone.append((request.request_id, attempt))
                case Abort(identity):
                    engine.abort(*identity)
                    if not engine.holds(identity):
                        gone.append(identity)
                case Call():
                    self._make(command)
                case _:
                    assert_never(command)
        self._inbox.forget(gone)
        return tuple(refused)

    def _make(self, call: Call[MovesCall]) -> None:
        """All that its attempt has put out is told before the answer, as in production."""
        engine, identity = self.engine, call.identity
        if (delta := engine.untold_of(identity)) is not None:
            self._on_result(StepResult(load=self._load, deltas=(delta,)))
        make_call(call, engine, self._inbox)
        if not engine.holds(identity):
            engine.forget(identity)

    def _answer_readers(self) -> None:
        if self._readers:
            self.catch_up()
            readers, self._readers = self._readers, []
            for what, answer in readers:
                answer.set_result(what(self.engine))

    def _end_step(self, turn: int, result: StepResult, steady: bool) -> None:
        if turn != self._turn:
            return
        if steady:
            self._hold(result)
        else:
            self._load = self._held_load = result.load
            if result.deltas and any(delta.finish is not None for delta in result.deltas):
                deltas = tuple(self.engine.whole(d) if d.finish is not None else d for d in result.deltas)
                self._inbox.forget([(d.request_id, d.attempt) for d in deltas if d.finish is not None])
                result = msgspec.structs.replace(result, deltas=deltas)
            self._watch(result)
            self._tell(result)
        self._begin()

    # --- steady steps ---

    def _await_steady(self) -> None:
        self._turn += 1
        self._loop.at(self._ends_s[-1], self._end_steady, self._turn, place=self._place)

    def _end_steady(self, turn: int) -> None:
        if turn == self._turn:
            self.catch_up()
            self._begin()

    # --- telling ---

    def _hold(self, result: StepResult) -> None:
        self._held_load = result.load
        if result.prefixes is not None:
            self._held_prefixes.append(result.prefixes)

    def _tell(self, result: StepResult) -> None:
        if not self._held_max_s:
            self._on_result(msgspec.structs.replace(result, deltas=result.deltas + self.engine.untold()))
            return
        if self._held_prefixes:
            if result.prefixes is not None:
                self._held_prefixes.append(result.prefixes)
            result = msgspec.structs.replace(result, prefixes=self._take_prefixes())
        self._on_result(result)

    def _take_prefixes(self) -> PrefixChange | None:
        changes = self._held_prefixes
        if not changes:
            return None
        self._held_prefixes = []
        return PrefixChange(b"".join(c.held for c in changes), b"".join(c.gone for c in changes))


def _nobody(result: StepResult) -> None:
    del result
