"""A replica for the router's tests: an engine of arithmetic behind a link that the test holds in its hands.

Token k of a request is a function of (request id, k) alone, so whatever a client got in however many attempts can be
checked against `expected_ids`. Their text is each token's number, or with a `codec` what the real text stage makes of
them, stop strings and end tokens included. Nothing happens by itself: `step` runs the engine, `deliver` hands its frames
over. A move comes one stage further with each step of its source, and is at its target at once.
"""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import groupby
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry

from cluster.config import RouterConfig
from cluster.engine.text import TextCodec, TextStage
from cluster.messages import MoveNotice, MoveStage, RosterEntry, StepFrame
from cluster.ports import ReplicaListener
from cluster.types import (
    EngineLoad,
    FinishReason,
    Generation,
    Outcome,
    Preempted,
    PreemptionMeans,
    PriorityLoad,
    Refusal,
    RefusalReason,
    ReplicaId,
    ReplicaReport,
    ReplicaState,
    Request,
    RequestId,
    Sampling,
    TokenDelta,
    TokenLogprob,
)
from router.core import RouterCore
from router.journal import Scores
from router.metrics_sink import RouterMetrics
from router.stream import Batch, Buffer, Stream
from router.suspects import Trial
from router.terms import NO_TERMS, Terms

FIRST_ID, FIRST_GENERATION = ReplicaId("r1"), Generation(1, "a")


def token_id(request_id: str, index: int) -> int:
    return zlib.crc32(f"{request_id}/{index}".encode()) % 1000


def expected_ids(request: Request) -> tuple[int, ...]:
    return tuple(token_id(request.request_id, k) for k in range(request.sampling.max_tokens))


def piece(token: int) -> str:
    return f"{token} "


def expected_text(request: Request) -> str:
    return "".join(piece(t) for t in expected_ids(request))


def score(token: int, position: int, top: int) -> TokenLogprob:
    """A logprob made of nothing but the token, its position and how many others are reported."""
    others = tuple(((token + j) % 1000, -(j + 1) / 4) for j in range(top))
    return TokenLogprob(-((token * 7 + position) % 64) / 8 - 0.125, others)


class Manner(Enum):
    """How a replica behaves when it is asked for something."""

    OBEY = auto()
    REFUSE = auto()
    SILENT = auto()


