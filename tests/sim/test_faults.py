"""Nothing is lost, and the books agree, whatever goes wrong; and the checks see it when they do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.engine.engine import Engine
from cluster.engine.scheduling import admission
from cluster.engine.scheduling.victims import NoRoom
from cluster.types import Outcome, RequestId
from ops.sim.checks import check_routers
from ops.sim.engine import SimEngine
from ops.sim.faults import OF_MOVES, Fault, FaultKind, MovePoint
from ops.sim.values import Arrival
from ops.sim.world import World, simulate
from router.core import RouterCore
from router.view import Replica
from tests.sim.kit import cluster, work

ENDS = {Outcome.FINISHED, Outcome.SLOW_CLIENT, Outcome.REJECTED_NO_REPLICA}
"""The last one only where all replicas are gone at once."""


def _faults(replicas: int) -> st.SearchStrategy[Fault]:
    def fault(kind: FaultKind, at_s: float, for_s: float, number: int, share: float, point: MovePoint) -> Fault:
        bound = {FaultKind.NODE_LOSS: 2, FaultKind.NODE_DRAIN: 2}
        bound |= dict.fromkeys((*OF_MOVES, FaultKind.CONTROLLER_RESTART, FaultKind.SLOW_CLIENTS), 1)
        at_point = point if kind in OF_MOVES else None
        return Fault(at_s, kind, for_s, number % bound.get(kind, replicas), share, delay_s=0.2, point=at_point)

    return st.builds(
        fault,
        st.sampled_from(sorted(FaultKind)),
        st.floats(0.0, 3.0),
        st.floats(0.05, 4.0),
        st.integers(0, 11),
        st.floats(0.1, 1.0),
        st.sampled_from(MovePoint),
    )


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.lists(_faults(4), max_size=5), st.integers(0, 1000), st.integers(1, 3))
def test_after_faults_stop_all_requests_end_once_and_the_books_agree(
    faults: list[Fault], seed: int, routers: int
) -> None:
    config = cluster(4, routers=routers, replicas_per_node=2, faults=tuple(faults), unended_max_s=600.0)
    result = simulate(work(60, 30, seed, shared=True), config, seed=seed)
    assert result.invariant_violations == []
    assert {record.outcome for record in result.requests} <= ENDS
    for record in result.requests:
        if record.outcome is Outcome.FINISHED:
            assert record.tokens == record.output_tokens


def test_work_of_a_dead_replica_goes_on_elsewhere_and_no_token_is_lost() -> None:
    arrivals = [Arrival(0.5 + k / 100, RequestId(f"r{k}"), 100, 300) for k in range(8)]
    result = simulate(arrivals, cluster(2, faults=(Fault(1.5, FaultKind.REPLICA_DEATH, 60.0, number=0),)))
    moved = [r for r in result.requests if len(r.replicas) > 1]
    assert moved
    assert all(r.outcome is Outcome.FINISHED and r.tokens == 300 for r in result.requests)
    assert all(r.replicas[-1] == "replica-1" for r in result.requests)


def test_work_of_a_silent_node_goes_on_after_the_router_has_fenced_it() -> None:
    arrivals = [Arrival(0.5 + k / 100, RequestId(f"r{k}"), 100, 300) for k in range(8)]
    config = cluster(2, replicas_per_node=1, faults=(Fault(1.5, FaultKind.NODE_LOSS, 60.0, number=0),))
    result = simulate(arrivals, config)
    moved = [r for r in result.requests if len(r.replicas) > 1]
    assert moved
    # Fenced 3 s after the last report, which was at most a period old, seen with the next tick.
    assert all(r.end_s is not None and r.end_s > 1.5 - 0.1 + 3.0 for r in moved)
    assert all(r.outcome is Outcome.FINISHED and r.tokens == 300 for r in result.requests)


def test_a_replica_that_has_come_back_takes_work_again() -> None:
    arrivals = [Arrival(0.5 + k / 10, RequestId(f"r{k}"), 100, 30) for k in range(60)]
    result = simulate(arrivals, cluster(1, faults=(Fault(1.05, FaultKind.REPLICA_DEATH, 1.0),)))
    between = [r for r in result.requests if 1.05 < r.arrived_s < 2.05]
    assert len(between) == 10
    assert {r.outcome for r in result.requests} == {Outcome.FINISHED}, (
        "and those that came meanwhile have waited for it"
    )
    assert result.invariant_violations == []


# --- the checks themselves ---


def test_a_reservation_that_is_not_given_back_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    release, calls = Replica.release, iter(range(1_000_000))

    def forgetful(replica: Replica, request_id: RequestId) -> None:
        reservation = replica.reservations[request_id]
        release(replica, request_id)
        if next(calls) == 5:
            replica.reservations[request_id] = reservation

    monkeypatch.setattr(Replica, "release", forgetful)
    result = simulate(work(40, 30), cluster(2))
    assert any("reservations are not the work in flight" in what for what in result.invariant_violations)


def _open_and_queued(one: RouterCore, other: RouterCore) -> None:
    del other
    members = one._dispatcher.queue._members
    running = next(request_id for request_id, live in one._live.items() if live.replica_id is not None)
    members[running] = next(iter(members.values()))


def _nowhere(one: RouterCore, other: RouterCore) -> None:
    del other
    one._dispatcher.queue._members.popitem()


def _queued_after_its_end(one: RouterCore, other: RouterCore) -> None:
    del other
    members = one._dispatcher.queue._members
    members[RequestId("ghost")] = next(iter(members.values()))


def _in_two_routers(one: RouterCore, other: RouterCore) -> None:
    request_id, waiting = one._dispatcher.queue._members.popitem()
    one._dispatcher.queue._members[request_id] = other._dispatcher.queue._members[request_id] = waiting
    other._live[request_id] = one._live[request_id]


def _forgotten(one: RouterCore, other: RouterCore) -> None:
    del other
    request_id, _ = one._dispatcher.queue._members.popitem()
    del one._live[request_id]


def _reserved_for_nobody(one: RouterCore, other: RouterCore) -> None:
    del other
    live = next(live for live in one._live.values() if live.replica_id is not None)
    live.replica_id, live.suspicion = None, object()  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("damage", "seen"),
    [
        (_open_and_queued, "is in 2 places of router 0"),
        (_nowhere, "is in 0 places of router 0"),
        (_queued_after_its_end, "ghost is queued in router 0 and not live there"),
        (_in_two_routers, "is in two routers"),
        (_forgotten, "has not ended and is nowhere"),
        (_reserved_for_nobody, "reservations are not the work in flight"),
    ],
)
def test_a_request_that_is_in_no_place_or_in_two_is_seen(
    damage: Callable[[RouterCore, RouterCore], None], seen: str
) -> None:
    world = World(cluster(2, routers=2), None, 0, None, None, None)
    arrivals = [Arrival(k / 1000, RequestId(f"r{k}"), 50, 400) for k in range(100)]
    with world.loop.running():
        world.begin()
        world.run(arrivals, 0.5, None)
        assert list(check_routers(world._cores, world._clients.live)) == []
        damage(world._cores[0], world._cores[1])
        assert [what for what in check_routers(world._cores, world._clients.live) if seen in what]


def test_blocks_that_are_not_given_back_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    remove, calls = Engine._remove, iter(range(1_000_000))

    def leaking(one: Engine, live: object) -> None:
        remove(one, live)  # type: ignore[arg-type]
        if next(calls) == 5:
            one.pool.allocate((RequestId("nobody"), 1), 1)

    monkeypatch.setattr(Engine, "_remove", leaking)
    result = simulate(work(40, 30), cluster(2))
    assert any("tables belong to nobody" in what for what in result.invariant_violations)
    assert any("it still holds some" in what for what in result.invariant_violations)


def test_urgent_work_that_waits_behind_lesser_for_longer_than_the_bound_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arrivals = [
        *(Arrival(0.1, RequestId(f"batch{k}"), 50, 400, "batch") for k in range(8)),
        Arrival(0.5, RequestId("urgent"), 50, 5, "interactive"),
    ]
    config = cluster(1, overtaken_max_s=1.0)
    assert simulate(arrivals, config).invariant_violations == []

    def nobody(draft: object, urgent: object, source: object, *, blocks_short: int, slots_short: int) -> object:
        del draft, urgent, source, blocks_short, slots_short
        return NoRoom.SLOTS

    monkeypatch.setattr(admission, "make_room", nobody)
    violations = simulate(arrivals, config).invariant_violations
    assert any("urgent waits on replica-0 behind less urgent work" in what for what in violations)


def test_an_engine_that_lies_still_and_requests_that_never_end_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = SimEngine._begin

    def lazy(one: SimEngine) -> None:
        begin(one)
        if one._loop.now_s > 0.5:
            one._turn += 1  # what is awaited is not heard
            one._began_s = None

    monkeypatch.setattr(SimEngine, "_begin", lazy)
    violations = simulate(work(20, 30), cluster(1, unended_max_s=5.0, check_every=20)).invariant_violations
    assert any("there is work, and no step runs" in what for what in violations)
    assert any("requests do not end" in what for what in violations)
