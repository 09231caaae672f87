"""Entries and text leave together: which token said what, whatever was held back, cut off or sent in pieces."""

from __future__ import annotations

import codecs
import json
import math
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.types import FinishReason, Outcome, TokenLogprob
from router.journal import Scores
from router.logprobs import Alignment, Entry, Vocabulary
from router.outcomes import Ending
from router.stream import Batch
from tests.conformance.engine_kit import EOS, byte_level_codec, byte_level_tokenizer, decoded, vocab_size
from tests.unit.test_text import sentencepiece_codec, sp

utf8 = codecs.getincrementaldecoder("utf-8")
ids_lists = st.lists(st.integers(0, vocab_size() - 1), max_size=40)


def byte(token: str) -> int:
    return byte_level_tokenizer().get_vocab()[token]


def text_bytes(token_id: int) -> bytes:
    """A token's part of the text: special tokens have none."""
    raw = byte_level_codec().token_bytes(token_id) or b""
    return b"" if raw.startswith(b"<|") else raw


def said(
    ids: list[int], stop: tuple[str, ...] = (), *, max_tokens: int = 100
) -> tuple[list[tuple[int, str]], FinishReason]:
    """(token, piece) as a replica sends them, and why it ended there."""
    stage = byte_level_codec().stage(stop)
    sent: list[tuple[int, str]] = []
    for token_id in ids:
        if token_id == EOS:
            sent.append((token_id, stage.finish()))
            return sent, FinishReason.STOP
        piece = stage.push(token_id)
        last = len(sent) + 1 == max_tokens
        if last and not stage.stopped:
            piece += stage.finish()
        sent.append((token_id, piece))
        if stage.stopped:
            return sent, FinishReason.STOP
        if last:
            break
    return sent, FinishReason.LENGTH


def batches(sent: list[tuple[int, str]], finish: FinishReason, cuts: set[int]) -> list[Batch]:
    """The same, cut before the given tokens; the last carries the ending."""
    parts: list[list[tuple[int, str]]] = [[]]
    for k, pair in enumerate(sent):
        if k in cuts:
            parts.append([])
        parts[-1].append(pair)
    made: list[Batch] = []
    index = 0
    for part in parts:
        ids = tuple(token_id for token_id, _ in part)
        scores = Scores(ids, tuple(TokenLogprob(-float(index + k)) for k in range(len(ids))))
        index += len(ids)
        ending = Ending(Outcome.FINISHED, 1, len(sent), finish) if len(made) + 1 == len(parts) else None
        made.append(Batch("".join(piece for _, piece in part), len(ids), ending, (scores,)))
    return made


def alignment(**prompt: Any) -> Alignment:
    fields: dict[str, Any] = {"prompt_ids": (), "echo": ""} | prompt
    return Alignment(byte_level_codec(), frozenset({EOS}), **fields)


@given(ids_lists, st.data())
@settings(max_examples=400, deadline=None)
def test_entries_are_those_of_the_text_that_has_left_and_never_ahead_of_it(ids: list[int], data: st.DataObject) -> None:
    whole = decoded(ids)
    inside = st.integers(0, max(0, len(whole) - 1)).flatmap(
        lambda a: st.integers(1, 6).map(lambda length: whole[a : a + length] or "a")
    )
    stop = tuple(data.draw(st.lists(st.one_of(inside, st.text("abet ", min_size=1, max_size=3)), max_size=3)))
    sent, finish = said(ids, stop, max_tokens=max(1, len(ids)))
    cuts = data.draw(st.sets(st.integers(1, 40)))
    aligned, text, entries = alignment(), "", list[Entry]()
    for batch in batches(sent, finish, cuts):
        entries += aligned.take(batch)
        text += batch.text
        shown = utf8("replace").decode(b"".join(text_bytes(e.token_id) for e in entries))
        if batch.ending is None:
            assert text.startswith(shown), "no token's text is told before it has left"
    # In order, from the first, each with its own score.
    assert [e.token_id for e in entries] == [token_id for token_id, _ in sent[: len(entries)]]
    assert [e.score for e in entries] == [TokenLogprob(-float(k)) for k in range(len(entries))]
    # Complete: without a stop string all but the end token, and with one all that it leaves whole.
    spoken = [token_id for token_id, _ in sent if token_id != EOS]
    if text == decoded(spoken):
        assert len(entries) == len(spoken)
    else:
        assert finish is FinishReason.STOP
        fits = [len(decoded(spoken[:k])) + _holds(spoken[:k]) <= len(text) for k in range(1, len(spoken) + 1)]
        assert len(entries) == sum(fits)
    # The offset is where the token's first character begins, or the one that it goes on with.
    assert [e.offset for e in entries] == [len(decoded(spoken[:k])) for k in range(len(entries))]


def _holds(ids: list[int]) -> bool:
    everything: str = byte_level_tokenizer().decode(ids, skip_special_tokens=True)
    return decoded(ids) != everything


