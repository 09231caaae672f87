"""Our scheduler in vLLM's core, with one and with two steps in flight: nothing is lost, and order is kept."""

from __future__ import annotations

import random

import msgspec
import pytest

from cluster.config import EngineConfig, Order
from cluster.engine.vllm.translate import core_request
from cluster.engine.vllm.wire import core_id, decode_handle
from cluster.model import ModelFolder
from cluster.types import PreemptionMeans, Request
from tests.vllm.core_kit import Core, make_core, undisturbed
from tests.vllm.later_connector import BROKEN
from tests.vllm.vllm_kit import request

SMALL: dict[str, object] = {
    "kind": "vllm",
    "slots": 4,
    "step_token_budget": 24,
    "block_size_tokens": 4,
    "blocks": 32,
    "max_model_len": 100,
}

depths = pytest.mark.parametrize("depth", [1, 2])


BY_MEMORY: dict[str, object] = {"vllm": {"gpu_memory_utilization": 0.5}}


def config_of(**changes: object) -> EngineConfig:
    return EngineConfig.model_validate({**SMALL, **changes})


def core(model: ModelFolder, depth: int, **changes: object) -> Core:
    return make_core(model, config_of(**changes), depth=depth)


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
    """Random arrivals, priorities, lengths, aborts, freezings, parkings and resumes, in a pool a third as large as the
    demand. Some of the frozen go on, some are aborted, some are released and come back as another attempt."""
    rng = random.Random(seed)
    c = core(tiny_model, depth, order=order, blocks=rng.choice([25, 40]), prefix_cache=rng.random() < 0.7)
    live: dict[str, Request] = {}
    still: list[str] = []
    aborted: set[str] = set()
    attempts: dict[str, int] = {}

    def go_on(name: str) -> None:
        """If it is frozen, and not only about to be."""
        if name in c.ended or (name not in c.frozen and c.scheduler.call_places().get(name) != "parked"):
            return
        if name in c.frozen and rng.random() < 0.5:
            r = live.pop(name)
            moved = msgspec.structs.replace(r, emitted_ids=(*r.emitted_ids, *c.outputs[name]))
            c.call("release", name)
            assert name not in c.scheduler.call_places()
            attempts[r.request_id] = attempts.get(r.request_id, 0) + 1
            live[c.add(moved, attempts[r.request_id], moved=True)] = moved
        else:
            c.call("thaw", name)

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
                r = msgspec.structs.replace(r, emitted_ids=emitted)
            live[c.add(r)] = r
        some = [name for name in live if name not in c.ended]
        if some and rng.random() < 0.03:
            name = rng.choice(some)
            c.abort(name)
            aborted.add(name)
        if some and rng.random() < 0.08:
            name = rng.choice(some)
            if name not in c.ended:
                c.call(rng.choice(["freeze", "park"]), name)
                still.append(name)
        if still and rng.random() < 0.3:
            go_on(still.pop(rng.randrange(len(still))))
        c.step()
        places = list(c.scheduler.call_places().values())
        assert places.count("running") <= c.slots
    while any(place in ("frozen", "parked") for place in c.scheduler.call_places().values()):
        for name, place in c.scheduler.call_places().items():
            if place in ("frozen", "parked"):
                go_on(name)
        c.step()
    c.drain()
    for name, r in live.items():
        if name in aborted:
            assert undisturbed(r)[: len(c.outputs[name])] == c.outputs[name]
        else:
            assert c.outputs[name] == undisturbed(r), name
            assert name in c.ended
    check_all_given_back(c)


@depths
def test_a_frozen_request_is_settled_when_nothing_of_it_is_on_its_way_and_stays_out_of_every_plan(
    tiny_model: ModelFolder, depth: int
) -> None:
    """4 slots, 32 blocks. The frozen holds some of each, and an urgent flood wants all."""
    c = core(tiny_model, depth)
    names = [c.add(request(f"r {n}", prompt=8, max_tokens=30, priority=-10)) for n in range(4)]
    for _ in range(6):
        c.step()
    frozen = names[0]
    c.call("freeze", frozen)
    told = len(c.outputs[frozen])
    assert (frozen in c.frozen) is (depth == 1), "with two steps in flight one is still running"
    while frozen not in c.frozen:
        c.step()
        assert frozen not in c.ran
    assert len(c.outputs[frozen]) == told + (depth - 1)
    held = c.scheduler.kv_cache_manager.get_blocks(frozen).blocks[0]
    assert len(held) >= 3
    flood = [c.add(request(f"urgent {n}", prompt=30, max_tokens=8, priority=10)) for n in range(6)]
    while not all(name in c.ended for name in flood):
        c.step()
        assert frozen not in c.ran
    assert all(p.request_id not in frozen for p in c.preempted)
    assert c.scheduler.kv_cache_manager.get_blocks(frozen).blocks[0] == held
    others = [name for name in names if name != frozen]
    c.drain()  # nothing but a frozen one needs no steps
    assert all(name in c.ended for name in others)
    late = c.add(request("new", prompt=8, max_tokens=4, priority=-10, arrived=0.0))
    c.call("thaw", frozen)
    c.step()
    assert c.ran[frozen] == 1, "it decodes on, and none of it is run again"
    assert list(c.ran) == [frozen, late]
    c.drain()
    assert len(c.outputs[frozen]) == 30
    check_all_given_back(c)


