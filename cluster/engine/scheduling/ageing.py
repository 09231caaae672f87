"""Shortest first without starvation: a deadline instead of a length.

Owns: the virtual deadline that sjf and srpt sort by. Imports cluster.config.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.config import EngineConfig


@dataclass(frozen=True, slots=True)
class Ageing:
    """Sorts by `arrival + min(expected tokens / tokens_per_s, longest_wait_s)`.

    Two that arrive together go shortest first. While one waits, those that arrive later get later deadlines, so that
    each second of its wait counts like `tokens_per_s` tokens less that it needs, and the key need not be changed for
    that. Let A arrive at a with deadline K(A) = a + g(A), and B at b = a + w, w > 0, where g(x) = min(x / tokens_per_s,
    longest_wait_s) of the expected tokens. Then B is behind A, that is K(B) - K(A) = w + g(B) - g(A) > 0,

    - if w > longest_wait_s: for g(A) <= longest_wait_s and g(B) >= 0. Nobody who arrives more than `longest_wait_s`
      later goes before A, however short he is. This holds whatever is expected of A, so also after a new estimate.
    - if B's advantage, A's tokens less B's, is less than w x tokens_per_s: for g rises by at most 1 / tokens_per_s per
      token, so g(A) - g(B) < w.
    """

    tokens_per_s: float
    longest_wait_s: float

    @classmethod
    def of(cls, config: EngineConfig) -> Ageing:
        return cls(config.ageing_tokens_per_s, config.longest_wait_s)

    def deadline_s(self, arrived_s: float, expected_tokens: float) -> float:
        return arrived_s + min(max(expected_tokens, 0.0) / self.tokens_per_s, self.longest_wait_s)
