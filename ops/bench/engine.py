"""Engines side by side: the embedded one against vLLM and transformers, on the same list of requests.

Owns: who takes part, which settings of each are tried, the order of the measurements, and the report. Imports the
messages of peers/lines.py, the requests and the report. It runs no engine: whoever calls it passes a way to ask one.
Invariants: at each concurrency every engine gets the same list; each is measured at the best of its settings that were
tried, our own too; rounds alternate, so that what else the machine does hits all alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from ops.bench.peers.lines import Measured, Setting
from ops.bench.workload import WorkItem
from ops.errors import CommandError
from ops.report import ReportRow, format_number

MAX_MODEL_LEN = 1024
KV_TOKENS = 16384
"""Of each engine's cache: 1,024 blocks of 16 tokens, or 128 of 128, which is the smallest that vLLM is fast with."""


class Engine(StrEnum):
    """Who takes part. Values name rows of the report."""

    FOREBAY = "forebay"
    VLLM = "vllm"
    HF_STATIC = "hf_static"
    HF_CONTINUOUS = "hf_continuous"


AGAINST: Mapping[str, tuple[Engine, ...]] = {
    "hf": (Engine.HF_STATIC, Engine.HF_CONTINUOUS),
    "vllm": (Engine.VLLM,),
}
"""Peers by the names that the command line has for them."""


QUIET_CPU_SHARE = 0.9
"""Each engine computes in one thread without a pause: with less than this of a core, others took the rest."""
MOST_AT_ONCE = 64
"""The cache holds as many requests with room to spare, so that no engine has to preempt."""


def parse_against(text: str) -> tuple[str, ...]:
    """Peers from `hf,vllm`, each once.

    Raises:
        CommandError: an unknown peer, or none.
    """
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        if name not in AGAINST:
            raise CommandError(f"--against: {name!r} is none of {', '.join(AGAINST)}")
    return names


