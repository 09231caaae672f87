"""Our scheduler in vLLM's core, with one and with two steps in flight: nothing is lost, and order is kept."""

from __future__ import annotations

import random

import pytest

from cluster.config import EngineConfig, Order
from cluster.engine.vllm.translate import core_request
from cluster.model import ModelFolder
from cluster.types import PreemptionMeans, Request
from tests.vllm.core_kit import Core, make_core, undisturbed
from tests.vllm.vllm_kit import request

SMALL = {"slots": 4, "step_token_budget": 24, "block_size_tokens": 4, "blocks": 32, "max_model_len": 100}

depths = pytest.mark.parametrize("depth", [1, 2])


def core(model: ModelFolder, depth: int, **changes: object) -> Core:
    return make_core(model, EngineConfig.model_validate({**SMALL, **changes}), depth=depth)


def check_all_given_back(c: Core) -> None:
    assert not c.scheduler.requests
    pool = c.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


@depths
@pytest.mark.parametrize("order", list(Order))
@pytest.mark.parametrize("seed", range(4))
def test_under_any_load_every_request_ends_with_the_output_that_it_has_alone(
    tiny_model: ModelFolder, depth: int, order: Order, seed: int
) -> None:
    """Random arrivals, priorities, lengths, aborts, parkings and resumes, in a pool a third as large as the demand."""
    rng = random.Random(seed)
    c = core(tiny_model, depth, order=order, blocks=rng.choice([25, 40]), prefix_cache=rng.random() < 0.7)
    live: dict[str, Request] = {}
    parked: list[str] = []
    aborted: set[str] = set()
    for turn in range(300):
        if turn < 150 and rng.random() < 0.3:
            label = f"p{rng.randrange(6)}"  # labels repeat: prompts are shared
            r = request(
                label,
                prompt=rng.choice([1, 3, 8, 20, 50]),
                max_tokens=rng.randint(1, 40),
                priority=rng.choice([-10, 0, 10]),
                arrived=rng.random() * 50,
            )
            cut = rng.choice([0, 0, 0, 1])
            if cut and r.sampling.max_tokens > 1:
                emitted = tuple(undisturbed(r)[: rng.randrange(1, r.sampling.max_tokens)])
                r = request(
                    label,
                    prompt=r.prompt_ids,
                    max_tokens=r.sampling.max_tokens,
                    priority=r.priority,
                    arrived=r.arrived_unix_s,
                    emitted=emitted,
                )
            live[c.add(r)] = r
        some = [name for name in live if name not in c.ended]
        if some and rng.random() < 0.03:
            name = rng.choice(some)
            c.abort(name)
            aborted.add(name)
        if some and rng.random() < 0.05:
            name = rng.choice(some)
            if name not in c.ended and c.scheduler.call_park(name):
                parked.append(name)
        if parked and rng.random() < 0.3:
            c.scheduler.call_unpark(parked.pop())
        c.step()
        assert list(c.scheduler.call_places().values()).count("running") <= SMALL["slots"]
    for name in parked:
        c.scheduler.call_unpark(name)
    c.drain()
    for name, r in live.items():
        if name in aborted:
            assert undisturbed(r)[: len(c.outputs[name])] == c.outputs[name]
        else:
            assert c.outputs[name] == undisturbed(r), name
            assert name in c.ended
    check_all_given_back(c)


@depths
def test_a_waiting_urgent_request_runs_in_the_very_next_step(tiny_model: ModelFolder, depth: int) -> None:
    c = core(tiny_model, depth)
    low = [c.add(request(f"low {n}", prompt=4, max_tokens=25, priority=-10)) for n in range(4)]
    for _ in range(6):
        c.step()
    assert set(c.ran) == set(low)
    urgent = c.add(request("urgent", prompt=12, max_tokens=5, priority=10))
    c.step()
    assert c.ran[urgent] == 12
    assert len(set(low) & set(c.ran)) == 3
    places = c.scheduler.call_places()
    assert sorted(places[name] for name in low) == ["paused", "running", "running", "running"]
    c.drain()
    assert [p.means for p in c.preempted] == [PreemptionMeans.PAUSE]


