"""Simulations side by side: what is asked, what a GPU does at most, and the runs.

Owns: the settings of a study, the saturated throughput that a load is a part of, and each run's workload. Imports the
simulator. Invariant: what is compared gets equal arrivals; a run is a function of the settings, the policy and the seed.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from cluster.config import DEFAULT_CLASSES, EngineConfig, Order, PriorityClass, RouterConfig
from ops.bench.lengths import Lengths
from ops.bench.trace import TraceRequest
from ops.errors import CommandError
from ops.sim.bound import LeastTimes
from ops.sim.faults import OF_MOVES, Fault, FaultKind, MovePoint
from ops.sim.objectives import OBJECTIVES, Objective
from ops.sim.policies import LOAD_ONLY, POLICIES
from ops.sim.policies.round_robin import RoundRobin
from ops.sim.step_time import a100
from ops.sim.values import Arrival, Done, SimConfig, SimResult
from ops.sim.workload import BATCH, Backlog, Mix, Span, arrivals, held_to_fill, recorded_rate_rps, weights
from ops.sim.world import simulate

GPUS = {"a100-llama3-8b": "llama-3-8b", "a100-llama2-7b": "llama-2-7b"}
"""The models of ops/sim/a100 by the name that a user gives."""
SATURATION_WARM_UP_S = 20.0
SATURATION_MEASURED_S = 100.0
SATURATION_LENGTHS = 5000
SATURATION_WAITING = 64


@dataclass(frozen=True, slots=True)
class Batch:
    """Work that is always there."""

    lengths: tuple[Lengths, ...]
    waiting: int
    """Beside as much as would fill the empty cluster."""


@dataclass(frozen=True)
class Study:
    """What all runs have in common."""

    model: str
    requests: tuple[TraceRequest, ...]
    mix: Mix
    duration_s: float
    engine: EngineConfig
    load: float | None = None
    """Of what the replicas do at most; None: `times` what was recorded, whatever the replicas."""
    times: float = 1.0
    synchronised: bool = False
    batch: Batch | None = None
    routers: int = 1
    objectives: Mapping[str, Objective] = field(default_factory=lambda: OBJECTIVES)
    faults: tuple[Fault, ...] = field(default=())

    @cached_property
    def least(self) -> LeastTimes:
        """The least GPU times of its requests."""
        return LeastTimes(a100().models[self.model], self.engine.step_token_budget, self.engine.max_model_len)

    def work_s(self, prompt_tokens: int, output_tokens: int) -> float:
        """The least GPU time of a request."""
        return self.least.prompt_s(prompt_tokens) + self.least.decode_s(prompt_tokens, output_tokens)

    @cached_property
    def saturated_rps(self) -> float:
        """Requests of this mix that one replica ends in a second under FCFS with more waiting than it can take.

        Counted is work, the least GPU time of what ended, by the mean of the mix: long and short requests that happen
        to end within the time would make a difference else.
        """
        rng = random.Random(0)
        drawn = rng.choices(self.requests, weights(self.requests, self.mix), k=SATURATION_LENGTHS)
        lengths = [Lengths(one.prompt_tokens, one.output_tokens) for one in drawn]
        engine = self.engine.model_copy(update={"order": Order.FCFS})
        held = held_to_fill(lengths, engine.slots, engine.blocks * engine.block_size_tokens, 1, SATURATION_WAITING)
        over_s = SATURATION_WARM_UP_S + SATURATION_MEASURED_S
        backlog = Backlog(lengths, held, 0, "standard")
        result = simulate(
            backlog.first(),
            SimConfig(model=self.model, engine=engine),
            RoundRobin,
            until_s=over_s,
            on_end=backlog.follow,
        )
        done_s = sum(
            self.work_s(one.prompt_tokens, one.tokens)
            for one in result.requests
            if one.end_s is not None and SATURATION_WARM_UP_S < one.end_s <= over_s
        )
        mean_s = sum(self.work_s(*one) for one in lengths) / len(lengths)
        return done_s / mean_s / SATURATION_MEASURED_S

    def done_s(self, done: Done) -> float:
        """What it takes of a GPU to do that much of a request, in the best of steps and chunks.

        One and the same measure for every mix: a token counts by its place in its request alone, for no less and hardly more
        than its part of a full step. So all that is done in a second comes to no more than the GPUs there are, and what they
        fall short of it was idle, or went into steps that were not full, cut chunks, padding, or computing anew.
        """
        decodes_s = self.least.decode_s(done.prompt_tokens, done.output_tokens) if done.output_tokens else 0.0
        return self.least.chunks_s(done.cached_tokens, done.prompt_tokens) + decodes_s

    @cached_property
    def batch_only_gpus(self) -> float | None:
        """GPUs of work (`done_s`) that one replica does with nothing but batch work; None where there is none.

        More replicas do no more each: all have what they can take, and none helps another. It begins empty, as they do.
        """
        if self.batch is None:
            return None
        backlog = self.backlog(self.batch, 1, 0)
        result = simulate(
            backlog.first(),
            SimConfig(model=self.model, engine=self.engine),
            until_s=self.duration_s,
            on_end=backlog.follow,
        )
        return sum(self.done_s(r.done) for r in result.requests if r.done is not None) / self.duration_s

    def measure(self) -> None:
        """What all runs need to know of one replica, so that none has to find it out."""
        if self.load is not None:
            _ = self.saturated_rps
        _ = self.batch_only_gpus

    def backlog(self, batch: Batch, replicas: int, seed: int) -> Backlog:
        """As much batch work as fills so many replicas, and what waits beside."""
        engine = self.engine
        pool_tokens = engine.blocks * engine.block_size_tokens
        held = held_to_fill(batch.lengths, engine.slots, pool_tokens, replicas, batch.waiting)
        return Backlog(batch.lengths, held, seed, until_s=self.duration_s)

    def arrivals(self, one: Run) -> Iterator[Arrival]:
        """What comes from the trace.

        Raises:
            CommandError: the trace has too little.
        """
        span = Span(self.duration_s, self.rate_rps(one.replicas), self.synchronised)
        return arrivals(self.requests, self.mix, span, one.seed)

    def rate_rps(self, replicas: int) -> float:
        if self.load is None:
            return self.times * recorded_rate_rps(self.requests)
        return self.load * self.saturated_rps * replicas


@dataclass(frozen=True, slots=True)
class Run:
    """One simulation of a study."""

    replicas: int
    policy: str
    seed: int


def run(study: Study, one: Run, progress: Callable[[float], None] | None = None) -> SimResult:
    """Simulate until all that arrived has ended, but for work that was there to fill the rest.

    Raises:
        CommandError: the trace or the faults do not allow it.
    """
    config = sim_config(study, one)
    coming: Iterable[Arrival] = study.arrivals(one)
    backlog = None
    if study.batch is not None:
        backlog = study.backlog(study.batch, one.replicas, one.seed)
        coming = heapq.merge(backlog.first(), coming, key=lambda one: one.at_s)
    return simulate(
        coming,
        config,
        POLICIES[one.policy],
        one.seed,
        progress=progress,
        on_end=None if backlog is None else backlog.follow,
        not_awaited=None if backlog is None else BATCH,
        counted_at_s=study.duration_s,
    )


def sim_config(study: Study, one: Run) -> SimConfig:
    """
    Raises:
        CommandError: a fault names what is not there.
    """
    router = RouterConfig()
    if POLICIES[one.policy] is None:  # a baseline knows no objectives, and refuses nothing that would miss them
        router = RouterConfig(classes=tuple(_with_objective(c, study.objectives) for c in DEFAULT_CLASSES))
    if one.policy == LOAD_ONLY:
        router = router.model_copy(update={"affinity_weight": 0.0})
    try:
        return SimConfig(
            model=study.model,
            replicas=one.replicas,
            routers=study.routers,
            engine=study.engine,
            router=router,
            faults=study.faults,
        )
    except ValueError as error:
        raise CommandError(f"--faults: {error}") from error


def _with_objective(one: PriorityClass, objectives: Mapping[str, Objective]) -> PriorityClass:
    """The router knows what is judged: a request is to be begun within its class's TTFT, its own prompt apart."""
    objective = objectives.get(one.name)
    if objective is None:
        return one
    return one.model_copy(update={"longest_wait_s": objective.ttft_s, "first_token_slo_s": objective.ttft_s})


