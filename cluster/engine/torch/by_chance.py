"""Draws tokens by chance: the filter and the inversion, for a batch of rows at once.

Owns: steps 5 to 8 of sampling.py, and the draw. Imports torch, numpy and selection.py. Invariant: a token depends on its
row's logits, settings and uniform number alone, bit for bit: not on the other rows, nor on which of these ways finds it.

On a CPU a look at the few likeliest tokens settles most rows that have a filter: where they hold all that it keeps, the
draw is among them, and the vocabulary is gone through for the softmax and two sums alone. Other rows with a filter are
searched one by one. On other devices nothing may be asked on the way, for the answer would wait for all work in flight:
there the rows are sorted. Rows without a filter need no search.

Why the ways agree bit for bit: sums are in float64, and a sum of float32 numbers of at least `EXACT_WEIGHT` that stays
below 2 is exact in float64, hence the same in any order. A filter that keeps less likely ones is never settled by a look.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad, threshold

from cluster.engine.torch.selection import BLOCK, at_least, largest
from cluster.ports import SampleSpec

FIRST_LOOK = 64
"""So many of the likeliest tokens are looked at first."""
SORTED_CANDIDATES = 4096
"""Rows up to this length are sorted rather than narrowed down."""
NARROWINGS = 3
"""Passes over a row that bring the candidates for its nucleus' edge down to those that are sorted."""
TOWARDS_MIDDLE = 0.2
"""Measured: on rows with nuclei of 64 to 18,000 of 49,152 tokens 3 passes leave 235 candidates on median."""
SUMMED_AT_ONCE = 2**18
"""Numbers that are copied as float64 at a time."""
EXACT_WEIGHT = 2.0**-29
"""Its unit in the last place is 2**-52, and 53 bits hold all its multiples below 2."""
BLOCK_SUM_ERROR = BLOCK * 2.0**-24
"""Relative, of a float32 sum of `BLOCK` numbers that are not negative, in any order."""
MIN_TEMPERATURE = 1e-8
"""Lower ones are taken as this: as good as greedy, and still far from overflow in float32."""


def draw_by_chance(logits: Tensor, specs: Sequence[SampleSpec]) -> Tensor:
    """Token ids [rows] of logits [rows, vocabulary] in float32, which are overwritten; -1 where the greatest is no number.

    In place, because memory of that size goes back to the system each time and is dear to get.
    """
    greatest = logits.amax(dim=-1, keepdim=True)
    weights = logits.sub_(greatest)  # so that the division cannot overflow
    if any(spec.temperature != 1.0 for spec in specs):
        weights.div_(column([max(spec.temperature, MIN_TEMPERATURE) for spec in specs], logits, torch.float32))
    torch.softmax(weights, dim=-1, out=weights)
    is_number = greatest[:, 0].isfinite()
    if logits.device.type == "cpu":
        token_ids = _drawn_on_cpu(weights, is_number, specs)
    else:
        if any(map(_filters, specs)):
            weights *= weights >= least_kept_weights(weights, specs)
        token_ids = _inverted(weights, column([spec.uniform for spec in specs], logits, torch.float64))
    return torch.where(is_number, token_ids, -1)


def column(values: Sequence[float], like: Tensor, dtype: torch.dtype) -> Tensor:
    """[n, 1] on the device of `like`, without waiting for it."""
    return on_device(torch.tensor(values, dtype=dtype)[:, None], like)


def on_device(tensor: Tensor, like: Tensor) -> Tensor:
    """A copy from memory that is not pinned would wait for the device's work in flight."""
    return tensor if like.device.type == "cpu" else tensor.pin_memory().to(like.device, non_blocking=True)


def _filters(spec: SampleSpec) -> bool:
    return spec.top_k > 0 or spec.top_p < 1 or spec.min_p > 0


# --- on a CPU ---


def _drawn_on_cpu(weights: Tensor, is_number: Tensor, specs: Sequence[SampleSpec]) -> Tensor:
    """Token ids of weights [rows, vocabulary], which are overwritten; any where the row is none of numbers."""
    filtered = [i for i, spec in enumerate(specs) if _filters(spec)]
    unsettled = [i for i, spec in enumerate(specs) if not _filters(spec)]
    token_ids = torch.empty(len(specs), dtype=torch.int64)
    if filtered:
        ranked, ids, totals = _likeliest(_rows(weights, filtered))
        found, settled = _look(ranked, ids, totals, [specs[i] for i in filtered], weights.shape[1])
        token_ids[filtered] = torch.from_numpy(found)
        for place in np.flatnonzero(~settled).tolist():
            i = filtered[place]
            if is_number[i]:
                # The number just below, because `threshold` keeps what is above; masks are many times slower.
                below = np.nextafter(_least_kept_weight(weights[i], specs[i], ranked[place]), np.float32(0))
                threshold(weights[i], float(below), 0.0, inplace=True)
                unsettled.append(i)
    if unsettled:
        uniforms = column([specs[i].uniform for i in unsettled], weights, torch.float64)
        token_ids[unsettled] = _inverted(_rows(weights, unsettled), uniforms)
    return token_ids


