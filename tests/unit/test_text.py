"""Text that leaves is final: whole characters, no stop string, and in the end what the tokenizer itself would say."""

from __future__ import annotations

import json
from functools import cache

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from cluster.engine.text import REPLACEMENT, TextCodec, TextStage
from tests.conformance.engine_kit import (
    CORPUS,
    byte_level_codec,
    byte_level_tokenizer,
    cut_at_stop,
    decoded,
    vocab_size,
)

WORDS = ("the", "basin", "water", "Wasser", "café", "x", "<", "</s>", "。", " ", ",", "t", "h", "e", "a", "b", "ab")


@cache
def sentencepiece_tokenizer() -> Tokenizer:
    """Llama 2's kind: a metaspace vocabulary, unknown characters as byte tokens, one leading space stripped."""
    vocab: dict[str, int] = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    for word in WORDS:
        for token in (word, "▁" + word):
            vocab.setdefault(token.replace(" ", "▁"), len(vocab))
    return Tokenizer.from_str(
        json.dumps(
            {
                "version": "1.0",
                "truncation": None,
                "padding": None,
                "added_tokens": [
                    {
                        "id": i,
                        "content": t,
                        "special": True,
                        "single_word": False,
                        "lstrip": False,
                        "rstrip": False,
                        "normalized": False,
                    }
                    for i, t in enumerate(("<unk>", "<s>", "</s>"))
                ],
                "normalizer": None,
                "pre_tokenizer": None,
                "post_processor": None,
                "decoder": {
                    "type": "Sequence",
                    "decoders": [
                        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                        {"type": "ByteFallback"},
                        {"type": "Fuse"},
                        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
                    ],
                },
                "model": {
                    "type": "BPE",
                    "dropout": None,
                    "unk_token": "<unk>",
                    "continuing_subword_prefix": None,
                    "end_of_word_suffix": None,
                    "fuse_unk": True,
                    "byte_fallback": True,
                    "ignore_merges": False,
                    "vocab": vocab,
                    "merges": [],
                },
            }
        )
    )


@cache
def sentencepiece_codec() -> TextCodec:
    return TextCodec(sentencepiece_tokenizer())


def byte(token: str) -> int:
    return byte_level_tokenizer().get_vocab()[token]


def sp(token: str) -> int:
    return sentencepiece_tokenizer().get_vocab()[token]


def run(stage: TextStage, ids: list[int]) -> tuple[list[str], str]:
    """The piece of each token until a stop string, and the last piece."""
    pieces = []
    for token_id in ids:
        pieces.append(stage.push(token_id))
        if stage.stopped:
            return pieces, ""
    return pieces, stage.finish()


def joined(stage: TextStage, ids: list[int]) -> str:
    pieces, last = run(stage, ids)
    return "".join(pieces) + last


any_ids = st.lists(st.integers(0, vocab_size() - 1), max_size=40)
any_text = st.one_of(st.sampled_from(CORPUS), st.text(max_size=30), st.text(alphabet="the ba👋🏽é水</s>", max_size=30))


@given(any_ids)
@settings(max_examples=500, deadline=None)
def test_byte_level_pieces_join_to_what_the_tokenizer_decodes_even_for_invalid_bytes(ids: list[int]) -> None:
    assert joined(byte_level_codec().stage(), ids) == decoded(ids)


@given(any_text)
@settings(deadline=None)
def test_byte_level_pieces_of_encoded_text_join_to_the_text(text: str) -> None:
    ids = byte_level_tokenizer().encode(text, add_special_tokens=False).ids
    expected: str = byte_level_tokenizer().decode(ids, skip_special_tokens=True)
    assert joined(byte_level_codec().stage(), ids) == expected


def sentencepiece_ids(text: str) -> list[int]:
    """Tokens of a text by words where there are some, by byte tokens elsewhere."""
    vocab = sentencepiece_tokenizer().get_vocab()
    ids: list[int] = []
    rest = text.replace(" ", "▁")
    while rest:
        token = max((t for t in vocab if rest.startswith(t) and not t.startswith("<")), key=len, default="")
        if token:
            ids.append(vocab[token])
        else:
            token = rest[0]
            ids.extend(vocab[f"<0x{b:02X}>"] for b in token.encode())
        rest = rest[len(token) :]
    return ids


@given(any_text, st.lists(st.integers(0, 40), max_size=3))
@settings(max_examples=300, deadline=None)
def test_byte_fallback_pieces_join_to_what_the_tokenizer_decodes(text: str, specials_at: list[int]) -> None:
    assume(REPLACEMENT not in text)
    ids = sentencepiece_ids(text)
    for at in specials_at:
        ids.insert(min(at, len(ids)), 2)
    expected: str = sentencepiece_tokenizer().decode(ids, skip_special_tokens=True)
    assert REPLACEMENT not in expected
    assert joined(sentencepiece_codec().stage(), ids) == expected


