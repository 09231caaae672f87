"""What is said on Forebay's TCP connections, frame by frame.

Owns: every message between router, replica and controller, and the protocol's version. The transport encodes each as
msgpack, length-prefixed. A link begins with Challenge (from the accepting side), Hello (from the connecting side) and
Welcome or Rejected; nothing else is decoded before.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec

from cluster.types import (
    Count,
    Counter,
    DrainedBy,
    EngineState,
    Finite,
    Generation,
    PodRef,
    Preempted,
    PrefixChange,
    Priority,
    Refusal,
    ReplicaId,
    ReplicaReport,
    Request,
    RequestId,
    RouterId,
    TokenDelta,
)

PROTOCOL_NEWEST = 8
PROTOCOL_OLDEST = 8
"""The oldest version that this code still speaks."""


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all messages; the class name is the tag."""


# --- the roster ---


class RosterEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where routers, and replicas that move work there, reach a replica."""

    replica_id: ReplicaId
    generation: Generation
    host: str
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)]
    model: str
    zone: str = ""
    """What else fails together with it, beyond its host; empty where nobody has said."""
    node: str = ""
    """Its Kubernetes node; empty where nobody has said."""

    @property
    def machine(self) -> str:
        """What fails together with it: its node where that is known, for there each pod is a host of its own, else its
        host."""
        return self.node or self.host


# --- the handshake, on every connection ---


class Challenge(Message, frozen=True):
    version_oldest: Count
    version_newest: Count
    nonce: bytes


class Hello(Message, frozen=True):
    """The connecting side proves that it knows the secret and says what it is.

    `proof` is HMAC-SHA256 over the role, both nonces and the sender's id; see deployments/transport.py.
    """

    version_oldest: Count
    version_newest: Count
    role: str
    sender_id: str
    nonce: bytes
    proof: bytes
    model_hash: str
    """Model and tokenizer identity; empty where it does not matter (controller links)."""
    generation: Generation | None = None


class Welcome(Message, frozen=True):
    version: Count
    sender_id: str
    generation: Generation
    proof: bytes
    max_frame_bytes: Count


class Rejected(Message, frozen=True):
    reason: str


# --- router -> replica ---


class Add(Message, frozen=True):
    request: Request
    attempt: Count
    sequence: Count
    """Rises with each Add and Grant of this router, across its links."""
    shared: bool = False
    """A minimum share sends it out, past more urgent work that waits; the other routers are told."""
    trial: Annotated[int, msgspec.Meta(ge=0, le=2)] = 0
    """It may have killed an engine, and what else may be here meanwhile: a value of `router.suspects.Trial`."""
    trial_tokens: Count = 0
    """With so many output tokens the trial is over."""


class Abort(Message, frozen=True):
    request_id: RequestId
    attempt: Count


class ResendFrom(Message, frozen=True):
    """Send the tokens of this attempt again from `index` on. Answered by a delta or an UNKNOWN_ATTEMPT refusal."""

    request_id: RequestId
    attempt: Count
    index: Count


class Goodbye(Message, frozen=True):
    """The router leaves for good: end its work now instead of keeping it for a reconnect."""


class Move(Message, frozen=True):
    """To the source: send what this attempt holds to the target while it runs on, then freeze it. Answered by FROZEN or
    OFF, or by the attempt's end."""

    request_id: RequestId
    attempt: Count
    number: Count
    """Of the attempt that it is to be on the target."""
    target: RosterEntry


class CallOff(Message, frozen=True):
    """To the source: the attempt stays; frozen, it goes on as if nothing had been. Answered by OFF where it was moving."""

    request_id: RequestId
    attempt: Count


class Grant(Message, frozen=True):
    """To the target: the attempt that arrives there is the one that counts. Answered by TAKEN or OFF."""

    request_id: RequestId
    attempt: Count
    index: Count
    """Of its first token: as many had come when it was frozen."""
    sequence: Count
    """As that of an Add."""


