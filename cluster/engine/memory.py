"""How much memory one replica of the embedded engine takes, from the model's files alone.

Owns: the estimate that a launcher makes before it starts anything. Imports no torch: it reads the headers
of the weights. Invariant: it names every term that grows with the model or the configuration; the rest is one measured
constant.
"""

from __future__ import annotations

import json
import math
import struct

from cluster.config import DType, EngineConfig
from cluster.model import ModelFolder, ModelFolderError

DTYPE_BYTES = {DType.FLOAT32: 4, DType.BFLOAT16: 2}
PROCESS_BYTES = 600 * 2**20
"""A replica's process without a model: Python, Ray's worker, torch, numba or transformers, and scratch memory."""
BYTES_PER_LOGIT = 32
"""Logits of a step in float32, their weights, and their running sums in float64, while tokens are drawn."""


def memory_bytes(model: ModelFolder, config: EngineConfig) -> int:
    """Resident bytes of one replica: weights, KV pool, what it may swap out to, a step's logits, and the process itself.

    Raises:
        ModelFolderError: the configuration or a weight file does not say what is needed.
    """
    size = DTYPE_BYTES[config.dtype]
    parameters = _parameters(model)
    heads, hidden = model.positive("num_attention_heads"), model.positive("hidden_size")
    kv_heads = model.positive("num_key_value_heads", heads)
    head_dim = model.positive("head_dim", hidden // heads)
    if model.settings.get("tie_word_embeddings"):
        parameters += (
            model.vocab_size * hidden
        )  # with transformers the output layer is laid out anew, beside the embedding
    kv_bytes_per_token = 2 * model.positive("num_hidden_layers") * kv_heads * head_dim * size
    return (
        parameters * size
        + (config.blocks + config.host_blocks) * config.block_size_tokens * kv_bytes_per_token
        + config.slots * model.vocab_size * BYTES_PER_LOGIT
        + PROCESS_BYTES
    )


def _parameters(model: ModelFolder) -> int:
    """Numbers in all weight files. A safetensors file begins with the length of its JSON header, then the header."""
    total = 0
    for file in model.weight_files:
        try:
            with file.open("rb") as opened:
                (length,) = struct.unpack("<Q", opened.read(8))
                header = json.loads(opened.read(min(length, file.stat().st_size)))
            total += sum(int(math.prod(tensor["shape"])) for name, tensor in header.items() if name != "__metadata__")
        except (OSError, ValueError, KeyError, AttributeError, struct.error) as error:
            raise ModelFolderError(f"{file} is no safetensors file: {error}") from error
    return total