def test_no_half_character_leaves_either_decoder() -> None:
    for codec, ids in (
        (byte_level_codec(), [byte(c) for c in "ðŁļĢ"]),  # the rocket's four bytes
        (sentencepiece_codec(), [sp(f"<0x{b:02X}>") for b in "🚀".encode()]),
    ):
        assert run(codec.stage(), ids) == (["", "", "", "🚀"], "")


def test_ids_that_the_tokenizer_does_not_have_do_not_cut_a_character_in_two() -> None:
    """Rows of a padded vocabulary; eight tokens without text end the patience with half a character."""
    unknown = sentencepiece_tokenizer().get_vocab_size() + 5
    rocket = [sp(f"<0x{b:02X}>") for b in "🚀".encode()]
    assert joined(sentencepiece_codec().stage(), [*[unknown] * 7, *rocket]) == "🚀"


def test_a_character_cut_off_by_the_end_is_dropped_and_the_text_before_it_kept() -> None:
    rocket = [byte(c) for c in "ðŁļ"]
    assert joined(byte_level_codec().stage(), [*byte_level_tokenizer().encode("ab").ids, *rocket]) == "ab"
    vocab = sentencepiece_tokenizer().get_vocab()
    partial = [vocab[f"<0x{b:02X}>"] for b in "水".encode()[:2]]
    assert joined(sentencepiece_codec().stage(), [vocab["▁the"], *partial]) == "the"
    assert joined(sentencepiece_codec().stage(("e水",)), [vocab["▁the"], *partial]) == "the"


def test_a_flood_of_invalid_bytes_is_shown_and_not_held_for_ever() -> None:
    invalid = [sp("<0xFF>")] * 100
    pieces, _ = run(sentencepiece_codec().stage(), invalid)
    assert "".join(pieces).count(REPLACEMENT) >= 92
    assert set("".join(pieces)) == {REPLACEMENT}


@pytest.mark.parametrize("second", [0xA0, 0xA1, 0xBF])
def test_half_a_surrogate_begins_no_character_and_is_shown_at_once(second: int) -> None:
    """Python's incremental decoder waits for a third byte; decoding all at once does not."""
    ids = [i for b in (0xED, second) for i in range(vocab_size()) if byte_level_codec().token_bytes(i) == bytes([b])]
    stage = byte_level_codec().stage()
    assert [stage.push(i) for i in ids] == ["", byte_level_tokenizer().decode(ids)]
    assert stage.finish() == ""


def test_special_tokens_have_no_text_and_other_added_tokens_read_as_written() -> None:
    ids = [byte(t) for t in ("<|start|>", "<tool>", "naïve tool", "<|end|>")]
    assert joined(byte_level_codec().stage(), ids) == "<tool>naïve tool"
    assert joined(byte_level_codec().stage(), [vocab_size() + 5]) == ""


def test_stop_string_is_held_back_from_its_first_character() -> None:
    """Public report: the first tokens of a stop string of several tokens were streamed before it was complete."""
    stage = byte_level_codec().stage(("DEFGHIJ",))
    ids = [byte(c) for c in "ABCDEFGHIJK"]
    pieces, last = run(stage, ids)
    assert pieces == ["A", "B", "C", "", "", "", "", "", "", ""]
    assert stage.stopped
    assert last == ""


def test_text_that_does_not_become_a_stop_string_is_released() -> None:
    stage = byte_level_codec().stage(("DEFGHIJ",))
    assert [stage.push(byte(c)) for c in "ADEFX"] == ["A", "", "", "", "DEFX"]
    assert [stage.push(byte(c)) for c in "DDE"] == ["", "D", ""]
    assert stage.finish() == "DE"


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("xabcd", ("abcd", "c"), "xab"),  # "c" completes first
        ("xabc", ("bc", "abc"), "x"),  # both with one character: the longer
        ("aab", ("ab",), "a"),
        ("ababac", ("abac",), "ab"),  # overlaps its own beginning
        ("abc", ("",), "abc"),  # no stop string at all
    ],
)
def test_the_stop_string_that_completes_first_ends_the_text(text: str, stop: tuple[str, ...], expected: str) -> None:
    cut = cut_at_stop(text, stop)
    assert (text if cut is None else cut) == expected
    for ids in ([byte(c) for c in text], byte_level_tokenizer().encode(text).ids):
        assert joined(byte_level_codec().stage(stop), ids) == expected


@given(any_ids, st.data())
@settings(max_examples=400, deadline=None)
def test_with_stop_strings_pieces_join_to_the_text_before_the_first(ids: list[int], data: st.DataObject) -> None:
    whole = decoded(ids)
    if whole:
        inside = st.integers(0, len(whole) - 1).flatmap(
            lambda a: st.integers(1, 6).map(lambda length: whole[a : a + length])
        )
        stop = tuple(data.draw(st.lists(st.one_of(inside, st.text("abet ", min_size=1, max_size=3)), max_size=4)))
    else:
        stop = ("a",)
    stage = byte_level_codec().stage(stop)
    pieces, last = run(stage, ids)
    cut = cut_at_stop(whole, stop)
    assert "".join(pieces) + last == (whole if cut is None else cut)
    assert stage.stopped == (cut is not None)


