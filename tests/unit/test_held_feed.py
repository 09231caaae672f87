"""What a replica tells the controller of the attempts that are here, by an engine that answers when the test has it do so."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import pytest

from cluster.engine.inbox import EngineBusyError, EngineStoppedError
from cluster.messages import HeldRequest, Standing
from cluster.ports import HeldAttempt
from cluster.types import EngineLoad, PriorityLoad, RequestId, RouterId
from deployments.held import HeldFeed, short_of_room
from tests.unit.fake_replica import ManualClock

Answer = Future[tuple[HeldAttempt, ...]]
EMPTY = EngineLoad(slots_total=4, blocks_total=8, blocks_free=8, block_size_tokens=16)
ROOMY = EngineLoad(slots_total=4, blocks_total=8, blocks_free=7, block_size_tokens=16, running=(PriorityLoad(0, 1, 1),))
BUSY = EngineLoad(slots_total=4, blocks_total=8, blocks_free=3, block_size_tokens=16, running=(PriorityLoad(0, 2, 5),))


def attempt(name: str, number: int = 1) -> HeldAttempt:
    return HeldAttempt(
        request_id=RequestId(name),
        attempt=number,
        priority=3,
        standing=Standing.PAUSED,
        blocks=2,
        tokens=33,
        remaining_tokens=7,
        to_compute_tokens=5,
    )


@dataclass
class Played:
    """The engine, the loop and the server."""

    clock: ManualClock = field(default_factory=ManualClock)
    asked: list[tuple[int, Answer]] = field(default_factory=list)
    posted: list[Callable[[], None]] = field(default_factory=list)
    owners: dict[RequestId, RouterId] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.feed = HeldFeed(self, self.clock, lambda h: self.owners.get(h.request_id), self._post)  # type: ignore[arg-type]

    def held(self, limit: int) -> Answer:
        self.asked.append((limit, Answer()))
        return self.asked[-1][1]

    def _post(self, function: Callable[[Answer], None], argument: Answer) -> None:
        self.posted.append(lambda: function(argument))

    def turn(self) -> None:
        """The loop does what other threads have left for it."""
        while self.posted:
            self.posted.pop()()

    def answered(self, *attempts: HeldAttempt) -> None:
        self.asked[-1][1].set_result(attempts)
        self.turn()


def test_what_the_engine_holds_is_told_with_whose_it_is() -> None:
    p = Played(owners={RequestId("a"): RouterId("x"), RequestId("c"): RouterId("y")})
    assert p.feed.told(BUSY) == ()
    assert [limit for limit, _ in p.asked] == [16]
    p.answered(attempt("a"), attempt("over"), attempt("c", 4))
    assert p.feed.told(BUSY) == (
        HeldRequest(RequestId("a"), 1, RouterId("x"), 3, Standing.PAUSED, 2, 33, 7, 5),
        HeldRequest(RequestId("c"), 4, RouterId("y"), 3, Standing.PAUSED, 2, 33, 7, 5),
    )
    del p.owners[RequestId("a")]
    told = p.feed.told(BUSY)
    assert told is not None
    assert [h.request_id for h in told] == ["c"], "it has ended since, or moves"


def test_the_engine_is_asked_ten_times_a_second_at_most_and_never_twice_at_once() -> None:
    p = Played()
    for _ in range(100):
        p.feed.told(BUSY)
        p.clock.advance(0.1)
    assert len(p.asked) == 1, "it has not answered"
    p.answered()
    for _ in range(50):
        p.feed.told(BUSY)
        if len(p.asked) > 1 and not p.asked[-1][1].done():
            p.answered()
        p.clock.advance(0.01)
    assert len(p.asked) == 1 + 5, "at once, and after each tenth of a second of the half"


@pytest.mark.parametrize("error", [EngineBusyError("64 calls are waiting"), EngineStoppedError("it has ended")])
def test_one_that_does_not_answer_is_taken_to_hold_nothing_and_is_asked_again(error: Exception) -> None:
    p = Played(owners={RequestId("a"): RouterId("x")})
    p.feed.told(BUSY)
    p.answered(attempt("a"))
    p.clock.advance(0.25)
    p.feed.told(BUSY)
    p.asked[-1][1].set_exception(error)
    p.turn()
    assert p.feed.told(BUSY) == ()
    p.clock.advance(0.25)
    p.feed.told(BUSY)
    assert len(p.asked) == 3


def test_of_a_replica_with_room_and_nobody_waiting_nothing_is_told_nor_asked() -> None:
    p = Played(owners={RequestId("a"): RouterId("x")})
    p.feed.told(BUSY)
    p.answered(attempt("a"))
    p.clock.advance(1.0)
    assert p.feed.told(EMPTY) is None
    assert len(p.asked) == 1
    assert p.feed.told(BUSY) == (), "what was so before is not so now"


def test_while_the_controller_weighs_what_runs_is_told_however_much_room_there_is() -> None:
    p = Played(owners={RequestId("a"): RouterId("x")})
    assert p.feed.told(ROOMY) is None
    p.feed.weigh(2.0)
    assert p.feed.told(ROOMY) == ()
    p.answered(attempt("a"))
    p.clock.advance(1.9)
    told = p.feed.told(ROOMY)
    assert told is not None
    assert [h.request_id for h in told] == ["a"]
    assert p.feed.told(EMPTY) is None, "nothing runs there"
    p.clock.advance(0.2)
    assert p.feed.told(ROOMY) is None


@pytest.mark.parametrize(
    ("running", "waiting", "blocks_free", "short"),
    [(0, 0, 8, False), (2, 0, 4, False), (3, 0, 8, True), (1, 0, 3, True), (0, 1, 8, True)],
)
def test_it_is_short_of_room_where_somebody_waits_or_less_than_half_is_free(
    running: int, waiting: int, blocks_free: int, short: bool
) -> None:
    levels = [(PriorityLoad(0, n, 0),) if n else () for n in (running, waiting)]
    load = EngineLoad(
        slots_total=4,
        blocks_total=8,
        blocks_free=blocks_free,
        block_size_tokens=16,
        running=levels[0],
        waiting=levels[1],
    )
    assert short_of_room(load) is short
