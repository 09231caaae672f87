"""What a replica owes a router: nothing lost, nothing doubled, bounded."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cluster.types import FinishReason, RequestId, TokenDelta, TokenLogprob
from deployments.outbox import Outbox

A = RequestId("a")


def delta(index: int, pieces: str, finish: FinishReason | None = None, request: RequestId = A) -> TokenDelta:
    ids = tuple(ord(p) for p in pieces)
    return TokenDelta(request, 1, index, ids, tuple(pieces), finish)


def test_tokens_gathered_over_steps_leave_as_one_delta() -> None:
    outbox = Outbox(1000)
    outbox.open(A, 1, 5)
    outbox.record(delta(5, "x"))
    outbox.record(delta(6, "yz", FinishReason.STOP))
    assert outbox.take() == (delta(5, "xyz", FinishReason.STOP),)
    assert outbox.take() == ()
    assert outbox.unsent_bytes == 0


def test_a_resend_starts_at_the_index_asked_for_and_repeats_the_finish() -> None:
    outbox = Outbox(1000)
    outbox.open(A, 1, 0)
    outbox.record(delta(0, "abc", FinishReason.LENGTH))
    outbox.take()
    assert outbox.rewind(A, 1, 2)
    assert outbox.take() == (delta(2, "c", FinishReason.LENGTH),)
    assert outbox.rewind(A, 1, 3)
    assert outbox.take() == (delta(3, "", FinishReason.LENGTH),)


def test_what_was_cached_of_a_prompt_leaves_with_the_first_token_whenever_that_is_sent_and_with_no_other() -> None:
    outbox = Outbox(1000)
    outbox.open(A, 1, 5)
    outbox.record(msgspec.structs.replace(delta(5, "a"), cached_tokens=32))
    outbox.record(delta(6, "b"))
    assert [d.cached_tokens for d in outbox.take()] == [32]
    outbox.record(delta(7, "c"))
    assert [d.cached_tokens for d in outbox.take()] == [0]
    for index, cached in ((5, 32), (6, 0)):
        assert outbox.rewind(A, 1, index)
        assert [d.cached_tokens for d in outbox.take()] == [cached]


@pytest.mark.parametrize(("attempt", "index"), [(2, 0), (1, 4), (1, -1)])
def test_what_was_never_made_cannot_be_sent_again(attempt: int, index: int) -> None:
    outbox = Outbox(1000)
    outbox.open(A, 1, 0)
    outbox.record(delta(0, "abc"))
    assert not outbox.rewind(A, attempt, index)


def test_a_skipped_token_is_a_programmer_error() -> None:
    outbox = Outbox(1000)
    outbox.open(A, 1, 0)
    outbox.record(delta(0, "a"))
    with pytest.raises(AssertionError, match="went from token 1 to 2"):
        outbox.record(delta(2, "c"))


def test_overflow_gives_up_the_most_backlogged_first_and_only_as_many_as_needed() -> None:
    outbox = Outbox(30)
    for name, tokens in (("a", "x" * 3), ("b", "x" * 4), ("c", "x")):
        outbox.open(RequestId(name), 1, 0)
        outbox.record(delta(0, tokens, request=RequestId(name)))
    # 8 tokens of 1 character and 4 bytes each: 40, ten over the bound; b alone holds 20.
    assert outbox.unsent_bytes == 40
    assert outbox.overflowing() == [(RequestId("b"), 1)]
    outbox.forget(RequestId("b"), 1)
    assert outbox.overflowing() == []


def test_finished_logs_are_kept_for_a_resend_up_to_a_number() -> None:
    outbox = Outbox(1000, finished_kept=2)
    for name in "abc":
        outbox.open(RequestId(name), 1, 0)
        outbox.record(delta(0, "x", FinishReason.STOP, RequestId(name)))
        outbox.take()
    assert [(RequestId(n), 1) in outbox for n in "abc"] == [False, True, True]


def test_finished_logs_are_kept_up_to_the_bound_in_bytes() -> None:
    outbox = Outbox(25)
    for name in "abc":
        outbox.open(RequestId(name), 1, 0)
        outbox.record(delta(0, "xx", FinishReason.STOP, RequestId(name)))
        outbox.take()
    # Ten bytes each, two tokens of one character and four: the third makes thirty.
    assert [(RequestId(n), 1) in outbox for n in "abc"] == [False, True, True]


def scored(index: int, count: int, prompt: int = 0, finish: FinishReason | None = None) -> TokenDelta:
    """Tokens with their logprobs; before the first those of a prompt."""
    ids = tuple(range(index, index + count))
    said = tuple(TokenLogprob(-float(k), ((k, -0.5), (k + 1, -1.5))) for k in ids)
    of_prompt = tuple(TokenLogprob(-100.0 - k) for k in range(prompt))
    return TokenDelta(A, 1, index, ids, tuple("x" for _ in ids), finish, logprobs=said, prompt_logprobs=of_prompt)


def test_logprobs_leave_with_their_tokens_and_come_again_with_a_resend() -> None:
    outbox = Outbox(10_000)
    outbox.open(A, 1, 0)
    outbox.record(scored(0, 2, prompt=3))
    outbox.record(scored(2, 1))
    assert outbox.take() == (scored(0, 3, prompt=3),)
    outbox.record(scored(3, 1, finish=FinishReason.LENGTH))
    assert outbox.take() == (scored(3, 1, finish=FinishReason.LENGTH),)
    assert outbox.rewind(A, 1, 1)
    assert outbox.take() == (scored(1, 3, finish=FinishReason.LENGTH),), (
        "the first token had come, and with it the prompt"
    )
    assert outbox.rewind(A, 1, 0)
    assert outbox.take() == (scored(0, 4, prompt=3, finish=FinishReason.LENGTH),)


def test_logprobs_of_a_prompt_leave_though_there_is_no_token_and_come_again() -> None:
    outbox = Outbox(10_000)
    outbox.open(A, 1, 0)
    only = scored(0, 0, prompt=3, finish=FinishReason.LENGTH)
    outbox.record(only)
    for _ in range(2):
        assert outbox.take() == (only,)
        assert outbox.unsent_bytes == 0
        assert outbox.rewind(A, 1, 0)
        assert outbox.unsent_bytes > 0


def test_logprobs_are_charged_what_they_take_on_the_wire() -> None:
    outbox = Outbox(10_000)
    outbox.open(A, 1, 0)
    outbox.record(scored(0, 4, prompt=5))
    (sent,) = outbox.take()
    assert outbox.unsent_bytes == 0
    outbox.rewind(A, 1, 0)
    on_the_wire = sum(len(msgspec.msgpack.encode(logprob)) for logprob in (*sent.logprobs, *sent.prompt_logprobs))
    assert outbox.unsent_bytes == on_the_wire + 4 * (1 + 4)


class OutboxMachine(RuleBasedStateMachine):
    """A receiver that applies deltas by index, over a link that may forget what it was sent."""

    @initialize()
    def begin(self) -> None:
        self.outbox = Outbox(10**6)
        self.truth: dict[int, list[int]] = {}
        self.received: dict[int, list[int]] = {}
        self.prompts: set[int] = set()
        """Attempts whose prompt's logprobs have been received."""
        self.lost = False

    @rule(number=st.integers(0, 4), count=st.integers(0, 3))
    def step(self, number: int, count: int) -> None:
        """Every other attempt has logprobs, and before its first token those of a prompt."""
        name = RequestId(str(number))
        begins = number not in self.truth
        if begins:
            self.truth[number], self.received[number] = [], []
            self.outbox.open(name, 1, 0)
        index = len(self.truth[number])
        ids = tuple(range(index, index + count))
        self.truth[number].extend(ids)
        said = tuple(TokenLogprob(-float(i)) for i in ids) if number % 2 else ()
        prompt = (TokenLogprob(0.5),) if number % 2 and begins else ()
        pieces = tuple("ü" for _ in ids)
        self.outbox.record(TokenDelta(name, 1, index, ids, pieces, logprobs=said, prompt_logprobs=prompt))

    @rule()
    def deliver(self) -> None:
        for d in self.outbox.take():
            got = self.received[int(d.request_id)]
            if not self.lost:
                assert d.index == len(got)
                got.extend(d.token_ids)
                if int(d.request_id) % 2:
                    assert d.logprobs == tuple(TokenLogprob(-float(i)) for i in d.token_ids)
                    if d.prompt_logprobs:
                        self.prompts.add(int(d.request_id))
                    assert int(d.request_id) in self.prompts, "the prompt's come first"
                else:
                    assert (d.logprobs, d.prompt_logprobs) == ((), ())

    @rule()
    def link_breaks_and_everything_on_it_is_lost(self) -> None:
        self.outbox.take()
        for number, got in self.received.items():
            assert self.outbox.rewind(RequestId(str(number)), 1, len(got))

    @rule()
    def all_arrives(self) -> None:
        self.deliver()
        assert self.received == self.truth

    @invariant()
    def unsent_bytes_are_those_not_taken(self) -> None:
        if hasattr(self, "outbox"):
            assert self.outbox.unsent_bytes == sum(log.unsent_bytes for log in self.outbox._logs.values())


TestOutboxMachine = OutboxMachine.TestCase
TestOutboxMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(st.lists(st.text(max_size=3), min_size=1, max_size=30), st.data())
def test_pieces_of_a_resend_join_to_the_text_from_there(pieces: list[str], data: st.DataObject) -> None:
    outbox = Outbox(10**6)
    outbox.open(A, 1, 7)
    for i, piece in enumerate(pieces):
        outbox.record(TokenDelta(A, 1, 7 + i, (i,), (piece,)))
    outbox.take()
    cut = data.draw(st.integers(0, len(pieces)))
    assert outbox.rewind(A, 1, 7 + cut)
    (again,) = outbox.take()
    assert "".join(again.pieces) == "".join(pieces[cut:])