def parse_concurrencies(text: str) -> tuple[int, ...]:
    """Concurrencies from `1,8,32`, each once, smallest first.

    Raises:
        CommandError: not a list of whole numbers from 1 to 64.
    """
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not (part.isascii() and part.isdigit() and 1 <= int(part) <= MOST_AT_ONCE):
            raise CommandError(f"--concurrency: {part!r} is no whole number from 1 to {MOST_AT_ONCE}")
    return tuple(sorted({int(part) for part in parts}))


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """How much is measured."""

    concurrencies: tuple[int, ...]
    rounds: int
    quick: bool

    def requests(self, concurrency: int) -> int:
        """In the list of a round: whole batches, so that a static batch is never a part of one."""
        return concurrency * (2 if self.quick else max(2, min(5, 24 // concurrency)))

    def trial_requests(self, engine: Engine, concurrency: int) -> int:
        """From the beginning of the list, to choose a setting by."""
        if engine is Engine.HF_STATIC:
            return concurrency
        return max(2, concurrency + min(8, concurrency // 2))

    def settings(self, engine: Engine, concurrency: int) -> tuple[Setting, ...]:
        """What is tried; where it is one, it is not tried but taken. None where the engine has no use for it."""
        tried = _settings(engine, concurrency)
        return tried[:1] if self.quick else tried

    def rounds_of(self, engine: Engine) -> int:
        """transformers is several times slower: one round tells, and of its continuous batching the trial alone."""
        match engine:
            case Engine.FOREBAY | Engine.VLLM:
                return self.rounds
            case Engine.HF_STATIC:
                return 1
            case Engine.HF_CONTINUOUS:
                return 0


def _settings(engine: Engine, concurrency: int) -> tuple[Setting, ...]:
    match engine:
        case Engine.FOREBAY:
            return tuple({"step_token_budget": budget, "slots": concurrency} for budget in (128, 64, 256))
        case Engine.VLLM:
            return tuple(
                {"max_num_batched_tokens": budget, "max_num_seqs": concurrency, "block_size": 128}
                for budget in (64, 256, 2048)
            )
        case Engine.HF_STATIC:
            batches = (concurrency,) if concurrency % 2 else (concurrency, concurrency // 2)
            return tuple({"mode": "static", "batch": batch} for batch in batches)
        case Engine.HF_CONTINUOUS:
            if concurrency == 1:  # it is then its static batch of one with a slower cache
                return ()
            return tuple(
                {"mode": "continuous", "page_tokens": page_tokens, "batch_tokens": 256} for page_tokens in (256, 128)
            )


# --- measuring ---


@dataclass(frozen=True, slots=True)
class Trial:
    """One setting tried; `error` where the engine could not run it."""

    engine: Engine
    concurrency: int
    setting: Setting
    measured: Measured | None
    """None where nothing was to choose, or the engine failed."""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Standing:
    """One engine at one concurrency, at its best setting."""

    engine: Engine
    concurrency: int
    setting: Setting
    rounds: tuple[Measured, ...]
    """Or its best trial, where no round was run."""

    @property
    def tok_s(self) -> float:
        return median(one.tok_s for one in self.rounds)

    @property
    def tok_per_cpu_s(self) -> float:
        return median(one.tok_per_cpu_s for one in self.rounds)

    @property
    def cpu_share(self) -> float:
        """Of one core, on average over the rounds."""
        return sum(one.cpu_seconds for one in self.rounds) / sum(one.seconds for one in self.rounds)


@dataclass(frozen=True, slots=True)
class Comparison:
    trials: tuple[Trial, ...]
    standings: tuple[Standing, ...]

    def standing(self, engine: Engine, concurrency: int) -> Standing | None:
        found = (s for s in self.standings if (s.engine, s.concurrency) == (engine, concurrency))
        return next(found, None)


Measure = Callable[[Engine, Setting, Sequence[WorkItem], int], Measured | str]
"""Runs a list on an engine at a setting and a concurrency; a string says why it could not."""


class EngineFailedError(RuntimeError):
    """An engine could not run the list with a setting with which it ran the trial."""


def measurements(plan: EnginePlan, engines: Sequence[Engine]) -> int:
    """How many there will be, where nothing fails."""
    total = 0
    for concurrency in plan.concurrencies:
        for engine in engines:
            settings = plan.settings(engine, concurrency)
            rounds = plan.rounds_of(engine) if settings else 0
            total += rounds + (len(settings) if _is_tried(settings, rounds) else 0)
    return total


def compare(plan: EnginePlan, engines: Sequence[Engine], items: Sequence[WorkItem], measure: Measure) -> Comparison:
    """Try the settings, then run the rounds, one concurrency after the other.

    Args:
        items: At least as many as the largest list of the plan.

    Raises:
        EngineFailedError: a round failed.
    """
    trials: list[Trial] = []
    standings: list[Standing] = []
    for concurrency in plan.concurrencies:
        chosen: dict[Engine, Trial] = {}
        for engine in engines:
            tried = _try_settings(plan, engine, concurrency, items, measure)
            trials += tried
            working = [t for t in tried if not t.error]
            if working:
                chosen[engine] = max(working, key=lambda t: t.measured.tok_s if t.measured else 0.0)
        made: dict[Engine, list[Measured]] = {engine: [] for engine in chosen}
        for number in range(plan.rounds):
            for engine in chosen if number % 2 == 0 else reversed(chosen):
                if number < plan.rounds_of(engine):
                    setting = chosen[engine].setting
                    measured = measure(engine, setting, items[: plan.requests(concurrency)], concurrency)
                    if isinstance(measured, str):
                        raise EngineFailedError(f"{engine}, {setting_text(setting)}: {measured}")
                    made[engine].append(measured)
        for engine, trial in chosen.items():
            rounds = made[engine] or [one for one in (trial.measured,) if one is not None]
            standings.append(Standing(engine, concurrency, trial.setting, tuple(rounds)))
    return Comparison(tuple(trials), tuple(standings))


def _is_tried(settings: Sequence[Setting], rounds: int) -> bool:
    """A single setting needs no choice, and rounds will measure it."""
    return len(settings) > 1 or (len(settings) == 1 and not rounds)


def _try_settings(
    plan: EnginePlan, engine: Engine, concurrency: int, items: Sequence[WorkItem], measure: Measure
) -> list[Trial]:
    settings = plan.settings(engine, concurrency)
    if not _is_tried(settings, plan.rounds_of(engine)):
        return [Trial(engine, concurrency, setting, None) for setting in settings]
    trials = []
    for setting in settings:
        measured = measure(engine, setting, items[: plan.trial_requests(engine, concurrency)], concurrency)
        if isinstance(measured, str):
            trials.append(Trial(engine, concurrency, setting, None, measured))
        else:
            trials.append(Trial(engine, concurrency, setting, measured))
    return trials


# --- reporting ---


def setting_text(setting: Setting) -> str:
    return ", ".join(f"{name}={value}" for name, value in setting.items())


def report_rows(comparison: Comparison) -> tuple[ReportRow, ...]:
    """Ratios of medians, then the medians themselves. `over_hf_static` is that at the largest concurrency.

    `cpu_over_…` are the same of tokens per second of processor time: they hold on a busy machine too.
    """
    ratios: list[ReportRow] = []
    medians: list[ReportRow] = []
    for standing in comparison.standings:
        name, concurrency = standing.engine, standing.concurrency
        medians += [
            ReportRow(f"{name}_c{concurrency}_tok_s", standing.tok_s, "tokens/s"),
            ReportRow(f"{name}_c{concurrency}_tok_per_cpu_s", standing.tok_per_cpu_s, "tokens/s"),
        ]
        ours = comparison.standing(Engine.FOREBAY, concurrency)
        if ours is not None and name is not Engine.FOREBAY:
            ratios += [
                ReportRow(f"over_{name}_c{concurrency}", ours.tok_s / standing.tok_s, "ratio"),
                ReportRow(f"cpu_over_{name}_c{concurrency}", ours.tok_per_cpu_s / standing.tok_per_cpu_s, "ratio"),
            ]
    static = [row for row in ratios if row.name.startswith(f"over_{Engine.HF_STATIC}_")]
    if static:
        ratios.append(ReportRow(f"over_{Engine.HF_STATIC}", static[-1].value, "ratio"))
    return (*ratios, *medians)


def trial_cells(comparison: Comparison) -> list[tuple[str, ...]]:
    """Engine, concurrency, setting, tokens/s, and which was taken."""
    cells: list[tuple[str, ...]] = []
    for trial in comparison.trials:
        standing = comparison.standing(trial.engine, trial.concurrency)
        taken = standing is not None and standing.setting == trial.setting
        cells.append(
            (
                str(trial.engine),
                str(trial.concurrency),
                setting_text(trial.setting),
                format_number(trial.measured.tok_s if trial.measured else None),
                "taken" if taken else trial.error[:60],
            )
        )
    return cells


def standing_cells(
    comparison: Comparison, concurrencies: Sequence[int], quantity: Callable[[Standing], float]
) -> list[tuple[str, ...]]:
    """A row for each engine, then a row of ratios for each peer; a column for each concurrency."""

    def value(engine: Engine, concurrency: int) -> float | None:
        standing = comparison.standing(engine, concurrency)
        return None if standing is None else quantity(standing)

    def ratio(engine: Engine, concurrency: int) -> float | None:
        ours, theirs = value(Engine.FOREBAY, concurrency), value(engine, concurrency)
        return None if ours is None or theirs is None else ours / theirs

    engines = [e for e in Engine if any(s.engine is e for s in comparison.standings)]
    rows: list[tuple[str, ...]] = [(str(e), *(format_number(value(e, c)) for c in concurrencies)) for e in engines]
    rows += [
        (f"forebay / {e}", *(format_number(ratio(e, c)) for c in concurrencies))
        for e in engines
        if e is not Engine.FOREBAY
    ]
    return rows


def busy_note(comparison: Comparison) -> str:
    """What to say where some engine had much less than a core to itself; empty where none did."""
    least = min((standing.cpu_share for standing in comparison.standings), default=1.0)
    if least >= QUIET_CPU_SHARE:
        return ""
    return (
        f"the machine was busy: an engine had as little as {least:.0%} of a core, so that only tokens per CPU second "
        "can be relied on"
    )
