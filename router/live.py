"""One request from its admission to its end, as the core keeps it.

Owns: the parts of a live request, what it asks of a replica, and the one line that is logged when it ends. Imports no
transport and no web. Invariant: a live request is either queued (`replica_id` is None) or open on one replica.
"""

from __future__ import annotations

import logging

import msgspec

from cluster.config import PriorityClass
from cluster.types import Outcome, ReplicaId, Request
from router.journal import Decision, DecisionLog, Journal
from router.metrics_sink import RouterMetrics
from router.outcomes import Ending
from router.queue import Waiting
from router.routing import Need
from router.stream import LOGPROB_BYTES, TOP_BYTES, Stream

BYTES_PER_TOKEN = 36
"""A token id in a tuple: a pointer and an integer object."""
BYTES_PER_REQUEST = 2048
"""Everything else that a queued request holds."""
BYTES_PER_BIAS = 112
"""A token id with its bias: a pair of two objects."""

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
        "preemptions",
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
        self.journal = Journal(request)
        self.arrived_s = arrived_s
        self.dispatched_s: float | None = None
        self.first_token_s: float | None = None
        self.replica_id: ReplicaId | None = None
        self.reserved_tokens = 0
        """Tokens that the reservation's blocks hold; beyond them it must grow."""
        self.losses = 0
        """Engines that this request was lost with."""
        self.preemptions = 0
        """Times that an engine took its slot or the blocks that it had kept; never falls."""
        self._decisions = DecisionLog()

    def need(self, expected_output_tokens: int) -> Need:
        """What it asks of a replica now. It will make what it has stated, or where it stated nothing, or has made that
        already, `expected_output_tokens` more: no fewer for what has come already."""
        prompt, output_max = len(self.request.prompt_ids), self.request.sampling.max_tokens
        made, stated = self.journal.next_index, self.request.stated_output_tokens or 0
        output = min(output_max, stated if stated > made else made + expected_output_tokens)
        return Need(self.request.priority, prompt + output, prompt + output_max)

    def to_send(self) -> Request:
        """The request as its next attempt is told it: with what has come so far, which is not asked for again."""
        journal, request = self.journal, self.request
        if not journal.next_index and (journal.awaits_prompt or request.sampling.prompt_logprobs is None):
            return request
        sampling = request.sampling
        if not journal.awaits_prompt and sampling.prompt_logprobs is not None:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        return msgspec.structs.replace(request, emitted_ids=journal.emitted_ids, sampling=sampling)

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

    def count_end(self, metrics: RouterMetrics, ending: Ending, now_s: float) -> None:
        """Say to the metrics how it ended and how it went."""
        name, tokens, stated = self.priority_class.name, ending.completion_tokens, self.request.stated_output_tokens
        metrics.ended(name, ending.outcome, self.preemptions)
        if ending.outcome is not Outcome.FINISHED:
            return
        decode_s = now_s - self.first_token_s if self.first_token_s is not None else 0.0
        tpot_s = decode_s / (tokens - 1) if tokens > 1 else None
        metrics.finished(name, now_s - self.arrived_s, tpot_s)
        if stated is not None:
            metrics.stated(name, tokens / stated)

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
            preemptions=self.preemptions,
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
    preemptions: int = 0
    queue_wait_ms: int | None = None
    ttft_ms: int | None = None
    e2e_ms: int | None
    error: str = ""
    decisions: tuple[Decision, ...]
    decisions_left_out: int = 0


def size_bytes(request: Request, emitted_tokens: int = 0) -> int:
    """What a request is charged while it is queued; with the logprobs of its prompt that it will hold later, which no
    other bound knows."""
    sampling, prompt = request.sampling, len(request.prompt_ids)
    size = BYTES_PER_REQUEST + BYTES_PER_TOKEN * (prompt + emitted_tokens)
    size += sum(len(s) for s in sampling.stop) * 4 + BYTES_PER_BIAS * len(sampling.logit_bias)
    if sampling.prompt_logprobs is not None:
        size += prompt * (LOGPROB_BYTES + TOP_BYTES * sampling.prompt_logprobs)
    return size
