"""What is known beforehand, and several steps at once: the same engine as production's, the same cluster, to the last block."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum, auto

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.config import EngineConfig, Order
from cluster.engine.engine import Engine
from cluster.engine.prefix import numbers_of
from cluster.engine.scheduling.choose import order_for
from cluster.engine.scheduling.plan import Cost
from cluster.engine.scheduling.sequence import SequenceState
from cluster.ports import NO_KV, StepResult
from cluster.types import PrefixChange, Request, RequestId, Sampling, TokenDelta
from ops.sim.backend import END_TOKEN, ModelledBackend, no_text, prompt_for
from ops.sim.course import course_of
from ops.sim.faults import Fault, FaultKind
from ops.sim.steady import SteadyEngine
from ops.sim.step_time import a100
from ops.sim.world import simulate
from tests.sim.kit import cluster, engine, seen, work

COST = Cost(60e-6, 1e-3)


def _backend() -> ModelledBackend:
    return ModelledBackend(a100().models["llama-3-8b"], 1000, padded=False)


@dataclass(frozen=True)
class Come:
    """A request comes, behind all that have come."""

    prompt_tokens: int
    answer_tokens: int
    priority: int
    max_tokens: int
    seed: int


class Ask(Enum):
    STEP = auto()
    FEW_STEPS = auto()
    MANY_STEPS = auto()
    UNTOLD = auto()
    ABORT = auto()
    FREEZE = auto()
    THAW = auto()
    MOVE = auto()
    """Away, and here again as another attempt with half of its keys and values."""


STEPS = {Ask.STEP: 1, Ask.FEW_STEPS: 3, Ask.MANY_STEPS: 64}


def _state(one: Engine) -> object:
    """Everything that a later step could depend on."""
    lives = [
        (
            {name: getattr(live.state, name) for name in type(live.state).__slots__ if name != "leader"},
            live.output,
            live.registered,
            bytes(live.hashes._packed),
            one.pool.table(live.state.identity) if live.state.blocks else (),
        )
        for live in one._book.live.values()
    ]
    pool = one.pool
    order = [[s.identity for s in line.items] for line in (one._book.waiting, one._book.running)]
    # In the order in which they were registered, too.
    blocks = pool._free, list(pool._by_hash), list(pool._hashes.items()), list(pool._cached), pool.epoch
    return lives, order, one.load(), one._count, blocks, one._batch_rows


class _Heard:
    """Tokens by request, which come in order and once, and the prefixes that are said to be there."""

    def __init__(self) -> None:
        self.ids: dict[str, tuple[int, ...]] = {}
        self.ended: dict[str, object] = {}
        self.prefixes: set[int] = set()

    def take(self, deltas: Iterable[TokenDelta]) -> None:
        for delta in deltas:
            before = self.ids.get(delta.request_id, ())
            assert delta.index == len(before)
            assert len(delta.pieces) == len(delta.token_ids)
            self.ids[delta.request_id] = before + delta.token_ids
            if delta.finish is not None:
                self.ended[delta.request_id] = (delta.finish, delta.cached_tokens if len(before) == 0 else None)

    def take_prefixes(self, change: PrefixChange | None) -> None:
        if change is not None:
            self.prefixes = (self.prefixes | set(numbers_of(change.held))) - set(numbers_of(change.gone))


class Both:
    """One engine that takes steps one by one, production's, and one that takes several at once. The same is asked of both,
    and compared after each."""

    def __init__(self, config: EngineConfig) -> None:
        self.backend, steady_backend = _backend(), _backend()
        self._steady_backend = steady_backend
        self.one_by_one = Engine(config, self.backend, no_text(), (END_TOKEN,), COST)
        self.at_once = SteadyEngine(config, steady_backend, no_text(), (END_TOKEN,), COST)
        self._singles, self._several = _Heard(), _Heard()
        self._held: dict[RequestId, int] = {}
        """The attempt of each that has not ended."""
        self._frozen: list[RequestId] = []
        self._come = 0
        self.taken: Counter[str] = Counter()
        """Steady steps, by what else was in them."""

    def come(self, one: Come) -> None:
        rng = random.Random(one.seed)
        beginning = [rng.randrange(1, 4) for _ in range(one.prompt_tokens)]
        self._come += 1
        request = Request(
            request_id=RequestId(f"{self._come:04}"),
            tenant="t",
            priority=one.priority,
            priority_class="standard",
            arrived_unix_s=float(self._come),
            prompt_ids=(*beginning, *prompt_for(20, one.answer_tokens)),
            sampling=Sampling(max_tokens=one.max_tokens, seed=0, temperature=0.0),
        )
        assert self.one_by_one.add(request, 1) == self.at_once.add(request, 1)
        self._held[request.request_id] = 1

    def ask(self, what: Ask, number: int) -> None:
        """`number` says of whom."""
        names = sorted(self._held)
        name = names[number % len(names)] if names else None
        if (most := STEPS.get(what)) is not None:
            self._step(most, told_early=number % 4 == 0)
        elif what is Ask.UNTOLD:
            self._several.take(self.at_once.untold())
            assert self._several.ids == self._singles.ids
        elif what is Ask.THAW:
            if self._frozen:
                name = self._frozen.pop(number % len(self._frozen))
                for engine in (self.one_by_one, self.at_once):
                    assert engine.moves.thaw(name, self._held[name])
        elif name is not None and name not in self._frozen:
            self._tell_all_of(name)
            match what:
                case Ask.ABORT:
                    attempt = self._held.pop(name)
                    assert self.one_by_one.abort(name, attempt) == self.at_once.abort(name, attempt)
                case Ask.FREEZE:
                    self._frozen.append(name)
                    for engine in (self.one_by_one, self.at_once):
                        assert engine.moves.freeze(name, self._held[name]) is not None
                case Ask.MOVE:
                    for engine in (self.one_by_one, self.at_once):
                        _move(engine, name, self._held[name])
                    self.at_once.forget((name, self._held[name]))
                    self._held[name] += 1
                case _:
                    raise AssertionError(what)
        assert _state(self.one_by_one) == _state(self.at_once)
        self.at_once.check_integrity()

    def _tell_all_of(self, name: RequestId) -> None:
        """As ops/sim/engine.py does before it asks anything about an attempt."""
        delta = self.at_once.untold_of((name, self._held[name]))
        self._several.take([] if delta is None else [delta])

    def _step(self, most: int, told_early: bool) -> None:
        ahead_ms = self.at_once.steady_ms(most)
        assert len(ahead_ms) <= most
        if not self.one_by_one.has_work:
            return
        if ahead_ms:
            self._steps_at_once(ahead_ms)
        else:
            self._step_that_decides(told_early)

    def _steps_at_once(self, ahead_ms: list[float]) -> None:
        one_by_one = self.one_by_one
        for k, step_ms in enumerate(ahead_ms, 1):
            plan = one_by_one._planner(one_by_one._view(), one_by_one.config, one_by_one._order)
            decided = plan.preempted, plan.admitted, plan.overtaken, plan.blocked
            assert not any(decided)
            self.taken["prompt"] += any(chunk.tokens > 1 for chunk in plan.chunks)
            self.taken["yields"] += bool(plan.yielded)
            self.taken["waiting"] += bool(one_by_one._book.waiting.items)
            self.taken["all"] += 1
            result = self._single()
            assert all(delta.finish is None and delta.index for delta in result.deltas)
            assert self.backend.take_ms() == step_ms
            assert self.at_once.load_after(k) == result.load
        for part in (len(ahead_ms) // 2, -(-len(ahead_ms) // 2)):  # as it is when somebody asks in between
            if part:
                self.at_once.run_steady(part)
                said = self.at_once.result()
                self._several.take_prefixes(said.prefixes)
        assert said.load == result.load
        assert self._several.prefixes == self._singles.prefixes

    def _step_that_decides(self, told_early: bool) -> None:
        result = self._single()
        stepped = self.at_once.step()
        assert stepped.load == result.load
        assert stepped.preempted == result.preempted
        self._several.take_prefixes(stepped.prefixes)
        assert self._steady_backend.take_ms() == self.backend.take_ms()
        if told_early:  # before the step has ended: all but its own tokens
            self._several.take(d for d in self.at_once.untold(step_runs=True) if d.request_id in self._held)
        for delta in stepped.deltas:
            told = self.at_once.whole(delta) if delta.finish is not None else delta
            if delta.request_id in self._held:
                self._several.take([told])
        for delta in result.deltas:
            if delta.finish is not None:
                self._held.pop(delta.request_id, None)
        assert self._several.ended == self._singles.ended

    def _single(self) -> StepResult:
        result = self.one_by_one.step()
        self._singles.take(delta for delta in result.deltas if delta.request_id in self._held)
        self._singles.take_prefixes(result.prefixes)
        return result


def _move(engine: Engine, name: RequestId, attempt: int) -> None:
    moves = engine.moves
    state = moves.freeze(name, attempt)
    assert state is not None
    blocks = moves.exportable_blocks(name, attempt) // 2
    data = moves.export_blocks(name, attempt, 0, blocks) if blocks else memoryview(b"")
    assert moves.release(name, attempt)
    assert moves.import_begin(name, attempt + 1, moves.kv_format if blocks else NO_KV, blocks) is None
    if blocks:
        assert moves.import_blocks(name, attempt + 1, 0, data) is None
    assert moves.import_commit(state, attempt + 1) is None


COMES = st.builds(
    Come,
    prompt_tokens=st.integers(0, 400),
    answer_tokens=st.integers(1, 90),
    priority=st.sampled_from((-10, 0, 10)),
    max_tokens=st.sampled_from((30, 200)),
    seed=st.integers(0, 3),
)
ASKS = st.tuples(st.sampled_from([*Ask, Ask.FEW_STEPS, Ask.MANY_STEPS]), st.integers(0, 20))


@settings(max_examples=60, derandomize=True)
@given(
    st.lists(st.one_of(COMES, ASKS, ASKS, ASKS), min_size=10, max_size=60),
    st.sampled_from((Order.PRIORITY, Order.FCFS)),
    st.sampled_from((64, 16, 7)),
    st.integers(40, 100),
)
def test_steps_at_once_leave_an_engine_as_production_s_is_after_each_whatever_is_asked_in_between(
    happens: list[Come | tuple[Ask, int]], order: Order, budget_tokens: int, blocks: int
) -> None:
    """Lines, blocks, tables, hashes, estimates, counters, loads and times; tokens told once and in order."""
    both = Both(engine(order=order, blocks=blocks, slots=6, step_token_budget=budget_tokens, max_model_len=640))
    for one in happens:
        both.come(one) if isinstance(one, Come) else both.ask(*one)


@pytest.mark.parametrize("order", [Order.PRIORITY, Order.FCFS])
@pytest.mark.parametrize("seed", range(3))
def test_steps_at_once_are_production_s_over_a_long_time_and_prompts_yields_and_waiting_ones_are_in_them(
    seed: int, order: Order
) -> None:
    rng = random.Random(seed)
    both = Both(engine(order=order, blocks=90, slots=6, step_token_budget=(7, 8, 9)[seed]))
    rare = (Ask.UNTOLD, Ask.ABORT, Ask.FREEZE, Ask.MOVE)
    for _ in range(600):
        if rng.random() < 0.15:
            priority, max_tokens = rng.choice((-10, 0, 10)), rng.choice((30, 200))
            both.come(Come(rng.randrange(400), rng.randrange(1, 90), priority, max_tokens, rng.randrange(4)))
        if rng.random() < 0.05:
            both.ask(rng.choice(rare), rng.randrange(100))
            both.ask(rng.choice(tuple(STEPS)), rng.randrange(100))
            both.ask(Ask.THAW, 0)
        both.ask(rng.choice(tuple(STEPS)), rng.randrange(100))
    assert both.taken["all"] > 300
    assert both.taken["prompt"] > 150
    assert both.taken["waiting"] > 30
    assert order is Order.FCFS or both.taken["yields"] > 10


def test_a_course_is_one_step_long_where_not_the_same_yield_by_turns() -> None:
    """Of 15 decodes one must yield to a prompt of their urgency, for its two of 16 tokens. The last three have just done so:
    it is the fourth from the end, then the last, then the one before that."""
    decodes = [SequenceState((RequestId(f"{k:02}"), 1), 0, float(k), tokens=10, limit_tokens=99) for k in range(15)]
    prompt = SequenceState((RequestId("prompt"), 1), 0, 20.0, tokens=90)
    order = order_for(engine())
    for state in decodes:
        state.computed = 9
        state.key = order.key(state)
    prompt.key = order.key(prompt)
    config = engine(slots=16, step_token_budget=16)
    assert course_of(64, decodes, [prompt], None, config, order).steps == 44  # two tokens in each leave it the last two
    for state in decodes[-3:]:
        state.yields = 1
    course = course_of(64, decodes, [prompt], None, config, order)
    assert course.steps == 1
    assert course.resting == ({decodes[-4]}, {decodes[-1]})


@pytest.mark.parametrize("seed", range(3))
def test_a_cluster_is_the_same_event_by_event_whether_steps_are_taken_at_once(seed: int) -> None:
    """First tokens, ends, preemptions, replicas and the hash of all events; under too much work, with faults."""
    faults = (
        Fault(1.0, FaultKind.REPLICA_DEATH, 1.0, number=1),
        Fault(1.5, FaultKind.REPORTS_LATE, 0.5, number=2, delay_s=0.03),
        Fault(2.0, FaultKind.LINK_BREAK, 0.3, number=0),
    )
    arrivals, config = work(150, 50, seed, shared=True), cluster(3, routers=2, faults=faults)
    at_once = simulate(arrivals, config, seed=seed)
    one_by_one = simulate(arrivals, replace(config, fast_forward=False), seed=seed)
    assert at_once.preemptions > 0
    assert at_once.events < one_by_one.events
    assert seen(at_once) == seen(one_by_one)


@pytest.mark.parametrize("seed", range(2))
def test_what_a_replica_had_computed_that_dies_within_a_prompt_is_the_same_whether_steps_are_taken_at_once(
    seed: int,
) -> None:
    faults = (Fault(1.0, FaultKind.REPLICA_DEATH, 1.0, number=1),)
    arrivals, config = work(40, 30, seed), cluster(2, faults=faults, engine=engine(step_token_budget=9))
    at_once, one_by_one = (simulate(arrivals, replace(config, fast_forward=f), seed=seed) for f in (True, False))
    assert at_once.events < one_by_one.events
    assert seen(at_once) == seen(one_by_one)


def test_a_request_that_ends_by_its_limit_ends_there_whether_steps_are_taken_at_once() -> None:
    arrivals = [replace(a, max_tokens=7 + k % 5) for k, a in enumerate(work(40, 20))]
    at_once, one_by_one = (simulate(arrivals, replace(cluster(2), fast_forward=f)) for f in (True, False))
    assert seen(at_once) == seen(one_by_one)
    assert all(r.tokens <= 11 for r in at_once.requests)
