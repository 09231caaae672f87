"""Attention over a paged KV cache, and its registration with transformers.

Owns: the cache's tensors, the interface of a paged attention, and its implementation with torch's own scaled dot product
attention. Imports torch and transformers. Invariant: what a sequence computes depends on the keys and values of its own
positions, not on where its blocks lie, nor on what an earlier owner left in them, NaN included.

transformers calls `paged_attention` once per layer; the step travels as a forward argument, so nothing here is global
but the function's name. Under a name that has no mask function of its own transformers builds no mask.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from cluster.engine.torch.layout import DecodeGroup, Layout, PrefillChunk

ATTENTION_NAME = "forebay_paged"
PLAIN = frozenset({"position_ids", "use_cache", "output_router_logits"})
"""Arguments that models hand through to their attention without a meaning for it. Any other one is refused."""


class UnsupportedAttentionError(NotImplementedError):
    """The model asks of attention what no paged attention here computes; the message names it."""


class AttentionStep(Protocol):
    """Paged attention of one step. Another device's implementation takes this place; engine and model stay the same."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, window: int | None
    ) -> Tensor:
        """Write the step's keys and values of one layer to the cache, then attend.

        Args:
            query: [1, heads, tokens, head_dim], tokens in the order of the step's layout.
            key, value: [1, kv_heads, tokens, head_dim].
            scaling: factor of the scores; None means 1 / sqrt(head_dim).
            window: a query at position p sees the keys at positions > p - window; None means all up to p.

        Returns:
            [1, tokens, heads, value_head_dim].
        """
        ...


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
    return step.attend(layer, query, key, value, scaling=scaling, window=sliding_window), None


AttentionInterface.register(ATTENTION_NAME, paged_attention)


class LayerShape(NamedTuple):
    """What one layer keeps per token."""

    kv_heads: int
    key_dim: int
    value_dim: int


