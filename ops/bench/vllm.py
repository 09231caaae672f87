"""vLLM under Forebay's scheduler against vLLM alone: what is measured of it, and the figures.

Owns: how much is measured, the arithmetic and the rows. Imports the report; no engine. Invariants: whatever is compared ran
in one process on one list of requests, in rounds whose order alternates; ratios are medians of the rounds' ratios.

- `urgent_ttft_steps`: all slots decode less urgent work; engine steps from the add of an urgent request to its first
  token, without those of its own prefill. A step that runs at the add counts, so that 1 is the least. `_stock` is vLLM's
  own with `scheduling_policy="priority"`.
- `srpt_over_fcfs_mean_latency`: arrivals a little faster than the engine serves; mean time from arrival to end under the
  order srpt over that under fcfs. In `srpt_learned_…` requests do not say how long their output will be.
- `adapter_throughput_ratio_c32`: output tokens/s over those of vLLM's own `AsyncLLM`, 32 requests at a time.
- `sampler_share_pct_…`: processor time in the draw over that of the whole step, medians over steps in which all decode.
- `step_over_stock_…`: processor time of such a step, drawn by us from (seed, choice, index), over that of a step that
  vLLM's own sampler draws without seeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from statistics import mean, median

from cluster.types import Sampling
from ops.report import ReportRow

CONCURRENCY = 32
SLOTS = 4
"""Of the engines whose queue matters."""
LOAD = 1.2
"""Arrivals' tokens/s over what the engine makes."""

KINDS: Mapping[str, Sampling] = {
    "greedy": Sampling(max_tokens=1, seed=0, temperature=0.0),
    "temperature": Sampling(max_tokens=1, seed=0, temperature=0.8),
    "top_p": Sampling(max_tokens=1, seed=0, temperature=0.8, top_p=0.95),
    "top_k": Sampling(max_tokens=1, seed=0, temperature=0.8, top_k=50),
    "penalties": Sampling(
        max_tokens=1, seed=0, temperature=0.8, top_p=0.95, frequency_penalty=0.2, repetition_penalty=1.1
    ),
}
"""Ways to draw whose cost is measured; a greedy row is only checked for numbers."""


@dataclass(frozen=True, slots=True)
class VllmPlan:
    """How much is measured."""

    rounds: int
    quick: bool

    @property
    def urgent_rounds(self) -> int:
        return 3 if self.quick else 7

    @property
    def queued_requests(self) -> int:
        return 16 if self.quick else 60

    @property
    def served_requests(self) -> int:
        return CONCURRENCY * (2 if self.quick else 3)

    @property
    def sampled_concurrencies(self) -> tuple[int, ...]:
        return (CONCURRENCY,) if self.quick else (1, 8, CONCURRENCY)

    @property
    def sampled_tokens(self) -> int:
        return 12 if self.quick else 40

    @property
    def measurements(self) -> int:
        return (
            2 * self.urgent_rounds
            + 3 * self.rounds
            + 2 * self.rounds
            + 2 * len(KINDS) * len(self.sampled_concurrencies)
        )


@dataclass(frozen=True, slots=True)
class UrgentWaits:
    """Steps of each round."""

    ours: Sequence[int]
    stock: Sequence[int]


@dataclass(frozen=True, slots=True)
class Latencies:
    """Mean latencies in seconds, of each round."""

    fcfs: Sequence[float]
    srpt: Sequence[float]
    srpt_learned: Sequence[float]


@dataclass(frozen=True, slots=True)
class Throughputs:
    """Output tokens/s of each round."""

    ours: Sequence[float]
    stock: Sequence[float]


@dataclass(frozen=True, slots=True)
class Step:
    """One step in which all requests decode."""

    wall_s: float
    cpu_s: float
    draw_cpu_s: float


Steps = Mapping[tuple[str, int], Sequence[Step]]
"""By kind of draw and requests at once."""


def arrivals_s(requests: int, mean_output_tokens: float, tok_s: float, seed: int) -> list[float]:
    """From 0 on, at random (Poisson), so that output of `LOAD` x `tok_s` tokens/s is asked for on average."""
    draw = Random(seed)
    gap_s = mean_output_tokens / (LOAD * tok_s)
    return list(accumulate((draw.expovariate(1 / gap_s) for _ in range(requests - 1)), initial=0.0))


def report_rows(
    waits: UrgentWaits, latencies: Latencies, throughputs: Throughputs, steps: Steps, stock_steps: Steps
) -> tuple[ReportRow, ...]:
    """The four named figures, then what lies behind them."""
    adapter = _ratios(throughputs.ours, throughputs.stock)
    srpt, learned = _ratios(latencies.srpt, latencies.fcfs), _ratios(latencies.srpt_learned, latencies.fcfs)
    rows = [
        ReportRow("urgent_ttft_steps", median(waits.ours), "steps"),
        ReportRow("urgent_ttft_steps_stock", median(waits.stock), "steps"),
        ReportRow("srpt_over_fcfs_mean_latency", median(srpt), "ratio"),
        ReportRow(f"adapter_throughput_ratio_c{CONCURRENCY}", median(adapter), "ratio"),
        *_spread("srpt_over_fcfs_mean_latency", srpt),
        ReportRow("srpt_learned_over_fcfs_mean_latency", median(learned), "ratio"),
        *_spread("srpt_learned_over_fcfs_mean_latency", learned),
        ReportRow("fcfs_mean_latency_s", median(latencies.fcfs), "s"),
        *_spread(f"adapter_throughput_ratio_c{CONCURRENCY}", adapter),
        ReportRow(f"forebay_c{CONCURRENCY}_tok_s", median(throughputs.ours), "tokens/s"),
        ReportRow(f"stock_c{CONCURRENCY}_tok_s", median(throughputs.stock), "tokens/s"),
    ]
    for (kind, concurrency), of_kind in steps.items():
        share_pct = 100 * median(step.draw_cpu_s / step.cpu_s for step in of_kind)
        rows += [
            ReportRow(f"sampler_share_pct_{kind}_c{concurrency}", share_pct, "%"),
            ReportRow(f"step_ms_{kind}_c{concurrency}", 1000 * median(step.wall_s for step in of_kind), "ms"),
            ReportRow(
                f"step_over_stock_{kind}_c{concurrency}",
                median(step.cpu_s for step in of_kind) / median(step.cpu_s for step in stock_steps[kind, concurrency]),
                "ratio",
            ),
        ]
    return tuple(rows)


def _ratios(ours: Sequence[float], others: Sequence[float]) -> list[float]:
    """Round by round, for the machine's speed changes from one to the next."""
    return [one / other for one, other in zip(ours, others, strict=True)]


def _spread(name: str, ratios: Sequence[float]) -> tuple[ReportRow, ReportRow]:
    return ReportRow(f"{name}_least", min(ratios), "ratio"), ReportRow(f"{name}_most", max(ratios), "ratio")


def mean_latency_s(arrived_s: Sequence[float], ended_s: Sequence[float]) -> float:
    return mean(end - begin for begin, end in zip(arrived_s, ended_s, strict=True))
