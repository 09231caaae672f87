"""One suite over every batching mode with every order; a new one is tried as soon as configuration can name it.

Where the modes differ, and so their laws (`plan_laws`): static lets nobody in while anybody runs; static and dynamic
reserve all that a sequence can become, never grow and pad; continuous preempts for growth and pads nothing.
"""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest

from cluster.config import BatchingMode, EngineConfig, WithinClass
from cluster.config import Order as OrderName
from cluster.engine.scheduling.choose import order_for, planner_for
from cluster.engine.scheduling.order import Order
from cluster.engine.scheduling.plan import Planner, View
from cluster.engine.scheduling.sequence import SequenceState
from cluster.types import PreemptionMeans, RequestId
from tests.conformance.engine_kit import Output, collect, config, engine, gather, request, undisturbed
from tests.conformance.plan_laws import check_plan, random_scene, random_state, snapshot, start
from tests.conformance.plan_machine import Machine

MODES = tuple(BatchingMode)
ORDERS = (
    (OrderName.FCFS, WithinClass.FCFS),
    (OrderName.SJF, WithinClass.FCFS),
    (OrderName.SRPT, WithinClass.FCFS),
    (OrderName.PRIORITY, WithinClass.FCFS),
    (OrderName.PRIORITY, WithinClass.SJF),
)
PREEMPTIVE = {OrderName.SRPT, OrderName.PRIORITY}


@pytest.fixture(params=ORDERS, ids=lambda names: "-".join(names))
def names(request: pytest.FixtureRequest) -> tuple[OrderName, WithinClass]:
    value: tuple[OrderName, WithinClass] = request.param
    return value


@pytest.fixture
def order_name(names: tuple[OrderName, WithinClass]) -> OrderName:
    return names[0]


@pytest.fixture
def order(names: tuple[OrderName, WithinClass]) -> Order:
    return make_order(names, config())


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> BatchingMode:
    name: BatchingMode = request.param
    return name


@pytest.fixture
def planner(mode: BatchingMode) -> Planner:
    return planner_for(mode)


def make_order(names: tuple[OrderName, WithinClass], settings: EngineConfig) -> Order:
    return order_for(settings.model_copy(update={"order": names[0], "within_class": names[1]}))


def test_every_order_that_configuration_can_name_is_tried() -> None:
    assert {order for order, _ in ORDERS} == set(OrderName)
    assert {within for _, within in ORDERS} == set(WithinClass)


# --- orders ---


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
    for ahead, behind in pairwise(ordered):
        for other in ordered:
            if order.may_preempt(behind, other):
                assert order.may_preempt(ahead, other), "one may push out whom another ahead of him may not"


def test_only_the_preemptive_orders_push_out_and_never_an_equal(order_name: OrderName, order: Order) -> None:
    rng = random.Random(2)
    states = [random_state(rng, n) for n in range(80)]
    for state in states:
        state.key = order.key(state)
    pairs = [(a, b) for a in states for b in states if order.may_preempt(a, b)]
    assert bool(pairs) == (order_name in PREEMPTIVE)
    if order_name is OrderName.PRIORITY:
        assert all(a.priority > b.priority for a, b in pairs)


def test_started_work_goes_before_new_work_of_its_urgency_whatever_the_arrival_stamps(
    order_name: OrderName, order: Order
) -> None:
    """Under srpt only of equal deadlines: there new work may be more urgent because it is shorter."""
    rng = random.Random(2)
    old, new = random_state(rng, 1), random_state(rng, 2)
    new.priority = old.priority
    old.started, new.started = True, False
    old.arrived_unix_s, new.arrived_unix_s = 1.0, 0.0
    if order_name is OrderName.SRPT:
        new.arrived_unix_s = 1.0
        new.predicted_tokens, new.tokens = old.predicted_tokens, old.tokens
    assert order.key(old) < order.key(new)


# --- single plans ---


