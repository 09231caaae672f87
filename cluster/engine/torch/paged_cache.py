"""The tensors of the paged KV cache, and the way of whole blocks in and out of it.

Owns: the layout of a block. Imports torch. Invariant: all of one block, keys and values of every layer, is one run of
bytes, so that a block is copied, saved and loaded in one piece.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cluster.engine.torch.host_memory import zeros_on_huge_pages


class LayerShape(NamedTuple):
    """What one layer keeps per token."""

    kv_heads: int
    key_dim: int
    value_dim: int


class PagedCache:
    """Keys and values of all layers: `keys[layer]` and `values[layer]` are views [blocks, block_size_tokens, kv_heads,
    head_dim] of one pool [blocks, numbers of a block].

    The memory is reserved at once and touched at once, so that a full pool cannot fail later.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        blocks: int,
        block_size_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.shapes = tuple(shapes)
        self.block_size_tokens = block_size_tokens
        per_token = sum(s.kv_heads * (s.key_dim + s.value_dim) for s in shapes)
        pool_shape = (blocks, block_size_tokens * per_token)
        if device.type == "cpu":
            self.pool = zeros_on_huge_pages(pool_shape, dtype).zero_()
        else:
            self.pool = torch.zeros(pool_shape, dtype=dtype, device=device)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        begin = 0
        for shape in shapes:
            for views, dim in ((self.keys, shape.key_dim), (self.values, shape.value_dim)):
                sizes = (block_size_tokens, shape.kv_heads, dim)
                views.append(self.pool[:, begin : begin + math.prod(sizes)].view(blocks, *sizes))
                begin += math.prod(sizes)

    @property
    def block_bytes(self) -> int:
        return self.pool.shape[1] * self.pool.element_size()

    @property
    def format(self) -> str:
        """Names everything that the meaning of a block's bytes depends on, but for the weights."""
        runs: list[tuple[LayerShape, int]] = []
        for shape in self.shapes:
            if runs and runs[-1][0] == shape:
                runs[-1] = (shape, runs[-1][1] + 1)
            else:
                runs.append((shape, 1))
        layers = "+".join(f"{n}x{s.kv_heads}x({s.key_dim}+{s.value_dim})" for s, n in runs)
        return f"{layers},{self.block_size_tokens},{str(self.pool.dtype).removeprefix('torch.')}"

    def copy(self, source: int, target: int) -> None:
        self.pool[target].copy_(self.pool[source])

    def save(self, blocks: Sequence[int]) -> memoryview:
        """A copy in host memory: len(blocks) x block_bytes bytes, block after block."""
        saved = self.pool.index_select(0, self._index(blocks)).cpu()
        return _bytes(saved)

    def load(self, blocks: Sequence[int], saved: memoryview) -> None:
        """Write what `save` gave to these blocks.

        Raises:
            ValueError: it is not of their size.
        """
        if saved.nbytes != len(blocks) * self.block_bytes:
            raise ValueError(f"{saved.nbytes} bytes for {len(blocks)} blocks of {self.block_bytes}")
        arrived = torch.empty((len(blocks), self.pool.shape[1]), dtype=self.pool.dtype)
        _bytes(arrived)[:] = saved.cast("B")
        self.pool.index_copy_(0, self._index(blocks), arrived.to(self.pool.device))

    def _index(self, blocks: Sequence[int]) -> Tensor:
        return torch.tensor(blocks, dtype=torch.int64, device=self.pool.device)


def _bytes(host: Tensor) -> memoryview:
    view: memoryview = host.view(torch.uint8).numpy().reshape(-1).data
    return view
