"""The sample of real lengths is that of the trace it was taken from."""

from __future__ import annotations

import statistics

import pytest

from ops.bench.lengths import Lengths, conversation_lengths, shuffled_lengths


def test_sample_is_every_sixth_of_the_traces_19366_conversations_with_their_means() -> None:
    """Of the whole trace: prompts 1,154.7 tokens on average, answers 211.1, medians 1,020 and 129."""
    lengths = conversation_lengths()
    assert len(lengths) == -(-19366 // 6)
    prompts, outputs = zip(*lengths, strict=True)
    assert statistics.mean(prompts) == pytest.approx(1154.7, rel=0.02)
    assert statistics.mean(outputs) == pytest.approx(211.1, rel=0.02)
    assert statistics.median(prompts) == pytest.approx(1020, rel=0.02)
    assert statistics.median(outputs) == pytest.approx(129, rel=0.02)
    assert min(prompts) >= 1
    assert min(outputs) >= 1


def test_order_depends_on_the_seed_alone() -> None:
    assert shuffled_lengths(1) == shuffled_lengths(1)
    assert shuffled_lengths(1) != shuffled_lengths(2)
    assert sorted(shuffled_lengths(1)) == sorted(conversation_lengths())


def test_scaled_lengths_never_vanish() -> None:
    assert Lengths(1600, 40).divided(16, 4) == (100, 10)
    assert Lengths(2, 1).divided(16, 4) == (1, 1)