class Release(Message, frozen=True):
    """To the source: the target has it, a frozen attempt is to be forgotten."""

    request_id: RequestId
    attempt: Count


# --- replica -> replica: what a move carries ---


class MoveBegin(Message, frozen=True):
    """Reserve a place for an attempt of a router's, and blocks for what comes with it. Answered."""

    request_id: RequestId
    attempt: Count
    router_id: RouterId
    kv_format: str
    blocks: Count


class MoveBlocks(Message, frozen=True):
    """Blocks `first`, `first` + 1, … as `cluster.ports.MovesPort.export_blocks` gives them. Answered."""

    request_id: RequestId
    attempt: Count
    first: Count
    data: memoryview


class MoveState(Message, frozen=True):
    """The last of a move: the request as it was frozen. Nothing of it is told before its router has granted it."""

    attempt: Count
    state: EngineState


class MoveAbort(Message, frozen=True):
    """Nothing more will come."""

    request_id: RequestId
    attempt: Count


class MoveAnswer(Message, frozen=True):
    """Of the target, to each MoveBegin and MoveBlocks in order."""

    request_id: RequestId
    attempt: Count
    refusal: str = ""
    """A value of `cluster.ports.ImportRefusal`, or DRAINING of RefusalReason; empty where it was taken."""


# --- replica -> router ---


class MoveStage(StrEnum):
    FROZEN = "frozen"
    """On the source: it has told `index` tokens, and all of it is with the target or on its way."""
    TAKEN = "taken"
    """On the target: it is here."""
    OFF = "off"
    """On the source: the attempt goes on there. On the target: it does not come."""


class MoveNotice(msgspec.Struct, frozen=True, array_like=True):
    """How a move stands. It follows the deltas of its frame."""

    request_id: RequestId
    attempt: Count
    """On the source the one that is moved, on the target the one that comes of it."""
    stage: MoveStage
    index: Count = 0
    why: str = ""