@depths
def test_a_long_urgent_prompt_comes_before_the_rest_of_a_less_urgent_one(tiny_model: ModelFolder, depth: int) -> None:
    c = core(tiny_model, depth, blocks=60)
    slow = c.add(request("slow", prompt=90, max_tokens=2, priority=-10))
    c.step()
    assert c.ran == {slow: 24}
    urgent = c.add(request("urgent", prompt=60, max_tokens=2, priority=10))
    steps = []
    for _ in range(3):
        c.step()
        steps.append(c.ran.get(urgent, 0))
    assert steps == [24, 24, 12]
    c.drain()


@depths
def test_a_less_urgent_prompt_gets_nothing_of_what_an_urgent_one_can_use(tiny_model: ModelFolder, depth: int) -> None:
    """The plan leaves 4 tokens of 24 to the one that runs; vLLM, which asks that one first, would give it all."""
    c = core(tiny_model, depth, blocks=60)
    c.add(request("slow", prompt=90, max_tokens=2, priority=-10))
    c.step()
    urgent = c.add(request("urgent", prompt=20, max_tokens=2, priority=10))
    c.step()
    assert c.ran[urgent] == 20
    c.drain()


@depths
def test_decodes_go_on_beside_a_long_prompt_of_their_own_priority(tiny_model: ModelFolder, depth: int) -> None:
    c = core(tiny_model, depth, blocks=60)
    decoding = [c.add(request(f"d {n}", prompt=4, max_tokens=30)) for n in range(3)]
    for _ in range(4):
        c.step()
    long = c.add(request("long", prompt=80, max_tokens=2))
    for _ in range(3):
        c.step()
        assert all(c.ran[name] == 1 for name in decoding)
        assert c.ran[long] == 24 - 3
    c.drain()


@depths
def test_equals_never_push_each_other_out_of_a_slot(tiny_model: ModelFolder, depth: int) -> None:
    c = core(tiny_model, depth, blocks=100)
    rng = random.Random(1)
    for n in range(12):
        c.add(request(f"e {n}", prompt=rng.randint(1, 20), max_tokens=rng.randint(1, 20), arrived=rng.random()))
        c.step()
    c.drain()
    assert c.preempted == []


@depths
def test_under_sjf_the_shortest_goes_first_and_under_srpt_it_also_pushes_out(
    tiny_model: ModelFolder, depth: int
) -> None:
    for order, preempts in ((Order.SJF, False), (Order.SRPT, True)):
        c = core(tiny_model, depth, order=order, slots=1)
        first = c.add(request("first", prompt=4, max_tokens=60, stated=60, arrived=0.0))
        c.step()
        c.step()
        long = c.add(request("long", prompt=4, max_tokens=50, stated=50, arrived=0.0))
        short = c.add(request("short", prompt=4, max_tokens=5, stated=5, arrived=0.0))
        ends: list[str] = []
        while c.has_work:
            c.step()
            ends.extend(name for name in (first, long, short) if name in c.ended and name not in ends)
        assert ends == ([short, long, first] if preempts else [first, short, long])
        assert bool(c.preempted) is preempts


@depths
def test_what_the_scheduler_learns_of_lengths_orders_what_comes_next(tiny_model: ModelFolder, depth: int) -> None:
    """Tenant `brief` says little and `wordy` much; nobody states a length; both may say 90."""
    c = core(tiny_model, depth, order=Order.SJF, slots=1, max_model_len=100, ageing_tokens_per_s=1000)
    for n in range(30):
        c.add(request(f"b {n}", prompt=4, max_tokens=2, tenant="brief"))
        c.add(request(f"w {n}", prompt=4, max_tokens=60, tenant="wordy"))
    c.drain(20_000)
    blocker = c.add(request("blocker", prompt=4, max_tokens=5))
    c.step()
    wordy = c.add(request("wordy", prompt=4, max_tokens=60, tenant="wordy", arrived=5000.0))
    brief = c.add(request("brief", prompt=4, max_tokens=60, tenant="brief", arrived=5000.0))
    while not (c.outputs[wordy] or c.outputs[brief]):
        c.step()
    assert c.outputs[brief]
    assert not c.outputs[wordy]
    assert blocker in c.ended
    c.drain()


def test_a_request_without_our_note_is_refused(tiny_model: ModelFolder) -> None:
    from vllm.v1.request import Request as VllmRequest  # type: ignore[import-not-found, unused-ignore]

    c = core(tiny_model, 1)
    r = request("bare")
    bare = core_request(r, 0, ())
    bare.sampling_params.extra_args = None  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="without its note"):
        c.scheduler.add_request(VllmRequest.from_engine_core_request(bare, None))
