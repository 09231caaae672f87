"""An engine in its own thread: nobody waits for a step, every change is told, and death is told too."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

import pytest

from cluster.config import EngineConfig
from cluster.engine.engine import Engine
from cluster.engine.inbox import CALLS_MAX, EngineBusyError, EngineStoppedError
from cluster.engine.runner import EngineRunner
from cluster.ports import EnginePort, Row, RowOutput, StepResult
from cluster.types import EngineState, FinishReason, RefusalReason, RequestId
from tests.conformance.arithmetic_backend import ArithmeticBackend
from tests.conformance.engine_kit import (
    EOS,
    Output,
    byte_level_codec,
    config,
    gather,
    request,
    undisturbed,
    vocab_size,
)

T = TypeVar("T")

PATIENCE_S = 20.0
"""How long a test waits for an event that comes at once unless something is broken."""


class GatedBackend(ArithmeticBackend):
    """Says when a batch has begun; while the gate is shut, the batch waits there."""

    def __init__(self, settings: EngineConfig) -> None:
        super().__init__(settings.blocks, settings.block_size_tokens, vocab_size())
        self.gate = threading.Event()
        self.gate.set()
        self.begun = threading.Semaphore(0)
        self.tickets: threading.Semaphore | None = None
        """If set, each batch takes one."""
        self.error: Exception | None = None

    def run(self, rows: Sequence[Row], padding_tokens: int = 0) -> list[RowOutput]:
        self.begun.release()
        assert self.gate.wait(PATIENCE_S)
        assert self.tickets is None or self.tickets.acquire(timeout=PATIENCE_S)
        if self.error is not None:
            raise self.error
        return super().run(rows, padding_tokens)


@dataclass
class HandClock:
    now_s: float = 100.0

    def monotonic(self) -> float:
        return self.now_s

    def unix(self) -> float:
        return self.now_s


@dataclass
class Listener:
    """Keeps results for the test's thread."""

    results: queue.Queue[StepResult] = field(default_factory=queue.Queue)
    deaths: queue.Queue[str] = field(default_factory=queue.Queue)
    outputs: dict[str, Output] = field(default_factory=dict)

    def next_result(self) -> StepResult:
        result = self.results.get(timeout=PATIENCE_S)
        gather(result, self.outputs)
        return result

    def until(self, done: Callable[[StepResult], bool]) -> StepResult:
        while True:
            result = self.next_result()
            if done(result):
                return result


@dataclass
class Stand:
    """A started runner with all that drives it."""

    settings: EngineConfig
    clock: HandClock = field(default_factory=HandClock)
    listener: Listener = field(default_factory=Listener)

    def __post_init__(self) -> None:
        self.backend = GatedBackend(self.settings)
        self.engine = Engine(self.settings, self.backend, byte_level_codec(), (EOS,))
        self.runner = EngineRunner(self.engine, self.clock)
        self.runner.start(self.listener.results.put, self.listener.deaths.put)

    def wait_for_batch(self) -> None:
        assert self.backend.begun.acquire(timeout=PATIENCE_S)


@pytest.fixture
def stands() -> Iterator[Callable[..., Stand]]:
    made: list[Stand] = []

    def make(settings: EngineConfig | None = None) -> Stand:
        made.append(Stand(settings or config()))
        return made[-1]

    yield make
    for stand in made:
        stand.backend.gate.set()
        stand.runner.stop()
        assert not stand.runner.progress().alive


def idle(result: StepResult) -> bool:
    return not result.load.running and not result.load.waiting


def test_a_runner_is_an_engine_port() -> None:
    settings = config()
    engine = Engine(settings, GatedBackend(settings), byte_level_codec(), (EOS,))
    port: EnginePort = EngineRunner(engine, HandClock())
    assert not port.progress().alive
    port.stop()


