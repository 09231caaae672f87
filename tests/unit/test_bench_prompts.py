"""Prompts have the wanted number of tokens, and share exactly the prefixes that the trace shares."""

from __future__ import annotations

from fractions import Fraction
from itertools import takewhile
from pathlib import Path
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from ops.bench.prompts import CALIBRATION_WORDS, WORDS, Lexicon, calibrate, calibration_prompt, prompt
from ops.bench.replay import tokenizer_lexicon
from ops.bench.schedule import PlannedRequest
from ops.errors import CommandError

ONE_TOKEN = Lexicon(Fraction(1), Fraction(0))


def planned(index: int, tokens: int, blocks: tuple[int, ...] = (), block_tokens: int = 32) -> PlannedRequest:
    return PlannedRequest(index, 0.0, "standard", tokens, 1, blocks, Fraction(block_tokens))


def shared_words(a: str, b: str) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a.split(), b.split(), strict=False)))


def test_words_are_words_and_differ() -> None:
    assert len(set(WORDS)) == len(WORDS) > 100
    assert all(word.isalpha() and word.islower() for word in WORDS)


def test_calibration_finds_what_a_linear_tokenizer_does() -> None:
    short, long = CALIBRATION_WORDS
    assert calibrate((3 * short + 7, 3 * long + 7)) == Lexicon(Fraction(3), Fraction(7))
    assert calibrate((short, long)) == ONE_TOKEN


def test_the_two_calibration_prompts_differ_by_every_word_once() -> None:
    short, long = (calibration_prompt(n).split() for n in CALIBRATION_WORDS)
    assert (len(short), len(long)) == CALIBRATION_WORDS
    assert long[: len(short)] == short
    assert sorted(long[len(short) :]) == sorted(WORDS)


def test_counts_that_do_not_rise_with_length_are_refused() -> None:
    with pytest.raises(ValueError, match="tokens"):
        calibrate((64, 64))


def test_words_and_tokens_convert_by_the_lexicon() -> None:
    lexicon = Lexicon(Fraction(3, 2), Fraction(5))
    assert lexicon.words_for(65) == 40
    assert lexicon.words_for(1) == 1


@given(tokens=st.integers(1, 300), seed=st.integers(0, 9), index=st.integers(0, 9))
def test_prompt_has_exactly_the_planned_words_and_repeats_by_seed(tokens: int, seed: int, index: int) -> None:
    text = prompt(planned(index, tokens), ONE_TOKEN, seed)
    assert len(text.split()) == tokens
    assert text == prompt(planned(index, tokens), ONE_TOKEN, seed)


def test_requests_without_blocks_share_no_long_prefix() -> None:
    texts = [prompt(planned(i, 64), ONE_TOKEN, 0) for i in range(50)]
    assert max(shared_words(a, b) for a in texts for b in texts if a is not b) < 8
    assert prompt(planned(0, 64), ONE_TOKEN, 0) != prompt(planned(0, 64), ONE_TOKEN, 1)


@given(
    common=st.integers(0, 4),
    own=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    block_tokens=st.integers(8, 64),
    per_word=st.fractions(Fraction(1), Fraction(3)),
    overhead=st.integers(0, 30),
)
def test_equal_blocks_are_equal_words_and_no_more(
    common: int, own: tuple[int, int], block_tokens: int, per_word: Fraction, overhead: int
) -> None:
    lexicon = Lexicon(per_word, Fraction(overhead))
    a_blocks = (*range(common), *range(100, 100 + own[0]))
    b_blocks = (*range(common), *range(200, 200 + own[1]))
    a = prompt(planned(0, len(a_blocks) * block_tokens + overhead, a_blocks, block_tokens), lexicon, 5)
    b = prompt(planned(1, len(b_blocks) * block_tokens + overhead, b_blocks, block_tokens), lexicon, 5)
    border = round(common * block_tokens / per_word)
    # Behind the border the words are drawn independently: a chance match of 8 words has odds of 123^-8.
    assert border <= shared_words(a, b) < border + 8


def test_last_block_may_be_partial_and_still_shares_its_words() -> None:
    whole = prompt(planned(0, 64, (1, 2)), ONE_TOKEN, 0).split()
    part = prompt(planned(1, 40, (1, 2)), ONE_TOKEN, 0).split()
    assert len(part) == 40
    assert part == whole[:40]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with a small vocabulary, so that words take several tokens, and not all as many."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=330, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([" ".join(WORDS)], trainer)
    folder = tmp_path_factory.mktemp("model")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_prompts_by_a_real_tokenizer_have_nearly_the_planned_tokens(model_folder: Path) -> None:
    lexicon = tokenizer_lexicon(model_folder)
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    assert lexicon.tokens_per_word > Fraction(3, 2), "the vocabulary must be too small for whole words"
    lengths = [len(tokenizer.encode(prompt(planned(i, 400), lexicon, 1)).ids) for i in range(30)]
    assert mean(lengths) == pytest.approx(400, rel=0.02)
    assert max(abs(n - 400) for n in lengths) < 60


def test_tokenizer_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"--tokenizer.*does not exist"):
        tokenizer_lexicon(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CommandError, match=r"--tokenizer.*cannot be read"):
        tokenizer_lexicon(tmp_path)