class PagedCache:
    """Keys and values of all layers: per layer a tensor [blocks, block_size_tokens, kv_heads, head_dim].

    The memory is reserved at once and touched at once, so that a full pool cannot fail later.
    """

    def __init__(
        self, shapes: list[LayerShape], blocks: int, block_size_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        def pool(kv_heads: int, head_dim: int) -> Tensor:
            return torch.zeros((blocks, block_size_tokens, kv_heads, head_dim), dtype=dtype, device=device)

        self.block_size_tokens = block_size_tokens
        self.keys = [pool(shape.kv_heads, shape.key_dim) for shape in shapes]
        self.values = [pool(shape.kv_heads, shape.value_dim) for shape in shapes]


class ShapeProbe:
    """Stands in for a step while a model is loaded, and notes which layers call with which shapes and windows."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, LayerShape]] = []
        self.windows: list[int | None] = []

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, window: int | None
    ) -> Tensor:
        del scaling
        self.seen.append((layer, LayerShape(key.shape[1], key.shape[3], value.shape[3])))
        self.windows.append(window)
        return query.new_zeros((1, query.shape[2], query.shape[1], value.shape[3]))


class SdpaStep:
    """One step through torch's scaled dot product attention.

    Decodes of a group are one padded batch: their blocks are copied together (whole blocks, so the copy runs at the
    speed of memory) and the heads that share a KV head become the queries of one sequence, so that nothing is repeated.
    Prefill chunks run one by one, the sharing heads reading the same keys through a stride of zero.
    """

    def __init__(self, cache: PagedCache, layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
        self._cache = cache
        self._layout = layout
        self._dtype = dtype
        self._device = device
        self._slots = self._index(layout.slots)
        self._begun_blocks = self._index(layout.begun_blocks)
        self._group_blocks = [self._index(group.blocks) for group in layout.decodes]
        self._chunk_blocks = [self._index(chunk.blocks) for chunk in layout.chunks]
        self._masks: dict[int | None, tuple[list[Tensor], list[Tensor]]] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, window: int | None
    ) -> Tensor:
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        if self._layout.begun_blocks:
            # A masked slot weighs nothing, but nothing times NaN is NaN: another's leftovers go before the block is used.
            keys.index_fill_(0, self._begun_blocks, 0)
            values.index_fill_(0, self._begun_blocks, 0)
        keys.flatten(0, 1).index_copy_(0, self._slots, key[0].transpose(0, 1))
        values.flatten(0, 1).index_copy_(0, self._slots, value[0].transpose(0, 1))
        group_masks, chunk_masks = self._masks_of(window)
        out = query.new_empty((1, query.shape[2], query.shape[1], value.shape[3]))
        for group, blocks, mask in zip(self._layout.decodes, self._group_blocks, group_masks, strict=True):
            out[0, group.begin : group.end] = self._decode(group, blocks, mask, query, keys, values, scaling)
        for chunk, blocks, mask in zip(self._layout.chunks, self._chunk_blocks, chunk_masks, strict=True):
            out[0, chunk.begin : chunk.end] = self._prefill(chunk, blocks, mask, query, keys, values, scaling)
        return out

    def _decode(
        self,
        group: DecodeGroup,
        blocks: Tensor,
        mask: Tensor,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        scaling: float | None,
    ) -> Tensor:
        """[rows, heads, value_dim] of a group's tokens."""
        rows, heads, kv_heads = group.end - group.begin, query.shape[1], keys.shape[2]
        shared = query[0, :, group.begin : group.end].transpose(0, 1).reshape(rows, kv_heads, heads // kv_heads, -1)
        seen_keys = keys.index_select(0, blocks).view(rows, -1, kv_heads, keys.shape[3]).transpose(1, 2)
        seen_values = values.index_select(0, blocks).view(rows, -1, kv_heads, values.shape[3]).transpose(1, 2)
        out = scaled_dot_product_attention(shared, seen_keys, seen_values, attn_mask=mask, scale=scaling)
        return out.reshape(rows, heads, -1)

    def _prefill(
        self,
        chunk: PrefillChunk,
        blocks: Tensor,
        mask: Tensor,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        scaling: float | None,
    ) -> Tensor:
        """[tokens, heads, value_dim] of a chunk."""
        tokens, heads, kv_heads = chunk.end - chunk.begin, query.shape[1], keys.shape[2]
        context = chunk.start + tokens
        shape = (kv_heads, heads // kv_heads, context, -1)
        shared = query[0, :, chunk.begin : chunk.end].reshape(kv_heads, heads // kv_heads, tokens, -1)
        seen_keys = keys.index_select(0, blocks).flatten(0, 1)[:context].transpose(0, 1).unsqueeze(1).expand(shape)
        seen_values = values.index_select(0, blocks).flatten(0, 1)[:context].transpose(0, 1).unsqueeze(1).expand(shape)
        out = scaled_dot_product_attention(shared, seen_keys, seen_values, attn_mask=mask, scale=scaling)
        return out.flatten(0, 1).transpose(0, 1)

    def _masks_of(self, window: int | None) -> tuple[list[Tensor], list[Tensor]]:
        """Additive masks of groups [rows, 1, 1, keys] and chunks [tokens, keys], made once per step and window."""
        masks = self._masks.get(window)
        if masks is None:
            block_size = self._cache.block_size_tokens
            groups = [
                self._mask([n - 1 for n in group.context_tokens], group.width * block_size, window)[:, None, None]
                for group in self._layout.decodes
            ]
            chunks = [
                self._mask(list(range(chunk.start, context)), context, window)
                for chunk in self._layout.chunks
                for context in (chunk.start + chunk.end - chunk.begin,)
            ]
            masks = self._masks[window] = (groups, chunks)
        return masks

    def _mask(self, positions: list[int], keys: int, window: int | None) -> Tensor:
        """[positions, keys]: 0 where the query at a position sees the key, -inf elsewhere."""
        query_positions = self._index(positions)[:, None]
        key_positions = torch.arange(keys, device=self._device)
        hidden = key_positions > query_positions
        if window is not None:
            hidden |= key_positions <= query_positions - window
        return torch.zeros(hidden.shape, dtype=self._dtype, device=self._device).masked_fill_(hidden, -torch.inf)

    def _index(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)
