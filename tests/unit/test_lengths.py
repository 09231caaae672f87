"""What the length predictor promises: within bounds, growing with what was made, right where the truth is known."""

from __future__ import annotations

import itertools
import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.lengths import EDGES, MAX_KEYS, MEMORY_OBSERVATIONS, PRIOR_OBSERVATIONS, LengthPredictor

ME = ("tenant", "class", 100)

lengths = st.integers(1, 5000)
observations = st.lists(
    st.tuples(st.sampled_from("ab"), st.sampled_from("cd"), st.integers(0, 3000), lengths), max_size=30
)


def taught(seen: list[tuple[str, str, int, int]]) -> LengthPredictor:
    predictor = LengthPredictor()
    for tenant, priority_class, prompt, output in seen:
        predictor.observe(tenant, priority_class, prompt, output)
    return predictor


@given(observations, lengths, st.data())
@settings(max_examples=60)
def test_expectation_and_quantiles_are_between_what_was_made_and_what_is_allowed_and_grow_with_both(
    seen: list[tuple[str, str, int, int]], max_tokens: int, data: st.DataObject
) -> None:
    predictor = taught(seen)
    stated = data.draw(st.none() | lengths)
    made = sorted(data.draw(st.lists(st.integers(0, max_tokens - 1), min_size=1, max_size=6)))
    expected = [predictor.predict("a", "c", 100, max_tokens=max_tokens, made=k, stated=stated) for k in made]
    assert all(k < e <= max_tokens for k, e in zip(made, expected, strict=True))
    assert all(a <= b + 1e-6 for a, b in itertools.pairwise(expected))
    for k in made:
        qs = [predictor.quantile(q, "a", "c", 100, max_tokens=max_tokens, made=k) for q in (0.1, 0.5, 0.9, 1.0)]
        assert all(k < q <= max_tokens for q in qs)
        assert qs == sorted(qs)
    assert predictor.predict("a", "c", 100, max_tokens=max_tokens, made=max_tokens) == max_tokens


@given(observations, lengths)
@settings(max_examples=30)
def test_equal_observations_give_equal_predictions(seen: list[tuple[str, str, int, int]], max_tokens: int) -> None:
    one, other = taught(seen), taught(seen)
    assert one.predict("a", "c", 9, max_tokens=max_tokens) == other.predict("a", "c", 9, max_tokens=max_tokens)


def test_before_anything_is_known_all_lengths_up_to_the_limit_are_equally_likely() -> None:
    predictor = LengthPredictor()
    assert predictor.predict(*ME, max_tokens=99) == pytest.approx((1 + 99) / 2)
    assert predictor.predict(*ME, max_tokens=99, made=49) == pytest.approx((50 + 99) / 2)
    assert predictor.quantile(0.5, *ME, max_tokens=100) == 50
    assert predictor.quantile(0.5, *ME, max_tokens=100, made=50) == 75


def test_a_stated_length_is_believed_until_it_is_exceeded() -> None:
    predictor = LengthPredictor()
    assert predictor.predict(*ME, max_tokens=99, stated=20) == 20
    assert predictor.predict(*ME, max_tokens=99, made=19, stated=20) == 20
    assert predictor.predict(*ME, max_tokens=99, made=20, stated=20) == pytest.approx((21 + 99) / 2)
    assert predictor.predict(*ME, max_tokens=10, stated=20) == 10


def test_the_conditional_expectation_is_that_of_the_mixture_by_hand() -> None:
    """Lengths 2 and 4 (bins of their own) were seen by another class, so that only the most general histogram speaks."""
    predictor = LengthPredictor()
    predictor.observe("x", "other", 1, 2)
    predictor.observe("x", "other", 1, 4)
    keep = 1 - Fraction(1, MEMORY_OBSERVATIONS)
    weight = keep + 1
    share = weight / (weight + Fraction(PRIOR_OBSERVATIONS))
    mass = dict.fromkeys(range(1, 11), (1 - share) / 10)
    mass[2] += share * keep / weight
    mass[4] += share * 1 / weight
    for made in range(10):
        above = {n: p for n, p in mass.items() if n > made}
        by_hand = sum(n * p for n, p in above.items()) / sum(above.values())
        assert predictor.predict(*ME, max_tokens=10, made=made) == pytest.approx(float(by_hand))
    # What is longer than allowed ends at the limit.
    mass = dict.fromkeys((1, 2, 3), (1 - share) / 3)
    mass[2] += share * keep / weight
    mass[3] += share * 1 / weight
    assert predictor.predict(*ME, max_tokens=3) == pytest.approx(float(sum(n * p for n, p in mass.items())))


def test_the_nearer_evidence_counts_more_the_more_there_is_of_it() -> None:
    """The class makes 1,000 tokens; this tenant 10. After n of its own, n/(n + 8) of the estimate is its own, and of
    the rest n/(n + 8 + ...) too: it moves from the class to the tenant, and always towards it."""
    predictor = LengthPredictor()
    for _ in range(200):
        predictor.observe("other", "class", 100, 1000)
    estimates = []
    for _ in range(100):
        estimates.append(predictor.predict(*ME, max_tokens=4000))
        predictor.observe(*ME, 10)
    assert estimates[0] == pytest.approx(1000, rel=0.1)
    assert estimates == sorted(estimates, reverse=True)
    assert estimates[-1] < 200


@pytest.mark.parametrize("q", [0.1, 0.5, 0.9])
def test_quantiles_and_the_mean_converge_to_those_of_the_distribution_that_is_seen(q: float) -> None:
    """Log-normal lengths, median 200. Four bins to a doubling are 19 % wide; 512 observations know a quantile within
    two standard errors of 2 % each."""
    rng = random.Random(4)
    draws = [max(1, round(rng.lognormvariate(5.3, 0.8))) for _ in range(5000)]
    predictor = LengthPredictor()
    for length in draws:
        predictor.observe(*ME, length)
    draws.sort()
    got = predictor.quantile(q, *ME, max_tokens=10_000)
    assert draws[int((q - 0.045) * 5000)] / 1.19 <= got <= draws[int((q + 0.045) * 5000)] * 1.19
    long = [d for d in draws if d > 300]
    assert predictor.predict(*ME, max_tokens=10_000, made=300) == pytest.approx(sum(long) / len(long), rel=0.15)


def test_a_change_of_traffic_is_followed() -> None:
    predictor = LengthPredictor()
    for _ in range(3000):
        predictor.observe(*ME, 1000)
    for _ in range(2 * MEMORY_OBSERVATIONS):
        predictor.observe(*ME, 10)
    assert predictor.quantile(0.5, *ME, max_tokens=4000) <= 12


def test_what_is_remembered_is_bounded_and_what_is_general_stays() -> None:
    predictor = LengthPredictor()
    for n in range(3 * MAX_KEYS):
        predictor.observe(f"tenant{n}", "class", 100, 50)
    assert len(predictor) == MAX_KEYS
    assert predictor.predict("never seen", "class", 100, max_tokens=4000) == pytest.approx(50, rel=0.2)
    assert predictor.predict("never seen", "no class", 1, max_tokens=4000) < 150


def test_bins_hold_every_length_once_and_are_at_most_a_fifth_wide() -> None:
    assert EDGES[0] == 0
    assert list(EDGES) == sorted(set(EDGES))
    assert all(high - low == 1 or high / low <= 1.25 for low, high in itertools.pairwise(EDGES))
