"""What was decided about a request, for whoever asks afterwards.

Owns: the answer's form, and the bounded memory of requests that have ended. Imports the journal's values only.
Invariants: nothing of what a request says is in it; memory is bounded in requests and in bytes, the oldest goes first.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from cluster.types import RequestId
from router.journal import Decision

BYTES_PER_EXPLANATION = 1280
BYTES_PER_DECISION = 768
"""Of the objects with their numbers."""


class Explanation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request, with every decision and the numbers that it was made with."""

    request_id: str
    tenant: str
    priority_class: str
    priority: int
    state: str
    """queued, running or ended."""
    outcome: str | None = None
    """Once it has ended."""
    finish: str | None = None
    prompt_tokens: int
    cached_tokens: int | None = None
    """Of the prompt, not computed for its first token; once it has had that."""
    output_tokens: int
    attempts: int
    preemptions: int = 0
    replica: str = ""
    """Where it runs."""
    age_ms: int
    """From its arrival to now, or to its end."""
    queue_wait_ms: int | None = None
    ttft_ms: int | None = None
    error: str = ""
    decisions: tuple[Decision, ...]
    decisions_left_out: int = 0
    """Of too many, the middle is left out."""

    @property
    def size_bytes(self) -> int:
        """About what it holds."""
        return BYTES_PER_EXPLANATION + BYTES_PER_DECISION * len(self.decisions)


class Ended:
    """The latest requests that have ended."""

    __slots__ = ("_bytes", "_bytes_max", "_explanations", "_requests_max")

    def __init__(self, requests_max: int, bytes_max: int) -> None:
        self._requests_max = requests_max
        self._bytes_max = bytes_max
        self._bytes = 0
        self._explanations: OrderedDict[RequestId, Explanation] = OrderedDict()

    def __len__(self) -> int:
        return len(self._explanations)

    def add(self, request_id: RequestId, explanation: Explanation) -> None:
        before = self._explanations.pop(request_id, None)
        if before is not None:  # a caller may name two requests alike, one after the other
            self._bytes -= before.size_bytes
        self._explanations[request_id] = explanation
        self._bytes += explanation.size_bytes
        while len(self._explanations) > self._requests_max or self._bytes > self._bytes_max:
            _, oldest = self._explanations.popitem(last=False)
            self._bytes -= oldest.size_bytes

    def get(self, request_id: RequestId) -> Explanation | None:
        return self._explanations.get(request_id)