def test_a_request_that_ends_with_what_was_on_its_way_is_never_said_to_be_frozen(tiny_model: ModelFolder) -> None:
    c = core(tiny_model, 2)
    r = request("r", prompt=4, max_tokens=3)
    name = c.add(r)
    state = c.scheduler.requests[name]
    while state.num_tokens + state.num_output_placeholders < 4 + 3:
        c.step()
    assert len(c.outputs[name]) < 3
    c.call("freeze", name)
    c.drain()
    assert c.frozen == {}
    assert c.outputs[name] == undisturbed(r)
    c.call("freeze", name)
    assert c.frozen == {}
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


@depths
@pytest.mark.parametrize("budget", [24, 200])
def test_choices_of_one_prompt_compute_its_full_blocks_once(tiny_model: ModelFolder, depth: int, budget: int) -> None:
    """4 of 61 tokens: 15 blocks of 4, and one token more, which each runs for itself."""
    c = core(tiny_model, depth, blocks=60, step_token_budget=budget)
    prompt = request("n", prompt=61).prompt_ids
    choices = [
        request("n", prompt=prompt, max_tokens=5, choice=n, temperature=1.0, seed=3, arrived=1.0) for n in range(4)
    ]
    for r in choices:
        c.add(msgspec.structs.replace(r, group_id="g"))
    c.drain()
    assert c.note is not None
    assert c.note.load.prefill_tokens_total == 61 + 3
    assert c.note.load.prefix_hit_tokens_total == 3 * 60
    assert c.preempted == []


def test_a_pool_that_does_not_hold_one_request_of_full_length_is_refused(tiny_model: ModelFolder) -> None:
    """Where the number of blocks follows from a GPU's memory nobody else has looked at it."""
    with pytest.raises(ValueError, match="24 blocks of 4 tokens do not hold one request of max_model_len"):
        make_core(tiny_model, config_of(max_model_len=97, **BY_MEMORY), depth=1, pool_blocks=24)


def test_where_blocks_follow_from_memory_plan_and_load_go_by_the_pool(tiny_model: ModelFolder) -> None:
    """The configuration says 32, of which the four would need 28; the pool has 26."""
    c = make_core(tiny_model, config_of(max_model_len=100, **BY_MEMORY), depth=1, pool_blocks=26)
    requests = [request(f"r {n}", prompt=20, max_tokens=8) for n in range(4)]
    names = [c.add(r) for r in requests]
    c.step()
    c.step()
    assert c.note is not None
    assert c.note.load.blocks_total == 26
    c.drain()
    assert [c.outputs[name] for name in names] == [undisturbed(r) for r in requests]
    check_all_given_back(c)


def test_a_request_without_our_note_is_refused(tiny_model: ModelFolder) -> None:
    from vllm.v1.request import Request as VllmRequest  # type: ignore[import-not-found, unused-ignore]

    c = core(tiny_model, 1)
    r = request("bare")
    bare = core_request(r, 0, ())
    bare.sampling_params.extra_args = None  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="without its note"):
        c.scheduler.add_request(VllmRequest.from_engine_core_request(bare, None))


# --- with a KV connector that brings and fetches blocks between steps ---

CONNECTOR = {
    "kv_connector": "LaterConnector",
    "kv_connector_module_path": "tests.vllm.later_connector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"folder": "/nowhere"},
}


def connected_core(model: ModelFolder, depth: int, **changes: object) -> Core:
    return core(model, depth, vllm={"kv_transfer_config": CONNECTOR}, **changes)


def handed_on(c: Core, r: Request, name: str, attempt: int) -> tuple[Request, dict[str, object] | None]:
    """A frozen request as the next attempt, and what its connector says."""
    params = decode_handle(c.frozen.pop(name))
    return msgspec.structs.replace(r, emitted_ids=(*r.emitted_ids, *c.outputs[name])), params


