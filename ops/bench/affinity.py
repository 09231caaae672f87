"""What it is worth that routers know what each replica's prefix cache holds: how much of the prompts is computed, and how long
a first token takes, of requests that ask about a few documents.

Owns: the workload and the run in virtual time. Imports the router's core, the embedded engine and the modelled backend.
Invariants: what is compared gets the same requests at the same times, and differs in what the routers know alone; every
request ends as asked; equal settings give equal figures. Routers, queue, choice, engine, KV pool and prefix cache are the
real ones; the network takes no time, and a step as long as on an A100.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial

import numpy as np
from prometheus_client import CollectorRegistry

from cluster.config import EngineConfig, RouterConfig
from cluster.engine.engine import Engine
from cluster.messages import Add, StepFrame
from cluster.ports import StepResult
from cluster.types import (
    Generation,
    Outcome,
    ReplicaId,
    ReplicaReport,
    ReplicaState,
    Request,
    RequestId,
    Sampling,
)
from deployments.prefix_feed import HeldPrefixes, PrefixFeed
from ops.bench.no_moves import NoMoves
from ops.report import Report, ReportRow, machine_context
from ops.sim.backend import END_TOKEN, ModelledBackend, no_text
from ops.sim.step_time import a100
from router.core import RouterCore
from router.metrics_sink import RouterMetrics
from router.stream import Buffer, Stream

VOCABULARY = 32_000
REPORT_PERIOD_S = 0.1
GENERATION = Generation(1, "bench")


class Knowledge(StrEnum):
    """What the routers go by."""

    TOLD = "told"
    """What the replicas tell of their prefix caches."""
    OWN = "own"
    """Where each router itself has sent the beginnings of prompts."""
    NONE = "none"
    """Load alone."""


@dataclass(frozen=True, slots=True)
class AffinitySettings:
    replicas: int = 3
    routers: int = 2
    documents: int = 60
    """The k-th is asked about 1/k as often as the first."""
    document_tokens: int = 2048
    question_tokens: int = 64
    output_tokens: int = 32
    requests: int = 1500
    rate_per_s: float = 8.0
    blocks: int = 1500
    """Of each replica's pool; a document has 128."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Arrival:
    at_s: float
    router: int
    request: Request


def arrivals_of(settings: AffinitySettings) -> list[Arrival]:
    """A document and a question of its own each, at random times, to any router."""
    rng = random.Random(settings.seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(1, VOCABULARY) for _ in range(count))

    documents = [tokens(settings.document_tokens) for _ in range(settings.documents)]
    popularity = [1 / (k + 1) for k in range(settings.documents)]
    at_s, arrivals = 0.0, []
    for number in range(settings.requests):
        at_s += rng.expovariate(settings.rate_per_s)
        (document,) = rng.choices(documents, popularity)
        request = Request(
            request_id=RequestId(f"{number:05}"),
            tenant="bench",
            priority=0,
            priority_class="standard",
            arrived_unix_s=at_s,
            # The last token of a prompt says how long the answer is: see ops/sim/backend.py.
            prompt_ids=(*document, *tokens(settings.question_tokens - 1), settings.output_tokens),
            sampling=Sampling(max_tokens=settings.output_tokens, seed=0, temperature=0.0),
        )
        arrivals.append(Arrival(at_s, rng.randrange(settings.routers), request))
    return arrivals


def repeated_tokens(settings: AffinitySettings, arrivals: Sequence[Arrival]) -> int:
    """Prompt tokens in full blocks of documents that had been asked about before: what caches without end would find."""
    block = EngineConfig().block_size_tokens
    seen: set[tuple[int, ...]] = set()
    repeated = 0
    for arrival in arrivals:
        document = arrival.request.prompt_ids[: settings.document_tokens]
        repeated += len(document) // block * block if document in seen else 0
        seen.add(document)
    return repeated


