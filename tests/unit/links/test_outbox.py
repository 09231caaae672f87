"""What a replica owes a router: nothing lost, nothing doubled, bounded."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cluster.types import FinishReason, RequestId, TokenDelta
from deployments.outbox import Outbox

A = RequestId("a")


def delta(index: int, pieces: str, finish: FinishReason | None = None, request: RequestId = A) -> TokenDelta:
    ids = tuple(ord(p) for p in pieces)
    return TokenDelta(request, 0, 1, index, ids, tuple(pieces), finish)


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
    assert outbox.rewind(A, 1, 0, 2)
    assert outbox.take() == (delta(2, "c", FinishReason.LENGTH),)
    assert outbox.rewind(A, 1, 0, 3)
    assert outbox.take() == (delta(3, "", FinishReason.LENGTH),)


@pytest.mark.parametrize(("attempt", "choice", "index"), [(2, 0, 0), (1, 1, 0), (1, 0, 4), (1, 0, -1)])
def test_what_was_never_made_cannot_be_sent_again(attempt: int, choice: int, index: int) -> None:
    outbox = Outbox(1000)
    outbox.open(A, 1, 0)
    outbox.record(delta(0, "abc"))
    assert not outbox.rewind(A, attempt, choice, index)


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


class OutboxMachine(RuleBasedStateMachine):
    """A receiver that applies deltas by index, over a link that may forget what it was sent."""

    @initialize()
    def begin(self) -> None:
        self.outbox = Outbox(10**6)
        self.truth: dict[int, list[int]] = {}
        self.received: dict[int, list[int]] = {}
        self.lost = False

    @rule(number=st.integers(0, 4), count=st.integers(0, 3))
    def step(self, number: int, count: int) -> None:
        name = RequestId(str(number))
        if number not in self.truth:
            self.truth[number], self.received[number] = [], []
            self.outbox.open(name, 1, 0)
        index = len(self.truth[number])
        ids = tuple(range(index, index + count))
        self.truth[number].extend(ids)
        self.outbox.record(TokenDelta(name, 0, 1, index, ids, tuple("ü" for _ in ids)))

    @rule()
    def deliver(self) -> None:
        for d in self.outbox.take():
            got = self.received[int(d.request_id)]
            if not self.lost:
                assert d.index == len(got)
                got.extend(d.token_ids)

    @rule()
    def link_breaks_and_everything_on_it_is_lost(self) -> None:
        self.outbox.take()
        for number, got in self.received.items():
            assert self.outbox.rewind(RequestId(str(number)), 1, 0, len(got))

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
        outbox.record(TokenDelta(A, 0, 1, 7 + i, (i,), (piece,)))
    outbox.take()
    cut = data.draw(st.integers(0, len(pieces)))
    assert outbox.rewind(A, 1, 0, 7 + cut)
    (again,) = outbox.take()
    assert "".join(again.pieces) == "".join(pieces[cut:])
