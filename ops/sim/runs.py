"""The runs of a study, one after the other or in several processes at once.

Owns: what is kept of a run, and the processes. Imports the study and its figures. Invariants: what a run gives does not
depend on where it ran, nor on what ran beside it; no process is left when the runs are over, however they end.
"""

from __future__ import annotations

import itertools
import logging
import signal
import time
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from ops.errors import CommandError
from ops.report import ReportRow
from ops.sim.objectives import ttft_s
from ops.sim.report import figures, prefix_figures
from ops.sim.study import Run, Study, run
from ops.sim.values import SimResult

SHOWN_EVERY_S = 0.2
WAITS_KEPT = 200
"""Of each class and run, for the chart: each stands for as many requests as the next."""


@dataclass(frozen=True, slots=True)
class Ran:
    """What is kept of a run."""

    rows: tuple[ReportRow, ...]
    event_log_sha256: str
    violations: tuple[str, ...]
    waits_ms: Mapping[str, tuple[float, ...]]
    """Times to the first token by class, ascending."""


class FailedRunError(Exception):
    """A run came to no end."""

    def __init__(self, failed: Run, why: str) -> None:
        super().__init__(why)
        self.failed = failed


def kept(study: Study, one: Run, result: SimResult) -> Ran:
    """What is kept of it."""
    waits_ms = {}
    for name in study.objectives:
        waits = sorted(1000 * s for r in result.requests if r.priority_class == name and (s := ttft_s(r)) is not None)
        if waits:
            waits_ms[name] = thinned(waits)
    shares = any(request.block_ids for request in study.requests)
    prefixes = prefix_figures(study, one, result) if shares else ()
    return Ran(
        (*figures(study, one.replicas, result), *prefixes),
        result.event_log_sha256,
        tuple(result.invariant_violations),
        waits_ms,
    )


def thinned(ascending: Sequence[float]) -> tuple[float, ...]:
    """The middle one of each of `WAITS_KEPT` equal parts, and the last; all where there are no more."""
    n = len(ascending)
    if n <= WAITS_KEPT:
        return tuple(ascending)
    return (*(ascending[n * (2 * k + 1) // (2 * WAITS_KEPT)] for k in range(WAITS_KEPT - 1)), ascending[-1])


def run_all(
    study: Study, runs: Sequence[Run], jobs: int, show: Callable[[Run, float], None]
) -> Generator[tuple[Run, Ran], None, None]:
    """Each run with what is kept of it, as they end. `show` is told how far one has come, in virtual seconds.

    Close it, and what still runs is ended.

    Raises:
        CommandError: the trace or the faults do not allow it.
        FailedRunError: one failed, or its process did.
    """
    if min(jobs, len(runs)) > 1:
        yield from _in_processes(study, runs, min(jobs, len(runs)), show)
        return
    for one in runs:
        yield one, _ran(study, one, partial(show, one))


def _ran(study: Study, one: Run, progress: Callable[[float], None]) -> Ran:
    disabled = logging.root.manager.disable
    logging.disable()  # a log of requests that nobody sent
    try:
        return kept(study, one, run(study, one, progress))
    except CommandError:
        raise
    except Exception as error:
        raise FailedRunError(one, "".join(traceback.format_exception(error))) from error
    finally:
        logging.disable(disabled)


# --- several at once ---

_Said = float | Ran | CommandError | str
"""By a worker: how far its run has come, and then what came of it, or why nothing did."""


def _in_processes(
    study: Study, runs: Sequence[Run], jobs: int, show: Callable[[Run, float], None]
) -> Generator[tuple[Run, Ran], None, None]:
    context = get_context("spawn")
    workers: list[BaseProcess] = []
    busy: dict[Connection, tuple[BaseProcess, Run]] = {}
    to_come = iter(runs)
    try:
        for one in itertools.islice(to_come, jobs):
            ours, theirs = context.Pipe()
            worker: BaseProcess = context.Process(target=_work, args=(theirs, study), daemon=True)
            _start(worker)
            workers.append(worker)
            theirs.close()
            busy[ours] = worker, one
            _ask(ours, one)
        while busy:
            for pipe in wait(list(busy)):
                assert isinstance(pipe, Connection)
                worker, one = busy[pipe]
                said = _heard(pipe, worker)
                if isinstance(said, float):
                    show(one, said)
                    continue
                if isinstance(said, CommandError):
                    raise said
                if isinstance(said, str):
                    raise FailedRunError(one, said)
                following = next(to_come, None)
                if following is None:
                    pipe.close()
                    del busy[pipe]
                else:
                    busy[pipe] = worker, following
                    _ask(pipe, following)
                yield one, said
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.join()


def _start(worker: BaseProcess) -> None:
    """An interrupt goes to all processes of a terminal: it is for the one that ends the others."""
    resource_tracker.ensure_running()  # or start() would start it, which lets interrupts in again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        worker.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _ask(pipe: Connection, one: Run) -> None:
    with suppress(OSError):  # a worker that is gone is heard of
        pipe.send(one)


def _heard(pipe: Connection, worker: BaseProcess) -> _Said:
    try:
        said: _Said = pipe.recv()
    except (EOFError, OSError):
        worker.join()
        return (
            f"its process ended with exit code {worker.exitcode}; if something killed it, was there too little memory?"
        )
    return said


def _work(pipe: Connection, study: Study) -> None:
    """In a process of its own: run what is asked for, until nobody asks any more."""
    with suppress(EOFError, OSError):  # who asked is gone
        while True:
            one: Run = pipe.recv()
            said: _Said
            try:
                said = _ran(study, one, _Teller(pipe))
            except CommandError as error:
                said = error
            except FailedRunError as error:
                said = str(error)
            pipe.send(said)


class _Teller:
    """Says how far a run has come, now and then."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._next_s = 0.0

    def __call__(self, virtual_s: float) -> None:
        if (now_s := time.monotonic()) >= self._next_s:
            self._next_s = now_s + SHOWN_EVERY_S
            self._pipe.send(virtual_s)
