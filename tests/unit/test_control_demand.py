"""What is asked of a model and what one replica does, measured from what routers and replicas tell."""

from __future__ import annotations

import msgspec
import pytest

from cluster.control.demand import NEW_S, SLOW_S, STALE_AFTER_S, Meter
from cluster.messages import FirstTokens, RosterEntry
from cluster.types import EngineLoad, ReplicaState, RouterId
from tests.unit.scale_model import ROUTER, engine_load, entry, report, router_demand

ONE, TWO = entry("one"), entry("two", host="h2", zone="z")
OTHER = RouterId("other")
AVERAGE_S = 30.0


class Told:
    """A meter that is told every second."""

    def __init__(self, prompt_token_weight: float = 1.0, output_token_weight: float = 1.0) -> None:
        self.meter = Meter(prompt_token_weight, output_token_weight, 0.0, AVERAGE_S)
        self.now_s = 0.0

    def replica(self, of: RosterEntry, load: EngineLoad, *, retiring: bool = False) -> None:
        state = ReplicaState.DRAINING if retiring else ReplicaState.READY
        self.meter.replica(of, report(of, load, state), retiring=retiring, now_s=self.now_s)

    def router(self, sent: float, queued: int = 0, queued_service: float = 0.0, of: RouterId = ROUTER) -> None:
        self.meter.router(of, router_demand(queued, queued_service, sent), self.now_s)

    def second(self) -> None:
        self.now_s += 1.0
        self.meter.load(self.now_s)


def steady(
    told: Told, seconds: int, *, tokens_per_s: int, sent_per_s: float, running: int = 1, queued: int = 0
) -> None:
    """One replica and one router; counts go on from where the last call left them."""
    for _ in range(seconds):
        told.second()
        told.replica(ONE, engine_load(running, tokens_total=round(told.now_s * tokens_per_s)))
        told.router(told.now_s * sent_per_s, queued, 100.0 * queued)


def test_nothing_is_known_of_what_has_not_been_measured() -> None:
    load = Told().meter.load(0.5)
    assert (load.demand_per_s, load.full_per_s, load.occupied, load.routers) == (None, None, None, 0)


def test_what_a_controller_before_has_measured_of_a_full_replica_holds_until_one_is_full_again() -> None:
    told = Told()
    told.meter.router_here(ROUTER)
    demand = msgspec.structs.replace(router_demand(0, 0.0, 0.0), of_one_per_s=250.0)
    told.meter.router(ROUTER, demand, told.now_s)
    assert told.meter.load(0.5).full_per_s == 250
    steady(told, 60, tokens_per_s=100, sent_per_s=100)
    assert told.meter.load(told.now_s).full_per_s == 250, "none was full"
    steady(told, 20, tokens_per_s=100, sent_per_s=100, running=8)
    assert told.meter.load(told.now_s).full_per_s == pytest.approx(100, rel=0.05)


def test_demand_is_what_is_done_in_service_of_prompt_and_output_tokens() -> None:
    told = Told(prompt_token_weight=1.0, output_token_weight=2.0)
    told.meter.router_here(ROUTER)
    for second in range(1, 200):
        told.second()
        told.replica(ONE, engine_load(1, tokens_total=50 * second, prefill_tokens_total=30 * second))
        told.replica(TWO, engine_load(1, tokens_total=10 * second, prefill_tokens_total=0))
    load = told.meter.load(told.now_s)
    assert load.demand_per_s == pytest.approx(30 + 2 * 50 + 2 * 10, rel=0.02)
    assert load.full_per_s is None


def test_occupied_are_the_slots_of_all_that_runs_and_waits_on_average() -> None:
    """2 of 8, and 3 + 1 of 16, in every second second."""
    told = Told()
    for second in range(1, 300):
        told.second()
        told.replica(ONE, engine_load(2 * (second % 2)))
        told.replica(TWO, engine_load(3 * (second % 2), second % 2, slots=16))
    assert told.meter.load(told.now_s).occupied == pytest.approx((2 / 8 + 4 / 16) / 2, abs=0.01)


def test_what_arrives_counts_before_it_is_done() -> None:
    """Twice as much is sent out for 10 s, and the replica does no more than before."""
    told = Told()
    told.meter.router_here(ROUTER)
    steady(told, 600, tokens_per_s=100, sent_per_s=100)
    sent = told.now_s * 100
    for second in range(1, 31):
        told.second()
        told.replica(ONE, engine_load(1, tokens_total=round(told.now_s * 100)))
        told.router(sent + 200 * second)
    demand = told.meter.load(told.now_s).demand_per_s
    expected = 100 + 100 * (1 - 2.718281828 ** (-30 / AVERAGE_S))
    assert demand == pytest.approx(expected, rel=0.12), "of what was sent out lately a little less was done"


