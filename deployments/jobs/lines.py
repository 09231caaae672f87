"""The lines of OpenAI's batch files: what one asks, and how one is answered.

    {"custom_id": "a-1", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
    {"id": "batch_req_…", "custom_id": "a-1", "response": {"status_code": 200, "request_id": "…", "body": {...}}, "error": null}

Owns: both forms, and the name of an answer, `id`: it follows from the line that is answered and nothing else, so that what
has been answered is known from the answers. Imports nothing of ours. Pure.

Invariants: every line has exactly one name, and two lines of a file never have the same: of lines with one content the
later ones are named by how many stand before them too. Where else a line stands does not matter. A line of an answer is one
line.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import xxhash

URLS = ("/v1/chat/completions", "/v1/completions")
LINE_MAX_BYTES = 32 * 2**20
"""A longer one is answered with an error, unread: no body so large is taken anywhere."""
NAME_BYTES = 16
_NAME = "batch_req_"
_DIGIT = b"?"
_FORM = b'{"id":"' + _NAME.encode() + _DIGIT * (2 * NAME_BYTES) + b'","custom_id":'
FORM_BYTES = len(_FORM)
"""Of the beginning that all answers have alike, but for the digits of their names."""
_MESSAGE_CHARS = 2_000


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the input that is not blank."""

    number: int
    """From 1, as editors count them."""
    text: bytes
    """Without the white space around it; of one that is too long only the beginning."""
    whole: bool
    hashed: bytes
    """NAME_BYTES of the whole of it."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What a line asks for."""

    custom_id: str
    url: str
    body: bytes
    """JSON, as it was given."""


@dataclass(frozen=True, slots=True)
class LineError:
    """Why a line is not sent, or came to nothing. `code` is one of OpenAI's where it has one for it."""

    code: str
    message: str
    custom_id: str | None = None


class _Flags(msgspec.Struct):
    stream: object = None


