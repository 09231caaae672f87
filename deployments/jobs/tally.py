"""How far a batch is, in figures and words.

Owns: the counts, the rates of the last minute, and the line of a job's log. Imports nothing of ours. Pure but for the
counts: time is an argument.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass, field

_WINDOW_S = 60.0


@dataclass(frozen=True, slots=True)
class Standing:
    """At one time."""

    lines: int
    done: int
    """Answered, those that failed and those of earlier runs among them."""
    failed: int
    in_flight: int
    limit: int
    """Of requests in flight."""
    lines_per_s: float
    output_tokens_per_s: float

    @property
    def eta_s(self) -> float | None:
        """None before anything is known."""
        return (self.lines - self.done) / self.lines_per_s if self.lines_per_s > 0 else None


@dataclass(slots=True)
class Tally:
    """Of one run of a job. `done` and `failed` begin with what earlier runs left."""

    lines: int
    done: int
    failed: int
    began_s: float
    output_tokens: int = 0
    _marks: deque[tuple[float, int, int]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self._marks.append((self.began_s, self.done, 0))

    def add(self, *, failed: bool, output_tokens: int) -> None:
        self.done += 1
        self.failed += failed
        self.output_tokens += output_tokens

    def standing(self, now_s: float, in_flight: int, limit: int) -> Standing:
        """To be asked again and again: rates are of the last minute, as far as it was asked in it."""
        while len(self._marks) > 1 and now_s - self._marks[1][0] >= _WINDOW_S:
            self._marks.popleft()
        then_s, done, tokens = self._marks[0]
        for_s = max(now_s - then_s, 1e-9)
        self._marks.append((now_s, self.done, self.output_tokens))
        return Standing(
            self.lines, self.done, self.failed, in_flight, limit,
            (self.done - done) / for_s, (self.output_tokens - tokens) / for_s,
        )  # fmt: skip


def log_line(now: Standing) -> str:
    """One line, its figures always at the same place."""
    width = len(f"{now.lines:,}")
    eta = "" if now.eta_s is None or now.done == now.lines else f"  ETA {duration(now.eta_s)}"
    return (
        f"{now.done:>{width},} of {now.lines:,} done  {now.failed:>{width},} failed  "
        f"{now.in_flight:>4} of {now.limit:>4} in flight  {now.lines_per_s:>8,.1f} lines/s  "
        f"{now.output_tokens_per_s:>8,.0f} tokens/s{eta}"
    )


def duration(seconds: float) -> str:
    """As people say it: the two largest parts."""
    whole = round(seconds)
    hours, minutes = whole // 3600, whole % 3600 // 60
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {whole % 60:02d} s" if minutes else f"{whole} s"


def summary(now: Standing, took_s: float, output_tokens: int) -> dict[str, object]:
    """For machines, at the end."""
    told = asdict(now)
    for name in ("in_flight", "limit", "lines_per_s", "output_tokens_per_s"):
        del told[name]
    return told | {"took_s": took_s, "output_tokens": output_tokens}