def test_a_hundred_requests_from_several_threads_all_finish_with_their_own_output(
    stands: Callable[..., Stand],
) -> None:
    stand = stands(config(slots=64, step_token_budget=128, blocks=1024))
    requests = [request(f"r{n}", prompt=1 + n % 30, max_tokens=1 + n % 17, arrived=float(n)) for n in range(100)]

    def send(part: int) -> None:
        for r in requests[part::4]:
            stand.runner.add(r, 0)

    threads = [threading.Thread(target=send, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stand.listener.until(lambda _: sum(o.ends for o in stand.listener.outputs.values()) == 100)
    for r in requests:
        assert stand.listener.outputs[r.request_id].token_ids == undisturbed(r, max_model_len=128).token_ids
    assert stand.runner.progress().load.adds_total == 100


def test_calls_and_progress_do_not_wait_for_the_step_and_its_age_is_seen(stands: Callable[..., Stand]) -> None:
    stand = stands()
    assert stand.runner.progress().step_age_s is None
    stand.backend.gate.clear()
    stand.runner.add(request("a", max_tokens=2), 0)
    stand.wait_for_batch()
    stand.clock.now_s += 7.5
    stand.runner.add(request("b", max_tokens=2), 0)
    stand.runner.abort(RequestId("a"), 0)
    progress = stand.runner.progress()
    assert progress.alive
    assert progress.step_age_s == 7.5
    assert progress.load.adds_total == 0, "not yet in a result"
    stand.backend.gate.set()
    stand.listener.until(idle)
    assert stand.listener.outputs["a"].finish is FinishReason.ABORT
    assert len(stand.listener.outputs["a"].token_ids) == 1
    assert stand.listener.outputs["b"].finish is FinishReason.LENGTH
    assert stand.runner.progress().step_age_s is None


def test_an_abort_is_done_before_the_next_step_is_planned(stands: Callable[..., Stand]) -> None:
    """One slot: the waiting request can only run in the very next step if the aborted one's slot is free by then."""
    stand = stands(config(slots=1, step_token_budget=16))
    stand.backend.gate.clear()
    stand.runner.add(request("a", max_tokens=100), 0)
    stand.wait_for_batch()
    stand.runner.add(request("b"), 0)
    stand.runner.abort(RequestId("a"), 0)
    stand.backend.gate.set()
    stand.listener.next_result()
    second = stand.listener.next_result()
    assert {(d.request_id, d.finish) for d in second.deltas} == {("a", FinishReason.ABORT), ("b", None)}


def test_aborting_everything_is_followed_by_a_result_that_says_idle(stands: Callable[..., Stand]) -> None:
    stand = stands(config(slots=8, blocks=64))
    stand.backend.gate.clear()
    for n in range(100):
        stand.runner.add(request(f"r{n}", max_tokens=100), 0)
    stand.wait_for_batch()
    for n in range(100):
        stand.runner.abort(RequestId(f"r{n}"), 0)
    stand.backend.gate.set()
    result = stand.listener.until(idle)
    assert result.load.blocks_free == 64
    assert stand.runner.progress().load == result.load
    assert all(o.ends == 1 for o in stand.listener.outputs.values())
    assert len(stand.listener.outputs) == 100


def test_what_goes_beyond_the_bound_is_refused_and_all_else_ends(stands: Callable[..., Stand]) -> None:
    stand = stands(config(max_held=4))
    stand.backend.gate.clear()
    stand.runner.add(request("a", max_tokens=3), 0)
    stand.wait_for_batch()
    for n in range(50):
        stand.runner.add(request(f"r{n}"), 0)
    for n in range(50):
        stand.runner.add(request("r0"), 0)  # a repeat
        stand.runner.abort(RequestId(f"unknown{n}"), 0)
        stand.runner.abort(RequestId("r1"), 0)  # once is enough
    stand.backend.gate.set()
    refused: list[str] = []
    while True:
        result = stand.listener.next_result()
        refused.extend(r.request_id for r in result.refusals)
        assert all(r.reason is RefusalReason.FULL for r in result.refusals)
        if idle(result) and result.load.adds_total == 101:
            break
    assert sorted(refused) == sorted(f"r{n}" for n in range(3, 50))
    assert {n: o.ends for n, o in stand.listener.outputs.items()} == {"a": 1, "r0": 1, "r1": 1, "r2": 1}
    stand.runner.add(request("later"), 0)
    stand.listener.until(idle)
    assert stand.listener.outputs["later"].ends == 1


def test_a_refusal_comes_in_a_result_even_when_there_is_nothing_to_run(stands: Callable[..., Stand]) -> None:
    stand = stands(config(max_held=1))
    stand.backend.gate.clear()
    stand.runner.add(request("a", max_tokens=1), 0)
    stand.wait_for_batch()
    stand.runner.add(request("b"), 0)
    stand.backend.gate.set()
    first = stand.listener.next_result()
    assert idle(first)
    second = stand.listener.next_result()
    assert [r.request_id for r in second.refusals] == ["b"]
    assert second.load.adds_total == 2
    assert second.deltas == ()


def test_stop_lets_the_running_step_end_and_joins(stands: Callable[..., Stand]) -> None:
    stand = stands()
    stand.backend.gate.clear()
    stand.runner.add(request("a", max_tokens=100), 0)
    stand.wait_for_batch()
    stopper = threading.Thread(target=stand.runner.stop)
    stopper.start()
    stand.backend.gate.set()
    stopper.join(PATIENCE_S)
    assert not stopper.is_alive()
    assert not stand.runner.progress().alive
    assert stand.runner.progress().failure == ""
    assert stand.listener.deaths.empty()
    while not stand.listener.results.empty():
        stand.listener.next_result()
    assert 1 <= len(stand.listener.outputs["a"].token_ids) < 100


def test_an_engine_that_breaks_says_why_and_is_seen_to_be_dead(stands: Callable[..., Stand]) -> None:
    stand = stands(config(slots=1))
    stand.backend.error = RuntimeError("device lost")
    for n in range(5):
        stand.runner.add(request(f"r{n}", arrived=float(n)), 0)
    why = stand.listener.deaths.get(timeout=PATIENCE_S)
    assert "EngineBrokenError" in why
    assert "device lost" in why
    progress = stand.runner.progress()
    assert not progress.alive
    assert progress.failure == why
    assert progress.step_age_s is None
    stand.runner.add(request("late"), 0)  # returns at once, as ever


def test_wrong_books_are_noticed_when_the_engine_becomes_idle(stands: Callable[..., Stand]) -> None:
    stand = stands()
    stand.engine.pool._free.pop()  # a block is lost
    stand.runner.add(request("a", max_tokens=2), 0)
    assert "IntegrityError" in stand.listener.deaths.get(timeout=PATIENCE_S)
    stand.listener.until(idle)
    assert stand.listener.outputs["a"].ends == 1


def test_a_callback_that_raises_ends_the_engine_and_is_told() -> None:
    settings = config()
    deaths: queue.Queue[str] = queue.Queue()
    runner = EngineRunner(Engine(settings, GatedBackend(settings), byte_level_codec(), (EOS,)), HandClock())

    def fail(result: StepResult) -> None:
        raise LookupError("no such outbox")

    runner.start(fail, deaths.put)
    runner.add(request("a"), 0)
    assert deaths.get(timeout=PATIENCE_S) == "LookupError: no such outbox"
    runner.stop()
    with pytest.raises(RuntimeError, match="once"):
        runner.start(fail, deaths.put)


# --- moves, from other threads ---


def test_a_request_moves_between_two_engines_that_run_and_nothing_is_lost_doubled_or_run_again(
    stands: Callable[..., Stand],
) -> None:
    source, target = stands(config(blocks=64)), stands(config(blocks=64))
    tickets = source.backend.tickets = threading.Semaphore(3)
    r = request("r", prompt=30, max_tokens=90, temperature=0.8, seed=4, logprobs=1)
    source.runner.add(r, 0)
    there = target.runner.moves
    here = source.runner.moves
    assert there.import_begin(r.request_id, 1, here.kv_format, 2).result(PATIENCE_S) is None

    def ask(future: Future[T]) -> T:
        """The answer, which comes when the step that runs is over; the next one begins and waits."""
        tickets.release()
        return future.result(PATIENCE_S)

    sent = 0
    while sent < 9:
        full = ask(here.exportable_blocks(r.request_id, 0))
        if full > sent:
            data = ask(here.export_blocks(r.request_id, 0, sent, full - sent))
            assert there.import_blocks(r.request_id, 1, sent, data).result(PATIENCE_S) is None
            sent = full
    frozen = here.freeze(r.request_id, 0)
    rest = ask(here.export_rest(r.request_id, 0, sent))
    state = frozen.result(0)
    assert state is not None
    sending = there.import_blocks(r.request_id, 1, sent, rest)
    assert there.import_commit(state, 1).result(PATIENCE_S) is None
    assert sending.result(0) is None
    assert here.release(r.request_id, 0).result(PATIENCE_S)
    source.listener.until(lambda result: result.load.blocks_free == 64)
    told = source.listener.outputs["r"]
    assert tuple(told.token_ids) == state.request.emitted_ids, "what it had put out was told before"
    assert told.ends == 0
    target.listener.outputs["r"] = told
    target.listener.until(lambda _: told.ends == 1)
    expected = undisturbed(r, max_model_len=128)
    assert (told.token_ids, told.text, told.finish) == (expected.token_ids, expected.text, expected.finish)
    assert target.runner.progress().load.prefill_tokens_total == 0
    source.backend.tickets = None
    for stand, attempt in ((source, 0), (target, 1)):
        again = stand.listener.outputs["r"] = Output()
        stand.runner.add(r, attempt)  # no repeat: it has been forgotten
        stand.listener.until(lambda _, again=again: again.ends == 1)  # type: ignore[misc]


def test_an_imported_attempt_can_be_aborted_like_any_other(stands: Callable[..., Stand]) -> None:
    stand = stands(config(blocks=64))
    r = request("r", max_tokens=100)
    moves = stand.runner.moves
    assert moves.import_begin(r.request_id, 1, "arithmetic", 2).result(PATIENCE_S) is None
    stand.runner.abort(r.request_id, 1)
    result = stand.listener.until(lambda result: result.load.blocks_free == 64)
    assert result.deltas == ()
    assert moves.import_begin(r.request_id, 1, "arithmetic", 2).result(PATIENCE_S) is None
    stand.backend.gate.clear()
    state = EngineState(request=r, computed_tokens=0, kv_format="arithmetic")
    assert moves.import_commit(state, 1).result(PATIENCE_S) is None
    stand.wait_for_batch()
    stand.runner.abort(r.request_id, 1)
    stand.backend.gate.set()
    stand.listener.until(lambda result: idle(result) and result.load.blocks_free == 64)
    assert stand.listener.outputs["r"].finish is FinishReason.ABORT


def test_calls_wait_for_the_step_in_order_and_too_many_are_refused(stands: Callable[..., Stand]) -> None:
    stand = stands(config(blocks=64))
    stand.backend.gate.clear()
    stand.runner.add(request("r", max_tokens=3), 0)
    stand.wait_for_batch()
    moves = stand.runner.moves
    calls = [moves.exportable_blocks(RequestId("r"), 0) for _ in range(CALLS_MAX - 1)]
    frozen = moves.freeze(RequestId("r"), 0)
    with pytest.raises(EngineBusyError):
        moves.thaw(RequestId("r"), 0).result(0)
    assert not frozen.done()
    cancelled = calls[0].cancel()
    stand.backend.gate.set()
    state = frozen.result(PATIENCE_S)
    assert cancelled
    assert [call.result(PATIENCE_S) for call in calls[1:]] == [1] * (CALLS_MAX - 2)
    assert state is not None
    assert len(state.request.emitted_ids) == 1
    assert moves.thaw(RequestId("r"), 0).result(PATIENCE_S)
    stand.listener.until(lambda _: stand.listener.outputs["r"].ends == 1)


def test_what_a_call_raises_is_its_askers_and_the_engine_goes_on(stands: Callable[..., Stand]) -> None:
    stand = stands(config(blocks=64))
    with pytest.raises(LookupError):
        stand.runner.moves.export_blocks(RequestId("unknown"), 0, 0, 1).result(PATIENCE_S)
    stand.runner.add(request("a"), 0)
    stand.listener.until(lambda _: "a" in stand.listener.outputs and stand.listener.outputs["a"].ends == 1)


def test_when_the_engine_dies_or_stops_every_call_fails_rather_than_waits(stands: Callable[..., Stand]) -> None:
    stand = stands(config(slots=1))
    stand.backend.gate.clear()
    stand.backend.error = RuntimeError("device lost")
    for n in range(5):
        stand.runner.add(request(f"r{n}", arrived=float(n)), 0)
    stand.wait_for_batch()
    stand.backend.gate.set()
    stand.listener.deaths.get(timeout=PATIENCE_S)
    with pytest.raises(EngineStoppedError):
        stand.runner.moves.freeze(RequestId("r0"), 0).result(PATIENCE_S)
    other = stands(config())
    other.backend.gate.clear()
    other.runner.add(request("a", max_tokens=50), 0)
    other.wait_for_batch()
    waiting = other.runner.moves.freeze(RequestId("a"), 0)
    stopper = threading.Thread(target=other.runner.stop)
    stopper.start()
    while not other.runner._stopping:
        threading.Event().wait(0.001)
    other.backend.gate.set()
    stopper.join(PATIENCE_S)
    with pytest.raises(EngineStoppedError, match="stopped"):
        waiting.result(PATIENCE_S)


def test_a_runner_that_never_started_fails_its_calls_when_it_is_stopped() -> None:
    settings = config()
    runner = EngineRunner(Engine(settings, GatedBackend(settings), byte_level_codec(), (EOS,)), HandClock())
    waiting = runner.moves.freeze(RequestId("a"), 0)
    runner.stop()
    with pytest.raises(EngineStoppedError):
        waiting.result(0)


def test_an_engine_whose_work_waits_for_a_frozen_request_does_not_spin(stands: Callable[..., Stand]) -> None:
    stand = stands(config(blocks=32))
    stand.backend.gate.clear()
    stand.runner.add(request("a", prompt=60, max_tokens=60), 0)
    stand.wait_for_batch()
    frozen = stand.runner.moves.freeze(RequestId("a"), 0)
    stand.backend.gate.set()
    assert frozen.result(PATIENCE_S) is not None
    large = request("large", prompt=100, max_tokens=4)
    stand.runner.add(large, 0)
    stand.listener.until(lambda result: result.load.adds_total == 2)
    with pytest.raises(queue.Empty):
        stand.listener.results.get(timeout=0.1)
    assert stand.runner.moves.release(RequestId("a"), 0).result(PATIENCE_S)
    stand.listener.until(lambda _: stand.listener.outputs.get("large", Output()).ends == 1)
    assert stand.listener.outputs["large"].token_ids == undisturbed(large, max_model_len=128).token_ids
