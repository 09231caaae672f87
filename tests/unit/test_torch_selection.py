"""The largest of many numbers, against the definitions; lengths around whole blocks, and ties everywhere."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.engine.torch.selection import ARGMAX_BLOCK, BLOCK, argmax, at_least, largest

LENGTHS = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, ARGMAX_BLOCK, 3 * ARGMAX_BLOCK, 3 * ARGMAX_BLOCK + 5, 20 * BLOCK + 7]


def numbers(seed: int, length: int, values: int) -> list[float]:
    """Of few different values, so that most are equal to others; with -inf among them."""
    rng = random.Random(seed)
    pool = [-math.inf, *(rng.gauss(0, 3) for _ in range(values))]
    return torch.tensor([rng.choice(pool) for _ in range(length)]).tolist()


cases = given(seed=st.integers(0, 2**32), length=st.sampled_from(LENGTHS), values=st.sampled_from([1, 3, 1000]))


@settings(max_examples=100, deadline=None)
@cases
def test_argmax_is_the_first_of_the_greatest(seed: int, length: int, values: int) -> None:
    rows = [numbers(seed + i, length, values) for i in range(3)]
    assert argmax(torch.tensor(rows)).tolist() == [row.index(max(row)) for row in rows]


@pytest.mark.parametrize("length", LENGTHS)
def test_argmax_finds_a_nan_wherever_it_is(length: int) -> None:
    for place in {0, length // 2, length - 1}:
        row = torch.randn((1, length), generator=torch.Generator().manual_seed(1))
        row[0, place] = math.nan
        assert argmax(row).tolist() == [place]


@settings(max_examples=100, deadline=None)
@cases
def test_the_k_largest_are_the_first_k_of_the_sorted(seed: int, length: int, values: int) -> None:
    row = numbers(seed, length, values)
    for k in {1, min(5, length), length // 2 + 1, length}:
        assert largest(torch.tensor(row), k).tolist() == sorted(row, reverse=True)[:k]


@settings(max_examples=100, deadline=None)
@cases
def test_all_that_reach_a_bound_are_found_in_order(seed: int, length: int, values: int) -> None:
    row = numbers(seed, length, values)
    for bound in (-math.inf, random.Random(seed).choice(row), max(row)):
        found = at_least(torch.tensor(row), torch.tensor(bound))
        assert found.tolist() == [i for i, x in enumerate(row) if x >= bound]
