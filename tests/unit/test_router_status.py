"""What a router says of its own state: live moves under way, and how long the oldest of each band has waited."""

from __future__ import annotations

import pytest

from router.status import MOVES_SHOWN
from tests.unit.fake_replica import Bench
from tests.unit.test_router_moves import CONFIG, draining_pair, finish, pair


def test_a_move_is_told_from_its_asking_until_its_request_is_there() -> None:
    bench = Bench(CONFIG)
    (request,) = draining_pair(bench, "a")
    source, target = pair(bench)
    assert bench.core.moves() == ()
    bench.core.tick()
    (asked,) = bench.core.moves()
    assert (asked.request_id, asked.priority_class, asked.source, asked.target) == ("a", "standard", "r1", "r2")
    assert (asked.stage, asked.age_s, asked.why) == ("asked", 0.0, "it drains")
    bench.clock.advance(0.25)
    source.turn()
    (granted,) = bench.core.moves()
    assert (granted.stage, granted.age_s) == ("granted", 0.25)
    bench.clock.advance(0.02)
    target.turn()
    assert bench.core.moves() == ()
    finish(bench, request, source, target)


def test_moves_that_are_told_are_bounded() -> None:
    bench = Bench(CONFIG.model_copy(update={"moves_at_once": 2 * MOVES_SHOWN}))
    slots = MOVES_SHOWN + 5
    draining_pair(bench, *(f"r-{number}" for number in range(slots)), slots=slots)
    bench.core.tick()
    assert len(bench.core._moves) == slots
    assert [move.request_id for move in bench.core.moves()] == [f"r-{number}" for number in range(MOVES_SHOWN)]


def test_the_oldest_of_a_band_is_the_one_that_arrived_first_of_those_that_wait() -> None:
    bench = Bench()
    replica = bench.replica("r1", slots=1)
    bench.submit("runs")
    for name in ("first", "second"):
        bench.clock.advance(1.0)
        bench.submit(name)
    bench.clock.advance(0.5)
    (band,) = bench.core.bands()
    assert (band.queued_requests, band.running_requests) == (2, 1)
    assert band.oldest_s == pytest.approx(1.5, abs=0.01)
    for _ in range(4):
        replica.turn()
    (band,) = bench.core.bands()
    assert (band.queued_requests, band.running_requests) == (1, 1)
    assert band.oldest_s == pytest.approx(0.5, abs=0.01)
    for _ in range(4):
        replica.turn()
    (band,) = bench.core.bands()
    assert (band.queued_requests, band.oldest_s) == (0, None)
