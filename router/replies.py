"""What a client is sent: whole answers, and the chunks of a stream.

Owns: the response side of OpenAI's wire form. Imports types, errors, outcomes, logprobs and the chunk writer's type; no
web framework.
Invariants: per token only the text (and the logprobs of those who asked) is encoded, between a head and a tail that are
made once per choice; each choice has one finish reason, and the prompt is counted once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from cluster.types import FinishReason, Outcome
from router.answers import (
    ChatChoice,
    ChatCompletion,
    ChatMessage,
    Completion,
    Finish,
    PromptTokensDetails,
    TextChoice,
    Usage,
)
from router.asgi import ChunkWriter
from router.errors import ending_error, error_json
from router.logprobs import Alignment, ChatLogprobs, Entry, TextLogprobs, Vocabulary
from router.openai import Api, Prepared
from router.outcomes import Ending
from router.stream import Batch

DONE = b"data: [DONE]\n\n"

_NO_ENTRIES: list[Entry] = []
_encode = msgspec.json.Encoder().encode


class _Choice:
    """What one choice has said and how its chunks begin."""

    __slots__ = ("_alignment", "_echo", "ending", "entries", "head", "plain", "texts")

    def __init__(self, echo: str, alignment: Alignment | None) -> None:
        self.head = b""
        self._echo = echo
        self._alignment = alignment
        self.plain = not echo and alignment is None
        """It says a batch's text and nothing else."""
        self.texts: list[str] = []
        self.entries: list[Entry] = []
        self.ending: Ending | None = None

    def take(self, batch: Batch) -> tuple[str, list[Entry]]:
        """The text that leaves with this batch, and the entries that belong to it; before the first, the echo."""
        self.ending = batch.ending
        text = batch.text
        if self._echo:
            text, self._echo = self._echo + text, ""
        return text, _NO_ENTRIES if self._alignment is None else self._alignment.take(batch)


class _PlainText:
    """Chunks with a piece of text and nothing else, all alike but for that."""

    __slots__ = ("_head", "_tail", "_write_chunk")

    def __init__(self, head: bytes, tail: bytes, write_chunk: ChunkWriter) -> None:
        self._head = head
        self._tail = tail
        self._write_chunk = write_chunk

    def write(self, text: str) -> bool:
        """Whether it has been written; what has no text needs no writing."""
        return not text or self._write_chunk(self._head, _encode(text), self._tail)


