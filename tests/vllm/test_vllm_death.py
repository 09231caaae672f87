"""The engine core's process dies."""

from __future__ import annotations

import os
import signal
import time

from cluster.clock import SystemClock
from cluster.config import EngineConfig
from cluster.engine.vllm.build import build_vllm_engine
from cluster.model import ModelFolder
from tests.vllm.vllm_kit import Listener, request

CONFIG = EngineConfig(slots=4, step_token_budget=64, block_size_tokens=32, blocks=24, max_model_len=512)


def test_a_killed_core_is_a_death_within_a_second(tiny_model: ModelFolder) -> None:
    listener = Listener(build_vllm_engine(tiny_model, CONFIG, SystemClock(), eager=True))
    listener.start()
    try:
        running = [request(f"r {n}", max_tokens=400) for n in range(3)]
        listener.add(*running)
        listener.until_tokens(3, *running)
        (pid,) = listener.engine.core_pids()
        os.kill(pid, signal.SIGKILL)
        killed_s = time.monotonic()
        died_s, why = listener.deaths.get(timeout=10)
        assert died_s - killed_s < 1.0
        assert "EngineDeadError" in why
        assert not listener.engine.progress().alive
    finally:
        listener.engine.stop()
