"""One suite over every batching mode with every order; a new one is tried as soon as configuration can name it."""

from __future__ import annotations

import random

import pytest

from cluster.config import BatchingMode, EngineConfig
from cluster.config import Order as OrderName
from cluster.engine.scheduling.choose import order_for, planner_for
from cluster.engine.scheduling.order import Order
from cluster.engine.scheduling.plan import Planner, View
from tests.conformance.engine_kit import Output, collect, config, engine, gather, request, undisturbed
from tests.conformance.plan_laws import check_plan, random_state, random_view, snapshot, start

MODES = tuple(BatchingMode)
ORDERS = tuple(OrderName)


@pytest.fixture(params=ORDERS)
def order_name(request: pytest.FixtureRequest) -> OrderName:
    name: OrderName = request.param
    return name


@pytest.fixture
def order(order_name: OrderName) -> Order:
    return order_for(order_name)


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> BatchingMode:
    name: BatchingMode = request.param
    return name


@pytest.fixture
def planner(mode: BatchingMode) -> Planner:
    return planner_for(mode)


def test_keys_are_total_and_the_right_to_preempt_follows_them(order: Order) -> None:
    rng = random.Random(1)
    states = [random_state(rng, n) for n in range(60)]
    for state in states:
        state.key = order.key(state)
    assert len({s.key for s in states}) == len(states)
    ordered = sorted(states, key=lambda s: s.key)
    for n, urgent in enumerate(ordered):
        may = [order.may_preempt(urgent, other) for other in ordered]
        assert not any(may[: n + 1]), "somebody may push out himself or one ahead of him"
        assert may == sorted(may), "one may be pushed out, and one behind him may not"
        for other, allowed in zip(ordered, may, strict=True):
            assert not (allowed and urgent.priority == other.priority), "an equal may be pushed out"


def test_started_work_goes_before_new_work_of_its_priority_whatever_the_arrival_stamps(order: Order) -> None:
    rng = random.Random(2)
    old, new = random_state(rng, 1), random_state(rng, 2)
    new.priority = old.priority
    old.started, new.started = True, False
    old.arrived_unix_s, new.arrived_unix_s = 1.0, 0.0
    assert order.key(old) < order.key(new)


def test_ten_thousand_random_plans_keep_every_law(planner: Planner, order: Order) -> None:
    """Public report: a request scheduled early in a step was preempted later in it, and the books still counted it."""
    seen_preempted = seen_admitted = seen_yielded = 0
    for seed in range(10_000):
        rng = random.Random(seed)
        view, settings = random_view(rng, order)
        before = snapshot([*view.waiting, *view.running])
        plan = planner(view, settings, order)
        assert snapshot([*view.waiting, *view.running]) == before, "planning changed something"
        assert planner(view, settings, order) == plan, "equal views, different plans"
        try:
            check_plan(view, settings, order, plan)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        seen_preempted += bool(plan.preempted)
        seen_admitted += bool(plan.admitted)
        seen_yielded += bool(plan.yielded)
    assert min(seen_preempted, seen_admitted, seen_yielded) > 10, "the views are too tame to show anything"


def test_no_victim_was_unnecessary(planner: Planner, order_name: OrderName) -> None:
    """With one urgent request: putting any one of its victims back would leave too few slots or blocks."""
    order, seen = order_for(order_name), 0
    for seed in range(3_000):
        view, settings = random_view(random.Random(seed), order)
        view = view._replace(waiting=view.waiting[:1])
        plan = planner(view, settings, order)
        pushed = [p.victim for p in plan.preempted if p.urgent is not None]
        freed = view.blocks_free + sum(p.victim.blocks for p in plan.preempted)
        stay = set(view.running) - {p.victim for p in plan.preempted}
        grows = {s for s in stay if s.tokens > s.blocks * settings.block_size_tokens}
        used = len(grows) + sum(a.blocks for a in plan.admitted)
        for victim in pushed:
            seen += 1
            needs = victim.tokens > victim.blocks * settings.block_size_tokens
            slots_ok = len(stay) + 2 <= settings.slots
            assert not (slots_ok and used + needs <= freed - victim.blocks), f"seed {seed}"
    assert (seen > 100) == (order_name is not OrderName.FCFS), "first come, first served pushes nobody out"


def test_everybody_finishes_with_the_output_he_would_have_had_alone(mode: BatchingMode, order_name: OrderName) -> None:
    rng = random.Random(3)
    settings = config(mode=mode, order=order_name, blocks=24, max_model_len=96, max_recomputes=2)
    target = engine(settings)
    requests = [
        request(
            f"r{n}",
            prompt=rng.randrange(1, 50),
            priority=rng.choice((-10, 0, 10)),
            arrived=float(n),
            max_tokens=rng.randrange(1, 60),
            temperature=rng.choice((0.0, 0.8)),
            seed=n,
            stop=rng.choice(((), ("e",), ("th", "\n"))),
            ignore_eos=rng.random() < 0.5,
        )
        for n in range(60)
    ]
    outputs: dict[str, Output] = {}
    for r in requests:
        target.add(r, 0)
        for _ in range(rng.randrange(4)):
            gather(target.step(), outputs)
    collect(target, outputs)
    assert target.load().preemptions_total > 10
    for r in requests:
        alone, got = undisturbed(r, max_model_len=settings.max_model_len), outputs[r.request_id]
        assert (got.token_ids, got.text, got.finish, got.ends) == (alone.token_ids, alone.text, alone.finish, 1)


def test_a_request_keeps_its_place_when_the_pool_runs_out(mode: BatchingMode, order_name: OrderName) -> None:
    """Public report: a preempted request was overtaken by peers that had never started.

    A (arrived 1) runs; B (arrived 0) reaches the engine later. A is preempted and must be readmitted before B.
    """
    rng = random.Random(0)
    order, planner = order_for(order_name), planner_for(mode)
    settings: EngineConfig = config(slots=2)
    a, b = random_state(rng, 1), random_state(rng, 2)
    for state, arrived in ((a, 1.0), (b, 0.0)):
        state.priority, state.arrived_unix_s, state.tokens, state.started = 0, arrived, 10, False
    start(a, settings.block_size_tokens, rng)
    a.blocks = a.computed = 0  # it was preempted
    for state in (a, b):
        state.key = order.key(state)
    waiting = sorted((a, b), key=lambda s: s.key)
    plan = planner(View(waiting, (), 3), settings, order)
    assert [x.sequence for x in plan.admitted] == [a]
