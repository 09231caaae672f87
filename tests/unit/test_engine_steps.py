"""What an engine promises about one request: its output, its end, and that others' troubles are not its own."""

from __future__ import annotations

import math

import pytest

from cluster.config import EngineConfig
from cluster.engine.engine import Engine
from cluster.engine.kv_cache import IntegrityError
from cluster.types import FinishReason, PriorityLoad, RefusalReason, Request, RequestId
from tests.conformance.engine_kit import (
    EOS,
    Output,
    backend_for,
    byte_level_tokenizer,
    collect,
    config,
    decoded,
    engine,
    gather,
    request,
    same,
    undisturbed,
    vocab_size,
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


def test_prompt_and_max_tokens_beyond_the_models_length_end_with_length_there() -> None:
    settings = config(max_model_len=40, blocks=10, block_size_tokens=4)
    got = run_alone(request("r", prompt=30, max_tokens=500), settings)
    assert len(got.token_ids) == 10
    assert got.finish is FinishReason.LENGTH


@pytest.mark.parametrize("prompt", [(), tuple(range(40)), tuple(range(41)), (1, vocab_size()), (-1, 2)])
def test_a_prompt_that_can_never_run_ends_with_an_error_and_the_next_request_is_served(prompt: tuple[int, ...]) -> None:
    """Public report: an empty prompt killed the server. A token id without a row in the model fails a whole batch."""
    settings = config(max_model_len=40)
    target = engine(settings)
    good = request("good")
    assert target.add(request("bad", prompt=prompt), 0) is None
    assert target.add(good, 0) is None
    outputs: dict[str, Output] = {}
    result = target.step()
    gather(result, outputs)
    assert next(d.error for d in result.deltas if d.request_id == "bad").startswith("the prompt has")
    collect(target, outputs)
    assert outputs["bad"].finish is FinishReason.ERROR
    assert outputs["bad"].token_ids == []
    assert same(outputs["good"], undisturbed(good, max_model_len=40))


def test_the_longest_prompt_that_leaves_room_for_a_token_gets_it() -> None:
    settings = config(max_model_len=40, blocks=10, block_size_tokens=4)
    r = request("r", prompt=39)
    got = run_alone(r, settings)
    assert len(got.token_ids) == 1
    assert same(got, undisturbed(r, max_model_len=40))


def test_no_character_of_a_stop_string_leaves_and_the_rest_equals_the_whole_text() -> None:
    """Stop strings taken from the middle of each request's own output."""
    settings = config(max_model_len=128)
    for n in range(20):
        whole = undisturbed(request(f"r{n}", max_tokens=40), max_model_len=128)
        stop = whole.text[len(whole.text) // 2 :][:5]
        got = run_alone(request(f"r{n}", max_tokens=40, stop=(stop, "never")), settings)
        assert got.finish is FinishReason.STOP
        assert got.text == whole.text[: whole.text.index(stop)]


# --- resuming ---


def cuts_a_character(ids: list[int]) -> bool:
    """Whether some beginning of these tokens ends inside a character that the next ones complete."""
    decode = byte_level_tokenizer().decode
    return any(not decode(ids).startswith(decode(ids[:k])) for k in range(len(ids)))


@pytest.mark.parametrize("in_stop_string", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_cut_at_any_index_and_resumed_elsewhere_nothing_is_lost_doubled_or_changed(
    in_stop_string: bool, temperature: float
) -> None:
    settings = config(max_model_len=128)
    for n in range(100):
        r = request(f"s{n}", prompt=6, max_tokens=24, temperature=temperature, seed=n)
        expected = undisturbed(r, max_model_len=128)
        if cuts_a_character(expected.token_ids) and len(expected.text) > 20:
            break
    if in_stop_string:
        stop = (expected.text[12:18], "x" + expected.text[12:18])
        r = request(f"s{n}", prompt=6, max_tokens=24, temperature=temperature, seed=n, stop=stop)
        expected = undisturbed(r, max_model_len=128)
        assert expected.finish is FinishReason.STOP
    else:
        assert cuts_a_character(expected.token_ids)
    whole = run_alone(r, settings)
    assert same(whole, expected)
    cuts_in_held_text = 0
    for cut in range(len(expected.token_ids)):
        first, head = engine(settings), Output()
        first.add(r, 0)
        while len(head.token_ids) < cut:
            for delta in first.step().deltas:
                head.take(delta)
        assert head.finish is None
        cuts_in_held_text += head.text != decoded(head.token_ids)
        resumed = request(
            r.request_id,
            prompt=r.prompt_ids,
            emitted=tuple(head.token_ids),
            max_tokens=24,
            temperature=r.sampling.temperature,
            seed=r.sampling.seed,
            stop=r.sampling.stop,
        )
        tail = run_alone(resumed, settings)
        assert head.token_ids + tail.token_ids == expected.token_ids
        assert head.text + tail.text == expected.text
        assert tail.finish is expected.finish
    assert (cuts_in_held_text > 0) == in_stop_string


def test_a_resumed_request_that_had_ended_already_ends_without_a_token() -> None:
    settings = config()
    for r, finish in (
        (request("length", emitted=(3, 4, 5), max_tokens=3), FinishReason.LENGTH),
        (request("nothing", max_tokens=0), FinishReason.LENGTH),
        (request("eos", emitted=(3, EOS), max_tokens=9, ignore_eos=False), FinishReason.STOP),
        (
            request("stop", emitted=tuple(byte_level_tokenizer().encode("a b").ids), max_tokens=9, stop=("b",)),
            FinishReason.STOP,
        ),
    ):
        got = run_alone(r, settings)
        assert (got.token_ids, got.text, got.finish, got.ends) == ([], "", finish, 1)


@pytest.mark.parametrize("prompt", [40, (1, vocab_size())])
def test_a_continued_request_that_cannot_run_here_ends_behind_what_its_client_has(
    prompt: int | tuple[int, ...],
) -> None:
    got = run_alone(request("r", prompt=prompt, emitted=(3, 4, 5)), config(max_model_len=40))
    assert (got.token_ids, got.finish, got.ends) == ([], FinishReason.ERROR, 1)


def test_continued_work_goes_ahead_of_new_work_of_its_priority() -> None:
    target = engine(config(slots=1, step_token_budget=16))
    target.add(request("new", arrived=0.0), 0)
    target.add(request("continued", arrived=5.0, emitted=(1, 2)), 1)
    assert {d.request_id for d in target.step().deltas} == {"continued"}


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


@pytest.mark.parametrize("arrived", [math.nan, math.inf, -math.inf])
def test_a_request_without_a_time_of_arrival_ends_alone_and_disturbs_no_line(arrived: float) -> None:
    target = engine(config(slots=1))
    others = [request(f"r{n}", arrived=float(n), max_tokens=4) for n in range(4)]
    for n, r in enumerate(others):
        target.add(r, 0)
        target.add(request(f"timeless{n}", arrived=arrived), 0)
    outputs = collect(target)
    assert all(outputs[f"timeless{n}"].finish is FinishReason.ERROR for n in range(4))
    assert all(same(outputs[r.request_id], undisturbed(r, max_model_len=128)) for r in others)


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


def test_when_all_are_aborted_at_once_the_next_result_says_idle_without_new_traffic() -> None:
    """Public report: after such an abort the engine went idle with its gauges still at busy."""
    settings = config(slots=8, step_token_budget=16, blocks=64)
    target, outputs = engine(settings), dict[str, Output]()
    for n in range(100):
        target.add(request(f"r{n}", prompt=20, max_tokens=50), 0)
    for _ in range(20):
        gather(target.step(), outputs)
    assert target.load().blocks_free < 7
    for n in range(100):
        target.abort(RequestId(f"r{n}"), 0)
    for_the_last_result = target.has_work
    assert for_the_last_result
    result = target.step()
    gather(result, outputs)
    assert (result.load.running, result.load.waiting, result.load.blocks_free) == ((), (), 64)
    assert not target.has_work
    assert sum(o.ends for o in outputs.values()) == 100


def test_load_counts_the_blocks_that_work_holds_and_waiting_work_holds_none_until_it_is_paused() -> None:
    target = engine(config(slots=2, step_token_budget=16, block_size_tokens=4, blocks=64))
    target.add(request("a", prompt=7, priority=5, max_tokens=9), 0)  # 7 tokens and one more: 2 blocks
    target.add(request("b", prompt=8, priority=5, arrived=1.0, max_tokens=9), 0)  # 3 blocks
    target.add(request("c", prompt=3, priority=0, arrived=2.0), 0)  # 1 block
    target.add(request("d", prompt=40, priority=-3, arrived=3.0), 0)  # 11 blocks
    load = target.step().load
    assert load.running == (PriorityLoad(5, 2, 5),)
    assert load.waiting == (PriorityLoad(0, 1, 0), PriorityLoad(-3, 1, 0))
    assert (load.blocks_total, load.blocks_free, load.slots_total, load.block_size_tokens) == (64, 59, 2, 4)
    assert (load.steps_total, load.tokens_total, load.adds_total) == (1, 2, 4)


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
