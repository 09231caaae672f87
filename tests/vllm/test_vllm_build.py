"""What becomes of the engine's configuration in vLLM's core, and of the core's processes."""

from __future__ import annotations

import gc
import time

import psutil
import pytest

from cluster.clock import SystemClock
from cluster.config import EngineConfig, EngineKind, VllmConfig
from cluster.engine.memory import kv_block_bytes
from cluster.engine.vllm.build import build_vllm_engine
from cluster.model import ModelFolder
from tests.vllm.vllm_kit import Listener, request

GIB = 2**30


@pytest.mark.alone
def test_blocks_follow_from_the_share_of_memory_and_stopping_leaves_no_process(tiny_model: ModelFolder) -> None:
    """On a CPU vLLM takes the share of the machine's memory; of it goes what its worker has taken before."""
    share = 1.5 * GIB / psutil.virtual_memory().total
    config = EngineConfig(
        kind=EngineKind.VLLM, blocks=1, max_model_len=512, vllm=VllmConfig(eager=True, gpu_memory_utilization=share)
    )
    listener = Listener(build_vllm_engine(tiny_model, config, SystemClock()))
    listener.start()
    family = [p for p in psutil.Process().children(recursive=True) if "VLLM" in p.name()]
    assert len(family) == 2, "the core and its worker"
    try:
        told = listener.engine.progress().load.blocks_total
        assert 0.1 * GIB < told * kv_block_bytes(tiny_model, config) < 1.5 * GIB
        (output,) = listener.run(request("any", max_tokens=4))
        assert len(output.token_ids) == 4
        assert listener.until_idle().blocks_total == told
    finally:
        started_s = time.monotonic()
        listener.engine.stop()
    assert time.monotonic() - started_s < 3.0
    _, alive = psutil.wait_procs(family, timeout=3)
    assert alive == []


def test_why_a_core_did_not_start_is_said_in_one_line(tiny_model: ModelFolder) -> None:
    """The worker has taken more memory than its share, which vLLM finds out in the core's process."""
    config = EngineConfig(
        kind=EngineKind.VLLM, blocks=1, max_model_len=512, vllm=VllmConfig(eager=True, gpu_memory_utilization=1e-6)
    )
    with pytest.raises(RuntimeError, match=r"did not start: ValueError: .*memory") as failure:
        build_vllm_engine(tiny_model, config, SystemClock())
    assert len(str(failure.value).splitlines()) == 1
    del failure
    gc.collect()  # vLLM leaves a context of ZeroMQ behind, whose warning belongs to this test
