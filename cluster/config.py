"""Configuration: frozen pydantic models, unknown keys refused, each field with its unit and reason.

Owns: every setting of engine, router, replica, controller and transport, and their defaults. Read once at the edge
(a profile, see deployments/settings.py) and passed down as the smallest part that a thing needs.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator


class Config(BaseModel):
    """Base of all configuration: frozen, and a typing error in a key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class DType(StrEnum):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


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


class EngineConfig(Config):
    """One engine: its batch, its memory and its order."""

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
    srpt_margin_tokens: float = Field(
        16.0, ge=0, description="Under srpt only who needs so many fewer tokens pushes out; spares needless swapping."
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
        16, description="Tokens per KV block; smaller wastes less, larger gathers faster."
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
        512, description="KV blocks of host memory that preempted work may be swapped out to; 0 swaps nothing."
    )
    dtype: DType = Field(
        DType.FLOAT32, description="Of weights and KV cache; float32 resumes exactly, bfloat16 takes half the memory."
    )

    @model_validator(mode="after")
    def _fits(self) -> EngineConfig:
        if self.slots > self.step_token_budget:
            raise ValueError(
                f"slots ({self.slots}) must not exceed step_token_budget ({self.step_token_budget}): "
                "each running request decodes one token per step"
            )
        if self.blocks * self.block_size_tokens < self.max_model_len:
            raise ValueError(
                f"blocks x block_size_tokens ({self.blocks} x {self.block_size_tokens}) must hold one request of "
                f"max_model_len ({self.max_model_len}): raise blocks or lower max_model_len"
            )
        return self


class PriorityClass(Config):
    """A named class of traffic. The name goes with a request everywhere; the integer orders it."""

    name: str = Field(description="As the objective header and the metrics' labels say it.")
    priority: int = Field(description="Higher is more urgent; negative is sheddable and preempted first.")
    service_tiers: tuple[str, ...] = Field((), description="Values of OpenAI's service_tier that name this class.")
    max_queued_requests: PositiveInt = Field(10_000, description="Bound of its band in the router's queue.")
    max_queued_bytes: PositiveInt = Field(256 * 2**20, description="Bound of its band in bytes, prompts counted.")


DEFAULT_CLASSES = (
    PriorityClass(name="interactive", priority=10, service_tiers=("priority",)),
    PriorityClass(name="standard", priority=0, service_tiers=("default", "auto")),
    PriorityClass(name="batch", priority=-10, service_tiers=("flex",)),
)


class RouterConfig(Config):
    """One router: its listener, its queue and its patience."""

    host: str = Field("127.0.0.1", description="Address that HTTP listens on; loopback, for there are no keys yet.")
    port: int = Field(8000, ge=0, le=65535, description="HTTP port; 0 takes a free one.")
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
    max_attempts: PositiveInt = Field(3, description="Engines that one request may be lost with before it is given up.")
    max_stream_bytes: PositiveInt = Field(
        2**20, description="Bytes held for a client that reads slowly; beyond it the stream ends."
    )
    max_body_bytes: PositiveInt = Field(8 * 2**20, description="Largest request body.")
    max_queue_s: PositiveFloat = Field(
        600.0, description="Longest wait in the queue; beyond it the request ends with 504."
    )
    body_timeout_s: PositiveFloat = Field(30.0, description="Longest time for a client to send its body.")

    @model_validator(mode="after")
    def _consistent(self) -> RouterConfig:
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
        0.1, description="A report leaves at least so often, from outside the engine's thread."
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

    @model_validator(mode="after")
    def _outbox_fits_a_frame(self) -> TransportConfig:
        if self.max_frame_bytes < 4 * self.outbox_max_bytes:
            raise ValueError(
                f"max_frame_bytes ({self.max_frame_bytes}) must be at least 4 x outbox_max_bytes "
                f"({self.outbox_max_bytes}): all that waits may leave in one frame, at up to 4 bytes a character"
            )
        return self


class HealthConfig(Config):
    """When a replica calls itself unhealthy, so that it is replaced."""

    step_age_limit_s: PositiveFloat = Field(
        30.0, description="A step older than this will not end: the replica is replaced."
    )
    drain_timeout_s: PositiveFloat = Field(
        600.0, description="Longest time that a stopping replica or router works on."
    )
