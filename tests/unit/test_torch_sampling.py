"""Drawing a token from logits, against an independent reference in numpy and plain Python."""

from __future__ import annotations

import math
import random
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from cluster.engine.torch.sampling import SORTED_CANDIDATES, draw
from cluster.ports import SampleSpec


def spec(temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, uniform: float = 0.5) -> SampleSpec:
    return SampleSpec(temperature=temperature, top_p=top_p, top_k=top_k, uniform=uniform)


def kept_distribution(logits: list[float], s: SampleSpec) -> list[float]:
    """The filtered distribution, from the definition, in Python's own floats and exact sums."""
    scaled = [x / s.temperature for x in logits]
    top = max(scaled)
    weights = [math.exp(x - top) for x in scaled]
    if 0 < s.top_k < len(weights):
        least = sorted(weights, reverse=True)[s.top_k - 1]
        weights = [w if w >= least else 0.0 for w in weights]
    if s.top_p < 1:
        needed = s.top_p * math.fsum(weights)
        ranked = sorted(weights, reverse=True)
        count = next(n for n in range(1, len(ranked) + 1) if math.fsum(ranked[:n]) >= needed or n == len(ranked))
        weights = [w if w >= ranked[count - 1] else 0.0 for w in weights]
    total = math.fsum(weights)
    return [w / total for w in weights]


def nearest_edge(probabilities: list[float], uniform: float) -> float:
    """How far `uniform` is from where the drawn token changes: there float32 may fall on either side."""
    return float(np.abs(np.cumsum([0.0, *probabilities]) - uniform).min())


def test_temperature_zero_takes_the_most_likely_and_of_equals_the_lowest_id() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [5.0, 5.0, 5.0, 5.0], [-1.0, -2.0, -3.0, -0.5]])
    assert draw(logits, [spec(temperature=0.0, uniform=0.99)] * 3) == [1, 0, 3]


def test_temperature_zero_breaks_ties_by_id_in_a_large_vocabulary() -> None:
    """Vectorised reductions go through a row in strides; a tie must not be settled by them."""
    logits = torch.zeros((4, 49_152))
    for row, ids in enumerate([(49_151, 17), (40_000, 20_000, 30_000), (1, 0), (48_000, 47_999)]):
        logits[row, list(ids)] = 7.0
    assert draw(logits, [spec(temperature=0.0)] * 4) == [17, 20_000, 0, 47_999]


@pytest.mark.parametrize(
    ("uniform", "token_id"), [(0.0, 0), (0.2499, 0), (0.25, 1), (0.4999, 1), (0.5, 2), (0.75, 3), (0.999, 3)]
)
def test_the_draw_inverts_the_distribution_in_token_order(uniform: float, token_id: int) -> None:
    """Four equal tokens: the edges are exact, and a number on an edge belongs to the token above it."""
    assert draw(torch.full((1, 4), 1.5), [spec(uniform=uniform)]) == [token_id]


def test_the_largest_uniform_draws_the_last_token_that_has_weight() -> None:
    largest = math.nextafter(1.0, 0.0)
    assert draw(torch.tensor([[0.3, 1.2, 0.7, -math.inf]]), [spec(uniform=largest)]) == [2]
    assert draw(torch.zeros((1, 49_152)), [spec(uniform=largest)]) == [49_151]


def test_tokens_without_weight_are_never_drawn() -> None:
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]])
    draws = [draw(logits, [spec(uniform=u)])[0] for u in (0.0, 0.25, 0.75, math.nextafter(1.0, 0.0))]
    assert draws == [1, 1, 3, 3]


def test_ties_at_the_edge_of_the_kept_set_are_all_kept() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 1.0, 0.5]])
    uniforms = [i / 200 for i in range(200)]
    assert {draw(logits, [spec(top_k=2, uniform=u)])[0] for u in uniforms} == {1, 2, 3}
    # Token 1 alone has 0.42 of the mass, 1 and 2 together 0.58: with its equal, token 3, it is 0.73.
    assert {draw(logits, [spec(top_p=0.5, uniform=u)])[0] for u in uniforms} == {1, 2, 3}


def test_a_row_of_equal_tokens_is_kept_whole_however_large() -> None:
    logits = torch.full((1, 49_152), -3.25)
    assert draw(logits, [spec(top_p=0.1, uniform=0.75)]) == [36_864]


def test_the_most_likely_token_is_kept_even_by_the_strictest_filter() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    assert {draw(logits, [spec(top_p=1e-9, uniform=u / 50)])[0] for u in range(50)} == {1}
    assert {draw(logits, [spec(top_k=1, uniform=u / 50)])[0] for u in range(50)} == {1}


