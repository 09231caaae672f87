"""Where a model has no replica and one is started for who waits, requests wait for it: bounded as ever, and told of."""

from __future__ import annotations

import pytest

from cluster.config import PriorityClass, RouterConfig
from cluster.messages import FirstTokens
from cluster.types import Outcome, ReplicaState
from tests.unit.fake_replica import Bench

SOON = PriorityClass(name="standard", priority=0, longest_wait_s=60)


def asleep(config: RouterConfig | None = None) -> Bench:
    bench = Bench(config, wakes=True)
    bench.core.tick()
    return bench


def tick(bench: Bench, seconds: int) -> None:
    for _ in range(seconds):
        bench.clock.advance(1.0)
        bench.core.tick()


def test_a_request_that_comes_when_there_is_no_replica_waits_for_one() -> None:
    bench = asleep()
    assert bench.core.ready, "a balancer that took this router away would take the requests that wake the model"
    tick(bench, 3600)
    request = bench.submit("a", tokens=1)
    assert bench.outcome(request) is None
    tick(bench, 100)
    bench.replica().turn()
    assert bench.outcome(request) is Outcome.FINISHED


@pytest.mark.parametrize("end", ["dies", "drains"])
def test_it_waits_too_when_the_last_one_leaves(end: str) -> None:
    bench = asleep()
    last = bench.replica("last")
    if end == "dies":
        last.die()
    else:
        last.state = ReplicaState.DRAINING
        last.beat()
    bench.clock.advance(RouterConfig().no_replica_grace_s + 1)
    if end == "drains":
        last.beat()
    request = bench.submit("a", tokens=1)
    assert bench.outcome(request) is None
    bench.replica("next").turn()
    assert bench.outcome(request) is Outcome.FINISHED


def test_it_waits_no_longer_than_its_class_allows() -> None:
    bench = asleep(RouterConfig(classes=(SOON,)))
    request = bench.submit("a")
    tick(bench, 59)
    assert bench.outcome(request) is None
    tick(bench, 2)
    assert bench.outcome(request) is Outcome.EXPIRED_IN_QUEUE


def test_no_more_wait_than_the_class_has_room_for() -> None:
    few = PriorityClass(name="standard", priority=0, max_queued_requests=2)
    bench = asleep(RouterConfig(classes=(few,)))
    requests = [bench.submit(f"r{number}") for number in range(3)]
    assert [bench.outcome(r) for r in requests] == [None, None, Outcome.REJECTED_QUEUE_FULL]


def test_the_time_that_a_replica_takes_to_start_does_not_count_as_a_slow_queue() -> None:
    """A queue that drained quickly, then a start of 59 s: whoever comes in its last second is let in."""
    bench = asleep(RouterConfig(classes=(SOON,)))
    replica = bench.replica("first", slots=1)
    early = [bench.submit(f"e{number}", tokens=2) for number in range(8)]
    for _ in range(8):
        bench.clock.advance(0.5)
        bench.core.tick()
        replica.turn()
        replica.turn()
    assert all(bench.outcome(r) is Outcome.FINISHED for r in early)
    replica.die()
    bench.core.tick()
    first = bench.submit("first-waits", tokens=2)
    tick(bench, 59)
    last = bench.submit("last-comes", tokens=2)
    assert [bench.outcome(r) for r in (first, last)] == [None, None]
    bench.replica("second", slots=2).turn()
    bench.peers[replica.replica_id].die()


def test_a_router_that_drains_is_not_ready_and_takes_nothing_even_so() -> None:
    bench = asleep()
    bench.core.retire()
    assert not bench.core.ready
    bench.core.shut_down()
    assert bench.outcome(bench.submit("a")) is Outcome.REJECTED_DRAINING


def test_what_waits_is_told_though_no_replica_is_reached_and_that_it_waits_no_more() -> None:
    """The controller starts a replica by it; no gate follows from it, for nothing could be let out."""
    bench = asleep()
    assert bench.core.demand("m") is None
    requests = [bench.submit("a", tokens=10, prompt=8), bench.submit("b", "batch", tokens=20, prompt=4)]
    demand = bench.core.demand("m")
    assert demand is not None
    assert (demand.queued, demand.heads, [b.waiting for b in demand.bands]) == (2, (), [0, 0])
    weight = bench.config.output_token_weight
    assert demand.queued_service == 8 + 4 + weight * (10 + 20)
    bench.core.told(demand)
    for request in requests:
        bench.core.cancel(request.request_id)
    over = bench.core.demand("m")
    assert over is not None
    assert (over.queued, over.queued_service) == (0, 0.0)
    bench.core.told(over)
    assert bench.core.demand("m") is None


def test_first_tokens_are_told_by_class_as_in_time_or_late_where_the_class_has_an_aim() -> None:
    aims = PriorityClass(name="standard", priority=0, first_token_slo_s=2.0)
    bench = Bench(RouterConfig(classes=(aims, PriorityClass(name="batch", priority=-10))))
    replica = bench.replica()
    for name, waits_s in (("a", 1.9), ("b", 2.1), ("c", 0.1)):
        for priority_class in ("standard", "batch"):
            bench.submit(f"{name}-{priority_class}", priority_class, tokens=5)
        bench.clock.advance(waits_s)
        replica.turn()
        replica.turn()
    demand = bench.core.demand("m")
    assert demand is not None
    assert demand.first_tokens == (FirstTokens("standard", 2, 1),)
