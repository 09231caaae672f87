"""A model of a scaled deployment in virtual time: requests, replicas that share their time among what they run, routers'
and replicas' messages as the controller hears them, and Serve as it stands.

What one replica does with `b` requests is `full_per_s` x (1 + k) b / (b + k slots), as a step that takes a fixed part and
one for each of its requests does: at one request far less than at all slots.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from cluster.config import ScaleConfig
from cluster.control.demand import Meter
from cluster.control.scale import ScaleState, Verdict, decide
from cluster.messages import BandDemand, RosterEntry, RouterDemand
from cluster.types import EngineLoad, Generation, PriorityLoad, ReplicaId, ReplicaReport, ReplicaState, RouterId

ROUTER = RouterId("router")
FIXED_PART = 0.25


def entry(name: str, host: str = "h", zone: str = "", number: int = 1) -> RosterEntry:
    return RosterEntry(ReplicaId(name), Generation(number, "u"), host, 1, "m", zone)


def engine_load(running: int = 0, waiting: int = 0, *, slots: int = 8, **more: int) -> EngineLoad:
    return EngineLoad(
        slots_total=slots,
        blocks_total=more.pop("blocks_total", 1000),
        blocks_free=more.pop("blocks_free", 1000),
        block_size_tokens=16,
        running=(PriorityLoad(0, running, 10 * running),) if running else (),
        waiting=(PriorityLoad(0, waiting, 0),) if waiting else (),
        **more,
    )


def report(
    of: RosterEntry, load: EngineLoad, state: ReplicaState = ReplicaState.READY, at_s: float = 0.0
) -> ReplicaReport:
    return ReplicaReport(
        replica_id=of.replica_id,
        generation=of.generation,
        state=state,
        observed_unix_s=at_s,
        load=load,
        step_age_s=None,
    )


def router_demand(queued: int, queued_service: float, sent_service: float) -> RouterDemand:
    return RouterDemand(
        "m",
        1,
        (BandDemand(0, queued, 0, 0.0),),
        (),
        0.0,
        False,
        0.0,
        0.0,
        sent_service,
        0.0,
        (),
        queued,
        queued_service,
    )


@dataclass
class Running:
    left: float


@dataclass
class ModelReplica:
    entry: RosterEntry
    ready_s: float
    slots: int
    full_per_s: float
    fixed_part: float
    running: list[Running] = field(default_factory=list)
    tokens: float = 0.0

    def step(self, over_s: float) -> None:
        b = len(self.running)
        if not b:
            return
        rate = self.full_per_s * (1 + self.fixed_part) * b / (b + self.fixed_part * self.slots)
        each = rate * over_s / b
        for request in self.running:
            self.tokens += min(each, request.left)
            request.left -= each
        self.running = [r for r in self.running if r.left > 0]


class ScaledModel:
    """One model under load, driven by the production meter and decision. Output tokens alone are counted."""

    def __init__(
        self,
        config: ScaleConfig,
        seed: int,
        *,
        replicas: int = 1,
        start_s: float = 30.0,
        slots: int = 16,
        full_per_s: float = 400.0,
        mean_tokens: float = 150.0,
        expected_tokens: float = 128.0,
        fixed_part: float = FIXED_PART,
    ) -> None:
        self.config = config
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self.start_s, self.slots, self.full_per_s = start_s, slots, full_per_s
        self.mean_tokens, self.expected_tokens, self.fixed_part = mean_tokens, expected_tokens, fixed_part
        self.meter = Meter(1.0, 1.0, 0.0, config.average_s)
        self.meter.router_here(ROUTER)
        self.state = ScaleState(replicas, 0.0)
        self.queue: deque[float] = deque()
        self.sent_service = 0.0
        self.of_one_per_s: float | None = None
        self.numbers = 0
        self.replicas: list[ModelReplica] = []
        self._have(replicas, ready_s=0.0)
        self.changes: list[tuple[float, int]] = []
        """(when, by how many)."""

    def _have(self, count: int, ready_s: float) -> None:
        while len(self.replicas) < count:
            self.numbers += 1
            of = entry(f"r{self.numbers}", number=self.numbers)
            self.replicas.append(ModelReplica(of, ready_s, self.slots, self.full_per_s, self.fixed_part))
        while len(self.replicas) > count:
            gone = min(self.replicas, key=lambda r: (r.ready_s <= self.now_s, len(r.running)))
            self.replicas.remove(gone)
            self.queue.extendleft(r.left for r in gone.running)
            self.meter.replica_gone(gone.entry.replica_id, gone.entry.generation)

    def succeed(self, *, told: bool) -> None:
        """The controller dies and another begins; routers tell it what this one had measured, or do not."""
        self.of_one_per_s = self.meter.load(self.now_s).full_per_s if told else None
        self.meter = Meter(1.0, 1.0, self.now_s, self.config.average_s)
        self.meter.router_here(ROUTER)
        self.state = ScaleState(self.state.wanted, self.now_s)

    def run(self, until_s: float, per_s: Callable[[float], float]) -> None:
        """`per_s`: requests that arrive, at a time."""
        while self.now_s < until_s:
            self.step(per_s(self.now_s))

    def step(self, per_s: float, over_s: float = 1.0) -> Verdict:
        self.now_s += over_s
        due_s = self.rng.expovariate(per_s) if per_s else over_s
        while due_s < over_s:
            self.queue.append(max(1.0, self.rng.lognormvariate(0.0, 1.0) * self.mean_tokens / 1.6487))
            due_s += self.rng.expovariate(per_s)
        ready = [r for r in self.replicas if r.ready_s <= self.now_s]
        while self.queue and (free := [r for r in ready if len(r.running) < r.slots]):
            min(free, key=lambda r: len(r.running)).running.append(Running(self.queue.popleft()))
            self.sent_service += self.expected_tokens
        for replica in ready:
            replica.step(over_s)
        for r in ready:
            load = engine_load(len(r.running), slots=r.slots, tokens_total=round(r.tokens))
            self.meter.replica(r.entry, report(r.entry, load), retiring=False, now_s=self.now_s)
        waits = len(self.queue)
        demand = router_demand(waits, self.expected_tokens * waits, self.sent_service)
        self.meter.router(ROUTER, msgspec.structs.replace(demand, of_one_per_s=self.of_one_per_s), self.now_s)
        verdict = decide(self.meter.load(self.now_s), self.config, self.now_s, self.state)
        if by := verdict.state.wanted - self.state.wanted:
            self.changes.append((self.now_s, by))
        self.state = verdict.state
        self._have(self.state.wanted, self.now_s + self.start_s)
        return verdict

    def turns(self) -> list[float]:
        """When the direction changed."""
        return [at for (_, before), (at, by) in itertools.pairwise(self.changes) if before * by < 0]