def test_thousands_of_random_plans_keep_every_law(
    mode: BatchingMode, planner: Planner, names: tuple[OrderName, WithinClass]
) -> None:
    """Public report: a request scheduled early in a step was preempted later in it, and the books still counted it."""
    preempted = shared = overtaken = blocked = yielded = padded = 0
    for seed in range(900):
        scene = random_scene(random.Random(seed), mode, lambda settings: make_order(names, settings))
        states = [*scene.view.waiting, *scene.view.running]
        before = snapshot(states)
        plan = planner(scene.view, scene.settings, scene.order)
        assert snapshot(states) == before, "planning changed something"
        assert planner(scene.view, scene.settings, scene.order) == plan, "equal views, different plans"
        try:
            check_plan(scene, plan)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        preempted += bool(plan.preempted)
        shared += any(a.cached or a.source for a in plan.admitted)
        overtaken += bool(plan.overtaken)
        blocked += plan.blocked is not None
        yielded += bool(plan.yielded)
        padded += bool(plan.padding_tokens)
    assert min(preempted, shared) > 50
    assert overtaken > 5
    assert (blocked > 20) == (names[0] in PREEMPTIVE), "only one who may push out is kept out by the spared"
    assert (padded > 100) == (mode is not BatchingMode.CONTINUOUS)
    assert (yielded > 100) == (mode is not BatchingMode.STATIC and (names[0] in PREEMPTIVE or mode is not MODES[-1]))


def test_no_victim_was_unnecessary(mode: BatchingMode, planner: Planner, names: tuple[OrderName, WithinClass]) -> None:
    """With one urgent request: putting any one of its victims back would leave too few slots or blocks."""
    seen = 0
    for seed in range(700):
        scene = random_scene(random.Random(seed), mode, lambda settings: make_order(names, settings))
        settings, memory = scene.settings, scene.memory
        paused = [s for s in scene.view.waiting if s.blocks]
        view = scene.view._replace(waiting=[*scene.view.waiting[:1], *paused[1:]], paused=None)
        plan = planner(view, settings, scene.order)
        out = [p for p in plan.preempted if p.urgent is not None]
        if not out or len(plan.admitted) != 1:
            continue
        (admission,) = plan.admitted
        lost = [p.victim for p in plan.preempted if p.means is not PreemptionMeans.PAUSE]
        stay = set(view.running) - {p.victim for p in plan.preempted}
        grows = [s for s in stay if s.tokens > s.blocks * settings.block_size_tokens]  # it has a block, used or not
        for p in out:
            seen += 1
            others = [v for v in lost if v is not p.victim]
            kept = {b for s, t in memory.tables.items() if s not in others for b in t}
            full = p.victim.tokens > p.victim.blocks * settings.block_size_tokens
            regrows = p.victim.running and full and mode is BatchingMode.CONTINUOUS
            wanted = admission.blocks + admission.cached + len(grows) + regrows
            blocks_ok = wanted <= memory.total - len(kept)
            slots_ok = len(view.running) + 2 - sum(q.victim.running for q in plan.preempted) <= settings.slots
            if p.means is PreemptionMeans.PAUSE:
                assert not slots_ok, f"seed {seed}"
            else:
                assert not blocks_ok, f"seed {seed}: its blocks were not needed"
    assert (seen > 10) == (names[0] in PREEMPTIVE), "the others push nobody out"


def test_a_request_keeps_its_place_when_the_pool_runs_out(
    mode: BatchingMode, planner: Planner, order_name: OrderName, order: Order
) -> None:
    """Public report: a preempted request was overtaken by peers that had never started.

    A (arrived 1) runs; B (arrived 0) reaches the engine later. A is preempted and must be readmitted before B. Under
    srpt, B is as long as A, and arrives with it.
    """
    rng = random.Random(0)
    settings: EngineConfig = config(slots=2)
    a, b = random_state(rng, 1), random_state(rng, 2)
    for state, arrived in ((a, 1.0), (b, 1.0 if order_name is OrderName.SRPT else 0.0)):
        state.priority, state.arrived_unix_s, state.tokens, state.started = 0, arrived, 10, False
        state.limit_tokens, state.predicted_tokens = 12, 12.0
    start(a, settings.block_size_tokens, rng)
    a.blocks = a.computed = 0  # it was preempted
    for state in (a, b):
        state.key = order.key(state)
    waiting = sorted((a, b), key=lambda s: s.key)
    plan = planner(View(waiting, (), 3), settings, order)
    assert [x.sequence for x in plan.admitted] == [a]


# --- whole runs ---