def _rows(weights: Tensor, places: list[int]) -> Tensor:
    return weights if places == list(range(weights.shape[0])) else weights[places]


def _look(
    ranked: NDArray[np.float32],
    ids: NDArray[np.int64],
    totals: NDArray[np.float64],
    specs: Sequence[SampleSpec],
    vocabulary: int,
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """A token of each row, of what `_likeliest` gives, and whether it is the one that is to be drawn.

    It is where all that the filter keeps is among the likeliest, and where the sum of the rest, of which bounds are known,
    cannot matter.
    """
    length = ranked.shape[1]
    top_k = np.array([spec.top_k if spec.top_k < vocabulary else 0 for spec in specs])[:, None]
    top_p = np.array([spec.top_p for spec in specs])[:, None]
    min_p = np.array([spec.min_p for spec in specs], np.float32)[:, None]
    sums = ranked.cumsum(axis=1, dtype=np.float64)

    row = np.arange(len(specs))[:, None]

    kth = np.where(top_k > 0, ranked[row, (top_k - 1).clip(0, length - 1)], np.float32(0))
    least = np.maximum(ranked[:, :1] * min_p, kth)
    among_k = sums[row, (ranked >= kth).sum(axis=1, keepdims=True) - 1]
    total = np.where(top_k > 0, among_k, totals[:, None])
    error = np.where(top_k > 0, 0.0, BLOCK_SUM_ERROR)
    edge = (sums < total * (1 - error) * top_p).sum(axis=1, keepdims=True)
    last_edge = (sums < total * (1 + error) * top_p).sum(axis=1, keepdims=True)
    has_edge = (edge == last_edge) & ((edge < length) | (top_k > 0))
    nucleus = ranked[row, edge.clip(max=length - 1)]
    least = np.where(top_p < 1, np.maximum(least, nucleus), least)

    is_exact = (least >= EXACT_WEIGHT) & ((top_k == 0) | (kth >= EXACT_WEIGHT))
    settled = is_exact & (ranked[:, -1:] < least) & (top_k < length) & ((top_p >= 1) | has_edge)
    order = ids.argsort(axis=1)
    kept = np.where(ranked >= least, ranked, np.float32(0))[row, order]
    sums = kept.cumsum(axis=1, dtype=np.float64)
    target = sums[:, -1:] * np.array([spec.uniform for spec in specs])[:, None]
    # Where rounding takes the target up to the whole sum, the last place that added.
    place = np.minimum((sums <= target).sum(axis=1), (sums < sums[:, -1:]).sum(axis=1))
    return ids[row[:, 0], order[row[:, 0], place.clip(max=length - 1)]], settled[:, 0]


def _likeliest(weights: Tensor) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float64]]:
    """Of each row [rows, vocabulary] the `FIRST_LOOK` largest, falling, their ids, and the sum of all within
    `BLOCK_SUM_ERROR`."""
    rows, vocabulary = weights.shape
    if vocabulary % BLOCK:
        weights = pad(weights, (0, -vocabulary % BLOCK))
    blocks = weights.view(rows, -1, BLOCK)
    totals = blocks.sum(dim=-1).sum(dim=-1, dtype=torch.float64)
    if blocks.shape[1] <= FIRST_LOOK:
        ranked = weights.topk(min(FIRST_LOOK, vocabulary))
        return ranked.values.numpy(), ranked.indices.numpy(), totals.numpy()
    # Beside so many blocks whose maxima are as large as its own, a block need not be searched.
    met = blocks.amax(dim=-1).topk(FIRST_LOOK, sorted=False).indices
    places = (met + torch.arange(rows)[:, None] * blocks.shape[1]).flatten()
    ranked = blocks.view(-1, BLOCK).index_select(0, places).view(rows, -1).topk(FIRST_LOOK)
    ids = met.gather(1, ranked.indices // BLOCK) * BLOCK + ranked.indices % BLOCK
    return ranked.values.numpy(), ids.numpy(), totals.numpy()


def _least_kept_weight(weights: Tensor, spec: SampleSpec, likeliest: NDArray[np.float32]) -> np.float32:
    """The weight of the least likely token that the filter keeps, of one row [vocabulary] whose likeliest are known."""
    least: np.float32 = likeliest[0] * np.float32(spec.min_p)
    if 0 < spec.top_k < weights.shape[0]:
        kth = largest(weights, spec.top_k)[-1]
        least = max(least, np.float32(kth))
        weights = weights[at_least(weights, kth)]
    if spec.top_p < 1:
        least = max(least, _nucleus_edge(weights, spec.top_p, likeliest))
    return least


def _nucleus_edge(weights: Tensor, top_p: float, likeliest: NDArray[np.float32]) -> np.float32:
    """The least of the largest weights [n] that together reach `top_p` of the sum."""
    total = float(weights.sum(dtype=torch.float64))
    needed = total * top_p
    above, candidates = 0.0, weights.numpy()
    if weights.shape[0] > SORTED_CANDIDATES:
        low, high = _narrow(weights, needed, total, likeliest)
        part = candidates[(candidates >= np.float32(low)) & (candidates <= np.float32(high))]
        part_above = float(threshold(weights, high, 0.0).sum(dtype=torch.float64))
        if part_above < needed <= part_above + float(part.sum(dtype=np.float64)):
            above, candidates = part_above, part
    ranked = np.sort(candidates)[::-1]
    # The first place where the sum reaches what is needed; the last one where rounding keeps it just below.
    reached = int(np.searchsorted(ranked.cumsum(dtype=np.float64) + above, needed))
    edge: np.float32 = ranked[min(reached, ranked.shape[0] - 1)]
    return edge


def _narrow(weights: Tensor, needed: float, total: float, likeliest: NDArray[np.float32]) -> tuple[float, float]:
    """Bounds between which, but for rounding, the edge of the nucleus of [n] lies.

    The edge is not below the first one: all that are lighter than it weigh no more than `total - needed`. By false position
    on square roots, for between them the sum is nearly linear, a little towards the middle so that both bounds move.
    """
    low, at_low = (total - needed) / weights.shape[0], total
    high = float(likeliest[-1])
    at_high = float(likeliest[likeliest > likeliest[-1]].sum(dtype=np.float64))
    for _ in range(NARROWINGS):
        if not (low < high and at_high < needed < at_low):
            break
        share = (needed - at_high) / (at_low - at_high)
        share += TOWARDS_MIDDLE * (0.5 - share)
        middle = (math.sqrt(high) + share * (math.sqrt(low) - math.sqrt(high))) ** 2
        mass = float(threshold(weights, middle, 0.0).sum())
        if mass >= needed:
            low, at_low = middle, mass
        else:
            high, at_high = middle, mass
    return low, high


# --- on other devices ---


def least_kept_weights(weights: Tensor, specs: Sequence[SampleSpec]) -> Tensor:
    """[rows, 1], of weights [rows, vocabulary]: the weight of the least likely token that each row's filter keeps.

    Asks the device nothing, on whichever it is.
    """
    vocabulary = weights.shape[1]
    ranked = weights.sort(dim=-1, descending=True).values
    least = ranked[:, :1] * column([spec.min_p for spec in specs], weights, torch.float32)
    top_k = [spec.top_k if 0 < spec.top_k < vocabulary else vocabulary for spec in specs]
    kth = ranked.gather(1, column(top_k, weights, torch.int64) - 1)
    ranked = torch.where(ranked >= kth, ranked, 0.0)
    sums = ranked.cumsum(dim=-1, dtype=torch.float64)
    top_p = column([spec.top_p for spec in specs], weights, torch.float64)
    reached = torch.searchsorted(sums, sums[:, -1:] * top_p).clamp_(max=vocabulary - 1)
    nucleus = torch.where(top_p < 1, ranked.gather(1, reached), 0.0)
    return torch.maximum(torch.maximum(least, kth), nucleus)


# --- on all ---


def _inverted(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Of each row [rows, vocabulary] the first id up to which the weights sum to more than its uniform [rows, 1] of all.

    The sums are in float64, for they have tens of thousands of terms: of blocks, then within the one that is met.
    """
    rows, vocabulary = weights.shape
    if vocabulary % BLOCK:
        weights = pad(weights, (0, -vocabulary % BLOCK))
    blocks = weights.view(rows, -1, BLOCK)
    parts = torch.split(blocks, max(1, SUMMED_AT_ONCE // vocabulary))
    ends = torch.cat([part.sum(dim=-1, dtype=torch.float64) for part in parts]).cumsum(dim=-1)
    target = ends[:, -1:] * uniforms
    block = _first_above(ends, target)
    before = torch.where(block > 0, ends.gather(1, (block - 1).clamp_(min=0)), 0.0)
    met = blocks.gather(1, block[:, :, None].expand(-1, 1, BLOCK))[:, 0]
    return (block * BLOCK + _first_above(met.cumsum(dim=-1, dtype=torch.float64), target - before))[:, 0]


def _first_above(sums: Tensor, target: Tensor) -> Tensor:
    """[rows, 1]: where the rising sums of each row first exceed its target; where rounding keeps even the last at it, the
    last place that added. Some place where they are no numbers."""
    above = torch.searchsorted(sums, target, right=True)
    return torch.minimum(above, torch.searchsorted(sums, sums[:, -1:].contiguous())).clamp_(max=sums.shape[1] - 1)
