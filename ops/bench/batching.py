"""The table of batching modes: throughput, latency and what slots and memory are used for, each mode at its best.

Owns: which settings are tried, how the best is chosen, and the report. Imports the two machines that it is run on.
Invariant: all modes run the same requests in the same order, whole batches of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ops.bench.batching_bound import Bound
from ops.bench.batching_loop import Extent, Measured, Mode, Setting
from ops.report import ReportRow, format_number

ENOUGH = 0.99
"""Of the settings that reach this share of a mode's best throughput, the one with the fewest slots is taken."""

HEADER = (
    "mode, slots", "budget", "tok/s", "ms per token", "p50", "p99", "p99 ÷ p50",
    "slots used", "KV written ÷ reserved", "padding", "preempted",
)  # fmt: skip

NOTES = (
    "Closed loop, as many users as slots. Latency: a request's time from sending to its end ÷ its output tokens; the "
    "mean is weighted by tokens. slots used: share of the slots' time in which their request was run. padding: share "
    "of the tokens run that belong to nobody.",
)


@dataclass(frozen=True, slots=True)
class Plan:
    """Which settings one machine tries, and how much of each is run."""

    static: tuple[int, ...]
    """Slots that are tried."""
    dynamic: tuple[int, ...]
    continuous: tuple[int, ...]
    budgets: tuple[int, ...]
    """Tokens of a step for continuous batching: the first is tried with every size, the others with the best."""
    padded_budget: int
    """Tokens of a step for static and dynamic batching, and for a batch of one."""
    batches: int
    """Batches' worth of requests to be measured, at least."""
    least: int
    """Requests to be measured, at least."""

    def extent(self, setting: Setting) -> Extent:
        """Whole batches. A loop that all users enter at once has to come to its steady state first, half as long as it
        is measured; a batch that starts together is like any other."""
        batches = max(self.batches, -(-self.least // setting.slots))
        joins = setting.mode in {Mode.DYNAMIC, Mode.CONTINUOUS}
        return Extent(setting.slots * (-(-self.batches // 2) if joins else 0), setting.slots * batches)


class Run(Protocol):
    """Runs one setting on one machine."""

    def __call__(self, setting: Setting, extent: Extent, show: Callable[[int], None]) -> Measured: ...


class Watch(Protocol):
    """Is told of each setting that begins, with the requests that it will run; what it returns is told their number."""

    def __call__(self, setting: Setting, requests: int) -> Callable[[int], None]: ...


@dataclass(frozen=True, slots=True)
class Sweep:
    """All that was tried on one machine."""

    points: tuple[Measured, ...]

    def of(self, mode: Mode) -> list[Measured]:
        return [point for point in self.points if point.setting.mode is mode]

    def at(self, mode: Mode, slots: int) -> Measured:
        """The fastest with so many slots.

        Raises:
            ValueError: none was tried.
        """
        return max((p for p in self.of(mode) if p.setting.slots == slots), key=lambda p: p.tok_s)

    def best(self, mode: Mode) -> Measured:
        """The fewest slots that reach `ENOUGH` of the mode's best throughput, at their best."""
        return best_of(self.of(mode))

    def curve(self, mode: Mode) -> list[Measured]:
        """The fastest of each number of slots, in their order."""
        return [self.at(mode, slots) for slots in sorted({p.setting.slots for p in self.of(mode)})]

    def shown(self) -> list[Measured]:
        """The rows of the table: none, static and dynamic at 8, 32 and their best, continuous at its best."""
        rows = [self.best(Mode.NONE)]
        for mode in (Mode.STATIC, Mode.DYNAMIC):
            sizes = {8, 32, self.best(mode).setting.slots} & {p.setting.slots for p in self.of(mode)}
            rows += [self.at(mode, slots) for slots in sorted(sizes)]
        return [*rows, self.best(Mode.CONTINUOUS)]


def best_of(points: Sequence[Measured]) -> Measured:
    enough = ENOUGH * max(point.tok_s for point in points)
    return min((p for p in points if p.tok_s >= enough), key=lambda p: (p.setting.slots, -p.tok_s))


def sweep(plan: Plan, run: Run, watch: Watch) -> Sweep:
    """Try every setting of the plan."""

    def measure(setting: Setting) -> Measured:
        extent = plan.extent(setting)
        return run(setting, extent, watch(setting, extent.warm_up + extent.measured))

    points = [measure(Setting(Mode.NONE, 1, plan.padded_budget))]
    points += [measure(Setting(Mode.STATIC, slots, plan.padded_budget)) for slots in plan.static]
    points += [measure(Setting(Mode.DYNAMIC, slots, plan.padded_budget)) for slots in plan.dynamic]
    continuous = [measure(Setting(Mode.CONTINUOUS, slots, plan.budgets[0])) for slots in plan.continuous]
    slots = best_of(continuous).setting.slots
    continuous += [measure(Setting(Mode.CONTINUOUS, slots, budget)) for budget in plan.budgets[1:]]
    return Sweep((*points, *continuous))


def settings_tried(plan: Plan) -> int:
    return len(plan.static) + len(plan.dynamic) + len(plan.continuous) + len(plan.budgets)


def cells(points: Sequence[Measured], remark: str = "") -> list[tuple[str, ...]]:
    """Rows of the table under `HEADER`; `remark` stands behind each mode."""
    return [
        (
            _title(point.setting) + remark,
            format_number(point.setting.step_token_budget),
            format_number(point.tok_s),
            format_number(point.mean_ms_per_token),
            format_number(point.p50_ms_per_token),
            format_number(point.p99_ms_per_token),
            format_number(point.latency_spread),
            f"{point.slot_utilisation:.1%}",
            f"{point.kv_efficiency:.1%}",
            f"{point.padding_share:.1%}",
            format_number(point.preemptions),
        )
        for point in points
    ]


def _title(setting: Setting) -> str:
    return setting.mode.value if setting.mode is Mode.NONE else f"{setting.mode} {setting.slots}"


def point_rows(prefix: str, points: Sequence[Measured]) -> list[ReportRow]:
    """Every figure of every setting that is given."""
    rows: list[ReportRow] = []
    for point in points:
        name = f"{prefix}.{point.setting.name}"
        rows += [
            ReportRow(f"{name}.throughput_tok_s", point.tok_s, "tok/s"),
            ReportRow(f"{name}.mean_ms_per_token", point.mean_ms_per_token, "ms"),
            ReportRow(f"{name}.p50_ms_per_token", point.p50_ms_per_token, "ms"),
            ReportRow(f"{name}.p99_ms_per_token", point.p99_ms_per_token, "ms"),
            ReportRow(f"{name}.latency_spread", point.latency_spread, "ratio"),
            ReportRow(f"{name}.slot_utilisation_pct", 100 * point.slot_utilisation, "%"),
            ReportRow(f"{name}.kv_efficiency_pct", 100 * point.kv_efficiency, "%"),
            ReportRow(f"{name}.padding_pct", 100 * point.padding_share, "%"),
            ReportRow(f"{name}.preemptions", point.preemptions, "requests"),
            ReportRow(f"{name}.step_token_budget", point.setting.step_token_budget, "tokens"),
        ]
    return rows


def modelled_rows(tried: Sweep, unpadded: Sequence[Measured]) -> list[ReportRow]:
    """The ratios of the modelled A100; `unpadded` are static batches that read no context beyond their own."""
    continuous = tried.best(Mode.CONTINUOUS).tok_s
    rows = [ReportRow("a100.continuous_over_none", continuous / tried.best(Mode.NONE).tok_s, "ratio")]
    others = [
        *((f"static{slots}", tried.at(Mode.STATIC, slots)) for slots in (8, 32)),
        ("best_other", _best_other(tried)),
        *((f"{point.setting.name}_unpadded_contexts", point) for point in unpadded),
    ]
    rows += [ReportRow(f"a100.continuous_over_{name}", continuous / other.tok_s, "ratio") for name, other in others]
    return rows + point_rows("a100", tried.shown())


def embedded_rows(tried: Sweep, limit: Bound) -> list[ReportRow]:
    """The ratios of the embedded engine."""
    continuous = tried.best(Mode.CONTINUOUS).tok_s
    return [
        ReportRow("continuous_over_bound", continuous / limit.tok_s, "ratio"),
        ReportRow("continuous_over_best_other", continuous / _best_other(tried).tok_s, "ratio"),
        ReportRow("bound.throughput_tok_s", limit.tok_s, "tok/s"),
        ReportRow("bound.batch", limit.batch, "sequences"),
        *point_rows("embedded", tried.shown()),
    ]


def _best_other(tried: Sweep) -> Measured:
    others = (Mode.NONE, Mode.STATIC, Mode.DYNAMIC)
    return max((point for mode in others for point in tried.of(mode)), key=lambda point: point.tok_s)
