"""The laws of the journal: fencing by attempt and index, exact trimming, bounded memory of decisions."""

from __future__ import annotations

import random
from typing import Any

import pytest

from cluster.types import FinishReason, Request, RequestId, Sampling, TokenDelta, TokenLogprob
from router.journal import MAX_DECISIONS, Accepted, Broken, Decision, DecisionLog, Gap, Journal, Repeat, Scores, Stale


def request(**sampling: Any) -> Request:
    return Request(
        request_id=RequestId("r"),
        tenant="t",
        priority=0,
        priority_class="standard",
        arrived_unix_s=0.0,
        prompt_ids=(1, 2, 3),
        sampling=Sampling(seed=0, **sampling),
    )


def delta(attempt: int, index: int, ids: tuple[int, ...], finish: FinishReason | None = None) -> TokenDelta:
    return TokenDelta(RequestId("r"), attempt, index, ids, tuple(f"<{i}>" for i in ids), finish)


def open_journal(*ids: int) -> Journal:
    journal = Journal(request(max_tokens=100))
    journal.begin()
    if ids:
        journal.accept(delta(1, 0, ids))
    return journal


def test_tokens_follow_each_other() -> None:
    journal = open_journal()
    assert journal.accept(delta(1, 0, (7, 8))) == Accepted((7, 8), "<7><8>", None)
    assert journal.accept(delta(1, 2, (9,))) == Accepted((9,), "<9>", None)
    assert journal.emitted_ids == (7, 8, 9)


def test_other_attempts_are_stale_before_during_and_after() -> None:
    journal = Journal(request(max_tokens=9))
    assert journal.accept(delta(1, 0, (7,))) == Stale()
    assert journal.begin() == 1
    assert journal.accept(delta(2, 0, (7,))) == Stale()
    journal.close()
    assert journal.accept(delta(1, 0, (7,))) == Stale()
    assert journal.begin() == 2
    assert journal.accept(delta(1, 0, (7,))) == Stale()
    assert journal.emitted_ids == ()


def test_next_attempt_goes_on_where_the_last_one_ended() -> None:
    journal = open_journal(7, 8)
    journal.close()
    journal.begin()
    assert journal.accept(delta(2, 2, (9,))) == Accepted((9,), "<9>", None)


def test_repeat_is_dropped_and_overlap_is_trimmed() -> None:
    journal = open_journal(7, 8, 9)
    assert journal.accept(delta(1, 0, (7, 8))) == Repeat()
    assert journal.accept(delta(1, 1, (8, 9))) == Repeat()
    assert journal.accept(delta(1, 1, (8, 9, 10))) == Accepted((10,), "<10>", None)


def test_gap_takes_nothing_and_names_the_first_missing_index() -> None:
    journal = open_journal(7)
    assert journal.accept(delta(1, 2, (9,), FinishReason.STOP)) == Gap(1)
    assert journal.emitted_ids == (7,)


def test_finish_without_tokens_is_taken_at_the_end_only() -> None:
    journal = open_journal(7, 8)
    assert isinstance(journal.accept(delta(1, 1, (), FinishReason.STOP)), Broken)
    assert journal.accept(delta(1, 2, (), FinishReason.STOP)) == Accepted((), "", FinishReason.STOP)


def test_finish_that_comes_with_a_repeat_of_all_tokens_is_taken() -> None:
    assert open_journal(7, 8).accept(delta(1, 0, (7, 8), FinishReason.STOP)) == Accepted((), "", FinishReason.STOP)


def test_any_cut_and_any_repetition_gives_the_same_journal() -> None:
    rng = random.Random(2)
    ids = tuple(rng.randrange(1000) for _ in range(60))
    for _ in range(300):
        journal = open_journal()
        text = ""
        while journal.next_index < len(ids):
            start = rng.randrange(0, min(len(ids), journal.next_index + 4))
            end = rng.randint(start, min(len(ids), start + 8))
            match journal.accept(delta(1, start, ids[start:end])):
                case Accepted(_, new, _):
                    text += new
                case Gap(index):
                    assert index < start
                case Repeat():
                    pass
                case other:
                    raise AssertionError(other)
        assert journal.emitted_ids == ids
        assert text == "".join(f"<{i}>" for i in ids)


def test_decisions_are_bounded_and_keep_the_beginning_and_the_end() -> None:
    log = DecisionLog()
    for k in range(1000):
        log.add(Decision(k, "e"))
    kept = [d.at_ms for d in log.decisions]
    assert len(kept) == MAX_DECISIONS
    assert kept == [*range(32), *range(968, 1000)]
    assert log.left_out == 1000 - MAX_DECISIONS


# --- logprobs ---

PROMPT = (TokenLogprob(-1.0), TokenLogprob(-2.0))
"""Of a prompt of three tokens."""


def scored(attempt: int, index: int, ids: tuple[int, ...], **rest: Any) -> TokenDelta:
    logprobs = tuple(TokenLogprob(-float(i)) for i in ids)
    pieces = tuple(f"<{i}>" for i in ids)
    return TokenDelta(RequestId("r"), attempt, index, ids, pieces, logprobs=logprobs, **rest)


