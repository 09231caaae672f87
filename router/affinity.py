"""Where the beginning of a prompt was sent last, so that what is like it can follow before it has been computed.

Owns: that memory. Imports types only. Single writer. Invariants: it is bounded, and one tenant's keys are never
another's. It is a guess that decides only between replicas. What a replica has computed and still holds it tells itself
(router/prefixes.py); so of one that tells, an attempt is remembered only while it is there, and its session longer, to
decide between replicas that are otherwise equal. Of one that tells nothing all is remembered.
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
    settled: bool = False
    """That attempt is over, and the replica tells what it holds: this is of no more worth than a habit."""


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
        """Which incarnation has, or will have, most of the prompt, as far as is known, with so many of its tokens; where
        none is expected to have any, where the session was last."""
        habit: Seen | None = None
        for key in keys:
            seen = self._seen.get(key)
            if seen is None:
                continue
            if not seen.settled:
                return seen._replace(tokens=min(seen.tokens, prompt_tokens))
            habit = seen
        return habit

    def served(self, keys: tuple[Key, ...], replica_id: ReplicaId, generation: Generation, tokens: int) -> None:
        """A prompt of so many tokens was sent there."""
        for key in keys:
            self._seen[key] = Seen(replica_id, generation, key[1] or tokens)
            self._seen.move_to_end(key)
        while len(self._seen) > self._entries_max:
            self._seen.popitem(last=False)

    def settle(self, keys: tuple[Key, ...], replica_id: ReplicaId, generation: Generation) -> None:
        """An attempt there is over, of a replica that tells what it holds."""
        for key in keys:
            seen = self._seen.get(key)
            if seen is None or (seen.replica_id, seen.generation) != (replica_id, generation):
                continue
            if key[1] == 0:
                self._seen[key] = seen._replace(settled=True)
            else:
                del self._seen[key]
