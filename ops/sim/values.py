"""What a simulation is asked, and what it answers.

Owns: the values. Imports the configurations of production, the step times, and the views that a placement is chosen from.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

from cluster.config import ControlConfig, EngineConfig, RouterConfig, TransportConfig
from cluster.engine.scheduling.sequence import Identity
from cluster.types import Outcome, ReplicaId, RequestId
from ops.sim.faults import OF_MOVES, Fault, FaultKind
from ops.sim.step_time import Device, a100
from router.routing import Need, Placement
from router.view import ReplicaView


@dataclass(frozen=True, slots=True)
class Arrival:
    """A client's request. `prompt_tokens` counts those of `prefix_ids`; the rest of a prompt is like no other's."""

    at_s: float
    request_id: RequestId
    prompt_tokens: int
    output_tokens: int
    """How many it makes, the one that ends it included."""
    priority_class: str = "standard"
    tenant: str = "sim"
    prefix_ids: tuple[int, ...] = ()
    router: int | None = None
    """None: any."""
    reads: bool = True
    """False: its client takes nothing of what it is sent."""
    max_tokens: int | None = None
    """What the request allows itself; None: as many as the model has room for."""

    def __post_init__(self) -> None:
        """
        Raises:
            ValueError: no request can be so.
        """
        if self.prompt_tokens <= len(self.prefix_ids) or self.output_tokens < 1:
            raise ValueError(
                f"{self.request_id}: a prompt of {self.prompt_tokens} tokens with {len(self.prefix_ids)} shared ones and "
                f"{self.output_tokens} tokens of output: the prompt must have one of its own, and the output one"
            )


class Policy(Protocol):
    """Chooses a replica in the place of `router.fleet.Fleet.place`; queue, admission and all else stay production's."""

    name: str

    def place(self, need: Need, views: Sequence[ReplicaView], now_s: float, rng: random.Random) -> Placement | None:
        """Where it goes now; None: it waits in the router's queue."""
        ...


@dataclass(frozen=True, slots=True)
class Instance:
    """A replica's engine between two steps, as a policy that migrates polls it."""

    replica_id: ReplicaId
    blocks_total: int
    blocks_free: int
    first_blocks: int
    """That the first that waits asks for, beside those that it has; 0 where nobody waits."""
    running: int
    priority_max: int | None
    """Of those that run; None where nothing does."""
    shortest: Identity | None
    """Of those that run and have begun to answer: the shortest of the lowest priority."""


@dataclass(frozen=True, slots=True)
class Migration:
    source: ReplicaId
    target: ReplicaId
    identity: Identity


@runtime_checkable
class MigratingPolicy(Policy, Protocol):
    """It also moves what runs."""

    period_s: float
    """It is shown all instances, and asked what is to move, so often."""

    def observe(self, instances: Mapping[ReplicaId, Instance]) -> None: ...

    def migrate(self, busy: Collection[ReplicaId]) -> Sequence[Migration]:
        """What is to move now. `busy`: replicas between which something moves already."""
        ...


def default_engine(model: str) -> EngineConfig:
    """An engine of one A100, with all blocks that it has room for. What a swap costs is not modelled: none is made."""
    block_size_tokens = 16
    return EngineConfig(
        slots=256,
        step_token_budget=512,
        block_size_tokens=block_size_tokens,
        blocks=a100().models[model].kv_capacity_tokens // block_size_tokens,
        max_model_len=8192,
        host_blocks=0,
    )


def default_transport() -> TransportConfig:
    """As in production, but for keys and values, of which a message has some 32 blocks: an engine hands out one message of
    them between two steps, and a step takes tens of milliseconds."""
    return TransportConfig(move_chunk_bytes=64 * 2**20, max_frame_bytes=128 * 2**20)


