"""The laws of the router's core, with fake replicas and a manual clock."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

from cluster.config import PriorityClass, RouterConfig
from cluster.messages import StepFrame
from cluster.types import (
    FinishReason,
    Generation,
    Outcome,
    Preempted,
    PreemptionMeans,
    Refusal,
    RefusalReason,
    ReplicaState,
    Request,
    RequestId,
    Sampling,
    TokenDelta,
)
from router.stream import Buffer, Stream
from tests.unit.fake_replica import Bench, expected_ids, expected_text


def ids_added(replica: object) -> list[str]:
    return [request.request_id for request, _ in replica.added]  # type: ignore[attr-defined]


def test_request_runs_to_its_end_and_its_reservation_is_released() -> None:
    bench = Bench()
    replica = bench.replica()
    request = bench.submit("a", tokens=3)
    for _ in range(3):
        replica.turn()
    assert bench.text(request) == expected_text(request)
    ending = bench.streams[request.request_id].ending
    assert ending is not None
    assert (ending.outcome, ending.finish) == (Outcome.FINISHED, FinishReason.LENGTH)
    assert (ending.prompt_tokens, ending.completion_tokens) == (8, 3)
    assert bench.core.bands() == ()
    assert bench.metric("forebay_requests_total", priority_class="standard", outcome="finished") == 1
    assert bench.metric("forebay_output_tokens_total", priority_class="standard") == 3
    assert not replica.aborted


def test_urgent_goes_first_and_within_a_band_the_oldest() -> None:
    bench = Bench()
    replica = bench.replica(slots=1)
    running = bench.submit("running", "interactive", tokens=1)
    for name, priority_class in [
        ("b1", "batch"),
        ("s1", "standard"),
        ("b2", "batch"),
        ("i1", "interactive"),
        ("s2", "standard"),
    ]:
        bench.submit(name, priority_class, tokens=1)
    for _ in range(6):
        replica.turn()
    assert ids_added(replica) == [running.request_id, "i1", "s1", "s2", "b1", "b2"]


def test_urgent_displaces_exactly_one_lower_and_equal_never_displaces() -> None:
    bench = Bench()
    replicas = [bench.replica("r1", slots=2), bench.replica("r2", slots=2)]
    low = [bench.submit(f"low{i}", "batch", tokens=50) for i in range(4)]
    for replica in replicas:
        replica.turn()
    waiting = bench.submit("low5", "batch", tokens=5)
    urgent = bench.submit("urgent", "interactive", tokens=2)
    for replica in replicas:
        replica.turn()
    assert sum(r.preemptions for r in replicas) == 1
    assert bench.text(urgent) != ""
    assert waiting.request_id not in ids_added(replicas[0]) + ids_added(replicas[1])
    assert bench.metric("forebay_preemptions_total", priority_class="batch", cause="urgent", means="recompute") == 1
    for _ in range(60):
        for replica in replicas:
            replica.turn()
    assert sum(r.preemptions for r in replicas) == 1
    for request in (*low, waiting, urgent):
        assert bench.text(request) == expected_text(request)


def test_two_urgent_requests_do_not_claim_the_same_victim() -> None:
    """Before any report says so, the second must see that the first has claimed the only lower one."""
    bench = Bench()
    r1, r2 = bench.replica("r1", slots=1), bench.replica("r2", slots=1)
    bench.submit("low1", "batch", tokens=50)
    bench.submit("low2", "batch", tokens=50)
    r1.turn()
    r2.turn()
    bench.submit("u1", "interactive")
    bench.submit("u2", "interactive")
    bench.submit("u3", "interactive")
    assert sorted(ids_added(r1)[1:] + ids_added(r2)[1:]) == ["u1", "u2"]
    assert len(ids_added(r1)) == len(ids_added(r2)) == 2


def test_lost_replica_continues_elsewhere_at_its_old_place_without_doubling_a_token() -> None:
    bench = Bench()
    r1 = bench.replica("r1", slots=1)
    moved = bench.submit("moved", tokens=6)
    r1.turn()
    r1.turn()
    newer = bench.submit("newer", tokens=2)
    r2 = bench.replica("r2", slots=1)
    assert ids_added(r2) == [newer.request_id]
    waiting = bench.submit("waiting", tokens=1)
    r1.die()
    for _ in range(10):
        r2.turn()
    assert ids_added(r2) == ["newer", "moved", "waiting"]
    resumed, attempt = r2.added[1]
    assert attempt == 2
    assert resumed.emitted_ids == expected_ids(moved)[:2]
    assert resumed.arrived_unix_s == moved.arrived_unix_s
    for request in (moved, newer, waiting):
        assert bench.text(request) == expected_text(request)
    assert bench.metric("forebay_continued_total", reason="lost") == 1


def test_request_is_given_up_after_the_stated_number_of_lost_engines() -> None:
    bench = Bench(RouterConfig(max_attempts=2))
    r1 = bench.replica("r1")
    request = bench.submit("a", tokens=9)
    r1.turn()
    r1.die()
    r2 = bench.replica("r2")
    for _ in range(4):
        r2.turn()
    assert bench.outcome(request) is None
    r2.die()
    assert bench.outcome(request) is Outcome.REPLICA_LOST
    assert bench.text(request) == "".join(f"{t} " for t in expected_ids(request)[:5])
    assert bench.core.bands() == ()


def test_attempts_lost_with_a_link_are_not_engines_lost() -> None:
    bench = Bench(RouterConfig(max_attempts=2))
    replica = bench.replica()
    request = bench.submit("a", tokens=9)
    for attempt in range(5):
        replica.send(refusals=(Refusal(request.request_id, attempt + 1, RefusalReason.UNKNOWN_ATTEMPT),))
    replica.turn()
    assert bench.outcome(request) is None
    assert replica.added[-1][1] == 6


def test_request_whose_last_token_arrived_is_finished_though_its_replica_is_lost() -> None:
    bench = Bench()
    replica = bench.replica()
    request = bench.submit("a", tokens=1)
    replica.send(TokenDelta(request.request_id, 1, 0, (5,), ("x",), None))
    replica.die()
    assert bench.outcome(request) is Outcome.FINISHED


@pytest.mark.parametrize("reason", list(RefusalReason))
def test_refused_attempt_goes_elsewhere_and_keeps_its_place(reason: RefusalReason) -> None:
    bench = Bench()
    r1 = bench.replica("r1", slots=1, refuse_with=reason)
    first = bench.submit("first", tokens=1)
    bench.submit("second", tokens=1)
    r2 = bench.replica("r2", slots=1)
    assert ids_added(r2) == ["second"]
    r1.refuse_with = None
    if reason in (RefusalReason.FULL, RefusalReason.DRAINING):
        r1.turn()
        assert ids_added(r1) == ["first"], "it backs off until the next report"
        r1.beat()
    else:
        r1.turn()
    assert ids_added(r1) == ["first", "first"]
    assert [attempt for _, attempt in r1.added] == [1, 2]
    r1.turn()
    assert bench.text(first) == expected_text(first)
    assert bench.metric("forebay_replica_refusals_total", reason=reason.value) == 1


def test_refusal_of_an_older_attempt_changes_nothing() -> None:
    bench = Bench()
    replica = bench.replica()
    request = bench.submit("a")
    replica.send(refusals=(Refusal(request.request_id, 7, RefusalReason.FULL),))
    assert len(replica.added) == 1
    assert bench.core.bands()[0].running_requests == 1


def test_link_that_comes_back_is_asked_for_what_was_lost_with_it() -> None:
    bench = Bench()
    replica = bench.replica()
    request = bench.submit("a", tokens=5)
    replica.turn()
    replica.step()
    replica.step()
    replica.break_link()
    replica.connect()
    assert replica.resends == [("a", 1, 1)]
    for _ in range(3):
        replica.turn()
    assert bench.text(request) == expected_text(request)
    assert len(replica.added) == 1, "it was resumed, not begun again"


def test_add_that_was_lost_with_the_link_is_dispatched_again() -> None:
    bench = Bench()
    replica = bench.replica()
    request = bench.submit("a", tokens=2)
    replica.forget(request.request_id)
    replica.break_link()
    replica.connect()
    for _ in range(3):
        replica.turn()
    assert bench.text(request) == expected_text(request)
    assert [attempt for _, attempt in replica.added] == [1, 2]


def test_nothing_is_sent_over_a_broken_link_and_what_was_given_up_is_aborted_after() -> None:
    bench = Bench()
    replica = bench.replica()
    request = bench.submit("a", tokens=50)
    replica.turn()
    replica.break_link()
    queued = bench.submit("b", tokens=1)
    bench.core.cancel(request.request_id)
    assert ids_added(replica) == ["a"]
    assert not replica.aborted
    replica.connect()
    assert replica.aborted == [("a", 1)]
    assert ids_added(replica) == ["a", "b"]
    replica.turn()
    assert bench.outcome(queued) is Outcome.FINISHED
    assert bench.outcome(request) is Outcome.CANCELLED


def test_gap_is_asked_for_once_and_never_skipped() -> None:
    bench = Bench()
    replica = bench.replica()
    request = bench.submit("a", tokens=6)
    replica.turn()
    for _ in range(3):
        replica.step()
    del replica.frames[0]
    replica.deliver()
    assert replica.resends == [("a", 1, 1)]
    replica.turn()
    assert replica.resends == [("a", 1, 1)]
    bench.clock.advance(1.5)
    replica.beat()
    bench.core.tick()
    assert replica.resends == [("a", 1, 1)], "it is closed"
    replica.turn()
    assert bench.text(request) == expected_text(request)
    assert bench.metric("forebay_delta_gaps_total") == 1


@pytest.mark.parametrize("end", ["cancel", "loss"])
def test_open_gap_ends_with_its_attempt(end: str) -> None:
    bench = Bench()
    replica = bench.replica()
    request = bench.submit("a", tokens=6)
    replica.send(TokenDelta(request.request_id, 1, 2, (1,), ("x",)))
    if end == "cancel":
        bench.core.cancel(request.request_id)
    else:
        replica.die()
    bench.clock.advance(1.5)
    bench.core.tick()
    assert len(replica.resends) == 1


def test_gap_that_is_never_answered_ends_the_attempt_not_the_request() -> None:
    bench = Bench()
    replica = bench.replica()
    request = bench.submit("a", tokens=3)
    late = TokenDelta(request.request_id, 1, 2, (1,), ("x",), FinishReason.LENGTH)
    replica.send(late)
    asked = len(replica.resends)
    for _ in range(10):
        bench.clock.advance(1.1)
        replica.beat()
        bench.core.tick()
        if replica.aborted:
            break
    assert replica.aborted == [("a", 1)]
    assert asked < len(replica.resends) <= 3
    for _ in range(4):
        replica.turn()
    assert bench.text(request) == expected_text(request)


def test_repeat_and_stale_deltas_are_dropped_and_counted() -> None:
    bench = Bench()
    replica = bench.replica()
    request = bench.submit("a", tokens=5)
    replica.step()
    frame = replica.frames[0]
    replica.deliver()
    replica.frames.append(frame)
    replica.deliver()
    replica.send(TokenDelta(request.request_id, 9, 1, (1,), ("x",)))
    replica.send(TokenDelta(RequestId("unheard-of"), 1, 0, (1,), ("x",)))
    assert bench.metric("forebay_fenced_deltas_total", kind="repeat") == 1
    assert bench.metric("forebay_fenced_deltas_total", kind="stale") == 2
    assert bench.text(request) == f"{expected_ids(request)[0]} "


def test_copy_that_outlived_its_lost_link_is_ended_when_it_is_heard_of() -> None:
    """The replica was given up while it could not be reached, and lives: the same incarnation comes back."""
    bench = Bench()
    r1 = bench.replica("r1")
    request = bench.submit("a", tokens=5)
    r1.turn()
    r1.break_link()
    bench.core.replica_lost(r1.replica_id, r1.generation, "out of reach for too long")
    r2 = bench.replica("r2")
    assert ids_added(r2) == ["a"]
    r1.connect()
    r1.turn()
    assert r1.aborted == [("a", 1)]
    assert not r1.held
    for _ in range(4):
        r2.turn()
    assert bench.text(request) == expected_text(request)
    assert not r2.aborted


def test_overlap_is_trimmed_by_tokens_with_their_own_text() -> None:
    bench = Bench()
    replica = bench.replica()
    request = bench.submit("a", tokens=5)
    replica.send(TokenDelta(request.request_id, 1, 0, (1, 2), ("p", "q")))
    replica.send(TokenDelta(request.request_id, 1, 1, (2, 3), ("q", "r")))
    assert bench.text(request) == "pqr"


@pytest.mark.parametrize(
    "delta",
    [
        TokenDelta(RequestId("a"), 1, 0, (1, 2), ("x",)),
        TokenDelta(RequestId("a"), 1, 0, (1, 2, 3, 4), ("x",) * 4),
    ],
    ids=["pieces", "max_tokens"],
)
def test_delta_that_cannot_be_ends_the_attempt_and_the_request_goes_on(delta: TokenDelta) -> None:
    bench = Bench()
    replica = bench.replica()
    request = bench.submit("a", tokens=3)
    replica.send(delta)
    assert replica.aborted == [("a", 1)]
    for _ in range(3):
        replica.turn()
    assert bench.text(request) == expected_text(request)


def test_engine_error_ends_one_request_with_its_message() -> None:
    bench = Bench(RouterConfig(retry_share=0))
    replica = bench.replica()
    bad, good = bench.submit("bad"), bench.submit("good")
    replica.send(TokenDelta(bad.request_id, 1, 0, (), (), FinishReason.ERROR, "NaN in the logits"))
    ending = bench.streams[bad.request_id].ending
    assert ending is not None
    assert (ending.outcome, ending.message) == (Outcome.ENGINE_ERROR, "NaN in the logits")
    assert bench.outcome(good) is None


def test_attempt_that_the_engine_aborted_unasked_goes_on_elsewhere() -> None:
    bench = Bench()
    replica = bench.replica()
    request = bench.submit("a", tokens=2)
    replica.held.clear()
    replica.send(TokenDelta(request.request_id, 1, 0, (), (), FinishReason.ABORT))
    for _ in range(2):
        replica.turn()
    assert bench.text(request) == expected_text(request)


def test_cancel_is_immediate_queued_and_running() -> None:
    bench = Bench()
    replica = bench.replica(slots=1)
    running, queued = bench.submit("running", tokens=9), bench.submit("queued")
    bench.core.cancel(queued.request_id)
    assert bench.outcome(queued) is Outcome.CANCELLED
    assert not replica.aborted
    bench.core.cancel(running.request_id)
    assert replica.aborted == [("running", 1)]
    assert bench.core.bands() == ()
    bench.core.cancel(running.request_id)
    assert bench.metric("forebay_requests_total", priority_class="standard", outcome="cancelled") == 2


def test_preemption_of_an_older_attempt_is_not_this_one_s() -> None:
    bench = Bench()
    replica = bench.replica()
    request = bench.submit("a")
    old = Preempted(request.request_id, 7, None, 1, 1)
    bench.core.frame(replica.replica_id, replica.generation, StepFrame(replica.report(), preempted=(old,)))
    assert bench.metric("forebay_preemptions_total", priority_class="standard", cause="kv_full", means="recompute") == 0
    mine = Preempted(request.request_id, 1, None, 1, 1)
    bench.core.frame(replica.replica_id, replica.generation, StepFrame(replica.report(), preempted=(mine,)))
    assert bench.metric("forebay_preemptions_total", priority_class="standard", cause="kv_full", means="recompute") == 1


def test_slow_client_ends_alone() -> None:
    bench = Bench(RouterConfig(max_stream_bytes=300))
    replica = bench.replica()
    slow, quick = bench.submit("slow", tokens=8), bench.submit("quick", tokens=8)
    for _ in range(8):
        replica.turn()
        bench.text(quick)
    assert bench.outcome(slow) is Outcome.SLOW_CLIENT
    assert replica.aborted == [("slow", 1)]
    assert bench.text(quick) == expected_text(quick)
    assert expected_text(slow).startswith(bench.text(slow))


def test_silent_replica_gets_nothing_new_and_keeps_its_work_until_it_is_fenced() -> None:
    bench = Bench()
    silent = bench.replica("r1")
    request = bench.submit("a", tokens=4)
    silent.turn()
    bench.clock.advance(1.5)
    bench.core.tick()
    waiting = bench.submit("b", tokens=1)
    assert ids_added(silent) == ["a"]
    assert not bench.core.ready
    other = bench.replica("r2")
    assert ids_added(other) == ["b"]
    bench.clock.advance(1.6)
    other.beat()
    bench.core.tick()
    assert ids_added(other) == ["b", "a"]
    assert silent.aborted == [("a", 1)]
    silent.held.clear()
    silent.beat()
    for _ in range(4):
        other.turn()
    assert bench.text(request) == expected_text(request)
    assert bench.outcome(waiting) is Outcome.FINISHED
    assert bench.metric("forebay_continued_total", reason="fenced") == 1


def test_idle_is_neither_silent_nor_stuck() -> None:
    bench = Bench()
    replica = bench.replica()
    for _ in range(20):
        bench.clock.advance(0.5)
        replica.beat()
        bench.core.tick()
    assert bench.core.ready


def test_stuck_step_takes_no_new_work() -> None:
    bench = Bench()
    replica = bench.replica(step_age_s=11.0)
    assert not bench.core.ready
    bench.submit("a")
    assert not replica.added
    replica.step_age_s = 9.0
    replica.beat()
    assert ids_added(replica) == ["a"]


def test_replica_without_a_report_is_not_routable() -> None:
    bench = Bench()
    replica = bench.replica()
    other = type(replica)(bench.core, generation=Generation(2, "b"))
    bench.core.link_up(other, None)
    bench.submit("a")
    assert not replica.added
    assert not other.added
    other.beat()
    assert ids_added(other) == ["a"]


def test_new_incarnation_replaces_the_old_one_whose_words_are_stale() -> None:
    bench = Bench()
    old = bench.replica()
    request = bench.submit("a", tokens=3)
    old.turn()
    new = bench.replica(generation=Generation(2, "b"))
    assert ids_added(new) == ["a"]
    old.turn()
    assert bench.metric("forebay_fenced_deltas_total", kind="stale") == 1
    old.connect()
    for _ in range(2):
        new.turn()
    assert bench.text(request) == expected_text(request)


def test_rejected_with_no_replica_and_queued_while_one_is_only_out_of_reach() -> None:
    bench = Bench()
    gone = bench.submit("gone")
    assert bench.outcome(gone) is Outcome.REJECTED_NO_REPLICA
    replica = bench.replica()
    replica.break_link()
    patient = bench.submit("patient", tokens=1)
    assert bench.outcome(patient) is None
    replica.connect()
    replica.turn()
    assert bench.outcome(patient) is Outcome.FINISHED


def test_draining_replica_gets_nothing_new() -> None:
    bench = Bench()
    bench.replica(state=ReplicaState.DRAINING)
    request = bench.submit("a")
    assert bench.outcome(request) is Outcome.REJECTED_NO_REPLICA


@pytest.mark.parametrize("end", ["drains", "dies"])
def test_a_request_waits_for_the_next_replica_for_a_while_after_the_last(end: str) -> None:
    """In a rollout the old replica ends once the new one is known, which every router hears in its own time."""
    bench = Bench()
    old = bench.replica("old")
    bench.core.tick()
    if end == "drains":
        old.state = ReplicaState.DRAINING
    else:
        old.die()
    bench.clock.advance(RouterConfig().no_replica_grace_s - 0.01)
    if end == "drains":
        old.beat()
    patient = bench.submit("patient", tokens=1)
    assert bench.outcome(patient) is None
    bench.clock.advance(0.02)
    late = bench.submit("late")
    assert bench.outcome(late) is Outcome.REJECTED_NO_REPLICA
    new = bench.replica("new")
    new.turn()
    assert bench.outcome(patient) is Outcome.FINISHED


def test_full_band_refuses_with_retry_after_and_other_bands_do_not_care() -> None:
    classes = (
        PriorityClass(name="standard", priority=0, max_queued_requests=2),
        PriorityClass(name="batch", priority=-10),
    )
    bench = Bench(RouterConfig(classes=classes))
    replica = bench.replica(slots=1)
    bench.submit("running", tokens=9)
    replica.turn()
    queued = [bench.submit(f"q{i}") for i in range(3)]
    other = bench.submit("other", "batch")
    assert [bench.outcome(q) for q in queued] == [None, None, Outcome.REJECTED_QUEUE_FULL]
    ending = bench.streams[queued[2].request_id].ending
    assert ending is not None
    assert ending.retry_after_s is not None
    assert 1 <= ending.retry_after_s <= 60
    assert bench.outcome(other) is None


def test_returning_request_always_has_room() -> None:
    classes = (PriorityClass(name="standard", priority=0, max_queued_requests=1),)
    bench = Bench(RouterConfig(classes=classes))
    replica = bench.replica(slots=2)
    running = [bench.submit(f"r{i}", tokens=9) for i in range(2)]
    queued = bench.submit("q")
    replica.turn()
    replica.die()
    assert [bench.outcome(r) for r in (*running, queued)] == [None, None, None]
    assert bench.core.bands()[0].queued_requests == 3
    fresh = bench.replica("r2", slots=3)
    for _ in range(4):
        fresh.turn()
    assert ids_added(fresh) == ["r0", "q", "r1"], "two that an engine died of are not tried together"


def test_too_large_for_any_replica_is_told_at_once() -> None:
    bench = Bench()
    bench.replica(blocks=4)
    fits, too_large = bench.submit("fits", prompt=60, tokens=4), bench.submit("large", prompt=60, tokens=5)
    assert bench.outcome(fits) is None
    assert bench.outcome(too_large) is Outcome.REJECTED_TOO_LARGE


def test_queued_request_that_no_replica_can_hold_any_more_is_told() -> None:
    bench = Bench()
    large = bench.replica("large", blocks=100, slots=1)
    bench.submit("running", tokens=9)
    waiting = bench.submit("waiting", prompt=200)
    bench.replica("small", blocks=4)
    assert bench.outcome(waiting) is None
    large.die()
    assert bench.outcome(waiting) is Outcome.REJECTED_TOO_LARGE


def test_reservation_follows_the_attempt_as_it_grows_is_preempted_and_resumes() -> None:
    """blocks of 16 tokens: 8 + 4 expected are one, 8 + 9 are two; preempted it is parked, with a token it is active."""
    bench = Bench(RouterConfig(expected_output_tokens=4))
    replica = bench.replica(slots=1)
    bench.submit("low", "batch", tokens=30)

    def own() -> list[tuple[int, int, int]]:
        (view,) = bench.core._fleet.views(bench.clock.monotonic())
        return [(o.priority, o.active_blocks, o.parked_blocks) for o in view.own]

    def unreported() -> int:
        (view,) = bench.core._fleet.views(bench.clock.monotonic())
        return sum(level.requests for level in view.unreported)

    assert (own(), unreported()) == ([(-10, 1, 0)], 1)
    replica.turn()
    assert unreported() == 0
    for _ in range(7):
        replica.turn()
    assert own() == [(-10, 1, 0)]
    replica.turn()
    assert own() == [(-10, 2, 0)]
    bench.submit("high", "interactive", tokens=2)
    assert own() == [(-10, 2, 0), (10, 1, 0)]
    replica.turn()
    assert own() == [(-10, 0, 2), (10, 1, 0)]
    replica.turn()
    assert own() == [(-10, 0, 2)]
    replica.turn()
    assert own() == [(-10, 2, 0)]


def test_waiting_has_an_end() -> None:
    bench = Bench(RouterConfig(max_queue_s=10))
    replica = bench.replica(slots=1)
    running = bench.submit("running", tokens=99)
    replica.turn()
    queued = bench.submit("queued")
    for _ in range(99):
        bench.clock.advance(0.1)
        replica.beat()
        bench.core.tick()
    assert bench.outcome(queued) is None
    bench.clock.advance(0.2)
    bench.core.tick()
    assert bench.outcome(queued) is Outcome.EXPIRED_IN_QUEUE
    assert bench.outcome(running) is None


def test_head_of_the_queue_is_not_overtaken_by_what_is_smaller() -> None:
    bench = Bench(RouterConfig(expected_output_tokens=1))
    replica = bench.replica(slots=9, blocks=10)
    first = bench.submit("first", prompt=80, tokens=1)
    large = bench.submit("large", prompt=100, tokens=1)
    small = bench.submit("small", prompt=1, tokens=1)
    assert ids_added(replica) == ["first"]
    replica.turn()
    assert bench.outcome(first) is Outcome.FINISHED
    assert ids_added(replica) == [first.request_id, large.request_id, small.request_id]


def test_latencies_are_measured_from_arrival_by_their_definitions() -> None:
    """Queued 2 s, first token 3 s after arrival, then 4 tokens 0.5 s apart: TPOT 0.5 s, end to end 5 s."""
    bench = Bench(RouterConfig(silent_after_s=60, fenced_after_s=90))
    replica = bench.replica(slots=1)
    bench.submit("first", "interactive", tokens=1)
    request = bench.submit("second", tokens=5)
    bench.clock.advance(2.0 - 0.001)
    replica.turn()
    replica.beat()
    bench.clock.advance(1.0)
    for _ in range(5):
        replica.turn()
        bench.clock.advance(0.5)
    assert bench.outcome(request) is Outcome.FINISHED
    for name, seconds in (("queue_wait", 2.0), ("ttft", 3.0), ("tpot", 0.5), ("e2e", 5.0)):
        assert bench.metric(f"forebay_{name}_seconds_count", priority_class="standard") == 1
        assert bench.metric(f"forebay_{name}_seconds_sum", priority_class="standard") == pytest.approx(seconds)


async def test_one_that_retires_is_not_ready_and_serves_what_is_queued_and_what_still_comes() -> None:
    bench = Bench()
    replica = bench.replica(slots=1)
    running, queued = bench.submit("running", tokens=2), bench.submit("queued", tokens=2)
    bench.core.retire()
    assert not bench.core.ready
    late = bench.submit("late", tokens=2)
    for _ in range(6):
        replica.turn()
    await bench.core.drained()
    assert [bench.outcome(stream) for stream in (running, queued, late)] == [Outcome.FINISHED] * 3


async def test_shut_down_tells_each_that_is_left_and_aborts_its_work_and_refuses_the_new() -> None:
    bench = Bench()
    replica = bench.replica(slots=1)
    running, queued = bench.submit("running", tokens=9), bench.submit("queued", tokens=9)
    replica.turn()
    bench.core.shut_down()
    assert bench.outcome(running) is Outcome.SHUT_DOWN
    assert bench.outcome(queued) is Outcome.REJECTED_DRAINING
    assert [request_id for request_id, _ in replica.aborted] == ["running"]
    assert bench.outcome(bench.submit("new")) is Outcome.REJECTED_DRAINING
    assert not bench.core.ready
    await asyncio.wait_for(bench.core.drained(), 1)


def test_gauges_show_the_present_and_forget_the_gone() -> None:
    bench = Bench()
    replica = bench.replica(slots=1)
    bench.submit("running", tokens=9)
    bench.submit("queued", "batch")
    replica.turn()
    bench.core.tick()
    assert bench.metric("forebay_in_flight_requests", priority_class="standard") == 1
    assert bench.metric("forebay_queued_requests", priority_class="batch") == 1
    assert bench.metric("forebay_queued_bytes", priority_class="batch") > 0
    assert bench.metric("forebay_replicas_ready") == 1
    assert bench.metric("forebay_replica_running_requests", replica="r1") == 1
    replica.die()
    bench.core.tick()
    assert bench.metric("forebay_replicas_ready") == 0
    assert bench.registry.get_sample_value("forebay_replica_slots", {"replica": "r1"}) is None


def test_one_line_is_logged_per_request_with_its_decisions_and_never_its_prompt(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="forebay.requests")
    bench = Bench()
    replica = bench.replica(slots=1)
    bench.submit("low", "batch", tokens=3)
    replica.turn()
    bench.submit("high", "interactive", tokens=1)
    for _ in range(4):
        replica.turn()
    lines = [json.loads(record.getMessage()) for record in caplog.records if record.name == "forebay.requests"]
    assert [line["request_id"] for line in lines] == ["high", "low"]
    low = lines[1]
    assert [d["event"] for d in low["decisions"]] == ["admitted", "dispatched", "preempted"]
    assert low["decisions"][2]["why"] == "for high: recompute"
    assert (low["preemptions"], lines[0].get("preemptions", 0)) == (1, 0)
    assert lines[0]["decisions"][1]["numbers"]["victims"] == 1
    assert "prompt_ids" not in low


# --- choices ---


def member(bench: Bench, name: str, choice: int) -> tuple[Request, Stream]:
    request = Request(
        request_id=RequestId(name),
        tenant="t",
        priority=0,
        priority_class="standard",
        arrived_unix_s=bench.clock.unix(),
        prompt_ids=(1, 2, 3),
        sampling=Sampling(max_tokens=4, seed=0),
        choice=choice,
        group_id="g",
    )
    stream = bench.streams[request.request_id] = Stream(Buffer(100_000))
    return request, stream


def test_choices_that_are_cancelled_together_do_not_take_each_other_s_place() -> None:
    bench = Bench()
    replica = bench.replica(slots=2)
    members = [member(bench, f"g-{k}", k) for k in range(6)]
    bench.core.submit(members)
    other = bench.submit("other", tokens=1)
    sent = ids_added(replica)
    assert sent == ["g-0", "g-1"]
    bench.core.cancel(*(request.request_id for request, _ in members))
    assert ids_added(replica) == [*sent, other.request_id]
    assert bench.metric("forebay_requests_total", priority_class="standard", outcome="cancelled") == len(members)


def test_choices_are_rejected_together_and_with_one_retry_after() -> None:
    bench = Bench()
    members = [member(bench, f"g-{k}", k) for k in range(3)]
    bench.core.submit(members)
    assert [bench.outcome(r) for r, _ in members] == [Outcome.REJECTED_NO_REPLICA] * 3
    assert len({stream.ending.retry_after_s for _, stream in members if stream.ending}) == 1


def test_each_choice_is_continued_by_itself() -> None:
    bench = Bench()
    r1 = bench.replica("r1", slots=2)
    members = [member(bench, f"g-{k}", k) for k in range(3)]
    bench.core.submit(members)
    r1.turn()
    assert ids_added(r1) == ["g-0", "g-1"], "the third waits"
    r2 = bench.replica("r2", slots=3)
    r2.turn()
    r1.turn()
    r1.die()
    for _ in range(5):
        r2.turn()
    assert sorted((r.request_id, len(r.emitted_ids)) for r, _ in r2.added) == [("g-0", 2), ("g-1", 2), ("g-2", 0)]
    assert all(bench.text(r) == expected_text(r) for r, _ in members)


def test_choice_with_an_id_that_is_live_changes_nothing() -> None:
    bench = Bench()
    replica = bench.replica()
    bench.core.submit([member(bench, "g-0", 0)])
    with pytest.raises(ValueError, match="g-0 is already live"):
        bench.core.submit([member(bench, "g-1", 1), member(bench, "g-0", 0)])
    assert ids_added(replica) == ["g-0"]


# --- logprobs ---


def test_next_attempt_is_asked_for_the_prompt_s_logprobs_only_where_they_have_not_come() -> None:
    bench = Bench()
    asked: list[tuple[int | None, int | None, int]] = []
    request = None
    for tokens_before_its_end in (0, 4, 8):
        replica = bench.replica(f"r{tokens_before_its_end}")
        request = request or bench.submit("a", tokens=9, logprobs=1, prompt_logprobs=1)
        sampling = replica.added[0][0].sampling
        asked.append((sampling.logprobs, sampling.prompt_logprobs, len(replica.added[0][0].emitted_ids)))
        for _ in range(tokens_before_its_end and 4):
            replica.turn()
        if tokens_before_its_end < 8:
            bench.core.replica_lost(replica.replica_id, replica.generation, "killed by the test")
            assert bench.outcome(request) is None
    assert asked == [(1, 1, 0), (1, 1, 0), (1, None, 4)]


def test_attempt_without_the_logprobs_that_were_asked_for_is_not_believed() -> None:
    bench = Bench()
    replica = bench.replica()
    request = bench.submit("a", tokens=3, logprobs=0)
    replica.send(TokenDelta(request.request_id, 1, 0, (1,), ("x",)))
    assert replica.aborted == [("a", 1)]
    for _ in range(4):
        replica.turn()
    assert bench.text(request) == expected_text(request)
    assert [len(part.logprobs) for part in bench.scores[request.request_id]] == [1, 1, 1]


# --- preemption and lengths in the metrics ---


def test_preemptions_of_a_request_are_counted_to_its_end_and_never_fall() -> None:
    """Public report: the count must be exposed and never decrease; a loss in between does not reset it."""
    bench = Bench()
    r1 = bench.replica("r1", slots=1)
    low = bench.submit("low", "batch", tokens=9)
    r1.turn()
    for name in ("u1", "u2"):
        bench.submit(name, "interactive", tokens=1)
        r1.turn()
        r1.turn()
    r2 = bench.replica("r2", slots=1)
    r1.die()
    r2.turn()
    bench.submit("u3", "interactive", tokens=1)
    for _ in range(12):
        r2.turn()
    assert bench.outcome(low) is Outcome.FINISHED
    labels = {"priority_class": "batch"}
    assert bench.metric("forebay_request_preemptions_count", **labels) == 1
    assert bench.metric("forebay_request_preemptions_sum", **labels) == 3
    assert bench.metric("forebay_request_preemptions_sum", priority_class="interactive") == 0
    assert bench.metric("forebay_request_preemptions_count", priority_class="interactive") == 3


@pytest.mark.parametrize("means", list(PreemptionMeans))
def test_decision_names_what_became_of_a_preempted_request_s_blocks(
    means: PreemptionMeans, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="forebay.requests")
    bench = Bench()
    replica = bench.replica(slots=1, means=means)
    bench.submit("low", "batch", tokens=3)
    replica.turn()
    bench.submit("high", "interactive", tokens=1)
    for _ in range(4):
        replica.turn()
    low = json.loads(caplog.records[-1].getMessage())
    assert low["request_id"] == "low"
    (decision,) = [d for d in low["decisions"] if d["event"] == "preempted"]
    assert decision["why"] == f"for high: {means.value}"
    labels = {"priority_class": "batch", "cause": "urgent", "means": means.value}
    assert bench.metric("forebay_preemptions_total", **labels) == 1


def test_urgent_work_is_sent_where_paused_lower_work_keeps_every_block() -> None:
    """Four lower requests of 80 tokens fill 20 blocks and are paused with all of them by short urgent ones."""
    bench = Bench(RouterConfig(expected_output_tokens=16))
    replica = bench.replica(slots=4, blocks=20, means=PreemptionMeans.PAUSE)
    low = [bench.submit(f"low{k}", "batch", prompt=64, tokens=16) for k in range(4)]
    for _ in range(16 - 1):
        replica.turn()
    for k in range(4):
        bench.submit(f"u{k}", "interactive", prompt=1, tokens=1)
    replica.turn()
    load = replica.report().load
    assert (load.blocks_free, sum(level.blocks for level in load.waiting)) == (0, 20)
    urgent = bench.submit("urgent", "interactive", prompt=64, tokens=16)
    assert ids_added(replica)[-1] == "urgent"
    bench.submit("lower", "batch", prompt=64, tokens=16)
    assert ids_added(replica)[-1] == "urgent", "what paused work of its own priority keeps is not to be had"
    assert bench.outcome(urgent) is None
    assert all(bench.outcome(r) is None for r in low)


def test_stated_output_is_held_against_what_came() -> None:
    bench = Bench()
    replica = bench.replica()
    for name, tokens, stated in (("exact", 4, 4), ("half", 4, 8), ("silent", 4, None)):
        bench.submit(name, "standard", tokens=tokens, stated=stated)
    gone = bench.submit("gone", tokens=50, stated=5)
    for _ in range(4):
        replica.turn()
    bench.core.cancel(gone.request_id)
    name, labels = "forebay_output_over_stated", {"priority_class": "standard"}
    assert bench.metric(f"{name}_count", **labels) == 2
    assert bench.metric(f"{name}_sum", **labels) == 1.5
    assert bench.metric(f"{name}_bucket", le="0.5", **labels) == 1


def test_stated_output_is_what_is_reserved_until_it_is_surpassed() -> None:
    """blocks of 16: 8 + 40 are three; 8 + 200 more than it may have: its 64 are five; 8 + the assumed 16 are two."""
    bench = Bench(RouterConfig(expected_output_tokens=16))
    for stated, blocks in ((40, 3), (200, 5), (None, 2), (1, 1)):
        replica = bench.replica(f"stated-{stated}")
        request = bench.submit(f"q{stated}", tokens=64, stated=stated)
        assert bench.core._fleet[replica.replica_id].reservations[request.request_id].blocks == blocks
        replica.die()
        bench.core.cancel(request.request_id)