def test_entries_are_held_with_text_that_may_become_a_stop_string_and_dropped_with_it() -> None:
    """Public report: the first tokens of a stop string of several tokens were sent before it was complete."""
    ids = [byte(c) for c in "ABCDEFGHIJK"]
    aligned = alignment()
    sent, finish = said(ids, ("DEFGHIJ",))
    taken = [[e.token_id for e in aligned.take(b)] for b in batches(sent, finish, set(range(20)))]
    assert taken[0] == []  # the cut before the first token makes an empty batch
    assert taken[1:] == [[i] for i in ids[:3]] + [[]] * 7


def test_entries_of_a_failed_match_leave_with_its_text() -> None:
    ids = [byte(c) for c in "ADEFX"]
    aligned = alignment()
    sent, finish = said(ids, ("DEFGHIJ",), max_tokens=5)
    taken = [len(aligned.take(b)) for b in batches(sent, finish, set(range(1, 5)))]
    assert taken == [1, 0, 0, 0, 4]


def test_token_that_a_stop_string_cuts_in_two_has_no_entry() -> None:
    token = byte("Ġba")
    sent, finish = said([byte("A"), token, byte("B")], ("baB",))
    assert "".join(piece for _, piece in sent) == "A "
    assert [e.token_id for e in alignment().take(*batches(sent, finish, set()))] == [byte("A")]


def test_half_a_character_waits_for_the_whole_and_carries_its_bytes() -> None:
    rocket = [byte(c) for c in "ðŁļĢ"]
    aligned = alignment()
    sent, finish = said([byte("A"), *rocket, byte("B")], max_tokens=6)
    taken = [aligned.take(b) for b in batches(sent, finish, set(range(1, 6)))]
    assert [len(entries) for entries in taken] == [1, 0, 0, 0, 4, 1]
    wire = msgspec.to_builtins(Vocabulary(byte_level_codec(), ()).chat(taken[4]))
    assert [tuple(e["bytes"]) for e in wire["content"]] == [(0xF0,), (0x9F,), (0x9A,), (0x80,)]
    assert [e["token"] for e in wire["content"]] == ["bytes:\\xf0", "bytes:\\x9f", "bytes:\\x9a", "bytes:\\x80"]
    assert bytes(b for e in wire["content"] for b in e["bytes"]).decode() == "🚀"
    assert [e.offset for e in taken[4]] == [1, 1, 1, 1]
    assert taken[5][0].offset == 2


def test_half_a_character_at_the_end_keeps_its_entries_though_its_text_is_dropped() -> None:
    sent, finish = said([byte("A"), byte("ð"), byte("Ł")], max_tokens=3)
    assert "".join(piece for _, piece in sent) == "A"
    assert [e.token_id for e in alignment().take(*batches(sent, finish, set()))] == [byte("A"), byte("ð"), byte("Ł")]


def test_end_token_has_no_entry_unless_the_request_goes_on_after_it() -> None:
    sent = [(byte("A"), "A"), (EOS, "")]
    ended = batches(sent, FinishReason.STOP, set())
    assert [e.token_id for e in alignment().take(*ended)] == [byte("A")]
    ignoring = Alignment(byte_level_codec(), frozenset(), (), "")
    assert [e.token_id for e in ignoring.take(*batches(sent, FinishReason.LENGTH, set()))] == [byte("A"), EOS]


@given(st.lists(st.integers(0, vocab_size() - 1), min_size=1, max_size=20), ids_lists)
@settings(deadline=None)
def test_echoed_prompt_s_entries_precede_and_the_first_has_no_logprob(prompt: list[int], ids: list[int]) -> None:
    echo = byte_level_codec().text(prompt)
    prompt_scores = tuple(TokenLogprob(-0.5 * k) for k in range(1, len(prompt)))
    sent, finish = said(ids, max_tokens=max(1, len(ids)))
    first, *rest = batches(sent, finish, {1})
    first = msgspec.structs.replace(first, scores=(Scores((), (), prompt_scores), *first.scores))
    aligned = alignment(prompt_ids=tuple(prompt), echo=echo)
    entries = aligned.take(first)
    for batch in rest:
        entries += aligned.take(batch)
    assert [e.token_id for e in entries[: len(prompt)]] == prompt
    assert [e.score for e in entries[: len(prompt)]] == [None, *prompt_scores]
    assert [e.offset for e in entries[: len(prompt)]] == [len(decoded(prompt[:k])) for k in range(len(prompt))]
    assert [e.token_id for e in entries[len(prompt) :]] == [token_id for token_id, _ in sent if token_id != EOS]
    assert all(e.offset >= len(echo) for e in entries[len(prompt) :])