@depths
@pytest.mark.parametrize("seed", range(12))
def test_with_a_connector_under_any_load_every_request_ends_with_the_output_that_it_has_alone(
    tiny_model: ModelFolder, depth: int, seed: int
) -> None:
    """Random arrivals, priorities, aborts, moves that are done, fail to be read or are called off, in a small pool."""
    rng = random.Random(seed)
    c = connected_core(tiny_model, depth, blocks=rng.choice([25, 40]), prefix_cache=rng.random() < 0.7)
    live: dict[str, Request] = {}
    aborted: set[str] = set()
    lives = iter(range(1, 10**6))

    def go_on(name: str) -> None:
        r, attempt = live.pop(name), next(lives)
        moved, params = handed_on(c, r, name, attempt)
        kind = rng.random()
        if kind < 0.2 or params is None:  # called off, or nothing had been computed
            again = core_id(r.request_id, 0, attempt)
            live[c.add(moved, 0, name=again, moved=True)] = moved
            return
        if kind < 0.4:
            params["path"] = f"{params['path']} {BROKEN}"
        live[c.add(moved, attempt, moved=True, kv_transfer_params=params)] = moved

    for turn in range(300):
        if turn < 150 and rng.random() < 0.3:
            r = request(
                f"p{rng.randrange(6)}",  # labels repeat: prompts are shared
                prompt=rng.choice([1, 3, 8, 20, 50]),
                max_tokens=rng.randint(1, 40),
                priority=rng.choice([-10, 0, 10]),
                arrived=rng.random() * 50,
            )
            live[c.add(r)] = r
        some = [name for name in live if name not in c.ended and name not in c.frozen]
        if some and rng.random() < 0.04:
            name = rng.choice(some)
            c.abort(name)
            aborted.add(name)
        elif some and rng.random() < 0.15:
            c.call("freeze", rng.choice(some))
        for name in list(c.frozen):
            if rng.random() < 0.3:
                go_on(name)
        c.step()
        assert list(c.scheduler.call_places().values()).count("running") <= c.slots
    while c.frozen or any(place == "frozen" for place in c.scheduler.call_places().values()):
        for name in list(c.frozen):
            go_on(name)
        c.step()
    c.drain()
    for name, r in live.items():
        whole = undisturbed(r)
        assert c.outputs[name] == (whole[: len(c.outputs[name])] if name in aborted else whole), name
        assert name in c.ended
    check_all_given_back(c)


@depths
def test_one_whose_blocks_are_brought_holds_no_slot_and_then_runs_its_last_token_alone(
    tiny_model: ModelFolder, depth: int
) -> None:
    """One slot. While the blocks come another has it; they come some turns later than they were asked for."""
    c = connected_core(tiny_model, depth, slots=1, prefix_cache=False)
    r = request("r", prompt=20, max_tokens=30, priority=10)
    name = c.add(r)
    while len(c.outputs[name]) < 4:
        c.step()
    c.call("freeze", name)
    while name not in c.frozen:
        c.step()
    assert name not in c.scheduler.call_places(), "it has left the core"
    assert c.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() < 32, "and its blocks are still there"
    other = c.add(request("other", prompt=4, max_tokens=25))
    moved, params = handed_on(c, r, name, 1)
    assert params is not None
    again = c.add(moved, 1, moved=True, kv_transfer_params=params)
    ran: list[dict[str, int]] = []
    while not c.outputs[again]:
        c.step()
        ran.append(c.ran)
        if "loading" in c.scheduler.call_places().values():
            assert c.scheduler.call_places()[again] == "loading"
    assert any(step == {other: 4} or step == {other: 1} for step in ran), "it had the slot meanwhile"
    assert next(step[again] for step in ran if again in step) == 1
    c.drain()
    assert c.outputs[again] == undisturbed(moved)
    check_all_given_back(c)


def test_an_idle_core_turns_only_until_its_blocks_have_been_sent(tiny_model: ModelFolder) -> None:
    c = connected_core(tiny_model, 1)
    name = c.add(request("r", prompt=20, max_tokens=30))
    for _ in range(3):
        c.step()
    c.call("freeze", name)
    assert name in c.frozen
    assert c.has_work
    assert c.note is not None
    assert c.note.load.blocks_free < 32
    c.drain(20)
    assert c.note.load.blocks_free == 32, "that they are free is told, though no step was run"
    check_all_given_back(c)
