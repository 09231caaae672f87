"""How many requests of a batch are in flight, and when a request is sent again."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.clock import SystemClock
from deployments.jobs.pace import ClosedError, Gate, Pace
from deployments.jobs.sender import Fate, judge
from deployments.jobs.tally import Tally, duration, log_line


@dataclass
class Round:
    """Of requests that go out together: as many as the limit allows."""

    pace: Pace
    now_s: float = 0.0

    def accept(self) -> None:
        sent = int(self.pace.limit)
        for _ in range(sent):
            self.pace = self.pace.accepted(int(self.pace.limit))
        self.now_s += 1

    def refuse(self) -> None:
        sent, sent_s = int(self.pace.limit), self.now_s + 0.5
        self.now_s += 1
        for _ in range(sent):
            self.pace = self.pace.refused(sent_s, self.now_s, 1.0, 0.0)


def test_it_doubles_until_the_first_refusal_and_then_grows_by_about_one_a_round() -> None:
    rounds = Round(Pace(4.0, 1000))
    limits = []
    for _ in range(4):
        rounds.accept()
        limits.append(int(rounds.pace.limit))
    assert limits == [8, 16, 32, 64]
    rounds.refuse()
    assert rounds.pace.limit == 32  # halved once, however many of a round are refused
    rounds.accept()
    assert 32.9 < rounds.pace.limit <= 33


def test_after_a_wave_of_refusals_it_comes_back_fast_to_half_of_what_it_was() -> None:
    rounds = Round(Pace(64.0, 1000))
    for _ in range(10):
        rounds.refuse()
    assert rounds.pace.limit == 1
    for _ in range(6):
        rounds.accept()
    assert 32 <= rounds.pace.limit <= 34


def test_what_is_not_used_does_not_grow() -> None:
    pace = Pace(8.0, 100)
    assert pace.accepted(7).limit == 8
    assert pace.accepted(8).limit == 9


@given(
    st.integers(1, 300),
    st.lists(st.tuples(st.booleans(), st.floats(0, 100), st.floats(0, 1e6), st.integers(0, 300)), max_size=60),
    st.floats(0, 1, exclude_max=True),
)
def test_the_limit_keeps_its_bounds_and_no_pause_is_longer_than_a_minute(
    limit_max: int, events: list[tuple[bool, float, float, int]], chance: float
) -> None:
    pace, now_s = Pace(1.0, limit_max), 0.0
    for accepted, later_s, pause_s, in_flight in events:
        now_s += later_s
        before = pace
        pace = pace.accepted(in_flight) if accepted else pace.refused(now_s - later_s, now_s, pause_s, chance)
        assert 1 <= pace.limit <= max(limit_max, 1)
        assert pace.paused_until_s <= now_s + 60 or pace.paused_until_s == before.paused_until_s
        assert pace.limit >= before.limit if accepted else pace.limit <= before.limit
        assert accepted or now_s - later_s <= before.halved_s or pace.paused_until_s >= now_s + 0.5


def test_refusals_that_say_no_time_are_asked_after_twice_as_long_each_time_until_one_is_accepted() -> None:
    def pauses(pace: Pace, chance: float) -> tuple[Pace, list[float]]:
        found, now_s = [], 1000.0
        for _ in range(4):
            pace = pace.refused(now_s, now_s, 0.0, chance)
            found.append(pace.paused_until_s - now_s)
            now_s = pace.paused_until_s
        return pace, found

    pace, found = pauses(Pace(8.0, 100), 0.0)
    assert found == [0.5, 1.0, 2.0, 4.0]
    assert pace.refused(pace.paused_until_s, pace.paused_until_s, 3.0, 0.9).paused_until_s == pace.paused_until_s + 3
    now_s = pace.paused_until_s
    assert pace.accepted(1).refused(now_s, now_s, 0.0, 0.0).paused_until_s == now_s + 0.5
    assert pauses(Pace(8.0, 100), 0.5)[1] == [0.75, 1.5, 3.0, 6.0]


@pytest.mark.parametrize(
    ("status", "headers", "fate"),
    [
        (200, {}, (Fate.FINAL, 0)),
        (400, {}, (Fate.FINAL, 0)),
        (404, {}, (Fate.FINAL, 0)),
        (413, {}, (Fate.FINAL, 0)),
        (429, {"retry-after": "7"}, (Fate.REFUSED, 7)),
        (429, {}, (Fate.REFUSED, 1)),
        (429, {"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}, (Fate.REFUSED, 1)),
        (503, {"retry-after": "2"}, (Fate.REFUSED, 2)),
        (504, {"retry-after": "60"}, (Fate.REFUSED, 60)),
        (504, {}, (Fate.BROKEN, 0)),
        (500, {}, (Fate.BROKEN, 0)),
        (500, {"x-should-retry": "false"}, (Fate.FINAL, 0)),
        (429, {"x-should-retry": "false", "retry-after": "1"}, (Fate.FINAL, 0)),
        (502, {}, (Fate.BROKEN, 0)),
        (301, {"location": "/"}, (Fate.BROKEN, 0)),
        (429, {"retry-after": "0"}, (Fate.REFUSED, 0)),
        (408, {}, (Fate.BROKEN, 0)),
    ],
)
def test_what_an_answer_means_for_its_line(status: int, headers: dict[str, str], fate: tuple[Fate, float]) -> None:
    assert judge(status, headers) == fate


async def test_who_tries_again_goes_before_who_begins() -> None:
    gate = Gate(Pace(1.0, 1), SystemClock())
    await gate.begin()
    await gate.enter()
    entered: list[str] = []

    async def again() -> None:
        await gate.enter()
        entered.append("again")
        gate.leave(lambda pace: pace)
        gate.end()

    async def begin() -> None:
        await gate.begin()
        entered.append("new")

    tasks = [asyncio.create_task(begin()), asyncio.create_task(again())]
    await asyncio.sleep(0)
    gate.leave(lambda pace: pace)
    await asyncio.gather(*tasks)
    assert entered == ["again", "new"]


async def test_nothing_is_sent_while_a_refusals_time_runs_and_all_goes_on_after_it() -> None:
    clock = SystemClock()
    gate = Gate(Pace(4.0, 4), clock)
    await gate.begin()
    sent_s = await gate.enter()
    gate.leave(lambda pace: pace.refused(sent_s, clock.monotonic(), 0.6, 0.0))
    paused_s = clock.monotonic()
    await asyncio.gather(gate.enter(), gate.begin())
    assert clock.monotonic() - paused_s >= 0.59


async def test_a_closed_gate_lets_nobody_through_and_one_who_gives_up_takes_no_place() -> None:
    gate = Gate(Pace(1.0, 1), SystemClock())
    await gate.begin()
    waiting = asyncio.create_task(gate.begin())
    leaving = asyncio.create_task(gate.begin())
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.wait([leaving])
    gate.end()
    await waiting
    assert gate.open_lines == 1
    late = asyncio.create_task(gate.begin())
    await asyncio.sleep(0)
    gate.close()
    with pytest.raises(ClosedError):
        await late
    with pytest.raises(ClosedError):
        await gate.enter()


async def test_who_is_cancelled_as_its_turn_comes_gives_it_on() -> None:
    gate = Gate(Pace(1.0, 1), SystemClock())
    await gate.begin()
    first, second = (asyncio.create_task(gate.begin()) for _ in range(2))
    await asyncio.sleep(0)
    gate.end()
    first.cancel()  # it was given its turn, and has not run since
    await asyncio.wait_for(second, 5)
    assert gate.open_lines == 1


def test_rates_are_of_the_last_minute() -> None:
    tally = Tally(lines=1000, done=100, failed=1, began_s=0.0)
    for second in range(1, 121):
        for _ in range(1 if second <= 60 else 3):
            tally.add(failed=False, output_tokens=10)
        now = tally.standing(float(second), 5, 8)
    assert now.lines_per_s == pytest.approx(3, rel=0.05)
    assert now.output_tokens_per_s == pytest.approx(30, rel=0.05)
    assert now.eta_s == pytest.approx((1000 - 100 - 240) / 3, rel=0.05)
    line = log_line(now)
    assert "340 of 1,000 done" in line
    assert "5 of    8 in flight" in line
    assert "ETA 3 min" in line


@pytest.mark.parametrize(("seconds", "words"), [(5.4, "5 s"), (65, "1 min 05 s"), (7260, "2 h 01 min")])
def test_durations_are_said_as_people_say_them(seconds: float, words: str) -> None:
    assert duration(seconds) == words
