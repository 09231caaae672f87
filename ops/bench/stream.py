"""A streamed answer, from bytes to what they say and when.

Owns: the part of the WHATWG event-stream format that answers use (event and data fields, comments; no ids, no
reconnection), the chunks of OpenAI's two APIs as far as they matter here, and when an answer is whole. Pure: the time
of each event is an argument. Imports the statistics' `Failure`.

Invariant: events come out the same however the bytes were cut; an answer is whole only with a finish reason and [DONE].
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from ops.bench.stats import Failure

MAX_EVENT_BYTES = 2**20


class Event(NamedTuple):
    name: str
    data: bytes


class EventTooLongError(ValueError):
    """An event larger than `MAX_EVENT_BYTES`; this is no stream of tokens."""


class EventParser:
    """Feed it bytes as they come. Lines end with LF or CRLF."""

    def __init__(self) -> None:
        self._rest = b""
        self._name = ""
        self._data: list[bytes] = []
        self._data_bytes = 0

    def feed(self, chunk: bytes) -> list[Event]:
        """The events that these bytes complete.

        Raises:
            EventTooLongError: an event is larger than `MAX_EVENT_BYTES`.
        """
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        events: list[Event] = []
        for raw in lines:
            line = raw.removesuffix(b"\r")
            if line:
                self._field(line)
            else:
                if self._data:
                    events.append(Event(self._name, b"\n".join(self._data)))
                self._name, self._data, self._data_bytes = "", [], 0
        if len(self._rest) + self._data_bytes > MAX_EVENT_BYTES:
            raise EventTooLongError(f"an event of more than {MAX_EVENT_BYTES} bytes")
        return events

    def _field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
            self._data_bytes += len(value)
        elif name == b"event":
            self._name = value.decode(errors="replace")


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class ErrorBody(msgspec.Struct):
    message: str = ""


class Chunk(msgspec.Struct):
    """What matters of a chunk of either API, of a whole answer, and of an error."""

    choices: list[_Choice] = []
    usage: Usage | None = None
    error: ErrorBody | str | None = None


decode_chunk = msgspec.json.Decoder(Chunk).decode
"""Raises msgspec.MsgspecError for what is none."""


def error_message(error: ErrorBody | str | None) -> str:
    return error.message if isinstance(error, ErrorBody) else error or ""


WHOLE = frozenset({"stop", "length"})
"""Finish reasons of an answer that is whole; tool calls and filters are not asked for here."""


class StreamError(Exception):
    """A stream that went wrong, and how."""

    def __init__(self, failure: Failure, detail: str = "") -> None:
        super().__init__(detail)
        self.failure = failure


@dataclass(slots=True)
class AnswerStream:
    """What one stream has said so far. Times are on the caller's clock."""

    first_s: float | None = None
    """The first event with text."""
    end_s: float | None = None
    """The event with the finish reason."""
    texts: int = 0
    """Events with text."""
    usage: Usage | None = None
    done: bool = False
    _parser: EventParser = field(default_factory=EventParser)

    def feed(self, data: bytes, now_s: float) -> None:
        """Take bytes that came at `now_s`.

        Raises:
            StreamError: they carry an error, or are not of the protocol.
        """
        try:
            events = self._parser.feed(data)
        except EventTooLongError as error:
            raise StreamError(Failure.MALFORMED, str(error)) from error
        for event in events:
            self._take(event, now_s)

    def close(self) -> None:
        """The stream has ended.

        Raises:
            StreamError: too early.
        """
        if self.end_s is None:
            raise StreamError(Failure.TRUNCATED, "the stream ended without a finish reason")
        if not self.done:
            raise StreamError(Failure.TRUNCATED, "the stream ended without [DONE]")

    def _take(self, event: Event, now_s: float) -> None:
        if event.data == b"[DONE]":
            self.done = True
            return
        try:
            chunk = decode_chunk(event.data)
        except msgspec.MsgspecError as error:
            raise StreamError(Failure.MALFORMED, f"an event that cannot be read: {error}") from error
        if chunk.error is not None or event.name == "error":
            raise StreamError(Failure.ERROR_EVENT, error_message(chunk.error))
        self.usage = chunk.usage or self.usage
        for choice in chunk.choices:
            if choice.text or (choice.delta is not None and choice.delta.content):
                self.texts += 1
                self.first_s = now_s if self.first_s is None else self.first_s
            if choice.finish_reason is not None:
                if choice.finish_reason not in WHOLE:
                    raise StreamError(Failure.MALFORMED, f"finish_reason {choice.finish_reason!r}")
                self.end_s = now_s
