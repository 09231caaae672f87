"""The one JSON form and the table."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from ops.errors import CommandError
from ops.report import (
    Report,
    ReportRow,
    check_writable,
    console,
    format_number,
    machine_context,
    print_rows,
    print_table,
    write_json,
)

REPORT = Report(
    "forebay bench replay --seed 1",
    {"seed": 1, "model": "modèle", "classes": {"code": "interactive"}},
    (ReportRow("all.errors", 0, "requests"), ReportRow("all.tokens_per_s", 81.5, "tokens/s")),
)


def test_json_has_exactly_command_context_and_rows(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    write_json(REPORT, path)
    assert json.loads(path.read_text()) == {
        "command": "forebay bench replay --seed 1",
        "context": {"seed": 1, "model": "modèle", "classes": {"code": "interactive"}},
        "rows": [
            {"name": "all.errors", "value": 0, "unit": "requests"},
            {"name": "all.tokens_per_s", "value": 81.5, "unit": "tokens/s"},
        ],
    }
    assert list(tmp_path.iterdir()) == [path], "no temporary file is left"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_row_that_is_no_number_cannot_be_made(value: float) -> None:
    with pytest.raises(ValueError, match="no finite number"):
        ReportRow("x", value, "ms")


def test_row_names_differ() -> None:
    with pytest.raises(ValueError, match="names must differ"):
        Report("c", {}, (ReportRow("a", 1, "ms"), ReportRow("a", 2, "ms")))


def test_value_is_found_by_name_or_missed_by_name() -> None:
    assert REPORT.value("all.tokens_per_s") == 81.5
    with pytest.raises(KeyError):
        REPORT.value("all.ttft_p50_ms")


def test_context_names_versions_and_machine() -> None:
    context = machine_context(("httpx",))
    versions = context["versions"]
    assert isinstance(versions, dict)
    assert versions.keys() == {"forebay", "python", "httpx"}
    assert context["cpu"]
    assert isinstance(context["cpus"], int)
    json.dumps(context)


def test_path_that_cannot_be_written_is_told_before_and_after_the_run(tmp_path: Path) -> None:
    check_writable(None)
    check_writable(tmp_path / "new.json")
    with pytest.raises(CommandError, match="is a folder"):
        check_writable(tmp_path)
    with pytest.raises(CommandError, match="does not exist"):
        check_writable(tmp_path / "none" / "x.json")
    with pytest.raises(CommandError, match="cannot be written"):
        write_json(REPORT, tmp_path / "none" / "x.json")


def test_table_is_plain_and_aligned_where_there_is_no_terminal() -> None:
    out = Console(file=io.StringIO(), width=80)
    print_table(out, ("", "code", "all"), [("errors", "0", "12"), ("requests", "1,000", "5")], notes=("seed 1",))
    assert isinstance(out.file, io.StringIO)
    lines = out.file.getvalue().splitlines()
    assert "\x1b" not in out.file.getvalue()
    assert lines[0].split() == ["code", "all"]
    ends = [line.index(cell) + len(cell) for line, cell in zip(lines, ("code", "0", "1,000"), strict=False)]
    assert len(set(ends)) == 1, "figures stand under each other to the right"
    assert lines[3] == "seed 1"


def test_table_is_coloured_on_a_terminal() -> None:
    out = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=80)
    print_rows(out, REPORT, title="Figures")
    assert isinstance(out.file, io.StringIO)
    assert "\x1b[" in out.file.getvalue()


def test_ragged_row_is_a_programmers_error() -> None:
    with pytest.raises(ValueError, match="2 titles"):
        print_table(console(), ("a", "b"), [("only one",)])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (12, "12"),
        (1234567, "1,234,567"),
        (1234.56, "1,235"),
        (99.94, "99.9"),
        (0.01234, "0.0123"),
        (None, "-"),
    ],
)
def test_numbers_keep_three_digits(value: float | None, text: str) -> None:
    assert format_number(value) == text