@pytest.mark.parametrize("expected_per_s", [25.0, 400.0])
def test_what_routers_expect_wrongly_does_not_count_as_demand(expected_per_s: float) -> None:
    """100 tokens a second are done of what is sent out as 25, or as 400."""
    told = Told()
    told.meter.router_here(ROUTER)
    steady(told, 900, tokens_per_s=100, sent_per_s=expected_per_s)
    assert told.meter.load(told.now_s).demand_per_s == pytest.approx(100, rel=0.05)
    steady(told, 1, tokens_per_s=100, sent_per_s=expected_per_s, queued=4)
    really = told.meter.load(told.now_s).queued_service
    assert really == pytest.approx(400 * 100 / expected_per_s, rel=0.05)


def test_what_one_does_is_measured_while_it_is_full_and_remembered() -> None:
    told = Told()
    steady(told, 30, tokens_per_s=40, sent_per_s=40, running=3)
    assert told.meter.load(told.now_s).full_per_s is None
    done = 30 * 40
    for second in range(1, 31):
        told.second()
        told.replica(ONE, engine_load(8, tokens_total=done + 250 * second))
    assert told.meter.load(told.now_s).full_per_s == pytest.approx(250, rel=0.01)
    for second in range(1, 601):
        told.second()
        told.replica(ONE, engine_load(2, tokens_total=done + 250 * 30 + 20 * second))
    assert told.meter.load(told.now_s).full_per_s == pytest.approx(250, rel=0.01)


@pytest.mark.parametrize(
    "load",
    [
        {"running": 8},
        {"running": 2, "waiting": 1},
        {"running": 2, "blocks_free": 99},
    ],
)
def test_full_is_without_slots_or_blocks_or_with_work_that_waits(load: dict[str, int]) -> None:
    told = Told()
    for second in range(1, 10):
        told.second()
        told.replica(ONE, engine_load(**load, tokens_total=100 * second))
    assert told.meter.load(told.now_s).full_per_s == pytest.approx(100)


def test_a_replica_that_has_been_there_is_full_while_requests_wait_in_a_router() -> None:
    """Between two requests a slot is free: with few slots that is most of the time."""
    told = Told()
    told.meter.router_here(ROUTER)
    for second in range(1, 30):
        told.second()
        told.replica(ONE, engine_load(5, tokens_total=100 * second))
        if told.now_s > 30 - NEW_S:
            told.replica(TWO, engine_load(1, tokens_total=second))
        told.router(100.0 * second, queued=3, queued_service=300.0)
    assert told.meter.load(told.now_s).full_per_s == pytest.approx(100), "and of the new one nothing is known"


def test_a_full_replica_that_does_nothing_is_stuck_and_no_measure() -> None:
    told = Told()
    for second in range(1, 30):
        told.second()
        told.replica(ONE, engine_load(8, tokens_total=100 * min(second, 9)))
    assert told.meter.load(told.now_s).full_per_s == pytest.approx(100)


def test_what_a_router_had_before_it_was_first_heard_has_not_arrived_just_now() -> None:
    told = Told()
    told.meter.router_here(ROUTER)
    told.router(1e9, queued=7, queued_service=1e6)
    for _ in range(10):
        told.second()
        told.router(1e9, queued=7, queued_service=1e6)
    load = told.meter.load(told.now_s)
    assert load.demand_per_s == 0.0
    assert (load.queued, load.queued_service) == (7, 1e6)


def test_a_router_that_starts_anew_under_its_id_takes_nothing_off() -> None:
    told = Told()
    told.meter.router_here(ROUTER)
    for second in range(1, 10):
        told.second()
        told.router(100.0 * second)
    told.meter.router_here(ROUTER)
    for second in range(1, 10):
        told.second()
        told.router(100.0 * second)
    demand = told.meter.load(told.now_s).demand_per_s
    assert demand is not None
    assert demand >= 80


def test_what_waits_is_forgotten_with_its_router_or_its_silence() -> None:
    told = Told()
    told.meter.router_here(ROUTER)
    told.meter.router_here(OTHER)
    told.router(0.0, queued=2, queued_service=20.0)
    told.router(0.0, queued=5, queued_service=50.0, of=OTHER)
    assert told.meter.load(0.0).queued == 7
    told.meter.router_gone(OTHER)
    assert (told.meter.load(0.0).queued, told.meter.load(0.0).routers) == (2, 1)
    assert told.meter.load(STALE_AFTER_S + 0.1).queued == 0


