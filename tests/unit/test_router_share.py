"""A less urgent band gets its minimum share and no more, nobody is left to starve, and running work is never immune."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from cluster.config import PriorityClass, RouterConfig
from cluster.types import Outcome, PriorityLoad, ReplicaId, Request, RequestId
from router.queue import Waiting
from router.routing import Need, Placement, choose
from router.share import MinimumShares
from router.view import Condition, ReplicaView, SharedLoad
from tests.unit.fake_replica import Bench, FakeReplica
from tests.unit.test_router_routing import load


def head(name: str, priority: int, service: int = 100, since: float = 0.0) -> Waiting:
    return Waiting(RequestId(name), priority, name[0], 0.0, 1, service=service, since_s=since)


# --- the credit ---


def test_class_is_due_once_it_is_old_enough_and_its_share_of_what_was_sent_pays_for_its_next() -> None:
    shares = MinimumShares(0.02, ageing_after_s=30)
    heads = [head("urgent", 10), head("low", 0)]
    for _ in range(49):
        shares.sent(100, heads)
    assert shares.due(heads, 31.0) is None, "98 of 100"
    shares.sent(100, heads)
    assert shares.due(heads, 30.0) is None, "not old enough"
    assert shares.due(heads, 30.1) == heads[1]
    shares.spend(heads[1])
    assert shares.due(heads, 30.1) is None


def test_credit_is_never_more_than_the_next_request_takes_and_is_gone_with_the_backlog() -> None:
    shares = MinimumShares(0.02, ageing_after_s=1)
    low = [head("urgent", 10), head("low", 0)]
    shares.sent(10**9, low)
    shares.spend(low[1])
    assert shares.due(low, 9.0) is None
    shares.sent(10**9, low)
    shares.sent(100, low[:1])
    assert shares.due(low, 9.0) is None


def test_what_a_class_gets_in_its_turn_counts_against_its_share() -> None:
    shares = MinimumShares(0.02, ageing_after_s=1)
    low = [head("urgent", 10), head("low", 0)]
    shares.sent(10**9, low)
    shares.spend(head("low", 0, service=60))
    assert shares.due(low, 9.0) is None


def test_the_most_urgent_class_needs_no_share_and_of_several_the_longest_waiting_goes() -> None:
    shares = MinimumShares(0.5, ageing_after_s=1)
    heads = [head("urgent", 10), head("standard", 0, since=3.0), head("batch", -10, since=2.0)]
    shares.sent(10**6, heads)
    due = shares.due(heads, 9.0)
    assert due is not None
    assert due.request_id == "batch"
    assert shares.due(heads[:1], 9.0) is None
    assert MinimumShares(0.0, 1).due(heads, 9.0) is None


# --- running work is not immune ---


def test_work_that_a_share_sent_out_stands_before_what_waited_then_and_before_nothing_later() -> None:
    engine = load(slots=1, running=(PriorityLoad(-10, 1, 1),), used=1)
    view = ReplicaView(
        replica_id=ReplicaId("r"),
        condition=Condition.ROUTABLE,
        load=engine,
        shared=(SharedLoad(-10, 1, 1, since_s=5.0),),
    )
    rng = random.Random(0)
    assert choose(Need(10, 16, 16, arrived_s=5.0), [view], rng) is None
    assert choose(Need(10, 16, 16, arrived_s=5.1), [view], rng) == Placement(ReplicaId("r"), 1, victims=1)


def test_work_that_a_share_sent_out_and_that_has_not_begun_has_its_slot_before_what_waited_then() -> None:
    """Another router's urgent request took the slot that it was sent to; the next one is its own."""
    engine = load(slots=2, running=(PriorityLoad(10, 1, 1),), waiting=(PriorityLoad(-10, 1, 0),), used=1)
    rng = random.Random(0)
    for shared, waited in (((SharedLoad(-10, 1, 0, since_s=5.0),), None), ((), Placement(ReplicaId("r"), 1))):
        view = ReplicaView(replica_id=ReplicaId("r"), condition=Condition.ROUTABLE, load=engine, shared=shared)
        assert choose(Need(10, 16, 16, arrived_s=5.0), [view], rng) == waited
        assert choose(Need(10, 16, 16, arrived_s=5.1), [view], rng) == Placement(ReplicaId("r"), 1)


