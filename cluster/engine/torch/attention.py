"""Attention over a paged KV cache.

Owns: the interface of a paged attention, and its implementation with torch's own scaled dot product attention, which runs
on any device. Imports torch. Invariant: what a sequence computes depends on the keys and values of its own positions, not
on where its blocks lie, nor on what an earlier owner left in them, NaN included.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from cluster.engine.torch.layout import DecodeGroup, Layout, group_decodes
from cluster.engine.torch.paged_cache import PagedCache


class AttentionStep(Protocol):
    """Paged attention of one step. Another device's implementation takes this place; engine and model stay the same."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, window: int | None
    ) -> Tensor:
        """Write the step's keys and values of one layer to the cache, then attend.

        Args:
            query: [tokens, heads, head_dim], in the order of the step's layout.
            key, value: [tokens, kv_heads, head_dim].
            scaling: factor of the scores; None means 1 / sqrt(head_dim).
            window: a query at position p sees the keys at positions > p - window; None means all up to p.

        Returns:
            [tokens, heads, value_head_dim]; of padding, zeros.
        """
        ...


class SdpaStep:
    """One step through torch's scaled dot product attention, on any device.

    Decodes of a group are one padded batch: their blocks are copied together (whole blocks, so the copy runs at the
    speed of memory) and the heads that share a KV head become the queries of one sequence, so that nothing is repeated.
    """

    def __init__(self, cache: PagedCache, layout: Layout) -> None:
        self._cache = cache
        self._slots_filled = len(layout.slots)
        slots = index_tensor(layout.slots, cache)
        self._slot_blocks = slots // cache.block_size_tokens
        self._slot_offsets = slots % cache.block_size_tokens
        self._begun_blocks = index_tensor(layout.begun_blocks, cache)
        self._groups = group_decodes(layout, cache.block_size_tokens)
        self._group_blocks = [index_tensor(group.blocks, cache) for group in self._groups]
        self._group_masks: dict[int | None, list[Tensor]] = {}
        self._chunks = SdpaChunks(cache, layout)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, window: int | None
    ) -> Tensor:
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        if len(self._begun_blocks):
            # A masked slot weighs nothing, but nothing times NaN is NaN: another's leftovers go before the block is used.
            keys.index_fill_(0, self._begun_blocks, 0)
            values.index_fill_(0, self._begun_blocks, 0)
        keys[self._slot_blocks, self._slot_offsets] = key[: self._slots_filled]
        values[self._slot_blocks, self._slot_offsets] = value[: self._slots_filled]
        out = query.new_zeros((*query.shape[:2], value.shape[2]))
        for group, blocks, mask in zip(self._groups, self._group_blocks, self._masks(window), strict=True):
            out[group.begin : group.end] = self._decode(group, blocks, mask, query, keys, values, scaling)
        self._chunks.attend(query, keys, values, out, scaling=scaling, window=window)
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
        shared = query[group.begin : group.end].reshape(rows, kv_heads, heads // kv_heads, -1)
        seen_keys = keys.index_select(0, blocks).view(rows, -1, kv_heads, keys.shape[3]).transpose(1, 2)
        seen_values = values.index_select(0, blocks).view(rows, -1, kv_heads, values.shape[3]).transpose(1, 2)
        out = scaled_dot_product_attention(shared, seen_keys, seen_values, attn_mask=mask, scale=scaling)
        return out.reshape(rows, heads, -1)

    def _masks(self, window: int | None) -> list[Tensor]:
        """Additive masks [rows, 1, 1, keys] of the groups, made once per step and window."""
        if window not in self._group_masks:
            self._group_masks[window] = [
                causal_mask(
                    [n - 1 for n in group.context_tokens],
                    group.width * self._cache.block_size_tokens,
                    window,
                    self._cache,
                )[:, None, None]
                for group in self._groups
            ]
        return self._group_masks[window]


class SdpaChunks:
    """The prefill chunks of a step, one by one, the heads that share a KV head reading it through a stride of zero."""

    def __init__(self, cache: PagedCache, layout: Layout) -> None:
        self._cache = cache
        self._chunks = layout.chunks
        self._blocks = [index_tensor(chunk.blocks, cache) for chunk in layout.chunks]
        self._masks: dict[int | None, list[Tensor]] = {}

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, out: Tensor, *, scaling: float | None, window: int | None
    ) -> None:
        """Fill in the chunks' part of `out` [tokens, heads, value_dim]; their keys and values are in the cache."""
        if not self._chunks:
            return
        masks = self._masks.get(window)
        if masks is None:
            masks = self._masks[window] = [
                causal_mask(list(range(chunk.start, chunk.context)), chunk.context, window, self._cache)
                for chunk in self._chunks
            ]
        for chunk, blocks, mask in zip(self._chunks, self._blocks, masks, strict=True):
            tokens, heads, kv_heads = chunk.end - chunk.begin, query.shape[1], keys.shape[2]
            shape = (kv_heads, heads // kv_heads, chunk.context, -1)
            shared = query[chunk.begin : chunk.end].transpose(0, 1).reshape(kv_heads, heads // kv_heads, tokens, -1)
            seen_keys, seen_values = (
                pool.index_select(0, blocks).flatten(0, 1)[: chunk.context].transpose(0, 1).unsqueeze(1).expand(shape)
                for pool in (keys, values)
            )
            attended = scaled_dot_product_attention(shared, seen_keys, seen_values, attn_mask=mask, scale=scaling)
            out[chunk.begin : chunk.end] = attended.flatten(0, 1).transpose(0, 1)


def causal_mask(positions: list[int], keys: int, window: int | None, cache: PagedCache) -> Tensor:
    """[positions, keys]: 0 where the query at a position sees the key, -inf elsewhere."""
    query_positions = index_tensor(positions, cache)[:, None]
    key_positions = torch.arange(keys, device=cache.pool.device)
    hidden = key_positions > query_positions
    if window is not None:
        hidden |= key_positions <= query_positions - window
    mask = torch.zeros(hidden.shape, dtype=cache.pool.dtype, device=cache.pool.device)
    return mask.masked_fill_(hidden, -torch.inf)


def index_tensor(values: list[int], cache: PagedCache) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=cache.pool.device)
