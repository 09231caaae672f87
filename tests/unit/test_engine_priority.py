"""Urgent work starts at once, and what it pushes aside loses nothing but time: what the embedded engine promises beyond the
laws of every engine (tests/conformance/port_laws.py)."""

from __future__ import annotations

import math
import random

import pytest

from cluster.engine.engine import Engine
from cluster.types import FinishReason, Preempted
from tests.conformance.engine_kit import Output, collect, config, engine, gather, request


def fill(target: Engine, *, max_tokens: int = 60, prompt: int = 3, priority: int = -10) -> list[str]:
    """Take every slot with less urgent decodes, each of which has given a token."""
    names = [f"low{n}" for n in range(target.config.slots)]
    for n, name in enumerate(names):
        target.add(request(name, prompt=prompt, priority=priority, arrived=float(n), max_tokens=max_tokens), 0)
    return names


def until_all_decode(target: Engine, names: list[str], outputs: dict[str, Output]) -> None:
    for _ in range(1000):
        if all(name in outputs for name in names):
            return
        gather(target.step(), outputs)
    raise AssertionError("the engine was never full")


@pytest.mark.parametrize("budget", [1, 2, 3, 5, 8, 16, 64])
@pytest.mark.parametrize("slots_per_budget", [0.5, 1.0])
@pytest.mark.parametrize("prompt", [1, 7, 48, 300])
def test_urgent_first_token_comes_within_the_stated_steps_and_no_decode_stalls(
    budget: int, slots_per_budget: float, prompt: int
) -> None:
    slots = max(1, int(budget * slots_per_budget))
    settings = config(slots=slots, step_token_budget=budget, blocks=4096, max_model_len=2000)
    target, outputs = engine(settings), dict[str, Output]()
    lows = fill(target, max_tokens=1500, prompt=1)
    until_all_decode(target, lows, outputs)
    target.add(request("urgent", prompt=prompt, priority=10, arrived=99.0, max_tokens=1), 0)

    steps, silent, longest = 0, dict.fromkeys(lows, 0), 0
    while "urgent" not in outputs:
        before = {name: len(outputs[name].token_ids) for name in lows}
        gather(target.step(), outputs)
        steps += 1
        running = sum(load.requests for load in target.load().running)
        assert running == slots - (outputs.get("urgent") is not None)
        for name in lows[:-1]:  # the last one is the victim
            silent[name] = 0 if len(outputs[name].token_ids) > before[name] else silent[name] + 1
            longest = max(longest, silent[name])
    pairs, rest = divmod(prompt, budget + 1)
    assert steps <= 2 * pairs + (1 if rest else 0)
    if prompt <= (6 if slots_per_budget < 1 else 3) * budget:
        assert steps <= 2 + math.ceil(prompt / budget)
    assert longest <= 1
    assert target.load().preemptions_total == 1


def test_a_prompt_longer_than_the_budget_never_stalls_running_decodes() -> None:
    """Slots are half of the budget, as by default: then no decode misses a step for an equal's prefill."""
    settings = config(slots=8, step_token_budget=16, blocks=1024, max_model_len=512)
    target, outputs = engine(settings), dict[str, Output]()
    names = [f"r{n}" for n in range(7)]
    for name in names:
        target.add(request(name, prompt=2, max_tokens=200), 0)
    until_all_decode(target, names, outputs)
    target.add(request("long", prompt=300, arrived=1.0, max_tokens=1), 0)
    steps = 0
    while "long" not in outputs:
        before = {name: len(outputs[name].token_ids) for name in names}
        gather(target.step(), outputs)
        steps += 1
        assert all(len(outputs[name].token_ids) == before[name] + 1 for name in names)
    assert steps == math.ceil(300 / (16 - 7))


def test_prefill_is_owed_an_eighth_of_the_budget_against_its_equals() -> None:
    settings = config(slots=16, step_token_budget=16, blocks=1024, max_model_len=512)
    target, outputs = engine(settings), dict[str, Output]()
    names = [f"r{n}" for n in range(15)]
    for name in names:
        target.add(request(name, prompt=2, max_tokens=300), 0)
    until_all_decode(target, names, outputs)
    target.add(request("long", prompt=100, arrived=1.0, max_tokens=1), 0)
    steps = 0
    while "long" not in outputs:
        gather(target.step(), outputs)
        steps += 1
    assert steps == 100 / (16 / 8)


