"""The laws of worker processes: a question is answered or raises in time, and nothing is left behind."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.model import ModelFolder
from ops.bench.peers.lines import Failed, Measured, Open, Opened, Profile, Profiled, Run
from ops.bench.worker import Worker, WorkerError

RUN = Run(requests=(((1, 2, 3), 2),), concurrency=1)


def script(text: str) -> Worker:
    return Worker("peer", (sys.executable, "-c", text), {})


def test_worker_that_dies_is_named_with_its_last_words() -> None:
    text = "import sys; sys.stdin.readline(); print('no such model', file=sys.stderr); sys.exit(3)"
    with script(text) as worker, pytest.raises(WorkerError, match=r"peer: ended with 3: no such model"):
        worker.ask(RUN, 30)


def test_worker_that_says_nothing_is_given_up() -> None:
    with script("import sys; sys.stdin.read()") as worker, pytest.raises(WorkerError, match="no answer for 0 s"):
        worker.ask(RUN, 0.05)


def test_worker_that_says_something_else_is_refused() -> None:
    with script("input(); print('hello')") as worker, pytest.raises(WorkerError, match="peer"):
        worker.ask(RUN, 30)


def test_command_that_is_absent_is_named() -> None:
    with pytest.raises(WorkerError, match="/nowhere/python cannot be run"):
        Worker("peer", ("/nowhere/python",), {})


def test_closing_ends_the_worker_and_its_children(tmp_path: Path) -> None:
    """A pipe that both hold open for writing ends when both have ended."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    text = (
        "import subprocess; "
        f"child = subprocess.Popen(['sleep', '600'], stdout=open({str(pipe)!r}, 'w')); "
        "input(); input()"
    )
    worker = script(text)
    with pipe.open() as reading:  # waits until it is open for writing
        assert not select.select([reading], [], [], 0)[0], "both run"
        worker.close()
        assert reading.read() == ""


@pytest.fixture
def embedded() -> Iterator[Worker]:
    command = (sys.executable, "-m", "ops.bench.peers.embedded")
    with Worker("forebay", command, {"OMP_NUM_THREADS": "1"}) as worker:
        yield worker


def opening(model: ModelFolder, slots: int) -> Open:
    setting = {"step_token_budget": 64, "slots": slots}
    return Open(str(model.path), "float32", max_model_len=256, kv_tokens=1024, setting=setting)


@pytest.mark.slow
def test_embedded_engine_answers_with_all_tokens_of_a_closed_loop(embedded: Worker, tiny_model: ModelFolder) -> None:
    assert isinstance(embedded.ask(opening(tiny_model, 2), 60), Opened)
    requests = tuple((tuple(range(3, 3 + n)), n) for n in (5, 9, 7))
    for _ in range(2):  # what the first leaves behind must not be in the way of the second
        measured = embedded.ask(Run(requests, concurrency=1), 60)
        assert isinstance(measured, Measured)
        assert measured.tokens == 5 + 9 + 7
        assert measured.cpu_seconds > 0


@pytest.mark.slow
def test_setting_that_cannot_be_is_an_answer_and_the_next_works(embedded: Worker, tiny_model: ModelFolder) -> None:
    assert isinstance(embedded.ask(opening(tiny_model, 65), 60), Failed)
    assert isinstance(embedded.ask(opening(tiny_model, 1), 60), Opened)


@pytest.mark.slow
def test_profile_shares_out_the_time_of_a_step(embedded: Worker, tiny_model: ModelFolder) -> None:
    embedded.ask(opening(tiny_model, 1), 60)
    profiled = embedded.ask(Profile((((5, 6, 7), 20),), concurrency=1), 60)
    assert isinstance(profiled, Profiled)
    assert 0 < profiled.outside_backend_cpu_ms < profiled.step_cpu_ms
    times = [one.cpu_ms_per_step for one in profiled.functions]
    assert times == sorted(times, reverse=True)
    assert all(ms >= 0 for ms in times)
    assert sum(times) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    [{"mode": "static", "batch": 2}, {"mode": "continuous", "page_tokens": 32, "batch_tokens": 64}],
    ids=["static", "continuous"],
)
def test_transformers_makes_exactly_the_tokens_asked_for(
    setting: dict[str, int | str], tiny_model: ModelFolder
) -> None:
    command = (sys.executable, "-m", "ops.bench.peers.hf")
    with Worker("transformers", command, {"OMP_NUM_THREADS": "1"}) as worker:
        opened = worker.ask(Open(str(tiny_model.path), "float32", 256, 1024, setting), 60)
        assert isinstance(opened, Opened)
        requests = tuple((tuple(range(3, 3 + n)), n) for n in (4, 6, 6))
        measured = worker.ask(Run(requests, concurrency=2), 60)
        assert isinstance(measured, Measured)
        # Static counts all three; the closed loop ends with the second, when the third has made what was left of it.
        assert measured.tokens == 16 if setting["mode"] == "static" else 10 <= measured.tokens <= 16