def arrivals(rng: random.Random, count: int, longest: int) -> list[list[SequenceState]]:
    """Requests, some of which have siblings that share their prompt."""
    groups = []
    for n in range(count):
        prompt, priority = rng.randrange(1, longest // 2), rng.choice((-10, 0, 10))
        group: list[SequenceState] = []
        for choice in range(rng.choice((1, 1, 3))):
            limit = prompt + rng.randrange(1, longest - prompt)
            state = SequenceState(
                (RequestId(f"r{n}-{choice}"), 0),
                priority,
                float(n),
                tokens=prompt,
                limit_tokens=limit,
                predicted_tokens=rng.uniform(prompt + 1, limit),
            )
            state.leader = group[0] if group else None
            group.append(state)
        groups.append(group)
    return groups


@pytest.mark.parametrize(
    ("slots", "blocks", "host_blocks"),
    [pytest.param(4, 24, 0, id="blocks"), pytest.param(4, 24, 12, id="host"), pytest.param(3, 80, 12, id="slots")],
)
def test_everybody_ends_and_every_plan_on_the_way_keeps_every_law(
    mode: BatchingMode, names: tuple[OrderName, WithinClass], slots: int, blocks: int, host_blocks: int
) -> None:
    """Too few blocks, without and with room to swap to, or too few slots; siblings, and new estimates all the time."""
    rng = random.Random(5)
    settings = config(
        mode=mode,
        order=names[0],
        within_class=names[1],
        slots=slots,
        blocks=blocks,
        max_model_len=64,
        max_recomputes=1,
        max_overtakes=2,
        host_blocks=host_blocks,
        ageing_tokens_per_s=4.0,
        srpt_margin_tokens=2.0,
    )
    machine = Machine(settings, predict=lambda s: rng.uniform(s.tokens + 1, max(s.tokens + 1, s.limit_tokens)))
    groups = arrivals(rng, 25, settings.max_model_len)
    expected = {s for group in groups for s in group}
    ended: list[SequenceState] = []
    # A step computes a token of somebody. Nobody is computed more often than once, and once more for each preemption.
    steps_max = 3 * sum(s.limit_tokens for s in expected)
    steps = 0
    while groups or machine.live:
        if groups and (not machine.live or rng.random() < 0.3):
            for state in groups.pop(0):
                machine.add(state)
        ended.extend(machine.step()[1])
        steps += 1
        assert steps < steps_max, "it does not end"
    assert sorted(s.identity for s in ended) == sorted(s.identity for s in expected)
    assert len(machine.memory.free()) == blocks
    assert machine.host_blocks_free == host_blocks
    assert all(s.pushed_out <= settings.max_recomputes for s in ended)
    times = machine.means
    if mode is not BatchingMode.STATIC and slots == 3:
        assert machine.shared > 0, "no sibling shared a prompt"
        assert (times[PreemptionMeans.PAUSE] > 0) == (names[0] in PREEMPTIVE)
    if mode is BatchingMode.CONTINUOUS and slots == 4:
        assert times[PreemptionMeans.RECOMPUTE] > 5
        assert (times[PreemptionMeans.SWAP] > 0) == (host_blocks > 0)


def test_everybody_finishes_with_the_output_he_would_have_had_alone(
    mode: BatchingMode, names: tuple[OrderName, WithinClass]
) -> None:
    rng = random.Random(3)
    order_name, within = names
    settings = config(
        mode=mode,
        order=order_name,
        within_class=within,
        blocks=24,
        max_model_len=96,
        max_recomputes=2,
        host_blocks=16,
        ageing_tokens_per_s=1.0,
        srpt_margin_tokens=2.0,
    )
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
        for n in range(40)
    ]
    outputs: dict[str, Output] = {}
    for r in requests:
        target.add(r, 0)
        for _ in range(rng.randrange(20)):
            gather(target.step(), outputs)
    collect(target, outputs)
    never_preempts = mode is BatchingMode.STATIC or (mode is BatchingMode.DYNAMIC and order_name not in PREEMPTIVE)
    assert (target.load().preemptions_total == 0) == never_preempts
    assert (target.load().padding_tokens_total == 0) == (mode is BatchingMode.CONTINUOUS)
    for r in requests:
        alone, got = undisturbed(r, max_model_len=settings.max_model_len), outputs[r.request_id]
        assert (got.token_ids, got.text, got.finish, got.ends) == (alone.token_ids, alone.text, alone.finish, 1)


