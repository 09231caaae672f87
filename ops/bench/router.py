"""What a router costs: its CPU time for each streamed token and each request, and what it adds to the first token's time.

Owns: what is measured, in which order, and the figures that come of it. Pure but for the questions that it asks. Rounds
alternate between our router and the others, so a ratio holds where the machine's speed does not. Invariant: a window in
which fewer than 99 % of the tokens reached the client singly measures something else, and is left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

from ops.bench.peers.routers import PEERS
from ops.bench.router_wire import Counted
from ops.errors import CommandError
from ops.report import ReportRow, format_number

OURS = "forebay"
SINGLE_LEAST = 0.99
REPEATS = 2
"""Times that a round is repeated in none of whose windows tokens came singly."""
REQUEST_CONCURRENCY = 8

ROUTER, SOURCE = "router", "source"
"""Whose CPU time is read: the router's, and that of the process that makes the tokens."""


@dataclass(frozen=True, slots=True)
class RouterPlan:
    streams: tuple[int, ...]
    rounds: int
    warm_s: float
    windows: int
    request_s: float
    probes: int
    open_streams: int
    """Held open at once, with nothing to say."""

    @property
    def half_load(self) -> int:
        """Streams that run while first tokens are timed."""
        return max(1, max(self.streams) // 2)


def plan(streams: tuple[int, ...], rounds: int, quick: bool) -> RouterPlan:
    if quick:
        return RouterPlan(streams, 1, warm_s=0.5, windows=2, request_s=1.0, probes=20, open_streams=500)
    return RouterPlan(streams, rounds, warm_s=1.0, windows=5, request_s=3.0, probes=60, open_streams=5000)


def parse_against(text: str) -> tuple[str, ...]:
    """Peers by name, each once. Raises CommandError."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in PEERS:
            raise CommandError(f"--against: {name!r} is none of {', '.join(PEERS)}")
    if len(set(names)) < len(names):
        raise CommandError(f"--against: {text} names a router twice")
    return names


def parse_streams(text: str) -> tuple[int, ...]:
    """Numbers of streams, rising. Raises CommandError."""
    try:
        streams = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise CommandError(f"--streams: {text!r} must be numbers with commas between them") from None
    if min(streams) < 1 or max(streams) > MAX_STREAMS or list(streams) != sorted(set(streams)):
        raise CommandError(f"--streams: {text}: give each number once, in rising order, from 1 to {MAX_STREAMS}")
    return streams


MAX_STREAMS = 1024
"""Two sockets each in the router, with room in the usual limit of open files (4,096 in most services)."""


@dataclass(slots=True)
class Figures:
    """What was measured: values of each round by the figure's name."""

    values: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    windows: int = 0
    windows_left_out: int = 0
    """Those in which tokens came together."""

    def add(self, name: str, value: float) -> None:
        self.values[name].append(value)

    def median(self, name: str) -> float | None:
        return median(self.values[name]) if name in self.values else None

    def spread(self, name: str) -> float:
        """(largest - smallest) / median."""
        values = self.values[name]
        return (max(values) - min(values)) / median(values) if median(values) else 0.0


def figure(target: str, name: str) -> str:
    """The name of one router's figure: ours has no prefix."""
    return name if target == OURS else f"{target}.{name}"


def per_token(figures: Figures, target: str, suffix: str, counted: Counted) -> None:
    """Note a window of streams."""
    figures.add(figure(target, f"cpu_us_per_token_{suffix}"), counted.cpu_s[ROUTER] / counted.done * 1e6)
    source = "replicas" if target == OURS else f"{target}.mock"
    figures.add(f"{source}.cpu_us_per_token_{suffix}", counted.cpu_s[SOURCE] / counted.done * 1e6)
    figures.add(figure(target, f"tokens_per_s_{suffix}"), counted.done / counted.wall_s)
    figures.add(figure(target, f"single_share_{suffix}"), counted.single / counted.done)
    figures.add("machine.idle_share", counted.idle_share)


def per_request(figures: Figures, target: str, name: str, counted: Counted) -> None:
    """Note a round of whole answers."""
    figures.add(figure(target, name), counted.cpu_s[ROUTER] / counted.done * 1e6)
    figures.add(figure(target, f"{name}_answers_per_s"), counted.done / counted.wall_s)


def singly(measure: Callable[[], Sequence[Counted]], figures: Figures, what: str) -> list[Counted]:
    """The windows of a round in which tokens came singly, at least one.

    Raises:
        CommandError: there is none, as often as the round is repeated.
    """
    windows: list[Counted] = []
    for _ in range(1 + REPEATS):
        windows += (measured := measure())
        kept = [w for w in measured if w.done and w.single >= SINGLE_LEAST * w.done]
        figures.windows += len(measured)
        figures.windows_left_out += len(measured) - len(kept)
        if kept:
            return kept
    best = max((w.single / w.done for w in windows if w.done), default=0.0)
    idle = max((w.idle_share for w in windows), default=0.0)
    raise CommandError(
        f"{what}: at most {100 * best:.1f} % of the tokens came singly in {len(windows)} windows, with at most "
        f"{100 * idle:.0f} % of the machine idle: end other work, or ask for fewer --streams"
    )


def open_streams(figures: Figures, count: int, grown_bytes: int) -> None:
    """Note what so many open streams held."""
    figures.add(f"open_streams_{count}_kb_each", grown_bytes / count / 1000)


def added_ttft(figures: Figures, target: str, direct_ms: Sequence[float], through_ms: Sequence[float]) -> None:
    """Note a round of first tokens: medians of both ways."""
    figures.add(figure(target, "added_ttft_p50_ms"), median(through_ms) - median(direct_ms))


def report_rows(figures: Figures, streams: Sequence[int], against: Sequence[str]) -> tuple[ReportRow, ...]:
    """Medians over the windows or rounds and their spreads; ratios are of medians, to the peer that took least."""
    return (*_ratios(figures, streams, against), *_medians(figures))


def _ratios(figures: Figures, streams: Sequence[int], against: Sequence[str]) -> Iterator[ReportRow]:
    for count in streams:
        name = f"cpu_us_per_token_{count}"
        ours, best = figures.median(name), _best(figures, against, name)
        if ours is not None and best is not None:
            yield ReportRow(f"cpu_per_token_over_best_rust_{count}", ours / best, "ratio")


def _best(figures: Figures, against: Sequence[str], name: str) -> float | None:
    return min((m for peer in against if (m := figures.median(figure(peer, name))) is not None), default=None)


def _medians(figures: Figures) -> Iterator[ReportRow]:
    for name, values in figures.values.items():
        yield ReportRow(name, median(values), _unit(name))
        if len(values) > 1 and "cpu_us" in name and "answers" not in name:
            yield ReportRow(f"{name}_spread", figures.spread(name), "ratio")


def _unit(name: str) -> str:
    if name.endswith("_ms"):
        return "ms"
    if name.endswith("_kb_each"):
        return "kB"
    if "per_s" in name:
        return "1/s"
    return "ratio" if "share" in name else "µs"


def table(figures: Figures, streams: Sequence[int], against: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """A column for each router, and one for our cost over that of the best other."""
    names = [
        *(f"cpu_us_per_token_{count}" for count in streams),
        f"cpu_us_per_token_own_frames_{streams[0]}",
        "cpu_us_per_request",
        "cpu_us_per_request_pretokenised",
        "added_ttft_p50_ms",
    ]
    rows = []
    for name in names:
        ours, best = figures.median(name), _best(figures, against, name)
        ratio = ours / best if ours is not None and best else None
        cells = [format_number(figures.median(figure(target, name))) for target in (OURS, *against)]
        rows.append([name, *cells, format_number(ratio)])
    return ["medians", OURS, *against, "ours ÷ best"], rows