def test_a_tiny_temperature_is_as_good_as_greedy() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.9999]])
    for temperature in (1e-5, 1e-30, 5e-324):
        assert draw(logits, [spec(temperature=temperature, uniform=0.999)]) == [1]


@pytest.mark.parametrize("spoilt", [[math.nan], [math.inf], [math.nan, -math.inf], [-math.inf] * 5_000])
@pytest.mark.parametrize(
    "s", [spec(temperature=0.0), spec(), spec(top_p=0.9), spec(top_k=5), spec(top_k=5, top_p=0.9)], ids=str
)
def test_nothing_is_drawn_from_what_is_no_number_and_other_rows_are_drawn_all_the_same(
    spoilt: list[float], s: SampleSpec
) -> None:
    logits = torch.randn((3, 5_000), generator=torch.Generator().manual_seed(4))
    first, _, last = draw(logits, [s] * 3)
    logits[1, 3 : 3 + len(spoilt)] = torch.tensor(spoilt)[:4_997]
    logits[1, :3] = -math.inf
    assert draw(logits, [s] * 3) == [first, None, last]


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    vocabulary=st.sampled_from([2, 7, 100, 5 * SORTED_CANDIDATES]),
    spread=st.sampled_from([0.05, 1.0, 5.0]),
    temperature=st.sampled_from([0.1, 0.7, 1.0, 1.7]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.99, 1.0]),
    top_k=st.sampled_from([0, 1, 3, 40, 10_000]),
    uniform=st.floats(0, 1, exclude_max=True),
)
def test_a_draw_equals_the_definition(
    seed: int, vocabulary: int, spread: float, temperature: float, top_p: float, top_k: int, uniform: float
) -> None:
    rng = random.Random(seed)
    logits = torch.tensor([[rng.gauss(0, spread) for _ in range(vocabulary)]])
    s = spec(temperature, top_p, top_k, uniform)
    probabilities = kept_distribution(logits[0].tolist(), s)
    token_id = draw(logits, [s])[0]
    if nearest_edge(probabilities, uniform) > 1e-5:
        assert token_id == int(np.searchsorted(np.cumsum(probabilities), uniform, side="right"))


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(0.8, 0.9, 0), (1.3, 1.0, 25), (1.0, 0.7, 50), (0.5, 0.99, 0)]
)
def test_the_kept_set_is_that_of_transformers(temperature: float, top_p: float, top_k: int) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn((1, 800), generator=generator) * 2
    warped = TemperatureLogitsWarper(temperature)(torch.zeros((1, 1)), logits.clone())
    if top_k:
        warped = TopKLogitsWarper(top_k)(torch.zeros((1, 1)), warped)
    if top_p < 1:
        warped = TopPLogitsWarper(top_p)(torch.zeros((1, 1)), warped)
    probabilities = warped.softmax(-1)[0].double()
    kept = torch.isfinite(warped[0]).nonzero()[:, 0].tolist()
    # The middle of each kept token's share of [0, 1) must draw that token.
    middles = (probabilities.cumsum(0) - probabilities / 2)[kept].tolist()
    rows = logits.expand(len(kept), -1)
    assert draw(rows, [spec(temperature, top_p, top_k, u) for u in middles]) == kept


def test_many_uniforms_reproduce_the_distribution() -> None:
    """Chi-square over 20,000 draws; beyond the 99.9999 % point of 11 degrees of freedom (49.4) once in a million seeds."""
    rng = random.Random(11)
    logits = [rng.gauss(0, 1.5) for _ in range(12)]
    draws = 20_000
    specs = [spec(temperature=1.2, uniform=rng.random()) for _ in range(draws)]
    drawn = Counter(draw(torch.tensor([logits]).expand(draws, -1), specs))
    counts = np.array([drawn[token_id] for token_id in range(12)])
    expected = np.array(kept_distribution(logits, specs[0])) * draws
    assert float(((counts - expected) ** 2 / expected).sum()) < 49.4


def test_a_row_is_drawn_the_same_whatever_the_other_rows_are() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn((9, 5_000), generator=generator) * 3
    specs = [
        spec(temperature=(0.0, 0.7, 1.5)[i % 3], top_p=(1.0, 0.8)[i % 2], top_k=(0, 0, 30)[i % 3], uniform=i / 9)
        for i in range(9)
    ]
    together = draw(logits, specs)
    assert together == [draw(logits[i : i + 1], [specs[i]])[0] for i in range(9)]
    assert together[::-1] == draw(logits.flip(0), specs[::-1])


def test_logits_are_left_as_they_were() -> None:
    logits = torch.randn((3, 64), generator=torch.Generator().manual_seed(3))
    before = logits.clone()
    draw(logits, [spec(top_p=0.5), spec(top_k=3), spec(temperature=0.0)])
    assert torch.equal(logits, before)
