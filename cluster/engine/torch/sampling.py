"""Draws one token per row from logits.

Owns: the filter and the draw. Imports torch only. Invariant: what is drawn depends on the row's logits, its settings and its
uniform number alone, never on the other rows or on history.

The filter, in this order (that of transformers and vLLM):
1. temperature: the logits are divided by it. Temperature 0 takes the most likely token, of equals the lowest id.
2. top_k: the k most likely tokens are kept (0 keeps all).
3. top_p: of these, renormalised, the most likely are kept, as few as together reach top_p; at least one.
In 2 and 3 tokens as likely as the least likely kept one are kept too, so that the kept set depends on no order.
The draw inverts the cumulative distribution of the kept tokens, in order of their ids, at `uniform`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cluster.ports import SampleSpec

SORTED_CANDIDATES = 1024
"""So many are sorted rather than split again."""
MAX_SPLITS = 32
"""Beyond this (candidates that are all equal do not split) what is left is sorted as it is."""
MIN_TEMPERATURE = 1e-8
"""Lower ones are taken as this: as good as greedy, and still far from overflow in float32."""


def draw(logits: Tensor, specs: Sequence[SampleSpec]) -> list[int | None]:
    """Token ids, one per row of `logits` [rows, vocabulary]; None where the greatest logit is NaN or infinite."""
    best = logits.argmax(dim=-1, keepdim=True)  # where a row has a NaN, that one
    token_ids: list[int | None] = best[:, 0].tolist()
    is_finite: list[bool] = logits.gather(1, best)[:, 0].isfinite().tolist()
    for i, (spec, is_number) in enumerate(zip(specs, is_finite, strict=True)):
        if not is_number:
            token_ids[i] = None
        elif spec.temperature > 0:
            token_ids[i] = _draw_by_chance(logits[i], spec)
    return token_ids


def _draw_by_chance(logits: Tensor, spec: SampleSpec) -> int:
    """From one row [vocabulary]: weights in float32, sums in float64, for they have tens of thousands of terms.

    Row by row, because a row's arrays stay in the processor's cache and a batch's do not: measured on one core with a
    vocabulary of 49,152, 0.2 ms a row against 0.7 to 1.2 ms in a batch of 32.
    """
    logits = logits.float()
    weights = (logits - logits.max()).div_(max(spec.temperature, MIN_TEMPERATURE)).exp_()
    if 0 < spec.top_k < weights.shape[0] or spec.top_p < 1:
        weights.masked_fill_(weights < _least_kept_weight(weights, spec), 0)
    cumulative = weights.cumsum(dim=0, dtype=torch.float64)
    token_id = int(torch.searchsorted(cumulative, cumulative[-1:] * spec.uniform, right=True))
    if token_id == weights.shape[0]:  # uniform x sum rounded up to the sum: the last token with weight is meant
        token_id = int(weights.nonzero()[-1])
    return token_id


def _least_kept_weight(weights: Tensor, spec: SampleSpec) -> Tensor:
    """The weight of the least likely token that the filter keeps, of one row [vocabulary]."""
    if 0 < spec.top_k < weights.shape[0]:
        least = weights.topk(spec.top_k).values[-1]
        if spec.top_p >= 1:
            return least
        weights = weights[weights >= least]
    return _nucleus_edge(weights, spec.top_p)


def _nucleus_edge(weights: Tensor, top_p: float) -> Tensor:
    """The least of the largest weights that together reach `top_p` of the sum; some ten times as fast as sorting a row.

    Quickselect by mass: split the candidates at their mean and go on with the part that the edge lies in, until they
    are few enough to sort. The mean of a peaked distribution cuts off its tail at the first split.
    """
    needed = float(weights.sum(dtype=torch.float64)) * top_p
    above, candidates = 0.0, weights
    for _ in range(MAX_SPLITS):
        if candidates.shape[0] <= SORTED_CANDIDATES:
            break
        is_upper = candidates >= candidates.mean()
        upper = candidates[is_upper]
        mass = float(upper.sum(dtype=torch.float64))
        if above + mass >= needed:
            candidates = upper
        elif upper.shape[0] < candidates.shape[0]:
            above += mass
            candidates = candidates[~is_upper]
    ranked = candidates.sort(descending=True).values
    # The first place where the sum reaches what is needed; the last one where rounding keeps it just below.
    reached = torch.searchsorted(ranked.cumsum(dim=0, dtype=torch.float64) + above, needed)
    return ranked[reached.clamp(max=ranked.shape[0] - 1)]