# --- what is particular to a mode ---


def literal(name: str, prompt: int, output: int, *, priority: int = 0, arrived: float = 0.0) -> SequenceState:
    return SequenceState((RequestId(name), 0), priority, arrived, tokens=prompt, limit_tokens=prompt + output)


def test_a_static_batch_costs_rows_times_the_longest_prompt_and_then_rows_times_the_longest_output() -> None:
    """Prompts of 3, 8 and 20 and outputs of 2, 5 and 9 tokens; 16 tokens per step are five columns of three rows."""
    machine = Machine(config(mode=BatchingMode.STATIC, order=OrderName.FCFS, blocks=64, max_model_len=64))
    for n, (prompt, output) in enumerate(((3, 2), (8, 5), (20, 9))):
        machine.add(literal(f"r{n}", prompt, output, arrived=float(n)))
    late = literal("late", 1, 1, arrived=9.0)
    computed = padding = 0
    drew: list[int] = []
    for step in range(math.ceil(20 / 5) + 9 - 1):
        plan, _ = machine.step()
        computed += sum(c.tokens for c in plan.chunks)
        padding += plan.padding_tokens
        drew.append(sum(c.draws for c in plan.chunks))
        if step == 0:
            machine.add(late)
        assert late in machine.waiting.items
    assert not machine.running.items
    assert drew == [0, 0, 0, 3, 3, 2, 2, 2, 1, 1, 1, 1], "all draw their first token together, then each till its end"
    assert computed == (3 + 8 + 20) + (1 + 4 + 8)
    assert computed + padding == 3 * 20 + 3 * 8
    assert [a.sequence for a in machine.step()[0].admitted] == [late]


def test_in_dynamic_batching_decodes_stand_still_for_the_joiners_padded_prompts() -> None:
    """A decode runs when prompts of 4 and 20 join: two rows of eight columns, 20 columns, three steps without it."""
    machine = Machine(config(mode=BatchingMode.DYNAMIC, order=OrderName.FCFS, blocks=64, max_model_len=64))
    first = literal("first", 2, 30)
    machine.add(first)
    machine.step()
    for n, prompt in enumerate((4, 20)):
        machine.add(literal(f"r{n}", prompt, 5, arrived=1.0 + n))
    padding = 0
    for _ in range(3):
        tokens = first.tokens
        plan, _ = machine.step()
        padding += plan.padding_tokens
        assert plan.yielded == (first,)
        assert first.tokens == tokens
    assert padding == 20 - 4
    plan, _ = machine.step()
    assert len(plan.chunks) == 3
    assert not plan.padding_tokens


def test_in_dynamic_batching_a_stream_that_ends_with_its_first_tokens_lets_decodes_run_every_other_step() -> None:
    machine = Machine(config(mode=BatchingMode.DYNAMIC, order=OrderName.FCFS, blocks=64, max_model_len=64))
    first = literal("first", 2, 30)
    machine.add(first)
    machine.step()
    for n in range(80):
        machine.add(literal(f"r{n}", 4, 1, arrived=1.0 + n))
    for _ in range(20):
        before = first.tokens
        machine.step()
        machine.step()
        assert first.tokens == before + 1


def test_in_continuous_batching_no_decode_stands_still_for_two_steps_and_an_urgent_prompt_gets_half_the_budget() -> (
    None
):
    for budget, prompt in ((16, 16), (16, 17), (16, 100), (7, 60), (2, 9)):
        settings = config(slots=budget, step_token_budget=budget, blocks=2000, max_model_len=400)
        machine = Machine(settings)
        lows = [literal(f"low{n}", 1, 300, priority=-10, arrived=float(n)) for n in range(budget)]
        for low in lows:
            machine.add(low)
        while any(low.computed != low.tokens - 1 or low.tokens == 1 for low in lows):
            machine.step()
        urgent = literal("urgent", prompt, 1, priority=10)
        machine.add(urgent)
        steps = 0
        while urgent.tokens == prompt:
            machine.step()  # checks that nobody yields twice in a row
            steps += 1
        q, r = divmod(prompt, budget + 1)
        assert steps == 2 * q + (r > 0)
        assert machine.means[PreemptionMeans.PAUSE] == 1
