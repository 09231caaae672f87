"""Long random walks: pools that are always too small, and everything that can happen to a request."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from cluster.config import BatchingMode, EngineConfig, Order, WithinClass
from cluster.engine.scheduling.sequence import SequenceState
from cluster.types import FinishReason, PreemptionMeans
from tests.conformance.arithmetic_backend import ArithmeticBackend
from tests.conformance.engine_kit import Output, backend_for, config, engine, gather, request, undisturbed
from tests.stateful.permute import permute_blocks
from tests.stateful.world import World, any_request, unreliable

PHASES = ("queued", "prefill", "decode")


def phase_of(state: SequenceState) -> str:
    if not state.running:
        return "queued"
    return "prefill" if state.tokens - state.computed > 1 else "decode"


@pytest.mark.parametrize(
    ("order", "count"),
    [*((order, 200) for order in Order), pytest.param(Order.PRIORITY, 1000, marks=pytest.mark.slow)],
)
def test_requests_a_third_of_them_cancelled_conserve_blocks_and_end_once_as_if_alone(order: Order, count: int) -> None:
    rng = random.Random(11)
    settings = config(order=order, slots=6, step_token_budget=12, blocks=28, max_model_len=64, max_recomputes=3)
    backend = backend_for(settings)
    target = engine(settings, backend)
    requests = [
        request(
            f"r{n}",
            prompt=rng.randrange(1, 40),
            priority=rng.choice((-10, 0, 0, 10)),
            arrived=float(n),
            max_tokens=rng.randrange(1, 24),
            temperature=rng.choice((0.0, 0.7)),
            seed=rng.randrange(-5, 2**40),
            stop=rng.choice(((), ("e",), ("in", "水"))),
            ignore_eos=rng.random() < 0.5,
        )
        for n in range(count)
    ]
    cancel_in = {r.request_id: rng.choice(PHASES) for r in requests if rng.random() < 0.45}
    cancelled = dict.fromkeys(PHASES, 0)
    aborted: set[str] = set()
    outputs: dict[str, Output] = {}
    coming = iter(requests)
    added = moved = 0
    while added < count or target.has_work:
        for _ in range(rng.choice((0, 0, 0, 0, 0, 3))):
            if r := next(coming, None):
                target.add(r, 0)
                added += 1
        for state in [*target._book.waiting.items, *target._book.running.items]:
            request_id, attempt = state.identity
            if phase_of(state) == cancel_in.get(request_id) and rng.random() < 0.5:
                cancelled[phase_of(state)] += 1
                assert target.abort(request_id, attempt)
                aborted.add(request_id)
        if rng.random() < 0.05:
            moved += permute_blocks(target, backend.move_blocks, rng)
        gather(target.step(), outputs)
        target.check_integrity()
        load = target.load()
        assert load.blocks_free + sum(p.blocks for p in (*load.running, *load.waiting)) >= settings.blocks
        assert sum(p.requests for p in load.running) <= settings.slots

    assert target.load().blocks_free == settings.blocks
    assert len(outputs) == count
    assert all(o.ends == 1 for o in outputs.values())
    for r in requests:
        got, alone = outputs[r.request_id], undisturbed(r, max_model_len=settings.max_model_len)
        if r.request_id in aborted:
            assert got.finish is FinishReason.ABORT
            assert alone.token_ids[: len(got.token_ids)] == got.token_ids
            assert alone.text.startswith(got.text)
        else:
            assert (got.token_ids, got.text, got.finish) == (alone.token_ids, alone.text, alone.finish)
    assert min(cancelled.values()) > count // 20, f"too few were cancelled in one phase: {cancelled}"
    assert sum(cancelled.values()) >= 3 * count // 10
    assert target.load().preemptions_total > count // 20
    assert moved > count // 10


# --- two engines and all deeds ---

EPISODE_DEEDS = 250
LIVE_MAX = 12


def tiny_settings(rng: random.Random) -> EngineConfig:
    block_size = rng.choice((1, 3, 4))
    return config(
        mode=rng.choice(list(BatchingMode)),
        order=rng.choice(list(Order)),
        within_class=rng.choice(list(WithinClass)),
        slots=rng.randrange(1, 7),
        step_token_budget=rng.randrange(6, 25),
        block_size_tokens=block_size,
        max_model_len=32,
        blocks=-(-32 // block_size) + rng.randrange(16),
        host_blocks=rng.choice((0, 5, 64)),
        max_recomputes=rng.randrange(4),
        prefix_cache=rng.random() < 0.8,
    )


def walk(
    deeds: int, seed: int, make_backend: Callable[[EngineConfig], ArithmeticBackend] = backend_for
) -> Counter[str]:
    """So many random deeds, in episodes of other settings each. Returns how often what happened."""
    rng = random.Random(seed)
    seen: Counter[str] = Counter()
    for start in range(0, deeds, EPISODE_DEEDS):
        world = World(tiny_settings(rng), make_backend)
        for n in range(min(EPISODE_DEEDS, deeds - start)):
            on, live = rng.randrange(2), sorted(world.at)
            what = rng.choices(("step", "add", "abort", "preempt", "move", "shuffle"), (60, 12, 3, 8, 15, 2))[0]
            if what == "add" and len(live) < LIVE_MAX:
                for r in any_request(rng, n, world.settings):
                    world.add(on, r)
            elif what == "abort" and live:
                world.abort(rng.choice(live))
            elif what == "preempt" and live:
                means = rng.choice(list(PreemptionMeans))
                seen[means] += world.preempt(rng.choice(live), means)
            elif what == "move" and live:
                world.move_on(
                    rng.choice(sorted(world.moves) if world.moves and rng.random() < 0.7 else live),
                    cancel=rng.random() < 0.1,
                )
            elif what == "shuffle":
                world.shuffle_blocks(on, rng)
            else:
                world.step(on)
        world.finish()
        seen["requests"] += len(world.requests)
        seen["moved"] += world.moved
        seen["preempted"] += world.preempted
        for target in world.engines:
            load = target.load()
            seen["hit_tokens"] += load.prefix_hit_tokens_total
            seen["padding_tokens"] += load.padding_tokens_total
            seen["copies"] += len(world.backends[world.engines.index(target)].copies)
    return seen


def test_a_random_walk_through_all_deeds_holds_every_law() -> None:
    seen = walk(2_500, seed=1)
    assert min(seen[what] for what in ("moved", "preempted", "hit_tokens", "padding_tokens", "copies")) > 0, seen


def test_a_random_walk_where_every_third_copy_of_blocks_fails_holds_every_law() -> None:
    seen = walk(2_500, seed=3, make_backend=unreliable)
    assert min(seen[what] for what in ("moved", "preempted", "copies", PreemptionMeans.SWAP)) > 0, seen


@pytest.mark.slow
def test_twenty_thousand_random_deeds_hold_every_law() -> None:
    """Arrivals, cancels, preemptions by all means, swaps and moves on tiny pools, in every mode and order."""
    seen = walk(20_000, seed=2)
    assert seen["requests"] > 1000
    assert seen["moved"] > 100
    assert seen["copies"] > 50
    assert min(seen[means] for means in PreemptionMeans) > 20
    assert seen["preempted"] > sum(seen[means] for means in PreemptionMeans), "no plan ever preempted"


def test_outputs_do_not_change_when_live_blocks_move_before_every_step() -> None:
    rng = random.Random(5)
    settings = config(slots=4, blocks=24, max_model_len=80)
    backend = backend_for(settings)
    target = engine(settings, backend)
    requests = [request(f"r{n}", prompt=5 + 6 * n, max_tokens=20, arrived=float(n)) for n in range(8)]
    for r in requests:
        target.add(r, 0)
    outputs: dict[str, Output] = {}
    moved = 0
    while target.has_work:
        moved += permute_blocks(target, backend.move_blocks, rng)
        gather(target.step(), outputs)
        target.check_integrity()
    assert moved > 500
    for r in requests:
        assert outputs[r.request_id].token_ids == undisturbed(r, max_model_len=80).token_ids


def test_moving_a_table_without_its_blocks_is_seen_in_the_output() -> None:
    """The check above can fail: it is the content that follows the tables."""
    settings = config()
    target = engine(settings)
    r = request("r", prompt=20)
    target.add(r, 0)
    outputs: dict[str, Output] = {}
    gather(target.step(), outputs)
    while target.has_work:
        permute_blocks(target, lambda moved: None, random.Random(1))
        gather(target.step(), outputs)
    assert outputs["r"].token_ids != undisturbed(r, max_model_len=128).token_ids
