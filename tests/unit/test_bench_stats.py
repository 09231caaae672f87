"""Definitions of the figures, against arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.bench.stats import (
    Answer,
    Failure,
    Slo,
    parse_slos,
    percentile,
    report_rows,
    summarize,
    summarize_by_class,
)
from ops.errors import CommandError

CLASSES = ("interactive", "standard", "batch")


def answer(
    *,
    index: int = 0,
    name: str = "interactive",
    sent: float = 0.0,
    first: float | None = 0.1,
    end: float = 1.0,
    tokens: int = 10,
    failure: Failure | None = None,
    status: int | None = 200,
) -> Answer:
    return Answer(
        index, name, sent, sent, end, first, output_tokens=tokens, failure=failure, status=status
    )  # fmt: skip


def test_times_count_from_sending_and_tpot_between_first_token_and_end() -> None:
    a = answer(sent=2.0, first=2.25, end=3.25, tokens=5)
    assert (a.ttft_ms, a.tpot_ms, a.e2e_ms) == (250, 250, 1250)


def test_tpot_of_one_token_is_undefined() -> None:
    assert answer(tokens=1).tpot_ms is None
    assert answer(tokens=0, first=None).tpot_ms is None


def test_ttft_without_text_is_the_end() -> None:
    assert answer(sent=1.0, first=None, end=3.0).ttft_ms == 2000


def test_lateness_is_the_clients_own_delay() -> None:
    assert Answer(0, "batch", planned_s=1.0, sent_s=1.5, end_s=2.0).lateness_ms == 500


def test_percentile_interpolates_between_closest_ranks() -> None:
    # Hyndman-Fan 7: position (n - 1) p of the sorted values, from 0.
    assert percentile([40, 10, 20, 30], 50) == 25
    assert percentile([10, 20, 30, 40, 50], 90) == 46
    assert percentile([0, 100], 99) == 99
    assert percentile([7], 99) == 7
    assert percentile([], 50) is None


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.sampled_from([50, 90, 99]))
def test_percentile_equals_the_definition(values: Sequence[float], percent: int) -> None:
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    expected = ordered[low] + (position - low) * (ordered[high] - ordered[low])
    assert percentile(values, percent) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_goodput_counts_requests_that_meet_every_slo_of_their_class() -> None:
    slos = {"interactive": Slo(ttft_ms=125, tpot_ms=62.5), "batch": Slo()}
    answers = [
        answer(first=0.125, end=0.625, tokens=9),  # 125 ms, 62.5 ms: the bounds are met when equal
        answer(first=0.3, end=0.4, tokens=10),  # first token too late
        answer(first=0.1, end=1.1, tokens=10),  # 111 ms per token
        answer(first=0.1, end=0.1, tokens=1),  # one token has no TPOT that could be missed
        answer(first=0.1, end=0.2, tokens=10, failure=Failure.TRUNCATED),
        answer(name="batch", first=90, end=100),  # no bounds
    ]
    summary = summarize(answers, slos, duration_s=2.0)
    assert (summary.good, summary.goodput_rps) == (3, 1.5)


def test_failed_requests_are_counted_by_kind_and_left_out_of_the_times() -> None:
    answers = [
        answer(first=0.1, end=1.0, tokens=10),
        answer(first=0.3, end=2.0, tokens=20),
        answer(first=9.0, end=99.0, tokens=90, failure=Failure.TRUNCATED),
        answer(first=None, end=99.0, tokens=0, failure=Failure.HTTP_STATUS, status=429),
        answer(first=None, end=99.0, tokens=0, failure=Failure.HTTP_STATUS, status=503),
        answer(first=None, end=99.0, tokens=0, failure=Failure.HTTP_STATUS, status=503),
    ]
    summary = summarize(answers, {}, duration_s=10.0)
    assert summary.requests == 6
    assert summary.errors == 4
    assert summary.failures == {"http_429": 1, "http_503": 2, "truncated": 1}
    assert summary.ttft_ms == {50: pytest.approx(200), 90: pytest.approx(280), 99: pytest.approx(298)}
    assert (summary.output_tokens, summary.tokens_per_s) == (30, 3.0)


def test_classes_come_in_order_of_urgency_then_all_over_one_duration() -> None:
    answers = [answer(name="batch", end=4.0, tokens=8), answer(name="interactive", end=2.0, tokens=4)]
    summaries, duration_s = summarize_by_class(answers, {}, CLASSES)
    assert list(summaries) == ["interactive", "batch", "all"]
    assert duration_s == 4.0
    assert [s.tokens_per_s for s in summaries.values()] == [1.0, 2.0, 3.0]


def test_rows_have_the_agreed_names() -> None:
    answers = [answer(name="interactive", first=0.1, end=1.0, tokens=10), answer(name="batch", tokens=1)]
    summaries, duration_s = summarize_by_class(answers, {}, CLASSES)
    rows = {row.name: row for row in report_rows(summaries, duration_s)}
    agreed = {"all.errors", "all.tokens_per_s"} | {
        f"interactive.{quantity}"
        for quantity in ("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "e2e_p99_ms", "goodput_rps", "requests", "errors")
    }
    assert agreed <= rows.keys()
    assert "batch.tpot_p50_ms" not in rows, "what was not measured has no row"
    assert rows["interactive.ttft_p50_ms"].value == pytest.approx(100)
    assert rows["interactive.ttft_p50_ms"].unit == "ms"
    assert all(np.isfinite(row.value) for row in rows.values())


def test_everything_failed_still_has_a_report() -> None:
    answers = [answer(first=None, end=1.0, tokens=0, failure=Failure.CONNECT)]
    summaries, duration_s = summarize_by_class(answers, {}, CLASSES)
    rows = {row.name: row.value for row in report_rows(summaries, duration_s)}
    assert (rows["all.requests"], rows["all.errors"], rows["all.goodput_rps"]) == (1, 1, 0)
    assert not any("ttft" in name for name in rows)


def test_slo_of_a_class_replaces_its_default() -> None:
    slos = parse_slos(["interactive=ttft_ms:250, e2e_ms:9000"], CLASSES)
    assert slos["interactive"] == Slo(ttft_ms=250, e2e_ms=9000)
    assert slos["standard"] == Slo(ttft_ms=2000, tpot_ms=200)


@pytest.mark.parametrize(
    "text",
    ["interactive", "urgent=ttft_ms:1", "batch=ttft:1", "batch=ttft_ms:soon", "batch=ttft_ms:0", "batch=e2e_ms:nan"],
)
def test_bad_slo_is_refused(text: str) -> None:
    with pytest.raises(CommandError, match="--slo"):
        parse_slos([text], CLASSES)
