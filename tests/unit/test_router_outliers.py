"""When a replica that fails is put out, for how long, and how it comes back."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import RouterConfig
from cluster.messages import Unroutable
from cluster.types import FinishReason, Generation, Outcome, Refusal, RefusalReason, ReplicaId, RequestId, TokenDelta
from router.outliers import CLEAN, JITTER, Fault, Mark, Record, after_fault, after_success
from router.view import Condition
from tests.unit.fake_replica import Bench, FakeReplica

CONFIG = RouterConfig(outlier_faults=3, outlier_window_s=60, out_for_s=10, out_longest_s=100, retry_share=0)


def after(*marks: Mark, record: Record = CLEAN, may_put_out: bool = True, probe: bool = False) -> Record:
    rng = random.Random(0)
    for mark in marks:
        record = after_fault(record, mark, CONFIG, rng, may_put_out=may_put_out, probe=probe)
    return record


def faults(count: int, fault: Fault = Fault.BROKEN, *, tenants: int = 1, at_s: float = 0.0) -> list[Mark]:
    return [Mark(at_s, fault, RequestId(f"q{k}"), f"t{k % tenants}") for k in range(count)]


def is_out(record: Record) -> bool:
    return record.out_until_s is not None


# --- what puts a replica out ---


@pytest.mark.parametrize("fault", [Fault.BROKEN, Fault.GAP, Fault.OVERFLOW])
def test_so_many_faults_of_different_requests_in_a_row_put_it_out(fault: Fault) -> None:
    assert not is_out(after(*faults(2, fault)))
    assert is_out(after(*faults(3, fault)))


def test_one_request_is_one_fault_however_often_it_fails() -> None:
    assert not is_out(after(*(Mark(0.0, Fault.BROKEN, RequestId("same")) for _ in range(50))))


def test_errors_of_one_tenant_count_half_since_its_requests_may_be_to_blame() -> None:
    assert not is_out(after(*faults(5, Fault.ENGINE_ERROR)))
    assert is_out(after(*faults(6, Fault.ENGINE_ERROR)))
    assert is_out(after(*faults(3, Fault.ENGINE_ERROR, tenants=2)))


def test_request_that_ends_well_between_wipes_the_row_but_for_broken_links() -> None:
    record = after_success(after(*faults(2)), 0.0, probe=False)
    assert not is_out(after(*faults(2), record=record))
    links = [Mark(0.0, Fault.LINK)] * 2
    record = after_success(after(*links), 0.0, probe=False)
    assert is_out(after(Mark(0.0, Fault.LINK), record=record))


def test_links_that_break_far_apart_are_no_row() -> None:
    assert not is_out(after(*(Mark(31.0 * k, Fault.LINK) for k in range(50))))


@given(
    st.lists(
        st.tuples(st.sampled_from(list(Fault)), st.integers(0, 9), st.integers(0, 3), st.floats(0, 5)), max_size=60
    )
)
def test_record_is_bounded_and_nobody_is_put_out_who_must_not_be(
    drawn: list[tuple[Fault, int, int, float]],
) -> None:
    now_s, record = 0.0, CLEAN
    for fault, request, tenant, later_s in drawn:
        now_s += later_s
        mark = Mark(now_s, fault, None if fault is Fault.LINK else RequestId(f"q{request}"), f"t{tenant}")
        record = after(mark, record=record, may_put_out=False)
        assert len(record.marks) <= 2 * CONFIG.outlier_faults
        assert not is_out(record)


# --- for how long, and how it comes back ---


def test_time_out_doubles_up_to_its_cap_and_is_spread_below_it() -> None:
    record, now_s = after(*faults(3)), 0.0
    for expected_s in (10, 20, 40, 80, 100, 100):
        assert record.out_until_s is not None
        assert (1 - JITTER) * expected_s <= record.out_until_s - now_s <= expected_s
        now_s = record.out_until_s
        record = after(Mark(now_s, Fault.GAP, RequestId("probe")), record=record, probe=True)
    spread = {after_fault(after(*faults(2)), faults(3)[2], CONFIG, random.Random(k), may_put_out=True, probe=False)
              for k in range(9)}  # fmt: skip
    assert len(spread) == 9


def test_time_starts_small_again_after_a_long_time_without() -> None:
    record = after(*faults(3))
    for wait_s, expected_s in ((1.0, 20), (1.0, 40), (101.0, 10)):
        assert record.out_until_s is not None
        record = after_success(record, record.out_until_s, probe=True)
        assert not is_out(record)
        at_s = record.let_in_s + wait_s
        record = after(*faults(3, at_s=at_s), record=record)
        assert record.out_until_s is not None
        assert (1 - JITTER) * expected_s <= record.out_until_s - at_s <= expected_s


def test_while_it_is_out_only_its_probe_says_anything() -> None:
    record = after(*faults(3))
    assert record.out_until_s is not None
    later_s = record.out_until_s + 1
    assert after(*faults(9, at_s=5.0), record=record) is record
    assert after(*faults(9, at_s=later_s), record=record) is record
    assert after_success(record, later_s, probe=False) is record
    assert is_out(after(*faults(1, at_s=later_s), record=record, probe=True))
    assert not is_out(after_success(record, later_s, probe=True))


# --- in the router ---


def error(bench: Bench, replica: FakeReplica, name: str, tenant: str) -> None:
    """A request that runs there, and ends with an error of its engine."""
    bench.submit(name, tenant=tenant, tokens=50)
    attempt = next(attempt for request, attempt in replica.added if request.request_id == name)
    replica.forget(RequestId(name))
    replica.send(TokenDelta(RequestId(name), attempt, 0, (), (), FinishReason.ERROR, "it failed"))


def condition(bench: Bench, replica: FakeReplica) -> Condition:
    return bench.core._fleet[replica.replica_id].condition(bench.config, bench.clock.monotonic())


def two_replicas(silent_after_s: float = 1e6) -> tuple[Bench, FakeReplica, FakeReplica]:
    """The other one is full."""
    bench = Bench(CONFIG.model_copy(update={"silent_after_s": silent_after_s, "fenced_after_s": 1e7}))
    other = bench.replica("other", slots=1)
    bench.submit("fills", tokens=1000)
    other.turn()
    return bench, bench.replica("bad", slots=9), other


def put_out(bench: Bench, replica: FakeReplica) -> None:
    for k in range(3):
        error(bench, replica, f"e{k}", f"t{k}")
    assert condition(bench, replica) is Condition.EJECTED


def test_replica_that_is_put_out_keeps_its_work_and_gets_no_more() -> None:
    bench, bad, other = two_replicas()
    before = bench.submit("before", tokens=5)
    put_out(bench, bad)
    waits = bench.submit("waits", tokens=5)
    for _ in range(5):
        bad.turn()
    assert bench.outcome(before) is Outcome.FINISHED
    assert "waits" not in [r.request_id for r, _ in (*bad.added, *other.added)]
    assert bench.outcome(waits) is None
    bench.core.tick()
    assert bench.core.unroutable() == (Unroutable(ReplicaId("bad"), "ejected"),)
    assert bench.metric("forebay_replicas_ejected") == 1
    assert bench.metric("forebay_replica_ejections_total", fault="engine_error") == 1


def test_half_open_it_gets_one_request_at_a_time_until_one_succeeds() -> None:
    bench, bad, _ = two_replicas()
    put_out(bench, bad)
    waiting = [bench.submit(f"w{k}", tokens=5) for k in range(4)]
    bench.clock.advance(10)
    bench.core.tick()
    assert [r.request_id for r, _ in bad.added][3:] == ["w0"]
    bench.core.cancel(waiting[0].request_id)
    assert [r.request_id for r, _ in bad.added][3:] == ["w0", "w1"], "that its client hung up says nothing of it"
    bad.turn()
    assert [r.request_id for r, _ in bad.added][3:] == ["w0", "w1", "w2", "w3"], "its first token has come"
    assert condition(bench, bad) is Condition.ROUTABLE


def test_probe_that_fails_puts_it_out_for_longer() -> None:
    bench, bad, _ = two_replicas()
    put_out(bench, bad)
    bench.clock.advance(10)
    bench.core.tick()
    error(bench, bad, "probe", "t")
    assert condition(bench, bad) is Condition.EJECTED
    bench.clock.advance(10)
    bench.core.tick()
    assert condition(bench, bad) is Condition.EJECTED
    bench.clock.advance(10)
    bench.core.tick()
    assert condition(bench, bad) is Condition.ROUTABLE


@pytest.mark.parametrize("half_open", [False, True])
@pytest.mark.parametrize("lost_first", [False, True])
def test_replica_that_starts_anew_is_let_in_with_nothing_held_against_it_and_its_probe_goes_on(
    half_open: bool, lost_first: bool
) -> None:
    """Whether the old incarnation is heard to be lost, or is replaced without a word."""
    bench, bad, _ = two_replicas()
    put_out(bench, bad)
    waiting = [bench.submit(f"w{k}", tokens=5) for k in range(2)]
    if half_open:
        bench.clock.advance(10)
        bench.core.tick()
        assert [r.request_id for r, _ in bad.added][3:] == ["w0"]
    if lost_first:
        bad.die()
    new = bench.replica("bad", slots=9, generation=Generation(2, "g"))
    assert condition(bench, new) is Condition.ROUTABLE
    for _ in range(6):
        new.turn()
    assert [bench.outcome(r) for r in waiting] == [Outcome.FINISHED] * 2


@pytest.mark.parametrize(("count", "most"), [(1, 0), (2, 1), (3, 1), (4, 2), (5, 2)])
def test_never_more_than_half_of_the_replicas_are_out(count: int, most: int) -> None:
    bench = Bench(CONFIG.model_copy(update={"silent_after_s": 1e6, "fenced_after_s": 1e7}))
    replicas = [bench.replica(f"r{k}", slots=9) for k in range(count)]
    for k in range(60):
        bench.submit(f"q{k}", tenant=f"t{k}", tokens=50)
        for replica in replicas:
            if RequestId(f"q{k}") in replica.held:
                attempt = replica.held[RequestId(f"q{k}")].attempt
                replica.forget(RequestId(f"q{k}"))
                replica.send(TokenDelta(RequestId(f"q{k}"), attempt, 0, (), (), FinishReason.ERROR, "it failed"))
    assert sum(condition(bench, replica) is Condition.EJECTED for replica in replicas) == most


def test_one_that_is_out_is_let_in_when_the_others_are_gone() -> None:
    bench, bad, other = two_replicas()
    put_out(bench, bad)
    bench.submit("waits", tokens=5)
    other.die()
    bench.core.tick()
    assert condition(bench, bad) is Condition.ROUTABLE
    assert {r.request_id for r, _ in bad.added} >= {"fills", "waits"}


@pytest.mark.parametrize("reason", [RefusalReason.FULL, RefusalReason.DRAINING, RefusalReason.UNKNOWN_ATTEMPT])
def test_what_a_replica_has_the_right_to_say_is_no_fault(reason: RefusalReason) -> None:
    bench, bad, _ = two_replicas()
    for k in range(20):
        request = bench.submit(f"q{k}", tokens=50, tenant=f"t{k}")
        attempt = bad.held[request.request_id].attempt
        bad.forget(request.request_id)
        bad.send(refusals=(Refusal(request.request_id, attempt, reason),))
        bench.core.cancel(request.request_id)
        bad.beat()
    assert bench.core._fleet[ReplicaId("bad")].record == CLEAN


def test_what_clients_do_is_no_fault_of_a_replica() -> None:
    bench = Bench(CONFIG.model_copy(update={"max_stream_bytes": 300}))
    bench.replica("other", slots=1)
    bad = bench.replica("bad", slots=9)
    for k in range(20):
        request = bench.submit(f"q{k}", tokens=50, tenant=f"t{k}")
        if k % 2:
            bench.core.cancel(request.request_id)
        else:
            for _ in range(20):
                bad.turn()
    outcomes = [bench.streams[RequestId(f"q{k}")].ending for k in range(20)]
    assert {e.outcome for e in outcomes if e is not None} == {Outcome.CANCELLED, Outcome.SLOW_CLIENT}
    assert all(replica.record == CLEAN for replica in bench.core._fleet)


@pytest.mark.parametrize("kind", ["broken", "gap", "overflow", "link"])
def test_every_kind_of_fault_puts_a_replica_out(kind: str) -> None:
    bench, bad, other = two_replicas(silent_after_s=1.0)
    for k in range(3):
        request = bench.submit(f"q{k}", tokens=3, tenant="t")
        name, attempt = request.request_id, 1
        if kind == "broken":
            bad.send(TokenDelta(name, attempt, 0, (1, 2), ("x",)))
        elif kind == "overflow":
            bad.send(refusals=(Refusal(name, attempt, RefusalReason.OVERFLOW),))
        elif kind == "link":
            bad.break_link()
            bad.connect()
        else:
            bad.send(TokenDelta(name, attempt, 2, (1,), ("x",), FinishReason.LENGTH))
            for _ in range(5):
                bench.clock.advance(1.1)
                other.beat()
                bad.beat()
                bench.core.tick()
        bench.core.cancel(name)
    assert condition(bench, bad) is Condition.EJECTED
    assert bench.metric("forebay_replica_ejections_total", fault=kind) == 1
