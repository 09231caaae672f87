"""Token ids of texts whose words have been seen before, put together from those of the words.

Owns: which tokenizers allow that, where a text may be cut, and the words that are kept. Imports `tokenizers`. Invariants:
the ids are those of the whole text, or there are none; what is kept is bounded, whatever texts come.

A tokenizer that takes texts apart by one of the patterns below begins a piece with a space between two characters that
are none: no pattern has a space anywhere but at a piece's beginning, or among nothing but white space. So a text may be
cut there, and its ids are those of its parts. Only ASCII is cut, where it is plain what white space is. (How fast a word
is read tells whether it was used lately, by whomever, as it does with the library's own memory of words.)
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer, models

TEXT_CHARS = 4096
"""Longer texts are read whole, in C and without the interpreter lock."""
WORDS_KEPT = 16_384
WORD_CHARS = 48
"""Longest word that is kept; all may hold some 5 MB."""
_NEW_WORDS = 8
"""Learnt of one text at most: each takes as long as four words of a text that is read whole."""
_PATTERNS = frozenset(
    {
        # Llama 3
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        # Qwen 2 and 3
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    }
)
"""Beside GPT-2's, which SmolLM has too, and which has no field of its own."""

Encode = Callable[[str], list[int]]


class Words:
    """Of one tokenizer for which `cuts_at_spaces` holds. Safe to use from several threads."""

    def __init__(self, encode: Encode) -> None:
        """`encode` reads a whole text, and adds nothing to it."""
        self._encode = encode
        self._first: dict[str, list[int]] = {}
        self._inner: dict[str, list[int]] = {}
        """Ids of a space and the word, for words that neither begin nor end with white space."""
        self._last: dict[str, list[int]] = {}

    def encode(self, text: str) -> tuple[int, ...]:
        """Its token ids."""
        if len(text) > TEXT_CHARS or not text.isascii():
            return tuple(self._encode(text))
        words = text.split(" ")
        if len(words) < 3 or not (_ends_well(words[0]) and _begins_well(words[-1])):
            return tuple(self._encode(text))
        inner, last = self._inner, words.pop()
        ids = self._of(self._first, words[0], words[0]).copy()
        try:
            for word in words[1:]:
                ids += inner[word]
        except KeyError:
            if not self._learn(words[1:]):
                return tuple(self._encode(f"{' '.join(words)} {last}"))
            ids = self._of(self._first, words[0], words[0]).copy()
            for word in words[1:]:
                ids += inner.get(word) or self._encode(" " + word)
        ids += self._of(self._last, last, " " + last)
        return tuple(ids)

    def _learn(self, words: list[str]) -> bool:
        """Whether their ids may be put together, and that is less work than to read all of them; learns some."""
        new = {word for word in words if word not in self._inner}
        if not all(_begins_well(word) and _ends_well(word) for word in new):
            return False
        for word in list(new)[:_NEW_WORDS]:
            self._of(self._inner, word, " " + word)
        return len(new) <= _NEW_WORDS

    def _of(self, kept: dict[str, list[int]], word: str, text: str) -> list[int]:
        ids = kept.get(word)
        if ids is None:
            ids = self._encode(text)
            if len(word) <= WORD_CHARS:
                if len(kept) >= WORDS_KEPT:
                    kept.clear()
                kept[word] = ids
        return ids


def _begins_well(word: str) -> bool:
    return word[:1] > " "


def _ends_well(word: str) -> bool:
    return word[-1:] > " "


def cuts_at_spaces(tokenizer: Tokenizer) -> bool:
    """Whether its ids of an ASCII text are those of the parts that begin with a space between two characters that are
    none. False where that is not known."""
    model, normalizer = tokenizer.model, tokenizer.normalizer
    added = tokenizer.get_added_tokens_decoder().values()
    return (
        isinstance(model, models.BPE)
        and model.dropout is None
        and (normalizer is None or _state(normalizer)["type"] in {"NFC", "NFKC"})  # which leave ASCII as it is
        and tokenizer.pre_tokenizer is not None
        and _takes_apart(_state(tokenizer.pre_tokenizer))
        and not any(token.lstrip or token.rstrip or token.single_word or " " in token.content for token in added)
    )


def _takes_apart(state: dict[str, Any]) -> bool:
    *before, last = state["pretokenizers"] if state["type"] == "Sequence" else [state]
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        return False
    splits = [part for part in before if part["type"] == "Split"]
    if not all(part["type"] == "Digits" or _is_known(part) for part in before):
        return False
    return bool(last["use_regex"]) or bool(splits)


def _is_known(split: dict[str, Any]) -> bool:
    return (
        split["type"] == "Split"
        and split["pattern"].get("Regex") in _PATTERNS
        and split["behavior"] == "Isolated"
        and not split["invert"]
    )


def _state(part: Any) -> dict[str, Any]:
    """How a part of a tokenizer describes itself: as its file has it."""
    state: dict[str, Any] = json.loads(part.__getstate__())
    return state
