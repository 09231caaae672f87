"""Text to token ids, once per request.

Owns: the tokenizer of one model and the rule for begin-of-text markers. Imports `tokenizers`, the codec and the words. Invariant: a chat's
text carries its markers already and gets none added; a raw prompt gets what the tokenizer's own post-processor adds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from cluster.engine.text import TextCodec
from router.words import Words, cuts_at_spaces


class PromptTokenizer:
    """Encodes prompts. Safe to use from several threads."""

    def __init__(self, path: Path) -> None:
        """Read a tokenizer.json."""
        self._tokenizer = Tokenizer.from_file(str(path))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.codec = TextCodec(self._tokenizer)
        """The way back."""
        self._adds = self._tokenizer.num_special_tokens_to_add(False) > 0
        self._words = Words(self._plain) if cuts_at_spaces(self._tokenizer) else None

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Token ids of `text`."""
        if add_special_tokens and self._adds:
            return tuple(self._whole(text, add_special_tokens=True))
        return tuple(self._plain(text)) if self._words is None else self._words.encode(text)

    def _plain(self, text: str) -> list[int]:
        return self._whole(text, add_special_tokens=False)

    def _whole(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """A batch of one, since only batches are encoded without the interpreter lock: a long prompt in a thread would
        otherwise stop the event loop all the same."""
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def token_strs(self, token_ids: Iterable[int]) -> list[str]:
        """Each token as the vocabulary writes it; empty for an id that it does not have."""
        return [self._tokenizer.id_to_token(token_id) or "" for token_id in token_ids]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`, special tokens as they are written."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)
