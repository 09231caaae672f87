"""How much of each request has been done by now, whether it has ended or not.

Owns: that count. Imports the routers and the replicas, which it asks. Invariants: it changes nothing; a token counts once,
however often it was computed, on however many replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cluster.types import RequestId
from ops.sim.replica import Incarnation
from ops.sim.values import Done, RequestRecord
from router.core import RouterCore


def note_done(
    records: Mapping[RequestId, RequestRecord], cores: Iterable[RouterCore], incarnations: Iterable[Incarnation]
) -> None:
    """Note it in the records.

    What a router has journaled is done wherever it was, and what an engine has beyond that. What was computed of a prompt
    that had to be given up before its first token is not.
    """
    for record in records.values():
        prompt_tokens = record.prompt_tokens if record.tokens else record.cached_tokens
        record.done = Done(record.cached_tokens, prompt_tokens, record.tokens)
    for core in cores:
        for request_id, answered in core._live.items():
            if answered.journal.next_index:
                record = records[request_id]
                cached_tokens = min(answered.cached_tokens, record.shared_tokens)
                record.done = Done(cached_tokens, record.prompt_tokens, answered.journal.next_index)
    for one in incarnations:
        one.runner.catch_up()
        for live in one.engine._book.live.values():
            state, record = live.state, records[live.request.request_id]
            output_tokens = state.tokens - record.prompt_tokens
            if record.outcome is not None or record.done is None:
                continue
            if record.done.output_tokens:
                record.done = record.done._replace(output_tokens=max(record.done.output_tokens, output_tokens))
            else:
                cached_tokens = min(live.cached_tokens or 0, record.shared_tokens)
                prompt_tokens = record.prompt_tokens if output_tokens else max(cached_tokens, state.computed)
                record.done = max(record.done, Done(cached_tokens, prompt_tokens, output_tokens), key=_size)


def _size(done: Done) -> tuple[int, int]:
    return done.output_tokens, done.prompt_tokens - done.cached_tokens
