"""The laws of an engine, whichever it is, seen through its port: `LAWS`, each a function of a `Driver`.

An engine is shared by all laws that hold for its configuration: each law is given it idle and leaves it so. `ENDINGS` are
the ways in which it ends, each to be tried on one that nobody needs any more. What an engine does inside a step is tested
elsewhere (tests/unit, test_scheduling_laws.py).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import msgspec

from cluster.config import BatchingMode, EngineConfig, Order, WithinClass
from cluster.types import FinishReason, PreemptionMeans, RefusalReason, Request, RequestId
from tests.conformance.engine_kit import decoded
from tests.conformance.port_kit import (
    LOW,
    PATIENCE_S,
    URGENT,
    BrokenCallbackError,
    Driver,
    Law,
    low,
    request,
    requests_in,
)

LAWS: list[Law] = []


def laws_of(config: EngineConfig) -> list[Law]:
    return [law for law in LAWS if law.applies(config)]


def law(
    applies: Callable[[EngineConfig], bool] = lambda config: True,
) -> Callable[[Callable[[Driver], None]], Callable[[Driver], None]]:
    def add(holds: Callable[[Driver], None]) -> Callable[[Driver], None]:
        LAWS.append(Law(holds, applies))
        return holds

    return add


def continuous(config: EngineConfig) -> bool:
    return config.mode is BatchingMode.CONTINUOUS


def static(config: EngineConfig) -> bool:
    return config.mode is BatchingMode.STATIC


def by_priority(config: EngineConfig) -> bool:
    return config.order is Order.PRIORITY


def by_priority_at_once(config: EngineConfig) -> bool:
    return by_priority(config) and continuous(config)


def by_length(config: EngineConfig) -> bool:
    """Among new work of one priority."""
    return config.order in (Order.SJF, Order.SRPT) or (by_priority(config) and config.within_class is WithinClass.SJF)


def pushes_nobody_out(config: EngineConfig) -> bool:
    return config.order in (Order.FCFS, Order.SJF)


# --- what a request puts out ---


@law()
def greedy_output_is_that_of_the_model_alone_whatever_runs_beside_it(d: Driver) -> None:
    """More requests than slots; prompts of one token and of more than a step's budget."""
    d.run_undisturbed(*[request(f"greedy {n}", prompt=n * 17 + 1, max_tokens=32) for n in range(6)])


CHANCE: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "top_k": 60}
PENALTIES: dict[str, Any] = {"presence_penalty": 0.4, "frequency_penalty": 0.6, "repetition_penalty": 1.3}
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 20},
    {"temperature": 1.0, "min_p": 0.05},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.8},
    {"repetition_penalty": 1.4},
    {"logit_bias": ((7, 6.0), (9, -5.0), (11, 5.0))},
    {"logprobs": 3},
    {"prompt_logprobs": 2, "logprobs": 0},
    {**CHANCE, **PENALTIES, "min_p": 0.01, "logit_bias": ((7, 4.0), (9, -5.0)), "logprobs": 2},
)


@law()
def every_field_of_sampling_has_its_effect_beside_requests_that_ask_for_others(d: Driver) -> None:
    requests = [request("fields", prompt=20 + 7 * n, **sampling) for n, sampling in enumerate(SAMPLING)]
    d.run_undisturbed(*requests)


@law()
def chance_follows_from_seed_choice_and_index_and_from_nothing_else(d: Driver) -> None:
    """The same request alone, in company, and as another attempt; and other choices and seeds, which differ."""
    (alone,) = d.run_undisturbed(request("chance", seed=5, **CHANCE))
    company = [request("chance", seed=5, choice=n, **CHANCE) for n in range(4)]
    other_seed = request("chance", seed=6, **CHANCE)
    *choices, reseeded = d.run_undisturbed(*company, other_seed)
    assert choices[0].token_ids == alone.token_ids
    assert len({tuple(o.token_ids) for o in (*choices, reseeded)}) == 5
    again = request("chance", seed=5, **CHANCE)
    d.add(again, attempt=3)
    d.finish(again)


@law()
def the_end_token_ends_a_request_has_no_text_and_is_not_drawn_before_min_tokens(d: Driver) -> None:
    """Of a request that draws it early: a bias makes it likely, or chance. For who ignores it, it is a token as any other."""
    eos = d.reference.model.eos

    def ending(n: int, **changes: Any) -> Request:
        bias = () if n else ((eos, 400.0),)
        return request(f"end {n}", max_tokens=12, logit_bias=bias, **{"ignore_eos": False, **changes})

    n = next(n for n in range(2000) if len(d.expected(ending(n)).token_ids) <= 5)
    early, patient, deaf = ending(n), ending(n, min_tokens=8), ending(n, ignore_eos=True)
    ended, waited, ignored = d.run_undisturbed(early, patient, deaf)
    assert ended.finish is FinishReason.STOP
    assert ended.token_ids[-1] == eos
    assert ended.text == decoded(ended.token_ids[:-1], d.reference.model.tokenizer)
    assert eos not in waited.token_ids[:8]
    assert (ignored.finish, len(ignored.token_ids)) == (FinishReason.LENGTH, 12)


@law()
def output_ends_at_max_tokens_or_at_the_models_length(d: Driver) -> None:
    longest = d.config.max_model_len
    one, beyond, last = (
        request("one", max_tokens=1),
        request("beyond", prompt=longest - 10, max_tokens=500),
        request("last", prompt=longest - 1, max_tokens=9),
    )
    outputs = d.run_undisturbed(one, beyond, last)
    assert [len(o.token_ids) for o in outputs] == [1, 10, 1]
    assert {o.finish for o in outputs} == {FinishReason.LENGTH}


