"""Starts a vLLM engine core and puts the adapter before it.

Owns: vLLM's arguments and environment. Imports vLLM's internals when it is called. Invariant: what decides order, place,
preemption and draws in the core is ours; vLLM's own HTTP server is never started.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from cluster.config import EngineConfig
from cluster.engine.intake import Intake
from cluster.engine.text import TextCodec
from cluster.engine.vllm.ledger import Ledger
from cluster.engine.vllm.wire import NOTE_KEY
from cluster.model import ModelFolder
from cluster.ports import Clock

if TYPE_CHECKING:
    from cluster.engine.vllm.adapter import VllmEngine

SCHEDULER = "cluster.engine.vllm.scheduler.ForebayScheduler"
SAMPLER = "cluster.engine.vllm.sampler:DrawProcessor"

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # logits processors have another interface in the second one
}


def build_vllm_engine(model: ModelFolder, config: EngineConfig, clock: Clock, *, eager: bool = False) -> VllmEngine:
    """An engine that has loaded its model and waits for `start`. Takes seconds to minutes.

    Args:
        eager: Compile nothing; for CPUs and tests.

    Raises:
        ValueError: the configuration asks for what this backend does not do.
        VllmVersionError: vLLM is absent or another version.
        RuntimeError: the core did not start.
    """
    Ledger(config)  # raises here rather than in the core's process
    os.environ.update(ENVIRONMENT)
    from cluster.engine.vllm.adapter import VllmEngine
    from cluster.engine.vllm.internals import launch_core

    intake = Intake(config, TextCodec.from_file(model.tokenizer_path), model.vocab_size, model.eos_token_ids)
    client = launch_core(engine_arguments(model, config, eager=eager))
    return VllmEngine(client, config, intake, model.eos_token_ids, clock)


def engine_arguments(model: ModelFolder, config: EngineConfig, *, eager: bool) -> Mapping[str, object]:
    """`AsyncEngineArgs`. Of vLLM's blocks one is its own (the null block)."""
    return {
        "model": str(model.path),
        "skip_tokenizer_init": True,
        "dtype": config.dtype.value,
        "seed": 0,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.slots,
        "max_num_batched_tokens": config.step_token_budget,
        "block_size": config.block_size_tokens,
        "num_gpu_blocks_override": config.blocks + 1,
        "enable_prefix_caching": config.prefix_cache,
        "enable_chunked_prefill": True,
        "async_scheduling": True,
        "scheduling_policy": "fcfs",  # vLLM then preempts the last that runs, and it runs what we put last last
        "scheduler_cls": SCHEDULER,
        "logits_processors": [SAMPLER],
        "watermark": 0.0,
        "enforce_eager": eager,
        "disable_log_stats": True,
        "additional_config": {NOTE_KEY: config.model_dump(mode="json")},
    }
