"""How much memory one replica takes on a CPU, from the model's files alone.

Owns: the estimate that a launcher makes before it starts anything. Imports no torch: it reads the headers of the weights.
Invariant: it names every term that grows with the model or the configuration; the rest is one measured constant per
engine and decoder.
"""

from __future__ import annotations

import json
import math
import struct
from typing import NamedTuple

from cluster.config import DType, EngineConfig, EngineKind
from cluster.engine.torch.llama import read_spec
from cluster.model import ModelFolder, ModelFolderError

DTYPE_BYTES = {DType.FLOAT32: 4, DType.BFLOAT16: 2}
STORED_NAMES = {DType.FLOAT32: "F32", DType.BFLOAT16: "BF16"}
"""In safetensors files."""
PROCESS_BYTES = 650 * 2**20
"""A replica's process without a model: Python, Ray's worker, torch, numba, compiled kernels, and scratch memory."""
TRANSFORMERS_BYTES = 150 * 2**20
"""What a process takes beyond that whose model transformers runs."""
VLLM_PROCESSES_BYTES = 1600 * 2**20
"""vLLM's three processes without a model: the replica with its client, the engine core, and the worker that it has on CPUs.
Measured: 1,380 MiB with a tiny model, 1,570 MiB with SmolLM2-135M."""
BYTES_PER_LOGIT = 8
"""Of a step's tokens in float32, and once more where a decoder converts them or their scores are taken."""
BYTES_PER_DRAWN_LOGIT = 32
"""Of the one row that a token is drawn from: changed logits, weights, and running sums in float64."""


def memory_bytes(model: ModelFolder, config: EngineConfig) -> int:
    """Resident bytes of one replica.

    Raises:
        ModelFolderError: the configuration or a weight file does not say what is needed.
    """
    return _vllm_bytes(model, config) if config.kind is EngineKind.VLLM else _embedded_bytes(model, config)


def _embedded_bytes(model: ModelFolder, config: EngineConfig) -> int:
    """Weights, KV pool, what it may swap out to, a step's logits, and the process itself."""
    size = DTYPE_BYTES[config.dtype]
    stored = stored_tensors(model)
    numbers = sum(tensor.numbers for tensor in stored)
    process = PROCESS_BYTES
    if read_spec(model) is None:  # not for the lean decoder
        process += TRANSFORMERS_BYTES
        numbers += _packed_output_numbers(model)
        # What is converted lies in memory once more until it is packed, and the allocator keeps most of it.
        numbers += sum(tensor.numbers for tensor in stored if tensor.dtype != STORED_NAMES[config.dtype])
    return (
        numbers * size
        + (config.blocks + config.host_blocks) * kv_block_bytes(model, config)
        + config.step_token_budget * model.vocab_size * BYTES_PER_LOGIT
        + model.vocab_size * BYTES_PER_DRAWN_LOGIT
        + process
    )


def _vllm_bytes(model: ModelFolder, config: EngineConfig) -> int:
    """Weights, KV blocks with vLLM's own one, the logits of the rows that a step draws from, and the processes."""
    numbers = sum(tensor.numbers for tensor in stored_tensors(model)) + _packed_output_numbers(model)
    return (
        numbers * DTYPE_BYTES[config.dtype]
        + (config.blocks + 1) * kv_block_bytes(model, config)
        + config.slots * model.vocab_size * BYTES_PER_LOGIT
        + VLLM_PROCESSES_BYTES
    )


def _packed_output_numbers(model: ModelFolder) -> int:
    """Where the output layer is the embedding, it lies packed beside it."""
    return model.vocab_size * model.positive("hidden_size") if model.settings.get("tie_word_embeddings") else 0


def kv_block_bytes(model: ModelFolder, config: EngineConfig) -> int:
    """Of one KV block, all layers. Raises ModelFolderError."""
    heads, hidden = model.positive("num_attention_heads"), model.positive("hidden_size")
    kv_heads = model.positive("num_key_value_heads", heads)
    head_dim = model.positive("head_dim", hidden // heads)
    numbers_per_token = 2 * model.positive("num_hidden_layers") * kv_heads * head_dim
    return config.block_size_tokens * numbers_per_token * DTYPE_BYTES[config.dtype]


class StoredTensor(NamedTuple):
    dtype: str
    """As safetensors names it."""
    numbers: int


def stored_tensors(model: ModelFolder) -> list[StoredTensor]:
    """What the weight files have.

    A safetensors file begins with the length of its JSON header, then the header. Raises ModelFolderError.
    """
    stored: list[StoredTensor] = []
    for file in model.weight_files:
        try:
            with file.open("rb") as opened:
                (length,) = struct.unpack("<Q", opened.read(8))
                header = json.loads(opened.read(min(length, file.stat().st_size)))
            stored += [
                StoredTensor(str(tensor["dtype"]), int(math.prod(tensor["shape"])))
                for name, tensor in header.items()
                if name != "__metadata__"
            ]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
            raise ModelFolderError(f"{file} is no safetensors file: {error}") from error
    return stored
