"""What was decided about a request, for whoever asks afterwards.

Owns: the answer's form, and the bounded memory of requests that have ended. Imports the journal's values only.
Invariants: nothing of what a request says is in it; memory is bounded in requests and in bytes, the oldest goes first.

What has ended is kept as JSON, which is the log's line: few will ever ask for it, and its objects are three times as large.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from cluster.types import RequestId
from router.journal import Decision

BYTES_PER_EXPLANATION = 512
"""Of keeping one, beside its JSON."""


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


encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Explanation).decode


class Ended:
    """The latest requests that have ended."""

    __slots__ = ("_bytes", "_bytes_max", "_explanations", "_requests_max")

    def __init__(self, requests_max: int, bytes_max: int) -> None:
        self._requests_max = requests_max
        self._bytes_max = bytes_max
        self._bytes = 0
        self._explanations: OrderedDict[RequestId, bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._explanations)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._explanations

    def add(self, request_id: RequestId, explanation: bytes) -> None:
        """As `encode` makes it."""
        before = self._explanations.pop(request_id, None)
        if before is not None:  # a caller may name two requests alike, one after the other
            self._bytes -= BYTES_PER_EXPLANATION + len(before)
        self._explanations[request_id] = bytes(memoryview(explanation))  # msgspec's has room for half as much again
        self._bytes += BYTES_PER_EXPLANATION + len(explanation)
        while len(self._explanations) > self._requests_max or self._bytes > self._bytes_max:
            _, oldest = self._explanations.popitem(last=False)
            self._bytes -= BYTES_PER_EXPLANATION + len(oldest)

    def get(self, request_id: RequestId) -> Explanation | None:
        explanation = self._explanations.get(request_id)
        return None if explanation is None else _decode(explanation)
