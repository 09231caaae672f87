"""`bench batching` from beginning to end: both machines, their tables and the chart.

Owns: the plans of a full and a quick run, and what is shown while they run. Imports the machines, the report and rich.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, TaskID

from cluster.config import DType
from cluster.model import ModelFolder
from ops.bench.batching import (
    HEADER,
    NOTES,
    Plan,
    Sweep,
    cells,
    embedded_rows,
    modelled_rows,
    settings_tried,
    sweep,
)
from ops.bench.batching_a100 import MODEL, run_modelled
from ops.bench.batching_bound import Bound, StepSamples, bound
from ops.bench.batching_loop import Extent, Measured, Mode, Setting
from ops.bench.lengths import SOURCE
from ops.report import Context, Report, ReportRow, counting_bar, format_number, machine_context, print_table
from ops.sim.step_time import a100

_SIZES = (8, 16, 32, 64, 96, 128)
MODELLED = Plan(
    static=_SIZES,
    dynamic=_SIZES,
    continuous=_SIZES,
    budgets=(1024, 512, 2048),
    padded_budget=4096,
    batches=12,
    least=384,
)
MODELLED_QUICK = Plan(
    static=(8, 32), dynamic=(8, 32), continuous=(64, 96), budgets=(1024,), padded_budget=4096, batches=6, least=96
)
# Static batches waste so much here that larger ones only take longer.
EMBEDDED = Plan(
    static=(8, 16, 32),
    dynamic=(8, 32, 64),
    continuous=(8, 32, 64),
    budgets=(128, 256),
    padded_budget=128,
    batches=2,
    least=16,
)
EMBEDDED_QUICK = Plan(
    static=(8, 32), dynamic=(8, 32), continuous=(8, 32), budgets=(128,), padded_budget=128, batches=1, least=8
)


@dataclass(frozen=True, slots=True)
class BatchingSettings:
    seed: int
    quick: bool
    modelled: bool
    """Whether to run on the modelled A100."""
    model: ModelFolder | None
    """What the embedded engine is to run; None leaves it out."""
    dtype: DType
    chart: Path | None


class _Bars:
    """One bar for all settings of a machine, one for the setting that runs."""

    def __init__(self, bar: Progress, title: str, settings: int) -> None:
        self._bar = bar
        self._all = bar.add_task(title, total=settings)
        self._one: TaskID | None = None

    def watch(self, setting: Setting, requests: int) -> Callable[[int], None]:
        self.finish()
        one = self._one = self._bar.add_task(f"  {setting.name}, {setting.step_token_budget} a step", total=requests)
        return lambda ended: self._bar.update(one, completed=ended)

    def finish(self) -> None:
        if self._one is not None:
            self._bar.remove_task(self._one)
            self._bar.advance(self._all)
            self._one = None


def run(settings: BatchingSettings, out: Console, errors: Console) -> Report:
    """Measure, print the tables, draw the chart.

    Raises:
        CommandError: the chart cannot be written.
        ModelFolderError: the model cannot be loaded or served.
    """
    rows: list[ReportRow] = []
    panels: list[tuple[str, Sweep]] = []
    if settings.modelled:
        modelled, unpadded = _modelled(settings, errors)
        rows += modelled_rows(modelled, unpadded)
        panels.append((f"{MODEL} on one A100, modelled", modelled))
        _print_modelled(out, modelled, unpadded)
    if settings.model is not None:
        embedded, limit = _embedded(settings, settings.model, errors)
        rows += embedded_rows(embedded, limit)
        panels.append((f"{settings.model.name} on this machine, {settings.dtype}, measured", embedded))
        _print_embedded(out, embedded, limit, f"{settings.model.name}, {settings.dtype}")
    if settings.chart is not None:
        from ops.bench.batching_chart import draw

        draw(panels, settings.chart)
    report = Report("bench batching", _context(settings), tuple(rows))
    ratios = [row for row in rows if "continuous_over_" in row.name]
    print_table(out, ("ratio of throughputs", ""), [(row.name, format_number(row.value)) for row in ratios])
    return report


def _print_modelled(out: Console, tried: Sweep, unpadded: list[Measured]) -> None:
    overhead = a100()
    print_table(
        out,
        HEADER,
        [*cells(tried.shown()), *cells(unpadded, ", ragged")],
        title=f"Modelled: {MODEL}, one A100-80G, bf16, full conversation lengths",
        notes=(
            *NOTES,
            "ragged: static batches that read no context beyond their own, as kernels for ragged batches do.",
            f"Host overhead {overhead.host_overhead_ms_per_step * 1000:.0f} µs a step + "
            f"{overhead.host_overhead_ms_per_request * 1000:.0f} µs a request. Step times: {overhead.source}.",
            f"Lengths: {SOURCE}.",
        ),
    )


def _print_embedded(out: Console, tried: Sweep, limit: Bound, what: str) -> None:
    together = "in the same steps as" if limit.mixed else "in steps apart from"
    print_table(
        out,
        HEADER,
        cells(tried.shown()),
        title=f"Measured: {what}, one thread, prompts ÷ 16, answers ÷ 4",
        notes=(
            f"Bound from this run's own step times: {format_number(limit.tok_s)} tok/s in batches of {limit.batch}, "
            f"prompts {together} decodes.",
        ),
    )


def _modelled(settings: BatchingSettings, errors: Console) -> tuple[Sweep, list[Measured]]:
    plan = MODELLED_QUICK if settings.quick else MODELLED

    def run_one(setting: Setting, extent: Extent, show: Callable[[int], None]) -> Measured:
        return run_modelled(setting, extent, settings.seed, show)

    with counting_bar(errors) as bar:
        bars = _Bars(bar, "A100, modelled", settings_tried(plan) + 2)
        tried = sweep(plan, run_one, bars.watch)
        unpadded = []
        for slots in (8, 32):
            setting = Setting(Mode.STATIC, slots, plan.padded_budget)
            extent = plan.extent(setting)
            show = bars.watch(setting, extent.warm_up + extent.measured)
            unpadded.append(run_modelled(setting, extent, settings.seed, show, pad_contexts=False))
        bars.finish()
    return tried, unpadded


def _embedded(settings: BatchingSettings, model: ModelFolder, errors: Console) -> tuple[Sweep, Bound]:
    from ops.bench.batching_embedded import EmbeddedMachine, measure_steps

    plan = EMBEDDED_QUICK if settings.quick else EMBEDDED
    largest = Setting(Mode.CONTINUOUS, max(plan.continuous), max(plan.budgets))
    machine = EmbeddedMachine(model, settings.dtype, largest)
    samples = StepSamples()

    def run_one(setting: Setting, extent: Extent, show: Callable[[int], None]) -> Measured:
        # Single steps are timed between the runs, so that both see the machine as it is.
        measure_steps(machine.backend, plan.continuous, samples, settings.seed)
        return machine.run(setting, extent, settings.seed, show)

    with counting_bar(errors) as bar:
        bars = _Bars(bar, f"{model.name}, measured", settings_tried(plan))
        tried = sweep(plan, run_one, bars.watch)
        bars.finish()
    best = tried.best(Mode.CONTINUOUS)
    return tried, bound(samples, best.prefill_tokens, best.decode_tokens, best.output_tokens)


def _context(settings: BatchingSettings) -> Context:
    overhead = a100()
    modelled = MODELLED_QUICK if settings.quick else MODELLED
    embedded = EMBEDDED_QUICK if settings.quick else EMBEDDED
    return machine_context(("torch", "transformers")) | {
        "seed": settings.seed,
        "quick": settings.quick,
        "dtype": str(settings.dtype),
        "model": None if settings.model is None else settings.model.name,
        "lengths": SOURCE,
        "step_times": overhead.source,
        "host_overhead_ms_per_step": overhead.host_overhead_ms_per_step,
        "host_overhead_ms_per_request": overhead.host_overhead_ms_per_request,
        "modelled_static_slots": modelled.static,
        "modelled_dynamic_slots": modelled.dynamic,
        "modelled_continuous_slots": modelled.continuous,
        "modelled_budgets": modelled.budgets,
        "modelled_padded_budget": modelled.padded_budget,
        "embedded_static_slots": embedded.static,
        "embedded_dynamic_slots": embedded.dynamic,
        "embedded_continuous_slots": embedded.continuous,
        "embedded_budgets": embedded.budgets,
        "embedded_padded_budget": embedded.padded_budget,
    }
