"""The throughput that no engine on the same backend can exceed, from the times of its single steps.

Owns: the arithmetic of the bound. Pure; imports nothing of ours. Invariant: the bound only falls when a step is slower.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median


@dataclass
class StepSamples:
    """Times of single steps in ms, as often as they were measured. Contexts are as long as they are on average."""

    decode_ms: dict[int, list[float]] = field(default_factory=dict)
    """By batch size: a step in which so many sequences decode."""
    prefill_ms: dict[int, list[float]] = field(default_factory=dict)
    """By tokens: a step in which so many tokens of prompts are run."""
    mixed_ms: dict[int, list[float]] = field(default_factory=dict)
    """By batch size: so many decode, and as many tokens of prompts are run beside them as keep the batch full."""


@dataclass(frozen=True, slots=True)
class Bound:
    """The most output tokens per second of an engine that is never idle and wastes nothing."""

    tok_s: float
    batch: int
    mixed: bool
    """Whether prompts share their steps with decodes at this best batch."""


def bound(samples: StepSamples, prefill_tokens: int, decode_tokens: int, output_tokens: int) -> Bound:
    """What the measured steps allow for work of this composition, at the best batch.

    A work-conserving engine that runs D decodes and P tokens of prompts for O tokens of output, in full batches of B,
    needs D / B steps of decoding and, separately, P times what a token costs in the best steps of prompts alone; or else
    D / B steps that do both. The bound takes whichever is faster.
    """
    prefill_ms = min(median(times) / tokens for tokens, times in samples.prefill_ms.items())
    best = Bound(0.0, 0, False)
    for batch, times in samples.decode_ms.items():
        steps = decode_tokens / batch
        apart_ms = steps * median(times) + prefill_tokens * prefill_ms
        together_ms = steps * median(samples.mixed_ms[batch])
        for total_ms, mixed in ((apart_ms, False), (together_ms, True)):
            tok_s = 1000 * output_tokens / total_ms
            if tok_s > best.tok_s:
                best = Bound(tok_s, batch, mixed)
    return best