def test_replicas_that_are_silent_or_gone_are_not_there() -> None:
    told = Told()
    told.replica(ONE, engine_load(2, 1))
    told.replica(TWO, engine_load(), retiring=True)
    one, two = told.meter.load(0.0).replicas
    assert (one.requests, one.blocks, one.state, one.retiring) == (3, 20, ReplicaState.READY, False)
    assert (two.machine, two.zone, two.state, two.retiring) == ("h2", "z", ReplicaState.DRAINING, True)
    told.meter.replica_gone(ONE.replica_id, entry("one", number=2).generation)
    assert len(told.meter.load(0.0).replicas) == 2, "another incarnation of it has gone"
    told.meter.replica_gone(ONE.replica_id, ONE.generation)
    assert [r.replica_id for r in told.meter.load(0.0).replicas] == ["two"]
    assert told.meter.load(STALE_AFTER_S + 0.1).replicas == ()


def test_a_new_incarnation_counts_from_its_own_zero() -> None:
    told = Told()
    steady(told, 600, tokens_per_s=100, sent_per_s=100)
    for second in range(1, 60):
        told.second()
        told.replica(entry("one", number=2), engine_load(1, tokens_total=100 * second))
    assert told.meter.load(told.now_s).demand_per_s == pytest.approx(100, rel=0.1)


def first_tokens(told: Told, in_time: int, late: int, name: str = "interactive", of: RouterId = ROUTER) -> None:
    demand = msgspec.structs.replace(router_demand(0, 0.0, 0.0), first_tokens=(FirstTokens(name, in_time, late),))
    told.meter.router(of, demand, told.now_s)


def test_attained_is_the_part_of_late_first_tokens_in_time_of_the_class_that_stands_worst() -> None:
    told = Told()
    told.meter.router_here(ROUTER)
    told.meter.router_here(OTHER)
    first_tokens(told, 900, 100)
    first_tokens(told, 0, 0, of=OTHER)
    assert told.meter.load(0.0).attained is None, "what was before says nothing of now"
    first_tokens(told, 905, 101)
    assert told.meter.load(0.0).attained is None, "too few"
    first_tokens(told, 6, 2, of=OTHER)
    assert told.meter.load(0.0).attained == pytest.approx(11 / 14)
    first_tokens(told, 12, 0, "standard")
    assert told.meter.load(0.0).attained == pytest.approx(11 / 14)


def test_late_first_tokens_are_forgotten_in_time_and_when_a_replica_comes() -> None:
    told = Told()
    told.meter.router_here(ROUTER)
    first_tokens(told, 0, 0)
    first_tokens(told, 10, 90)
    told.second()
    assert told.meter.load(told.now_s).attained == pytest.approx(0.1)
    for _ in range(round(3 * AVERAGE_S)):
        told.second()
    first_tokens(told, 110, 90)
    attained = told.meter.load(told.now_s).attained
    assert attained is not None
    assert attained > 0.95
    first_tokens(told, 110, 190)
    told.replica(ONE, engine_load(1))
    assert told.meter.load(told.now_s).attained is None


def test_idle_is_the_time_without_any_request_anywhere() -> None:
    told = Told()
    told.meter.router_here(ROUTER)
    assert told.meter.load(5.0).idle_s == 5.0
    told.now_s = 10.0
    told.replica(ONE, engine_load(1))
    assert told.meter.load(14.0).idle_s == 4.0
    told.now_s = 20.0
    told.replica(ONE, engine_load(0))
    assert told.meter.load(20.0).idle_s == 10.0
    told.now_s = 30.0
    told.router(0.0, queued=1)
    assert told.meter.load(30.0).idle_s == 0.0


def test_memory_of_a_burst_fades_within_minutes() -> None:
    told = Told()
    told.meter.router_here(ROUTER)
    steady(told, 60, tokens_per_s=1000, sent_per_s=1000)
    busy = told.meter.load(told.now_s).demand_per_s
    assert busy == pytest.approx(1000, rel=0.1)
    tokens, sent = told.now_s * 1000, told.now_s * 1000
    for _ in range(round(SLOW_S)):
        told.second()
        told.replica(ONE, engine_load(tokens_total=round(tokens)))
        told.router(sent)
    demand = told.meter.load(told.now_s).demand_per_s
    assert demand is not None
    assert demand < 1.0
