"""What the embedded engine promises about one request, beyond the laws of every engine (tests/conformance/port_laws.py)."""

from __future__ import annotations

import pytest

from cluster.config import EngineConfig
from cluster.engine.engine import Engine
from cluster.engine.kv_cache import IntegrityError
from cluster.types import FinishReason, PriorityLoad, RefusalReason, Request, RequestId
from tests.conformance.engine_kit import (
    EOS,
    Output,
    backend_for,
    collect,
    config,
    decoded,
    engine,
    gather,
    request,
    same,
    undisturbed,
)


def run_alone(r: Request, settings: EngineConfig) -> Output:
    target = engine(settings)
    target.add(r, 0)
    return collect(target, first={r.request_id: len(r.emitted_ids)})[r.request_id]


# --- how a request ends ---


def test_output_ends_at_max_tokens_or_at_the_end_token_which_has_no_text() -> None:
    settings = config(max_model_len=256)
    seen = set()
    for seed in range(30):
        r = request(f"r{seed}", max_tokens=200, temperature=1.0, seed=seed, ignore_eos=False)
        got = run_alone(r, settings)
        assert same(got, undisturbed(r, max_model_len=256))
        seen.add(got.finish)
        if got.finish is FinishReason.STOP:
            assert got.token_ids[-1] == EOS
            assert got.text == decoded(got.token_ids[:-1])
    assert seen == {FinishReason.STOP, FinishReason.LENGTH}


# --- bounds, repeats, aborts ---


def test_beyond_max_held_a_request_is_refused_and_a_repeat_is_not_a_second_one() -> None:
    target = engine(config(max_held=2))
    assert target.add(request("a"), 0) is None
    assert target.add(request("b"), 0) is None
    assert target.add(request("b"), 0) is None
    refusal = target.add(request("c"), 3)
    assert refusal is not None
    assert (refusal.request_id, refusal.attempt, refusal.reason) == ("c", 3, RefusalReason.FULL)
    assert target.load().adds_total == 4
    outputs = collect(target)
    assert {name: o.ends for name, o in outputs.items()} == {"a": 1, "b": 1}
    assert target.add(request("c"), 3) is None


def test_a_repeat_of_an_attempt_whose_end_is_still_to_be_told_is_not_a_second_one() -> None:
    target = engine(config())
    for r in (request("impossible", prompt=()), request("aborted")):
        assert target.add(r, 0) is None
        target.abort(r.request_id, 0)
        assert target.add(r, 0) is None
    outputs = collect(target)
    assert {name: o.ends for name, o in outputs.items()} == {"impossible": 1, "aborted": 1}


def test_numbers_and_names_outside_their_range_disturb_nobody() -> None:
    """What the edge lets through must not raise in the engine's loop, which all share."""
    target = engine(config())
    others = [request("other"), request("another", choice=1, temperature=1.0)]
    odd = [
        request("choice", choice=-1, temperature=1.0),
        request("choices", choice=2**70, temperature=1.0),
        request("tenant", tenant="\ud800", prompt=9),
        request("priority", priority=10**40),
        request("nothing", max_tokens=-1, prompt_logprobs=1),
        request("least", min_tokens=10**9),
    ]
    for r in [*odd, *others]:
        target.add(r, 0)
    outputs = collect(target)
    assert all(outputs[r.request_id].finish is FinishReason.LENGTH for r in odd)
    assert all(same(outputs[r.request_id], undisturbed(r, max_model_len=128)) for r in others)


def test_an_abort_frees_the_blocks_at_once_in_every_phase() -> None:
    settings = config(slots=2, step_token_budget=8, blocks=64, max_held=8)
    target, outputs = engine(settings), dict[str, Output]()
    target.add(request("decoding", prompt=3, max_tokens=50), 0)
    gather(target.step(), outputs)
    target.add(request("prefill", prompt=60, arrived=1.0), 0)
    target.add(request("queued", arrived=2.0), 0)
    gather(target.step(), outputs)
    load = target.load()
    assert (sum(p.requests for p in load.running), sum(p.requests for p in load.waiting)) == (2, 1)
    held = load.blocks_free
    for name in ("queued", "prefill", "decoding"):
        assert target.abort(RequestId(name), 0)
        target.check_integrity()
        assert not target.abort(RequestId(name), 0), "it can end only once"
        held, before = target.load().blocks_free, held
        assert held == before if name == "queued" else held > before
    assert held == 64
    assert not target.abort(RequestId("never seen"), 0)
    assert not target.abort(RequestId("decoding"), 1)
    collect(target, outputs)
    assert {n: o.finish for n, o in outputs.items()} == dict.fromkeys(outputs, FinishReason.ABORT)


