"""The uniform number of a token: the published hash, the same everywhere, and uniform."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.engine.chance import uniform

P1, P2, P3, P4, P5 = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)
M = 2**64


def _rotated(value: int, bits: int) -> int:
    return (value << bits | value >> (64 - bits)) % M


def xxh64_short(data: bytes) -> int:
    """XXH64 with seed 0 of fewer than 32 bytes, written from its specification."""
    acc = (P5 + len(data)) % M
    while len(data) >= 8:
        lane = _rotated(int.from_bytes(data[:8], "little") * P2 % M, 31) * P1 % M
        acc = (_rotated(acc ^ lane, 27) * P1 + P4) % M
        data = data[8:]
    if len(data) >= 4:
        acc = (_rotated(acc ^ int.from_bytes(data[:4], "little") * P1 % M, 23) * P2 + P3) % M
        data = data[4:]
    for byte in data:
        acc = _rotated(acc ^ byte * P5 % M, 11) * P1 % M
    acc = (acc ^ acc >> 33) * P2 % M
    acc = (acc ^ acc >> 29) * P3 % M
    return acc ^ acc >> 32


@pytest.mark.parametrize(
    ("data", "digest"),
    [(b"", 0xEF46DB3751D8E999), (b"a", 0xD24EC4F1A98C6E5B), (b"abc", 0x44BC2CF5AD770999)],
)
def test_the_reference_agrees_with_published_digests(data: bytes, digest: int) -> None:
    assert xxh64_short(data) == digest


@given(st.integers(-(2**63), 2**64 - 1), st.integers(0, 1000), st.integers(0, 2**40))
@settings(deadline=None)
def test_uniform_is_the_documented_function_of_its_three_numbers(seed: int, choice: int, index: int) -> None:
    data = b"".join((n % M).to_bytes(8, "little") for n in (seed, choice, index))
    value = uniform(seed, choice, index)
    assert value == math.ldexp(xxh64_short(data) // 2**11, -53)
    assert 0.0 <= value < 1.0


def test_numbers_are_uniform_and_seeds_choices_and_indices_independent() -> None:
    """Chi-square over 64 cells, and over 8 x 8 cells of neighbours: 63 degrees of freedom, beyond 120 once in 10^5."""
    n = 20_000
    for values in (
        [uniform(1, 0, i) for i in range(n)],
        [uniform(s, 0, 0) for s in range(n)],
        [uniform(1, c, 7) for c in range(n)],
    ):
        cells = [0] * 64
        pairs = [0] * 64
        for a, b in zip(values, [*values[1:], values[0]], strict=True):
            cells[int(a * 64)] += 1
            pairs[int(a * 8) * 8 + int(b * 8)] += 1
        for counts in (cells, pairs):
            assert sum((c - n / 64) ** 2 / (n / 64) for c in counts) < 120
