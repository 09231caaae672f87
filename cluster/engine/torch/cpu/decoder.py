"""The Llama family on a CPU: packed weights, and two calls of a kernel per layer beside its attention.

Owns: the decoder's weights and its buffers. Imports torch and numpy. Invariant: it computes what transformers computes for
the same folder, but for the order of summation; in bfloat16 with fewer roundings, for sums stay in float32. And a token's
logits are the same to the last bit however its sequence is cut into steps and whatever else is in them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cluster.engine.torch.attention import AttentionStep
from cluster.engine.torch.cpu.layers import after_attention, before_attention, gather_rows, rms_norm
from cluster.engine.torch.cpu.matrices import Array, PackedMatrix, as_numpy, can_pack, multiply, pack, read_columns
from cluster.engine.torch.llama import LlamaSpec
from cluster.engine.torch.paged_cache import LayerShape
from cluster.engine.torch.rope import rope_tables
from cluster.engine.torch.weights import Weights

NO_BIAS: Array = np.empty(0, np.float32)


class Layer(NamedTuple):
    """Norms and biases are float32, and empty where the model has none."""

    norm: Array
    qkv: PackedMatrix
    qkv_bias: Array
    query_norm: Array
    key_norm: Array
    out: PackedMatrix
    out_bias: Array
    mlp_norm: Array
    gate_up: PackedMatrix
    gate_up_bias: Array
    down: PackedMatrix
    down_bias: Array


class Model(NamedTuple):
    layers: list[Layer]
    embedding: Array | None
    """[vocabulary, hidden]; None where it is the packed output layer."""
    norm: Array
    head: PackedMatrix


def can_decode(spec: LlamaSpec, dtype: torch.dtype) -> bool:
    return all(can_pack(depth, dtype) for depth in (spec.hidden, spec.inner, spec.heads * spec.head_dim))


def read_model(spec: LlamaSpec, weights: Weights) -> Model:
    """Pack the weights, which must be those that `tensor_shapes` names; nothing of the files is kept."""

    def vector(name: str, is_there: bool = True) -> Array:
        return as_numpy(weights.read(name, torch.float32).clone()) if is_there else NO_BIAS

    def biases(prefix: str, names: tuple[str, ...], are_there: bool) -> Array:
        return np.concatenate([vector(f"{prefix}.{name}.bias") for name in names]) if are_there else NO_BIAS

    def packed(prefix: str, names: tuple[str, ...]) -> PackedMatrix:
        return pack(*(weights.read(f"{prefix}.{name}.weight") for name in names))

    def layer(prefix: str) -> Layer:
        qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        out, gate_up, down = ("self_attn.o_proj",), ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",)
        return Layer(
            norm=vector(f"{prefix}.input_layernorm.weight"),
            qkv=packed(prefix, qkv),
            qkv_bias=biases(prefix, qkv, spec.qkv_bias),
            query_norm=vector(f"{prefix}.self_attn.q_norm.weight", spec.head_norms),
            key_norm=vector(f"{prefix}.self_attn.k_norm.weight", spec.head_norms),
            out=packed(prefix, out),
            out_bias=biases(prefix, out, spec.out_bias),
            mlp_norm=vector(f"{prefix}.post_attention_layernorm.weight"),
            gate_up=packed(prefix, gate_up),
            gate_up_bias=biases(prefix, gate_up, spec.mlp_bias),
            down=packed(prefix, down),
            down_bias=biases(prefix, down, spec.mlp_bias),
        )

    embedding = "model.embed_tokens.weight"
    return Model(
        layers=[layer(f"model.layers.{i}") for i in range(spec.layers)],
        embedding=None if spec.tied else as_numpy(weights.read(embedding).clone()),
        norm=vector("model.norm.weight"),
        head=pack(weights.read(embedding if spec.tied else "lm_head.weight")),
    )


class CpuDecoder:
    """A `Decoder`. What `logits` returns is overwritten by the next call."""

    def __init__(self, spec: LlamaSpec, model: Model, dtype: torch.dtype, max_positions: int) -> None:
        self._spec = spec
        self._model = model
        self._dtype = dtype
        self._epsilon = np.float32(spec.epsilon)
        self._cos, self._sin = (as_numpy(table) for table in rope_tables(spec, max_positions))
        self._buffers: dict[str, Tensor] = {}
        self.shapes = [LayerShape(spec.kv_heads, spec.head_dim, spec.head_dim)] * spec.layers

    def logits(self, token_ids: Tensor, positions: Tensor, kept: Tensor, step: AttentionStep) -> Tensor:
        """Raises IndexError for a token id or position that the model does not have, or a kept token that is not there."""
        spec, epsilon, at, tokens = self._spec, self._epsilon, positions.numpy(), len(token_ids)
        # Kernels do not check.
        for what, indices, count in (
            ("token ids", token_ids.numpy(), spec.vocabulary),
            ("positions", at, len(self._cos)),
            ("kept tokens", kept.numpy(), tokens),
        ):
            if indices.size and not 0 <= indices.min() <= indices.max() < count:
                raise IndexError(f"{what} {indices.min()} to {indices.max()} of {count}")
        x = self._embed(token_ids.numpy())
        normed = self._buffer("normed", tokens, spec.hidden)
        projected = self._buffer(
            "projected", tokens, (spec.heads + 2 * spec.kv_heads) * spec.head_dim, dtype=torch.float32
        )
        query = self._buffer("query", tokens, spec.heads, spec.head_dim)
        key, value = (self._buffer(name, tokens, spec.kv_heads, spec.head_dim) for name in ("key", "value"))
        gate_up = self._buffer("gate_up", tokens, 2 * spec.inner, dtype=torch.float32)
        gated = self._buffer("gated", tokens, spec.inner)
        before = [as_numpy(b) for b in (normed, projected, query, key, value)]
        after = [as_numpy(b) for b in (normed, gate_up, gated)]
        for i, (layer, window) in enumerate(zip(self._model.layers, spec.windows, strict=True)):
            before_attention(
                x, layer.norm, epsilon, layer.qkv.panels, layer.qkv_bias, layer.query_norm, layer.key_norm,
                self._cos, self._sin, at, *before,
            )  # fmt: skip
            attended = step.attend(i, query, key, value, scaling=None, window=window)
            after_attention(
                x, as_numpy(attended).reshape(tokens, -1), layer.out.panels, layer.out_bias, layer.mlp_norm, epsilon,
                layer.gate_up.panels, layer.gate_up_bias, layer.down.panels, layer.down_bias, *after,
            )  # fmt: skip
        return self._head(x, kept.numpy())

    def _embed(self, token_ids: Array) -> Array:
        x = as_numpy(self._buffer("x", len(token_ids), self._spec.hidden, dtype=torch.float32))
        if self._model.embedding is None:
            read_columns(self._model.head.panels, token_ids, x)
        else:
            gather_rows(self._model.embedding, token_ids, x)
        return x

    def _head(self, x: Array, kept: Array) -> Tensor:
        last = as_numpy(self._buffer("last", len(kept), self._spec.hidden, dtype=torch.float32))
        normed = as_numpy(self._buffer("last_normed", len(kept), self._spec.hidden))
        logits = self._buffer("logits", len(kept), self._spec.vocabulary, dtype=torch.float32)
        gather_rows(x, kept, last)
        rms_norm(last, self._model.norm, self._epsilon, normed)
        multiply(normed, self._model.head.panels, NO_BIAS, as_numpy(logits), False)
        return logits

    def _buffer(self, name: str, tokens: int, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        """[tokens, *sizes], of the decoder's dtype unless another is named, with anything in it."""
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < tokens:
            buffer = self._buffers[name] = torch.empty((tokens, *sizes), dtype=dtype or self._dtype)
        return buffer[:tokens]
