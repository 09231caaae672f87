"""Where the beginning of a prompt was computed last, so that it need not be computed again.

Owns: that memory. Imports types only. Single writer. Invariants: it is bounded, and one tenant's keys are never
another's. It is a guess that decides only between replicas: what an engine still has in its cache nobody reports yet.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from cluster.types import Generation, ReplicaId, Request

DEPTHS_TOKENS = (1024, 256, 64)
"""Lengths of the beginnings of a prompt that are remembered, longest first. A shorter prompt is soon computed."""

Key = tuple[str, int, int | str]


class Seen(NamedTuple):
    """Who computed it, and how many tokens that were."""

    replica_id: ReplicaId
    generation: Generation
    tokens: int


def keys_of(request: Request, session: str) -> tuple[Key, ...]:
    """By what a request is recognised, the most telling first."""
    tenant, prompt = request.tenant, request.prompt_ids
    keys: list[Key] = [(tenant, 0, session)] if session else []
    keys += [(tenant, depth, hash(prompt[:depth])) for depth in DEPTHS_TOKENS if depth <= len(prompt)]
    return tuple(keys)


class Affinity:
    """The replicas that served the latest sessions and beginnings of prompts."""

    __slots__ = ("_entries_max", "_seen")

    def __init__(self, entries_max: int) -> None:
        self._entries_max = entries_max
        self._seen: OrderedDict[Key, Seen] = OrderedDict()
        """The one that was used longest ago is first."""

    def __len__(self) -> int:
        return len(self._seen)

    def expected(self, keys: tuple[Key, ...], prompt_tokens: int) -> Seen | None:
        """Which incarnation has most of the prompt, as far as is known, with so many of its tokens."""
        for key in keys:
            seen = self._seen.get(key)
            if seen is not None:
                return seen._replace(tokens=min(seen.tokens, prompt_tokens))
        return None

    def served(self, keys: tuple[Key, ...], replica_id: ReplicaId, generation: Generation, tokens: int) -> None:
        """A prompt of so many tokens was sent there."""
        for key in keys:
            self._seen[key] = Seen(replica_id, generation, key[1] or tokens)
            self._seen.move_to_end(key)
        while len(self._seen) > self._entries_max:
            self._seen.popitem(last=False)
