"""Paged attention on a CPU, one call of a kernel per layer.

Owns: the way from a step's layout to the arrays that the kernel reads. Imports torch and numpy. Invariant: every block that
a kernel is told of is one of the pool's, for kernels do not check.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from cluster.engine.torch.cpu.matrices import Array, as_numpy
from cluster.engine.torch.cpu.paged import attend_step
from cluster.engine.torch.layout import Layout
from cluster.engine.torch.paged_cache import PagedCache


class CpuStep:
    """One step's attention, an `AttentionStep`. What `attend` returns is overwritten by the next layer's.

    Keys and values of another dtype than the cache's are converted, as an assignment between tensors would.
    """

    def __init__(self, cache: PagedCache, layout: Layout) -> None:
        """Raises IndexError where a row names a block that the pool does not have."""
        self._keys, self._values = cache.keys, cache.values
        self._slots = np.array(layout.slots, np.int64)
        self._tables = _padded([*layout.decode_tables, *(chunk.blocks for chunk in layout.chunks)])
        self._contexts = np.array(layout.decode_contexts, np.int64)
        self._chunks = np.array([(c.begin, c.end, c.start) for c in layout.chunks], np.int64).reshape(-1, 3)
        self._whole = max((*layout.decode_contexts, *(c.context for c in layout.chunks)), default=0)
        self._out: Tensor | None = None
        blocks = cache.pool.shape[0]
        for named in (self._tables, self._slots // cache.block_size_tokens):
            if named.size and not 0 <= named.min() <= named.max() < blocks:
                raise IndexError(f"a row names a block outside of the pool's {blocks}")

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, window: int | None
    ) -> Tensor:
        if window is not None and window < 1:
            raise ValueError(f"a window of {window} in layer {layer}: a query sees itself at least")
        keys, values = as_numpy(self._keys[layer]), as_numpy(self._values[layer])
        shape = (*query.shape[:2], value.shape[2])
        if self._out is None or self._out.shape != shape:
            self._out = torch.empty(shape, dtype=query.dtype)
        attend_step(
            as_numpy(query),
            as_numpy(key.to(self._keys[layer].dtype)),
            as_numpy(value.to(self._values[layer].dtype)),
            keys,
            values,
            self._slots,
            self._tables,
            self._contexts,
            self._chunks,
            np.float32(1 / math.sqrt(query.shape[2]) if scaling is None else scaling),
            self._whole if window is None else window,
            as_numpy(self._out),
        )
        return self._out


def _padded(tables: Sequence[Sequence[int]]) -> Array:
    """[rows, blocks of the longest]; what is beyond a row's own is never read."""
    padded = np.zeros((len(tables), max(map(len, tables), default=0)), np.int64)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return padded
