"""An engine core ends with the process that started it, and its workers with it. Real processes; no vLLM."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection

import psutil
import pytest

from cluster.engine.vllm.orphan import end_with_parent

SPAWN = multiprocessing.get_context("spawn")  # as vLLM starts its processes


def _sleep(said: Connection) -> None:
    said.send(os.getpid())
    time.sleep(600)


def _core(said: Connection) -> None:
    end_with_parent()
    SPAWN.Process(target=_sleep, args=(said,)).start()
    _sleep(said)


def _replica(said: Connection) -> None:
    SPAWN.Process(target=_core, args=(said,)).start()
    _sleep(said)


def test_a_core_whose_replica_is_killed_ends_at_once_with_its_workers() -> None:
    heard, said = SPAWN.Pipe(duplex=False)
    replica = SPAWN.Process(target=_replica, args=(said,))
    replica.start()
    family: list[psutil.Process] = []
    try:
        while len(family) < 3:
            assert heard.poll(60), "a process did not start"
            family.append(psutil.Process(heard.recv()))
        assert replica.pid is not None
        os.kill(replica.pid, signal.SIGKILL)
        replica.join(10)
        _, alive = psutil.wait_procs([p for p in family if p.pid != replica.pid], timeout=5)
        assert alive == []
    finally:
        for process in family:
            if process.is_running():
                process.kill()


def test_a_process_that_multiprocessing_did_not_start_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a scheduler is stepped by hand."""
    assert multiprocessing.parent_process() is None
    before = multiprocessing.active_children()
    end_with_parent()
    assert multiprocessing.active_children() == before