class _Response(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _Error(msgspec.Struct):
    code: str
    message: str


class _Answer(msgspec.Struct):
    id: str
    custom_id: str | None
    response: _Response | None
    error: _Error | None


class _Status(msgspec.Struct):
    status_code: int


class Answered(msgspec.Struct):
    """What is read again of an answer."""

    id: str
    custom_id: str | None
    response: _Status | None = None

    @property
    def failed(self) -> bool:
        return self.response is None or not is_success(self.response.status_code)

    @property
    def name(self) -> bytes:
        """Raises ValueError where the id is none that this module gives."""
        name = bytes.fromhex(self.id.removeprefix(_NAME))
        if len(name) != NAME_BYTES or not self.id.startswith(_NAME):
            raise ValueError(f"{self.id!r} is no id of an answer")
        return name


_UNREADABLE = msgspec.MsgspecError, UnicodeDecodeError, RecursionError
_members = msgspec.json.Decoder(dict[str, msgspec.Raw])
_string = msgspec.json.Decoder(str)
_flags = msgspec.json.Decoder(_Flags)
_encode = msgspec.json.Encoder().encode
read_answer = msgspec.json.Decoder(Answered).decode
"""Of a line of an output. Raises msgspec.MsgspecError where it is none."""


def is_success(status: int) -> bool:
    return 200 <= status < 300


def lines_of(path: Path) -> Iterator[Line]:
    """Those that are not blank, one after another; never more of the file in memory than one line."""
    with path.open("rb") as file:
        number = 0
        while piece := file.readline(LINE_MAX_BYTES + 1):
            number += 1
            if number == 1:
                piece = piece.removeprefix(codecs.BOM_UTF8)  # editors put it there, and JSON has none
            text = piece.strip()
            whole = len(piece) <= LINE_MAX_BYTES or piece.endswith(b"\n")
            if whole and not text:
                continue
            hashed = xxhash.xxh3_128(text if whole else piece)
            if not whole:
                while (more := file.readline(2**20)) and not more.endswith(b"\n"):
                    hashed.update(more)
                hashed.update(more)
                text = text[:100]
            yield Line(number, text, whole, hashed.digest())


def custom_id_of(line: Line) -> str | None:
    """None where it has none that could name it."""
    if not line.whole:
        return None
    try:
        members = _members.decode(line.text)
        return _string.decode(members["custom_id"]) or None
    except (*_UNREADABLE, KeyError):
        return None


def name_of(hashed: bytes, before: int) -> bytes:
    """Of a line that has `before` lines of the same content before it."""
    return xxhash.xxh3_128(hashed + before.to_bytes(8, "big")).digest() if before else hashed


def parse(line: Line, *, again: bool) -> Ask | LineError:
    """What the line asks, or why it is not sent. `again`: another line has its custom_id."""
    if not line.whole:
        return LineError("line_too_large", f"Line {line.number} is longer than {LINE_MAX_BYTES} bytes.")
    try:
        members = _members.decode(line.text)
    except _UNREADABLE as error:
        return LineError("invalid_json_line", f"Line {line.number} is no JSON object: {error}.")
    custom_id = custom_id_of(line)
    if custom_id is None:
        message = f"Line {line.number} has no custom_id, a string of one character at least."
        return LineError("missing_required_parameter", message)
    if again:
        message = f"Line {line.number}: another line has the custom_id {custom_id!r} already."
        return LineError("duplicate_custom_id", message, custom_id)
    method, url, body = (members.get(name, msgspec.Raw(b"null")) for name in ("method", "url", "body"))
    if bytes(method) != b'"POST"':
        return LineError("invalid_method", f"Line {line.number}: method must be POST.", custom_id)
    path = _text(url)
    if path not in URLS:
        message = f"Line {line.number}: url must be one of {', '.join(URLS)}."
        return LineError("invalid_url", message, custom_id)
    try:
        flags = _flags.decode(body)
    except _UNREADABLE:
        message = f"Line {line.number}: body must be the JSON object of a request."
        return LineError("missing_required_parameter", message, custom_id)
    if flags.stream is not None and flags.stream is not False:
        message = f"Line {line.number}: an answer in a batch is never a stream; leave out body.stream."
        return LineError("invalid_request", message, custom_id)
    return Ask(custom_id, path, bytes(body))


def _text(raw: msgspec.Raw) -> str | None:
    try:
        return _string.decode(raw)
    except _UNREADABLE:
        return None


def answer_line(name: bytes, custom_id: str, status: int, request_id: str, content: bytes) -> bytes:
    """The line of a response, of any status. What came without JSON is a string in it."""
    response = _Response(status, request_id, msgspec.Raw(_one_line(content)))
    return _encode(_Answer(id_of(name), custom_id, response, None)) + b"\n"


def error_line(name: bytes, error: LineError) -> bytes:
    """The line of one that has no response."""
    told = _Error(error.code, error.message[:_MESSAGE_CHARS])
    return _encode(_Answer(id_of(name), error.custom_id, None, told)) + b"\n"


def id_of(name: bytes) -> str:
    return _NAME + name.hex()


def may_begin_answer(content: bytes) -> bool:
    """Whether an answer that was cut off anywhere may begin like that. Of what is longer than FORM_BYTES only those count."""
    return all(
        had == wanted or (wanted == _DIGIT[0] and had in b"0123456789abcdef")
        for had, wanted in zip(content, _FORM, strict=False)
    )


def is_object(content: bytes) -> bool:
    """Whether it is a JSON object, whole."""
    try:
        content.decode()
        _members.decode(content)
    except _UNREADABLE:
        return False
    return True


def _one_line(content: bytes) -> bytes:
    try:
        content.decode()
        value = msgspec.json.decode(content, type=msgspec.Raw)
        if b"\n" not in content and b"\r" not in content:
            return bytes(value)
        return _encode(msgspec.json.decode(content))
    except _UNREADABLE:
        return _encode(content[:_MESSAGE_CHARS].decode(errors="replace"))