def scores(verdict: object) -> Scores:
    assert isinstance(verdict, Accepted)
    assert verdict.scores is not None
    return verdict.scores


def test_logprobs_are_trimmed_with_their_tokens_so_that_none_is_doubled() -> None:
    journal = Journal(request(max_tokens=9, logprobs=0))
    journal.begin()
    first = scores(journal.accept(scored(1, 0, (5, 6))))
    again = scores(journal.accept(scored(1, 1, (6, 7))))
    assert (first.token_ids, again.token_ids) == ((5, 6), (7,))
    assert [p.logprob for p in (*first.logprobs, *again.logprobs)] == [-5.0, -6.0, -7.0]


def test_prompt_s_logprobs_are_taken_once_over_all_attempts() -> None:
    journal = Journal(request(max_tokens=9, logprobs=0, prompt_logprobs=0))
    journal.begin()
    awaited = journal.awaits_prompt
    assert scores(journal.accept(scored(1, 0, (5,), prompt_logprobs=PROMPT))).prompt_logprobs == PROMPT
    assert (awaited, journal.awaits_prompt) == (True, False)
    journal.close()
    journal.begin()
    assert scores(journal.accept(scored(2, 1, (6,), prompt_logprobs=PROMPT))).prompt_logprobs == ()


def test_prompt_s_logprobs_may_come_before_any_token_and_their_repeat_is_none() -> None:
    journal = Journal(request(max_tokens=9, logprobs=0, prompt_logprobs=0))
    journal.begin()
    assert scores(journal.accept(scored(1, 0, (), prompt_logprobs=PROMPT))).prompt_logprobs == PROMPT
    assert journal.accept(scored(1, 0, (), prompt_logprobs=PROMPT)) == Repeat()
    assert scores(journal.accept(scored(1, 0, (5,)))).prompt_logprobs == ()


def test_request_that_only_scores_is_complete_with_its_prompt_s_logprobs_and_not_before() -> None:
    journal = Journal(request(max_tokens=0, logprobs=0, prompt_logprobs=0))
    early = journal.complete
    journal.begin()
    taken = journal.accept(scored(1, 0, (), prompt_logprobs=PROMPT, finish=FinishReason.LENGTH))
    assert scores(taken).prompt_logprobs == PROMPT
    assert (early, journal.complete) == (False, True)
    assert Journal(request(max_tokens=0)).complete


@pytest.mark.parametrize(
    "broken",
    [
        delta(1, 0, (5,)),
        scored(1, 0, (5,)),
        scored(1, 0, (5,), prompt_logprobs=PROMPT[:1]),
        scored(1, 0, (), prompt_logprobs=PROMPT[:1]),
        scored(1, 0, (), finish=FinishReason.LENGTH),
    ],
    ids=["tokens", "prompt", "part of the prompt", "part alone", "end"],
)
def test_logprobs_that_are_missing_break_the_attempt_and_change_nothing(broken: TokenDelta) -> None:
    journal = Journal(request(max_tokens=9, logprobs=0, prompt_logprobs=0))
    journal.begin()
    assert isinstance(journal.accept(broken), Broken)
    assert (journal.emitted_ids, journal.awaits_prompt) == ((), True)


def test_end_without_success_needs_no_logprobs() -> None:
    journal = Journal(request(max_tokens=9, logprobs=0, prompt_logprobs=0))
    journal.begin()
    assert isinstance(journal.accept(scored(1, 0, (), finish=FinishReason.ERROR)), Accepted)


def test_what_is_taken_as_the_next_token_is_what_would_have_been_accepted_and_nothing_else_is_touched() -> None:
    draw, taken = random.Random(4), 0
    for _ in range(5000):
        have, below, room = draw.randrange(4), draw.randrange(6), draw.randrange(1, 6)
        scored = {"logprobs": 0} if draw.random() < 0.2 else {}
        quick, plain = (Journal(request(max_tokens=room, **scored)) for _ in range(2))
        said = TokenDelta(
            RequestId("r"), draw.choice((0, 1, 1, 1, 2)), draw.randrange(5), (7, 8)[: draw.choice((0, 1, 1, 1, 2))],
            ("a", "b")[: draw.choice((0, 1, 1, 1, 2))], draw.choice((None, None, None, FinishReason.STOP)),
        )  # fmt: skip
        for journal in (quick, plain):
            journal.begin()
            for index in range(min(have, room)):
                given = TokenDelta(RequestId("r"), 1, index, (index,), ("x",), logprobs=(TokenLogprob(0.0),))
                assert isinstance(journal.accept(given), Accepted)
        before = quick.emitted_ids
        if quick.take_next(said, below):
            taken += 1
            assert len(before) < below
            assert plain.accept(said) == Accepted(said.token_ids, said.pieces[0], None)
            assert (quick.emitted_ids, quick.next_index) == (plain.emitted_ids, plain.next_index)
        else:
            assert quick.emitted_ids == before
    assert taken > 30
