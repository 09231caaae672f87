"""The clients of a simulated cluster: what they send, and what they see of the answer.

Owns: requests and their records. Imports the router's streams. Invariant: each record gets one outcome, once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from cluster.config import RouterConfig
from cluster.types import ReplicaId, Request, RequestId, Sampling
from ops.sim.backend import FILLER_TOKEN
from ops.sim.events import VirtualLoop
from ops.sim.log import EventLog
from ops.sim.values import Arrival, RequestRecord
from router.outcomes import Ending
from router.stream import Buffer, Stream

LONGEST_OUTPUT = 2**31 - 2
"""As large as a token id may be: they number requests, too."""


class Clients:
    """`on_end` is told of each request that has ended, from within its router's core."""

    def __init__(
        self,
        config: RouterConfig,
        max_model_len: int,
        loop: VirtualLoop,
        log: EventLog,
        on_end: Callable[[RequestRecord], None],
        not_awaited: str | None = None,
    ) -> None:
        self.records: dict[RequestId, RequestRecord] = {}
        self.live: dict[RequestId, int] = {}
        """Those that have not ended, with their routers."""
        self.awaited = 0
        """Of these, those whose end is waited for: all but `not_awaited`'s."""
        self.violations: list[str] = []
        self._priorities = {c.name: c.priority for c in config.classes}
        self._max_stream_bytes = config.max_stream_bytes
        self._max_model_len = max_model_len
        self._loop = loop
        self._log = log
        self._on_end = on_end
        self._not_awaited = not_awaited

    def arrive(self, arrival: Arrival, router: int, *, reads: bool) -> tuple[Request, Stream]:
        """A request is on its way to a router.

        Raises:
            ValueError: its class is not configured, or its id is known already.
        """
        if arrival.priority_class not in self._priorities:
            raise ValueError(f"{arrival.request_id}: no priority class {arrival.priority_class!r}")
        if arrival.request_id in self.records:
            raise ValueError(f"{arrival.request_id}: two requests have this id")
        record = self.records[arrival.request_id] = RequestRecord(
            arrival.request_id,
            arrival.priority_class,
            self._loop.now_s,
            arrival.prompt_tokens,
            arrival.output_tokens,
            shared_tokens=len(arrival.prefix_ids),
        )
        self.live[arrival.request_id] = router
        self.awaited += record.priority_class != self._not_awaited
        self._log.say("arrived", arrival.request_id, router)
        own = arrival.prompt_tokens - len(arrival.prefix_ids) - 1
        number = (LONGEST_OUTPUT - len(self.records),) if own else ()  # no two prompts begin alike
        filler = (FILLER_TOKEN,) * (own - 1)
        # The last token of a prompt says how long the answer is: see ops/sim/backend.py.
        prompt_ids = arrival.prefix_ids + number + filler + (arrival.output_tokens,)
        room = self._max_model_len - arrival.prompt_tokens
        request = Request(
            request_id=arrival.request_id,
            tenant=arrival.tenant,
            priority=self._priorities[arrival.priority_class],
            priority_class=arrival.priority_class,
            arrived_unix_s=self._loop.now_s,
            prompt_ids=prompt_ids,
            sampling=Sampling(max_tokens=max(1, arrival.max_tokens or room), seed=0, temperature=0.0),
        )
        stream = Stream(Buffer(self._max_stream_bytes), partial(self._ended, record))
        if reads:
            stream.write = partial(self._reads, record)
        return request, stream

    def sent(self, replica_id: ReplicaId, request: Request, attempt: int) -> None:
        """Its router has chosen a replica for it."""
        self.records[request.request_id].replicas += (replica_id,)
        self._log.say("sent", request.request_id, attempt, replica_id)

    def granted(self, replica_id: ReplicaId, request_id: RequestId, attempt: int) -> None:
        """Its router goes on with it where it has moved."""
        self.records[request_id].replicas += (replica_id,)
        self._log.say("moved", request_id, attempt, replica_id)

    def _reads(self, record: RequestRecord, text: str) -> bool:
        """The client takes what comes."""
        del text
        if record.first_token_s is None:
            self._first(record)
        return True

    def _first(self, record: RequestRecord) -> None:
        record.first_token_s = self._loop.now_s
        self._log.say("first", record.request_id)

    def _ended(self, record: RequestRecord, ending: Ending) -> None:
        if record.outcome is not None:
            self.violations.append(f"{record.request_id} ended as {record.outcome} and as {ending.outcome}")
        if record.first_token_s is None and ending.completion_tokens:
            self._first(record)
        record.outcome, record.end_s = ending.outcome, self._loop.now_s
        record.tokens = ending.completion_tokens
        record.cached_tokens = min(ending.cached_tokens, record.shared_tokens)
        if self.live.pop(record.request_id, None) is not None:
            self.awaited -= record.priority_class != self._not_awaited
        self._log.say("ended", record.request_id, ending.outcome.value, ending.completion_tokens)
        self._on_end(record)
