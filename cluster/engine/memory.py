"""How much memory one replica of the embedded engine takes, from the model's files alone.

Owns: the estimate that a launcher makes before it starts anything. Imports no torch: it reads the headers of the weights.
Invariant: it names every term that grows with the model or the configuration; the rest is one measured constant per
decoder.
"""

from __future__ import annotations

import json
import math
import struct
from typing import NamedTuple

from cluster.config import DType, EngineConfig
from cluster.engine.torch.llama import read_spec
from cluster.model import ModelFolder, ModelFolderError

DTYPE_BYTES = {DType.FLOAT32: 4, DType.BFLOAT16: 2}
STORED_NAMES = {DType.FLOAT32: "F32", DType.BFLOAT16: "BF16"}
"""In safetensors files."""
PROCESS_BYTES = 650 * 2**20
"""A replica's process without a model: Python, Ray's worker, torch, numba, compiled kernels, and scratch memory."""
TRANSFORMERS_BYTES = 150 * 2**20
"""What a process takes beyond that whose model transformers runs."""
BYTES_PER_LOGIT = 8
"""Of a step's tokens in float32, and once more where a decoder converts them or their scores are taken."""
BYTES_PER_DRAWN_LOGIT = 32
"""Of the one row that a token is drawn from: changed logits, weights, and running sums in float64."""


def memory_bytes(model: ModelFolder, config: EngineConfig) -> int:
    """Resident bytes of one replica: weights, KV pool, what it may swap out to, a step's logits, and the process itself.

    Raises:
        ModelFolderError: the configuration or a weight file does not say what is needed.
    """
    size = DTYPE_BYTES[config.dtype]
    stored = stored_tensors(model)
    numbers = sum(tensor.numbers for tensor in stored)
    heads, hidden = model.positive("num_attention_heads"), model.positive("hidden_size")
    kv_heads = model.positive("num_key_value_heads", heads)
    head_dim = model.positive("head_dim", hidden // heads)
    process = PROCESS_BYTES
    if read_spec(model) is None:  # not for the lean decoder
        process += TRANSFORMERS_BYTES
        if model.settings.get("tie_word_embeddings"):
            numbers += model.vocab_size * hidden  # the output layer is packed beside the embedding
        # What is converted lies in memory once more until it is packed, and the allocator keeps most of it.
        numbers += sum(tensor.numbers for tensor in stored if tensor.dtype != STORED_NAMES[config.dtype])
    kv_bytes_per_token = 2 * model.positive("num_hidden_layers") * kv_heads * head_dim * size
    return (
        numbers * size
        + (config.blocks + config.host_blocks) * config.block_size_tokens * kv_bytes_per_token
        + config.step_token_budget * model.vocab_size * BYTES_PER_LOGIT
        + model.vocab_size * BYTES_PER_DRAWN_LOGIT
        + process
    )


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
