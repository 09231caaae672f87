"""Text to token ids, once per request.

Owns: the tokenizer of one model and the rule for begin-of-text markers. Imports `tokenizers` and the codec. Invariant: a chat's
text carries its markers already and gets none added; a raw prompt gets what the tokenizer's own post-processor adds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from cluster.engine.text import TextCodec


class PromptTokenizer:
    """Encodes prompts. Safe to use from several threads."""

    def __init__(self, path: Path) -> None:
        """Read a tokenizer.json."""
        self._tokenizer = Tokenizer.from_file(str(path))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.codec = TextCodec(self._tokenizer)
        """The way back."""

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Token ids of `text`.

        A batch of one, since only batches are encoded without the interpreter lock: a long prompt in a thread would
        otherwise stop the event loop all the same.
        """
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return tuple(encoding.ids)

    def token_strs(self, token_ids: Iterable[int]) -> list[str]:
        """Each token as the vocabulary writes it; empty for an id that it does not have."""
        return [self._tokenizer.id_to_token(token_id) or "" for token_id in token_ids]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`, special tokens as they are written."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)
