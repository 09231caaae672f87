"""Rotary positions of the Llama family (Su et al. 2021).

Owns: the angles by which queries and keys are turned. Imports torch. Invariant: they are those of transformers 5, number
for number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from cluster.engine.torch.llama import LlamaSpec


def rope_tables(spec: LlamaSpec, positions: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines, float32 [positions, head_dim / 2]."""
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.int64).float() / spec.head_dim
    turns = SCALED[spec.rope.kind](1.0 / spec.rope.theta**exponents, spec.rope.scaling)
    angles = torch.arange(positions, dtype=torch.int64).float()[:, None] * turns
    return angles.cos(), angles.sin()


def _llama3(turns: Tensor, scaling: Mapping[str, float]) -> Tensor:
    """Slow turns are slowed by `factor`, fast ones kept, those between mixed (Llama 3.1's own code, by way of
    transformers' `_compute_llama3_parameters`)."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns_in_original = scaling["original_max_position_embeddings"] / (2 * math.pi / turns)
    share_kept = (turns_in_original - low) / (high - low)
    mixed = (1 - share_kept) * turns / factor + share_kept * turns
    return torch.where(turns_in_original < low, turns / factor, torch.where(turns_in_original > high, turns, mixed))


SCALED: dict[str, Callable[[Tensor, Mapping[str, float]], Tensor]] = {
    "default": lambda turns, scaling: turns,  # noqa: ARG005
    "linear": lambda turns, scaling: turns / scaling["factor"],
    "llama3": _llama3,
}
