"""What a client is sent: whole answers, and the chunks of a stream.

Owns: the response side of OpenAI's wire form. Imports types, errors and outcomes; no web framework. Invariant: per
token only the text is encoded, between a head and a tail that are made once per request.
"""

from __future__ import annotations

import msgspec

from cluster.types import FinishReason
from router.errors import ErrorBody, error_json
from router.openai import Api
from router.outcomes import Ending

DONE = b"data: [DONE]\n\n"


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class _ChatMessage(msgspec.Struct, frozen=True):
    role: str
    content: str
    refusal: None = None


class _ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: _ChatMessage
    logprobs: None
    finish_reason: str


class _TextChoice(msgspec.Struct, frozen=True):
    index: int
    text: str
    logprobs: None
    finish_reason: str


class _Whole(msgspec.Struct, frozen=True):
    id: str
    object: str
    created: int
    model: str
    service_tier: str
    choices: tuple[_ChatChoice | _TextChoice, ...] | tuple[()]
    usage: Usage


class ReplyWriter:
    """Writes the answer to one request."""

    def __init__(
        self, api: Api, reply_id: str, *, created: int, model: str, service_tier: str, include_usage: bool
    ) -> None:
        """`created` is in seconds since 1970; `include_usage` adds a chunk with the usage to a stream."""
        self._api = api
        self._id = reply_id
        self._created = created
        self._model = model
        self._service_tier = service_tier
        self._include_usage = include_usage
        kind = "chat.completion.chunk" if api is Api.CHAT else "text_completion"
        fixed = {"id": reply_id, "object": kind, "created": created, "model": model, "service_tier": service_tier}
        self._chunk_head = b"data: " + msgspec.json.encode(fixed)[:-1]
        self._chunk_tail = b',"usage":null}\n\n' if include_usage else b"}\n\n"
        piece = b'{"index":0,"delta":{"content":' if api is Api.CHAT else b'{"index":0,"text":'
        piece_end = (
            b'},"logprobs":null,"finish_reason":null}' if api is Api.CHAT else b',"logprobs":null,"finish_reason":null}'
        )
        self._piece_head = self._chunk_head + b',"choices":[' + piece
        self._piece_tail = piece_end + b"]" + self._chunk_tail
        self._encode = msgspec.json.Encoder().encode

    # --- a stream ---

    def first(self) -> bytes:
        """What opens a stream: a chat says who speaks; a completion says nothing."""
        if self._api is Api.COMPLETION:
            return b""
        role = b'{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
        return self._chunk(role)

    def piece(self, text: str) -> bytes:
        """A chunk with `text`; none where there is no text yet."""
        return self._piece_head + self._encode(text) + self._piece_tail if text else b""

    def last(self, ending: Ending) -> bytes:
        """What closes a stream that finished: the reason, the usage if it was asked for, and the end mark."""
        finish = _finish_reason(ending).encode()
        empty = b'"delta":{}' if self._api is Api.CHAT else b'"text":""'
        closing = self._chunk(b'{"index":0,' + empty + b',"logprobs":null,"finish_reason":"' + finish + b'"}')
        if self._include_usage:
            usage = self._encode(_usage(ending))
            closing += self._chunk_head + b',"choices":[],"usage":' + usage + b"}\n\n"
        return closing + DONE

    def broken(self, ending: Ending) -> bytes:
        """What closes a stream that broke after it began; no end mark follows."""
        return b"data: " + error_json(ending_error(ending)) + b"\n\n"

    def _chunk(self, choice: bytes) -> bytes:
        return self._chunk_head + b',"choices":[' + choice + b"]" + self._chunk_tail

    # --- a whole answer ---

    def whole(self, text: str, ending: Ending) -> bytes:
        """The JSON body of an answer that is not streamed."""
        finish = _finish_reason(ending)
        choice: _ChatChoice | _TextChoice
        if self._api is Api.CHAT:
            kind, choice = "chat.completion", _ChatChoice(0, _ChatMessage("assistant", text), None, finish)
        else:
            kind, choice = "text_completion", _TextChoice(0, text, None, finish)
        return self._encode(
            _Whole(self._id, kind, self._created, self._model, self._service_tier, (choice,), _usage(ending))
        )


def ending_error(ending: Ending) -> ErrorBody:
    """The error that an ending without success is to a client."""
    return ErrorBody(ending.message, ending.meaning.error_type, None, ending.meaning.code)


def _finish_reason(ending: Ending) -> str:
    assert ending.finish in (FinishReason.STOP, FinishReason.LENGTH), ending
    return ending.finish.value


def _usage(ending: Ending) -> Usage:
    return Usage(ending.prompt_tokens, ending.completion_tokens, ending.prompt_tokens + ending.completion_tokens)
