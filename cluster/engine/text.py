"""From token ids to text, one token at a time.

Owns: incremental detokenising and stop strings, the same for every engine, and what a single token reads as. Imports
`tokenizers`. Invariants: the joined pieces of a sequence are what decoding all its tokens at once gives, special tokens
skipped, cut before the first stop string that counts; no character of that stop string and no half of a character ever
leaves; the pieces depend on the tokens only, so that replaying emitted tokens restores the exact state.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Container, Iterable
from functools import cached_property
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer, decoders

REPLACEMENT = "\ufffd"
_HELD_TOKENS_MAX = 8
"""A character has at most 4 bytes, hence at most 4 tokens; beyond this the held ones will not become one any more."""


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""How vocabularies with byte fallback write a token that is one byte."""


class Detokenizer(Protocol):
    @property
    def holding(self) -> bool:
        """Whether the last tokens are held until the character that they begin is whole."""
        ...

    def push(self, token_id: int) -> str:
        """The text that became certain with this token."""
        ...

    def finish(self) -> str:
        """Certain text that is still held. Bytes of an incomplete character are dropped."""
        ...


class TextCodec:
    """A tokenizer's way back to text, shared by all sequences.

    Byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM) is decoded from each token's bytes: exact for every sequence of
    tokens, invalid bytes included. Any other decoder (sentencepiece with byte fallback, WordPiece) is asked for the
    text of a window of tokens; that is exact wherever the text is valid and has no U+FFFD of its own; elsewhere the
    number of replacement characters may differ from decoding everything at once.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._token_bytes = _token_bytes(tokenizer) if isinstance(tokenizer.decoder, decoders.ByteLevel) else None
        added = tokenizer.get_added_tokens_decoder()
        self._skipped = {token_id: token.content for token_id, token in added.items() if token.special}
        """Special tokens, as they are written."""

    @classmethod
    def from_file(cls, tokenizer_json: Path) -> TextCodec:
        return cls(Tokenizer.from_file(str(tokenizer_json)))

    def detokenizer(self) -> Detokenizer:
        if self._token_bytes is not None:
            return _ByteDetokenizer(self._token_bytes)
        return _WindowDetokenizer(self._tokenizer, self._skipped)

    def stage(self, stop: tuple[str, ...] = (), min_tokens: int = 0) -> TextStage:
        """The text of one sequence; a stop string counts only where a token of index >= `min_tokens` completes it."""
        return TextStage(self.detokenizer(), stop, min_tokens)

    def text(self, token_ids: Iterable[int]) -> str:
        """What `token_ids` read as in all; a character of which only the first bytes came is dropped."""
        detokenizer = self.detokenizer()
        pieces = [detokenizer.push(token_id) for token_id in token_ids]
        return "".join(pieces) + detokenizer.finish()

    def token_bytes(self, token_id: int) -> bytes | None:
        """What one token adds in the midst of a text, which need not be whole characters; a special token as it is
        written. None for an id that the tokenizer does not have."""
        token = self._tokenizer.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            return None
        if written := self.special(token_id):
            return written.encode()
        if self._token_bytes is not None:
            return self._token_bytes[token_id]
        if byte := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(byte[1], 16)])
        before = self._tokenizer.decode([self._letter])
        both = self._tokenizer.decode([self._letter, token_id])
        return both.removeprefix(before).encode()

    def special(self, token_id: int) -> str:
        """How a special token is written where a prompt names it; no text that is generated has it. Empty for others."""
        return self._skipped.get(token_id, "")

    @cached_property
    def _letter(self) -> int:
        """A token that reads as a plain letter: decoders that strip the beginning of a text strip nothing after it."""
        vocab = self._tokenizer.get_vocab(with_added_tokens=False)
        plain = (i for token, i in vocab.items() if token.isascii() and token.isalpha())
        return min(plain, default=min(vocab.values()))


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-in of each byte in byte-level vocabularies: bytes that print stand for themselves, the others
    for the characters from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(b): b for b in printable}
    others = (b for b in range(256) if chr(b) not in alphabet)
    return {**alphabet, **{chr(0x100 + n): b for n, b in enumerate(others)}}


def _token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """Bytes of each token id; empty for special tokens and for ids that the tokenizer does not have."""
    alphabet = _byte_alphabet()
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocab.values(), default=-1) + 1)
    for token, token_id in vocab.items():
        try:
            table[token_id] = bytes([alphabet[c] for c in token])
        except KeyError:  # an added token, written as it reads
            table[token_id] = token.encode()
    for token_id, added in tokenizer.get_added_tokens_decoder().items():
        if added.special:
            table[token_id] = b""
    return table


class _ByteDetokenizer:
    __slots__ = ("_decode", "_decoder", "_token_bytes")

    def __init__(self, token_bytes: list[bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decode = self._decoder.decode

    @property
    def holding(self) -> bool:
        return bool(self._decoder.getstate()[0])

    def push(self, token_id: int) -> str:
        if not 0 <= token_id < len(self._token_bytes):
            return ""  # a row of the model's padded vocabulary
        text = self._decode(self._token_bytes[token_id])
        held = self._decoder.getstate()[0]
        if held[:1] == b"\xed" and held[1:] >= b"\xa0":
            # Half a surrogate. No character begins so, but Python's decoder waits for a third byte before it says so.
            self._decoder.reset()
            text += 2 * REPLACEMENT
        return text

    def finish(self) -> str:
        return ""


class _WindowDetokenizer:
    """Decodes (context + pending) tokens and gives out what pending ones add to the context's text.

    The context, the tokens given out last, makes decoders treat the pending ones as the middle of a text (they strip a
    space at the start). Text that ends in U+FFFD is held: it is probably the first bytes of a character.
    """

    __slots__ = ("_context", "_context_text", "_pending", "_skipped", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, skipped: Container[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []

    @property
    def holding(self) -> bool:
        return bool(self._pending)

    def push(self, token_id: int) -> str:
        if token_id in self._skipped or self._tokenizer.id_to_token(token_id) is None:
            return ""  # a special token, or a row of the model's padded vocabulary
        self._pending.append(token_id)
        text = self._tokenizer.decode(self._context + self._pending)
        if (text.endswith(REPLACEMENT) or len(text) <= len(self._context_text)) and (
            len(self._pending) < _HELD_TOKENS_MAX
        ):
            return ""
        piece = text[len(self._context_text) :]
        self._context = self._pending
        self._context_text = self._tokenizer.decode(self._context)
        self._pending = []
        return piece

    def finish(self) -> str:
        text = self._tokenizer.decode(self._context + self._pending).rstrip(REPLACEMENT)
        self._pending = []
        return text[len(self._context_text) :]


class TextStage:
    """The text of one sequence: `push` each token, then `finish`, unless a stop string ended it (`stopped`).

    The first stop string is the one that completes first, and of several that complete with the same character the
    longest; the text ends before it. So defined, it does not depend on how the text is cut into tokens, but for
    `min_tokens`: what the first so many tokens complete is text like any other.
    """

    __slots__ = ("_detokenizer", "_held", "_longest", "_min_tokens", "_stop", "_tokens", "stopped")

    def __init__(self, detokenizer: Detokenizer, stop: tuple[str, ...] = (), min_tokens: int = 0) -> None:
        self._detokenizer = detokenizer
        self._stop = tuple(s for s in stop if s)
        self._longest = max(map(len, self._stop), default=0)
        self._min_tokens = min_tokens
        self._tokens = 0
        self._held = ""
        self.stopped = False

    def push(self, token_id: int) -> str:
        """The text that became certain with this token; it may be empty. After `stopped` there is no more to push."""
        assert not self.stopped
        self._tokens += 1
        return self._pass(self._detokenizer.push(token_id))

    def finish(self) -> str:
        """The text still held back, when the sequence ends without a stop string.

        A character of which only the first bytes came is dropped. What the end itself makes certain belongs to the
        last token.
        """
        rest = self._pass(self._detokenizer.finish())
        if not self.stopped:
            rest += self._held
            self._held = ""
        return rest

    def _pass(self, new: str) -> str:
        if not self._stop:
            return new
        if not new:
            return ""
        seen = len(self._held)
        text = self._held + new
        if self._tokens > self._min_tokens:
            # Whatever ends within what was held has been judged before, and either way it is no end of this text.
            found = ((s, text.find(s, max(0, seen - len(s) + 1))) for s in self._stop)
            ends = [(start + len(s), start) for s, start in found if start >= 0]
            if ends:
                self.stopped = True
                self._held = ""
                return text[: min(ends)[1]]
        keep = self._held_chars(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _held_chars(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for keep in range(min(self._longest - 1, len(text)), 0, -1):
            if any(s.startswith(text[len(text) - keep :]) for s in self._stop):
                return keep
        return 0
