"""The Llama family as this engine computes it by itself: Llama, Mistral, Qwen2 and Qwen3.

Owns: what a config.json of that family means, and which tensors it calls for. Imports torch. Invariant: a setting that is
not known here in full, or a weight too many or too few, gives None, and transformers decides about the model.

The meanings are those of transformers 5 (its configuration and modelling files of the four model types). Of rotary
positions the plain ones, linear scaling (Chen et al. 2023) and Llama 3's are known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cluster.model import ModelFolder

MODEL_TYPES = {"llama", "mistral", "qwen2", "qwen3"}
INERT = {
    "_name_or_path", "architectures", "attention_dropout", "bos_token_id", "dtype", "eos_token_id", "initializer_range",
    "max_position_embeddings", "pad_token_id", "torch_dtype", "transformers_version", "unk_token_id", "use_cache",
}  # fmt: skip
"""Settings that change nothing of what is computed."""
ONLY: dict[str, tuple[object, ...]] = {"hidden_act": ("silu",), "pretraining_tp": (1, None)}
"""Settings that are known in these values alone."""
READ = {
    "attention_bias", "head_dim", "hidden_size", "intermediate_size", "layer_types", "max_window_layers", "mlp_bias",
    "model_type", "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "rope_parameters",
    "rope_scaling", "rope_theta", "sliding_window", "tie_word_embeddings", "use_sliding_window", "vocab_size",
}  # fmt: skip
ROPE_SETTINGS = {
    "default": set[str](),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
}


@dataclass(frozen=True)
class Rope:
    """Rotary positions: `scaling` holds the settings that ROPE_SETTINGS names for its kind."""

    kind: str
    theta: float
    scaling: Mapping[str, float]


@dataclass(frozen=True)
class LlamaSpec:
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    epsilon: float
    rope: Rope
    tied: bool
    """The output layer is the embedding."""
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    head_norms: bool
    """Queries and keys are normed head by head before they are turned."""
    windows: tuple[int | None, ...]
    """Of each layer, how many keys a query sees, its own included; None for all."""


def read_spec(model: ModelFolder) -> LlamaSpec | None:
    """What the model's config.json says, or None where anything in it is not known here."""
    try:
        return _read(model.settings)
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None  # an absent or odd setting: what it means is for transformers to say


def _read(settings: Mapping[str, Any]) -> LlamaSpec | None:
    kind = settings["model_type"]
    unknown = settings.keys() - INERT - READ - ONLY.keys()
    others = [key for key, values in ONLY.items() if settings.get(key, values[0]) not in values]
    if kind not in MODEL_TYPES or unknown or others:
        return None
    biases = bool(settings.get("attention_bias", False)), bool(settings.get("mlp_bias", False))
    if (kind in ("mistral", "qwen2") and biases[0]) or (kind != "llama" and biases[1]):
        return None  # these have no such setting; what is meant is unclear
    rope, windows = _rope(settings), _windows(kind, settings)
    if rope is None or windows is None:
        return None
    hidden, heads = int(settings["hidden_size"]), int(settings["num_attention_heads"])
    head_dim = settings.get("head_dim")
    if head_dim is None:
        if kind == "qwen3" or hidden % heads:
            return None
        head_dim = hidden // heads
    kv_heads = settings.get("num_key_value_heads")
    spec = LlamaSpec(
        layers=int(settings["num_hidden_layers"]),
        hidden=hidden,
        inner=int(settings["intermediate_size"]),
        heads=heads,
        kv_heads=heads if kv_heads is None else int(kv_heads),
        head_dim=int(head_dim),
        vocabulary=int(settings["vocab_size"]),
        epsilon=float(settings["rms_norm_eps"]),
        rope=rope,
        tied=bool(settings.get("tie_word_embeddings", False)),
        qkv_bias=kind == "qwen2" or biases[0],
        out_bias=biases[0],
        mlp_bias=biases[1],
        head_norms=kind == "qwen3",
        windows=windows,
    )
    return spec if spec.heads % spec.kv_heads == 0 and spec.head_dim % 2 == 0 else None