class ReplyWriter:
    """Writes the answer to one client's request, whatever its number of choices."""

    def __init__(self, api: Api, prepared: Prepared, vocabulary: Vocabulary) -> None:
        self._api = api
        self._vocabulary = vocabulary
        request = self._request = prepared.request
        self._include_usage = prepared.include_usage
        self._created = int(request.arrived_unix_s)
        self._model = prepared.model
        self._service_tier = prepared.service_tier
        self._choices = [
            _Choice(prepared.echo or "", vocabulary.alignment(request, prepared.echo)) for _ in range(prepared.choices)
        ]
        if prepared.stream:
            self._fix(prepared)

    def _fix(self, prepared: Prepared) -> None:
        """Write once what all chunks of a stream have in common."""
        api, request = self._api, self._request
        kind = "chat.completion.chunk" if api is Api.CHAT else "text_completion"
        fixed = {
            "id": request.request_id,
            "object": kind,
            "created": self._created,
            "model": prepared.model,
            "service_tier": prepared.service_tier,
        }
        self._chunk_head = b"data: " + _encode(fixed)[:-1] + b',"choices":['
        self._chunk_tail = b'],"usage":null}\n\n' if prepared.include_usage else b"]}\n\n"
        self._text_name = b',"delta":{"content":' if api is Api.CHAT else b',"text":'
        self._logprobs_name = b'},"logprobs":' if api is Api.CHAT else b',"logprobs":'
        self._piece_tail = b',"finish_reason":null}' + self._chunk_tail
        self._plain_tail = self._logprobs_name + b"null" + self._piece_tail
        for index, choice in enumerate(self._choices):
            choice.head = self._chunk_head + b'{"index":' + str(index).encode() + self._text_name

    @property
    def scored(self) -> bool:
        """Whether logprobs were asked for."""
        return self._request.sampling.logprobs is not None

    # --- a stream ---

    def first(self) -> bytes:
        """What opens a stream: a chat says for each choice who speaks; a completion says nothing."""
        if self._api is Api.COMPLETION:
            return b""
        role = b',"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
        return b"".join(self._chunk(index, role) for index in range(len(self._choices)))

    def events(self, index: int, batch: Batch) -> bytes:
        """The chunks of one choice's batch: its text, if there is some yet, and at its end why it ended."""
        choice = self._choices[index]
        if choice.plain and batch.ending is None:  # as almost all are
            return choice.head + _encode(batch.text) + self._plain_tail if batch.text else b""
        text, entries = choice.take(batch)
        piece = b""
        if entries:
            logprobs = self._logprobs_name + _encode(self._form(entries))
            piece = choice.head + _encode(text) + logprobs + self._piece_tail
        elif text:
            piece = choice.head + _encode(text) + self._plain_tail
        ending = batch.ending
        if ending is None or ending.outcome is not Outcome.FINISHED:
            return piece
        empty = b',"delta":{}' if self._api is Api.CHAT else b',"text":""'
        reason = b',"logprobs":null,"finish_reason":"' + _finish_reason(ending).encode() + b'"}'
        return piece + self._chunk(index, empty + reason)

    def plain(self, write_chunk: ChunkWriter) -> Callable[[str], bool] | None:
        """What writes a piece of text by `write_chunk`, where that is all that `events` would do: of one choice that says
        no more than its text."""
        if len(self._choices) != 1 or not self._choices[0].plain:
            return None
        return _PlainText(self._choices[0].head, self._plain_tail, write_chunk).write

    def closing(self) -> bytes:
        """What closes a stream of which every choice finished: the usage if it was asked for, and the end mark."""
        if not self._include_usage:
            return DONE
        return self._chunk_head + b'],"usage":' + _encode(self._usage()) + b"}\n\n" + DONE

    def broken(self, ending: Ending) -> bytes:
        """What closes a stream that broke after it began; no end mark follows."""
        return b"data: " + error_json(ending_error(ending)) + b"\n\n"

    def _chunk(self, index: int, rest: bytes) -> bytes:
        return self._chunk_head + b'{"index":' + str(index).encode() + rest + self._chunk_tail

    # --- a whole answer ---

    def gather(self, index: int, batch: Batch) -> None:
        """Keep one choice's batch for the whole answer."""
        choice = self._choices[index]
        text, entries = choice.take(batch)
        choice.texts.append(text)
        choice.entries.extend(entries)

    def whole(self) -> bytes:
        """The JSON body of an answer that is not streamed, of which every choice finished."""
        request_id, tier, usage = self._request.request_id, self._service_tier, self._usage()
        created, model = self._created, self._model
        answer: ChatCompletion | Completion
        if self._api is Api.CHAT:
            chat = tuple(self._chat_choice(index, choice) for index, choice in enumerate(self._choices))
            answer = ChatCompletion(request_id, "chat.completion", created, model, tier, chat, usage)
        else:
            text = tuple(self._text_choice(index, choice) for index, choice in enumerate(self._choices))
            answer = Completion(request_id, "text_completion", created, model, tier, text, usage)
        return _encode(answer)

    def _chat_choice(self, index: int, choice: _Choice) -> ChatChoice:
        message = ChatMessage("assistant", "".join(choice.texts))
        logprobs = self._vocabulary.chat(choice.entries) if self.scored else None
        return ChatChoice(index, message, logprobs, _finish_reason(choice.ending))

    def _text_choice(self, index: int, choice: _Choice) -> TextChoice:
        logprobs = self._vocabulary.completion(choice.entries) if self.scored else None
        return TextChoice(index, "".join(choice.texts), logprobs, _finish_reason(choice.ending))

    # --- both ---

    def _form(self, entries: Sequence[Entry]) -> ChatLogprobs | TextLogprobs:
        return self._vocabulary.chat(entries) if self._api is Api.CHAT else self._vocabulary.completion(entries)

    def _usage(self) -> Usage:
        prompt = len(self._request.prompt_ids)
        completion = sum(c.ending.completion_tokens for c in self._choices if c.ending is not None)
        cached = min((c.ending.cached_tokens for c in self._choices if c.ending is not None), default=0)
        return Usage(prompt, completion, prompt + completion, PromptTokensDetails(cached))


def _finish_reason(ending: Ending | None) -> Finish:
    assert ending is not None
    assert ending.finish in (FinishReason.STOP, FinishReason.LENGTH), ending
    return "stop" if ending.finish is FinishReason.STOP else "length"
