"""The parts of a Llama layer between its products: norms, rotary positions and the gate.

Owns: what one layer computes before and after its attention, in two calls. Imports numpy and numba. Invariant: sums,
norms and the residual stream are float32 whatever the dtype; what goes into a product or the cache has the dtype.

The gated unit and rotary positions are those of Llama (Touvron et al. 2023), the order of the numbers in a head that of
transformers: the first half of a head turns with the second.
"""

from __future__ import annotations

import math

import numpy as np

from cluster.engine.torch.cpu.compiling import kernel, reordering_kernel
from cluster.engine.torch.cpu.matrices import Array, multiply
from cluster.engine.torch.cpu.vectors import narrowed, power_of_two, widened

LOG2_E = np.float32(math.log2(math.e))
LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
"""ln 2 in two parts, the first of few bits, so that its products with small whole numbers are exact (Cody and Waite)."""
ROUNDER = np.float32(1.5 * 2**23)
"""Added to a small float32 and taken off again it rounds to a whole number, which stands in its low bits meanwhile."""
EXP_MAX, EXP_MIN = np.float32(88.0), np.float32(-87.0)
"""Beyond these the exponential leaves the range of normal float32."""


@kernel
def exp(x: np.float32) -> np.float32:
    """e**x to 2 units in the last place, from EXP_MIN to EXP_MAX (others as the nearest of them); NaN stays NaN.

    Without a branch or a call, so that loops over it are compiled to vectors: x = n ln 2 + r, the Taylor series of e**r
    up to r**7 / 7! (the next term is below 2**-27 for |r| <= ln 2 / 2), and n added to the exponent's bits.
    """
    x = EXP_MAX if x > EXP_MAX else x
    x = EXP_MIN if x < EXP_MIN else x
    rounded = x * LOG2_E + ROUNDER
    n = rounded - ROUNDER
    r = x - n * LN2_HIGH - n * LN2_LOW
    series = np.float32(1 / 5040)
    series = series * r + np.float32(1 / 720)
    series = series * r + np.float32(1 / 120)
    series = series * r + np.float32(1 / 24)
    series = series * r + np.float32(1 / 6)
    series = series * r + np.float32(0.5)
    series = series * r + np.float32(1)
    series = series * r + np.float32(1)
    result: np.float32 = series * power_of_two(rounded)
    return result


@reordering_kernel
def rms_scale(x: Array, epsilon: np.float32) -> np.float32:
    """1 / the root of the mean square of x [n] (Zhang and Sennrich 2019)."""
    total = np.float32(0)
    for i in range(x.shape[0]):
        total += x[i] * x[i]
    scale: np.float32 = np.float32(1) / np.sqrt(total / np.float32(x.shape[0]) + epsilon)
    return scale


@kernel
def rms_norm(x: Array, weight: Array, epsilon: np.float32, out: Array) -> None:
    """out [tokens, n], of any dtype here, = x scaled to a mean square of 1, times weight."""
    for token in range(x.shape[0]):
        scale = rms_scale(x[token], epsilon)
        for i in range(x.shape[1]):
            out[token, i] = narrowed(out, x[token, i] * scale * weight[i])


@kernel
def rotate(heads: Array, norm: Array, epsilon: np.float32, cos: Array, sin: Array, out: Array) -> None:
    """Turn the heads of one token by its position; before that norm each, where `norm` is not empty.

    heads float32 [heads * head_dim], changed by the norm; cos, sin [head_dim / 2]; out [heads, head_dim].
    """
    half = cos.shape[0]
    for head in range(out.shape[0]):
        first, second = heads[2 * half * head :], heads[2 * half * head + half :]
        if norm.size:
            scale = rms_scale(first[: 2 * half], epsilon)
            for i in range(2 * half):
                first[i] = first[i] * scale * norm[i]
        for i in range(half):
            out[head, i] = narrowed(out, first[i] * cos[i] - second[i] * sin[i])
            out[head, half + i] = narrowed(out, second[i] * cos[i] + first[i] * sin[i])


@kernel
def before_attention(
    x: Array,
    norm: Array,
    epsilon: np.float32,
    weights: Array,
    bias: Array,
    query_norm: Array,
    key_norm: Array,
    cos: Array,
    sin: Array,
    positions: Array,
    normed: Array,
    projected: Array,
    query: Array,
    key: Array,
    value: Array,
) -> None:
    """query, key, value [tokens, heads or kv_heads, head_dim] of the residual stream x float32 [tokens, hidden].

    cos, sin [positions, head_dim / 2]. `normed` [tokens, hidden] of the dtype and `projected` float32 [tokens, all heads
    * head_dim] are written over.
    """
    rms_norm(x, norm, epsilon, normed)
    multiply(normed, weights, bias, projected, False)
    key_begin = query.shape[1] * query.shape[2]
    value_begin = key_begin + key.shape[1] * key.shape[2]
    for token in range(x.shape[0]):
        row, position = projected[token], positions[token]
        rotate(row[:key_begin], query_norm, epsilon, cos[position], sin[position], query[token])
        rotate(row[key_begin:value_begin], key_norm, epsilon, cos[position], sin[position], key[token])
        for head in range(value.shape[1]):
            for i in range(value.shape[2]):
                value[token, head, i] = narrowed(value, row[value_begin + head * value.shape[2] + i])


@kernel
def after_attention(
    x: Array,
    attended: Array,
    out_weights: Array,
    out_bias: Array,
    norm: Array,
    epsilon: np.float32,
    gate_up_weights: Array,
    gate_up_bias: Array,
    down_weights: Array,
    down_bias: Array,
    normed: Array,
    gate_up: Array,
    gated: Array,
) -> None:
    """Add to x what the layer makes of its attention's output [tokens, heads * head_dim].

    `normed` [tokens, hidden] and `gated` [tokens, inner] of the dtype, and `gate_up` float32 [tokens, 2 * inner], are
    written over.
    """
    multiply(attended, out_weights, out_bias, x, True)
    rms_norm(x, norm, epsilon, normed)
    multiply(normed, gate_up_weights, gate_up_bias, gate_up, False)
    inner = gated.shape[1]
    for token in range(x.shape[0]):
        gate, up, target = gate_up[token, :inner], gate_up[token, inner:], gated[token]
        for i in range(inner):
            target[i] = narrowed(gated, gate[i] / (np.float32(1) + exp(-gate[i])) * up[i])
    multiply(gated, down_weights, down_bias, x, True)


@kernel
def gather_rows(x: Array, rows: Array, out: Array) -> None:
    """out[i] = x[rows[i]] as float32."""
    for i in range(rows.shape[0]):
        source, target = x[rows[i]], out[i]
        for k in range(source.shape[0]):
            target[k] = widened(source[k])
