"""Ids put together from words are those of the whole text, and what is kept of words has an end."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from router import words
from router.words import Words, cuts_at_spaces

LLAMA_3, QWEN_2 = sorted(words._PATTERNS, key=lambda pattern: r"{1,3}" not in pattern)
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|eot|>"]
CORPUS = [
    "the quick brown fox doesn't jump over 12 or 345 lazy dogs, it's said.",
    "if x == 10:\n    return [a, b]\n\n\tprint('we''ll', \"THEY'RE\")  # done\r\n",
    "a.b.c/d-e_f (g) {h} <i> 1.5e-3 $9.99 100% I'd we've  \n \n end",
]
FAMILIES: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "GPT-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "SmolLM": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "Llama 3": lambda: pre_tokenizers.Sequence([_split(LLAMA_3), _bytes()]),
    "Qwen 2": lambda: pre_tokenizers.Sequence([_split(QWEN_2), _bytes()]),
}


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def _bytes() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def made(pre_tokenizer: pre_tokenizers.PreTokenizer, *added: AddedToken) -> Tokenizer:
    """A small BPE, with merges that go over every kind of character that its pieces may hold together."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 5, trainer)
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens(list(added))
    return tokenizer


TOKENIZERS = {name: made(family()) for name, family in FAMILIES.items()}


def whole(tokenizer: Tokenizer) -> words.Encode:
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


MEMORIES = {name: Words(whole(tokenizer)) for name, tokenizer in TOKENIZERS.items()}
"""Kept from one example to the next: what one text taught is used for another."""

SPACES = [" ", " ", " ", " ", "  ", "\n", "\t", "\r\n", "\x0b", "\x00", "\x1f", "\x7f"]
OTHERS = [
    "'s",
    "'ll",
    "'",
    "1",
    "23",
    "456",
    ".",
    ",",
    "-",
    "(",
    "_",
    "x==1",
    "a",
    "the",
    "fox",
    "don",
    "IT",
    "é",
    "水",
]
BITS = st.sampled_from([*SPACES, *OTHERS, *SPECIAL])


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=500, deadline=None)
@given(bits=st.lists(BITS, max_size=40))
def test_ids_are_those_of_the_whole_text(name: str, bits: list[str]) -> None:
    text = "".join(bits)
    expected = tuple(whole(TOKENIZERS[name])(text))
    assert MEMORIES[name].encode(text) == expected
    assert MEMORIES[name].encode(text) == expected  # with what the first time taught


@pytest.mark.parametrize("name", FAMILIES)
def test_ids_of_every_pair_of_characters_about_a_space_are_those_of_the_whole_text(name: str) -> None:
    encode, memory = whole(TOKENIZERS[name]), MEMORIES[name]
    ascii_ = [chr(code) for code in range(128)]
    for before in ascii_:
        for after in ascii_:
            text = f"a{before} {after}b c"
            assert memory.encode(text) == tuple(encode(text)), repr(text)


@pytest.mark.parametrize("name", FAMILIES)
def test_tokenizers_of_these_families_may_be_cut(name: str) -> None:
    assert cuts_at_spaces(TOKENIZERS[name])


def _refused() -> dict[str, Tokenizer]:
    lower, dropped = made(FAMILIES["GPT-2"]()), made(FAMILIES["GPT-2"]())
    lower.normalizer = normalizers.Lowercase()
    dropped.model.dropout = 0.1
    nothing = made(FAMILIES["GPT-2"]())
    nothing.pre_tokenizer = None
    return {
        "a normalizer": lower,
        "chance": dropped,
        "no pieces": nothing,
        "a space put first": made(pre_tokenizers.ByteLevel(add_prefix_space=True)),
        "no pattern": made(_bytes()),
        "an unknown pattern": made(pre_tokenizers.Sequence([_split(r"\S+ \S+|\s+|\S+"), _bytes()])),
        "other parts": made(pre_tokenizers.Metaspace()),
        "a token that takes spaces": made(FAMILIES["GPT-2"](), AddedToken("<mask>", lstrip=True)),
        "a token with a space": made(FAMILIES["GPT-2"](), AddedToken("new york")),
    }


@pytest.mark.parametrize("name", _refused())
def test_tokenizer_of_which_it_is_not_known_is_not_cut(name: str) -> None:
    assert not cuts_at_spaces(_refused()[name])


def test_words_seen_before_are_not_read_again() -> None:
    encode, read = whole(TOKENIZERS["GPT-2"]), list[str]()

    def noted(text: str) -> list[int]:
        read.append(text)
        return encode(text)

    memory = Words(noted)
    first = memory.encode("the fox said a word to the dog")
    assert {" fox", " said", " a", " word", " to", " the"} <= set(read)
    read.clear()
    assert memory.encode("the fox said a word to the dog") == first
    assert not read
    assert memory.encode("the word said a fox to the dog") == tuple(encode("the word said a fox to the dog"))
    assert not read


def test_text_of_new_words_is_read_whole_and_teaches_a_few() -> None:
    encode, read = whole(TOKENIZERS["GPT-2"]), list[str]()

    def noted(text: str) -> list[int]:
        read.append(text)
        return encode(text)

    text = " ".join(f"w{number}" for number in range(200))
    memory = Words(noted)
    for _ in range(3):
        read.clear()
        assert memory.encode(text) == tuple(encode(text))
        assert text in read
        assert len(read) <= words._NEW_WORDS + 2


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "WORDS_KEPT", 50)
    memory, rng = Words(whole(TOKENIZERS["GPT-2"])), random.Random(1)
    for _ in range(300):
        memory.encode(" ".join(f"{rng.getrandbits(40):x}" for _ in range(5)) + " " + "x" * rng.randint(1, 200) + " end")
        kept = (memory._first, memory._inner, memory._last)
        assert all(len(part) <= 50 for part in kept)
        assert all(len(word) <= words.WORD_CHARS for part in kept for word in part)
