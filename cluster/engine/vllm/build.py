"""Starts a vLLM engine core and puts the adapter before it.

Owns: vLLM's arguments and environment. Imports vLLM's internals when it is called. Invariant: what decides order, place,
preemption and draws in the core is ours; vLLM's own HTTP server is never started.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from cluster.config import EngineConfig, VllmConfig
from cluster.engine.intake import Intake
from cluster.engine.memory import kv_block_bytes
from cluster.engine.text import TextCodec
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
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_COMPUTE_NANS_IN_LOGITS": "1",  # the count is our own, see sampler.py
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # logits processors have another interface in the second one
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # each replica on a machine would bind itself to the same cores
}


def build_vllm_engine(model: ModelFolder, config: EngineConfig, clock: Clock) -> VllmEngine:
    """An engine that has loaded its model and waits for `start`. Takes seconds to minutes.

    Raises:
        ModelFolderError: the model's configuration does not say what is needed.
        VllmVersionError: vLLM is absent or another version.
        RuntimeError: the core did not start.
    """
    os.environ.update(ENVIRONMENT)
    from cluster.engine.vllm.adapter import VllmEngine
    from cluster.engine.vllm.internals import core_blocks, launch_core

    intake = Intake(config, TextCodec.from_file(model.tokenizer_path), model.vocab_size, model.eos_token_ids)
    client = launch_core(engine_arguments(model, config))
    # Where the blocks follow from the GPU's memory the core alone knows how many there are.
    config = config.model_copy(update={"blocks": core_blocks(client)})
    return VllmEngine(client, config, intake, model.eos_token_ids, clock)


def engine_arguments(model: ModelFolder, config: EngineConfig) -> Mapping[str, object]:
    """`AsyncEngineArgs`."""
    own = config.vllm or VllmConfig()
    return {
        "model": str(model.path),
        "skip_tokenizer_init": True,
        "dtype": config.dtype.value,
        "seed": 0,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.slots,
        "max_num_batched_tokens": config.step_token_budget,
        "block_size": config.block_size_tokens,
        **_memory_arguments(model, config, own.gpu_memory_utilization),
        "enable_prefix_caching": config.prefix_cache,
        "enable_chunked_prefill": True,
        "async_scheduling": True,
        "scheduling_policy": "fcfs",  # vLLM then preempts the last that runs, and it runs what we put last last
        "scheduler_cls": SCHEDULER,
        "logits_processors": [SAMPLER],
        "watermark": 0.0,
        "enforce_eager": own.eager,
        "disable_log_stats": True,
        # Keys and values that cannot be read are computed again, unless the configuration says otherwise.
        "kv_transfer_config": own.kv_transfer_config
        and {"kv_load_failure_policy": "recompute", **own.kv_transfer_config},
        "additional_config": {NOTE_KEY: config.model_dump(mode="json")},
    }


def _memory_arguments(model: ModelFolder, config: EngineConfig, utilization: float | None) -> dict[str, object]:
    """Of vLLM's blocks one is its own (the null block). A stated size spares it the search for free memory."""
    if utilization is not None:
        return {"gpu_memory_utilization": utilization}
    blocks = config.blocks + 1
    return {"num_gpu_blocks_override": blocks, "kv_cache_memory_bytes": blocks * kv_block_bytes(model, config)}
