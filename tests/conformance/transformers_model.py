"""The plain model of a folder: transformers' own forward pass, and a draw from its definition in float64.

An engine in float32 may differ from it only where two candidates are closer than rounding. There it does not judge.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import takewhile

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from cluster.model import ModelFolder
from cluster.ports import RowOutput, SampleSpec
from cluster.types import TokenLogprob
from tests.conformance.engine_kit import UndecidedError

DECIDED_LOGITS = 5e-5
"""How far apart two logits must be, and, in parts of it, a candidate's weight from the least that is kept."""
DECIDED_CHANCE = 1e-6
"""How far the uniform number must be from where another token begins."""

Floats = NDArray[np.float64]


class TransformersModel:
    """Implements `tests.conformance.engine_kit.PlainModel`."""

    def __init__(self, folder: ModelFolder) -> None:
        self.tokenizer = Tokenizer.from_file(str(folder.tokenizer_path))
        (self.eos,) = folder.eos_token_ids
        self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder.path, dtype=torch.float32, local_files_only=True
        )
        named = inspect.signature(self._model.forward).parameters
        self._cache_name = "past_key_values" if "past_key_values" in named else "cache"
        self._known: list[int] = []
        self._cache = DynamicCache()
        """Of `_known`."""
        self._drawn: dict[tuple[tuple[int, ...], SampleSpec], RowOutput] = {}

    def draw(self, token_ids: Sequence[int], sample: SampleSpec) -> RowOutput:
        if sample.penalties is not None:
            return self._draw(token_ids, sample)
        asked = (tuple(token_ids), sample)
        if asked not in self._drawn:
            self._drawn[asked] = self._draw(token_ids, sample)
        return self._drawn[asked]

    def _draw(self, token_ids: Sequence[int], sample: SampleSpec) -> RowOutput:
        logits = self._logits(token_ids)
        token_id = drawn(logits, sample)
        return RowOutput(token_id, None if sample.logprobs is None else _logprob(logits, token_id, sample.logprobs))

    @torch.inference_mode()
    def scores(self, token_ids: Sequence[int], top: int) -> tuple[TokenLogprob, ...]:
        logits = self._model(torch.tensor([list(token_ids)]), use_cache=False).logits[0].double().numpy()
        return tuple(_logprob(logits[k - 1], token_ids[k], top) for k in range(1, len(token_ids)))

    @torch.inference_mode()
    def _logits(self, token_ids: Sequence[int]) -> Floats:
        """After the last of these."""
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self._known, token_ids, strict=False)))
        if same < len(self._known) or same == len(token_ids):
            self._cache, same = DynamicCache(), 0
        self._known = list(token_ids)
        new = torch.tensor([self._known[same:]])
        logits: Floats = self._model(new, **{self._cache_name: self._cache}).logits[0, -1].double().numpy()
        return logits


def drawn(logits: Floats, s: SampleSpec) -> int:
    """The token by the definitions of `cluster.ports.SampleSpec` and `cluster.types.Sampling`."""
    x = _adjusted(logits, s)
    if s.temperature <= 0:
        second, first = np.partition(x, -2)[-2:]
        if first - second < DECIDED_LOGITS:
            raise UndecidedError
        return int(x.argmax())
    weights = np.exp((x - x.max()) / s.temperature)
    taken: set[int] = set()
    for slack in (-1, 1):  # whoever is at the edge of what is kept is kept once, and once not
        edges = np.cumsum(_filtered(weights, s, slack))
        for shift in (-DECIDED_CHANCE, DECIDED_CHANCE):
            taken.add(int(np.searchsorted(edges / edges[-1], min(max(s.uniform + shift, 0.0), 1.0), side="right")))
    if len(taken) > 1:
        raise UndecidedError
    return taken.pop()


def _adjusted(logits: Floats, s: SampleSpec) -> Floats:
    x = logits.copy()
    for token_id, value in s.bias:
        x[token_id] += value
    x[list(s.banned)] = -np.inf
    if (p := s.penalties) is not None:
        for token_id in {*p.prompt_ids, *p.output_counts}:
            x[token_id] = x[token_id] / p.repetition if x[token_id] > 0 else x[token_id] * p.repetition
        for token_id, times in p.output_counts.items():
            x[token_id] -= times * p.frequency + p.presence
    return x


def _filtered(weights: Floats, s: SampleSpec, slack: int) -> Floats:
    """Nothing where not kept: top_k, then top_p, then min_p, each of what the last one left."""
    keep_from = 1 - slack * DECIDED_LOGITS
    if 0 < s.top_k < len(weights):
        weights = np.where(weights >= np.sort(weights)[-s.top_k] * keep_from, weights, 0.0)
    if s.top_p < 1:
        ranked = np.sort(weights)[::-1]
        needed = (s.top_p + slack * DECIDED_CHANCE) * ranked.sum()
        weights = np.where(weights >= ranked[np.searchsorted(np.cumsum(ranked), needed)], weights, 0.0)
    if s.min_p:
        weights = np.where(weights >= s.min_p * weights.max() * keep_from, weights, 0.0)
    return weights


def _logprob(logits: Floats, token_id: int, top: int) -> TokenLogprob:
    logprobs = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
    likeliest = sorted(range(len(logprobs)), key=lambda k: (-logprobs[k], k))[:top]
    return TokenLogprob(float(logprobs[token_id]), tuple((k, float(logprobs[k])) for k in likeliest))
