"""An engine that is full, and one whose core's process dies. (Starting one takes half a minute, so one does for both.)"""

from __future__ import annotations

import os
import signal
import time

from cluster.clock import SystemClock
from cluster.config import EngineConfig, EngineKind, VllmConfig
from cluster.engine.vllm.build import build_vllm_engine
from cluster.model import ModelFolder
from cluster.types import Refusal, RefusalReason
from tests.vllm.vllm_kit import Listener, request

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


def test_a_full_engine_refuses_and_a_killed_core_is_a_death_within_a_second(tiny_model: ModelFolder) -> None:
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
        os.kill(pid, signal.SIGKILL)
        killed_s = time.monotonic()
        died_s, why = listener.deaths.get(timeout=10)
        assert died_s - killed_s < 1.0
        assert "EngineDeadError" in why
        assert not listener.engine.progress().alive
    finally:
        listener.engine.stop()
