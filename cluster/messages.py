"""What is said on Forebay's TCP connections, frame by frame.

Owns: every message between router, replica and controller, and the protocol's version. The transport encodes each as
msgpack, length-prefixed. A link begins with Challenge (from the accepting side), Hello (from the connecting side) and
Welcome or Rejected; nothing else is decoded before.
"""

from __future__ import annotations

import msgspec

from cluster.types import (
    Generation,
    Preempted,
    Refusal,
    ReplicaId,
    ReplicaReport,
    Request,
    RequestId,
    RouterId,
    TokenDelta,
)

PROTOCOL_NEWEST = 3
PROTOCOL_OLDEST = 3
"""The oldest version that this code still speaks."""


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all messages; the class name is the tag."""


# --- the handshake, on every connection ---


class Challenge(Message, frozen=True):
    version_oldest: int
    version_newest: int
    nonce: bytes


class Hello(Message, frozen=True):
    """The connecting side proves that it knows the secret and says what it is.

    `proof` is HMAC-SHA256 over the role, both nonces and the sender's id; see deployments/transport.py.
    """

    version_oldest: int
    version_newest: int
    role: str
    sender_id: str
    nonce: bytes
    proof: bytes
    model_hash: str
    """Model and tokenizer identity; empty where it does not matter (controller links)."""
    generation: Generation | None = None
    controller_generation_seen: Generation | None = None
    """The latest controller that the sender has met; a new controller takes a higher number."""


class Welcome(Message, frozen=True):
    version: int
    sender_id: str
    generation: Generation
    proof: bytes
    max_frame_bytes: int


class Rejected(Message, frozen=True):
    reason: str


# --- router -> replica ---


class Add(Message, frozen=True):
    request: Request
    attempt: int
    sequence: int
    """Rises with each Add of this router, across its links."""


class Abort(Message, frozen=True):
    request_id: RequestId
    attempt: int


class ResendFrom(Message, frozen=True):
    """Send the tokens of this attempt again from `index` on. Answered by a delta or an UNKNOWN_ATTEMPT refusal."""

    request_id: RequestId
    attempt: int
    index: int


class Goodbye(Message, frozen=True):
    """The router leaves for good: end its work now instead of keeping it for a reconnect."""


# --- replica -> router ---


class StepFrame(Message, frozen=True):
    """All that a step produced for one router; with no deltas it is the report of every 100 ms."""

    report: ReplicaReport
    deltas: tuple[TokenDelta, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    preempted: tuple[Preempted, ...] = ()


# --- the roster ---


class RosterEntry(msgspec.Struct, frozen=True, array_like=True):
    replica_id: ReplicaId
    generation: Generation
    host: str
    port: int
    model: str


# --- replica or router -> controller ---


class ReplicaHere(Message, frozen=True):
    """A replica says where routers reach it; sent on every new link, once it has its generation."""

    entry: RosterEntry
    pid: int


class ReplicaStatus(Message, frozen=True):
    report: ReplicaReport


class BandStatus(msgspec.Struct, frozen=True, array_like=True):
    priority: int
    priority_class: str
    queued_requests: int
    queued_bytes: int
    running_requests: int


class RouterStatus(Message, frozen=True):
    router_id: RouterId
    observed_unix_s: float
    url: str
    pid: int
    bands: tuple[BandStatus, ...]


class StatusRequest(Message, frozen=True):
    """A router asks for the whole picture, to answer `forebay status`."""

    ask_id: int


# --- controller -> replica or router ---


class Granted(Message, frozen=True):
    """The generation of a replica that said hello without one."""

    generation: Generation


class Roster(Message, frozen=True):
    """The replicas that the controller knows. Absence closes no link; one that is named is tried again and again."""

    entries: tuple[RosterEntry, ...]


class ReplicaSummary(msgspec.Struct, frozen=True):
    entry: RosterEntry
    pid: int
    report: ReplicaReport | None
    report_age_s: float | None


class ClusterStatus(Message, frozen=True):
    ask_id: int
    controller_generation: Generation
    controller_pid: int
    uptime_s: float
    replicas: tuple[ReplicaSummary, ...]
    routers: tuple[RouterStatus, ...]


ToReplica = Add | Abort | ResendFrom | Goodbye
ToRouter = StepFrame
ToController = ReplicaHere | ReplicaStatus | RouterStatus | StatusRequest
FromController = Granted | Roster | ClusterStatus
Handshake = Challenge | Hello | Welcome | Rejected


def named(value: object) -> object:
    """Plain values of a message, with the names of its fields, for JSON that people and scripts read.

    (On the wire messages are arrays; `msgspec.to_builtins` would give those.)
    """
    if isinstance(value, msgspec.Struct):
        return {field: named(getattr(value, field)) for field in value.__struct_fields__}
    if isinstance(value, tuple):
        return [named(item) for item in value]
    return value