def parse_faults(texts: Sequence[str]) -> tuple[Fault, ...]:
    """From `kind@at+for`, `kind@at+for:number` or `kind@at+for:point`, several with commas between; seconds.

    Raises:
        CommandError: an entry has another form, or there is no such kind.
    """
    return tuple(_fault(entry.strip()) for text in texts for entry in text.split(","))


def _fault(entry: str) -> Fault:
    kind, _, when = entry.partition("@")
    times, _, number = when.partition(":")
    at_s, _, for_s = times.partition("+")
    if kind not in list(FaultKind):
        raise CommandError(f"--faults: unknown kind {kind!r} in {entry!r}; one of {', '.join(FaultKind)}")
    try:
        if kind in OF_MOVES:
            return Fault(float(at_s), FaultKind(kind), float(for_s), point=MovePoint(number))
        delay_s = 0.5 if kind == FaultKind.REPORTS_LATE else 0.0
        return Fault(float(at_s), FaultKind(kind), float(for_s), int(number or 0), delay_s=delay_s)
    except ValueError as error:
        raise CommandError(
            f"--faults: {entry!r}: {error}; write kind@at+for:number, as replica_death@30+5:0, or kind@at+for:point of a "
            f"move, as move_source_death@30+5:granted (points: {', '.join(MovePoint)})"
        ) from error
