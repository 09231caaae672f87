"""What the engine asks of the backend for each token, and what it tells of the answer. Cut anywhere, nothing changes."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest

from cluster.config import EngineConfig
from cluster.ports import Row, SampleSpec
from cluster.types import FinishReason, PreemptionMeans, Request
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
    prompt_of,
    request,
    same,
    undisturbed,
)
from tests.unit.test_engine_memory import Bench


def run_alone(r: Request, settings: EngineConfig) -> tuple[Output, list[Row]]:
    backend = backend_for(settings)
    target = engine(settings, backend)
    target.add(r, 0)
    output = collect(target, first={r.request_id: len(r.emitted_ids)})[r.request_id]
    return output, [row for batch in backend.batches for row in batch]


def samples(rows: list[Row]) -> list[SampleSpec]:
    return [row.sample for row in rows if row.sample is not None]


def test_every_field_of_sampling_reaches_the_backend() -> None:
    r = request(
        "r",
        temperature=0.7,
        seed=5,
        max_tokens=4,
        top_p=0.9,
        top_k=7,
        min_p=0.05,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        repetition_penalty=1.1,
        logit_bias=((3, 2.0), (5, -100.0)),
        logprobs=2,
    )
    output, rows = run_alone(r, config())
    assert same(output, undisturbed(r, max_model_len=128))
    specs = samples(rows)
    assert {(s.temperature, s.top_p, s.top_k, s.min_p, s.bias, s.logprobs) for s in specs} == {
        (0.7, 0.9, 7, 0.05, ((3, 2.0), (5, -100.0)), 2)
    }
    assert len({s.uniform for s in specs}) == 4
    for spec in specs:
        assert spec.penalties is not None
        assert (spec.penalties.presence, spec.penalties.frequency, spec.penalties.repetition) == (0.5, 0.25, 1.1)
        assert sorted(spec.penalties.prompt_ids) == sorted(r.prompt_ids)


def test_emitted_tokens_count_as_output_for_penalties_and_not_as_prompt() -> None:
    settings = config()
    backend = backend_for(settings)
    target = engine(settings, backend)
    target.add(request("r", prompt=(9, 9), emitted=(4, 5, 4), max_tokens=4, presence_penalty=1.0), 0)
    counts: list[tuple[dict[int, int], tuple[int, ...]]] = []
    while target.has_work:
        target.step()
        counts.extend(
            (dict(row.sample.penalties.output_counts), tuple(row.sample.penalties.prompt_ids))
            for row in backend.batches[-1]
            if row.sample is not None and row.sample.penalties is not None
        )
    (told,) = counts
    drawn = target.load().tokens_total
    assert drawn == 1
    assert told[1] == (9, 9)
    assert sum(told[0].values()) == 3 + drawn
    assert (told[0][4], told[0][5]) >= (2, 1)


def test_the_end_token_is_banned_until_min_tokens_are_made_and_only_where_it_would_end_the_request() -> None:
    for ignore_eos in (False, True):
        r = request("r", max_tokens=6, min_tokens=4, ignore_eos=ignore_eos, temperature=1.0)
        output, rows = run_alone(r, config())
        assert same(output, undisturbed(r, max_model_len=128))
        banned = [s.banned for s in samples(rows)]
        assert banned == [() if ignore_eos or index >= 4 else (EOS,) for index in range(len(output.token_ids))]


# --- scores of the prompt ---


@pytest.mark.parametrize("budget", [4, 7, 16, 64])
@pytest.mark.parametrize("prompt_tokens", [1, 2, 17, 40])
def test_every_prompt_token_but_the_first_is_scored_once_whatever_the_chunks(budget: int, prompt_tokens: int) -> None:
    settings = config(step_token_budget=budget)
    for max_tokens in (0, 5):
        r = request("r", prompt=prompt_tokens, max_tokens=max_tokens, prompt_logprobs=2, logprobs=0)
        output, rows = run_alone(r, settings)
        expected = undisturbed(r, max_model_len=128)
        assert same(output, expected)
        assert output.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == prompt_tokens - 1
        if not max_tokens:
            assert (output.finish, output.token_ids, output.text) == (FinishReason.LENGTH, [], "")
            assert samples(rows) == [], "nothing is drawn"
    assert sum(len(row.score.targets) for row in rows if row.score is not None) == prompt_tokens - 1


def test_where_nothing_is_to_be_made_and_nothing_scored_it_ends_at_once() -> None:
    for r in (request("r", max_tokens=0), request("r", prompt=1, max_tokens=0, prompt_logprobs=1)):
        output, rows = run_alone(r, config())
        assert (output.finish, output.token_ids, rows) == (FinishReason.LENGTH, [], [])


def test_a_resumed_request_scores_nothing_of_its_prompt_again() -> None:
    r = request("r", prompt=20, max_tokens=6, prompt_logprobs=1)
    whole = undisturbed(r, max_model_len=128)
    resumed = request("r", prompt=20, max_tokens=6, prompt_logprobs=1, emitted=tuple(whole.token_ids[:2]))
    output, rows = run_alone(resumed, config())
    assert output.token_ids == whole.token_ids[2:]
    assert output.prompt_logprobs == ()
    assert all(row.score is None for row in rows)


@pytest.mark.parametrize("means", list(PreemptionMeans))
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 6])
def test_scores_are_whole_though_the_prompt_is_interrupted(means: PreemptionMeans, steps: int) -> None:
    """The chunks are others the second time, for another request takes part of the budget."""
    bench = Bench(config(blocks=64, step_token_budget=11))
    bench.add(request("r", prompt=40, max_tokens=6, prompt_logprobs=1))
    bench.step(steps)
    bench.preempt("r", means)
    bench.add(request("other", prompt=7, priority=1))
    bench.finish()


def test_only_the_first_delta_has_the_prompts_scores() -> None:
    target = engine(config())
    target.add(request("r", prompt=6, max_tokens=4, prompt_logprobs=1), 0)
    told: list[int] = []
    while target.has_work:
        told.extend(len(d.prompt_logprobs) for d in target.step().deltas)
    assert told == [5, 0, 0, 0]


# --- cut and resumed ---


def cuts_a_character(ids: list[int]) -> bool:
    """Whether some beginning of these tokens ends inside a character that the next ones complete."""
    decode = byte_level_tokenizer().decode
    return any(not decode(ids).startswith(decode(ids[:k])) for k in range(len(ids)))


def exacting(
    name: str, prompt: tuple[int, ...], *, emitted: tuple[int, ...] = (), stop: tuple[str, ...] = ()
) -> Request:
    """A request that uses all that has a state."""
    return request(
        name,
        prompt=prompt,
        emitted=emitted,
        max_tokens=24,
        temperature=0.9,
        seed=77,
        stop=stop,
        ignore_eos=False,
        min_tokens=9,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        repetition_penalty=1.2,
        logprobs=2,
    )


@pytest.mark.parametrize("in_stop_string", [False, True])
def test_cut_at_any_index_and_resumed_elsewhere_penalties_min_tokens_logprobs_and_text_go_on(
    in_stop_string: bool,
) -> None:
    settings = config(max_model_len=128)
    for n in range(300):
        prompt = prompt_of(f"s{n}", 6)
        expected = undisturbed(exacting("s", prompt), max_model_len=128)
        if cuts_a_character(expected.token_ids) and len(expected.text) > 24 and len(expected.token_ids) == 24:
            break
    else:
        raise AssertionError("no such request")
    stop = (expected.text[18:23],) if in_stop_string else ()
    expected = undisturbed(exacting("s", prompt, stop=stop), max_model_len=128)
    assert (expected.finish is FinishReason.STOP) is in_stop_string
    held = 0
    for cut in range(len(expected.token_ids)):
        first, head = engine(settings), {"s": Output()}
        first.add(exacting("s", prompt, stop=stop), 0)
        while len(head["s"].token_ids) < cut:
            gather(first.step(), head)
        held += head["s"].text != decoded(head["s"].token_ids)
        resumed = exacting("s", prompt, emitted=tuple(head["s"].token_ids), stop=stop)
        tail, _ = run_alone(resumed, settings)
        assert head["s"].token_ids + tail.token_ids == expected.token_ids
        assert head["s"].logprobs + tail.logprobs == expected.logprobs
        assert head["s"].text + tail.text == expected.text
        assert tail.finish is expected.finish
    assert (held > 0) is in_stop_string


def test_lengths_that_were_seen_order_those_that_follow() -> None:
    """Shortest first: the engine learns from ends, tells the order, and holds nobody to it."""
    settings = config(order="sjf", slots=1, step_token_budget=16, blocks=256)
    target = engine(settings)
    for n in range(40):
        short, long = request(f"s{n}", tenant="short", max_tokens=2), request(f"l{n}", tenant="long", max_tokens=30)
        for r in (short, long):
            target.add(r, 0)
    collect(target)
    waiting = {}
    for tenant in ("long", "short"):
        target.add(request(tenant, tenant=tenant, max_tokens=30), 0)
        (waiting[tenant],) = [s for s in target._book.states() if s.identity[0] == tenant]
    assert waiting["short"].predicted_tokens < 5 + 6 < 5 + 20 < waiting["long"].predicted_tokens
    assert [s.identity[0] for s in target._book.waiting.items] == ["short", "long"]


def test_expected_lengths_stay_between_what_is_and_what_can_be_as_a_request_runs() -> None:
    settings = config(order="srpt", slots=4, blocks=256)
    target = engine(settings)
    for n in range(6):
        target.add(request(f"r{n}", max_tokens=3 + 9 * n, prompt=1 + 5 * n), 0)
    while target.has_work:
        target.step()
        target.check_integrity()
        for state in target._book.states():
            assert state.tokens + 1 <= state.predicted_tokens <= state.limit_tokens


def test_a_stated_length_is_what_is_expected() -> None:
    target = engine(config(order="sjf"))
    for name, stated in (("a", 40), ("b", 3)):
        r = request(name, max_tokens=60)
        target.add(msgspec.structs.replace(r, stated_output_tokens=stated), 0)
    a, b = sorted(target._book.states(), key=lambda s: s.identity)
    assert a.predicted_tokens > b.predicted_tokens
    assert [s.identity[0] for s in target._book.waiting.items] == ["b", "a"]


def test_greedy_tokens_use_no_chance() -> None:
    _, rows = run_alone(request("r", max_tokens=3, seed=9), config())
    assert [s.uniform for s in samples(rows)] == [0.0] * 3
    assert all(a is b for a, b in pairwise(samples(rows))), "nothing changes, so nothing is built anew"
