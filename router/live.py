"""One request from its admission to its end, as the core keeps it.

Owns: the parts of a live request, what it asks of a replica and of the queue, and the one line that is logged when it
ends. Imports no transport and no web. Invariant: a live request is open on one replica, or else (`replica_id` is None)
queued or set aside.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from cluster.config import PriorityClass, RouterConfig
from cluster.tally import Tally
from cluster.types import Outcome, ReplicaId, Request
from router.affinity import keys_of
from router.explain import Explanation
from router.fairness import TenantBand
from router.journal import Decision, DecisionLog, Journal
from router.metrics_sink import RouterMetrics
from router.outcomes import Ending
from router.prefixes import Chain
from router.queue import Waiting
from router.recent import Note
from router.routing import Need
from router.slo import without_token
from router.stream import LOGPROB_BYTES, TOP_BYTES, Stream
from router.suspects import Suspicion, Trial
from router.terms import Terms

BYTES_PER_TOKEN = 36
"""A token id in a tuple: a pointer and an integer object."""
BYTES_PER_REQUEST = 2048
"""Everything else that a queued request holds."""
BYTES_PER_BIAS = 112
"""A token id with its bias: a pair of two objects."""

_log = logging.getLogger("forebay.requests")


class Account(NamedTuple):
    """Where a request's tokens are counted."""

    priority_class: str
    band: TenantBand
    tenant: str


