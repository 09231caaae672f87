"""How many requests could meet their objectives at best, on so many GPUs, whoever decides.

Owns: the least GPU time of a request, and the bound that follows. Imports the step times. Pure.

**Least GPU time.** A step of n new tokens takes base(n) + what each of its rows adds (ops/sim/step_time.py), and a step has
at most `budget` tokens. With the host's part of a step, base(n) + host >= r x n, where r is the least of (base(n) + host) / n
over 1 <= n <= budget: the time of a token in the best of batches. So all steps that a request has a part in take, for it,
at least

    r x (prompt + output - 1) + sum over its prompt's tokens of what each adds + (output - 1) x (decode + host per request)
    + contexts that its decodes read x time per context token

and these least times of different requests add up, since the tokens of a step do. A prompt's token at position q adds
pair x (q + 1/2) in a chunk, or, run alone, what a decode behind q tokens adds: the lesser counts. What chunks read of the
contexts before them, and preemption, padding and idleness, are left out: they only add.

**Bound.** N GPUs have N x (e - s) seconds between s and e. A request that meets its objectives has run its whole prompt
by its arrival + the TTFT that it is allowed, and all of it by that + (output - 1) x the TPOT that it is allowed (its mean
TPOT is what is judged). So between s and e a good request takes, if it arrives after s, the time of its prompt if that
must be done by e, and the time of its decodes too if these must be. The most requests whose times fit are a knapsack with
equal values, and the fractional one, filled from the least time on, is no smaller. Those that take nothing between s and
e are taken to be good. This holds for every s and e; the least over a grid of them is the bound.

It knows no placement, no memory, no prefix cache (it is for prompts that share nothing), and no length of a step: a TPOT
bound below the time of a full step is not seen. What is reached may lie below for reasons that no policy can change, and
never above.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ops.sim.step_time import StepTimes, a100, decode_ms

GRID = 12
"""Moments between which the GPUs' time is counted, evenly spread."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Job:
    """A request with objectives. Seconds."""

    arrived_s: float
    prompt_s: float
    """The least GPU time of its prompt, up to its first token."""
    decode_s: float
    """And of the rest."""
    prompt_due_s: float
    due_s: float


class LeastTimes:
    """The least GPU time of requests, for one model and one budget of a step."""

    def __init__(self, times: StepTimes, budget_tokens: int, longest_prompt_tokens: int) -> None:
        step_ms, self._row_ms = a100().host_overhead_ms_per_step, a100().host_overhead_ms_per_request
        # Between knots a step's time is a straight line, so that its time per token is least at the end of one.
        knots = {1, budget_tokens, *(n for n in times.tokens if n < budget_tokens)}
        self._token_ms = min((_base_ms(times, n) + step_ms) / n for n in knots)
        self._budget_tokens = budget_tokens
        self._times = times
        before = np.arange(longest_prompt_tokens, dtype=np.float64)
        chunked = times.ms_per_prefill_pair * (before + 0.5)
        alone = times.ms_per_decode + self._row_ms + times.ms_per_context_token * before
        self._added_ms = np.concatenate(([0.0], np.cumsum(np.minimum(chunked, alone))))

    def prompt_s(self, prompt_tokens: int) -> float:
        """Of a prompt that no cache has a part of."""
        return max(0.0, self._token_ms * prompt_tokens + float(self._added_ms[prompt_tokens])) / 1000

    def chunks_s(self, cached_tokens: int, prompt_tokens: int) -> float:
        """Of a prompt from here to there, with what chunks of a whole step's budget read of the contexts before them."""
        contexts = sum(range(cached_tokens, prompt_tokens, self._budget_tokens))
        computed_s = self.prompt_s(prompt_tokens) - self.prompt_s(cached_tokens)
        return computed_s + self._times.ms_per_context_token * contexts / 1000

    def decode_s(self, prompt_tokens: int, output_tokens: int) -> float:
        """Of all tokens after the first."""
        decodes = output_tokens - 1
        contexts = decodes * prompt_tokens + decodes * (decodes - 1) / 2
        each_ms = self._token_ms + self._times.ms_per_decode + self._row_ms
        return max(0.0, each_ms * decodes + self._times.ms_per_context_token * contexts) / 1000


def _base_ms(times: StepTimes, tokens: int) -> float:
    """Of a step of so many tokens, without what rows and contexts add."""
    return decode_ms(times, tokens, 0) - times.ms_per_decode * tokens


def most_good(jobs: Sequence[Job], gpus: int) -> float:
    """No more of these can meet their objectives."""
    if not jobs:
        return 0.0
    arrived, prompt, decode, prompt_due, due = (
        np.array([getattr(job, name) for job in jobs], dtype=np.float64)
        for name in ("arrived_s", "prompt_s", "decode_s", "prompt_due_s", "due_s")
    )
    starts = np.linspace(arrived.min(), arrived.max(), GRID)
    ends = np.unique(np.concatenate((np.linspace(arrived.min(), arrived.max(), GRID), [prompt_due.max(), due.max()])))
    return min(
        _fitting(np.where(arrived >= s, prompt * (prompt_due <= e) + decode * (due <= e), 0.0), gpus * (e - s))
        for s in starts
        for e in ends
        if e > s
    )


def _fitting(needed_s: Floats, there_s: float) -> float:
    """How many fit, the least first, and which part of the next."""
    total_s = np.cumsum(np.sort(needed_s))
    whole = int(np.searchsorted(total_s, there_s, side="right"))
    if whole == len(needed_s):
        return float(whole)
    used_s = float(total_s[whole - 1]) if whole else 0.0
    return whole + (there_s - used_s) / (float(total_s[whole]) - used_s)
