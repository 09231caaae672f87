"""What a stream of bytes says, and when an answer is whole."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.bench.stats import Failure
from ops.bench.stream import MAX_EVENT_BYTES, AnswerStream, Event, EventParser, StreamError


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text(piece: str, finish: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "text": piece, "finish_reason": finish}])


DONE = b"data: [DONE]\n\n"

# The examples of the WHATWG specification, section 9.2.6, less ids and retries.
WHATWG = (
    b": test stream\n\ndata: first event\n\ndata:second event\nevent: named\n\ndata:  third event\n\n"
    b"data\n\ndata\ndata\n\ndata: YHOO\r\ndata: +2\r\ndata: 10\r\n\r\ndata: not yet ended"
)
WHATWG_EVENTS = [
    Event("", b"first event"),
    Event("named", b"second event"),
    Event("", b" third event"),
    Event("", b""),
    Event("", b"\n"),
    Event("", b"YHOO\n+2\n10"),
]


@given(cuts=st.lists(st.integers(0, len(WHATWG)), max_size=12))
def test_events_are_the_same_however_the_bytes_are_cut(cuts: list[int]) -> None:
    borders = [0, *sorted(cuts), len(WHATWG)]
    parser = EventParser()
    events = [e for a, b in pairwise(borders) for e in parser.feed(WHATWG[a:b])]
    assert events == WHATWG_EVENTS


def test_endless_line_ends_the_stream_instead_of_filling_memory() -> None:
    stream = AnswerStream()
    stream.feed(b"x" * MAX_EVENT_BYTES, 0.0)
    with pytest.raises(StreamError, match="more than") as caught:
        stream.feed(b"x", 0.0)
    assert caught.value.failure is Failure.MALFORMED


def test_endless_event_of_short_lines_ends_the_stream_too() -> None:
    stream = AnswerStream()
    stream.feed(b"data: x\n" * MAX_EVENT_BYTES, 0.0)
    with pytest.raises(StreamError, match="more than"):
        stream.feed(b"data: x\n", 0.0)


def test_first_token_is_the_first_text_and_the_end_is_the_finish_reason() -> None:
    stream = AnswerStream()
    stream.feed(event(choices=[{"delta": {"role": "assistant", "content": ""}}]), 1.0)
    stream.feed(event(choices=[{"delta": {"content": "He"}}]), 2.0)
    stream.feed(event(choices=[{"delta": {"content": "llo"}}]), 3.0)
    stream.feed(event(choices=[{"delta": {}, "finish_reason": "length"}]), 4.0)
    stream.feed(event(choices=[], usage={"prompt_tokens": 9, "completion_tokens": 3}) + DONE, 5.0)
    stream.close()
    assert (stream.first_s, stream.end_s, stream.texts) == (2.0, 4.0, 2)
    assert stream.usage is not None
    assert (stream.usage.prompt_tokens, stream.usage.completion_tokens) == (9, 3)


def test_event_that_comes_in_two_reads_counts_when_it_is_whole() -> None:
    stream = AnswerStream()
    whole = text("Hi")
    stream.feed(whole[:20], 1.0)
    assert stream.first_s is None
    stream.feed(whole[20:], 2.0)
    assert stream.first_s == 2.0


@pytest.mark.parametrize("said", [b"", text("a"), text("a", "length"), text("a") + DONE])
def test_answer_without_finish_reason_and_done_is_truncated(said: bytes) -> None:
    stream = AnswerStream()
    stream.feed(said, 0.0)
    with pytest.raises(StreamError) as caught:
        stream.close()
    assert caught.value.failure is Failure.TRUNCATED


@pytest.mark.parametrize(
    "said",
    [
        event(error={"message": "replica lost", "type": "server_error", "param": None, "code": "replica_lost"}),
        event(error="replica lost"),
        b"event: error\n" + event(error={"message": "replica lost"}),
    ],
)
def test_error_event_is_an_error_with_its_message(said: bytes) -> None:
    stream = AnswerStream()
    stream.feed(text("a"), 0.0)
    with pytest.raises(StreamError, match="replica lost") as caught:
        stream.feed(said, 1.0)
    assert caught.value.failure is Failure.ERROR_EVENT


@pytest.mark.parametrize("said", [b"data: {oops\n\n", b"data: [1]\n\n", text("a", "abort"), text("a", "error")])
def test_what_is_not_of_the_protocol_is_malformed(said: bytes) -> None:
    with pytest.raises(StreamError) as caught:
        AnswerStream().feed(said, 0.0)
    assert caught.value.failure is Failure.MALFORMED
