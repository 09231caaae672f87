"""The lines of batch files, against the shapes that OpenAI documents."""

from __future__ import annotations

import codecs
import json
from pathlib import Path
from typing import Any

import pytest

from deployments.jobs import lines as forms
from deployments.jobs.lines import (
    FORM_BYTES,
    Ask,
    Line,
    LineError,
    answer_line,
    error_line,
    lines_of,
    may_begin_answer,
    parse,
    read_answer,
)

# As https://platform.openai.com/docs/guides/batch shows a request and its answer.
REQUEST = {
    "custom_id": "request-1",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"model": "gpt-4o-mini", "messages": [{"role": "user", "content": "Héllo\n"}], "max_tokens": 1000},
}
NAME = bytes(range(16))


def line_of(tmp_path: Path, content: bytes) -> Line:
    path = tmp_path / "in.jsonl"
    path.write_bytes(content)
    (line,) = lines_of(path)
    return line


def test_a_documented_request_is_asked_as_it_was_given(tmp_path: Path) -> None:
    text = json.dumps(REQUEST).encode()
    asked = parse(line_of(tmp_path, text + b"\r\n"), again=False)
    assert asked == Ask("request-1", "/v1/chat/completions", json.dumps(REQUEST["body"]).encode())


def test_an_answer_has_the_documented_members_and_gives_its_name_back() -> None:
    body = {"id": "chatcmpl-1", "usage": {"completion_tokens": 2}}
    line = answer_line(NAME, "request-1", 200, "req-1", json.dumps(body).encode())
    assert line.endswith(b"\n")
    told = json.loads(line)
    assert told == {
        "id": f"batch_req_{NAME.hex()}",
        "custom_id": "request-1",
        "response": {"status_code": 200, "request_id": "req-1", "body": body},
        "error": None,
    }
    again = read_answer(line)
    assert (again.name, again.custom_id, again.failed) == (NAME, "request-1", False)


def test_an_error_has_the_documented_members_and_counts_as_failed() -> None:
    line = error_line(NAME, LineError("batch_expired", "no room", "request-1"))
    assert json.loads(line) == {
        "id": f"batch_req_{NAME.hex()}",
        "custom_id": "request-1",
        "response": None,
        "error": {"code": "batch_expired", "message": "no room"},
    }
    assert read_answer(line).failed
    assert read_answer(answer_line(NAME, "a", 404, "", b"{}")).failed


@pytest.mark.parametrize(
    ("content", "body"),
    [
        (b'{\n "a":\r\n 1 }', {"a": 1}),
        (b"<html>\nbad gateway", "<html>\nbad gateway"),
        (b"", ""),
        (b'{"a": "\xff"}', '{"a": "�"}'),
        (b"[" * 100_000, "[" * 2000),
        ('"ä\u2028"'.encode(), "ä\u2028"),
    ],
)
def test_an_answer_is_one_line_whatever_came(content: bytes, body: Any) -> None:
    line = answer_line(NAME, "a", 502, "", content)
    assert line.count(b"\n") == 1
    assert b"\r" not in line
    assert json.loads(line)["response"]["body"] == body


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"custom_id": None}, "missing_required_parameter"),
        ({"custom_id": 7}, "missing_required_parameter"),
        ({"custom_id": ""}, "missing_required_parameter"),
        ({"method": "GET"}, "invalid_method"),
        ({"method": None}, "invalid_method"),
        ({"url": "/v1/embeddings"}, "invalid_url"),
        ({"url": 1}, "invalid_url"),
        ({"body": None}, "missing_required_parameter"),
        ({"body": [1]}, "missing_required_parameter"),
        ({"body": {"stream": True}}, "invalid_request"),
        ({"body": {"stream": 1}}, "invalid_request"),
        ({"body": {"stream": 0}}, "invalid_request"),
        ({"body": {"stream": "false"}}, "invalid_request"),
    ],
)
def test_what_cannot_be_sent_is_refused_by_what_is_wrong(changes: dict[str, Any], code: str, tmp_path: Path) -> None:
    refused = parse(line_of(tmp_path, json.dumps(REQUEST | changes).encode()), again=False)
    assert isinstance(refused, LineError)
    assert refused.code == code
    assert refused.custom_id == (None if "custom_id" in changes else "request-1")
    assert "ine 1" in refused.message


@pytest.mark.parametrize("text", [b"no", b"[1]", b'{"custom_id": "a"', b'{"a": ' + b"[" * 100_000, b'"\xff"'])
def test_what_is_no_object_is_no_line(text: bytes, tmp_path: Path) -> None:
    refused = parse(line_of(tmp_path, text), again=False)
    assert isinstance(refused, LineError)
    assert refused.code == "invalid_json_line"


def test_the_second_of_a_custom_id_is_refused(tmp_path: Path) -> None:
    refused = parse(line_of(tmp_path, json.dumps(REQUEST).encode()), again=True)
    assert refused == LineError(
        "duplicate_custom_id", "Line 1: another line has the custom_id 'request-1' already.", "request-1"
    )


@pytest.mark.parametrize("stream", [False, None])
def test_what_says_that_it_is_no_stream_is_sent(stream: object, tmp_path: Path) -> None:
    text = json.dumps(REQUEST | {"body": {"stream": stream}}).encode()
    assert isinstance(parse(line_of(tmp_path, text), again=False), Ask)


def test_the_mark_that_editors_put_before_a_file_is_none_of_its_first_line(tmp_path: Path) -> None:
    text = json.dumps(REQUEST).encode()
    marked = line_of(tmp_path, codecs.BOM_UTF8 + text)
    assert isinstance(parse(marked, again=False), Ask)
    assert marked == line_of(tmp_path, text)


def test_every_beginning_of_an_answer_may_be_one_and_nothing_else_may() -> None:
    line = answer_line(NAME, "request-1", 200, "", b"{}")
    assert all(may_begin_answer(line[:cut]) for cut in range(len(line)))
    for place in range(FORM_BYTES):
        assert not may_begin_answer(line[:place] + b"~")


def test_lines_are_counted_as_editors_do_and_blank_ones_are_none(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n  \r\n{a}\n\n {b} ")
    assert [(line.number, line.text) for line in lines_of(path)] == [(3, b"{a}"), (5, b"{b}")]


def test_a_line_that_is_too_long_is_refused_and_the_next_is_read_and_its_whole_content_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forms, "LINE_MAX_BYTES", 100)
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"x" * 100 + b"\n" + b"x" * 300 + b"\n" + b"x" * 299 + b"y\nz")
    exact, long, other, last = lines_of(path)
    assert exact.whole
    assert last.text == b"z"
    assert len({line.hashed for line in (exact, long, other, last)}) == 4
    for line in (long, other):
        refused = parse(line, again=False)
        assert isinstance(refused, LineError)
        assert refused.code == "line_too_large"