def _rope(settings: Mapping[str, Any]) -> Rope | None:
    """From today's form (rope_parameters) or the older one (rope_theta, and rope_scaling where there is any)."""
    given = dict(settings.get("rope_parameters") or settings.get("rope_scaling") or {})
    older = given.pop("type", "default")
    kind = given.pop("rope_type", older)
    theta = given.pop("rope_theta", settings.get("rope_theta"))
    if kind == "llama3":
        given.setdefault("original_max_position_embeddings", settings["max_position_embeddings"])
    if theta is None or kind not in ROPE_SETTINGS or given.keys() != ROPE_SETTINGS[kind]:
        return None
    return Rope(kind, float(theta), {key: float(value) for key, value in given.items()})


def _windows(kind: str, settings: Mapping[str, Any]) -> tuple[int | None, ...] | None:
    layers = int(settings["num_hidden_layers"])
    window = settings.get("sliding_window")
    if window is not None:
        window = int(window)
    types = settings.get("layer_types")
    match kind:
        case "llama":
            return (None,) * layers if window is None and types is None else None
        case "mistral":
            return (window,) * layers if "sliding_window" in settings and types is None else None
        case _:
            window = window if settings.get("use_sliding_window", False) else None
            if types is None:
                first = int(settings["max_window_layers"]) if window is not None else layers
                types = ["full_attention"] * min(first, layers) + ["sliding_attention"] * (layers - first)
            if len(types) != layers or set(types) - {"full_attention", "sliding_attention"}:
                return None
            return tuple(window if t == "sliding_attention" else None for t in types)


def tensor_shapes(spec: LlamaSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor of such a model, as transformers names them, and its shape."""
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (spec.vocabulary, spec.hidden),
        "model.norm.weight": (spec.hidden,),
    }
    if not spec.tied:
        shapes["lm_head.weight"] = (spec.vocabulary, spec.hidden)
    linears = {
        "self_attn.q_proj": (queries, spec.hidden, spec.qkv_bias),
        "self_attn.k_proj": (keys, spec.hidden, spec.qkv_bias),
        "self_attn.v_proj": (keys, spec.hidden, spec.qkv_bias),
        "self_attn.o_proj": (spec.hidden, queries, spec.out_bias),
        "mlp.gate_proj": (spec.inner, spec.hidden, spec.mlp_bias),
        "mlp.up_proj": (spec.inner, spec.hidden, spec.mlp_bias),
        "mlp.down_proj": (spec.hidden, spec.inner, spec.mlp_bias),
    }
    norms = {"input_layernorm": spec.hidden, "post_attention_layernorm": spec.hidden}
    if spec.head_norms:
        norms |= {"self_attn.q_norm": spec.head_dim, "self_attn.k_norm": spec.head_dim}
    for layer in range(spec.layers):
        prefix = f"model.layers.{layer}"
        for name, (out_features, in_features, has_bias) in linears.items():
            shapes[f"{prefix}.{name}.weight"] = (out_features, in_features)
            if has_bias:
                shapes[f"{prefix}.{name}.bias"] = (out_features,)
        shapes |= {f"{prefix}.{name}.weight": (size,) for name, size in norms.items()}
    return shapes


def rope_tables(spec: LlamaSpec, positions: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines, float32 [positions, head_dim / 2]."""
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.int64).float() / spec.head_dim
    turns = SCALED[spec.rope.kind](1.0 / spec.rope.theta**exponents, spec.rope.scaling)
    angles = torch.arange(positions, dtype=torch.int64).float()[:, None] * turns
    return angles.cos(), angles.sin()


def _llama3(turns: Tensor, scaling: Mapping[str, float]) -> Tensor:
    """Slow turns are slowed by `factor`, fast ones kept, those between mixed (Llama 3.1's own code, by way of
    transformers' `_compute_llama3_parameters`)."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns_in_original = scaling["original_max_position_embeddings"] / (2 * math.pi / turns)
    share_kept = (turns_in_original - low) / (high - low)
    mixed = (1 - share_kept) * turns / factor + share_kept * turns
    return torch.where(turns_in_original < low, turns / factor, torch.where(turns_in_original > high, turns, mixed))


SCALED: dict[str, Callable[[Tensor, Mapping[str, float]], Tensor]] = {
    "default": lambda turns, scaling: turns,  # noqa: ARG005
    "linear": lambda turns, scaling: turns / scaling["factor"],
    "llama3": _llama3,
}
