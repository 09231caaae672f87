"""The Llama family as this engine computes it by itself: Llama, Mistral, Qwen2 and Qwen3.

Owns: what a config.json of that family means, and which tensors it calls for. Imports no torch. Invariant: a setting that
is not known here in full gives None, and transformers decides about the model.

The meanings are those of transformers 5 (its configuration and modelling files of the four model types). Of rotary
positions the plain ones, linear scaling (Chen et al. 2023) and Llama 3's are known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
MAX_LAYERS = 1000
"""More are a slip of the pen."""
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
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError):
        return None  # an absent or odd setting: what it means is for transformers to say


def _read(settings: Mapping[str, Any]) -> LlamaSpec | None:
    kind = settings["model_type"]
    unknown = settings.keys() - INERT - READ - ONLY.keys()
    others = [key for key, values in ONLY.items() if settings.get(key, values[0]) not in values]
    if kind not in MODEL_TYPES or unknown or others:
        return None
    biases = _flag(settings, "attention_bias"), _flag(settings, "mlp_bias")
    if (kind in ("mistral", "qwen2") and biases[0]) or (kind != "llama" and biases[1]):
        return None  # these have no such setting; what is meant is unclear
    rope, windows = _rope(settings), _windows(kind, settings)
    if rope is None or windows is None:
        return None
    hidden, heads = _whole(settings["hidden_size"]), _whole(settings["num_attention_heads"])
    head_dim = settings.get("head_dim")
    if head_dim is None:
        if kind == "qwen3" or hidden % heads:
            return None
        head_dim = hidden // heads
    kv_heads = settings.get("num_key_value_heads")
    spec = LlamaSpec(
        layers=_whole(settings["num_hidden_layers"]),
        hidden=hidden,
        inner=_whole(settings["intermediate_size"]),
        heads=heads,
        kv_heads=heads if kv_heads is None else _whole(kv_heads),
        head_dim=_whole(head_dim),
        vocabulary=_whole(settings["vocab_size"]),
        epsilon=_number(settings["rms_norm_eps"]),
        rope=rope,
        tied=_flag(settings, "tie_word_embeddings"),
        qkv_bias=kind == "qwen2" or biases[0],
        out_bias=biases[0],
        mlp_bias=biases[1],
        head_norms=kind == "qwen3",
        windows=windows,
    )
    sizes = (spec.layers, spec.hidden, spec.inner, spec.heads, spec.kv_heads, spec.head_dim, spec.vocabulary)
    windows_see = all(window is None or window > 0 for window in windows)
    fits = min(sizes) > 0 and spec.heads % spec.kv_heads == 0 and spec.head_dim % 2 == 0
    return spec if fits and windows_see else None


def _whole(value: object) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is no whole number")
    return value


def _number(value: object) -> float:
    if type(value) not in (int, float) or not 0 < float(value) < math.inf:  # type: ignore[arg-type]
        raise ValueError(f"{value!r} is no positive number")
    return float(value)  # type: ignore[arg-type]


def _flag(settings: Mapping[str, Any], key: str) -> bool:
    """False where it is absent."""
    value = settings.get(key)
    if not (value is None or isinstance(value, bool)):
        raise TypeError(f"{key} is {value!r}")
    return bool(value)


def _rope(settings: Mapping[str, Any]) -> Rope | None:
    """From today's form (rope_parameters) or the older one (rope_theta, and rope_scaling where there is any)."""
    if settings.get("rope_parameters") and settings.get("rope_scaling"):
        return None  # which of them is meant is for transformers to say
    given = dict(settings.get("rope_parameters") or settings.get("rope_scaling") or {})
    older = given.pop("type", "default")
    kind = given.pop("rope_type", older)
    theta = given.pop("rope_theta", settings.get("rope_theta"))
    if kind == "llama3":
        given.setdefault("original_max_position_embeddings", settings["max_position_embeddings"])
    if theta is None or kind not in ROPE_SETTINGS or given.keys() != ROPE_SETTINGS[kind]:
        return None
    return Rope(kind, _number(theta), {key: _number(value) for key, value in given.items()})


def _windows(kind: str, settings: Mapping[str, Any]) -> tuple[int | None, ...] | None:
    layers = _whole(settings["num_hidden_layers"])
    if layers > MAX_LAYERS:
        return None
    window = settings.get("sliding_window")
    if window is not None:
        window = _whole(window)
    types = settings.get("layer_types")
    match kind:
        case "llama":
            return (None,) * layers if window is None and types is None else None
        case "mistral":
            return (window,) * layers if "sliding_window" in settings and types is None else None
        case _:
            window = _whole(settings["sliding_window"]) if _flag(settings, "use_sliding_window") else None
            if types is None:
                first = _whole(settings["max_window_layers"]) if window is not None else layers
                types = ["full_attention"] * min(first, layers) + ["sliding_attention"] * (layers - first)
            known = {"full_attention"} if window is None else {"full_attention", "sliding_attention"}
            if len(types) != layers or set(types) - known:
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
