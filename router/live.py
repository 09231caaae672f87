"""One request from its admission to its end, as the core keeps it.

Owns: the parts of a live request, what it asks of a replica, and the one line that is logged when it ends. Imports no
transport and no web. Invariant: a live request is either queued (`replica_id` is None) or open on one replica.
"""

from __future__ import annotations

import logging

import msgspec

from cluster.config import PriorityClass
from cluster.types import ReplicaId, Request
from router.journal import Decision, DecisionLog, Journal
from router.outcomes import Ending
from router.queue import Waiting
from router.routing import Need
from router.stream import Stream

BYTES_PER_TOKEN = 36
"""A token id in a tuple: a pointer and an integer object."""
BYTES_PER_REQUEST = 2048
"""Everything else that a queued request holds."""

_log = logging.getLogger("forebay.requests")


class Live:
    """State of one request that has been submitted and has not ended. All times are of the router's monotonic clock."""

    __slots__ = (
        "_decisions",
        "arrived_s",
        "dispatched_s",
        "first_token_s",
        "journal",
        "losses",
        "priority_class",
        "replica_id",
        "request",
        "reserved_tokens",
        "stream",
    )

    def __init__(self, request: Request, priority_class: PriorityClass, stream: Stream, arrived_s: float) -> None:
        self.request = request
        self.priority_class = priority_class
        self.stream = stream
        self.journal = Journal(request.sampling.max_tokens)
        self.arrived_s = arrived_s
        self.dispatched_s: float | None = None
        self.first_token_s: float | None = None
        self.replica_id: ReplicaId | None = None
        self.reserved_tokens = 0
        """Tokens that the reservation's blocks hold; beyond them it must grow."""
        self.losses = 0
        """Engines that this request was lost with."""
        self._decisions = DecisionLog()

    def need(self, expected_output_tokens: int) -> Need:
        """What it asks of a replica now: the output to come is assumed to be no shorter for what has come already."""
        prompt, output_max = len(self.request.prompt_ids), self.request.sampling.max_tokens
        output = min(output_max, self.journal.next_index + expected_output_tokens)
        return Need(self.request.priority, prompt + output, prompt + output_max)

    def waiting(self) -> Waiting:
        """Its key in the queue, the same at every return but for the bytes of what it has emitted."""
        return Waiting(
            request_id=self.request.request_id,
            priority=self.request.priority,
            priority_class=self.priority_class.name,
            arrived_unix_s=self.request.arrived_unix_s,
            size_bytes=size_bytes(self.request, self.journal.next_index),
        )

    def decided(self, now_s: float, event: str, *, replica: str = "", why: str = "", **numbers: int) -> None:
        at_ms = round((now_s - self.arrived_s) * 1000)
        self._decisions.add(Decision(at_ms, event, replica, why, numbers))

    def log_end(self, ending: Ending, now_s: float) -> None:
        """Write the request's one line: what became of it and what was decided on the way, never what it said."""
        level = ending.meaning.log_level
        if not _log.isEnabledFor(level):
            return
        line = _EndLine(
            request_id=self.request.request_id,
            outcome=ending.outcome.value,
            finish=ending.finish.value if ending.finish is not None else None,
            priority_class=self.priority_class.name,
            priority=self.request.priority,
            prompt_tokens=ending.prompt_tokens,
            output_tokens=ending.completion_tokens,
            attempts=self.journal.attempts,
            queue_wait_ms=self._since_arrival_ms(self.dispatched_s),
            ttft_ms=self._since_arrival_ms(self.first_token_s),
            e2e_ms=self._since_arrival_ms(now_s),
            error=ending.error,
            decisions=self._decisions.decisions,
            decisions_left_out=self._decisions.left_out,
        )
        _log.log(level, "%s", msgspec.json.encode(line).decode())

    def _since_arrival_ms(self, at_s: float | None) -> int | None:
        return None if at_s is None else round((at_s - self.arrived_s) * 1000)


class _EndLine(msgspec.Struct, kw_only=True, omit_defaults=True, tag_field="event", tag="request_ended"):
    request_id: str
    outcome: str
    finish: str | None = None
    priority_class: str
    priority: int
    prompt_tokens: int
    output_tokens: int
    attempts: int
    queue_wait_ms: int | None = None
    ttft_ms: int | None = None
    e2e_ms: int | None
    error: str = ""
    decisions: tuple[Decision, ...]
    decisions_left_out: int = 0


def size_bytes(request: Request, emitted_tokens: int = 0) -> int:
    """What a request is charged while it is queued."""
    stop_bytes = sum(len(s) for s in request.sampling.stop) * 4
    return BYTES_PER_REQUEST + BYTES_PER_TOKEN * (len(request.prompt_ids) + emitted_tokens) + stop_bytes
