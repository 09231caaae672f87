"""An engine that is full, and engines whose core's process dies. (Starting one takes half a minute: one does for two.)"""

from __future__ import annotations

import os
import signal
import threading
import time

import psutil
import pytest

from cluster.clock import SystemClock
from cluster.config import EngineConfig, EngineKind, VllmConfig
from cluster.engine.vllm.build import build_vllm_engine
from cluster.model import ModelFolder
from cluster.types import Refusal, RefusalReason
from tests.vllm.vllm_kit import PATIENCE_S, Listener, request

pytestmark = pytest.mark.alone

CONFIG = EngineConfig(
    kind=EngineKind.VLLM,
    slots=4,
    step_token_budget=64,
    block_size_tokens=32,
    blocks=24,
    max_model_len=512,
    max_held=3,
    vllm=VllmConfig(eager=True),
)


def test_a_full_engine_refuses_and_a_killed_core_is_a_death_within_a_second_that_no_process_survives(
    tiny_model: ModelFolder,
) -> None:
    listener = Listener(build_vllm_engine(tiny_model, CONFIG, SystemClock()))
    listener.start()
    try:
        running = [request(f"r {n}", max_tokens=400) for n in range(3)]
        listener.add(*running)
        listener.until_tokens(3, *running)

        too_many = request("one too many")
        listener.add(too_many)
        listener.engine.add(running[0], 0)  # a repeat is ignored, and counted
        refusals: list[Refusal] = []
        while len(refusals) < 1 or listener.load is None or listener.load.adds_total < 5:
            refusals += listener.take_one().refusals
        assert refusals == [Refusal(too_many.request_id, 0, RefusalReason.FULL)]
        assert len(listener.places()) == 3

        (pid,) = listener.engine.core_pids()
        workers = psutil.Process(pid).children(recursive=True)
        assert workers, "on a CPU a core has a worker"
        os.kill(pid, signal.SIGKILL)
        killed_s = time.monotonic()
        died_s, why = listener.deaths.get(timeout=10)
        assert died_s - killed_s < 1.0
        assert "EngineDeadError" in why
        assert not listener.engine.progress().alive
        _, alive = psutil.wait_procs(workers, timeout=2.0)
        # One that has ended and has not been waited for by whoever inherited it is nobody's process any more.
        assert [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []
    finally:
        listener.engine.stop()


def test_a_core_that_dies_before_it_has_said_anything_is_a_death_and_no_start_without_end(
    tiny_model: ModelFolder,
) -> None:
    """It stands still, so that it cannot answer what a start asks it."""
    listener = Listener(build_vllm_engine(tiny_model, CONFIG, SystemClock()))
    (pid,) = listener.engine.core_pids()
    os.kill(pid, signal.SIGSTOP)
    starting = threading.Thread(target=listener.start, daemon=True)
    starting.start()
    deadline_s = time.monotonic() + PATIENCE_S
    while listener.engine.progress().step_age_s is None:  # it has been asked
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    _, why = listener.deaths.get(timeout=PATIENCE_S)
    assert "EngineDeadError" in why
    starting.join(PATIENCE_S)
    assert not starting.is_alive()
    listener.engine.stop()
