"""The laws of limits: what a key is given never exceeds its burst and its rate, and what it did not use comes back."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.types import FinishReason, Outcome
from router.errors import ApiError
from router.limits import FORGET_EVERY_S, NO_LIMITS, Lease, Limiter, Limits, used_tokens
from router.outcomes import Ending

SLACK = 1e-6
"""Of floating point."""


def limiter() -> Limiter:
    return Limiter(random.Random(1))


def refusal(limits: Limits, lim: Limiter, now_s: float, key: str = "k") -> ApiError:
    with pytest.raises(ApiError) as caught:
        lim.begin(key, limits, now_s)
    return caught.value


# --- requests per second ---


@settings(max_examples=200, deadline=None)
@given(
    rate=st.floats(0.05, 50),
    gaps_s=st.lists(st.floats(0, 5), min_size=1, max_size=200),
)
def test_in_any_interval_requests_let_in_are_at_most_burst_and_rate_times_its_length(
    rate: float, gaps_s: list[float]
) -> None:
    lim, now_s, taken_s = limiter(), 100.0, list[float]()
    for gap_s in gaps_s:
        now_s += gap_s
        try:
            lim.begin("k", Limits(requests_per_s=rate), now_s).end(now_s)
        except ApiError:
            continue
        taken_s.append(now_s)
    burst = max(1.0, rate)
    for first, begin_s in enumerate(taken_s):
        for last in range(first, len(taken_s)):
            assert last - first + 1 <= burst + rate * (taken_s[last] - begin_s) + SLACK


@settings(max_examples=100, deadline=None)
@given(rate=st.floats(0.05, 50), gaps_s=st.lists(st.floats(0, 5), min_size=1, max_size=100))
def test_nothing_is_refused_that_a_plain_count_of_what_has_flowed_in_would_let_in(
    rate: float, gaps_s: list[float]
) -> None:
    """The model: what flowed in since the start, less what overflowed, less what was taken; kept as plain sums."""
    lim, now_s, burst = limiter(), 0.0, max(1.0, rate)
    flowed = lost = taken = 0.0
    for gap_s in gaps_s:
        now_s += gap_s
        flowed += rate * gap_s
        lost = max(lost, flowed - taken)
        left = burst + flowed - lost - taken
        try:
            lim.begin("k", Limits(requests_per_s=rate), now_s).end(now_s)
        except ApiError:
            assert left < 1 + SLACK
        else:
            assert left >= 1 - SLACK
            taken += 1


def test_burst_is_one_second_s_worth_and_one_request_at_least() -> None:
    lim = limiter()
    for _ in range(3):
        lim.begin("fast", Limits(requests_per_s=3), 0.0)
    assert refusal(Limits(requests_per_s=3), lim, 0.0, "fast").status == 429
    lim.begin("slow", Limits(requests_per_s=0.1), 0.0)
    assert refusal(Limits(requests_per_s=0.1), lim, 9.9, "slow").status == 429
    lim.begin("slow", Limits(requests_per_s=0.1), 10.0)


def test_refused_request_takes_nothing() -> None:
    lim, limits = limiter(), Limits(requests_per_s=1, max_streams=1)
    held = lim.begin("k", limits, 0.0)
    for _ in range(10):
        assert "max_streams" in str(refusal(limits, lim, 1.0))
    held.end(1.0)
    lim.begin("k", limits, 1.0).end(1.0)


def test_clock_that_steps_back_gives_nothing() -> None:
    lim, limits = limiter(), Limits(requests_per_s=1)
    lim.begin("k", limits, 10.0)
    refusal(limits, lim, 0.0)
    refusal(limits, lim, 10.5)
    lim.begin("k", limits, 11.0)
    a_token_a_second = Limits(tokens_per_min=60)
    lease = lim.begin("t", a_token_a_second, 10.0)
    lease.charge(60, 10.0)
    lease.used_tokens = 60
    lease.end(0.0)
    with pytest.raises(ApiError):
        lim.begin("t", a_token_a_second, 10.0).charge(1, 10.0)


# --- streams and tokens, against a plain model ---


@dataclass
class _Open:
    lease: Lease
    charged: int


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_streams_and_tokens_are_conserved_over_any_sequence_of_begins_and_ends(data: st.DataObject) -> None:
    streams, minute = data.draw(st.integers(1, 5)), data.draw(st.integers(60, 6000))
    limits = Limits(tokens_per_min=minute, max_streams=streams)
    lim, now_s, held = limiter(), 0.0, list[_Open]()
    flowed = lost = net = 0.0
    """Tokens that flowed in, that overflowed, and that are out: taken and not given back."""
    for _ in range(data.draw(st.integers(1, 60))):
        gap_s = data.draw(st.floats(0, 20))
        now_s += gap_s
        flowed += minute / 60 * gap_s
        lost = max(lost, flowed - net)
        ends = data.draw(st.booleans())
        if held and ends:
            done = held.pop(data.draw(st.integers(0, len(held) - 1)))
            used = data.draw(st.integers(0, done.charged))
            done.lease.used_tokens = used
            done.lease.end(now_s)
            net -= done.charged - used
            lost = max(lost, flowed - net)
            continue
        if len(held) == streams:
            assert "max_streams" in str(refusal(limits, lim, now_s))
            continue
        lease = lim.begin("k", limits, now_s)
        wanted = data.draw(st.integers(1, minute))
        left = minute + flowed - lost - net
        try:
            lease.charge(wanted, now_s)
        except ApiError:
            assert wanted > left - SLACK * minute
            lease.end(now_s)
        else:
            assert wanted <= left + SLACK * minute
            net += wanted
            held.append(_Open(lease, wanted))
        assert net <= minute + flowed + SLACK * minute, "burst and what flowed in is all that there is"
    for still in held:
        still.lease.end(now_s)
    # An hour later everything has flowed back, and exactly that.
    whole = lim.begin("k", limits, now_s + 3600)
    whole.charge(minute, now_s + 3600)
    with pytest.raises(ApiError):
        whole.charge(1, now_s + 3600)


def test_lease_ends_once() -> None:
    lease = limiter().begin("k", NO_LIMITS, 0.0)
    lease.end(0.0)
    with pytest.raises(AssertionError):
        lease.end(0.0)


def test_request_that_can_never_fit_is_the_client_s_to_change_and_not_to_repeat() -> None:
    lease = limiter().begin("k", Limits(tokens_per_min=100), 0.0)
    with pytest.raises(ApiError) as caught:
        lease.charge(101, 0.0)
    assert (caught.value.status, caught.value.body.code, caught.value.body.param) == (
        400,
        "request_too_large",
        "max_tokens",
    )
    assert "retry-after" not in caught.value.headers
    lease.charge(100, 0.0)


def test_changed_limits_of_a_key_count_at_once_and_keep_its_open_streams() -> None:
    lim = limiter()
    held = lim.begin("k", Limits(max_streams=5), 0.0)
    assert refusal(Limits(max_streams=1), lim, 0.0).status == 429
    held.end(0.0)
    lim.begin("k", Limits(max_streams=1), 0.0)


def test_keys_do_not_share() -> None:
    lim, limits = limiter(), Limits(requests_per_s=0.1, max_streams=1)
    for number in range(100):
        lim.begin(str(number), limits, 0.0)


# --- what is used ---


def ending(outcome: Outcome, output: int, prompt: int = 7) -> Ending:
    return Ending(outcome, prompt, output, FinishReason.STOP if outcome is Outcome.FINISHED else None)


def test_prompt_counts_once_and_the_output_of_each_choice() -> None:
    assert used_tokens([ending(Outcome.FINISHED, 3), ending(Outcome.FINISHED, 5)]) == 7 + 3 + 5


@pytest.mark.parametrize("outcome", sorted(set(Outcome) - {Outcome.FINISHED, Outcome.CANCELLED}))
def test_answer_that_never_began_costs_nothing_and_one_that_broke_costs_what_came(outcome: Outcome) -> None:
    assert used_tokens([ending(outcome, 0)]) == 0
    assert used_tokens([ending(outcome, 4)]) == 7 + 4


def test_client_that_leaves_pays_for_its_prompt() -> None:
    assert used_tokens([ending(Outcome.CANCELLED, 0)]) == 7
    assert used_tokens([None, None]) == 0


# --- what a client is told ---


@pytest.mark.parametrize(
    ("limits", "named"),
    [
        (Limits(requests_per_s=0.001), "requests_per_s"),
        (Limits(max_streams=1), "max_streams"),
    ],
)
def test_429_names_the_limit_and_says_when_to_come_back_in_whole_seconds(limits: Limits, named: str) -> None:
    lim = limiter()
    lim.begin("k", limits, 0.0)
    error = refusal(limits, lim, 0.0)
    assert (error.status, error.body.code, error.body.type) == (429, "rate_limit_exceeded", "rate_limit_error")
    assert named in error.body.message
    assert 1 <= int(error.headers["retry-after"]) <= 60
    assert error.headers["x-llm-d-request-dropped-reason"] == "rejected-rate-limited"


def test_retry_after_is_spread_around_the_time_that_it_takes() -> None:
    """A bucket of 0.05 requests a second has one again after 20 s; ±20 % is the jitter of admission."""
    lim, limits = limiter(), Limits(requests_per_s=0.05)
    lim.begin("k", limits, 0.0)
    waits_s = {int(refusal(limits, lim, 0.0).headers["retry-after"]) for _ in range(200)}
    assert waits_s <= set(range(16, 25))
    assert len(waits_s) > 5


def test_ratelimit_headers_say_burst_what_is_left_and_when_it_is_whole() -> None:
    lim, limits = limiter(), Limits(requests_per_s=2, tokens_per_min=6000)
    lease = lim.begin("k", limits, 0.0)
    lease.charge(500, 0.0)
    # One of 2 requests at 2/s is back in 0.5 s, 500 tokens at 100/s in 5 s.
    assert lease.headers(0.0) == [
        ("x-ratelimit-limit-requests", "2"),
        ("x-ratelimit-remaining-requests", "1"),
        ("x-ratelimit-reset-requests", "0.500s"),
        ("x-ratelimit-limit-tokens", "6000"),
        ("x-ratelimit-remaining-tokens", "5500"),
        ("x-ratelimit-reset-tokens", "5.000s"),
    ]
    assert lim.begin("unlimited", NO_LIMITS, 0.0).headers(0.0) == []


# --- what is held ---


def test_keys_that_are_as_new_are_forgotten_and_no_others() -> None:
    lim, limits = limiter(), Limits(requests_per_s=1, tokens_per_min=60)
    for number in range(1000):
        lim.begin(f"gone-{number}", limits, 0.0).end(0.0)
    streaming = lim.begin("streaming", limits, 0.0)
    lender = lim.begin("spent", limits, FORGET_EVERY_S - 1)
    lender.charge(60, FORGET_EVERY_S - 1)
    lender.used_tokens = 60
    lender.end(FORGET_EVERY_S - 1)
    lim.begin("new", limits, FORGET_EVERY_S)
    assert len(lim) == 3  # streaming, spent, new
    again = lim.begin("spent", limits, FORGET_EVERY_S)
    with pytest.raises(ApiError):
        again.charge(60, FORGET_EVERY_S)
    streaming.end(FORGET_EVERY_S)


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf])
def test_limits_that_mean_nothing_are_no_limits_of_a_key(value: float) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"requests_per_s": value}, Limits)