@dataclass(frozen=True)
class SimConfig:
    device: Device = field(default_factory=a100)
    model: str = "llama-3-8b"
    """Of the device's."""
    replicas: int = 1
    routers: int = 1
    engine: EngineConfig = field(default_factory=lambda: default_engine("llama-3-8b"))
    router: RouterConfig = field(default_factory=RouterConfig)
    transport: TransportConfig = field(default_factory=default_transport)
    control: ControlConfig | None = field(default_factory=ControlConfig)
    """Of the controller that proposes what moves; None: it proposes nothing."""
    link_delay_s: float = 0.0005
    """Of each message, one way."""
    replicas_per_node: int = 8
    faults: tuple[Fault, ...] = ()
    fast_forward: bool = True
    """Take several steps at once where nothing is decided in them. It changes the time that a simulation takes alone."""
    held_max_s: float = 0.5
    """How long a replica holds back what says nothing but that streams go on (ops/sim/engine.py). Times of first tokens and
    of ends are exact; counters of fairness, and what a lost replica had told, are so much older. 0: each step's tokens
    leave with it as in production, which is slower, and no steps are taken at once."""
    check_every: int = 10_000
    """Events between two full checks."""
    overtaken_max_s: float = 5.0
    """How long the most urgent that waits on a replica may stand behind less urgent work that runs there, while nothing
    says that it may not be pushed out."""
    unended_max_s: float = 3600.0
    """After the last arrival and fault, and without a request that ends, nothing is waited for any longer than that."""

    def __post_init__(self) -> None:
        """
        Raises:
            ValueError: a setting cannot be, with what to change.
        """
        if self.model not in self.device.models:
            raise ValueError(f"no model {self.model!r}: known are {', '.join(sorted(self.device.models))}")
        if min(self.replicas, self.routers, self.replicas_per_node, self.check_every) < 1:
            raise ValueError("replicas, routers, replicas_per_node and check_every must be at least 1")
        if self.link_delay_s <= 0:
            raise ValueError("link_delay_s must be above 0: what happens at one moment has no order otherwise")
        if self.held_max_s < 0:
            raise ValueError("held_max_s must not be negative: 0 tells everything at once")
        nodes = -(-self.replicas // self.replicas_per_node)
        for fault in self.faults:
            bound = {FaultKind.NODE_LOSS: nodes, FaultKind.NODE_DRAIN: nodes}
            of_all = fault.kind in OF_MOVES or fault.kind in (FaultKind.CONTROLLER_RESTART, FaultKind.SLOW_CLIENTS)
            if fault.number >= (1 if of_all else bound.get(fault.kind, self.replicas)):
                raise ValueError(f"{fault.kind.value}: there is no number {fault.number}")


class Done(NamedTuple):
    """What has been computed of a request: of its prompt from here to there, and of its output."""

    cached_tokens: int
    """Found in a cache."""
    prompt_tokens: int
    """With these."""
    output_tokens: int


@dataclass(slots=True)
class RequestRecord:
    """One request, as its client saw it, and what its engines did with it."""

    request_id: RequestId
    priority_class: str
    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    """That were to come."""
    first_token_s: float | None = None
    end_s: float | None = None
    tokens: int = 0
    """That came."""
    cached_tokens: int = 0
    """Of its prompt, what was found computed for others: what it had computed itself, and finds where it is sent again, is
    none of that."""
    preemptions: int = 0
    recomputed_tokens: int = 0
    replicas: tuple[ReplicaId, ...] = ()
    """That it was sent to, in order."""
    outcome: Outcome | None = None
    """None: it has not ended."""
    shared_tokens: int = 0
    """Of its prompt, what others have, too."""
    done: Done | None = None
    """By the moment that was counted at; None: it came later."""


@dataclass(frozen=True)
class SimResult:
    requests: list[RequestRecord]
    """In the order of their arrival."""
    event_log_sha256: str
    events: int
    invariant_violations: list[str]
    virtual_s: float
    counted_s: float
    """When it was counted what had been done (`RequestRecord.done`)."""
    cpu_s: float
    steps: int
    tokens: int
    prefill_tokens: int
    hit_tokens: int
    preemptions: int
    recomputed_tokens: int
    """Run as a part of a prompt or of what was put out before, beyond the first time."""
    urgent_blocked: int
    moves: Mapping[str, int] = field(default_factory=dict)
    """By what came of them (`router.moving.MoveOutcome`)."""
    move_pauses_s: tuple[float, ...] = ()
    """Of each request that moved: from the word that it stands still to its first token elsewhere, as its router saw it."""

    @property
    def sim_over_real(self) -> float:
        """Virtual seconds for each second of one core."""
        return self.virtual_s / self.cpu_s if self.cpu_s else 0.0
