"""What a replay's answers say: percentiles, service levels, goodput.

Owns: the definitions below and nothing of how an answer came about. Pure.

- TTFT: from sending the request to the first event with text (or to the end, where no text came at all).
- TPOT: (end - first token) / (tokens - 1); undefined for one token.
- End-to-end: from sending the request to the end of the answer.
- Percentile: linear interpolation between closest ranks (Hyndman and Fan 1996, definition 7; numpy's default), over
  the requests that did not fail.
- Goodput: requests that meet all SLOs of their class / duration. A failed request meets none; a figure that is
  undefined (TPOT of one token) breaks none.
- Duration: from the start of the replay to the end of the last answer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum

import numpy as np

from ops.errors import CommandError
from ops.report import ReportRow

PERCENTILES = (50, 90, 99)
ALL = "all"


class Failure(StrEnum):
    """How a request can fail, as seen by its client."""

    CONNECT = "connect"
    """No connection, or it broke before an answer began."""
    HTTP_STATUS = "http"
    """The answer's status is none of success; labelled with the status."""
    ERROR_EVENT = "error_event"
    """The stream carried an error."""
    TRUNCATED = "truncated"
    """The stream ended or broke without a finish reason and [DONE]."""
    MALFORMED = "malformed"
    """Not the protocol: an event that cannot be read, or an unknown finish reason."""
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one request. Times are seconds from the start of the replay."""

    index: int
    priority_class: str
    planned_s: float
    sent_s: float
    end_s: float
    first_s: float | None = None
    """The first event with text; None if none came."""
    prompt_tokens_wanted: int = 0
    prompt_tokens: int | None = None
    """As the server counts; None where it does not say."""
    output_tokens_wanted: int = 0
    output_tokens: int = 0
    """As the server counts, or events with text where it does not say."""
    counted_by_server: bool = True
    failure: Failure | None = None
    status: int | None = None
    """HTTP status, if an answer began."""
    detail: str = ""
    """What the server or the system said of the failure, one line."""

    @property
    def failure_label(self) -> str:
        return f"http_{self.status}" if self.failure is Failure.HTTP_STATUS else str(self.failure or "")

    @property
    def ttft_ms(self) -> float:
        return ((self.end_s if self.first_s is None else self.first_s) - self.sent_s) * 1000

    @property
    def tpot_ms(self) -> float | None:
        if self.first_s is None or self.output_tokens < 2:
            return None
        return (self.end_s - self.first_s) * 1000 / (self.output_tokens - 1)

    @property
    def e2e_ms(self) -> float:
        return (self.end_s - self.sent_s) * 1000

    @property
    def lateness_ms(self) -> float:
        """How much later than planned the client sent it: above zero it is the client that could not keep up."""
        return (self.sent_s - self.planned_s) * 1000


@dataclass(frozen=True, slots=True)
class Slo:
    """Service-level objectives of one class: upper bounds in milliseconds; None is no bound."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    def met_by(self, answer: Answer) -> bool:
        if answer.failure is not None:
            return False
        figures = ((answer.ttft_ms, self.ttft_ms), (answer.tpot_ms, self.tpot_ms), (answer.e2e_ms, self.e2e_ms))
        return all(bound is None or figure is None or figure <= bound for figure, bound in figures)

    def bounds(self) -> dict[str, float]:
        return {f.name: v for f in fields(self) if (v := getattr(self, f.name)) is not None}


DEFAULT_SLOS: Mapping[str, Slo] = {
    "interactive": Slo(ttft_ms=500, tpot_ms=100),
    "standard": Slo(ttft_ms=2_000, tpot_ms=200),
    "batch": Slo(e2e_ms=600_000),
}