class _Clock:
    """Virtual time; the same for routers and replicas."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def unix(self) -> float:
        return self.now_s


@dataclass(slots=True)
class _Port(NoMoves):
    """A `ports.ReplicaPort` of one router to one replica, without a network."""

    replica: _Replica
    router: int
    sequence: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def replica_id(self) -> ReplicaId:
        return self.replica.replica_id

    @property
    def generation(self) -> Generation:
        return GENERATION

    def add(
        self, request: Request, attempt: int, *, shared: bool = False, trial: int = 0, trial_tokens: int = 0
    ) -> int:
        sequence = next(self.sequence)
        self.replica.add(Add(request, attempt, sequence, shared, trial, trial_tokens), self.router)
        return sequence

    def abort(self, request_id: RequestId, attempt: int) -> None:
        raise NotImplementedError("nobody leaves before the end")

    def resend_from(self, request_id: RequestId, attempt: int, index: int) -> None:
        raise NotImplementedError("nothing is lost")


class _Replica:
    """An engine, and what it owes each router."""

    def __init__(self, number: int, settings: AffinitySettings, knowledge: Knowledge) -> None:
        self.replica_id = ReplicaId(f"replica-{number}")
        self.backend = ModelledBackend(a100().models["llama-2-7b"], VOCABULARY, padded=False)
        config = EngineConfig(
            blocks=settings.blocks,
            max_model_len=settings.document_tokens + settings.question_tokens + settings.output_tokens,
            step_token_budget=512,
        )
        self.engine = Engine(config, self.backend, no_text(), (END_TOKEN,))
        self.busy = False
        held = HeldPrefixes()
        self._held = held
        self._feeds = [PrefixFeed(held) for _ in range(settings.routers if knowledge is Knowledge.TOLD else 0)]
        self._owner: dict[RequestId, int] = {}
        self._unapplied: deque[tuple[int, int, int]] = deque()
        """(number of the add, router, its sequence) of those that no load has counted yet."""
        self._applied = [0] * settings.routers

    def add(self, add: Add, router: int) -> None:
        self._owner[add.request.request_id] = router
        if self.engine.add(add.request, add.attempt) is not None:
            raise RuntimeError("a replica is full: lower the rate")
        self._unapplied.append((self.engine.adds_total, router, add.sequence))

    def frames(self, result: StepResult, now_s: float) -> list[StepFrame]:
        """One for each router."""
        if result.prefixes is not None:
            changed = self._held.apply(result.prefixes)
            for feed in self._feeds:
                feed.changed(changed)
        while self._unapplied and self._unapplied[0][0] <= result.load.adds_total:
            _, router, sequence = self._unapplied.popleft()
            self._applied[router] = sequence
        frames = []
        for router, applied in enumerate(self._applied):
            report = ReplicaReport(
                replica_id=self.replica_id,
                generation=GENERATION,
                state=ReplicaState.READY,
                observed_unix_s=now_s,
                load=result.load,
                step_age_s=None,
                applied_sequence=applied,
            )
            deltas = tuple(delta for delta in result.deltas if self._owner[delta.request_id] == router)
            prefixes = self._feeds[router].take() if self._feeds else None
            frames.append(StepFrame(report, deltas, prefixes=prefixes))
        return frames


@dataclass(frozen=True, slots=True)
class AffinityRun:
    """What one kind of knowledge gave."""

    prompt_tokens: int
    cached_tokens: int
    ttft_ms: tuple[float, ...]
    """In the order of arrival."""
    by_replica: tuple[int, ...]
    """Requests."""


def run(settings: AffinitySettings, arrivals: Sequence[Arrival], knowledge: Knowledge) -> AffinityRun:
    """Send every request, and wait for every answer.

    Raises:
        RuntimeError: a request did not end as asked.
    """
    world = _World(settings, knowledge)
    world.play(arrivals)
    return world.result()


class _World:
    def __init__(self, settings: AffinitySettings, knowledge: Knowledge) -> None:
        self._clock = _Clock()
        config = RouterConfig(expected_output_tokens=settings.output_tokens)
        if knowledge is Knowledge.NONE:
            config = config.model_copy(update={"affinity_weight": 0.0})
        self._routers = [
            RouterCore(config, self._clock, random.Random(settings.seed + k), RouterMetrics(CollectorRegistry()))
            for k in range(settings.routers)
        ]
        self._replicas = [_Replica(k, settings, knowledge) for k in range(settings.replicas)]
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._max_stream_bytes = config.max_stream_bytes
        self._arrived: dict[RequestId, float] = {}
        self._first: dict[RequestId, float] = {}
        self._streams: dict[RequestId, Stream] = {}
        for replica in self._replicas:
            for k, router in enumerate(self._routers):
                router.link_up(_Port(replica, k), None)

    def play(self, arrivals: Sequence[Arrival]) -> None:
        for arrival in arrivals:
            self._at(arrival.at_s, partial(self._submit, arrival))
        self._report()
        while len(self._arrived) < len(arrivals) or any(s.ending is None for s in self._streams.values()):
            self._clock.now_s, _, happens = heapq.heappop(self._events)
            happens()
            for replica in self._replicas:
                self._begin_step(replica)

    def result(self) -> AffinityRun:
        endings = [stream.ending for stream in self._streams.values()]
        done = [ending for ending in endings if ending is not None and ending.outcome is Outcome.FINISHED]
        if len(done) != len(endings):
            raise RuntimeError(f"{len(endings) - len(done)} requests did not end as asked")
        return AffinityRun(
            prompt_tokens=sum(ending.prompt_tokens for ending in done),
            cached_tokens=sum(ending.cached_tokens for ending in done),
            ttft_ms=tuple((self._first[r] - self._arrived[r]) * 1000 for r in self._streams),
            by_replica=tuple(replica.engine.adds_total for replica in self._replicas),
        )

    def _at(self, when_s: float, happens: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when_s, next(self._numbers), happens))

    def _submit(self, arrival: Arrival) -> None:
        request_id = arrival.request.request_id
        self._arrived[request_id] = arrival.at_s
        stream = self._streams[request_id] = Stream(Buffer(self._max_stream_bytes))
        self._routers[arrival.router].submit(((arrival.request, stream),))

    def _report(self) -> None:
        """Of every replica, whatever it does; and the routers' own tick."""
        for replica in self._replicas:
            self._tell(replica, StepResult(load=replica.engine.load()))
        for router in self._routers:
            router.tick()
        self._at(self._clock.now_s + REPORT_PERIOD_S, self._report)

    def _begin_step(self, replica: _Replica) -> None:
        if replica.busy or not replica.engine.has_work:
            return
        replica.busy = True
        began_ms = replica.backend.now_ms
        result = replica.engine.step()
        took_s = (replica.backend.now_ms - began_ms) / 1000
        self._at(self._clock.now_s + took_s, partial(self._end_step, replica, result))

    def _end_step(self, replica: _Replica, result: StepResult) -> None:
        replica.busy = False
        for delta in result.deltas:
            if delta.token_ids:
                self._first.setdefault(delta.request_id, self._clock.now_s)
        self._tell(replica, result)

    def _tell(self, replica: _Replica, result: StepResult) -> None:
        for router, frame in zip(self._routers, replica.frames(result, self._clock.now_s), strict=True):
            router.frame(replica.replica_id, GENERATION, frame)


