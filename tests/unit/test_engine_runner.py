"""An engine in its own thread: nobody waits for a step, every change is told, and death is told too."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from cluster.config import EngineConfig
from cluster.engine.engine import Engine
from cluster.engine.runner import EngineRunner
from cluster.ports import EnginePort, Row, StepResult
from cluster.types import FinishReason, RefusalReason, RequestId
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

PATIENCE_S = 20.0
"""How long a test waits for an event that comes at once unless something is broken."""


class GatedBackend(ArithmeticBackend):
    """Says when a batch has begun; while the gate is shut, the batch waits there."""

    def __init__(self, settings: EngineConfig) -> None:
        super().__init__(settings.blocks, settings.block_size_tokens, vocab_size())
        self.gate = threading.Event()
        self.gate.set()
        self.begun = threading.Semaphore(0)
        self.error: Exception | None = None

    def run(self, rows: Sequence[Row]) -> list[int]:
        self.begun.release()
        assert self.gate.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error
        return super().run(rows)


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


def test_what_goes_beyond_the_bound_is_refused_and_the_inbox_does_not_grow(stands: Callable[..., Stand]) -> None:
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
    assert len(stand.runner._inbox) == 3 + 1
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
