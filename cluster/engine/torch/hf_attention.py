"""Paged attention as transformers calls it.

Owns: the function that takes the place of a model's own attention, its registration, and the refusal of what it does not
compute. Imports torch and transformers. Invariant: an argument whose meaning is not known here is refused, never dropped.

transformers calls `paged_attention` once per layer; the step travels as a forward argument, so nothing here is global
but the function's name. Under a name that has no mask function of its own transformers builds no mask.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import AttentionInterface

from cluster.engine.torch.attention import AttentionStep
from cluster.engine.torch.paged_cache import LayerShape

ATTENTION_NAME = "forebay_paged"
PLAIN = frozenset({"position_ids", "use_cache", "output_router_logits"})
"""Arguments that models hand through to their attention without a meaning for it. Any other one is refused."""


class UnsupportedAttentionError(NotImplementedError):
    """The model asks of attention what no paged attention here computes; the message names it."""


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    step: AttentionStep | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """What transformers calls in place of its own attention; hands over to the step.

    Raises:
        UnsupportedAttentionError: the model uses a feature that would be computed wrongly.
    """
    asked = {
        "a mask of its own": attention_mask is not None,
        "dropout": dropout != 0.0,
        "soft-capped scores": softcap is not None,
        "attention sinks": s_aux is not None,
        "a position bias": position_bias is not None,
        "attention that is not causal": not getattr(module, "is_causal", True),
    }
    asked.update({f"{name} in attention": other is not None for name, other in others.items() if name not in PLAIN})
    if any(asked.values()):
        raise UnsupportedAttentionError(", ".join(name for name, is_asked in asked.items() if is_asked))
    layer = getattr(module, "layer_idx", None)
    if step is None or not isinstance(layer, int):
        raise UnsupportedAttentionError("attention layers that do not know the step or their own number")
    parts = (part[0].transpose(0, 1) for part in (query, key, value))
    return step.attend(layer, *parts, scaling=scaling, window=sliding_window)[None], None


AttentionInterface.register(ATTENTION_NAME, paged_attention)


class ShapeProbe:
    """Stands in for a step while a model is loaded, and notes which layers call with which shapes and windows."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, LayerShape]] = []
        self.windows: list[int | None] = []

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, window: int | None
    ) -> Tensor:
        del scaling
        self.seen.append((layer, LayerShape(key.shape[1], key.shape[2], value.shape[2])))
        self.windows.append(window)
        return query.new_zeros((*query.shape[:2], value.shape[2]))