def build_report(runs: Mapping[Knowledge, AffinityRun], repeated: int, settings: AffinitySettings) -> Report:
    """Of each kind of knowledge: the cached part of all prompt tokens, and the time to the first token.

    Args:
        repeated: Prompt tokens that caches without end would find.
    """
    rows: list[ReportRow] = []
    for knowledge, one in runs.items():
        rows += [
            ReportRow(f"{knowledge.value}.cached_ratio", one.cached_tokens / one.prompt_tokens, "ratio"),
            ReportRow(f"{knowledge.value}.ttft_p50_ms", float(np.percentile(one.ttft_ms, 50)), "ms"),
            ReportRow(f"{knowledge.value}.ttft_p99_ms", float(np.percentile(one.ttft_ms, 99)), "ms"),
            ReportRow(f"{knowledge.value}.busiest_share", max(one.by_replica) / sum(one.by_replica), "ratio"),
        ]
    prompt_tokens = next(iter(runs.values())).prompt_tokens
    rows.append(ReportRow("endless.cached_ratio", repeated / prompt_tokens, "ratio"))
    context = machine_context() | {name: getattr(settings, name) for name in AffinitySettings.__slots__}
    return Report("bench affinity", context | {"step_times": "llama-2-7b on one A100, virtual"}, tuple(rows))