def test_later_urgent_work_displaces_what_a_share_sent_out_at_once() -> None:
    bench = flooded(slots=1, longest_urgent_s=600)
    replica = replica_of(bench)
    low = bench.submit("low", "batch", tokens=50)
    number = 0
    while low.request_id not in {r.request_id for r, _ in replica.added}:
        number += 1
        bench.submit(f"u{number}", "interactive", tokens=8)
        turn(bench, [replica])
    for name in [r for r in bench.core._live if r != low.request_id]:
        bench.core.cancel(name)
    replica.turn()
    assert replica.held[low.request_id].running
    late = bench.submit("late", "interactive", tokens=1)
    assert replica.added[-1][0].request_id == late.request_id
    replica.turn()
    assert bench.outcome(late) is Outcome.FINISHED


# --- a flood ---


def flooded(*, slots: int, longest_urgent_s: float, share: float = 0.1, batch_s: float = 60.0) -> Bench:
    classes = (
        PriorityClass(name="interactive", priority=10, longest_wait_s=longest_urgent_s),
        PriorityClass(name="batch", priority=-10, longest_wait_s=batch_s),
    )
    config = RouterConfig(
        classes=classes, default_class="batch", minimum_share=share, ageing_after_s=2.0, expected_output_tokens=8
    )
    bench = Bench(config)
    bench.replica("r0", slots=slots)
    return bench


def replica_of(bench: Bench) -> FakeReplica:
    port = bench.core._fleet[ReplicaId("r0")].port
    assert isinstance(port, FakeReplica)
    return port


def turn(bench: Bench, replicas: list[FakeReplica], seconds: float = 0.05) -> None:
    bench.clock.advance(seconds)
    for replica in replicas:
        replica.turn()
    bench.core.tick()


@pytest.mark.parametrize("batch_per_s", [0.2, 3.0])
def test_flood_of_urgent_work_starves_nobody_that_was_let_in_and_share_is_kept_to(batch_per_s: float) -> None:
    """8 slots make a token each 50 ms and urgent requests of 8 prompt and 8 output tokens come at twice what that is.
    Batch requests, as large, come below and beyond their tenth of it, which is 2 a second."""
    rng = random.Random(3)
    bench = flooded(slots=4, longest_urgent_s=10.0, batch_s=20.0)
    replicas = [replica_of(bench), bench.replica("r1", slots=4)]
    batch: list[tuple[Request, float]] = []
    for step in range(2000):
        for k in range(2):
            bench.submit(f"u{step}.{k}", "interactive", tokens=8)
        if rng.random() < batch_per_s * 0.05:
            batch.append((bench.submit(f"b{step}", "batch", tokens=8), bench.clock.monotonic()))
        turn(bench, replicas)
    dispatched = {request.request_id for replica in replicas for request, _ in replica.added}
    ends = Counter(bench.outcome(r) for r, _ in batch)
    waited = [
        explained.queue_wait_ms / 1000
        for r, _ in batch
        if (explained := bench.core.explain(r.request_id, "t")) is not None and explained.queue_wait_ms is not None
    ]
    assert max(waited) <= 20.0
    assert ends[Outcome.EXPIRED_IN_QUEUE] == 0
    assert ends[Outcome.FINISHED] > 0.9 * len(waited) > 10, "what is sent out is served too"
    refused = ends[Outcome.REJECTED_WAIT]
    assert (refused > 0) is (batch_per_s > 2), "beyond the share it is refused at arrival"
    shared = bench.metric("forebay_minimum_share_dispatches_total", priority_class="batch")
    of_batch = len([1 for r, _ in batch if r.request_id in dispatched])
    assert 0 < shared <= 0.1 * len(dispatched)
    assert of_batch <= 0.1 * len(dispatched) + 8, "all but a free slot at the beginning was by share"


def test_deadline_passes_in_the_queue_only_where_rates_fell_after_the_arrival() -> None:
    """Three quarters of the fleet go while batch work waits: what had been promised by the old rate ends with 504 and is counted."""
    bench = flooded(slots=4, longest_urgent_s=10.0, batch_s=20.0)
    replicas = [replica_of(bench), *(bench.replica(f"r{k}", slots=4) for k in range(1, 4))]
    batch: list[Request] = []
    for step in range(1000):
        for k in range(len(replicas)):
            bench.submit(f"u{step}.{k}", "interactive", tokens=8)
        if step < 400:
            batch.append(bench.submit(f"b{step}", "batch", tokens=8))
        if step == 400:
            expired_before = bench.metric("forebay_requests_total", priority_class="batch", outcome="expired_in_queue")
            for replica in replicas[1:]:
                replica.die()
            del replicas[1:]
        turn(bench, replicas)
    expired = bench.metric("forebay_requests_total", priority_class="batch", outcome="expired_in_queue")
    assert (expired_before, expired > 0) == (0, True)
    live = bench.core._live
    assert all(live[r.request_id].replica_id for r in batch if r.request_id in live), "20 s after the last, none waits"
