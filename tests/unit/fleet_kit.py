"""Several routers before one fleet, and the controller between them, on a clock that the test moves.

Real are the routers' cores, the replicas' arithmetic (tests/unit/fake_replica.py) and the controller's decisions; time and
the links are the kit's: a message takes one tick of TICK_S. `advance` does what falls due, in a fixed order.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
from prometheus_client import CollectorRegistry

from cluster.config import RouterConfig
from cluster.control.routers import Routers
from cluster.messages import Gates, RosterEntry, StepFrame
from cluster.types import Generation, ReplicaId, Request, RequestId, RouterId, Sampling, SharedWork
from router.core import RouterCore
from router.metrics_sink import RouterMetrics
from router.stream import Buffer, Stream
from tests.unit.fake_replica import FakeReplica, ManualClock

TICK_S = 0.005
MODEL = "m"


@dataclass
class Port:
    """A router's link to a replica that has others too."""

    shared: SharedReplica
    router: int

    @property
    def replica_id(self) -> ReplicaId:
        return self.shared.engine.replica_id

    @property
    def generation(self) -> Generation:
        return self.shared.engine.generation

    def add(
        self, request: Request, attempt: int, *, shared: bool = False, trial: int = 0, trial_tokens: int = 0
    ) -> int:
        if shared:
            self.shared.by_share[request.request_id] = (self.router, request.priority, self.shared.fleet.clock.now_s)
        self.shared.owner[request.request_id] = self.router
        self.shared.fleet.sent.append((self.router, request))
        return self.shared.engine.add(request, attempt)

    def abort(self, request_id: RequestId, attempt: int) -> None:
        self.shared.engine.abort(request_id, attempt)

    def resend_from(self, request_id: RequestId, attempt: int, index: int) -> None:
        self.shared.engine.resend_from(request_id, attempt, index)

    @property
    def entry(self) -> RosterEntry:
        return self.shared.engine.entry

    def move(self, request_id: RequestId, attempt: int, number: int, target: RosterEntry) -> None:
        self.shared.engine.move(request_id, attempt, number, target)

    def call_off(self, request_id: RequestId, attempt: int) -> None:
        self.shared.engine.call_off(request_id, attempt)

    def grant(self, request_id: RequestId, attempt: int, index: int) -> int:
        self.shared.owner[request_id] = self.router
        return self.shared.engine.grant(request_id, attempt, index)

    def release(self, request_id: RequestId, attempt: int) -> None:
        self.shared.engine.release(request_id, attempt)


class SharedReplica:
    """One engine; after each step every router has its part of it, with a report."""

    def __init__(self, fleet: FleetBench, name: str, slots: int, blocks: int) -> None:
        self.fleet = fleet
        self.owner: dict[RequestId, int] = {}
        self.by_share: dict[RequestId, tuple[int, int, float]] = {}
        """(router, priority, since when) of what a minimum share sent here."""
        self.engine = FakeReplica(self, ReplicaId(name), slots=slots, blocks=blocks, peers=fleet.peers)  # type: ignore[arg-type]  # only frames come
        fleet.peers[self.engine.replica_id] = self.engine
        self.reaches = set(range(len(fleet.cores)))
        """The routers that have a link to it."""
        for number, core in enumerate(fleet.cores):
            core.link_up(Port(self, number), self.engine.report())

    def frame(self, replica_id: ReplicaId, generation: Generation, frame: StepFrame) -> None:
        for number, core in enumerate(self.fleet.cores):
            if number in self.reaches:
                mine = StepFrame(
                    msgspec.structs.replace(frame.report, shared=self._shared_by_others(number)),
                    tuple(d for d in frame.deltas if self.owner[d.request_id] == number),
                    tuple(r for r in frame.refusals if self.owner[r.request_id] == number),
                    tuple(p for p in frame.preempted if self.owner[p.request_id] == number),
                    moves=tuple(m for m in frame.moves if self.owner[m.request_id] == number),
                )
                core.frame(replica_id, generation, mine)

    def _shared_by_others(self, router: int) -> tuple[SharedWork, ...]:
        """What waits there and has not begun, and what runs; not what was preempted."""
        now_s, held = self.fleet.clock.now_s, self.engine.held
        return tuple(
            SharedWork(priority, now_s - since_s)
            for request_id, (owner, priority, since_s) in self.by_share.items()
            if owner != router and request_id in held and (held[request_id].running or not held[request_id].made)
        )

    def cut(self, router: int) -> None:
        self.reaches.discard(router)
        self.fleet.cores[router].link_down(self.engine.replica_id, self.engine.generation)


