"""Replay of a real trace against a running endpoint, from plan to report.

Owns: the order of things (find the model, learn the tokens per word, replay, sum up) and what the report says. The
pacing, the HTTP, the prompts and the statistics are elsewhere.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path

from rich.text import Text

from deployments.open_files import allow_many_connections
from ops.bench.client import Api, Ask, Endpoint
from ops.bench.open_loop import run_open_loop
from ops.bench.prompts import CALIBRATION_WORDS, Lexicon, calibrate, calibration_prompt, prompt
from ops.bench.schedule import SERVICE_TIERS, PlannedRequest
from ops.bench.stats import ALL, PERCENTILES, Answer, Slo, Summary, percentile, report_rows, summarize_by_class
from ops.errors import CommandError
from ops.report import Report, Scalar, format_number, machine_context

LATENESS_LIMIT_MS = 50.0
"""Beyond it the client, not the server, set the load; the report warns."""


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """What to replay, where. All of it is told in the report."""

    url: str
    api: Api
    model: str | None
    tokenizer: Path | None
    trace: Path
    trace_format: str
    skip: int
    """Requests of the trace that were left out before the first one replayed."""
    time_scale: Fraction
    token_scale: Fraction
    classes: Mapping[str, str]
    slos: Mapping[str, Slo]
    seed: int
    timeout_s: float


@dataclass(slots=True)
class Progress:
    """Counts that a progress bar shows; told on every change."""

    on_change: Callable[[Progress], None]
    sent: int = 0
    ended: int = 0
    failed: int = 0

    def departed(self) -> None:
        self.sent += 1
        self.on_change(self)

    def arrived(self, answer: Answer) -> None:
        self.ended += 1
        self.failed += answer.failure is not None
        self.on_change(self)


@dataclass(frozen=True, slots=True)
class ReplayResult:
    settings: ReplaySettings
    model: str
    lexicon: Lexicon
    answers: tuple[Answer, ...]


async def replay(
    planned: Sequence[PlannedRequest], settings: ReplaySettings, progress: Progress, credentials: Mapping[str, str]
) -> ReplayResult:
    """Send every request at its time, with `credentials` among its headers, and read every answer.

    Raises:
        CommandError: nobody answers at the address, or prompts cannot be made to length. A request that fails during
            the replay is an answer, not an error.
    """
    allow_many_connections()
    endpoint = Endpoint(settings.url, settings.api, settings.timeout_s, credentials)
    await endpoint.find_model(settings.model)
    if settings.tokenizer is None:
        lexicon = await _measured_lexicon(endpoint)
    else:
        lexicon = tokenizer_lexicon(settings.tokenizer)

    async def one(ask: Ask) -> Answer:
        progress.departed()
        answer = await endpoint.send(ask)
        progress.arrived(answer)
        return answer

    def departures() -> Iterator[tuple[float, Callable[[], Awaitable[Answer]]]]:
        for request in planned:
            ask = Ask(
                index=request.index,
                priority_class=request.priority_class,
                service_tier=SERVICE_TIERS[request.priority_class],
                planned_s=request.send_at_s,
                prompt=prompt(request, lexicon, settings.seed),
                prompt_tokens=request.prompt_tokens,
                output_tokens=request.output_tokens,
            )
            yield request.send_at_s, partial(one, ask)

    endpoint.start()
    answers = await run_open_loop(departures(), endpoint.now_s)
    return ReplayResult(settings, endpoint.model, lexicon, tuple(answers))


async def _measured_lexicon(endpoint: Endpoint) -> Lexicon:
    short, long = CALIBRATION_WORDS
    counts = (
        await endpoint.count_prompt_tokens(calibration_prompt(short)),
        await endpoint.count_prompt_tokens(calibration_prompt(long)),
    )
    try:
        return calibrate(counts)
    except ValueError as error:
        raise CommandError(f"--url: the server's token counts make no sense ({error}); give --tokenizer") from error


def tokenizer_lexicon(path: Path) -> Lexicon:
    """From a tokenizer.json, or a folder that has one.

    Raises:
        CommandError: it cannot be read.
    """
    from tokenizers import Tokenizer

    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise CommandError(f"--tokenizer: {file} does not exist; give a model folder or its tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise CommandError(f"--tokenizer: {file} cannot be read: {error}") from error
    short, long = (len(tokenizer.encode(calibration_prompt(n)).ids) for n in CALIBRATION_WORDS)
    try:
        return calibrate((short, long))
    except ValueError as error:
        raise CommandError(f"--tokenizer: {file}: {error}") from error


def build_report(result: ReplayResult, command: str) -> tuple[Report, dict[str, Summary]]:
    """The report, and the summaries that the table shows: per class in order of urgency, then all."""
    settings, answers = result.settings, result.answers
    summaries, duration_s = summarize_by_class(answers, settings.slos, tuple(SERVICE_TIERS))
    everything = summaries[ALL]
    lateness = [a.lateness_ms for a in answers]
    wrong_length = sum(a.failure is None and a.output_tokens != a.output_tokens_wanted for a in answers)
    context: dict[str, Scalar | Sequence[Scalar] | Mapping[str, Scalar] | Mapping[str, Mapping[str, Scalar]]] = {
        **machine_context(("httpx",)),
        "url": settings.url,
        "api": settings.api,
        "model": result.model,
        "trace": settings.trace.name,
        "trace_format": settings.trace_format,
        "requests": len(answers),
        "skipped": settings.skip,
        "time_scale": float(settings.time_scale),
        "token_scale": float(settings.token_scale),
        "seed": settings.seed,
        "timeout_s": settings.timeout_s,
        "classes": dict(settings.classes),
        "slos": {name: slo.bounds() for name, slo in settings.slos.items()},
        "errors_by_kind": dict(everything.failures),
        "percentiles": "linear interpolation (Hyndman-Fan 7), failed requests left out",
        "tokens_per_word": float(result.lexicon.tokens_per_word),
        "prompt_length_error_mean": _prompt_error(answers),
        "output_length_wrong": wrong_length,
        "output_tokens_counted_by": "server"
        if all(a.counted_by_server for a in answers if not a.failure)
        else "events",
        "send_lateness_p99_ms": percentile(lateness, 99),
        "send_lateness_max_ms": max(lateness, default=None),
    }
    return Report(command, context, report_rows(summaries, duration_s)), summaries


def _prompt_error(answers: Sequence[Answer]) -> float | None:
    """Mean of |tokens - wanted| / wanted, over the prompts that the server counted."""
    errors = [
        abs(a.prompt_tokens - a.prompt_tokens_wanted) / a.prompt_tokens_wanted
        for a in answers
        if a.failure is None and a.prompt_tokens
    ]
    return sum(errors) / len(errors) if errors else None


def table_cells(summaries: Mapping[str, Summary]) -> tuple[list[str], list[list[str | Text]]]:
    """Header and rows of the table: a column for each class and for all, a row for each figure."""

    def row(name: str, cell: Callable[[Summary], str | Text]) -> list[str | Text]:
        return [name, *(cell(s) for s in summaries.values())]

    def spread(values: Mapping[int, float | None]) -> str:
        return " / ".join(format_number(v) for v in values.values())

    def errors(s: Summary) -> Text:
        return Text(str(s.errors), style="bold red" if s.errors else "green")

    of = "/".join(f"p{p}" for p in PERCENTILES)
    rows: list[list[str | Text]] = [
        row("requests", lambda s: str(s.requests)),
        row("errors", errors),
        row(f"TTFT ms, {of}", lambda s: spread(s.ttft_ms)),
        row(f"TPOT ms, {of}", lambda s: spread(s.tpot_ms)),
        row(f"end-to-end ms, {of}", lambda s: spread(s.e2e_ms)),
        row("output tokens/s", lambda s: format_number(s.tokens_per_s)),
        row("goodput requests/s", lambda s: format_number(s.goodput_rps)),
        row("met their SLOs", lambda s: f"{s.good / s.requests:.1%}" if s.requests else "-"),
    ]
    return ["", *summaries], rows


def notes(report: Report, result: ReplayResult) -> list[str]:
    """Lines below the table: what the figures rest on."""
    settings = result.settings
    slos = "; ".join(
        f"{name} " + (", ".join(f"{q} ≤ {b:g}" for q, b in slo.bounds().items()) or "none")
        for name, slo in settings.slos.items()
        if any(a.priority_class == name for a in result.answers)
    )
    present = {a.priority_class for a in result.answers}
    classes = ", ".join(f"{service} → {name}" for service, name in settings.classes.items() if name in present)
    lines = [
        f"{settings.trace.name}{f', from request {settings.skip + 1}' if settings.skip else ''}: gaps × {settings.time_scale}, lengths × {settings.token_scale}, seed {settings.seed}; "
        f"{result.model} in {report.value(f'{ALL}.duration_s'):.1f} s",
        f"classes: {classes}",
        f"SLOs: {slos}",
    ]
    error = report.context["prompt_length_error_mean"]
    if isinstance(error, float):
        lines.append(f"prompts differ from the traced length by {error:.1%} on average")
    return lines


def warnings(report: Report, result: ReplayResult) -> list[str]:
    """What a reader must know before trusting the figures; most important first."""
    lines: list[str] = []
    for label in {a.failure_label: None for a in result.answers if a.failure is not None}:
        failed = [a for a in result.answers if a.failure_label == label]
        said = next((a.detail for a in failed if a.detail), "")
        lines.append(f"{len(failed)} failed with {label}" + (f", the first: {said}" if said else ""))
    lateness = report.context["send_lateness_p99_ms"]
    if isinstance(lateness, float) and lateness > LATENESS_LIMIT_MS:
        lines.append(
            f"this client sent late (p99 {lateness:.0f} ms, more than {LATENESS_LIMIT_MS:.0f}): the load was not as "
            "planned; use a larger --time-scale, or a machine of its own for the client"
        )
    wrong = report.context["output_length_wrong"]
    if wrong:
        lines.append(f"{wrong} answers have not the traced length: the server does not honour ignore_eos")
    if report.context["output_tokens_counted_by"] == "events":
        lines.append("the server reports no usage: output tokens are events with text, which may hold several")
    return lines