@dataclass
class Held:
    """An attempt that the engine has. `ids` are all output tokens, those of earlier attempts too.

    `keeps`: it is paused, and its blocks are still its own. `moves_to`: the number that it is to have there, and where;
    `frozen`: it is there.
    """

    request: Request
    attempt: int
    text: TextStage | None
    end_ids: frozenset[int] = frozenset()
    running: bool = False
    keeps: bool = False
    ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    finish: FinishReason | None = None
    error: str = ""
    moves_to: tuple[int, RosterEntry] | None = None
    frozen: bool = False

    def __post_init__(self) -> None:
        for token in self.request.emitted_ids:
            self.make(token)

    @property
    def made(self) -> int:
        return len(self.ids)

    @property
    def blocks(self) -> int:
        return -(-(len(self.request.prompt_ids) + self.made) // 16)

    def make(self, token: int) -> None:
        sampling = self.request.sampling
        self.ids.append(token)
        if self.text is None:
            self.pieces.append(piece(token))
        elif token in self.end_ids and not sampling.ignore_eos:
            self.pieces.append(self.text.finish())
            self.finish = FinishReason.STOP
        else:
            said = self.text.push(token)
            if self.made == sampling.max_tokens and not self.text.stopped:
                said += self.text.finish()
            self.pieces.append(said)
            self.finish = FinishReason.STOP if self.text.stopped else None
        self.end_at_length()

    def end_at_length(self) -> None:
        if self.finish is None and self.made >= self.request.sampling.max_tokens:
            self.finish = FinishReason.LENGTH

    def delta(self, index: int) -> TokenDelta:
        request, sampling = self.request, self.request.sampling
        logprobs: tuple[TokenLogprob, ...] = ()
        prompt_logprobs: tuple[TokenLogprob, ...] = ()
        if sampling.logprobs is not None:
            logprobs = tuple(score(self.ids[k], k, sampling.logprobs) for k in range(index, self.made))
        unscored = self.finish is FinishReason.ERROR and not self.ids[index:]
        if sampling.prompt_logprobs is not None and index == len(request.emitted_ids) and not unscored:
            ids = enumerate(request.prompt_ids[1:], start=1)
            prompt_logprobs = tuple(score(token, k, sampling.prompt_logprobs) for k, token in ids)
        return TokenDelta(
            request.request_id, self.attempt, index, tuple(self.ids[index:]), tuple(self.pieces[index:]), self.finish,
            self.error, logprobs=logprobs, prompt_logprobs=prompt_logprobs,
        )  # fmt: skip


@dataclass
class FakeReplica:
    """Implements `ports.ReplicaPort`; one incarnation. The most urgent and oldest `slots` attempts run."""

    listener: ReplicaListener
    replica_id: ReplicaId = FIRST_ID
    generation: Generation = FIRST_GENERATION
    slots: int = 4
    blocks: int = 1000
    tokens_per_step: int = 1
    step_tokens: int = 0
    """That it says a step runs at most."""
    state: ReplicaState = ReplicaState.READY
    step_age_s: float | None = None
    refuse_with: RefusalReason | None = None
    others: bool = False
    trial: int = 0
    """Of other routers."""
    means: PreemptionMeans = PreemptionMeans.RECOMPUTE
    codec: TextCodec | None = None
    end_ids: frozenset[int] = frozenset()
    script: Callable[[Request, int], int] = field(default=lambda request, k: token_id(request.request_id, k))
    peers: dict[ReplicaId, FakeReplica] = field(default_factory=dict)
    """Where it can move work to."""
    moving: Manner = Manner.OBEY
    """As the source of moves."""
    taking: Manner = Manner.OBEY
    """As their target, once one is granted."""
    room: bool = True
    """Whether it lets moves begin."""
    held: dict[RequestId, Held] = field(default_factory=dict)
    coming: dict[tuple[RequestId, int], Held] = field(default_factory=dict)
    """What has moved here and is not granted."""
    done: dict[RequestId, Held] = field(default_factory=dict)
    frames: list[StepFrame] = field(default_factory=list)
    added: list[tuple[Request, int]] = field(default_factory=list)
    aborted: list[tuple[RequestId, int]] = field(default_factory=list)
    resends: list[tuple[RequestId, int, int]] = field(default_factory=list)
    moves: list[tuple[RequestId, int, int, ReplicaId]] = field(default_factory=list)
    called_off: list[tuple[RequestId, int]] = field(default_factory=list)
    grants: list[tuple[RequestId, int, int]] = field(default_factory=list)
    released: list[tuple[RequestId, int]] = field(default_factory=list)
    sequence: int = 0
    alone: int = 0
    """The add that has it to itself."""
    preemptions: int = 0
    work: asyncio.Event = field(default_factory=asyncio.Event)
    _refusals: list[Refusal] = field(default_factory=list)
    _answers: list[TokenDelta] = field(default_factory=list)
    _notices: list[MoveNotice] = field(default_factory=list)

    # --- what the router calls ---

    def add(
        self, request: Request, attempt: int, *, shared: bool = False, trial: int = 0, trial_tokens: int = 0
    ) -> int:
        self.sequence += 1
        self.added.append((request, attempt))
        if self.refuse_with is not None:
            self._refusals.append(Refusal(request.request_id, attempt, self.refuse_with))
        else:
            sampling = request.sampling
            text = self.codec.stage(sampling.stop, sampling.min_tokens) if self.codec is not None else None
            self.held[request.request_id] = Held(request, attempt, text, self.end_ids)
            self.alone = self.sequence if trial == Trial.ALONE else 0
        self.work.set()
        return self.sequence

    def abort(self, request_id: RequestId, attempt: int) -> None:
        self.aborted.append((request_id, attempt))
        self.coming.pop((request_id, attempt), None)
        if request_id in self.held and self.held[request_id].attempt == attempt:
            self._leave_target(self.held.pop(request_id))
        self.work.set()

    def resend_from(self, request_id: RequestId, attempt: int, index: int) -> None:
        self.resends.append((request_id, attempt, index))
        known = self.held.get(request_id) or self.done.get(request_id)
        if known is None or known.attempt != attempt:
            self._refusals.append(Refusal(request_id, attempt, RefusalReason.UNKNOWN_ATTEMPT))
        else:
            self._answers.append(known.delta(index))
        self.work.set()

    @property
    def entry(self) -> RosterEntry:
        return RosterEntry(self.replica_id, self.generation, "127.0.0.1", 1, "m")

    def move(self, request_id: RequestId, attempt: int, number: int, target: RosterEntry) -> None:
        self.moves.append((request_id, attempt, number, target.replica_id))
        held = self._of(request_id, attempt)
        if held is not None and held.moves_to is None and self.moving is Manner.OBEY:
            held.moves_to = number, target
        elif held is not None and self.moving is Manner.REFUSE:
            self._notice(request_id, attempt, MoveStage.OFF, why="refused by the test")
        self.work.set()

    def call_off(self, request_id: RequestId, attempt: int) -> None:
        self.called_off.append((request_id, attempt))
        if (held := self._of(request_id, attempt)) is not None:
            self._stay(held, "called off")
        self.work.set()

    def grant(self, request_id: RequestId, attempt: int, index: int) -> int:
        self.sequence += 1
        self.grants.append((request_id, attempt, index))
        if self.taking is not Manner.SILENT:
            held = self.coming.pop((request_id, attempt), None)
            if held is None or self.taking is Manner.REFUSE or held.made != index:
                self._notice(request_id, attempt, MoveStage.OFF, why="not here")
            else:
                self.held[request_id] = held
                self._notice(request_id, attempt, MoveStage.TAKEN)
        self.work.set()
        return self.sequence

    def release(self, request_id: RequestId, attempt: int) -> None:
        self.released.append((request_id, attempt))
        if self._of(request_id, attempt) is not None:
            del self.held[request_id]
        self.work.set()

    # --- moves ---

    def _of(self, request_id: RequestId, attempt: int) -> Held | None:
        held = self.held.get(request_id)
        return held if held is not None and held.attempt == attempt else None

    def _notice(self, request_id: RequestId, attempt: int, stage: MoveStage, index: int = 0, why: str = "") -> None:
        self._notices.append(MoveNotice(request_id, attempt, stage, index, why))

    def _target_of(self, held: Held) -> FakeReplica | None:
        assert held.moves_to is not None
        entry = held.moves_to[1]
        target = self.peers.get(entry.replica_id)
        return target if target is not None and target.generation == entry.generation else None

    def _leave_target(self, held: Held) -> None:
        """The source's word that nothing will come."""
        if held.moves_to is not None and (target := self._target_of(held)) is not None:
            target.coming.pop((held.request.request_id, held.moves_to[0]), None)

    def _stay(self, held: Held, why: str) -> None:
        if held.moves_to is not None:
            self._leave_target(held)
            held.moves_to, held.frozen = None, False
            self._notice(held.request.request_id, held.attempt, MoveStage.OFF, why=why)

    def _freeze(self, held: Held) -> None:
        """All of it goes to the target, or it stays."""
        assert held.moves_to is not None
        request, number, target = held.request, held.moves_to[0], self._target_of(held)
        if target is None or not target.room or target.state is ReplicaState.DRAINING:
            self._stay(held, "refused by the target")
            return
        held.frozen, held.running = True, False
        sampling = msgspec.structs.replace(request.sampling, prompt_logprobs=None)
        state = msgspec.structs.replace(request, emitted_ids=tuple(held.ids), sampling=sampling)
        text = self.codec.stage(sampling.stop, sampling.min_tokens) if self.codec is not None else None
        target.coming[request.request_id, number] = Held(state, number, text, held.end_ids)
        self._notice(request.request_id, held.attempt, MoveStage.FROZEN, held.made)

    # --- what the test calls ---

    def expire(self) -> None:
        """What is frozen has waited too long for its router's word, and so has what came."""
        self.coming.clear()
        for held in list(self.held.values()):
            if held.frozen:
                self._stay(held, "expired")

    def connect(self) -> FakeReplica:
        """Come up, or come back; what was made in between is sent only if it is asked for."""
        self.frames.clear()
        self.listener.link_up(self, self.report())
        return self

    def break_link(self) -> None:
        """The frames that were under way are lost with the link; what the engine has is not."""
        self.frames.clear()
        self.listener.link_down(self.replica_id, self.generation)

    def die(self) -> None:
        self.held.clear()
        self.coming.clear()
        self.frames.clear()
        self.listener.replica_lost(self.replica_id, self.generation, "killed by the test")

    def forget(self, request_id: RequestId) -> None:
        self.held.pop(request_id, None)
        self.done.pop(request_id, None)

    def fail(self, *names: RequestId, error: str = "it failed") -> None:
        """End these with an error, and put that under way."""
        for name in names:
            held = self.done[name] = self.held.pop(name)
            self._leave_target(held)
            held.finish, held.error = FinishReason.ERROR, error
            self.frames.append(StepFrame(self.report(), (held.delta(held.made),)))

    def step(self) -> None:
        """Run one iteration and put its frame under way."""
        for held in list(self.held.values()):
            if held.moves_to is not None and not held.frozen:
                self._freeze(held)
        live = [held for held in self.held.values() if not held.frozen]
        order = sorted(live, key=lambda h: (-h.request.priority, h.request.arrived_unix_s))
        chosen = order[: self.slots]
        preempted = [self._preempt(h, chosen) for h in order[self.slots :] if h.running]
        deltas = list(self._answers)
        for held in chosen:
            held.running, held.keeps = True, False
            index = held.made
            held.end_at_length()
            for _ in range(self.tokens_per_step):
                if held.finish is None:
                    held.make(self.script(held.request, held.made))
            deltas.append(held.delta(index))
            if held.finish is not None:
                self.done[held.request.request_id] = self.held.pop(held.request.request_id)
        notices = tuple(self._notices)
        refusals, report = tuple(self._refusals), self.report()
        self.frames.append(StepFrame(report, tuple(deltas), refusals, tuple(preempted), moves=notices))
        self._answers.clear()
        self._notices.clear()
        self._refusals.clear()

    def deliver(self) -> None:
        """Hand over every frame that is under way, in order."""
        frames, self.frames = self.frames, []
        for frame in frames:
            self.listener.frame(self.replica_id, self.generation, frame)

    def turn(self) -> None:
        self.step()
        self.deliver()

    def send(self, *deltas: TokenDelta, refusals: tuple[Refusal, ...] = ()) -> None:
        """Hand over a frame of the test's own making."""
        self.listener.frame(self.replica_id, self.generation, StepFrame(self.report(), deltas, refusals))

    def beat(self) -> None:
        """The report of every 100 ms."""
        self.send()

    async def run(self) -> None:
        """Turn whenever there is work, until cancelled."""
        while True:
            await self.work.wait()
            self.turn()
            if not self.held:
                self.work.clear()
            await asyncio.sleep(0)

    def report(self) -> ReplicaReport:
        return ReplicaReport(
            replica_id=self.replica_id,
            generation=self.generation,
            state=self.state,
            observed_unix_s=0.0,
            load=EngineLoad(
                slots_total=self.slots,
                blocks_total=self.blocks,
                blocks_free=self.blocks - sum(h.blocks for h in self.held.values() if h.running or h.keeps or h.frozen),
                block_size_tokens=16,
                running=self._loads(running=True),
                waiting=self._loads(running=False),
                preemptions_total=self.preemptions,
                step_tokens=self.step_tokens,
            ),
            step_age_s=self.step_age_s,
            applied_sequence=self.sequence,
            trial=self.trial,
            others=self.others,
            alone=self.alone,
        )

    def _preempt(self, held: Held, chosen: list[Held]) -> Preempted:
        held.running = False
        held.keeps = self.means is PreemptionMeans.PAUSE
        self.preemptions += 1
        newest = next(h.request.request_id for h in chosen if not h.running)
        freed, again = (0, 0) if held.keeps else (held.blocks, held.made)
        return Preempted(held.request.request_id, held.attempt, newest, freed, again, self.means)

    def _loads(self, *, running: bool) -> tuple[PriorityLoad, ...]:
        chosen = sorted((h for h in self.held.values() if h.running is running), key=lambda h: h.request.priority)
        grouped = [(p, list(g)) for p, g in groupby(chosen, key=lambda h: h.request.priority)]
        return tuple(
            PriorityLoad(
                p,
                len(g),
                sum(h.blocks for h in g if running or h.keeps),
                sum(len(h.request.prompt_ids) - 1 for h in g if not h.made),
            )
            for p, g in grouped
        )


class ManualClock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    def unix(self) -> float:
        return 1_700_000_000.0 + self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


class Bench:
    """A core on a manual clock, and the streams of what was submitted to it."""

    def __init__(self, config: RouterConfig | None = None, *, wakes: bool = False) -> None:
        self.config = config or RouterConfig()
        self.clock = ManualClock()
        self.registry = CollectorRegistry()
        metrics = RouterMetrics(self.registry)
        self.core = RouterCore(self.config, self.clock, random.Random(1), metrics, wakes=wakes)
        self.streams: dict[RequestId, Stream] = {}
        self.texts: dict[RequestId, str] = {}
        self.scores: dict[RequestId, list[Scores]] = {}
        self.peers: dict[ReplicaId, FakeReplica] = {}

    def replica(self, name: str = "r1", **settings: Any) -> FakeReplica:
        replica = FakeReplica(self.core, ReplicaId(name), peers=self.peers, **settings)
        self.peers[replica.replica_id] = replica
        return replica.connect()

    def submit(
        self,
        name: str,
        priority_class: str = "standard",
        *,
        tokens: int = 4,
        prompt: int = 8,
        stated: int | None = None,
        tenant: str = "t",
        terms: Terms = NO_TERMS,
        **sampling: Any,
    ) -> Request:
        """Submit a request; its arrival is stamped now, and the clock moves on by a millisecond."""
        priority = next(c.priority for c in self.config.classes if c.name == priority_class)
        request = Request(
            request_id=RequestId(name),
            tenant=tenant,
            priority=priority,
            priority_class=priority_class,
            arrived_unix_s=self.clock.unix(),
            prompt_ids=tuple(range(1, prompt + 1)),
            sampling=Sampling(max_tokens=tokens, seed=0, **sampling),
            stated_output_tokens=stated,
        )
        self.clock.advance(0.001)
        self.streams[request.request_id] = stream = Stream(Buffer(self.config.max_stream_bytes))
        self.core.submit(((request, stream),), terms)
        return request

    def text(self, request: Request) -> str:
        """All text so far; what came with it is added to `scores`."""
        request_id = request.request_id
        batch = take_now(self.streams[request_id])
        self.texts[request_id] = self.texts.get(request_id, "") + (batch.text if batch else "")
        self.scores.setdefault(request_id, []).extend(batch.scores if batch else ())
        return self.texts[request_id]

    def outcome(self, request: Request) -> Outcome | None:
        ending = self.streams[request.request_id].ending
        return None if ending is None else ending.outcome

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0


def take_now(stream: Stream) -> Batch | None:
    """What a consumer that is never late would have taken; None where it would wait."""
    return stream.drain() if stream.waits else None
