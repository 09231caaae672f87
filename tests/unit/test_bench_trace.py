"""Both trace formats, and what is said of one that cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from ops.bench.trace import TraceFormat, TraceRequest, read_trace
from ops.errors import CommandError

DATA = Path(__file__).parents[1] / "data"
AZURE_HEAD = "arrival_s,service,prompt_tokens,output_tokens\n"


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "trace"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_azure_rows_are_read_in_seconds_and_tokens() -> None:
    trace = read_trace(DATA / "trace_azure.csv")
    assert trace.format is TraceFormat.AZURE
    assert trace.requests == (
        TraceRequest(10.0, "conversation", 320, 48),
        TraceRequest(10.5, "code", 1600, 8),
        TraceRequest(12.0, "conversation", 33, 1),
    )


def test_mooncake_lines_are_read_from_milliseconds_with_their_blocks() -> None:
    trace = read_trace(DATA / "trace_mooncake.jsonl")
    assert trace.format is TraceFormat.MOONCAKE
    assert trace.requests == (
        TraceRequest(0.0, "mooncake", 1100, 64, (7, 8, 9)),
        TraceRequest(0.25, "mooncake", 1500, 32, (7, 8, 10)),
        TraceRequest(1.0, "mooncake", 512, 16, (11,)),
    )


def test_format_is_told_by_content_and_columns_by_name(tmp_path: Path) -> None:
    path = written(tmp_path, "\ufeffoutput_tokens, extra, service, arrival_s, prompt_tokens\n5, x, code, 1.5, 9\n\n")
    assert read_trace(path).requests == (TraceRequest(1.5, "code", 9, 5),)


def test_limit_reads_no_further(tmp_path: Path) -> None:
    path = written(tmp_path, AZURE_HEAD + "0,code,1,1\n1,code,2,2\nbroken\n")
    assert len(read_trace(path, limit=2).requests) == 2
    with pytest.raises(CommandError, match="line 4"):
        read_trace(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (AZURE_HEAD + "0,code,1,1\n0.5,code,many,1\n", "line 3: .*'many'"),
        (AZURE_HEAD + "0,code,1\n", "line 2: 3 cells under 4 columns"),
        (AZURE_HEAD + "2,code,1,1\n1,code,1,1\n", "line 3: arrival 1.0 s is before the one above it, 2.0 s"),
        (AZURE_HEAD + "0,code,0,1\n", "line 2: lengths must be at least 1"),
        (AZURE_HEAD + "nan,code,1,1\n", "line 2: arrival nan is no time"),
        (AZURE_HEAD, "has no requests"),
        ("", "is empty"),
        ("name,age\nx,1\n", "line 1 begins neither a CSV with the columns arrival_s"),
        ('{"timestamp": 0, "input_length": 1}\n', "line 1: .*output_length"),
        ('{"timestamp": 0, "input_length": 1, "output_length": 1}\n{"timest', "line 2: "),
        ('{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}\n', "line 1: 1 hash_ids for 2"),
        (b"\xff\xfe\x00\x01", "is no text file"),
    ],
)
def test_unreadable_trace_is_one_line_that_names_the_place(tmp_path: Path, text: str | bytes, said: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(CommandError, match=said) as caught:
        read_trace(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_missing_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"nowhere\.csv cannot be read: No such file"):
        read_trace(tmp_path / "nowhere.csv")
