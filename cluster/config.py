"""Configuration: frozen pydantic models, unknown keys refused, each field with its unit and reason.

Owns: every setting of engine, router, replica, controller and transport, and their defaults. Read once at the edge
(a profile, see deployments/settings.py) and passed down as the smallest part that a thing needs.
"""

from __future__ import annotations

import ipaddress
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Config(BaseModel):
    """Base of all configuration: frozen, and a typing error in a key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class DType(StrEnum):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class EngineKind(StrEnum):
    EMBEDDED = "embedded"
    VLLM = "vllm"


class BatchingMode(StrEnum):
    STATIC = "static"
    DYNAMIC = "dynamic"
    CONTINUOUS = "continuous"


class Order(StrEnum):
    FCFS = "fcfs"
    SJF = "sjf"
    SRPT = "srpt"
    PRIORITY = "priority"


class WithinClass(StrEnum):
    """Order of the requests of one priority, under the order `priority`."""

    FCFS = "fcfs"
    SJF = "sjf"


class VllmConfig(Config):
    """What only the vLLM engine has."""

    eager: bool = Field(False, description="Compile nothing, and start sooner; for CPUs and tests.")
    gpu_memory_utilization: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Share of the GPU's memory that weights, activations and KV blocks may take in all. Where it is "
        "given, as many blocks are made as fit and `blocks` says nothing.",
    )
    kv_transfer_config: dict[str, Any] | None = Field(
        None, description="vLLM's argument of that name, a mapping: its KV connector; none uses none."
    )


class EngineConfig(Config):
    """One engine: its batch, its memory and its order."""

    kind: EngineKind = Field(
        EngineKind.EMBEDDED,
        description="Ours on torch, or vLLM's engine core under our scheduling. `engine: vllm` alone is short for this.",
    )
    mode: BatchingMode = Field(BatchingMode.CONTINUOUS, description="When requests join and leave the batch.")
    order: Order = Field(Order.PRIORITY, description="Who runs first, and who may push whom out.")
    within_class: WithinClass = Field(
        WithinClass.FCFS, description="Order within one priority, where the order is `priority`."
    )
    ageing_tokens_per_s: PositiveFloat = Field(
        20.0, description="Under sjf and srpt a second of waiting counts like so many fewer expected output tokens."
    )
    longest_wait_s: PositiveFloat = Field(
        60.0, description="Under sjf and srpt nobody goes before a request that arrived so much earlier."
    )
    max_overtakes: NonNegativeInt = Field(
        16,
        description="Smaller requests of its own urgency that may pass one that is too large for the free blocks; then "
        "freed blocks are kept for it.",
    )
    slots: PositiveInt = Field(32, description="Requests that run at once; bounds the step time of decoding.")
    step_token_budget: PositiveInt = Field(
        64, description="Tokens of one step, decodes first, the rest prefill; bounds how long a step takes."
    )
    block_size_tokens: PositiveInt = Field(
        default_factory=lambda known: 32 if known.get("kind") is EngineKind.VLLM else 16,
        description="Tokens per KV block; smaller wastes less, larger gathers faster. Default 16, with kind vllm 32: on "
        "CPUs that has multiples of 32 only.",
    )
    srpt_margin_tokens: float = Field(
        default_factory=lambda known: float(known.get("block_size_tokens", 0)),
        ge=0,
        description="Under srpt only who needs so many fewer tokens pushes out. Default: a block's, since what is "
        "expected of a running request is as old as the block that it fills; with less, equals push each other out.",
    )
    blocks: PositiveInt = Field(1024, description="KV blocks of the pool; blocks x block_size_tokens tokens in all.")
    max_model_len: int = Field(2048, ge=2, description="Longest prompt + output in tokens, one of each at least.")
    max_held: PositiveInt = Field(
        1024, description="Requests held in all, running or waiting; the bound of the engine's own queue."
    )
    max_recomputes: NonNegativeInt = Field(
        4,
        description="Times that urgent work may have one request recomputed; beyond it only a pause or a swap makes room "
        "for the urgent one, or it waits and is counted.",
    )
    prefix_cache: bool = Field(True, description="Keep the blocks of ended requests for prompts that begin alike.")
    host_blocks: NonNegativeInt = Field(
        512,
        description="KV blocks of host memory that preempted work may be swapped out to; 0 swaps nothing. The vLLM engine "
        "pauses or recomputes and has none.",
    )
    dtype: DType = Field(
        DType.FLOAT32, description="Of weights and KV cache; float32 resumes exactly, bfloat16 takes half the memory."
    )
    vllm: VllmConfig | None = Field(None, description="What only kind vllm has; none takes its defaults.")

    @model_validator(mode="after")
    def _of_its_kind(self) -> EngineConfig:
        if self.kind is EngineKind.VLLM:
            if self.mode is not BatchingMode.CONTINUOUS:
                raise ValueError(f"mode {self.mode.value!r}: vLLM batches continuously only; set mode to continuous")
        elif self.vllm is not None:
            raise ValueError(
                f"vllm: kind {self.kind.value!r} does not read this section; set kind to vllm or remove it"
            )
        return self

    @model_validator(mode="after")
    def _fits(self) -> EngineConfig:
        if self.slots > self.step_token_budget:
            raise ValueError(
                f"slots ({self.slots}) must not exceed step_token_budget ({self.step_token_budget}): "
                "each running request decodes one token per step"
            )
        blocks_follow = self.vllm is not None and self.vllm.gpu_memory_utilization is not None
        if not blocks_follow and self.blocks * self.block_size_tokens < self.max_model_len:
            raise ValueError(
                f"blocks x block_size_tokens ({self.blocks} x {self.block_size_tokens}) must hold one request of "
                f"max_model_len ({self.max_model_len}): raise blocks or lower max_model_len"
            )
        return self


class PriorityClass(Config):
    """A named class of traffic. The name goes with a request everywhere; the integer orders it."""

    name: str = Field(description="As the objective header and the metrics' labels say it.")
    priority: int = Field(
        ge=-(2**53), le=2**53, description="Higher is more urgent; negative is sheddable and preempted first."
    )
    service_tiers: tuple[str, ...] = Field((), description="Values of OpenAI's service_tier that name this class.")
    max_queued_requests: PositiveInt = Field(10_000, description="Bound of its band in the router's queue.")
    max_queued_bytes: PositiveInt = Field(256 * 2**20, description="Bound of its band in bytes, prompts counted.")
    longest_wait_s: PositiveFloat | None = Field(
        None,
        description="Longest wait that the class promises until a prompt is begun: what cannot be is refused at arrival, "
        "long prompts before short ones, and ends with 504 where it waits for a replica so long all the same. None: the "
        "router's max_queue_s, and the prompts that go first on a replica are not counted.",
    )
    first_token_slo_s: PositiveFloat | None = Field(
        None,
        description="Its requests are to have their first token so long after they came: where too few have, a model with "
        "`scale` gets more replicas. None: no such aim.",
    )


class WithinTenant(StrEnum):
    """Order of the waiting requests of one tenant and one priority."""

    FCFS = "fcfs"
    SJF = "sjf"
    DEADLINE = "deadline"


class TenantConfig(Config):
    """What a tenant is to get beside others of the same priority."""

    name: str = Field(description="As its keys say it.")
    weight: PositiveFloat = Field(1.0, description="Its part of the service, relative to the others'.")


class Auth(StrEnum):
    NONE = "none"
    KEYS = "keys"


DEFAULT_CLASSES = (
    PriorityClass(name="interactive", priority=10, service_tiers=("priority",)),
    PriorityClass(name="standard", priority=0, service_tiers=("default", "auto")),
    PriorityClass(name="batch", priority=-10, service_tiers=("flex",)),
)


class RouterConfig(Config):
    """One router: its listener, its queues and its patience. Each model has a queue of its own: what bounds one, and
    what is remembered, holds for each."""

    host: str = Field(
        "127.0.0.1", description="Address that HTTP listens on; for any but loopback `auth` must say who is served."
    )
    port: int = Field(8000, ge=0, le=65535, description="HTTP port; 0 takes a free one.")
    auth: Auth | None = Field(
        None,
        description="Who is served: holders of a key, or (none) whoever reaches the address. Left out, it is none, and the "
        "address must be loopback.",
    )
    keys_file: Path = Field(
        Path("~/.config/forebay/keys.json"), description="With auth keys: the file that `forebay keys` writes."
    )
    keys_pepper_file: Path | None = Field(
        None, description="The secret that the keys are hashed with; by default keys_file with .pepper behind it."
    )
    open_metrics: bool = Field(False, description="With auth keys: /metrics is answered without a key too.")
    classes: tuple[PriorityClass, ...] = Field(DEFAULT_CLASSES, description="All classes of traffic that there are.")
    default_class: str = Field("standard", description="Class of a request that names none.")
    expected_output_tokens: PositiveInt = Field(
        128, description="Output length assumed when capacity is reserved, where max_tokens is larger."
    )
    silent_after_s: PositiveFloat = Field(1.0, description="No report for so long: nothing new is sent there.")
    fenced_after_s: PositiveFloat = Field(3.0, description="No report for so long: its requests go on elsewhere.")
    step_age_limit_s: PositiveFloat = Field(
        10.0, description="A step older than this is stuck: nothing new is sent there."
    )
    no_replica_grace_s: NonNegativeFloat = Field(
        10.0,
        description="Where no replica takes work any more, new requests wait for another to come; once none has for so "
        "long they are refused.",
    )
    max_attempts: PositiveInt = Field(
        32,
        description="Attempts that one request may lose with an engine, or by broken or missing tokens, before it is given "
        "up, so that nothing goes round for ever. What kills engines itself is found out sooner.",
    )
    retry_share: float = Field(
        0.1,
        ge=0,
        le=1,
        description="Retries of requests that an engine has ended with an error, as a part of the requests let in: one replica "
        "of ten may fail unseen, and where all fail they get little more to do. 0: none is tried again. Going on after a loss, "
        "a move or a preemption is no retry.",
    )
    retry_burst: PositiveInt = Field(
        32,
        description="Retries that a router has at first, and saves up at most: what runs on a replica may all fail in one step.",
    )
    retry_attempts: int = Field(
        2,
        ge=1,
        le=8,
        description="Attempts of one request that may end with an error of an engine: what fails on two replicas is likely to "
        "be at fault itself. 1: none is tried again.",
    )
    outlier_faults: PositiveInt = Field(
        5,
        description="Faults of a replica in a row, of different requests, after which it gets nothing new for a while; "
        "errors of one tenant alone count half.",
    )
    outlier_window_s: PositiveFloat = Field(60.0, description="A fault that is older says nothing any more.")
    out_for_s: PositiveFloat = Field(
        10.0, description="So long a replica that failed gets nothing new; twice as long each further time in a row."
    )
    out_longest_s: PositiveFloat = Field(
        300.0, description="The longest such time; after as long a time without, the next is the first again."
    )
    max_stream_bytes: PositiveInt = Field(
        2**20, description="Bytes held for a client that reads slowly; beyond it the stream ends."
    )
    max_body_bytes: PositiveInt = Field(8 * 2**20, description="Largest request body.")
    max_queue_s: PositiveFloat = Field(
        600.0, description="Longest wait in the queue; beyond it the request ends with 504."
    )
    body_timeout_s: PositiveFloat = Field(30.0, description="Longest time for a client to send its body.")
    drain_notice_s: NonNegativeFloat | None = Field(
        None,
        description="A router that stops serves on for so long after /ready has said no: longer than a balancer takes to "
        "see it. None: 5 s, or 0 where nothing can stand before it: one router, on loopback.",
    )
    tenants: tuple[TenantConfig, ...] = Field(
        (), description="Tenants that are to get more or less than others, and that metrics name; all others weigh 1."
    )
    prompt_token_weight: PositiveFloat = Field(
        1.0, description="Service that one prompt token counts as, in what tenants and bands are charged."
    )
    output_token_weight: PositiveFloat = Field(
        2.0, description="Service that one output token counts as: it takes a step of its own, a prompt's share theirs."
    )
    within_tenant: WithinTenant = Field(
        WithinTenant.FCFS,
        description="Order within one tenant and priority: oldest, shortest expected or earliest deadline first.",
    )
    sjf_ageing_tokens_per_s: PositiveFloat = Field(
        20.0, description="Under sjf a second of waiting counts like so many fewer expected output tokens."
    )
    sjf_longest_overtake_s: PositiveFloat = Field(
        60.0, description="Under sjf nobody goes before a request that arrived so much earlier."
    )
    ageing_after_s: PositiveFloat = Field(
        30.0, description="From this wait on, the head of a less urgent band may take the band's minimum share."
    )
    minimum_share: float = Field(
        0.02,
        ge=0,
        le=0.5,
        description="Of all dispatched service, what each waiting class may take past more urgent work that waits.",
    )
    affinity_weight: float = Field(
        0.5,
        ge=0,
        description="How much fuller, in parts of its capacity, a replica may be than another and still be preferred "
        "for a prompt that it has computed already, beside the time that this saves. 0: none of it counts.",
    )
    affinity_entries: PositiveInt = Field(
        65_536, description="Sessions and beginnings of prompts that are remembered, with the replica that had them."
    )
    prefix_entries: PositiveInt = Field(
        1_000_000,
        description="Blocks in the replicas' prefix caches that a router remembers, each once for every replica that holds "
        "it: a replica's whole cache has as many as its pool has blocks. About 200 bytes each.",
    )
    moves_at_once: PositiveInt = Field(
        4, description="Requests of this router that move from one replica, and to one, at the same time."
    )
    move_timeout_s: PositiveFloat = Field(
        30.0, description="A move that has not come so far that its request stands still is called off."
    )
    move_taken_s: PositiveFloat = Field(
        2.0,
        description="A moved request that its new replica does not say it has within this goes on from the journal.",
    )
    request_rest_s: NonNegativeFloat = Field(
        5.0,
        description="A request that the controller has had leave a replica does not leave another on its word for so long.",
    )
    explained_requests: PositiveInt = Field(
        10_000, description="Ended requests whose decisions can still be asked for."
    )
    explained_bytes: PositiveInt = Field(32 * 2**20, description="Bytes that these may hold in all.")

    @model_validator(mode="after")
    def _consistent(self) -> RouterConfig:
        tenants = [t.name for t in self.tenants]
        if len(set(tenants)) != len(tenants):
            raise ValueError(f"tenants: names must differ, got {tenants}")
        if self.auth is None and not is_loopback(self.host):
            raise ValueError(
                f"host {self.host} is not loopback: set auth to keys (`forebay keys create` makes them), or to none to serve "
                "whoever reaches it"
            )
        names = [c.name for c in self.classes]
        if len(set(names)) != len(names):
            raise ValueError(f"classes: names must differ, got {names}")
        if self.default_class not in names:
            raise ValueError(f"default_class {self.default_class!r} is not one of classes {names}")
        tiers = [t for c in self.classes for t in c.service_tiers]
        if len(set(tiers)) != len(tiers):
            raise ValueError(f"classes: one service tier names two classes: {tiers}")
        if len({c.priority for c in self.classes}) != len(names):
            raise ValueError("classes: priorities must differ")
        return self


class TransportConfig(Config):
    """The TCP links between router, replica and controller."""

    max_frame_bytes: PositiveInt = Field(
        16 * 2**20, description="Largest frame after the hello; larger ones end the link."
    )
    handshake_timeout_s: PositiveFloat = Field(5.0, description="Longest time from connect to welcome.")
    report_period_s: PositiveFloat = Field(
        0.1,
        description="A report leaves so often, from outside the engine's thread, but where one has in the last half of it.",
    )
    outbox_max_bytes: PositiveInt = Field(
        4 * 2**20, description="Unsent tokens held per router; beyond it that router's most backlogged streams end."
    )
    orphan_after_s: PositiveFloat = Field(
        5.0, description="Work of a router that does not come back is ended after this."
    )
    reconnect_for_s: PositiveFloat = Field(
        2.0, description="A router tries so long to reconnect before it calls a replica lost."
    )
    backoff_max_s: PositiveFloat = Field(1.0, description="Longest pause between two tries to connect.")
    move_chunk_bytes: PositiveInt = Field(
        2**20,
        description="Keys and values that move to another replica travel in messages of so much: tokens wait behind one.",
    )
    move_answer_s: PositiveFloat = Field(
        2.0, description="A replica that is sent a moving request answers each message within this, or it stays."
    )
    move_expiry_s: PositiveFloat = Field(
        5.0,
        description="A moving request that its router says nothing of goes on where it was, and its copy is dropped.",
    )

    @model_validator(mode="after")
    def _outbox_fits_a_frame(self) -> TransportConfig:
        if self.max_frame_bytes < 4 * self.outbox_max_bytes:
            raise ValueError(
                f"max_frame_bytes ({self.max_frame_bytes}) must be at least 4 x outbox_max_bytes "
                f"({self.outbox_max_bytes}): all that waits may leave in one frame, at up to 4 bytes a character"
            )
        return self


class ControlConfig(Config):
    """What the controller proposes: when work is moved or given back, and what a move is taken to cost."""

    standby: bool = Field(
        False,
        description="A second controller hears all that the first hears, and leads within two seconds when that is gone; "
        "without it Ray Serve starts another, which takes longer.",
    )
    tick_s: PositiveFloat = Field(0.05, description="The controller decides so often.")
    stale_after_s: PositiveFloat = Field(
        0.5, description="A replica's report that is older says nothing: nothing is proposed to it or from it."
    )
    moves_per_tick: PositiveInt = Field(16, description="Requests of a model that are proposed to leave in one tick.")
    proposal_expiry_s: PositiveFloat = Field(
        2.0,
        description="So long a proposal counts as on its way: the room that it takes is nobody else's, and its demand gets "
        "no other, unless the reports show before that it is done and not enough.",
    )
    request_rest_s: NonNegativeFloat = Field(
        10.0,
        description="A request that has left a replica is left alone for so long; one that its router kept there may be asked "
        "for again after proposal_expiry_s, for its own sake.",
    )
    stall_s: NonNegativeFloat = Field(
        0.25, description="What has waited on a replica for less is left to it: it may run with the next step."
    )
    pair_rest_s: NonNegativeFloat = Field(
        0.5, description="Between two replicas nothing that runs is moved for so long after the last time."
    )
    move_value_s: PositiveFloat = Field(
        0.5,
        description="What runs is moved only where its client gains more seconds by it, its pause and copy taken off.",
    )
    move_pause_s: NonNegativeFloat = Field(0.05, description="A moved request stands still for so long.")
    move_block_s: NonNegativeFloat = Field(
        0.001, description="Time to copy one KV block to another replica: 2 MiB at 2 GB/s."
    )
    recompute_token_s: NonNegativeFloat = Field(
        0.0002, description="Time to compute the keys and values of one token again, where they were given up."
    )
    park_delay_s: NonNegativeFloat = Field(
        1.0, description="A running request that goes back to the queue is taken to wait for so long."
    )
    max_parks: NonNegativeInt = Field(
        3, description="Times that a request may be proposed to give up its keys and values within parks_window_s."
    )
    parks_window_s: PositiveFloat = Field(60.0, description="See max_parks.")
    step_fixed_part: float = Field(
        0.5,
        ge=0,
        le=1,
        description="Of a step, the part that takes its time however little runs: what a replica on which nothing has run "
        "lately is judged by.",
    )


class ScaleConfig(Config):
    """How many replicas a model has, by what is asked of it."""

    min: NonNegativeInt = Field(
        1, description="Replicas at least. 0: the last goes after idle_after_s, and a request that comes waits for one."
    )
    max: PositiveInt = Field(description="Replicas at most; there must be room for as many.")
    utilisation: float = Field(
        0.8,
        gt=0,
        le=1,
        description="Replicas are added where demand is above this part of what they do, each at its full batch.",
    )
    spare_utilisation: float = Field(
        0.7,
        gt=0,
        le=1,
        description="One is taken away where the others would stay below this part. The gap to utilisation keeps noise from "
        "turning it round.",
    )
    average_s: PositiveFloat = Field(
        30.0, description="Demand is a mean over about so long: longer is steadier and sees a rise later."
    )
    up_after_s: NonNegativeFloat = Field(
        3.0, description="Demand must be too high for so long. With no replica at all one is started at once."
    )
    down_after_s: PositiveFloat = Field(
        900.0,
        description="One is taken away by the highest demand in so long a time, and not before so long after one was added.",
    )
    drain_backlog_s: PositiveFloat = Field(
        30.0, description="What waits in the routers is to be begun within this; where it is not, replicas are added."
    )
    attainment: float = Field(
        0.95,
        gt=0,
        le=1,
        description="One is added where fewer than this part of a class's requests have their first token within its "
        "first_token_slo_s.",
    )
    idle_after_s: PositiveFloat = Field(
        900.0, description="With min 0: the last replica goes when there has been no work at all for so long."
    )

    @model_validator(mode="after")
    def _in_order(self) -> ScaleConfig:
        if self.min > self.max:
            raise ValueError(f"min ({self.min}) must not exceed max ({self.max})")
        if self.spare_utilisation >= self.utilisation:
            raise ValueError(
                f"spare_utilisation ({self.spare_utilisation}) must be below utilisation ({self.utilisation}), or each "
                "replica that goes is started again"
            )
        return self


class HealthConfig(Config):
    """When a replica calls itself unhealthy, so that it is replaced."""

    step_age_limit_s: PositiveFloat = Field(
        30.0, description="A step older than this will not end: the replica is replaced."
    )
    start_timeout_s: PositiveFloat = Field(
        1800.0,
        description="Longest time from `forebay serve` until every replica is loaded: tens of gigabytes of weights from a "
        "slow disk, compilation and graph capture on a cold GPU take many minutes.",
    )
    drain_timeout_s: PositiveFloat = Field(
        600.0, description="Longest time that a stopping replica or router works on."
    )
    hand_back_after_s: NonNegativeFloat = Field(
        30.0,
        description="A stopping replica finishes what ends within this; the rest goes on elsewhere, which costs computing "
        "it again up to where it was, and frees the GPU.",
    )


class MetricsConfig(Config):
    """Where replicas and controllers show what they measure, each at /metrics of a port of its own. Routers show theirs
    beside their API."""

    replica_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Port of a replica, on the address that it listens on for routers; 0 takes a free one, which its log "
        "names. None: no replica listens.",
    )
    replica_ports: int = Field(
        1,
        ge=1,
        le=64,
        description="How many ports from replica_port on are the replicas' of one machine, each of which takes the first "
        "that is free: as many as it has replicas, or some show nothing. A machine with a port of its own for each can be "
        "scraped with one fixed list, whichever replica is where.",
    )
    controller_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Port of a controller, likewise. None: no controller listens.",
    )

    @model_validator(mode="after")
    def _ports_differ(self) -> MetricsConfig:
        first, count = self.replica_port, self.replica_ports
        if not first:  # none, or any
            if count > 1:
                raise ValueError(
                    f"replica_ports is {count}, counted from replica_port, which must name the first of them"
                )
            return self
        if first + count - 1 > 65535:
            raise ValueError(f"replica_ports: {count} from {first} on go beyond 65535, the last that there is")
        if self.controller_port in range(first, first + count):
            raise ValueError(
                f"controller_port is {self.controller_port}, one of the {count} from replica_port on: it must be another, for a "
                "replica and a controller may run on one machine"
            )
        return self


class NoticeOn(StrEnum):
    """Where on a Kubernetes Node a notice is."""

    TAINT = "taint"
    LABEL = "label"
    ANNOTATION = "annotation"
    CONDITION = "condition"


class NodeNotice(Config):
    """Something on a Node that says that it is about to go."""

    on: NoticeOn = Field(
        description="A taint counts with the effects NoSchedule and NoExecute, PreferNoSchedule is a wish."
    )
    key: str = Field(min_length=1, max_length=317, description="Its name; of a condition, the type.")
    value: str | None = Field(None, max_length=256, description="None: any value; of a condition, the status True.")
    why: str = Field(
        min_length=1, max_length=100, description="In words, for status and Events: 'AWS ends its machine'."
    )


class KubernetesConfig(Config):
    """What a controller does in Kubernetes: it watches nodes, so that work leaves those that go, and writes Events and a
    Lease."""

    kubeconfig: Path | None = Field(
        None, description="A kubeconfig file; none takes the service account of the controller's pod."
    )
    namespace: str = Field(
        "default", min_length=1, max_length=63, description="Of the pods, and so of the Events and the Lease."
    )
    name: str = Field(
        "forebay", min_length=1, max_length=63, description="Of the Lease; one for each Forebay in the namespace."
    )
    nodes: str = Field("", max_length=1024, description="Label selector of the nodes that are watched; empty: all.")
    known_notices: bool = Field(
        True,
        description="Heed what Kubernetes, autoscalers and clouds put on nodes that go (cluster/control/nodes.py lists it).",
    )
    notices: tuple[NodeNotice, ...] = Field((), max_length=64, description="Further ones.")
    return_after_s: NonNegativeFloat = Field(
        5.0, description="A node without a notice takes work again after so long: some come and go."
    )
    watch_s: PositiveFloat = Field(
        30.0, ge=1, description="A watch is made anew after so long, which proves that it is not a dead connection."
    )
    backoff_max_s: PositiveFloat = Field(
        30.0, description="Longest pause before an API server that does not answer is asked again."
    )
    call_timeout_s: PositiveFloat = Field(5.0, description="Longest time for one answer of the API server.")
    lease_s: PositiveFloat = Field(
        15.0, ge=3, description="How long the Lease holds without being renewed; it is renewed each third of that."
    )
    events_per_minute: PositiveFloat = Field(
        30.0, description="More Events than this are not written, but for the first ten; what is alike is one, counted."
    )
