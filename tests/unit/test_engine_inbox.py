"""What an engine is asked is kept in order and in bounds, and nobody who asks is forgotten."""

from __future__ import annotations

import pytest

from cluster.engine.inbox import CALLS_MAX, Abort, Add, Call, EngineBusyError, EngineStoppedError, Inbox
from cluster.ports import ImportRefusal
from cluster.types import Refusal, RefusalReason, RequestId
from tests.conformance.engine_kit import request


def name(n: int) -> RequestId:
    return RequestId(f"r{n}")


class Box(Inbox[str]):
    """Counts how often it says that something is to be taken."""

    def __init__(self, max_held: int = 4) -> None:
        self.said = 0
        super().__init__(max_held, self._say)

    def _say(self) -> None:
        self.said += 1


def test_commands_come_out_once_and_in_the_order_in_which_they_came() -> None:
    box = Box()
    assert [box.pending] == [False]
    r = request("r0")
    box.add(r, 0)
    answer = box.ask((name(0), 0), "freeze")
    box.abort(name(0), 0)
    assert [box.pending] == [True]
    assert box.said == 3
    assert list(box.take().commands) == [Add(r, 0), Call((name(0), 0), "freeze", answer), Abort((name(0), 0))]
    assert [box.pending] == [False]
    assert list(box.take().commands) == []


def test_what_goes_beyond_the_bound_is_refused_once_and_the_queue_does_not_grow() -> None:
    box = Box(max_held=4)
    for n in range(50):
        box.add(request(f"r{n}"), 0)
    for n in range(50):
        box.add(request("r0"), 0)  # a repeat
        box.abort(RequestId(f"unknown{n}"), 0)
        box.abort(name(1), 0)  # once is enough
    taken = box.take()
    assert len(taken.commands) == 4 + 1
    assert taken.refused == [Refusal(name(n), 0, RefusalReason.FULL) for n in range(4, 50)]
    assert taken.answered_adds == 46 + 50
    assert (box.take().refused, box.take().answered_adds) == ([], 0)


def test_a_refusal_alone_is_something_to_take() -> None:
    box = Box(max_held=1)
    box.add(request("r0"), 0)
    box.take()
    box.add(request("r1"), 0)
    assert box.pending
    assert [r.request_id for r in box.take().refused] == ["r1"]


def test_an_attempt_is_held_until_the_engine_forgets_it() -> None:
    box = Box(max_held=1)
    box.add(request("r0"), 0)
    box.take()
    box.add(request("r1"), 0)
    assert box.take().refused
    box.forget([(name(0), 0)])
    box.abort(name(0), 0)
    assert not box.take().commands
    box.add(request("r1"), 0)
    assert [type(command) for command in box.take().commands] == [Add]


def test_one_that_comes_by_a_move_takes_a_place_among_all_that_are_held() -> None:
    box = Box(max_held=2)
    assert box.reserve((name(0), 1)) is None
    assert box.reserve((name(0), 1)) is ImportRefusal.KNOWN
    box.add(request("r1"), 0)
    assert box.reserve((name(2), 0)) is ImportRefusal.FULL
    box.add(request("r2"), 0)
    assert [r.request_id for r in box.take().refused] == ["r2"]
    box.abort(name(0), 1)
    assert list(box.take().commands) == [Abort((name(0), 1))]


def test_of_calls_only_so_many_wait_or_are_under_way() -> None:
    box = Box()
    answers = [box.ask((name(0), 0), "freeze") for _ in range(CALLS_MAX)]
    assert answers[0].cancel(), "its place is not free for that"
    for _ in range(2):
        with pytest.raises(EngineBusyError):
            box.ask((name(0), 0), "thaw").result(0)
        box.take()  # they are under way
    box.called()
    assert not box.ask((name(0), 0), "thaw").done()


def test_when_it_is_closed_every_call_fails_rather_than_waits() -> None:
    box = Box()
    waiting = box.ask((name(0), 0), "freeze")
    cancelled = box.ask((name(0), 0), "thaw")
    cancelled.cancel()
    box.close("the device is lost")
    with pytest.raises(EngineStoppedError, match="the device is lost"):
        waiting.result(0)
    with pytest.raises(EngineStoppedError):
        box.ask((name(0), 0), "freeze").result(0)
    assert cancelled.cancelled()


def test_a_call_behind_what_ended_the_engine_fails_rather_than_waits() -> None:
    """Both were taken; the engine ended with the first."""
    box = Box()
    made, left = (box.ask((name(n), 0), "freeze") for n in range(2))
    taken = box.take()
    taken.commands.popleft()
    later = box.ask((name(2), 0), "freeze")
    box.close("the first was too much")
    for answer in (left, later):
        with pytest.raises(EngineStoppedError, match="the first was too much"):
            answer.result(0)
    assert not made.done(), "it is settled by whoever took it out"