def stopping(d: Driver, label: str, **sampling: Any) -> Request:
    """A request that a stop string ends: it is taken from the middle of the same request's output without it."""
    free = request(label, max_tokens=40, **sampling)
    text = d.expected(free).text
    stop = text[len(text) // 2 :][:5]
    r = request(label, max_tokens=40, stop=("never", stop), **sampling)
    assert d.expected(r).finish is FinishReason.STOP
    assert d.expected(r).text == text[: text.index(stop)]
    return r


@law()
def a_stop_string_ends_a_request_and_no_character_of_it_is_told(d: Driver) -> None:
    requests = [stopping(d, f"stops {n}", seed=n, **CHANCE) for n in range(4)]
    d.run_undisturbed(*requests, request("goes on", max_tokens=60))


@law()
def a_stop_string_that_is_complete_before_min_tokens_is_text_like_any_other(d: Driver) -> None:
    early = stopping(d, "early stop")
    text = d.expected(early).text + early.sampling.stop[1]
    patient = request("early stop", max_tokens=40, stop=early.sampling.stop, min_tokens=40)
    (got,) = d.run_undisturbed(patient)
    assert got.text.startswith(text)


@law()
def logprobs_are_those_of_the_models_own_distribution_and_prompts_can_be_scored_alone(d: Driver) -> None:
    both = request("scores", prompt=70, max_tokens=6, logprobs=3, prompt_logprobs=2, logit_bias=((7, 50.0),))
    alone = request("scores", prompt=70, max_tokens=0, prompt_logprobs=1)
    single = request("scores", prompt=1, max_tokens=2, prompt_logprobs=1)
    told, scored, nothing = d.run_undisturbed(both, alone, single)
    assert (len(told.logprobs), len(told.prompt_logprobs or ())) == (6, 69)
    assert (scored.token_ids, scored.finish, len(scored.prompt_logprobs or ())) == ([], FinishReason.LENGTH, 69)
    assert nothing.prompt_logprobs == ()


# --- cut and resumed ---


def cut_anywhere(d: Driver, r: Request) -> None:
    """As after the loss of an engine, from every index at once: what was told before and after is what is told whole."""
    (whole,) = d.run_undisturbed(r)
    parts = [
        msgspec.structs.replace(r, request_id=RequestId(f"{r.request_id} cut {k}"), emitted_ids=tuple(ids))
        for k in range(1, len(whole.token_ids) + (whole.finish is not FinishReason.LENGTH))
        if (ids := whole.token_ids[:k])
    ]
    d.add(*parts, attempt=2)
    d.finish(*parts)
    for k, part in enumerate(parts, start=1):
        assert "".join(whole.pieces[:k]) + d.output(part).text == whole.text


@law()
def cut_anywhere_and_resumed_emitted_tokens_count_as_output(d: Driver) -> None:
    """For max_tokens, min_tokens, penalties, chance and logprobs."""
    cut_anywhere(d, request("cut", max_tokens=22, min_tokens=15, logprobs=2, **CHANCE, **PENALTIES))


@law()
def cut_anywhere_in_what_may_become_a_stop_string_it_still_stops_there(d: Driver) -> None:
    r = stopping(d, "cut in a stop string", **CHANCE)
    cut_anywhere(d, r)
    whole = next(o for name, o in d.outputs.items() if name == r.request_id)
    tokenizer = d.reference.model.tokenizer
    held = ["".join(whole.pieces[:k]) != decoded(whole.token_ids[:k], tokenizer) for k in range(len(whole.token_ids))]
    assert any(held), "no cut was in the stop string"


@law()
def cut_anywhere_in_a_character_it_is_still_completed(d: Driver) -> None:
    decode = d.reference.model.tokenizer.decode

    def cuts_a_character(ids: list[int]) -> bool:
        return any(not decode(ids).startswith(decode(ids[:k])) for k in range(len(ids)))

    emoji = d.reference.model.tokenizer.encode("🙂").ids
    candidates = [
        # A bias puts these far above all others, and a frequency penalty takes turns.
        request(
            "characters",
            max_tokens=12,
            frequency_penalty=400.0,
            logit_bias=tuple((k, 1_900.0 - 100 * n) for n, k in enumerate(emoji)),
        ),
        *(request(f"characters {n}", max_tokens=20) for n in range(100)),
    ]
    cut_anywhere(d, next(r for r in candidates if cuts_a_character(d.expected(r).token_ids)))


@law()
def what_its_emitted_tokens_have_ended_already_ends_without_another(d: Driver) -> None:
    eos = d.reference.model.eos
    word = tuple(d.reference.model.tokenizer.encode("a b").ids)
    ended = {
        FinishReason.LENGTH: [request("length", emitted=(3, 4, 5), max_tokens=3), request("nothing", max_tokens=0)],
        FinishReason.STOP: [
            request("end token", emitted=(3, eos), ignore_eos=False),
            request("stop string", emitted=word, stop=("b",)),
        ],
    }
    for finish, requests in ended.items():
        for got in d.run(*requests):
            assert (got.token_ids, got.text, got.finish, got.ends) == ([], "", finish, 1)


@law(lambda config: config.order is not Order.SRPT)
def continued_work_goes_ahead_of_new_work_of_its_priority(d: Driver) -> None:
    """Though it arrived last."""
    d.until_idle()
    blockers = [request(f"blocker {n}", max_tokens=30 + 5 * n, stated=30 + 5 * n) for n in range(4)]
    new = [request(f"new {n}", max_tokens=4, stated=4) for n in range(4)]
    continued = request("continued", max_tokens=8, stated=8)
    continued = msgspec.structs.replace(continued, emitted_ids=tuple(d.expected(continued).token_ids[:3]))
    d.add(*blockers)
    d.until_tokens(2, *blockers)
    d.add(*new, continued)
    d.finish(*blockers, *new, continued)
    assert d.started(continued) <= min(d.started(r) for r in new)
    assert d.started(continued) < max(d.started(r) for r in new)


# --- what cannot run, and numbers at the edge ---


@law()
def what_can_never_run_ends_with_an_error_that_says_why_and_hurts_nobody(d: Driver) -> None:
    longest = d.config.max_model_len
    bad = {
        "no tokens": request("empty", prompt=()),
        "no room": request("long", prompt=longest),
        "token id": request("beyond the vocabulary", prompt=(5, 4000)),
        "the prompt has a token id": request("negative", prompt=(-1, 5)),
        "output so far": request("emitted", emitted=(3, 4000)),
        "no room for output": request("emitted and long", prompt=longest, emitted=(3, 4)),
        "logit_bias": request("bias", logit_bias=((1, 1.0), (4000, 1.0))),
        "the token id -1": request("negative bias", logit_bias=((-1, 1.0),)),
        "time of its arrival": request("timeless", arrived=math.nan),
        "arrival": request("endless", arrived=math.inf),
    }
    good = [request(f"good {n}", max_tokens=6) for n in range(4)]
    d.add(good[0], *bad.values(), *good[1:])
    d.finish(*good)
    d.until_ended(*bad.values())
    for why, r in bad.items():
        got = d.output(r)
        assert (got.token_ids, got.finish, got.ends) == ([], FinishReason.ERROR, 1)
        assert why in got.error or (why == "no room" and "leaves no room" in got.error)


@law()
def numbers_at_the_edge_of_what_the_wire_carries_disturb_nobody(d: Driver) -> None:
    """What the edge lets through must not raise in the engine's loop, which all share."""
    odd = [
        request("choice", choice=-1, max_tokens=8, **CHANCE),
        request("choices", choice=2**62, max_tokens=8, **CHANCE),
        request("seed", seed=-(2**62), max_tokens=8, **CHANCE),
        request("priority", priority=2**62, max_tokens=8),
        request("no priority", priority=-(2**62), max_tokens=8),
        request("least", min_tokens=10**9, max_tokens=8),
        request("stated", stated=2**62, max_tokens=8),
        request("nobody", tenant="", max_tokens=8),
        request("long ago", arrived=-1e18, max_tokens=8),
        request("one day", arrived=1e18, max_tokens=8),
        request("endless", prompt=500, max_tokens=2**62),
        request("less than nothing", max_tokens=-1),
    ]
    others = [request(f"other {n}", max_tokens=8) for n in range(3)]
    d.add(others[0], *odd, *others[1:])
    d.finish(*odd, *others)


# --- aborts, repeats, bounds ---


@law()
def an_abort_ends_a_waiting_request_and_a_running_one_in_any_phase_and_frees_its_blocks(d: Driver) -> None:
    """That it is told once, and that the result that tells it counts it no more, is checked at every result."""
    running = full(d, prompt=100, priority=0)
    waiting = [request(f"waits {n}") for n in range(3)]
    d.add(*waiting)
    assert sum(p.requests for p in d.until_known().waiting) == 3
    d.abort(waiting[1])
    d.until_ended(waiting[1])
    assert d.output(waiting[1]).token_ids == []
    d.abort(*running)
    d.until_ended(*running)
    d.assert_aborted(waiting[1], *running)
    d.finish(waiting[0], waiting[2])
    assert d.until_idle().blocks_free == d.config.blocks

    prefilling = request("prefills", prompt=500, max_tokens=10)
    d.add(prefilling)
    d.until(lambda: d.load is not None and bool(d.load.running))
    if d.stands_still:
        assert d.output(prefilling).token_ids == []
    d.abort(prefilling)
    d.until_ended(prefilling)
    d.assert_aborted(prefilling)
    assert d.until_idle().blocks_free == d.config.blocks


@law()
def an_abort_of_what_is_not_there_does_nothing(d: Driver) -> None:
    r = request("stays", max_tokens=12)
    d.port.abort(r.request_id, 0)  # before it came
    d.add(r)
    d.port.abort(r.request_id, 1)  # another attempt
    d.port.abort(RequestId("never seen"), 0)
    d.finish(r)
    d.abort(r)  # after its end
    after = request("after", max_tokens=2)
    d.run_undisturbed(after)


@law()
def an_abort_may_come_at_once_and_twice_and_the_end_is_told_once(d: Driver) -> None:
    requests = [request(f"at once {n}", max_tokens=300) for n in range(10)]
    for r in requests:
        d.add(r)
        d.abort(r, r)
    d.until_ended(*requests)
    d.assert_aborted(*requests)
    other = request("other", max_tokens=3)
    d.run_undisturbed(other)
    assert all(d.output(r).ends == 1 for r in requests)


@law()
def when_all_are_aborted_at_once_a_result_says_idle_without_new_traffic(d: Driver) -> None:
    """Public report: after such an abort the engine went idle with its gauges still at busy."""
    requests = [request(f"all {n}", prompt=20 + n, max_tokens=100) for n in range(30)]
    d.add(*requests)
    d.until_tokens(2, *requests[:2])
    d.abort(*requests)
    d.until_ended(*requests)
    assert not requests_in(d.until_idle())
    d.assert_aborted(*(r for r in requests if d.output(r).finish is FinishReason.ABORT))
    d.assert_undisturbed(*(r for r in requests if d.output(r).finish is not FinishReason.ABORT))


@law()
def a_repeat_of_an_attempt_is_not_a_second_one_whether_it_runs_or_cannot(d: Driver) -> None:
    held, impossible = request("repeated", max_tokens=20), request("impossible", prompt=())
    d.add(held, held, impossible)
    d.until_tokens(2, held)
    d.add(held)
    d.finish(held)
    d.until_ended(impossible)
    d.until_known()
    assert d.output(impossible).ends == 1


@law()
def beyond_max_held_each_is_refused_as_full_and_there_is_room_again_when_one_has_ended(d: Driver) -> None:
    held = [request(f"held {n}", prompt=4 + n, max_tokens=400) for n in range(d.config.max_held)]
    d.add(*held)
    d.until_known()
    too_many = [request(f"too many {n}") for n in range(3)]
    d.add(*too_many)
    d.until(lambda: len(d.refusals) >= 3)
    assert [(r.request_id, r.attempt, r.reason) for r in d.refusals] == [
        (r.request_id, 0, RefusalReason.FULL) for r in too_many
    ]
    d.abort(held[0])
    d.until_ended(held[0])
    later = request("later", priority=URGENT, max_tokens=2)
    d.add(later)
    d.until_known()
    assert len(d.refusals) == 3
    d.abort(*held[1:])
    d.finish(later)
    d.until_ended(*held)


# --- keys and values that are shared ---


@law()
def a_prompts_beginning_is_computed_once_for_a_tenant_and_shared_with_no_other(d: Driver) -> None:
    """Three full blocks of 100 tokens."""
    start = d.until_idle().prefix_hit_tokens_total

    def run_as(tenant: str, label: str = "shared") -> int:
        d.run_undisturbed(request(label, prompt=100, max_tokens=2, tenant=tenant))
        return d.until_idle().prefix_hit_tokens_total - start

    assert run_as("a") == 0
    assert run_as("b") == 0
    assert run_as("") == 0
    assert run_as("a", "something else") == 0
    before = d.until_idle().prefill_tokens_total
    assert run_as("a") == 96
    assert d.until_idle().prefill_tokens_total == before + 4
    assert run_as("b") == 2 * 96


@law()
def what_it_tells_of_its_prefix_cache_is_exactly_what_a_prompt_finds_there(d: Driver) -> None:
    """Prompts of five families for two tenants, one at a time, more than the pool can keep: so many leave as well, and what
    left may come back. What each finds is what was told before, and is told with its first token."""
    rng = random.Random("families")
    families = [tuple(rng.randrange(3, 400) for _ in range(200)) for _ in range(5)]
    found: list[int] = []
    lost = 0
    known: dict[tuple[str, int], int] = {}
    for n in range(30):
        family, tenant = rng.randrange(5), rng.choice("xy")
        shared, own = rng.randrange(10, 200), rng.randrange(1, 60)
        prompt = families[family][:shared] + tuple(rng.randrange(3, 400) for _ in range(own))
        r = request(f"prefix {n}", prompt=prompt, max_tokens=rng.randrange(1, 40), tenant=tenant)
        d.until_idle()
        held = d.blocks_held(r)
        (output,) = d.run_undisturbed(r)
        assert output.cached_tokens == held * d.config.block_size_tokens
        found.append(held)
        shared_blocks = shared // d.config.block_size_tokens
        lost += held < min(shared_blocks, known.get((tenant, family), 0))
        known[tenant, family] = max(shared_blocks, known.get((tenant, family), 0))
    assert sum(map(bool, found)) >= 5, "some found something"
    assert lost >= 3, "and some did not find what had been there"
    load = d.until_idle()
    assert 0 < len(d.held) <= load.blocks_cached <= load.blocks_free


@law(lambda config: not static(config))
def choices_of_one_prompt_compute_it_once_and_each_is_as_if_alone(d: Driver) -> None:
    """Of 100 tokens 96 fill blocks; nobody computes those twice, though they come together."""
    before = d.until_idle().prefill_tokens_total
    choices = [request("choices", prompt=100, group="g", choice=n, **CHANCE) for n in range(4)]
    outputs = d.run_undisturbed(*choices)
    assert len({tuple(o.token_ids) for o in outputs}) == 4
    assert d.until_idle().prefill_tokens_total - before <= 100 + 3 * (100 - 96)
    told = sorted(o.cached_tokens for o in outputs)
    assert told[0] == 0, "the first one computed it"
    assert all(96 <= cached < 100 for cached in told[1:])


# --- who goes first ---


def full(d: Driver, *, prompt: int = 8, max_tokens: int = 60, **changes: Any) -> list[Request]:
    """Requests that have every slot, and have put out two tokens each. They are much older than all that come."""
    blockers = [
        low(f"blocker {n}", prompt=prompt, max_tokens=max_tokens, stated=max_tokens, arrived=n - 1000.0, **changes)
        for n in range(d.config.slots)
    ]
    d.add(*blockers)
    d.until_tokens(2, *blockers)
    return blockers


def assert_start_in_order(d: Driver, *requests: Request) -> None:
    """One after the other; who joins in one step starts in one step."""
    starts = [d.started(r) for r in requests]
    assert starts == sorted(starts)
    assert starts[0] < starts[-1]


@law(lambda config: config.order is Order.FCFS)
def first_come_is_first_served_and_priority_plays_no_part(d: Driver) -> None:
    blockers = full(d)
    waiting = [request(f"w {n}", arrived=100.0 + n, priority=n, max_tokens=4 + n % 3) for n in range(8)]
    d.add(*random.Random(1).sample(waiting, 8))
    d.finish(*blockers, *waiting)
    assert_start_in_order(d, *waiting)
    assert d.preempted == []


@law(by_priority)
def the_higher_priority_starts_first_and_within_one_who_came_first_or_is_shortest(d: Driver) -> None:
    blockers = full(d, priority=URGENT)  # hence `low` is overridden: nobody pushes them out
    waiting = [
        request(f"w {n}", arrived=100.0 + n / 1000, priority=p, max_tokens=length, stated=length)
        for n, (p, length) in enumerate([(0, 30), (-5, 4), (5, 20), (0, 8), (5, 6), (-5, 2), (0, 20), (5, 12)])
    ]
    d.add(*waiting)
    d.finish(*blockers, *waiting)
    shortest = d.config.within_class is WithinClass.SJF
    order = sorted(waiting, key=lambda r: (-r.priority, r.sampling.max_tokens if shortest else r.arrived_unix_s))
    assert_start_in_order(d, *order)
    assert d.preempted == []


@law(by_length)
def who_is_expected_to_need_least_starts_first(d: Driver) -> None:
    blockers = full(d, priority=0)
    lengths = [120, 8, 60, 30, 90, 14, 45, 22]
    waiting = [request(f"w {n}", arrived=5.0, max_tokens=k, stated=k) for n, k in enumerate(lengths)]
    d.add(*waiting)
    d.finish(*blockers, *waiting)
    assert_start_in_order(d, *sorted(waiting, key=lambda r: r.sampling.max_tokens))
    assert d.preempted == []


@law(by_length)
def what_was_learned_of_lengths_orders_those_that_follow(d: Driver) -> None:
    """No length is stated, and `max_tokens` is the same for all: tenants differ in what they put out."""
    past = [
        request(f"past {n}", prompt=8, tenant=tenant, max_tokens=made, seed=n)
        for n in range(12)
        for tenant, made in (("brief", 3), ("wordy", 60))
    ]
    d.run(*past)
    blockers = full(d, priority=0)
    waiting = [
        request(f"{name} {n}", prompt=8, tenant=tenant, max_tokens=60, arrived=5.0)
        for n in range(4)
        for name, tenant in (("a", "wordy"), ("b", "brief"))  # by name, the other way round
    ]
    d.add(*waiting)
    d.finish(*blockers, *waiting)
    assert_start_in_order(d, *sorted(waiting, key=lambda r: r.tenant))


@law(lambda config: by_length(config) and not static(config))
def however_short_nobody_goes_before_one_that_has_waited_the_longest_wait(d: Driver) -> None:
    """400 tokens at 4 a second of waiting would be 100 s, and the longest wait is 60 s. 40 tokens are 10 s.

    One slot changes hands: the other three are held by requests that are older still.
    """
    blockers = full(d, max_tokens=88)
    d.abort(blockers[3])
    d.until_ended(blockers[3])
    now = 1000.0
    holder = request("holder", prompt=8, max_tokens=12, arrived=-999.0, priority=LOW)
    d.add(holder)
    d.until_tokens(1, holder)
    long = request("long", prompt=8, arrived=now, max_tokens=400, stated=400, priority=LOW)
    shorts = [
        request(f"short {at}", prompt=8, arrived=now + at, max_tokens=2, stated=2, priority=LOW)
        for at in (59.0, 61.0, 3.0)
    ]
    middle = request("middle", prompt=8, arrived=now, max_tokens=40, stated=40, priority=LOW)
    d.add(long, middle, *shorts)
    d.until_tokens(1, long)
    d.abort(long)
    d.finish(*blockers[:3], holder, middle, *shorts)
    before, after, soon = shorts
    starts = [d.started(r) for r in (soon, middle, before, long, after)]
    assert starts == sorted(set(starts)), "each after the other"


@law(pushes_nobody_out)
def nobody_is_pushed_out_of_a_slot_however_urgent_or_short_the_one_who_comes(d: Driver) -> None:
    blockers = full(d)
    urgent = request("urgent", priority=URGENT, arrived=0.0, max_tokens=2, stated=2)
    d.add(urgent)
    d.finish(*blockers, urgent)
    assert d.started(urgent) > min(d.came_after_step[urgent.request_id], 10**9) + 10
    assert d.preempted == []


@law(static)
def a_batch_that_runs_takes_nobody_in_until_all_of_it_have_ended(d: Driver) -> None:
    first = [request(f"first {n}", max_tokens=6 + 10 * n) for n in range(2)]
    d.add(*first)
    d.until_tokens(1, *first)
    late = request("late", priority=URGENT, max_tokens=2)
    d.add(late)
    d.until_ended(*first)
    assert d.output(late).token_ids == []
    d.finish(*first, late)


# --- urgent work ---


@law(by_priority_at_once)
def with_every_slot_taken_urgent_work_starts_at_once_and_whom_it_displaces_ends_as_if_undisturbed(d: Driver) -> None:
    """Public report: an urgent arrival waited for a slot instead of displacing less urgent work."""
    victims = [low(f"low {n}", **s) for n, s in enumerate((CHANCE, PENALTIES, {}, {**CHANCE, **PENALTIES}))]
    urgent = request("urgent", prompt=40, priority=URGENT, max_tokens=12)
    d.add(*victims)
    d.until_tokens(8, *victims)
    d.add(urgent)
    d.until_tokens(1, urgent)
    own_prefill_steps = 1  # 40 tokens, and a budget of 64
    assert d.steps_to_first_token(urgent) <= (0 if d.stands_still else 2) + own_prefill_steps
    assert d.load is not None
    assert [(p.priority, p.requests) for p in d.load.running] == [(URGENT, 1), (LOW, 3)]
    assert [(p.priority, p.requests) for p in d.load.waiting] == [(LOW, 1)]
    assert d.load.waiting[0].blocks > 0, "it keeps what it has computed"
    d.finish(urgent, *victims)
    assert [(p.request_id, p.attempt, p.for_request_id, p.means) for p in d.preempted] == [
        (victims[3].request_id, 0, urgent.request_id, PreemptionMeans.PAUSE)
    ]


@law(by_priority_at_once)
def a_long_urgent_prompt_gets_its_first_token_within_two_steps_of_its_own_prefill(d: Driver) -> None:
    """Beside decodes, and beside a long prompt of less urgent work that is half-way."""
    blockers = full(d)
    urgent = request("long and urgent", prompt=300, priority=URGENT, max_tokens=2)
    d.add(urgent)
    d.until_tokens(1, urgent)
    assert d.steps_to_first_token(urgent) <= 2 + math.ceil(300 / 64)
    d.abort(*blockers)
    d.until_ended(urgent, *blockers)

    slow = low("slow", prompt=400, max_tokens=2)
    urgent = request("urgent", prompt=128, priority=URGENT, max_tokens=2)
    d.add(slow)
    d.until(lambda: d.load is not None and bool(d.load.running))
    d.add(urgent)
    d.until_tokens(1, urgent)
    assert d.steps_to_first_token(urgent) <= 2 + math.ceil(128 / 64)
    d.finish(slow, urgent)


@law(lambda config: by_priority_at_once(config) and config.prefix_cache)
def what_it_says_that_it_holds_is_what_its_books_say_and_who_leaves_frees_so_many_blocks(d: Driver) -> None:
    """Two that run share the two blocks in which they begin alike; one is paused, and two wait without a block."""
    size = d.config.block_size_tokens
    first = request("first", prompt=2 * size + 6, max_tokens=130, stated=130)
    same = (*first.prompt_ids[: 2 * size], 17, 18)
    second = request("second", prompt=same, max_tokens=120, stated=120)
    lower = request("lower", prompt=5, priority=-1, max_tokens=120)
    paused = request("paused", prompt=5, priority=-5, max_tokens=60, stated=60)
    urgent = request("urgent", prompt=size + 1, priority=URGENT, max_tokens=150, stated=150)
    waiting = request("waiting", prompt=8, priority=-6, max_tokens=30, stated=30)
    last = request("last", prompt=8, priority=-20, max_tokens=30, stated=20)
    everybody = (first, second, lower, paused, urgent, waiting, last)
    d.add(first)
    d.until_tokens(1, first)
    d.add(second, lower, paused)
    d.until_tokens(2, second, lower, paused)
    d.add(urgent)
    d.until_tokens(1, urgent)
    d.add(waiting, last)
    d.until_known()

    told = {r.request_id: len(d.output(r).token_ids) for r in everybody}
    before, asked, few = d.load, d.port.held(16), [d.port.held(limit) for limit in (4, 1)]
    if d.stands_still:
        d.abort(paused)  # done after what was asked and before the next step
        d.take()
    else:
        d.until(lambda: all(f.done() for f in (asked, *few)))
    assert before is not None
    assert d.load is not None
    held = {h.request_id: h for h in asked.result(PATIENCE_S)}
    assert held.keys() == {r.request_id for r in everybody}
    standing = {paused.request_id: "paused", waiting.request_id: "waits", last.request_id: "waits"}
    for r in everybody:
        h = held[r.request_id]
        assert (h.attempt, h.priority) == (0, r.priority)
        assert h.standing == standing.get(r.request_id, "runs")
        made = max(0, h.tokens + 1 - len(r.prompt_ids))
        assert made >= told[r.request_id], "it has told more than it has computed"
        assert h.blocks == math.ceil(h.tokens / size) - (2 if r in (first, second) else 0)
        if r.stated_output_tokens is not None:
            assert h.remaining_tokens == r.stated_output_tokens - made
        assert h.to_compute_tokens <= 1 or r in (waiting, last), "it has told a token, and lost nothing since"
    assert [held[r.request_id].tokens for r in (waiting, last)] == [0, 0]
    assert [held[r.request_id].to_compute_tokens for r in (waiting, last)] == [
        len(waiting.prompt_ids),
        len(last.prompt_ids),
    ]
    chosen = [[h.request_id for h in f.result(PATIENCE_S)] for f in few]
    assert chosen == [[paused.request_id, waiting.request_id, lower.request_id, first.request_id], [lower.request_id]]
    if d.stands_still:
        grew = sum(p.blocks for p in d.load.running) - sum(p.blocks for p in before.running)
        assert d.load.blocks_free == before.blocks_free + held[paused.request_id].blocks - grew
    d.abort(*everybody)
    d.until_ended(*everybody)


@law(by_priority_at_once)
def victims_are_strictly_lower_and_the_last_in_order_goes_first(d: Driver) -> None:
    running = [low(f"v {n}", priority=p, arrived=float(n)) for n, p in enumerate((0, -10, -5, -10))]
    d.add(*running)
    d.until_tokens(3, *running)
    urgent = [request(f"u {n}", priority=-1, max_tokens=30, arrived=50.0 + n) for n in range(4)]
    for n, r in enumerate(urgent[:3]):
        d.add(r)
        d.until_tokens(1, r)
        expected = [running[3], running[1], running[2]][: n + 1]
        assert [p.request_id for p in d.preempted] == [v.request_id for v in expected]
    d.add(urgent[3])  # all that run now are its equals, or above it
    d.until_known()
    d.until_tokens(8, urgent[0])
    assert d.output(urgent[3]).token_ids == []
    d.finish(*running, *urgent)
    assert len(d.preempted) == 3


@law(by_priority)
def equal_priority_never_preempts(d: Driver) -> None:
    running = [request(f"r {n}", max_tokens=30) for n in range(4)]
    late = request("late", max_tokens=4, arrived=1.0, stated=4)  # the earliest of all, and still it waits
    d.add(*running)
    d.until_tokens(4, *running)
    d.add(late)
    d.until_tokens(1, late)
    assert any(d.output(r).ends for r in running)
    d.finish(late, *running)
    assert d.preempted == []


@law(by_priority_at_once)
def preempted_work_goes_on_before_new_work_of_its_priority(d: Driver) -> None:
    victims = [low(f"old {n}", max_tokens=40) for n in range(4)]
    d.add(*victims)
    d.until_tokens(4, *victims)
    urgent = request("urgent", priority=URGENT, max_tokens=6)
    new = low("new", max_tokens=4, arrived=1.0, stated=4)
    d.add(urgent, new)
    d.until_tokens(1, urgent)
    (paused,) = {p.request_id for p in d.preempted}
    made = len(d.outputs[paused].token_ids)
    d.until(lambda: len(d.outputs[paused].token_ids) > made)
    assert not d.output(new).token_ids
    d.finish(urgent, new, *victims)


@law(by_priority_at_once)
def urgent_work_takes_blocks_and_who_lost_them_ends_as_if_undisturbed(d: Driver) -> None:
    """Three hold 18 of 24 blocks. The urgent prompt needs 10."""
    holders = [low(f"holder {n}", prompt=170, max_tokens=20, **CHANCE, **PENALTIES) for n in range(3)]
    urgent = request("big urgent", prompt=300, priority=URGENT, max_tokens=6)
    d.add(*holders)
    d.until_tokens(4, *holders)
    d.add(urgent)
    d.finish(urgent, *holders)
    assert d.means() == {PreemptionMeans.SWAP if d.config.host_blocks else PreemptionMeans.RECOMPUTE}
    assert {p.for_request_id for p in d.preempted} == {urgent.request_id}
    assert all(p.blocks_freed > 0 for p in d.preempted)


@law(lambda config: by_priority_at_once(config) and not config.host_blocks)
def nobody_is_recomputed_for_urgent_work_more_often_than_allowed_and_who_waits_for_that_is_counted(d: Driver) -> None:
    """Both need more than half of the pool. Two recomputes are allowed; then the urgent one waits, and ends too."""
    blocked_before = d.until_idle().urgent_blocked_total
    victim = low("large", prompt=380, max_tokens=100)
    d.add(victim)
    urgent = [request(f"urgent {n}", prompt=390, priority=URGENT, max_tokens=2) for n in range(4)]
    made = 0
    for r in urgent[:3]:
        d.until_tokens(made + 2, victim)
        made = len(d.output(victim).token_ids)
        d.add(r)
        if r is not urgent[2]:
            d.until_ended(r)
    d.until_known()
    d.until_tokens(made + 20, victim)
    assert d.output(urgent[2]).token_ids == []
    d.finish(victim, *urgent[:3])
    assert [p.means for p in d.preempted] == [PreemptionMeans.RECOMPUTE] * 2
    assert d.until_idle().urgent_blocked_total == blocked_before + 1


@law(by_priority_at_once)
def a_preempted_request_can_be_aborted_and_gives_back_what_it_keeps(d: Driver) -> None:
    victims = full(d, max_tokens=200)
    urgent = request("urgent", priority=URGENT, max_tokens=60)
    d.add(urgent)
    d.until_tokens(1, urgent)
    (paused,) = [v for v in victims if v.request_id == d.preempted[0].request_id]
    assert d.load is not None
    assert d.load.waiting[0].blocks > 0
    d.abort(paused)
    d.until_ended(paused)
    assert d.load.waiting == ()
    d.abort(*victims[:3])
    d.until_ended(*victims)
    d.assert_aborted(*victims)
    d.finish(urgent)


@law(lambda config: config.order is Order.SRPT and continuous(config))
def who_is_expected_to_need_much_less_pushes_out_who_needs_most_and_a_little_less_does_not(d: Driver) -> None:
    lengths = [100, 160, 220, 130]
    running = [request(f"r {k}", arrived=5.0, max_tokens=k, stated=k) for k in lengths]
    d.add(*running)
    d.until_tokens(2, *running)
    margin = d.config.srpt_margin_tokens
    close = request("close", arrived=5.0, max_tokens=220, stated=int(220 - margin) + 2)
    d.add(close)
    d.until_known()
    d.until_tokens(8, *running)
    assert d.preempted == []
    assert d.output(close).token_ids == []
    d.abort(close)
    short = request("short", arrived=5.0, max_tokens=8, stated=8)
    d.add(short)
    d.until_tokens(1, short)
    assert d.steps_to_first_token(short) <= (0 if d.stands_still else 2) + 1
    d.finish(short, *running)
    assert [(p.request_id, p.for_request_id) for p in d.preempted] == [(running[2].request_id, short.request_id)]


@law(continuous)
def when_the_pool_runs_out_the_last_in_order_gives_way_and_all_end_as_if_undisturbed(d: Driver) -> None:
    """Four that grow to 9 blocks each, in a pool of 24."""
    requests = [
        request(f"growing {n}", prompt=150, max_tokens=120, stated=120, arrived=5.0 + n * 1e-3) for n in range(4)
    ]
    d.run_undisturbed(*requests)
    assert d.preempted
    assert {p.for_request_id for p in d.preempted} == {None}, d.preempted
    assert requests[0].request_id not in {p.request_id for p in d.preempted}, "the first is never a victim"


@law()
def how_long_a_request_became_is_told_over_what_was_predicted_when_it_was_whole(d: Driver) -> None:
    """24 tokens where 12 and 16 were stated are 2 and 1.5 times as many; one that came with a part of its output, one that
    was ended by others and one that generates nothing say nothing."""

    def told() -> tuple[int, float]:
        by_class = dict(d.port.progress().foretold)
        return (sum(by_class["c"].counts), by_class["c"].total) if by_class else (0, 0.0)

    count, total = told()
    whole = [request(f"foretold {stated}", max_tokens=24, stated=stated) for stated in (12, 16)]
    cut = request("foretold and cut", max_tokens=24, stated=12)
    cut = msgspec.structs.replace(cut, emitted_ids=d.expected(cut).token_ids[:6])
    scored = request("foretold and scored", max_tokens=0, prompt_logprobs=1)
    d.run_undisturbed(*whole, cut, scored)
    ended = request("foretold and ended", max_tokens=400, stated=12)
    d.add(ended)
    d.until_tokens(1, ended)
    d.abort(ended)
    d.until_idle()
    assert told() == (count + 2, total + 3.5)


# --- everything at once ---

WALK_DEEDS = 220
WALK_LIVE_MAX = 30


@law()
def after_a_random_walk_of_bursts_aborts_and_priorities_all_have_ended_as_if_alone(d: Driver) -> None:
    walk(d, random.Random("walk"))


def walk(d: Driver, rng: random.Random, deeds: int = WALK_DEEDS) -> None:
    """All laws of `Driver.take` at each result, and at the end each request's own."""
    added: list[Request] = []
    aborted: set[str] = set()
    for n in range(deeds):
        live = [r for r in added if not d.output(r).ends]
        what = rng.choices(("hear", "add", "abort", "burst"), (60, 20, 6, 3))[0]
        if what in ("add", "burst") and len(live) < WALK_LIVE_MAX:
            for k in range(1 if what == "add" else 6):
                new = any_requests(d, rng, f"walk {n} {k}")
                d.add(*new)
                added.extend(new)
        elif what == "abort" and live:
            r = rng.choice(live)
            aborted.add(r.request_id)
            d.abort(r)
        elif live:
            d.take()
    d.until_ended(*added)
    for r in added:
        if d.output(r).finish is FinishReason.ABORT:
            assert r.request_id in aborted
            d.assert_aborted(r)
        else:
            d.assert_undisturbed(r)
    assert len(added) > deeds / 5
    assert len(aborted) > deeds / 50


def any_requests(d: Driver, rng: random.Random, label: str) -> list[Request]:
    """A request, or two choices of one; prompts of a tenant begin alike, some large; some are continued."""
    large = rng.random() < 0.15
    common = request(f"system {rng.randrange(3)}", prompt=rng.choice((0, 40, 70))).prompt_ids
    own = request(label, prompt=rng.randrange(1, 30) + 250 * large).prompt_ids
    choices = rng.choice((1, 1, 1, 2))
    length = rng.randrange(1, 25) + 40 * (rng.random() < 0.2)
    sampling: dict[str, Any] = {
        "max_tokens": length,
        "stated": rng.choice((None, length)),
        "seed": rng.randrange(-5, 2**40),
        "stop": rng.choice(((), ("e",), ("th", "a b"))),
        "ignore_eos": rng.random() < 0.5,
        "min_tokens": rng.choice((0, 0, 3)),
        "logprobs": rng.choice((None, None, 1)),
        "prompt_logprobs": rng.choice((None, None, None, 1)),
        **rng.choice(({}, CHANCE, PENALTIES)),
    }
    priority, tenant, cut = rng.choice((LOW, 0, 0, URGENT)), rng.choice(("acme", "zeta")), rng.random() < 0.1
    made = []
    for choice in range(choices):
        r = request(
            label,
            prompt=common + own,
            priority=priority,
            tenant=tenant,
            group=label if choices > 1 else "",
            choice=choice,
            **sampling,
        )
        if cut:
            whole = d.expected(r).token_ids
            r = msgspec.structs.replace(r, emitted_ids=tuple(whole[: rng.randrange(len(whole))]))
        made.append(r)
    return made


# --- its own end ---


def told_to_stop_it_ends_with_work_in_it_and_is_not_called_dead(d: Driver) -> None:
    requests = [request(f"unfinished {n}", max_tokens=400) for n in range(6)]
    d.add(*requests)
    d.until_tokens(2, *requests[:4])
    assert d.port.progress().alive
    d.stop()
    progress = d.port.progress()
    assert (progress.alive, progress.failure, progress.step_age_s) == (False, "", None)
    while d.has_events():
        d.take()  # fails if a death is told
    d.port.add(request("late"), 0)  # these return at once, as ever
    d.port.abort(requests[0].request_id, 0)
    d.stop()
    assert not d.has_events()


def assert_tells_its_death(d: Driver, why: str) -> None:
    told = d.death()
    assert why in told
    d.stop()
    progress = d.port.progress()
    assert (progress.alive, progress.failure, progress.step_age_s) == (False, told, None)
    d.port.add(request("late"), 0)
    assert not d.has_events(), "it dies once"


def a_listener_that_raises_is_its_death_and_is_told(d: Driver) -> None:
    d.add(*[request(f"unheard {n}", max_tokens=400) for n in range(3)])
    d.take()
    d.break_callback()
    assert_tells_its_death(d, BrokenCallbackError.__name__)


def killed_it_tells_its_death(d: Driver) -> None:
    assert d.kill is not None
    requests = [request(f"bereaved {n}", max_tokens=400) for n in range(30)]
    d.add(*requests)
    d.until_tokens(2, *requests[:4])
    d.kill()
    assert_tells_its_death(d, "")


ENDINGS = [
    Law(ending, ends=True)
    for ending in (
        told_to_stop_it_ends_with_work_in_it_and_is_not_called_dead,
        a_listener_that_raises_is_its_death_and_is_told,
        killed_it_tells_its_death,
    )
]