class StepFrame(Message, frozen=True):
    """All that a step produced for one router; with no deltas it is the report of every 100 ms."""

    report: ReplicaReport
    deltas: tuple[TokenDelta, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    preempted: tuple[Preempted, ...] = ()
    prefixes: PrefixChange | None = None
    """What is new of its prefix cache, as much of it as a frame may carry. `afresh` with the first of a link; before that,
    and from an engine without a prefix cache, nothing is known."""
    moves: tuple[MoveNotice, ...] = ()


# --- replica or router -> controller ---


class ReplicaHere(Message, frozen=True):
    """A replica says where routers reach it; sent on every new link, once it has its generation."""

    entry: RosterEntry
    pid: Count
    pod: PodRef | None = None


class Standing(StrEnum):
    """What an attempt does on its replica."""

    RUNS = "runs"
    PAUSED = "paused"
    """It waits, and has kept its blocks."""
    WAITS = "waits"
    """It waits and holds none: it is new here, or its blocks were taken."""


class HeldRequest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An attempt on a replica, as the controller weighs it."""

    request_id: RequestId
    attempt: Count
    router_id: RouterId
    """The one that owns it."""
    priority: Priority
    standing: Standing
    blocks: Count
    """KV blocks that would be free if it left: those that nobody else holds."""
    tokens: Count
    """Whose keys and values are in blocks here: what is moved with it, or computed again without it."""
    remaining_tokens: Count
    """Output that is still expected of it, one at least."""
    to_compute_tokens: Count
    """Of its prompt and its output so far, those whose keys and values are not here: all of them, where it holds none."""


class ReplicaStatus(Message, frozen=True):
    report: ReplicaReport
    held: tuple[HeldRequest, ...] | None = None
    """The most worth weighing of what is here, a bounded number; None from a replica on which nothing is worth it."""
    retiring: bool = False
    """It drains because it was told to retire, and leaves on a `Leave`."""
    by_operator: bool = False
    """It drains because somebody asked for that."""
    by_node: bool = False
    """It drains because its node is about to go."""

    @property
    def drained_by(self) -> tuple[DrainedBy, ...]:
        """Sorted."""
        told = (DrainedBy.NODE, self.by_node), (DrainedBy.OPERATOR, self.by_operator), (DrainedBy.SCALE, self.retiring)
        return tuple(by for by, drains in told if drains)


class BandStatus(msgspec.Struct, frozen=True, array_like=True):
    priority: Priority
    priority_class: str
    queued_requests: Count
    queued_bytes: Count
    running_requests: Count
    oldest_s: Finite | None = None
    """Age of the oldest that is queued; None where none is."""


class MoveStatus(msgspec.Struct, frozen=True, array_like=True):
    """A live move under way."""

    request_id: RequestId
    priority_class: str
    source: ReplicaId
    target: ReplicaId
    stage: str
    """A name of `router.moving.Stage` in small letters."""
    age_s: Finite
    """Since it was asked for."""
    why: str


class Unroutable(msgspec.Struct, frozen=True, array_like=True):
    """A replica that a router sends nothing new."""

    replica_id: ReplicaId
    why: str
    """A value of `router.view.Condition`."""


class ModelStatus(msgspec.Struct, frozen=True, array_like=True):
    """A model as a router sees it."""

    model: str
    ready: bool
    """Whether a replica takes its work."""
    bands: tuple[BandStatus, ...]
    unroutable: tuple[Unroutable, ...] = ()
    moves: tuple[MoveStatus, ...] = ()
    """The first of those under way, a bounded number."""


class RouterStatus(Message, frozen=True):
    router_id: RouterId
    observed_unix_s: Finite
    url: str
    pid: Count
    models: tuple[ModelStatus, ...]
    standbys: Count = 0
    """Controllers that it is linked to beside the one that leads."""


class Follows(Message, frozen=True):
    """Whom its sender follows, to each controller, first on every new link, whenever it changes, and again and again while
    nobody is heard."""

    generation: Generation | None
    """Of the latest controller that it has met; None before the first."""
    heard: bool
    """It is linked to that one, and has heard of it lately."""


class StatusRequest(Message, frozen=True):
    """A router asks for the whole picture, to answer `forebay status`."""

    ask_id: Count


class DrainAsk(Message, frozen=True):
    """A router passes on that work is to be kept from a replica, or from all of a host, until it is asked otherwise."""

    ask_id: Count
    name: str
    """A replica's id, or the host or the Kubernetes node of some."""
    drain: bool


class Unplaced(Message, frozen=True):
    """The first of a router's queue has no place: no replica has the room, whoever gives way there. Told with every demand
    while it lasts."""

    model: str
    request_id: RequestId
    priority: Priority
    blocks: Count
    """That it needs on one replica."""
    waits_s: Finite
    """Since it was found to have no place."""


# --- one order among routers ---


class Waiter(msgspec.Struct, frozen=True, array_like=True):
    """A request that waits on a router: its place in the order of its band, least first in (counter, rank, arrived)."""

    tenant: str
    counter: Counter
    """Of its tenant, see router/fairness.py. Minus infinity for what goes on after a loss: it goes before new work."""
    rank: Finite
    arrived_unix_s: Finite
    charge: Finite
    """What its tenant's counter grows by when it is sent out."""


class BandDemand(msgspec.Struct, frozen=True, array_like=True):
    """What one router has in one band."""

    priority: Priority
    waiting: Count
    """Requests; of a router that reaches no replica that takes work, 0."""
    sent: Count
    """Attempts sent out in all, since the router started."""
    level: Counter
    """The least counter among tenants with work waiting; where nobody waits, of the last that did."""


class TenantService(msgspec.Struct, frozen=True, array_like=True):
    """What a tenant got through one router in one band."""

    priority: Priority
    tenant: str
    since: Count
    """Number of the demand with which `total` was told first: it was zero before."""
    total: Finite
    """Service over the tenant's weight, in all; what was taken back is taken off."""


class FirstTokens(msgspec.Struct, frozen=True, array_like=True):
    """Requests of a class with an aim for their first token that have had it through one router, since it started."""

    priority_class: str
    in_time: Count
    late: Count


class RouterDemand(Message, frozen=True):
    """What waits on a router for one model, every 50 ms while anything does, and whenever there is service to tell."""

    model: str
    number: Count
    """Rises with each that is sent for this model."""
    bands: tuple[BandDemand, ...]
    """Most urgent first, those in which nothing waits last."""
    heads: tuple[Waiter, ...]
    """The first of the most urgent band in which anything waits."""
    first_for_s: Finite
    """How long the first of them has been the first and has not been sent out."""
    blocked: bool
    """A replica has a slot for it and not the blocks: room gathers for it."""
    held_s: Finite
    """How long there has been room for it and only a gate has kept it from it."""
    sent_per_s: Finite
    """Attempts lately sent out, of any band."""
    sent_service: Finite
    """Service sent out in all, of any band."""
    open_service: Finite
    """Of that, what is open, over the tenants' weights."""
    service: tuple[TenantService, ...]
    """What has changed since it was told last, as much of it as a message may carry."""
    queued: Count = 0
    """Requests that wait, whether a replica is reached or not."""
    queued_service: Finite = 0.0
    """What serving these is expected to take."""
    of_one_per_s: Finite | None = None
    """What one full replica does, as a controller said last that had measured it: for one that has not yet."""
    first_tokens: tuple[FirstTokens, ...] = ()
    observed_unix_s: Finite = 0.0
    """When it was told, by the clock that `heads` are told by: clocks of several hosts need not agree."""


class Gate(msgspec.Struct, frozen=True, array_like=True):
    """Above `priority` all is let out, of `priority` what makes no more than `sent_max` in all, below nothing."""

    priority: Priority
    sent_max: Count


class BandLevel(msgspec.Struct, frozen=True, array_like=True):
    """How the other routers stand in one band."""

    priority: Priority
    level: Counter
    """The least of theirs where anything waits, else the greatest."""
    routers_waiting: Count
    """Of the others, those with work waiting there."""


class RouterService(msgspec.Struct, frozen=True, array_like=True):
    """What another router has told since it was passed on last."""

    router_id: RouterId
    number: Count
    """Of the earliest demand in it."""
    sent_service: Finite
    service: tuple[TenantService, ...]


class Gates(Message, frozen=True):
    """What a router is to know of the others, for one model. A gate is in force until the next comes, for 500 ms at most."""

    model: str
    gate: Gate | None
    levels: tuple[BandLevel, ...]
    others: tuple[RouterService, ...]


# --- controller -> replica or router ---


class Leads(Message, frozen=True):
    """This controller acts, as this generation: what comes on the link from here on is its word. Said first, and again
    and again, so that its silence tells. A controller that stands by says nothing."""

    generation: Generation


class Granted(Message, frozen=True):
    """The generation of a replica that said hello without one."""

    generation: Generation


class Roster(Message, frozen=True):
    """The replicas that the controller knows. Absence closes no link; one that is named is tried again and again."""

    entries: tuple[RosterEntry, ...]


class Weigh(Message, frozen=True):
    """To a replica: tell for so long what is here, however much room there is: a request of its model fits nowhere. Said
    again while that lasts."""

    for_s: Finite


class ScaleDecision(msgspec.Struct, frozen=True, array_like=True):
    """The number of replicas of a model that are to take work was changed, or not."""

    at_unix_s: Finite
    was: Count
    wanted: Count
    why: str
    numbers: dict[str, float]
    """By which it was decided; what was not measured is not among them."""


class ScaleStatus(Message, frozen=True):
    """How many replicas a model is to have, to the routers, that show it."""

    model: str
    now: ScaleDecision
    """Why nothing changes just now, or what does."""
    kept: Count | None
    """So many Serve keeps, as it said last; None where it has not been asked."""
    trouble: str = ""
    """Why Serve could not be asked or told the last time."""
    changes: tuple[ScaleDecision, ...] = ()
    """The last ones of this controller, the latest first."""


class DrainOrder(Message, frozen=True):
    """To a replica: take nothing new and let what is here go elsewhere, or take work again."""

    drain: bool
    retire: bool = False
    """So that it can leave: one replica fewer is needed. Without it, a drain is somebody's who will undo it."""
    node: bool = False
    """Because its node is about to go, or is not any more: nothing that anybody else has asked is changed by that."""


class Leave(Message, frozen=True):
    """To a replica that retires and is empty: end. Any other stays."""


class DrainTold(Message, frozen=True):
    """The replicas that a DrainAsk was about, all of which have been told."""

    ask_id: Count
    replica_ids: tuple[ReplicaId, ...]


class Propose(Message, frozen=True):
    """To the router that owns an attempt: have it leave `source`. Nothing is owed: the router does it if it still fits."""

    generation: Generation
    """Of the controller. Older than one that the router has met: refused."""
    request_id: RequestId
    attempt: Count
    source: ReplicaId
    source_generation: Generation
    target: ReplicaId | None
    """None: back to its router's queue, at its old place."""
    target_generation: Generation | None
    for_request_id: RequestId | None
    """The request that it makes room for; void once that has a place."""
    why: str
    """Fit for `explain`."""
    numbers: dict[str, float] = {}  # msgspec copies it for each instance
    """What it was decided by."""


class Stays(Message, frozen=True):
    """A router does not do what was proposed for another request's sake: the room is not made, and may be elsewhere."""

    request_id: RequestId
    attempt: Count
    for_request_id: RequestId


class Left(Message, frozen=True):
    """What was proposed for another request's sake is done: the attempt is not on its source any more, or about to go. Where
    reports show that and the other still has no place, others may be asked."""

    request_id: RequestId
    attempt: Count
    for_request_id: RequestId


class ReplicaSummary(msgspec.Struct, frozen=True):
    entry: RosterEntry
    pid: Count
    report: ReplicaReport | None
    report_age_s: Finite | None
    drained_by: tuple[DrainedBy, ...] = ()
    pod: PodRef | None = None


class NodeStatus(msgspec.Struct, frozen=True, array_like=True):
    """A Kubernetes node that is about to go."""

    node: str
    why: str


class KubernetesStatus(msgspec.Struct, frozen=True, array_like=True):
    """How a controller stands with Kubernetes."""

    nodes: Count | None
    """That are known; None before they were listed."""
    going: tuple[NodeStatus, ...]
    """The first of those that are about to go, a bounded number."""
    heard_s: Finite | None
    """Since the API server was last heard about nodes; None: never."""
    lease_holder: str
    """As the Lease was read last; empty: nobody's, or it is not known."""
    holds_lease: bool
    events_written: Count
    events_dropped: Count
    trouble: str = ""
    """What the API server did not do the last time; empty while all goes well."""


class ClusterStatus(Message, frozen=True):
    ask_id: Count
    controller_generation: Generation
    controller_pid: Count
    uptime_s: Finite
    replicas: tuple[ReplicaSummary, ...]
    routers: tuple[RouterStatus, ...]
    scale: tuple[ScaleStatus, ...] = ()
    """Of each model whose replicas come and go."""
    kubernetes: KubernetesStatus | None = None
    """None where the controller has nothing to do with Kubernetes."""


ToReplica = Add | Abort | ResendFrom | Goodbye | Move | CallOff | Grant | Release
ToPeer = MoveBegin | MoveBlocks | MoveState | MoveAbort
FromPeer = MoveAnswer
ToRouter = StepFrame
ToController = (
    ReplicaHere
    | ReplicaStatus
    | RouterStatus
    | StatusRequest
    | DrainAsk
    | RouterDemand
    | Unplaced
    | Stays
    | Left
    | Follows
)
FromController = (
    Granted | Roster | ClusterStatus | DrainOrder | Leave | DrainTold | Gates | Propose | Weigh | Leads | ScaleStatus
)
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
