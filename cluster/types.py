"""The values that pass between router, replica and controller.

Owns: their fields, units and meaning. Imports nothing of ours. Invariant: every value is frozen, and every one that
crosses a socket encodes with msgspec alone, so that no pickle is ever needed.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, NewType

import msgspec

RequestId = NewType("RequestId", str)
ReplicaId = NewType("ReplicaId", str)
RouterId = NewType("RouterId", str)

_LARGEST = 2**53
Count = Annotated[int, msgspec.Meta(ge=0, le=_LARGEST)]
"""As processes tell each other: what is decoded is neither negative nor so large that sums of it could not be sent."""
Finite = Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)]
"""So not NaN either."""
Counter = Annotated[float, msgspec.Meta(le=1e300)]
"""Of a tenant, see router/fairness.py; minus infinity for what goes before all new work."""
Priority = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""Never summed: whatever an engine is given, its load can say."""


class Value(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """Base of every value here: frozen, built by keyword, an array on the wire, unknown fields refused."""


class Generation(msgspec.Struct, frozen=True, order=True, array_like=True, gc=False):
    """One incarnation of a replica or a controller; the later one has the higher number."""

    number: Count
    uuid: str


class Sampling(Value, frozen=True):
    """How the tokens of one request are drawn, and when it ends.

    A token is drawn by inverting one uniform number, a hash of (seed, choice, token index), over the filtered
    distribution in token-id order; `temperature == 0` takes the most likely token and draws nothing.
    """

    max_tokens: int
    """0 only where the prompt is to be scored and nothing generated."""
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """Number of candidates kept; 0 keeps all."""
    min_p: float = 0.0
    """Candidates less likely than this times the likeliest are dropped; 0 drops none."""
    presence_penalty: float = 0.0
    """Taken off the logit of each token that is in the output so far."""
    frequency_penalty: float = 0.0
    """Taken off as often as the token is in the output so far."""
    repetition_penalty: float = 1.0
    """Positive logits of tokens in the prompt or the output are divided by it, negative ones multiplied."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit)."""
    min_tokens: int = 0
    """Output tokens before which the end token is not drawn and no stop string is completed."""
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """How many of the likeliest tokens to report beside each drawn one; None reports nothing."""
    prompt_logprobs: int | None = None
    """The same for each token of the prompt but the first."""


class Request(Value, frozen=True):
    """One request as the engine sees it: one choice, of which a client's `n` makes as many requests.

    `prompt_ids` is never empty.

    `emitted_ids` are output tokens that the client already has from an earlier attempt: they count as output, not as
    prompt (for `max_tokens`, the token index of sampling and the text stage), and are not emitted again.
    """

    request_id: RequestId
    tenant: str
    priority: Priority
    """Higher is more urgent; negative is the first to be preempted."""
    priority_class: str
    arrived_unix_s: Finite
    """When the router accepted it: the order within a priority, on every node."""
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    emitted_ids: tuple[int, ...] = ()
    choice: int = 0
    """Its number among the choices of one client request: it draws other chances than its siblings."""
    group_id: str = ""
    """The same for all choices of one client request, which share their prompt; empty for one that is alone."""
    stated_output_tokens: int | None = None
    """The output length that the client expects; it is used to order work and held against what came."""


class FinishReason(StrEnum):
    """Why an attempt ended on the engine."""

    STOP = "stop"
    """End-of-sequence token or stop string."""
    LENGTH = "length"
    ABORT = "abort"
    """Ended on the router's order."""
    ERROR = "error"
    """The engine could not go on with this request alone."""


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Natural logarithms of probabilities, of the model's own distribution: before bias, penalties, temperature and
    filters."""

    logprob: float
    """Of the token itself."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob) of the likeliest tokens, likeliest first, of equals the lowest id first."""


class TokenDelta(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive tokens of one attempt.

    `pieces[k]` is the text that became certain with `token_ids[k]` (it may be empty: half a character, or text that
    may still become a stop string, is held back). The concatenation of all pieces is the whole text.
    `index` counts output tokens from 0 and includes `emitted_ids` of earlier attempts.
    """

    request_id: RequestId
    attempt: Count
    index: Count
    token_ids: tuple[int, ...]
    pieces: tuple[str, ...]
    finish: FinishReason | None = None
    error: str = ""
    """Set when `finish` is ERROR: what happened, fit for the client."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One per token where the request asked for them."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """Where asked for, with the attempt's first delta that says anything: one per prompt token but the first."""
    cached_tokens: Count = 0
    """With the first delta of a request that has had no token before: tokens of its prompt that were found in the prefix
    cache, or shared by a sibling, when the attempt was first let in, instead of being computed."""


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
    attempt: Count
    reason: RefusalReason


class PreemptionMeans(StrEnum):
    """What becomes of a preempted request's keys and values, cheapest first."""

    PAUSE = "pause"
    """They stay in their blocks; only the slot is given up."""
    SWAP = "swap"
    """They are copied to host memory and back."""
    RECOMPUTE = "recompute"
    """They are dropped and computed again (but for what the prefix cache still has by then)."""


class Preempted(msgspec.Struct, frozen=True, array_like=True):
    """An engine took `request_id` out of its running batch, or took the blocks that it had kept; it keeps its place."""

    request_id: RequestId
    attempt: Count
    for_request_id: RequestId | None
    """The more urgent request that needed its place; None when the KV pool ran out."""
    blocks_freed: Count
    tokens_to_recompute: Count
    means: PreemptionMeans = PreemptionMeans.RECOMPUTE


class PriorityLoad(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Work of one priority on one replica."""

    priority: Priority
    requests: Count
    blocks: Count
    """KV blocks that it holds; of waiting work, those that paused requests keep, which more urgent work can take."""
    prompt_tokens: Count = 0
    """Tokens of prompts, and of work that is computed again, that are still to be run before each draws its next token."""


TOLD_BYTES = 8
"""Of a block's hash, in a PrefixChange."""


class PrefixChange(msgspec.Struct, frozen=True, array_like=True):
    """What has come into an engine's prefix cache, and what has left it, since the last one.

    Both are blocks that hold a prefix, each by the first 8 bytes of its hash (cluster/engine/prefix.py), one after the
    other; the last word on a block counts. Two blocks that agree in these 8 bytes are taken for one: a wrong guess of
    where a prompt is best sent, once in 2**64 pairs, and never a wrong answer, since engines go by the whole hash.
    """

    held: bytes = b""
    gone: bytes = b""
    """Some may never have been told as held."""
    afresh: bool = False
    """Nothing that was told before counts any more."""

    def __post_init__(self) -> None:
        if len(self.held) % TOLD_BYTES or len(self.gone) % TOLD_BYTES:
            raise ValueError(f"held and gone are {TOLD_BYTES} bytes a block, not {len(self.held)} and {len(self.gone)}")


class EngineLoad(Value, frozen=True, gc=False):
    """What one engine holds right now. Counters only ever rise within a generation."""

    slots_total: Count
    """Requests that can run at once."""
    blocks_total: Count
    blocks_free: Count
    """Held by nobody; those with reusable prefixes in them included."""
    block_size_tokens: Annotated[int, msgspec.Meta(ge=1)]
    running: tuple[PriorityLoad, ...] = ()
    waiting: tuple[PriorityLoad, ...] = ()
    """Accepted and not running: new, or preempted."""
    adds_total: Count = 0
    """Requests that the engine took or refused so far: which of those sent to it `load` already counts."""
    steps_total: Count = 0
    tokens_total: Count = 0
    preemptions_total: Count = 0
    urgent_blocked_total: Count = 0
    """Times an urgent request had to wait because no victim could be preempted again."""
    blocks_cached: Count = 0
    """Free blocks that still hold a prefix."""
    host_blocks_free: Count = 0
    """Room for swapped-out blocks in host memory."""
    prefix_hit_tokens_total: Count = 0
    """Tokens whose keys and values came from the prefix cache or a sibling instead of being computed."""
    prefill_tokens_total: Count = 0
    """Tokens of prompts, and of work that is computed again, that were run."""
    padding_tokens_total: Count = 0
    """Tokens that a padding batching mode ran for nothing."""
    step_tokens: Count = 0
    """Tokens that one step runs at most; 0: not told."""


class EngineState(Value, frozen=True):
    """A live request as it leaves one engine for another; its KV blocks may travel beside it."""

    request: Request
    """With all that it has emitted in `emitted_ids`."""
    computed_tokens: int
    """Positions 0 … computed_tokens - 1 are in the blocks that travel beside it."""
    kv_format: str
    """The source's: how these blocks are written, or by what `kv_handle` can be read."""
    kv_handle: bytes = b""
    """What the source's KV connector tells the target's; opaque to everybody else, and empty where there is none."""


class ReplicaState(StrEnum):
    READY = "ready"
    DRAINING = "draining"


class DrainedBy(StrEnum):
    """Who has a replica drain; it drains as long as any of them does."""

    OPERATOR = "operator"
    SCALE = "scale"
    """So that it can leave: fewer are needed."""
    NODE = "node"
    """Its Kubernetes node is about to go."""


class PodRef(msgspec.Struct, frozen=True, array_like=True):
    """A pod, in its release's namespace."""

    name: str
    uid: str = ""


class SharedWork(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request that a router sent out of its class's minimum share, past more urgent work that waited (router/share.py)."""

    priority: Priority
    age_s: Finite
    """Since it came here."""


class ReplicaReport(Value, frozen=True, gc=False):
    """A replica's true state, sent with every frame and every 100 ms from outside the engine's thread."""

    replica_id: ReplicaId
    generation: Generation
    state: ReplicaState
    observed_unix_s: Finite
    load: EngineLoad
    step_age_s: Finite | None
    """Age of the step that runs now; None between steps and when idle."""
    applied_sequence: Count = 0
    """Highest `Add.sequence` of the receiving router that `load` already counts."""
    shared: tuple[SharedWork, ...] = ()
    """Of the other routers, what is here and not preempted."""
    trial: Annotated[int, msgspec.Meta(ge=0, le=2)] = 0
    """Of the other routers' suspects here, the strictest `router.suspects.Trial`."""
    others: bool = False
    """Other routers are linked, or have been a moment ago: what they have just sent, `load` may not count yet."""
    alone: Count = 0
    """`Add.sequence` of the receiving router's suspect that has the replica to itself; 0: none has. Told before its first
    step: who only asked for it may never have run."""


class Outcome(StrEnum):
    """How a request ended: exactly one per request. `router/outcomes.py` maps it to status, metric label and log level."""

    FINISHED = "finished"
    CANCELLED = "cancelled"
    """The client went away."""
    REJECTED_QUEUE_FULL = "rejected_queue_full"
    REJECTED_WAIT = "rejected_wait"
    """Its class could not serve it within the longest wait that is stated for it."""
    REJECTED_DEADLINE = "rejected_deadline"
    """It could not be served within the times that it came with."""
    REJECTED_NO_REPLICA = "rejected_no_replica"
    REJECTED_DRAINING = "rejected_draining"
    REJECTED_TOO_LARGE = "rejected_too_large"
    """No replica could ever hold it."""
    EXPIRED_IN_QUEUE = "expired_in_queue"
    TIMED_OUT = "timed_out"
    """Its own time limit passed while it ran."""
    REPLICA_LOST = "replica_lost"
    QUARANTINED = "quarantined"
    """Engines that ran it died again and again, the last one of this request alone."""
    ENGINE_ERROR = "engine_error"
    SLOW_CLIENT = "slow_client"
    SHUT_DOWN = "shut_down"
    """Its router's grace time was over while it ran."""
