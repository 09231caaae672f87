"""Draws one token per row from logits.

Owns: the changes of the logits, the filter and the draw. Imports torch and the files beside it. Invariant: what is drawn depends
on the row's logits, its settings and its uniform number alone, never on the other rows or on history.

The logits are changed in this order, in float32, for greedy rows as well (vLLM's order, `vllm/v1/sample/sampler.py`):
1. bias: added.
2. banned: set to -inf.
3. repetition penalty (Keskar et al. 2019, as in transformers' RepetitionPenaltyLogitsProcessor): the logit of each token
   of prompt or output is divided by it where positive, multiplied where negative, once however often the token came.
4. frequency and presence penalty (as OpenAI's API defines them): for each token of the output, frequency x times it is
   there, and presence once, are taken off.

Then the filter, in this order (that of transformers' `generate`; vLLM has min_p before top_k and top_p):
5. temperature: the logits are divided by it. Temperature 0 takes the most likely token, of equals the lowest id.
6. top_k: the k most likely tokens are kept (0 keeps all).
7. top_p: of these, renormalised, the most likely are kept, as few as together reach top_p; at least one.
8. min_p: of these, those are kept that are at least min_p times as likely as the likeliest.
In 6 and 7 tokens as likely as the least likely kept one are kept too, so that the kept set depends on no order.
The draw inverts the cumulative distribution of the kept tokens, in order of their ids, at `uniform`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import threshold

from cluster.engine.torch.logprobs import score, token_logprob
from cluster.engine.torch.selection import BLOCK, argmax, at_least, blocks_of, largest
from cluster.ports import Penalties, Row, RowOutput, SampleSpec
from cluster.types import TokenLogprob

FIRST_LOOK = 64
"""So many of the likeliest tokens are looked at first for the nucleus."""
SORTED_CANDIDATES = 4096
"""So many are sorted rather than split again."""
MAX_SPLITS = 32
"""Beyond this (candidates that are all equal do not split) what is left is sorted as it is."""
MIN_TEMPERATURE = 1e-8
"""Lower ones are taken as this: as good as greedy, and still far from overflow in float32."""


def outputs(logits: Tensor, rows: Sequence[Row]) -> list[RowOutput]:
    """What the step computed for each row, in the order of the rows.

    `logits` [kept, vocabulary] holds, in the order of the rows, the positions that each row needs: first those that it
    scores (its tokens 0 … len(targets) - 1), then its last one if it draws.

    A row that draws has no token where its greatest logit is NaN or infinite, or where every token is banned; one that
    scores has no scores where those logits are no numbers.
    """
    scores: list[tuple[TokenLogprob, ...]] = []
    places: list[int] = []
    end = 0
    for row in rows:
        begin, end = end, end + (len(row.score.targets) if row.score else 0)
        scores.append(score(logits[begin:end], row.score.targets, row.score.top) if row.score else ())
        if row.sample is not None:
            places.append(end)
            end += 1
    if end != logits.shape[0]:
        raise ValueError(f"{logits.shape[0]} positions have logits, {end} are asked for")
    last = logits if len(places) == end else logits[places]
    drawn = iter(_drawn(last, [row.sample for row in rows if row.sample is not None]))
    return [
        RowOutput(*(next(drawn) if row.sample is not None else (None, None)), row_scores)
        for row, row_scores in zip(rows, scores, strict=True)
    ]


def _drawn(logits: Tensor, specs: Sequence[SampleSpec]) -> list[tuple[int | None, TokenLogprob | None]]:
    """Tokens and, where asked for, their logprobs, one pair per row of `logits`."""
    return [
        (
            token_id,
            None if token_id is None or spec.logprobs is None else token_logprob(row, token_id, spec.logprobs),
        )
        for row, spec, token_id in zip(logits, specs, draw(logits, specs), strict=True)
    ]


def draw(logits: Tensor, specs: Sequence[SampleSpec]) -> list[int | None]:
    """Token ids, one per row of `logits` [rows, vocabulary]; None where the greatest logit is NaN or infinite.

    Rows that only want the most likely token are drawn together, the others one by one.
    """
    if not specs:
        return []
    best = argmax(logits)
    token_ids: list[int | None] = best.tolist()
    is_finite: list[bool] = logits.gather(1, best[:, None])[:, 0].isfinite().tolist()
    for i, (spec, is_number) in enumerate(zip(specs, is_finite, strict=True)):
        if not is_number:
            token_ids[i] = None
        elif spec.temperature > 0 or _changes(spec):
            token_ids[i] = _draw_one(logits[i], spec)
    return token_ids


def _changes(spec: SampleSpec) -> bool:
    return bool(spec.bias or spec.banned or spec.penalties is not None)


def _draw_one(logits: Tensor, spec: SampleSpec) -> int | None:
    """From one row [vocabulary] of numbers; None where the changes leave none to draw."""
    logits = logits.float()
    if _changes(spec):
        logits = _changed(logits, spec)
    greatest = logits.amax()
    if not bool(greatest.isfinite()):
        return None
    if spec.temperature <= 0:
        return int(argmax(logits[None]))
    return _draw_by_chance(logits - greatest, spec)


def _changed(logits: Tensor, spec: SampleSpec) -> Tensor:
    """A changed copy of one row [vocabulary] in float32."""
    logits = logits.clone()
    if spec.bias:
        token_ids, amounts = zip(*spec.bias, strict=True)
        # Added up where an id is named twice.
        logits.index_add_(0, _ids(token_ids, logits), torch.tensor(amounts, dtype=logits.dtype, device=logits.device))
    if spec.banned:
        logits[_ids(spec.banned, logits)] = -torch.inf
    if spec.penalties is not None:
        _penalise(logits, spec.penalties)
    return logits


def _penalise(logits: Tensor, penalties: Penalties) -> None:
    """Change one row [vocabulary] in place."""
    counts = penalties.output_counts
    if penalties.repetition != 1.0 and (counts or penalties.prompt_ids):
        seen = _ids([*penalties.prompt_ids, *counts], logits)
        values = logits[seen]
        logits[seen] = torch.where(values < 0, values * penalties.repetition, values / penalties.repetition)
    if counts and (penalties.frequency or penalties.presence):
        times = torch.tensor(list(counts.values()), dtype=logits.dtype, device=logits.device)
        logits.index_add_(0, _ids(list(counts), logits), -(times * penalties.frequency + penalties.presence))


def _ids(token_ids: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(token_ids, dtype=torch.int64, device=like.device)


def _draw_by_chance(logits: Tensor, spec: SampleSpec) -> int:
    """From one row [vocabulary], which is overwritten. Its greatest logit is 0, so that the division cannot overflow.

    Row by row, because a row's arrays stay in the processor's cache and a batch's do not.
    """
    weights = logits.div_(max(spec.temperature, MIN_TEMPERATURE)).softmax(dim=-1)
    if 0 < spec.top_k < weights.shape[0] or spec.top_p < 1 or spec.min_p > 0:
        # The number just below, because `threshold` keeps what is above; it runs at the speed of memory, masks do not.
        below = torch.nextafter(_least_kept_weight(weights, spec), weights.new_zeros(()))
        weights = threshold(weights, float(below), 0.0)
    return _inverted(weights, spec.uniform)


def _least_kept_weight(weights: Tensor, spec: SampleSpec) -> Tensor:
    """The weight of the least likely token that the filter keeps, of one row [vocabulary]."""
    least = weights.amax() * spec.min_p
    if 0 < spec.top_k < weights.shape[0]:
        kth = largest(weights, spec.top_k)[-1]
        least = torch.maximum(least, kth)
        weights = weights[at_least(weights, kth)]
    if spec.top_p < 1:
        least = torch.maximum(least, _nucleus_edge(weights, spec.top_p))
    return least


def _nucleus_edge(weights: Tensor, top_p: float) -> Tensor:
    """The least of the largest weights that together reach `top_p` of the sum; many times as fast as sorting a row.

    A look at the few largest settles most steps of a language model. Else quickselect by mass: split the candidates at
    their mean and go on with the part that the edge lies in, until they are few enough to sort.
    """
    needed = float(weights.sum(dtype=torch.float64)) * top_p
    if weights.shape[0] > SORTED_CANDIDATES:
        first = largest(weights, FIRST_LOOK)
        sums = first.cumsum(dim=0, dtype=torch.float64)
        if float(sums[-1]) >= needed:
            return first[torch.searchsorted(sums, needed)]
    above, candidates = 0.0, weights
    for _ in range(MAX_SPLITS):
        if candidates.shape[0] <= SORTED_CANDIDATES:
            break
        mean = candidates.mean()
        upper = candidates[at_least(candidates, mean)]
        mass = float(upper.sum(dtype=torch.float64))
        if above + mass >= needed:
            candidates = upper
        elif upper.shape[0] < candidates.shape[0]:
            above += mass
            candidates = candidates[candidates < mean]
    ranked = candidates.sort(descending=True).values
    # The first place where the sum reaches what is needed; the last one where rounding keeps it just below.
    reached = torch.searchsorted(ranked.cumsum(dim=0, dtype=torch.float64) + above, needed)
    return ranked[reached.clamp(max=ranked.shape[0] - 1)]


def _inverted(weights: Tensor, uniform: float) -> int:
    """The first id up to which the weights [vocabulary] sum to more than `uniform` of their sum.

    The sums are in float64, for they have tens of thousands of terms: of blocks, then within the one that is met.
    """
    blocks = blocks_of(weights, 0.0)
    ends = blocks.sum(dim=-1, dtype=torch.float64).cumsum(dim=0)
    target = ends[-1] * uniform
    block = _first_above(ends, target)
    if block > 0:
        target = target - ends[block - 1]
    return block * BLOCK + _first_above(blocks[block].cumsum(dim=0, dtype=torch.float64), target)


def _first_above(sums: Tensor, target: Tensor) -> int:
    """Where rising `sums` first exceed `target`; where rounding keeps even the last at it, the last place that added."""
    place = int(torch.searchsorted(sums, target, right=True))
    return place if place < sums.shape[0] else int(torch.searchsorted(sums, sums[-1]))
