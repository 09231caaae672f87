"""Which token said what, and how likely it was.

Owns: the alignment of tokens with the text that has left, and OpenAI's two wire forms of logprobs. Imports types, the
text codec and the stream's values; no web framework. Invariants: entries leave in the order of their tokens, each with
the last character of its token's text and never before; what a stop string cuts off, even in part, and the end token
have none.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import msgspec

from cluster.engine.text import TextCodec
from cluster.types import FinishReason, Outcome, Request, TokenLogprob
from router.stream import Batch

LEAST_LOGPROB = -9999.0
"""What OpenAI says of a token that is all but impossible; JSON has no infinity."""


class Entry(NamedTuple):
    """One token of a choice's text."""

    token_id: int
    offset: int
    """Characters of the choice's text that were certain before it: where its own begin, or the one that it goes on
    with."""
    score: TokenLogprob | None
    """None for the first token of a prompt, which nothing precedes."""


class Word(NamedTuple):
    """What a token reads as."""

    token: str
    """Its text. Where its bytes are no whole characters: `bytes:` and each byte as `\\xNN`; where the tokenizer does not
    have it: `token_id:` and its number. So different tokens differ."""
    bytes: tuple[int, ...] | None


class Alignment:
    """Finds for one choice which entries belong to the text that has left.

    The text that a replica sends is what the same detokenizer makes of the same tokens, but for what it holds back or
    cuts off; so the tokens are detokenized again here, and each entry waits for its characters.
    """

    def __init__(self, codec: TextCodec, end_ids: Collection[int], prompt_ids: Sequence[int], echo: str) -> None:
        """`prompt_ids` and `echo` are the prompt's, where it is a part of the text, and else empty."""
        self._codec = codec
        self._end_ids = end_ids
        self._prompt_ids = prompt_ids
        self._echo = echo
        self._detokenizer = codec.detokenizer()
        self._known_chars = 0
        """Of the output: what its tokens have made certain."""
        self._left_chars = 0
        """Of the output: what has left."""
        self._waiting: deque[tuple[int, Entry]] = deque()
        """(characters of the output that must have left first, entry)."""

    def take(self, batch: Batch) -> list[Entry]:
        """What leaves with this batch's text."""
        ending = batch.ending
        finished = ending is not None and ending.outcome is Outcome.FINISHED
        entries: list[Entry] = []
        prompt = tuple(chain.from_iterable(scores.prompt_logprobs for scores in batch.scores))
        # Of a prompt that an engine failed on nothing has come.
        if self._prompt_ids and (finished or (batch.scores and len(prompt) == len(self._prompt_ids) - 1)):
            entries = self._prompt(prompt)
            self._prompt_ids = ()
        scored = [pair for s in batch.scores for pair in zip(s.token_ids, s.logprobs, strict=True)]
        if ending is not None and ending.finish is FinishReason.STOP and scored and scored[-1][0] in self._end_ids:
            del scored[-1]
        for token_id, score in scored:
            self._push(token_id, score)
        self._left_chars += len(batch.text)
        reach: float = self._left_chars
        if finished:
            self._known_chars += len(self._detokenizer.finish())
            if self._known_chars == self._left_chars:  # nothing is cut off, though half a character may be left over
                reach = math.inf
        while self._waiting and self._waiting[0][0] <= reach:
            entries.append(self._waiting.popleft()[1])
        return entries

    def _push(self, token_id: int, score: TokenLogprob) -> None:
        entry = Entry(token_id, len(self._echo) + self._known_chars, score)
        self._known_chars += len(self._detokenizer.push(token_id))
        # Where it ends in half a character, it waits for the whole of it.
        self._waiting.append((self._known_chars + self._detokenizer.holding, entry))

    def _prompt(self, logprobs: Iterable[TokenLogprob]) -> list[Entry]:
        """The prompt's entries. A special token takes up as much of the text as is written of it there. Where other
        tokens do not read as the text that they were given as (a tokenizer may normalise), offsets are those of the
        tokens, within the text."""
        detokenizer, chars = self._codec.detokenizer(), 0
        entries = []
        for token_id, score in zip(self._prompt_ids, chain((None,), logprobs), strict=True):
            entries.append(Entry(token_id, min(chars, len(self._echo)), score))
            written = self._codec.special(token_id)
            if written and self._echo.startswith(written, chars):
                chars += len(written)
            else:
                chars += len(detokenizer.push(token_id))
        return entries


# --- the wire ---


class ChatTop(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: tuple[int, ...] | None


class ChatEntry(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: tuple[int, ...] | None
    top_logprobs: tuple[ChatTop, ...]


class ChatLogprobs(msgspec.Struct):
    """Of a chat's choice, or of a part of one."""

    content: list[ChatEntry]
    refusal: None = None


class TextLogprobs(msgspec.Struct):
    """Of a completion's choice, or of a part of one; one item per token in each list.

    `text_offset` counts characters of the choice's `text`. `top_logprobs` has the token itself too.
    """

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class Vocabulary:
    """What the tokens of one model read as, and the wire forms that say so."""

    def __init__(self, codec: TextCodec, end_ids: Collection[int]) -> None:
        self._codec = codec
        self._end_ids = frozenset(end_ids)
        self._words: dict[int, Word] = {}
        """By token id, so it is never larger than the vocabulary."""

    def alignment(self, request: Request, echo: str | None) -> Alignment | None:
        """For one choice; None where no logprobs were asked for. `echo` is the prompt's text where the answer begins
        with it."""
        if request.sampling.logprobs is None:
            return None
        end_ids = frozenset[int]() if request.sampling.ignore_eos else self._end_ids
        return Alignment(self._codec, end_ids, () if echo is None else request.prompt_ids, echo or "")

    def word(self, token_id: int) -> Word:
        word = self._words.get(token_id)
        if word is None:
            word = self._words[token_id] = _word(token_id, self._codec.token_bytes(token_id))
        return word

    def chat(self, entries: Iterable[Entry]) -> ChatLogprobs:
        content = []
        for entry in entries:
            assert entry.score is not None, "a chat echoes no prompt"
            top = tuple(ChatTop(t, _finite(p), raw) for (t, raw), p in self._top(entry.score))
            word = self.word(entry.token_id)
            content.append(ChatEntry(word.token, _finite(entry.score.logprob), word.bytes, top))
        return ChatLogprobs(content)

    def completion(self, entries: Iterable[Entry]) -> TextLogprobs:
        form = TextLogprobs([], [], [], [])
        for token_id, offset, score in entries:
            token = self.word(token_id).token
            form.text_offset.append(offset)
            form.tokens.append(token)
            if score is None:
                form.token_logprobs.append(None)
                form.top_logprobs.append(None)
                continue
            top: dict[str, float] = {}
            for word, logprob in self._top(score):
                top.setdefault(word.token, _finite(logprob))
            top.setdefault(token, _finite(score.logprob))
            form.token_logprobs.append(_finite(score.logprob))
            form.top_logprobs.append(top)
        return form

    def _top(self, score: TokenLogprob) -> Iterable[tuple[Word, float]]:
        return ((self.word(token_id), logprob) for token_id, logprob in score.top)


def _word(token_id: int, raw: bytes | None) -> Word:
    if raw is None:
        return Word(f"token_id:{token_id}", None)
    try:
        return Word(raw.decode(), tuple(raw))
    except UnicodeDecodeError:
        return Word("bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), tuple(raw))


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
