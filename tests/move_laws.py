"""The laws of moves between two engines, whichever these are, seen through their ports: `LAWS`, each a function of a `Pair`.

`move` is what a mover does. It asks no engine of what kind it is.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import pytest

from cluster.engine.inbox import EngineStoppedError
from cluster.ports import NO_KV, EnginePort, ImportRefusal, MovesPort, StepResult
from cluster.types import EngineLoad, EngineState, FinishReason, Refusal, RefusalReason, Request, RequestId, Sampling
from tests.conformance.engine_kit import Output

T = TypeVar("T")

PATIENCE_S = 60.0
"""How long a test waits for an event that comes at once unless something is broken."""
MAX_HELD = 6
"""Of every engine that is held to these laws."""
CHANCE: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "frequency_penalty": 0.4, "min_tokens": 3}


@dataclass
class Side:
    """One engine, and what it tells. Where it `stands_still` a result is told between two steps, and the next step waits
    until the test wants more; elsewhere steps go on, and outputs must be long enough to be cut."""

    port: EnginePort
    stands_still: bool = False
    outputs: dict[tuple[str, int], Output] = field(default_factory=dict)
    refusals: list[Refusal] = field(default_factory=list)
    load: EngineLoad | None = None
    adds: int = 0

    def __post_init__(self) -> None:
        self._results: queue.Queue[StepResult | str] = queue.Queue()
        self._go = threading.Semaphore(0)
        self._released = False

    @property
    def moves(self) -> MovesPort:
        return self.port.moves

    def start(self) -> None:
        self.port.start(self._hear, self._results.put)

    def _hear(self, result: StepResult) -> None:
        self._results.put(result)
        if self.stands_still and result.deltas and not self._released:
            assert self._go.acquire(timeout=PATIENCE_S)

    def stop(self) -> None:
        self._released = True
        self._go.release()
        self.port.stop()

    def add(self, *requests: Request) -> None:
        for r in requests:
            self.outputs[r.request_id, 0] = Output()
            self.adds += 1
            self.port.add(r, 0)

    def expect(self, r: Request, attempt: int) -> None:
        """It comes by a move, with `emitted_ids`."""
        self.outputs[r.request_id, attempt] = Output()

    def ask(self, future: Future[T]) -> T:
        self._go.release()
        return future.result(PATIENCE_S)

    def take(self) -> None:
        if self._results.empty():
            self._go.release()
        self._keep(self._results.get(timeout=PATIENCE_S))

    def told(self, r: Request, attempt: int = 0) -> Output:
        """All that it has told so far."""
        while not self._results.empty():
            self._keep(self._results.get())
        return self.outputs[r.request_id, attempt]

    def _keep(self, result: StepResult | str) -> None:
        assert not isinstance(result, str), f"the engine died: {result}"
        self.load = result.load
        self.refusals.extend(result.refusals)
        for delta in result.deltas:
            got = self.outputs[delta.request_id, delta.attempt]
            first = delta.index - len(got.token_ids) if not got.token_ids else got.first_token_step
            assert first is not None
            got.take(delta, first, first_index=first)

    def until(self, happened: Callable[[], bool]) -> None:
        while not happened():
            self.take()

    def until_tokens(self, tokens: int, r: Request, attempt: int = 0) -> None:
        self.until(lambda: len(self.outputs[r.request_id, attempt].token_ids) >= tokens)

    def until_ended(self, r: Request, attempt: int = 0) -> Output:
        self.until(lambda: self.outputs[r.request_id, attempt].ends > 0)
        return self.outputs[r.request_id, attempt]

    def until_idle(self) -> None:
        def idle() -> bool:
            load = self.load
            return load is not None and not load.running and not load.waiting and load.blocks_free == load.blocks_total

        self.until(idle)
        assert self.port.progress().step_age_s is None


@dataclass
class Pair:
    source: Side
    target: Side
    whole: Callable[[Request], list[int] | None]
    """What a request puts out undisturbed. Knows no engine. None where rounding decides."""
    tokens: int
    """Length of an output that is long enough to be cut."""
    vocab: int = 400
    serial: int = 0

    def request(self, label: str, *, prompt: int = 24, max_tokens: int = 0, **sampling: object) -> Request:
        """0 tokens: long enough to be cut. One whose output rounding does not decide."""
        while True:
            r = self._request(label, prompt, max_tokens, **sampling)
            if self.whole(r) is not None:
                return r

    def _request(self, label: str, prompt: int, max_tokens: int, **sampling: object) -> Request:
        self.serial += 1
        name = f"{label}-{self.serial}"
        ids = tuple(3 + (hash_of(name) + 7919 * k * k) % (self.vocab - 3) for k in range(prompt))
        base = Sampling(max_tokens=max_tokens or self.tokens, seed=hash_of(name), temperature=0.0, ignore_eos=True)
        return Request(
            request_id=RequestId(name),
            tenant="t",
            priority=0,
            priority_class="c",
            arrived_unix_s=1000.0 + self.serial,
            prompt_ids=ids,
            sampling=msgspec.structs.replace(base, **sampling),
        )

    def move(self, r: Request, attempt: int = 0, *, back: bool = False) -> EngineState:
        """From an attempt to the next. It is frozen first of all, so that it does not end while the test is kept waiting."""
        source, target = (self.target, self.source) if back else (self.source, self.target)
        name = r.request_id
        state = source.ask(source.moves.freeze(name, attempt))
        assert state is not None
        blocks = source.ask(source.moves.exportable_blocks(name, attempt))
        refusal = target.ask(target.moves.import_begin(name, attempt + 1, source.moves.kv_format, blocks))
        bytes_travel = refusal is None
        assert bytes_travel is (source.moves.kv_format in (NO_KV, target.moves.kv_format))
        if refusal is ImportRefusal.KV_FORMAT:
            refusal = target.ask(target.moves.import_begin(name, attempt + 1, NO_KV, 0))
        assert refusal is None
        rest = source.ask(source.moves.export_rest(name, attempt, 0))
        if rest.nbytes and bytes_travel:
            assert target.ask(target.moves.import_blocks(name, attempt + 1, 0, rest)) is None
        target.expect(r, attempt + 1)
        assert target.ask(target.moves.import_commit(state, attempt + 1)) is None
        assert source.ask(source.moves.release(name, attempt))
        return state


def hash_of(name: str) -> int:
    number = 0
    for character in name:
        number = (number * 131 + ord(character)) % 1_000_003
    return number


# --- the laws ---


def a_request_that_is_moved_in_mid_output_goes_on_as_if_nothing_had_been(p: Pair) -> None:
    greedy: dict[str, Any] = {}
    for sampling in (greedy, CHANCE):
        r = p.request("moved", **sampling)
        p.source.add(r)
        p.source.until_tokens(5, r)
        state = p.move(r)
        told = p.source.told(r)
        assert told.ends == 0, "it was released without a word"
        assert tuple(told.token_ids) == state.request.emitted_ids, "what it had put out was told before it was frozen"
        p.source.until_idle()
        got = p.target.until_ended(r, 1)
        assert [*told.token_ids, *got.token_ids] == p.whole(r)
        assert (got.finish, got.ends) == (FinishReason.LENGTH, 1)
        p.target.until_idle()


def a_request_moves_there_and_back(p: Pair) -> None:
    r = p.request("back", **CHANCE)
    p.source.add(r)
    p.source.until_tokens(2, r)
    p.move(r)
    p.target.until_tokens(3, r, 1)
    p.move(r, 1, back=True)
    p.target.until_idle()
    p.source.until_ended(r, 2)
    parts = (p.source.told(r), p.target.told(r, 1), p.source.told(r, 2))
    assert [token for part in parts for token in part.token_ids] == p.whole(r)
    assert [part.ends for part in parts] == [0, 0, 1]


def a_request_moves_before_its_prompt_has_run(p: Pair) -> None:
    r = p.request("prompt", prompt=150, max_tokens=8)
    p.source.add(r)
    state = p.move(r)
    got = p.target.until_ended(r, 1)
    assert [*state.request.emitted_ids, *got.token_ids] == p.whole(r)


def a_frozen_request_says_nothing_until_it_is_thawed_and_then_goes_on(p: Pair) -> None:
    r, other = p.request("frozen"), p.request("other", max_tokens=20)
    p.source.add(r)
    p.source.until_tokens(5, r)
    moves = p.source.moves
    state = p.source.ask(moves.freeze(r.request_id, 0))
    assert state is not None
    assert p.source.ask(moves.freeze(r.request_id, 0)) == state, "asked again, the same again"
    p.source.add(other)
    assert p.source.until_ended(other).token_ids == p.whole(other)
    assert tuple(p.source.told(r).token_ids) == state.request.emitted_ids
    assert p.source.port.progress().step_age_s is None, "nothing but a frozen one is no work"
    assert p.source.ask(moves.thaw(r.request_id, 0))
    assert not p.source.ask(moves.thaw(r.request_id, 0))
    assert not p.source.ask(moves.release(r.request_id, 0)), "it is frozen no more"
    assert p.source.until_ended(r).token_ids == p.whole(r)


def a_frozen_request_can_be_aborted_and_its_end_is_told(p: Pair) -> None:
    r = p.request("aborted")
    p.source.add(r)
    p.source.until_tokens(3, r)
    assert p.source.ask(p.source.moves.freeze(r.request_id, 0)) is not None
    p.source.port.abort(r.request_id, 0)
    got = p.source.until_ended(r)
    assert got.finish is FinishReason.ABORT
    whole = p.whole(r)
    assert whole is not None
    assert got.token_ids == whole[: len(got.token_ids)]
    assert not p.source.ask(p.source.moves.thaw(r.request_id, 0))


def a_thawed_request_can_be_moved(p: Pair) -> None:
    r = p.request("again")
    p.source.add(r)
    p.source.until_tokens(3, r)
    assert p.source.ask(p.source.moves.freeze(r.request_id, 0)) is not None
    assert p.source.ask(p.source.moves.thaw(r.request_id, 0))
    p.source.until_tokens(len(p.source.told(r).token_ids) + 2, r)
    p.move(r)
    got = p.target.until_ended(r, 1)
    assert [*p.source.told(r).token_ids, *got.token_ids] == p.whole(r)


def calls_about_one_request_are_answered_in_the_order_in_which_they_were_asked(p: Pair) -> None:
    """None of them waits for the one before."""
    r = p.request("in order")
    p.source.add(r)
    p.source.until_tokens(3, r)
    moves, name = p.source.moves, r.request_id
    answers: list[Future[Any]] = [
        moves.thaw(name, 0),
        moves.freeze(name, 0),
        moves.freeze(name, 0),
        moves.thaw(name, 0),
        moves.release(name, 0),
        moves.freeze(name, 0),
        moves.thaw(name, 0),
        moves.freeze(name, 0),
    ]
    got = [p.source.ask(answer) for answer in answers]
    first, last = got[1], got[7]
    assert isinstance(first, EngineState)
    assert isinstance(last, EngineState)
    assert got == [False, first, first, True, False, got[5], True, last]
    assert isinstance(got[5], EngineState)
    told = p.source.told(r).token_ids
    assert list(last.request.emitted_ids) == told
    assert p.source.ask(moves.thaw(name, 0))
    assert p.source.until_ended(r).token_ids == p.whole(r)


def what_is_not_there_is_neither_frozen_nor_exported(p: Pair) -> None:
    r = p.request("short", max_tokens=2)
    p.source.add(r)
    p.source.until_ended(r)
    moves = p.source.moves
    for name in (r.request_id, RequestId("never came")):
        assert p.source.ask(moves.freeze(name, 0)) is None
        assert not p.source.ask(moves.thaw(name, 0))
        assert not p.source.ask(moves.release(name, 0))
        assert p.source.ask(moves.exportable_blocks(name, 0)) == 0
        assert p.source.ask(moves.export_rest(name, 0, 0)).nbytes == 0
        with pytest.raises(LookupError):
            p.source.ask(moves.export_blocks(name, 0, 0, 1))


def an_import_is_refused_by_its_reason(p: Pair) -> None:
    r = p.request("refused")
    target, name = p.target, r.request_id
    state = EngineState(request=r, computed_tokens=0, kv_format=NO_KV)
    begin = target.moves.import_begin
    assert target.ask(begin(name, 1, "of no engine", 0)) is ImportRefusal.KV_FORMAT
    assert target.ask(target.moves.import_commit(state, 1)) is ImportRefusal.UNKNOWN
    assert target.ask(target.moves.import_blocks(name, 1, 0, memoryview(bytes(8)))) is ImportRefusal.UNKNOWN
    assert target.ask(begin(name, 1, NO_KV, 0)) is None
    assert target.ask(begin(name, 1, NO_KV, 0)) is ImportRefusal.KNOWN
    assert target.ask(target.moves.import_blocks(name, 1, 0, memoryview(bytes(8)))) is ImportRefusal.MISFIT
    assert target.ask(target.moves.import_abort(name, 1))
    assert not target.ask(target.moves.import_abort(name, 1))
    assert target.ask(target.moves.import_commit(state, 1)) is ImportRefusal.UNKNOWN


def an_import_takes_a_place_among_all_that_are_held_until_it_is_aborted(p: Pair) -> None:
    target = p.target
    names = [RequestId(f"{p.request('held').request_id} {n}") for n in range(MAX_HELD)]
    for name in names:
        assert target.ask(target.moves.import_begin(name, 1, NO_KV, 0)) is None
    assert target.ask(target.moves.import_begin(RequestId("one more"), 1, NO_KV, 0)) is ImportRefusal.FULL
    r = p.request("too many", max_tokens=2)
    target.refusals.clear()
    target.add(r)
    target.until(lambda: bool(target.refusals))
    assert target.refusals == [Refusal(r.request_id, 0, RefusalReason.FULL)]
    target.port.abort(names[0], 1)  # without a word, as nothing was accepted
    for name in names[1:]:
        assert target.ask(target.moves.import_abort(name, 1))
    assert not target.ask(target.moves.import_abort(names[0], 1))
    target.add(again := p.request("again", max_tokens=2))
    assert target.until_ended(again).token_ids == p.whole(again)


def a_move_is_no_add(p: Pair) -> None:
    """`adds_total` says which of the adds that were sent a load already counts."""
    r = p.request("counted")
    p.source.add(r)
    p.source.until_tokens(2, r)
    p.move(r)
    p.target.until_ended(r, 1)
    late = p.request("late", max_tokens=2)
    p.target.add(late)
    p.target.until_ended(late)
    assert p.target.load is not None
    assert p.target.load.adds_total == p.target.adds


def an_imported_request_that_can_never_run_ends_with_an_error(p: Pair) -> None:
    r = p.request("never", prompt=4)
    bad = msgspec.structs.replace(r, prompt_ids=(10**6,))
    assert p.target.ask(p.target.moves.import_begin(r.request_id, 1, NO_KV, 0)) is None
    p.target.expect(bad, 1)
    state = EngineState(request=bad, computed_tokens=0, kv_format=NO_KV)
    assert p.target.ask(p.target.moves.import_commit(state, 1)) is None
    assert p.target.until_ended(bad, 1).finish is FinishReason.ERROR


LAWS: tuple[Callable[[Pair], None], ...] = (
    a_request_that_is_moved_in_mid_output_goes_on_as_if_nothing_had_been,
    a_request_moves_there_and_back,
    a_request_moves_before_its_prompt_has_run,
    a_frozen_request_says_nothing_until_it_is_thawed_and_then_goes_on,
    a_frozen_request_can_be_aborted_and_its_end_is_told,
    a_thawed_request_can_be_moved,
    calls_about_one_request_are_answered_in_the_order_in_which_they_were_asked,
    what_is_not_there_is_neither_frozen_nor_exported,
    an_import_is_refused_by_its_reason,
    an_import_takes_a_place_among_all_that_are_held_until_it_is_aborted,
    a_move_is_no_add,
    an_imported_request_that_can_never_run_ends_with_an_error,
)


def ending_fails_every_call_rather_than_letting_it_wait(side: Side) -> None:
    """To be held on an engine that nobody needs any more."""
    side.stop()
    with pytest.raises(EngineStoppedError):
        side.moves.freeze(RequestId("r"), 0).result(PATIENCE_S)
