"""A thousand random requests, a third of them cancelled, in a pool that is always too small."""

from __future__ import annotations

import random

import pytest

from cluster.config import Order
from cluster.engine.scheduling.sequence import SequenceState
from cluster.types import FinishReason
from tests.conformance.engine_kit import Output, backend_for, config, engine, gather, request, undisturbed
from tests.stateful.permute import permute_blocks

REQUESTS = 1000
PHASES = ("queued", "prefill", "decode")


def phase_of(state: SequenceState) -> str:
    if not state.blocks:
        return "queued"
    return "prefill" if state.tokens - state.computed > 1 else "decode"


@pytest.mark.parametrize("order", list(Order))
def test_a_thousand_requests_a_third_cancelled_conserve_blocks_and_end_once_as_if_alone(order: Order) -> None:
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
        for n in range(REQUESTS)
    ]
    cancel_in = {r.request_id: rng.choice(PHASES) for r in requests if rng.random() < 0.45}
    cancelled = dict.fromkeys(PHASES, 0)
    aborted: set[str] = set()
    outputs: dict[str, Output] = {}
    coming = iter(requests)
    added = moved = 0
    while added < REQUESTS or target.has_work:
        for _ in range(rng.choice((0, 0, 0, 0, 0, 3))):
            if r := next(coming, None):
                target.add(r, 0)
                added += 1
        for state in [*target._waiting.items, *target._running.items]:
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
        assert load.blocks_free + sum(p.blocks for p in load.running) == settings.blocks
        assert sum(p.requests for p in load.running) <= settings.slots

    assert target.load().blocks_free == settings.blocks
    assert len(outputs) == REQUESTS
    assert all(o.ends == 1 for o in outputs.values())
    for r in requests:
        got, alone = outputs[r.request_id], undisturbed(r, max_model_len=settings.max_model_len)
        if r.request_id in aborted:
            assert got.finish is FinishReason.ABORT
            assert alone.token_ids[: len(got.token_ids)] == got.token_ids
            assert alone.text.startswith(got.text)
        else:
            assert (got.token_ids, got.text, got.finish) == (alone.token_ids, alone.text, alone.finish)
    assert min(cancelled.values()) > 50, f"too few were cancelled in one phase: {cancelled}"
    assert sum(cancelled.values()) >= 300
    assert target.load().preemptions_total > 50
    assert moved > 100


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
