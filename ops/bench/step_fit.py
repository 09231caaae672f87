"""Step times of an engine that can be measured here, in the simulator's form.

Owns: what is kept of a measured step, and the fit. Imports the form (ops/sim/step_time.py). Pure. The form is linear in its
parameters: the times at the knots, between which a step's tokens are interpolated, and the three terms beside them. Fitted
is by least squares the error relative to what is predicted: relative to what was measured, steps that happened to be short
would count for more, and all predictions would be too short. Steps that something else on the machine has disturbed are left
out and counted.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from ops.sim.step_time import Prefill, StepTimes, mixed_ms

KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
DISTURBED_DEVIATIONS = 8.0
"""A step that is so many median deviations off the fit was disturbed."""
HELD_OUT = 5
"""One step of so many is held out."""
_ROUNDS = 3


class StepSample(msgspec.Struct, frozen=True, array_like=True):
    """One step, and how long it took."""

    prefills: tuple[tuple[int, int], ...]
    """(new tokens, tokens before them)."""
    sequences: int
    """That decode."""
    context_tokens: int
    """Before their new ones, in all."""
    ms: float

    @property
    def tokens(self) -> int:
        return self.sequences + sum(tokens for tokens, _ in self.prefills)


class Fitted(msgspec.Struct, frozen=True):
    times: StepTimes
    steps: int
    disturbed: int
    """Left out."""


class KvSize(NamedTuple):
    bytes_per_token: int
    capacity_tokens: int


def fit(samples: Sequence[StepSample], kv: KvSize) -> Fitted:
    """
    Raises:
        ValueError: there are too few steps, or all have the same number of tokens.
    """
    shuffled = list(samples)
    random.Random(0).shuffle(shuffled)
    largest = max((one.tokens for one in shuffled), default=0)
    below = [knot for knot in KNOTS if knot < largest]
    knots = (*below[:-1], largest)
    if len(knots) < 2 or len(shuffled) < 10 * (len(knots) + 3):
        raise ValueError(f"{len(shuffled)} steps of up to {largest} tokens are too few to fit their times")
    kept, disturbed = _undisturbed(shuffled, knots)
    held_out, rest = kept[::HELD_OUT], [one for i, one in enumerate(kept) if i % HELD_OUT]
    tried = _times(_solve(rest, knots), knots, kv, 0.0)
    error = float(np.mean([abs(predicted_ms(tried, one) / one.ms - 1) for one in held_out]))
    return Fitted(_times(_solve(kept, knots), knots, kv, error), len(shuffled), disturbed)


def predicted_ms(times: StepTimes, sample: StepSample) -> float:
    prefills = [Prefill(tokens, context) for tokens, context in sample.prefills]
    return mixed_ms(times, prefills, sample.sequences, sample.context_tokens)


def _undisturbed(samples: Sequence[StepSample], knots: Sequence[int]) -> tuple[list[StepSample], int]:
    kept = list(samples)
    for _ in range(_ROUNDS):
        off = np.array([one.ms for one in kept])
        # One pass: what was disturbed took long, and counts for little relative to itself.
        off = np.abs(_features(kept, knots) @ _solve(kept, knots, passes=1) / off - 1)
        limit = DISTURBED_DEVIATIONS * float(np.median(off))
        kept = [one for one, by in zip(kept, off, strict=True) if by <= limit]
    return kept, len(samples) - len(kept)


def _solve(samples: Sequence[StepSample], knots: Sequence[int], passes: int = _ROUNDS) -> NDArray[np.float64]:
    """By least squares with weights that are fitted again (iteratively reweighted)."""
    ms, features = np.array([one.ms for one in samples]), _features(samples, knots)
    predicted, least = ms, float(ms.min())
    for _ in range(passes):
        solved: NDArray[np.float64] = np.linalg.lstsq(features / predicted[:, None], ms / predicted, rcond=None)[0]
        predicted = np.maximum(features @ solved, least)
    return solved


def _features(samples: Sequence[StepSample], knots: Sequence[int]) -> NDArray[np.float64]:
    """What each parameter is multiplied with."""
    rows = np.zeros((len(samples), len(knots) + 3))
    for row, one in zip(rows, samples, strict=True):
        right = min(max(bisect_right(knots, one.tokens), 1), len(knots) - 1)
        share = (one.tokens - knots[right - 1]) / (knots[right] - knots[right - 1])
        row[right - 1], row[right] = 1 - share, share
        row[-3] = one.context_tokens + sum(context for _, context in one.prefills)
        row[-2] = sum(tokens * (tokens / 2 + context) for tokens, context in one.prefills)
        row[-1] = one.sequences
    return rows


def _times(solved: NDArray[np.float64], knots: tuple[int, ...], kv: KvSize, error: float) -> StepTimes:
    *ms, per_context, per_pair, per_decode = (float(value) for value in solved)
    return StepTimes(
        held_out_mean_absolute_error=error,
        weights_bytes=0,
        kv_bytes_per_token=kv.bytes_per_token,
        kv_capacity_tokens=kv.capacity_tokens,
        tokens=knots,
        ms=tuple(ms),
        ms_per_context_token=per_context,
        ms_per_prefill_pair=per_pair,
        ms_per_decode=per_decode,
    )
