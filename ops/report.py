"""The one form in which every benchmark and simulation gives its figures.

Owns: the JSON document `{"command", "context", "rows"}`, what every context says of the machine, and the table on the
terminal. Imports nothing of ours but the command line's error. Invariant: a row's value is a finite number; what could
not be measured has no row.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ops.errors import CommandError

Scalar = str | int | float | bool | None
Context = Mapping[str, Scalar | Sequence[Scalar] | Mapping[str, Scalar] | Mapping[str, Mapping[str, Scalar]]]


@dataclass(frozen=True, slots=True)
class ReportRow:
    """One figure. `name` is dotted, `<part>.<quantity>_<unit>`; `unit` is repeated so that no reader has to guess."""

    name: str
    value: float
    unit: str

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise ValueError(f"{self.name}: {self.value} is no finite number; leave the row out")


@dataclass(frozen=True, slots=True)
class Report:
    """What one run measured, and under what conditions. Names of rows differ."""

    command: str
    context: Context
    rows: tuple[ReportRow, ...]

    def __post_init__(self) -> None:
        names = [row.name for row in self.rows]
        if len(set(names)) != len(names):
            raise ValueError(f"rows: names must differ, got {sorted(n for n in names if names.count(n) > 1)}")

    def value(self, name: str) -> float:
        """The value of one row.

        Raises:
            KeyError: no row has this name.
        """
        for row in self.rows:
            if row.name == name:
                return row.value
        raise KeyError(name)


def machine_context(packages: Sequence[str] = ()) -> dict[str, Scalar | Mapping[str, Scalar]]:
    """Versions (Forebay's, Python's and those of `packages`), processor and operating system."""
    versions: dict[str, Scalar] = {
        "forebay": importlib.metadata.version("forebay"),
        "python": platform.python_version(),
    }
    versions |= {name: importlib.metadata.version(name) for name in packages}
    return {
        "versions": versions,
        "cpu": _cpu_name(Path("/proc/cpuinfo")),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "os": platform.platform(terse=True),
    }


def write_json(report: Report, path: Path, more: Mapping[str, object] = MappingProxyType({})) -> None:
    """Write the report, and `more` beside its parts, whole or not at all.

    Raises:
        CommandError: the file cannot be written.
    """
    document = {
        "command": report.command,
        "context": report.context,
        "rows": [{"name": row.name, "value": row.value, "unit": row.unit} for row in report.rows],
        **more,
    }
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n", "utf-8")
        temporary.replace(path)
    except OSError as error:
        raise CommandError(f"--json: {path} cannot be written: {error.strerror}") from error


def check_writable(path: Path | None, option: str = "--json") -> None:
    """Find out before a long run, not after it, that its result could not be written where `option` says.

    Raises:
        CommandError: `path` is a folder, or its folder is missing or read-only.
    """
    if path is None:
        return
    if path.is_dir():
        raise CommandError(f"{option}: {path} is a folder; name a file")
    if not path.parent.is_dir():
        raise CommandError(f"{option}: the folder {path.parent} does not exist")
    if not os.access(path.parent, os.W_OK):
        raise CommandError(f"{option}: the folder {path.parent} cannot be written to")


def console(*, stderr: bool = False) -> Console:
    """A console that colours on a terminal and, elsewhere, is plain and never folds a table to 80 columns."""
    out = Console(stderr=stderr, highlight=False)
    return out if out.is_terminal else Console(stderr=stderr, highlight=False, width=160)


def print_table(
    out: Console,
    header: Sequence[str],
    rows: Sequence[Sequence[str | Text]],
    *,
    title: str = "",
    notes: Sequence[str] = (),
) -> None:
    """Print an aligned table: the first column names the row, the others are figures and stand to the right.

    Args:
        header: One title per column.
        rows: Cells; each row as long as the header.
        notes: Lines below the table: what the figures depend on.
    """
    table = Table(
        title=title or None, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2)
    )
    table.add_column(header[0], style="cyan", no_wrap=True)
    for name in header[1:]:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        if len(row) != len(header):
            raise ValueError(f"a row of {len(row)} cells under {len(header)} titles: {row}")
        table.add_row(*row)
    out.print(table)
    for note in notes:
        out.print(Text(note, style="dim"))


def print_rows(out: Console, report: Report, *, title: str = "") -> None:
    """Print every row of a report as it stands in the JSON."""
    rows = [(row.name, format_number(row.value), row.unit) for row in report.rows]
    print_table(out, ("name", "value", "unit"), rows, title=title)


def format_number(value: float | None) -> str:
    """Three or more significant digits, thousands apart; a dash where nothing was measured.

    Whole numbers have no decimals.
    """
    if value is None:
        return "-"
    if float(value).is_integer() or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"


def _cpu_name(cpuinfo: Path) -> str:
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux: the platform module is the next best
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def counting_bar(errors: Console) -> Progress:
    """For work in announced parts: what is done now, how many of how many, and for how long. Only on a terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=errors,
        transient=True,
        disable=not errors.is_terminal,
    )