def test_load_counts_the_blocks_that_work_holds_and_waiting_work_holds_none_until_it_is_paused() -> None:
    target = engine(config(slots=2, step_token_budget=16, block_size_tokens=4, blocks=64))
    target.add(request("a", prompt=7, priority=5, max_tokens=9), 0)  # 7 tokens and one more: 2 blocks
    target.add(request("b", prompt=8, priority=5, arrived=1.0, max_tokens=9), 0)  # 3 blocks
    target.add(request("c", prompt=3, priority=0, arrived=2.0), 0)  # 1 block
    target.add(request("d", prompt=40, priority=-3, arrived=3.0), 0)  # 11 blocks
    load = target.step().load
    assert load.running == (PriorityLoad(5, 2, 5),)
    assert load.waiting == (PriorityLoad(0, 1, 0, 2), PriorityLoad(-3, 1, 0, 39)), "the last of each draws a token"
    assert (load.blocks_total, load.blocks_free, load.slots_total, load.block_size_tokens) == (64, 59, 2, 4)
    assert (load.steps_total, load.tokens_total, load.adds_total) == (1, 2, 4)


def test_load_tells_what_is_left_of_prompts_chunk_by_chunk_until_each_draws_its_token() -> None:
    """Steps of 16 tokens: 40 = 16 + 16 + 8, and the last of the 8 draws the first token."""
    target = engine(config(slots=2, step_token_budget=16, block_size_tokens=4, blocks=64))
    target.add(request("a", prompt=40, priority=1, max_tokens=3), 0)
    target.add(request("b", prompt=10, priority=0, max_tokens=3), 0)
    seen = []
    for _ in range(4):
        load = target.step().load
        levels = (*load.running, *load.waiting)
        seen.append({priority: sum(w.prompt_tokens for w in levels if w.priority == priority) for priority in (1, 0)})
        target.check_integrity()
    assert seen == [{1: 23, 0: 9}, {1: 7, 0: 9}, {1: 0, 0: 1}, {1: 0, 0: 0}]
    assert load.step_tokens == 16


def test_padding_is_counted_and_ends_with_the_batch_that_it_filled() -> None:
    """Static: two of three rows end with their first token, the third takes two steps more; then one runs alone."""
    settings = config(mode="static", slots=3)
    backend = backend_for(settings)
    target = engine(settings, backend)
    for n, max_tokens in enumerate((1, 1, 3, 4)):
        target.add(request(f"r{n}", prompt=4, max_tokens=max_tokens, arrived=float(n)), 0)
    collect(target)
    assert target.load().padding_tokens_total == backend.padding_tokens == 2 * 2
    assert target.load().steps_total == 3 + 4


# --- the books ---


def test_damaged_books_are_noticed() -> None:
    def busy() -> Engine:
        target = engine(config(slots=2))
        for n in range(4):
            target.add(request(f"r{n}", arrived=float(n)), 0)
        target.step()
        target.check_integrity()
        return target

    target = busy()
    target._book.running.items[0].blocks += 1
    with pytest.raises(IntegrityError):
        target.check_integrity()
    target = busy()
    target._book.waiting.items.reverse()
    with pytest.raises(IntegrityError):
        target.check_integrity()
    target = busy()
    target._book.waiting.items.pop()
    with pytest.raises(IntegrityError):
        target.check_integrity()
    target = busy()
    target._book.running.grow(target._book.running.items[0], 1)
    with pytest.raises(IntegrityError):
        target.check_integrity()
    target = busy()
    target._book.running.items[0].tokens += 1
    with pytest.raises(IntegrityError):
        target.check_integrity()


def test_greedy_requests_draw_nothing_and_others_draw_by_seed_and_index() -> None:
    settings = config()
    backend = backend_for(settings)
    target = engine(settings, backend)
    target.add(request("greedy", max_tokens=3, seed=9), 0)
    target.add(request("seeded", max_tokens=3, seed=9, temperature=1.0), 0)
    collect(target)
    samples = [row.sample for batch in backend.batches for row in batch if row.sample]
    assert {s.uniform for s in samples if s.temperature == 0} == {0.0}
    assert len({s.uniform for s in samples if s.temperature > 0}) == 3
