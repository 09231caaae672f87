"""The runs of a study: the same wherever they run, and no process is left of them, however they end."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ops.sim.runs import WAITS_KEPT, FailedRunError, run_all, thinned
from ops.sim.study import Run
from tests.unit.test_sim_report import study

TRACE = Path(__file__).parents[1] / "data" / "trace_azure.csv"
RUNS = [Run(1, "forebay", 0), Run(2, "llumnix", 0), Run(2, "llumnix", 1)]


def _ignore(one: Run, now_s: float) -> None:
    del one, now_s


def test_runs_give_the_same_in_one_process_and_in_several() -> None:
    one = study(duration_s=3.0)
    alone = dict(run_all(one, RUNS, 1, _ignore))
    shown: dict[Run, float] = {}
    beside = dict(run_all(one, RUNS, 2, shown.__setitem__))
    assert alone.keys() == beside.keys() == shown.keys() == set(RUNS)
    for run in RUNS:
        assert alone[run].event_log_sha256 == beside[run].event_log_sha256
        assert alone[run].waits_ms == beside[run].waits_ms
        told = [
            {r.name: r.value for r in ran.rows if r.name != "sim_over_real_time"} for ran in (alone[run], beside[run])
        ]
        assert told[0] == told[1]
    assert len({ran.event_log_sha256 for ran in alone.values()}) == 3
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_run_that_fails_is_named_with_what_it_raised(jobs: int) -> None:
    wrong = Run(1, "no such policy", 7)
    with pytest.raises(FailedRunError, match="KeyError: 'no such policy'") as failure:
        list(run_all(study(duration_s=1.0), [wrong, Run(1, "forebay", 0)], jobs, _ignore))
    assert failure.value.failed == wrong
    assert not multiprocessing.active_children()


def test_a_run_whose_process_is_killed_is_named_and_the_others_are_ended() -> None:
    killed: list[int] = []

    def kill_first(one: Run, now_s: float) -> None:
        del now_s
        if one == RUNS[0] and not killed:
            victim = min(multiprocessing.active_children(), key=lambda worker: worker.pid or 0)
            killed.append(victim.pid or 0)
            victim.kill()

    # Long enough that it is not over before it is killed.
    with pytest.raises(FailedRunError, match="exit code -9") as failure:
        list(run_all(study(duration_s=600.0), RUNS[:2], 2, kill_first))
    assert failure.value.failed == RUNS[0]
    assert not multiprocessing.active_children()


def test_an_interrupt_ends_all_processes_without_a_word_of_theirs_and_the_file_has_what_was_over(
    tmp_path: Path,
) -> None:
    file = tmp_path / "study.json"
    command = [sys.executable, "-m", "ops.cli", "simulate", "--trace", str(TRACE), "--json", str(file), "--jobs", "2"]
    command += ["--replicas", "1", "--duration", "100", "--seeds", "10", "--policy", "forebay,round-robin"]

    def heeds_interrupts() -> None:
        """Tests that a script has put into the background ignore them, and so would what they start."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stderr=pipe, stdout=pipe, text=True, process_group=0, preexec_fn=heeds_interrupts
    ) as ran:
        while not file.exists():
            assert ran.poll() is None
            time.sleep(0.01)
        os.killpg(ran.pid, signal.SIGINT)
        out, said = ran.communicate(timeout=60)  # until nobody is left who could write
    assert (ran.returncode, out, said) == (130, "", "forebay: interrupted\n")
    context = json.loads(file.read_text())["context"]
    assert 1 <= context["runs_done"] < context["runs"] == 20


def test_of_many_waits_as_many_are_kept_at_even_parts_and_the_longest() -> None:
    assert thinned([1.0, 2.0]) == (1.0, 2.0)
    kept = thinned([float(k) for k in range(10 * WAITS_KEPT)])
    assert kept == (*(10.0 * k + 5 for k in range(WAITS_KEPT - 1)), 10.0 * WAITS_KEPT - 1)
