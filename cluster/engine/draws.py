"""What each further token of one request is drawn with.

Owns: the `SampleSpec` of a request's next token, as a function of its sampling and of the output so far. Imports
cluster.types, cluster.ports and cluster.engine.chance. Invariant: it depends on the request and its output alone, not on
how, where or in how many attempts that came about; so every engine draws the same.
"""

from __future__ import annotations

from collections.abc import Collection

from cluster.engine.chance import uniform
from cluster.ports import Penalties, SampleSpec
from cluster.types import Sampling


class Draws:
    """`took` each output token, those of earlier attempts included; `spec` is for the one after them."""

    __slots__ = ("_choice", "_counts", "_eos", "_penalties", "_sampling", "_spec", "made")

    def __init__(self, sampling: Sampling, choice: int, prompt_ids: Collection[int], eos: tuple[int, ...]) -> None:
        """`eos`: the tokens that end this request; none where it ignores them."""
        self.made = 0
        """Output tokens so far."""
        self._sampling = sampling
        self._choice = choice
        self._eos = eos
        self._counts: dict[int, int] | None = {} if has_penalties(sampling) else None
        self._penalties = _penalties(sampling, prompt_ids, self._counts)
        self._spec: SampleSpec | None = None
        """What every further token is drawn with, where it stays the same."""

    def took(self, token_id: int) -> None:
        self.made += 1
        if self._counts is not None:
            self._counts[token_id] = self._counts.get(token_id, 0) + 1

    def spec(self) -> SampleSpec:
        if self._spec is not None:
            return self._spec
        s = self._sampling
        banned = self._eos if self.made < s.min_tokens else ()
        spec = SampleSpec(
            s.temperature,
            s.top_p,
            s.top_k,
            uniform(s.seed, self._choice, self.made) if s.temperature > 0 else 0.0,
            s.min_p,
            s.logit_bias,
            banned,
            self._penalties,
            s.logprobs,
        )
        if s.temperature <= 0 and not banned:
            self._spec = spec
        return spec


def has_penalties(s: Sampling) -> bool:
    return bool(s.presence_penalty or s.frequency_penalty) or s.repetition_penalty != 1.0


def _penalties(s: Sampling, prompt_ids: Collection[int], counts: dict[int, int] | None) -> Penalties | None:
    if counts is None:
        return None
    return Penalties(s.presence_penalty, s.frequency_penalty, s.repetition_penalty, counts, prompt_ids)
