"""Products with weights that are laid out once for the vector units.

Owns: the layout of packed weights and their product with a batch. Imports numpy, numba and torch. Invariant: a product
is exact but for the order of summation, whose terms and sums are float32; in bfloat16 the factors are.

Weights [columns, depth] lie as [panels, depth / pair, TILE_COLUMNS, pair], `pair` being 2 in bfloat16: what a tile reads
is one run of memory. Measured in one run on one core of a 2.6 GHz Zen 4, best of 18 while others worked on the machine, the
linear layers of SmolLM2-135M in ms, here / by oneDNN on its own packed weights / by `F.linear`: float32 at 1, 8, 32 and 64
tokens 22 / 48 / 56, 26 / 49 / 98, 96 / 120 / 210 and 212 / 255 / 501; bfloat16 at 1, 8 and 32 tokens 21 / 55 / 84,
27 / 64 / 111 and 103 / 135 / 264. At few tokens that is the speed of memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cluster.engine.torch.cpu.compiling import kernel
from cluster.engine.torch.cpu.vectors import TILE_COLUMNS, TILE_ROWS, tile_product, widened
from cluster.engine.torch.host_memory import zeros_on_huge_pages

Array = NDArray[Any]


class PackedMatrix(NamedTuple):
    panels: Array
    """float32, or uint16 for bfloat16: [panels, depth / pair, TILE_COLUMNS, pair]; columns beyond the last are zero."""
    columns: int
    depth: int


def can_pack(depth: int, dtype: torch.dtype) -> bool:
    """Whether weights of this depth and type can be packed here; pairs need an even depth."""
    return dtype == torch.float32 or (dtype == torch.bfloat16 and depth % 2 == 0)


def pack(*weights: Tensor) -> PackedMatrix:
    """Lay out weights [columns, depth] that are to be multiplied with the same input, one below the other."""
    pair = 2 if weights[0].dtype == torch.bfloat16 else 1
    columns, depth = sum(w.shape[0] for w in weights), weights[0].shape[1]
    panels_count = -(-columns // TILE_COLUMNS)
    panels = as_numpy(zeros_on_huge_pages((panels_count, depth // pair, TILE_COLUMNS, pair), weights[0].dtype))
    begin = 0
    for weight in weights:
        numbers = as_numpy(weight.detach()).reshape(weight.shape[0], depth // pair, pair)
        while len(numbers):
            panel, place = divmod(begin, TILE_COLUMNS)
            if place == 0 and (whole := len(numbers) // TILE_COLUMNS):
                count = whole * TILE_COLUMNS
                panels[panel : panel + whole] = (
                    numbers[:count].reshape(whole, TILE_COLUMNS, depth // pair, pair).transpose(0, 2, 1, 3)
                )
            else:
                count = min(TILE_COLUMNS - place, len(numbers))
                panels[panel, :, place : place + count] = numbers[:count].transpose(1, 0, 2)
            begin, numbers = begin + count, numbers[count:]
    return PackedMatrix(panels, columns, depth)


def as_numpy(tensor: Tensor) -> Array:
    """The same memory for a kernel: bfloat16, which numpy does not know, as uint16."""
    numbers: Array = (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return numbers


@kernel
def multiply(x: Array, panels: Array, bias: Array, out: Array, accumulate: bool) -> None:
    """out = x @ weights + bias, or out += that.

    x [tokens, depth] and panels of one dtype; bias float32 [columns], or empty for none; out float32 [tokens, columns].
    Each row of x and out is contiguous.
    """
    tile = np.empty((TILE_ROWS, TILE_COLUMNS), np.float32)
    tokens, columns = out.shape
    tiles = (tokens + TILE_ROWS - 1) // TILE_ROWS
    for panel in range(panels.shape[0]):
        first = panel * TILE_COLUMNS
        width = min(TILE_COLUMNS, columns - first)
        done = 0
        for left in range(tiles, 0, -1):
            rows = (tokens - done + left - 1) // left
            tile_product(
                x,
                rows,
                x.ctypes.data + done * x.strides[0],
                x.strides[0],
                panels.ctypes.data + panel * panels.strides[0],
                panels.shape[1],
                tile.ctypes.data,
                tile.strides[0],
            )
            for row in range(rows):
                target, sums = out[done + row, first : first + width], tile[row]
                if bias.size:
                    added = bias[first : first + width]
                    for i in range(width):
                        sums[i] += added[i]
                if accumulate:
                    for i in range(width):
                        target[i] += sums[i]
                else:
                    for i in range(width):
                        target[i] = sums[i]
            done += rows


@kernel
def read_columns(panels: Array, columns: Array, out: Array) -> None:
    """out[i] = the packed weights of column columns[i], as float32: the embedding of a token, where weights are tied."""
    pair = panels.shape[3]
    for i in range(columns.shape[0]):
        panel, place = columns[i] // TILE_COLUMNS, columns[i] % TILE_COLUMNS
        for step in range(panels.shape[1]):
            for half in range(pair):
                out[i, step * pair + half] = widened(panels[panel, step, place, half])
