"""How long one step takes on a device: a pure function of what is in it.

Owns: the form of the model and the reading of an A100's data (a100/step_time.json, see the README there); of other devices
they can be fitted (ops/bench/step_fit.py). Imports nothing of ours. The step's time on the device is

    base(new tokens) + a x contexts + b x pairs + c x decoding sequences

where `base` is interpolated between 13 knots and goes on in a straight line beyond the last; contexts are the tokens
before the new ones, whose keys and values are read; pairs are those of a prompt's token and another that it attends to,
n^2 / 2 for a whole prompt and n^2 / 2 + n x context for a chunk of one. What the host adds is a term of its own.

Invariant: of two steps with the same tokens, the one with the longer contexts takes longer. (In the number of tokens the
data themselves are not monotone: kernels are faster at 256 tokens than at 192.)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec

DATA = Path(__file__).parent / "a100"


class Prefill(NamedTuple):
    """A prompt, or a chunk of one: `tokens` new ones behind `context_tokens` that were run before."""

    tokens: int
    context_tokens: int = 0


class StepTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One model on one device."""

    held_out_mean_absolute_error: float
    """Of the fit, relative, on points that it was not made from."""
    weights_bytes: int
    kv_bytes_per_token: int
    kv_capacity_tokens: int
    """Positions whose keys and values fit beside the weights."""
    tokens: tuple[int, ...]
    """The knots: new tokens of a step, ascending."""
    ms: tuple[float, ...]
    """Time of a step of so many new tokens without context."""
    ms_per_context_token: float
    ms_per_prefill_pair: float
    ms_per_decode: float


class Device(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What steps are run on: all of step_time.json."""

    device: str
    dtype: str
    source: str
    form: str
    host_overhead_ms_per_step: float
    host_overhead_ms_per_request: float
    host_overhead_source: str
    network_bytes_per_s: float
    """At which a GPU's keys and values travel to another."""
    network_source: str
    copy_bytes_per_s: float
    """At which they come from the GPU to its host's memory, or from there to it, between two steps."""
    copy_source: str
    models: dict[str, StepTimes]

    def host_ms(self, requests: int) -> float:
        """What the host adds to a step of so many requests."""
        return self.host_overhead_ms_per_step + self.host_overhead_ms_per_request * requests


@cache
def a100() -> Device:
    return msgspec.json.decode((DATA / "step_time.json").read_bytes(), type=Device)


def device_ms(times: StepTimes, prefills: Sequence[Prefill], decode_contexts: Sequence[int]) -> float:
    """Time of one step on the device; `decode_contexts` has the tokens before the new one of each decoding sequence."""
    return mixed_ms(times, prefills, len(decode_contexts), sum(decode_contexts))


def mixed_ms(times: StepTimes, prefills: Sequence[Prefill], sequences: int, context_tokens: int) -> float:
    """The same; `sequences` decode, with `context_tokens` before their new ones in all. Nothing to run takes no time."""
    if not prefills:
        return decode_ms(times, sequences, context_tokens) if sequences else 0.0
    tokens = sum(p.tokens for p in prefills) + sequences
    contexts = context_tokens + sum(p.context_tokens for p in prefills)
    pairs = sum(p.tokens * (p.tokens / 2 + p.context_tokens) for p in prefills)
    return (
        _base_ms(times, tokens)
        + times.ms_per_context_token * contexts
        + times.ms_per_prefill_pair * pairs
        + times.ms_per_decode * sequences
    )


def decode_ms(times: StepTimes, sequences: int, context_tokens: int) -> float:
    """The same of a step in which sequences decode, with `context_tokens` before their new ones in all."""
    return _base_ms(times, sequences) + times.ms_per_context_token * context_tokens + times.ms_per_decode * sequences


def host_ms(requests: int) -> float:
    """What the host of an A100 adds to a step of so many requests."""
    return a100().host_ms(requests)


def step_ms(times: StepTimes, prefills: Sequence[Prefill], decode_contexts: Sequence[int]) -> float:
    """An A100 and its host, one after the other."""
    return device_ms(times, prefills, decode_contexts) + host_ms(len(prefills) + len(decode_contexts))


def _base_ms(times: StepTimes, tokens: int) -> float:
    right = min(max(bisect_right(times.tokens, tokens), 1), len(times.tokens) - 1)
    x0, x1 = times.tokens[right - 1], times.tokens[right]
    y0, y1 = times.ms[right - 1], times.ms[right]
    return y0 + (tokens - x0) * (y1 - y0) / (x1 - x0)
