"""The values that pass between router, replica and controller.

Owns: their fields, units and meaning. Imports nothing of ours. Invariant: every value is frozen, and every one that
crosses a socket encodes with msgspec alone, so that no pickle is ever needed.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NewType

import msgspec

RequestId = NewType("RequestId", str)
ReplicaId = NewType("ReplicaId", str)
RouterId = NewType("RouterId", str)


class Value(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """Base of every value here: frozen, built by keyword, an array on the wire, unknown fields refused."""


class Generation(msgspec.Struct, frozen=True, order=True, array_like=True):
    """One incarnation of a replica or a controller; the later one has the higher number."""

    number: int
    uuid: str


class Sampling(Value, frozen=True):
    """How the tokens of one request are drawn, and when it ends.

    A token is drawn by inverting one uniform number, a hash of (seed, choice, token index), over the filtered
    distribution in token-id order; `temperature == 0` takes the most likely token and draws nothing.
    """

    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """Number of candidates kept; 0 keeps all."""
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


class Request(Value, frozen=True):
    """One request as the engine sees it. `prompt_ids` is never empty.

    `emitted_ids` are output tokens that the client already has from an earlier attempt: they count as output, not as
    prompt (for `max_tokens`, the token index of sampling and the text stage), and are not emitted again.
    """

    request_id: RequestId
    tenant: str
    priority: int
    """Higher is more urgent; negative is the first to be preempted."""
    priority_class: str
    arrived_unix_s: float
    """When the router accepted it: the order within a priority, on every node."""
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    emitted_ids: tuple[int, ...] = ()


class FinishReason(StrEnum):
    """Why an attempt ended on the engine."""

    STOP = "stop"
    """End-of-sequence token or stop string."""
    LENGTH = "length"
    ABORT = "abort"
    """Ended on the router's order."""
    ERROR = "error"
    """The engine could not go on with this request alone."""


class TokenDelta(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive tokens of one choice of one attempt.

    `pieces[k]` is the text that became certain with `token_ids[k]` (it may be empty: half a character, or text that
    may still become a stop string, is held back). The concatenation of all pieces of a choice is its whole text.
    `index` counts output tokens from 0 and includes `emitted_ids` of earlier attempts.
    """

    request_id: RequestId
    choice: int
    attempt: int
    index: int
    token_ids: tuple[int, ...]
    pieces: tuple[str, ...]
    finish: FinishReason | None = None
    error: str = ""
    """Set when `finish` is ERROR: what happened, fit for the client."""


class RefusalReason(StrEnum):
    """Why a replica did not take or does not have an attempt. The request keeps its place and goes elsewhere."""

    FULL = "full"
    """Its bound on held requests is reached."""
    DRAINING = "draining"
    UNKNOWN_ATTEMPT = "unknown_attempt"
    """Asked to resend an attempt that it does not have."""
    OVERFLOW = "overflow"
    """The router read too slowly and the replica gave this stream up."""


class Refusal(msgspec.Struct, frozen=True, array_like=True):
    request_id: RequestId
    attempt: int
    reason: RefusalReason


class Preempted(msgspec.Struct, frozen=True, array_like=True):
    """An engine took `request_id` out of its running batch; it keeps its place and will be recomputed."""

    request_id: RequestId
    attempt: int
    for_request_id: RequestId | None
    """The more urgent request that needed its place; None when the KV pool ran out."""
    blocks_freed: int
    tokens_to_recompute: int


class PriorityLoad(msgspec.Struct, frozen=True, array_like=True):
    """Work of one priority on one replica."""

    priority: int
    requests: int
    blocks: int


class EngineLoad(Value, frozen=True):
    """What one engine holds right now. Counters only ever rise within a generation."""

    slots_total: int
    """Requests that can run at once."""
    blocks_total: int
    blocks_free: int
    block_size_tokens: int
    running: tuple[PriorityLoad, ...] = ()
    waiting: tuple[PriorityLoad, ...] = ()
    """Accepted and not running: new, or preempted."""
    adds_total: int = 0
    """Requests that the engine took or refused so far: which of those sent to it `load` already counts."""
    steps_total: int = 0
    tokens_total: int = 0
    preemptions_total: int = 0
    urgent_blocked_total: int = 0
    """Times an urgent request had to wait because no victim could be preempted again."""


class ReplicaState(StrEnum):
    READY = "ready"
    DRAINING = "draining"


class ReplicaReport(Value, frozen=True):
    """A replica's true state, sent with every frame and every 100 ms from outside the engine's thread."""

    replica_id: ReplicaId
    generation: Generation
    state: ReplicaState
    observed_unix_s: float
    load: EngineLoad
    step_age_s: float | None
    """Age of the step that runs now; None between steps and when idle."""
    applied_sequence: int = 0
    """Highest `Add.sequence` of the receiving router that `load` already counts."""


class Outcome(StrEnum):
    """How a request ended: exactly one per request. `router/outcomes.py` maps it to status, metric label and log level."""

    FINISHED = "finished"
    CANCELLED = "cancelled"
    """The client went away."""
    REJECTED_QUEUE_FULL = "rejected_queue_full"
    REJECTED_NO_REPLICA = "rejected_no_replica"
    REJECTED_DRAINING = "rejected_draining"
    REJECTED_TOO_LARGE = "rejected_too_large"
    """No replica could ever hold it."""
    EXPIRED_IN_QUEUE = "expired_in_queue"
    REPLICA_LOST = "replica_lost"
    ENGINE_ERROR = "engine_error"
    SLOW_CLIENT = "slow_client"