@given(any_ids, st.integers(0, 40), st.sampled_from([(), ("th",), ("e", "ab"), ("\ufffd\ufffd",)]))
@settings(deadline=None)
def test_a_replayed_stage_goes_on_exactly_where_the_first_was(ids: list[int], at: int, stop: tuple[str, ...]) -> None:
    pieces, last = run(byte_level_codec().stage(stop), ids)
    at %= len(pieces) or 1
    again = byte_level_codec().stage(stop)
    for token_id in ids[:at]:
        again.push(token_id)
    assert run(again, ids[at:]) == (pieces[at:], last)


# --- min_tokens ---


@given(any_ids, st.integers(0, 12), st.data())
@settings(max_examples=400, deadline=None)
def test_stop_string_counts_only_where_a_token_from_min_tokens_on_completes_it(
    ids: list[int], min_tokens: int, data: st.DataObject
) -> None:
    whole = decoded(ids)
    inside = st.integers(0, max(0, len(whole) - 1)).flatmap(
        lambda a: st.integers(1, 4).map(lambda length: whole[a : a + length] or "a")
    )
    stop = tuple(data.draw(st.lists(st.one_of(inside, st.text("abet ", min_size=1, max_size=2)), max_size=4)))
    stage = byte_level_codec().stage(stop, min_tokens)
    pieces, last = run(stage, ids)
    cut = cut_at_stop(whole, stop, first_end=len(decoded(ids[:min_tokens])) + 1)
    assert "".join(pieces) + last == (whole if cut is None else cut)
    assert stage.stopped == (cut is not None)
    assert not stage.stopped or len(pieces) > min_tokens


def test_stop_string_that_came_too_early_is_text_and_the_next_one_ends_it() -> None:
    ids = [byte(c) for c in "abcabc"]
    for min_tokens, expected in ((0, ""), (2, ""), (3, "abc"), (5, "abc"), (6, "abcabc")):
        assert joined(byte_level_codec().stage(("abc",), min_tokens), ids) == expected
    # Its beginning may have come early; and what came early may begin the one that counts.
    assert joined(byte_level_codec().stage(("aa",), 2), [byte("a")] * 3) == "a"
    assert joined(byte_level_codec().stage(("ab", "abcd"), 2), [byte(c) for c in "abcx"]) == "abcx"


@given(any_ids, st.integers(0, 40), st.integers(0, 40), st.sampled_from([("th",), ("e", "ab"), ("\ufffd\ufffd",)]))
@settings(deadline=None)
def test_a_replayed_stage_has_counted_its_tokens(
    ids: list[int], at: int, min_tokens: int, stop: tuple[str, ...]
) -> None:
    pieces, last = run(byte_level_codec().stage(stop, min_tokens), ids)
    at %= len(pieces) or 1
    again = byte_level_codec().stage(stop, min_tokens)
    for token_id in ids[:at]:
        again.push(token_id)
    assert run(again, ids[at:]) == (pieces[at:], last)


# --- single tokens ---


@given(st.text(max_size=30))
@settings(deadline=None)
def test_bytes_of_the_tokens_of_a_text_are_the_text(text: str) -> None:
    ids = byte_level_tokenizer().encode(text, add_special_tokens=False).ids
    assert b"".join(byte_level_codec().token_bytes(i) or b"" for i in ids) == text.encode()


def test_token_reads_as_in_the_midst_of_a_text() -> None:
    codec = sentencepiece_codec()
    assert codec.token_bytes(sp("▁the")) == b" the"
    assert codec.token_bytes(sp("the")) == b"the"
    assert codec.token_bytes(sp("<0xE6>")) == b"\xe6"
    assert codec.token_bytes(sp("</s>")) == b"</s>"
    assert byte_level_codec().token_bytes(byte("ð")) == b"\xf0"
    assert byte_level_codec().token_bytes(byte("<|end|>")) == b"<|end|>"
    for unknown in (-1, vocab_size() + 5):
        assert byte_level_codec().token_bytes(unknown) is None


@given(any_ids)
@settings(deadline=None)
def test_detokenizer_holds_exactly_while_a_character_is_not_whole(ids: list[int]) -> None:
    detokenizer = byte_level_codec().detokenizer()
    for k, token_id in enumerate(ids, start=1):
        detokenizer.push(token_id)
        everything: str = byte_level_tokenizer().decode(ids[:k], skip_special_tokens=True)
        assert detokenizer.holding == (decoded(ids[:k]) != everything)
