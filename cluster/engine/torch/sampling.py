"""Draws one token per row from logits.

Owns: the changes of the logits, the filter and the draw. Imports torch, numpy and the files beside it. Invariant: what is drawn depends
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

from collections.abc import Collection, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cluster.engine.torch.by_chance import draw_by_chance, on_device
from cluster.engine.torch.logprobs import score, token_logprob
from cluster.engine.torch.selection import argmax
from cluster.ports import Row, RowOutput, SampleSpec
from cluster.types import TokenLogprob


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
    """Token ids, one per row of `logits` [rows, vocabulary]; None where the greatest logit is NaN or infinite."""
    if any(map(_changes, specs)) or any(spec.temperature > 0 for spec in specs):
        logits = logits.clone() if logits.dtype == torch.float32 else logits.float()
    return [None if token_id < 0 else token_id for token_id in draw_overwriting(logits, specs).tolist()]


def draw_overwriting(logits: Tensor, specs: Sequence[SampleSpec]) -> Tensor:
    """The same as a tensor [rows] on the device of `logits`, -1 for None, without waiting for that device.

    `logits` are overwritten, and in float32 unless all rows want the most likely token as it is.
    """
    if any(map(_changes, specs)):
        _change(logits, specs)
    by_chance = [i for i, spec in enumerate(specs) if spec.temperature > 0]
    if len(by_chance) == len(specs) > 0:
        return draw_by_chance(logits, specs)
    best = argmax(logits)
    token_ids = torch.where(logits.gather(1, best[:, None])[:, 0].isfinite(), best, -1)
    if by_chance:
        places = on_device(torch.tensor(by_chance), logits)
        token_ids[places] = draw_by_chance(logits[places], [specs[i] for i in by_chance])
    return token_ids


def _changes(spec: SampleSpec) -> bool:
    return bool(spec.bias or spec.banned or spec.penalties is not None)


def _change(logits: Tensor, specs: Sequence[SampleSpec]) -> None:
    """Change [rows, vocabulary] in float32 in place, each kind of change in all rows at once."""
    vocabulary = logits.shape[1]
    bias, banned, repeated, counted = (_Places(vocabulary) for _ in range(4))
    for row, spec in enumerate(specs):
        if spec.bias:
            bias.add(row, [token_id for token_id, _ in spec.bias], np.array([amount for _, amount in spec.bias]))
        banned.add(row, spec.banned, -np.inf)
        if spec.penalties is None:
            continue
        counts = spec.penalties.output_counts
        if spec.penalties.repetition != 1.0:
            repeated.add(row, spec.penalties.prompt_ids, spec.penalties.repetition)
            repeated.add(row, counts, spec.penalties.repetition)
        if spec.penalties.frequency or spec.penalties.presence:
            times = np.fromiter(counts.values(), np.float32, len(counts))
            amounts = times * np.float32(spec.penalties.frequency) + np.float32(spec.penalties.presence)
            counted.add(row, counts, -amounts)
    flat = logits.view(-1)
    flat.index_add_(0, *bias.on(logits))  # added up where an id is named twice
    flat.index_put_((banned.on(logits)[0],), flat.new_tensor(-torch.inf))
    index, penalties = repeated.on(logits)
    values = flat[index]
    flat[index] = torch.where(values < 0, values * penalties, values / penalties)
    flat.index_add_(0, *counted.on(logits))


class _Places:
    """Places in [rows, vocabulary], and a number for each."""

    __slots__ = ("_amounts", "_places", "_vocabulary")

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._places: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
        self._amounts: list[NDArray[np.float32]] = [np.empty(0, np.float32)]

    def add(self, row: int, token_ids: Collection[int], amounts: float | NDArray[np.floating]) -> None:
        """`amounts`: one for all, or one for each."""
        places = np.fromiter(token_ids, np.int64, len(token_ids)) + row * self._vocabulary
        self._places.append(places)
        self._amounts.append(np.broadcast_to(np.asarray(amounts, np.float32), places.shape))

    def on(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Both, flat, on the device of `like`."""
        places, amounts = np.concatenate(self._places), np.concatenate(self._amounts)
        return on_device(torch.from_numpy(places), like), on_device(torch.from_numpy(amounts), like)