class Live:
    """State of one request that has been submitted and has not ended. All times are of the router's monotonic clock."""

    __slots__ = (
        "_decisions",
        "_note",
        "_size_bytes",
        "account",
        "affinity_keys",
        "arrived_s",
        "band",
        "cached_tokens",
        "chain",
        "continued",
        "dispatched_s",
        "drained",
        "erred_on",
        "first_token_s",
        "gaps",
        "journal",
        "losses",
        "output_weight",
        "preemptions",
        "priority_class",
        "prompt_charge",
        "prompt_charged",
        "prompt_steps",
        "queued_s",
        "rank",
        "replica_id",
        "request",
        "reserved_tokens",
        "sent_s",
        "spared",
        "steady_below",
        "stream",
        "suspicion",
        "terms",
        "token_s",
    )

    def __init__(
        self,
        request: Request,
        priority_class: PriorityClass,
        stream: Stream,
        arrived_s: float,
        config: RouterConfig,
        terms: Terms,
        rank: float,
        band: TenantBand,
        gaps: Tally,
        note: Note | None = None,
    ) -> None:
        """`rank`: where it stands among its tenant's own in its `band`. `gaps` counts the seconds between its tokens. `note`
        is told of each decision about it."""
        self.request = request
        self.priority_class = priority_class
        self.stream = stream
        self.band = band
        self.account = Account(priority_class.name, band, request.tenant)
        self.terms = terms
        self.rank = rank
        self.journal = Journal(request)
        self.arrived_s = arrived_s
        self.dispatched_s: float | None = None
        self.sent_s: float | None = None
        """When the attempt that is open was sent out, or the last one that was."""
        self.prompt_steps = 0.0
        """Steps that the prompts ahead of it and its own filled there then; 0 where that is not known."""
        self.queued_s = arrived_s
        """When it began to wait, for its first token or since it went on last."""
        self.first_token_s: float | None = None
        self.token_s = math.nan
        """When its last token came."""
        self.gaps = gaps
        self.prompt_charge = config.prompt_token_weight * len(request.prompt_ids)
        """From the first token on, of what was computed of it."""
        self.cached_tokens = 0
        """Of the prompt, not computed by the attempt that gave the first token."""
        self.output_weight = config.output_token_weight
        self.prompt_charged = False
        """Its tenant has been charged for the prompt; until the first token that may be taken back."""
        self.drained = 0
        """Service that its last dispatch was counted as, where it had waited for it."""
        self.continued = False
        """An attempt that could have given tokens was lost: it goes on before new work of its band."""
        self.affinity_keys = keys_of(request, terms.session) if config.affinity_weight else ()
        self.chain: Chain | None = None
        """The hashes of its prompt's blocks, once replicas tell what they hold."""
        self.replica_id: ReplicaId | None = None
        self.reserved_tokens = 0
        """Tokens that the reservation's blocks hold; beyond them it must grow."""
        self.steady_below = 0
        """Output tokens below which the next one changes nothing but counts: it runs, has had a token of its open attempt,
        misses none, and its reservation holds them."""
        self.losses = 0
        """Engines that this request was lost with, or that fell silent under it."""
        self.erred_on: tuple[ReplicaId, ...] = ()
        """Where attempts of it have ended with an error of the engine, one entry for each."""
        self.suspicion: Suspicion | None = None
        """It may have killed an engine."""
        self.spared = False
        """It was paused when its engine died, and no suspect for that; it is spared once."""
        self.preemptions = 0
        """Times that an engine took its slot or the blocks that it had kept; never falls."""
        self._size_bytes = size_bytes(request)
        self._decisions = DecisionLog()
        self._note = note

    def is_open(self, replica_id: ReplicaId, attempt: int) -> bool:
        """Whether this attempt is the one that counts, and this replica has it."""
        return self.replica_id == replica_id and self.journal.attempt == attempt

    def need(self, expected_output_tokens: int) -> Need:
        """What it asks of a replica now. It will make what it has stated, or where it stated nothing, or has made that
        already, `expected_output_tokens` more: no fewer for what has come already."""
        prompt, output_max = len(self.request.prompt_ids), self.request.sampling.max_tokens
        return Need(
            self.request.priority,
            prompt + self._output(expected_output_tokens),
            prompt + output_max,
            self.arrived_s,
            self.trial,
            prompt + self.journal.next_index,
        )

    @property
    def trial(self) -> Trial:
        """What else may be where it runs."""
        return Trial.NONE if self.suspicion is None else self.suspicion.trial

    def _output(self, expected_output_tokens: int) -> int:
        made, stated = self.journal.next_index, self.request.stated_output_tokens or 0
        return min(self.request.sampling.max_tokens, stated if stated > made else made + expected_output_tokens)

    def to_send(self) -> Request:
        """The request as its next attempt is told it: with what has come so far, which is not asked for again."""
        journal, request = self.journal, self.request
        if not journal.next_index and (journal.awaits_prompt or request.sampling.prompt_logprobs is None):
            return request
        sampling = request.sampling
        if not journal.awaits_prompt and sampling.prompt_logprobs is not None:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        return msgspec.structs.replace(request, emitted_ids=journal.emitted_ids, sampling=sampling)

    def service(self, expected_output_tokens: int) -> int:
        """What serving it from here on is expected to take, by what `need` expects."""
        to_come = max(0, self._output(expected_output_tokens) - self.journal.next_index)
        return round((0.0 if self.prompt_charged else self.prompt_charge) + self.output_weight * to_come)

    @property
    def served(self) -> float:
        """Service that it has had."""
        prompt = self.prompt_charge if self.prompt_charged else 0.0
        return prompt + self.output_weight * self.journal.next_index

    @property
    def size_bytes(self) -> int:
        """What it is charged now, with what it has emitted."""
        return self._size_bytes + BYTES_PER_TOKEN * self.journal.next_index

    def waiting(self, expected_output_tokens: int) -> Waiting:
        """Its key in the queue, the same place at every return; what it is charged follows what it has emitted."""
        return Waiting(
            request_id=self.request.request_id,
            priority=self.request.priority,
            priority_class=self.priority_class.name,
            arrived_unix_s=self.request.arrived_unix_s,
            size_bytes=self.size_bytes,
            tenant=self.request.tenant,
            rank=self.rank,
            continued=self.continued,
            service=self.service(expected_output_tokens),
            since_s=self.queued_s,
        )

    def deadlines_s(self, now_s: float, max_queue_s: float) -> tuple[float, float]:
        """When it must have left the queue, beginning to wait now, and when it must have ended."""
        terms = self.terms
        start_by_s = now_s + (self.priority_class.longest_wait_s or max_queue_s)
        if self.first_token_s is None and terms.ttft_slo_s is not None:
            start_by_s = min(start_by_s, self.arrived_s + terms.ttft_slo_s)
        return start_by_s, math.inf if terms.timeout_s is None else self.arrived_s + terms.timeout_s

    def decided(
        self,
        now_s: float,
        event: str,
        figures: Mapping[str, float] | None = None,
        *,
        replica: str = "",
        why: str = "",
        **numbers: float,
    ) -> None:
        at_ms = round((now_s - self.arrived_s) * 1000)
        if figures:
            numbers = {**figures, **numbers}
        decision = Decision(at_ms, event, replica, why, numbers)
        self._decisions.add(decision)
        if self._note is not None:
            self._note(self.request, decision, now_s)

    @property
    def last_event(self) -> str:
        """What was decided last."""
        return self._decisions.decisions[-1].event

    def count_end(self, metrics: RouterMetrics, ending: Ending, now_s: float) -> None:
        """Say to the metrics how it ended and how it went."""
        name, tokens, stated = self.priority_class.name, ending.completion_tokens, self.request.stated_output_tokens
        metrics.ended(name, ending.outcome, self.preemptions)
        slo_s = self.priority_class.first_token_slo_s
        if self.first_token_s is None and slo_s is not None and self.request.sampling.max_tokens > 0:
            attained = without_token(ending.outcome, now_s - self.arrived_s, slo_s)
            if attained is not None:
                metrics.promised(name, attained=attained)
        if ending.outcome is not Outcome.FINISHED:
            return
        decode_s = now_s - self.first_token_s if self.first_token_s is not None else 0.0
        tpot_s = decode_s / (tokens - 1) if tokens > 1 else None
        metrics.finished(name, now_s - self.arrived_s, tpot_s)
        if stated is not None:
            metrics.stated(name, tokens / stated)

    def explain(self, now_s: float, ending: Ending | None = None) -> Explanation:
        """What was decided about it until now, or until the end that it came to."""
        ended, running = ending is not None, self.replica_id is not None
        return Explanation(
            request_id=self.request.request_id,
            tenant=self.request.tenant,
            priority_class=self.priority_class.name,
            priority=self.request.priority,
            state="ended" if ended else "running" if running else "queued",
            outcome=None if ending is None else ending.outcome,
            finish=None if ending is None else ending.finish,
            prompt_tokens=len(self.request.prompt_ids),
            cached_tokens=self.cached_tokens if self.first_token_s is not None else None,
            output_tokens=self.journal.next_index,
            attempts=self.journal.attempts,
            preemptions=self.preemptions,
            replica=self.replica_id or "",
            age_ms=round((now_s - self.arrived_s) * 1000),
            queue_wait_ms=self._since_arrival_ms(self.dispatched_s),
            ttft_ms=self._since_arrival_ms(self.first_token_s),
            error=ending.error if ending is not None else "",
            decisions=self._decisions.decisions,
            decisions_left_out=self._decisions.left_out,
        )

    def _since_arrival_ms(self, at_s: float | None) -> int | None:
        return None if at_s is None else round((at_s - self.arrived_s) * 1000)


def log_end(explanation: bytes, level: int) -> None:
    """Write the request's one line: what became of it and what was decided on the way, never what it said.

    Args:
        explanation: As `explain.encode` makes it.
    """
    if _log.isEnabledFor(level):
        line = '{"event":"request_ended",' + explanation[1:].decode()
        # Made here: `_log.log` would walk the stack for a place in the code that no format of ours shows.
        _log.handle(logging.LogRecord(_log.name, level, "", 0, line, None, None))


def size_bytes(request: Request) -> int:
    """What a request is charged while it is queued, before its first token; with the logprobs of its prompt that it will hold
    later, which no other bound knows."""
    sampling, prompt = request.sampling, len(request.prompt_ids)
    size = BYTES_PER_REQUEST + BYTES_PER_TOKEN * prompt
    size += sum(len(s) for s in sampling.stop) * 4 + BYTES_PER_BIAS * len(sampling.logit_bias)
    if sampling.prompt_logprobs is not None:
        size += prompt * (LOGPROB_BYTES + TOP_BYTES * sampling.prompt_logprobs)
    return size