@dataclass
class FleetBench:
    """`controlled` False: there is no controller."""

    routers: int = 2
    config: RouterConfig = field(default_factory=RouterConfig)
    controlled: bool = True
    step_ticks: int = 5
    clock: ManualClock = field(default_factory=ManualClock)
    cores: list[RouterCore] = field(default_factory=list)
    registries: list[CollectorRegistry] = field(default_factory=list)
    replicas: list[SharedReplica] = field(default_factory=list)
    peers: dict[ReplicaId, FakeReplica] = field(default_factory=dict)
    sent: list[tuple[int, Request]] = field(default_factory=list)
    """(router, request), in the order in which they were sent out."""
    gates: list[Gates | None] = field(default_factory=list)
    """The last that each router heard."""
    at_each_step: Callable[[SharedReplica], None] = lambda _: None
    ticks: int = 0
    number: int = 0

    def __post_init__(self) -> None:
        for _ in range(self.routers):
            self.add_router()
        self.restart_controller()

    def add_router(self) -> int:
        """One that has just started."""
        registry = CollectorRegistry()
        core = RouterCore(self.config, self.clock, random.Random(len(self.cores)), RouterMetrics(registry))
        self.cores.append(core)
        self.registries.append(registry)
        self.gates.append(None)
        number = len(self.cores) - 1
        for replica in self.replicas:
            replica.reaches.add(number)
            core.link_up(Port(replica, number), replica.engine.report())
        if self.ticks:
            self.controller.joined(RouterId(str(number)))
        return number

    def restart_controller(self) -> None:
        self.controller = Routers()
        for number in range(len(self.cores)):
            self.controller.joined(RouterId(str(number)))
        self._under_way: list[Callable[[], None]] = []
        self._free_slots = 0

    def replica(self, slots: int = 4, blocks: int = 1000) -> SharedReplica:
        shared = SharedReplica(self, f"r{len(self.replicas)}", slots, blocks)
        self.replicas.append(shared)
        return shared

    def submit(
        self,
        router: int,
        priority_class: str = "standard",
        *,
        tokens: int = 8,
        prompt: int = 8,
        tenant: str = "t",
        age_s: float = 0.0,
    ) -> Request:
        """A request that comes to a router now, or came `age_s` ago."""
        self.number += 1
        priority = next(c.priority for c in self.config.classes if c.name == priority_class)
        request = Request(
            request_id=RequestId(f"q{self.number:06}"),
            tenant=tenant,
            priority=priority,
            priority_class=priority_class,
            arrived_unix_s=self.clock.unix() + self.number * 1e-6 - age_s,
            prompt_ids=tuple(range(1, prompt + 1)),
            sampling=Sampling(max_tokens=tokens, seed=0),
        )
        self.cores[router].submit(((request, Stream(Buffer(self.config.max_stream_bytes))),))
        return request

    @property
    def waiting(self) -> list[Request]:
        """Of all routers."""
        return [
            live.request
            for core in self.cores
            for live in core._live.values()
            if live.request.request_id in core._dispatcher.queue
        ]

    def counter(self, router: int, tenant: str, priority: int = 0) -> float:
        return self.cores[router]._dispatcher.band(priority).counters(tenant)[0]

    def advance(self, seconds: float, each_tick: Callable[[], None] = lambda: None) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.clock.advance(TICK_S)
            self.ticks += 1
            each_tick()
            arrived, self._under_way = self._under_way, []
            for deliver in arrived:
                deliver()
            for number, replica in enumerate(self.replicas):
                if self.ticks % self.step_ticks == number % self.step_ticks and replica.engine.held:
                    self.at_each_step(replica)
                    replica.engine.turn()
                elif self.ticks % 20 == number % 20:
                    replica.engine.beat()
            if self.ticks % 20 == 3:
                for core in self.cores:
                    core.tick()
                self._free_slots = sum(max(0, r.engine.slots - len(r.engine.held)) for r in self.replicas)
            for number, core in enumerate(self.cores):
                if self.ticks % 10 == (1 + 3 * number) % 10:
                    self._tell(number, core)
            if self.controlled and self.ticks % 10 == 6:
                self._hand_out()

    def _tell(self, number: int, core: RouterCore) -> None:
        demand = core.demand(MODEL)
        if demand is not None and self.controlled:
            core.told(demand)
            controller, now_s = self.controller, self.clock.monotonic() + TICK_S
            self._under_way.append(lambda: controller.heard(RouterId(str(number)), demand, now_s))

    def _hand_out(self) -> None:
        for router_id, gates in self.controller.hand_out(
            self.clock.monotonic(), lambda _: self._free_slots, lambda _: True
        ):
            self.gates[int(router_id)] = gates
            self._under_way.append(lambda core=self.cores[int(router_id)], gates=gates: core.hear(gates))  # type: ignore[misc]