def parse_slos(texts: Sequence[str], classes: Iterable[str]) -> dict[str, Slo]:
    """Service levels from `class=ttft_ms:500,tpot_ms:100`; a class that is named loses its defaults.

    Raises:
        CommandError: another form, an unknown class or quantity, or a bound that is no positive number.
    """
    slos = {name: DEFAULT_SLOS.get(name, Slo()) for name in classes}
    quantities = [f.name for f in fields(Slo)]
    for text in texts:
        name, _, bounds = (part.strip() for part in text.partition("="))
        if name not in slos:
            raise CommandError(f"--slo: unknown class {name!r}; one of {', '.join(slos)}")
        slo = Slo()
        for entry in (e.strip() for e in bounds.split(",")):
            quantity, _, value = (part.strip() for part in entry.partition(":"))
            if quantity not in quantities:
                raise CommandError(f"--slo: unknown quantity {quantity!r} in {text!r}; one of {', '.join(quantities)}")
            try:
                bound = float(value)
            except ValueError as error:
                raise CommandError(f"--slo: {value!r} in {text!r} is no number of milliseconds") from error
            if not (math.isfinite(bound) and bound > 0):
                raise CommandError(f"--slo: {value!r} in {text!r} must be greater than 0")
            slo = replace(slo, **{quantity: bound})
        slos[name] = slo
    return slos


def percentile(values: Sequence[float], percent: float) -> float | None:
    """See the module's definitions. None of nothing."""
    return float(np.percentile(values, percent)) if values else None


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one class, or of all. Percentiles are by `PERCENTILES`, None where nothing was measured."""

    requests: int
    failures: Mapping[str, int]
    ttft_ms: Mapping[int, float | None]
    tpot_ms: Mapping[int, float | None]
    e2e_ms: Mapping[int, float | None]
    output_tokens: int
    tokens_per_s: float
    good: int
    goodput_rps: float

    @property
    def errors(self) -> int:
        return sum(self.failures.values())


def summarize(answers: Sequence[Answer], slos: Mapping[str, Slo], duration_s: float) -> Summary:
    """The figures of these answers, whatever their classes. Tokens of failed requests are not counted as output."""
    whole = [a for a in answers if a.failure is None]
    tokens = sum(a.output_tokens for a in whole)
    good = sum(slos.get(a.priority_class, Slo()).met_by(a) for a in whole)

    def spread(values: Sequence[float]) -> dict[int, float | None]:
        return {p: percentile(values, p) for p in PERCENTILES}

    return Summary(
        requests=len(answers),
        failures=dict(sorted(Counter(a.failure_label for a in answers if a.failure is not None).items())),
        ttft_ms=spread([a.ttft_ms for a in whole]),
        tpot_ms=spread([t for a in whole if (t := a.tpot_ms) is not None]),
        e2e_ms=spread([a.e2e_ms for a in whole]),
        output_tokens=tokens,
        tokens_per_s=tokens / duration_s if duration_s > 0 else 0.0,
        good=good,
        goodput_rps=good / duration_s if duration_s > 0 else 0.0,
    )


def summarize_by_class(
    answers: Sequence[Answer], slos: Mapping[str, Slo], class_order: Sequence[str]
) -> tuple[dict[str, Summary], float]:
    """The figures of each class that occurs, in the given order, then of `all`; and the duration in seconds."""
    duration_s = max((a.end_s for a in answers), default=0.0)
    present = {a.priority_class for a in answers}
    groups = {name: [a for a in answers if a.priority_class == name] for name in class_order if name in present}
    if set(groups) != present:
        raise ValueError(f"classes {sorted(present - set(groups))} are not in {class_order}")
    groups[ALL] = list(answers)
    return {name: summarize(group, slos, duration_s) for name, group in groups.items()}, duration_s


def report_rows(summaries: Mapping[str, Summary], duration_s: float) -> tuple[ReportRow, ...]:
    """The rows of the report; a percentile of nothing has none."""
    rows: list[ReportRow] = []
    for name, s in summaries.items():
        rows += [
            ReportRow(f"{name}.requests", s.requests, "requests"),
            ReportRow(f"{name}.errors", s.errors, "requests"),
        ]
        rows += [
            ReportRow(f"{name}.{quantity}_p{p}_ms", value, "ms")
            for quantity, spread in (("ttft", s.ttft_ms), ("tpot", s.tpot_ms), ("e2e", s.e2e_ms))
            for p, value in spread.items()
            if value is not None
        ]
        rows += [
            ReportRow(f"{name}.output_tokens", s.output_tokens, "tokens"),
            ReportRow(f"{name}.tokens_per_s", s.tokens_per_s, "tokens/s"),
            ReportRow(f"{name}.goodput_rps", s.goodput_rps, "requests/s"),
        ]
    return (*rows, ReportRow(f"{ALL}.duration_s", duration_s, "s"))