def test_urgent_decodes_are_not_slowed_by_less_urgent_prefill() -> None:
    settings = config(slots=16, step_token_budget=16, blocks=1024, max_model_len=512)
    target, outputs = engine(settings), dict[str, Output]()
    names = [f"r{n}" for n in range(15)]
    for name in names:
        target.add(request(name, prompt=2, max_tokens=80, priority=10), 0)
    until_all_decode(target, names, outputs)
    target.add(request("fill", prompt=100, max_tokens=1), 0)
    while not outputs["r0"].ends:
        before = {name: len(outputs[name].token_ids) for name in names}
        gather(target.step(), outputs)
        assert all(len(outputs[n].token_ids) == before[n] + 1 for n in names if not outputs[n].ends)
    assert "fill" in collect(target, outputs)


def test_nobody_is_preempted_where_it_would_not_make_room() -> None:
    """The pool is held by an equal of the urgent request; the one less urgent request has too few blocks to help."""
    settings = config(slots=4, blocks=16, block_size_tokens=4, max_model_len=64)
    target, outputs = engine(settings), dict[str, Output]()
    target.add(request("big", prompt=44, priority=10, max_tokens=8), 0)
    target.add(request("low", prompt=3, priority=0, max_tokens=30), 0)
    until_all_decode(target, ["big", "low"], outputs)
    target.add(request("urgent", prompt=20, priority=10, arrived=1.0), 0)
    result = target.step()
    gather(result, outputs)
    assert result.preempted == ()
    assert "urgent" not in outputs
    assert result.load.urgent_blocked_total == 0, "nobody was spared: there was nobody to take"
    collect(target, outputs)
    assert all(o.ends == 1 for o in outputs.values())


def test_of_several_victims_only_those_that_are_needed_are_preempted() -> None:
    """The last in order holds a block, the one before it fourteen; fourteen are needed: only that one goes."""
    settings = config(slots=4, blocks=16, max_model_len=64)
    target, outputs = engine(settings), dict[str, Output]()
    target.add(request("large", prompt=53, priority=-10, max_tokens=3), 0)
    target.add(request("small", prompt=2, priority=-10, arrived=1.0, max_tokens=40), 0)
    until_all_decode(target, ["large", "small"], outputs)
    target.add(request("urgent", prompt=50, priority=10, max_tokens=2), 0)
    assert [p.request_id for p in target.step().preempted] == ["large"]


def test_when_the_pool_is_empty_the_last_in_order_gives_way_and_contributes_nothing() -> None:
    """Public report: two less urgent decodes and an urgent one whose next token needs a block, while none is free."""
    settings = config(slots=3, blocks=12, block_size_tokens=4, max_model_len=48)
    target, outputs = engine(settings), dict[str, Output]()
    target.add(request("low1", prompt=15, priority=-10, arrived=0.0, max_tokens=33), 0)
    target.add(request("low2", prompt=14, priority=-10, arrived=1.0, max_tokens=33), 0)
    until_all_decode(target, ["low1", "low2"], outputs)
    target.add(request("urgent", prompt=6, priority=10, arrived=2.0, max_tokens=40), 0)
    preempted: list[Preempted] = []
    while not preempted:
        result = target.step()
        preempted.extend(result.preempted)
        gather(result, outputs)
        target.check_integrity()
    assert preempted[0].request_id == "low2"
    assert preempted[0].for_request_id is None
    assert "low2" not in {d.request_id for d in result.deltas}
    collect(target, outputs)
    assert all(o.finish is FinishReason.LENGTH and o.ends == 1 for o in outputs.values())


def test_at_one_and_a_half_times_the_pools_demand_nobody_is_preempted_more_than_four_times() -> None:
    """Public report: the same request was chosen as victim again and again. 1,000 requests of one priority.

    A request holds on average (prompt + half of its output) tokens, 23 or 6.3 blocks of 4; 8 slots want 50, there are
    34.
    """
    rng = random.Random(7)
    settings = config(slots=8, blocks=34, max_model_len=96)
    assert 8 * (12.5 + 21 / 2) / 4 / 34 > 1.3
    target = engine(settings)
    times: dict[str, int] = {}
    ends: dict[str, int] = {}
    for n in range(1000):
        target.add(request(f"r{n}", prompt=rng.randrange(1, 25), max_tokens=rng.randrange(1, 42), arrived=float(n)), 0)
    while target.has_work:
        result = target.step()
        for notice in result.preempted:
            times[notice.request_id] = times.get(notice.request_id, 0) + 1
        for delta in result.deltas:
            ends[delta.request_id] = ends.get(delta.request_id, 0) + (delta.finish is not None)
    target.check_integrity()
    assert len(ends) == 1000
    assert set(ends.values()) == {1}
    assert sum(times.values()) > 100, "the pool was never short"
    assert max(times.values()) <= 4