def test_prompt_whose_tokens_do_not_read_as_its_text_has_offsets_within_it() -> None:
    ids = tuple(byte(c) for c in "ABC")
    aligned = alignment(prompt_ids=ids, echo="a")
    scores = Scores((), (), (TokenLogprob(-1.0), TokenLogprob(-2.0)))
    assert [e.offset for e in aligned.take(Batch("", 0, None, (scores,)))] == [0, 1, 1]


def test_special_tokens_of_a_prompt_take_up_what_is_written_of_them_in_its_text() -> None:
    scores = Scores((), (), tuple(TokenLogprob(-1.0) for _ in range(3)))
    ids = (EOS, byte("A"), EOS, byte("B"))
    written = alignment(prompt_ids=ids, echo="<|end|>A<|end|>B")
    assert [e.offset for e in written.take(Batch("", 0, None, (scores,)))] == [0, 7, 8, 15]
    begun = alignment(prompt_ids=ids, echo="A<|end|>B")  # a tokenizer may put the first there by itself
    assert [e.offset for e in begun.take(Batch("", 0, None, (scores,)))] == [0, 0, 1, 8]
    as_ids = alignment(prompt_ids=ids, echo=byte_level_codec().text(ids))
    assert [e.offset for e in as_ids.take(Batch("", 0, None, (scores,)))] == [0, 0, 1, 1]


# --- the wire ---


def test_forms_are_openai_s() -> None:
    """Field by field as the official client's types have them; the official client reads both in test_router_choices."""
    a, b, c = byte("A"), byte("B"), byte("ð")
    vocabulary = Vocabulary(byte_level_codec(), ())
    entries = [
        Entry(b, 0, None),
        Entry(a, 1, TokenLogprob(-0.5, ((a, -0.5), (c, -1.5)))),
        Entry(c, 2, TokenLogprob(-2.0, ((a, -0.25), (b, -1.0)))),
    ]
    assert json.loads(msgspec.json.encode(vocabulary.completion(entries))) == {
        "text_offset": [0, 1, 2],
        "token_logprobs": [None, -0.5, -2.0],
        "tokens": ["B", "A", "bytes:\\xf0"],
        "top_logprobs": [None, {"A": -0.5, "bytes:\\xf0": -1.5}, {"A": -0.25, "B": -1.0, "bytes:\\xf0": -2.0}],
    }
    assert json.loads(msgspec.json.encode(vocabulary.chat(entries[1:]))) == {
        "content": [
            {
                "token": "A",
                "logprob": -0.5,
                "bytes": [65],
                "top_logprobs": [
                    {"token": "A", "logprob": -0.5, "bytes": [65]},
                    {"token": "bytes:\\xf0", "logprob": -1.5, "bytes": [240]},
                ],
            },
            {
                "token": "bytes:\\xf0",
                "logprob": -2.0,
                "bytes": [240],
                "top_logprobs": [
                    {"token": "A", "logprob": -0.25, "bytes": [65]},
                    {"token": "B", "logprob": -1.0, "bytes": [66]},
                ],
            },
        ],
        "refusal": None,
    }


def test_different_tokens_of_a_byte_level_vocabulary_read_differently() -> None:
    vocabulary = Vocabulary(byte_level_codec(), ())
    words = [vocabulary.word(i).token for i in range(vocab_size() + 3)]
    assert len(set(words)) == len(words)
    assert vocabulary.word(vocab_size()) == (f"token_id:{vocab_size()}", None)


def test_token_that_is_impossible_has_a_number_that_json_can_say() -> None:
    vocabulary = Vocabulary(byte_level_codec(), ())
    entries = [Entry(byte("A"), 0, TokenLogprob(-math.inf, ((byte("B"), -math.inf),)))]
    assert vocabulary.completion(entries).token_logprobs == [-9999.0]
    assert vocabulary.chat(entries).content[0].top_logprobs[0].logprob == -9999.0


def test_offsets_are_right_where_the_decoder_strips_a_space_and_writes_bytes() -> None:
    codec = sentencepiece_codec()
    ids = [sp("▁the"), sp("▁water"), *(sp(f"<0x{b:02X}>") for b in "水".encode()), sp("▁basin")]
    stage = codec.stage()
    pieces = [stage.push(i) for i in ids]
    pieces[-1] += stage.finish()
    assert "".join(pieces) == "the water水 basin"
    aligned = Alignment(codec, frozenset(), (), "")
    scores = Scores(tuple(ids), tuple(TokenLogprob(-1.0) for _ in ids))
    entries = aligned.take(
        Batch("".join(pieces), len(ids), Ending(Outcome.FINISHED, 1, 6, FinishReason.LENGTH), (scores,))
    )
    words = [Vocabulary(codec, ()).word(e.token_id).token for e in entries]
    assert words == [" the", " water", "bytes:\\xe6", "bytes:\\xb0", "bytes:\\xb4", " basin"]
    assert [e.offset for e in entries] == [0, 3, 9, 9, 9, 10]
