"""Times that requests come with, and what is told about them afterwards."""

from __future__ import annotations

import gc
import random
import tracemalloc

import pytest

from cluster.config import PriorityClass, RouterConfig
from cluster.types import Outcome, Request, RequestId
from router.deadlines import Timers
from router.explain import Ended, Explanation, encode
from router.journal import Decision
from router.outcomes import MEANINGS
from router.terms import Terms
from tests.unit.fake_replica import Bench, FakeReplica, expected_text

PATIENT = RouterConfig(silent_after_s=1e4, fenced_after_s=1e5)


def passed(bench: Bench, seconds: float) -> None:
    bench.clock.advance(seconds)
    bench.core.tick()


def outcome_after(bench: Bench, request: Request, seconds: float) -> Outcome | None:
    passed(bench, seconds)
    return bench.outcome(request)


# --- timers ---


def test_timers_tell_each_time_once_in_order_over_random_operations() -> None:
    rng = random.Random(2)
    timers, model = Timers(), dict[str, float]()
    for step in range(5000):
        name, action = RequestId(str(rng.randrange(50))), rng.random()
        if action < 0.6:
            model[name] = step + rng.randint(0, 100)
            timers.set(name, model[name])
        elif action < 0.8:
            model.pop(name, None)
            timers.clear(name)
        due = [n for n, at in sorted(model.items(), key=lambda item: (item[1], item[0])) if at <= step]
        assert timers.due(step) == due
        for n in due:
            del model[n]
    assert len(timers) == len(model)
    assert len(timers._heap) <= 2 * 50 + 17


# --- the first token ---


def test_request_that_waits_past_its_time_to_first_token_is_not_begun() -> None:
    bench = Bench(PATIENT)
    replica = bench.replica(slots=1)
    bench.submit("running", tokens=99)
    late = bench.submit("late", terms=Terms(ttft_slo_s=2))
    assert outcome_after(bench, late, 1.9) is None
    assert outcome_after(bench, late, 0.2) is Outcome.EXPIRED_IN_QUEUE
    assert MEANINGS[Outcome.EXPIRED_IN_QUEUE].status == 504
    assert [r.request_id for r, _ in replica.added] == ["running"]


def test_request_that_was_begun_in_time_runs_on_past_its_time_to_first_token() -> None:
    bench = Bench(PATIENT)
    replica = bench.replica()
    request = bench.submit("a", tokens=2, terms=Terms(ttft_slo_s=2))
    assert outcome_after(bench, request, 5) is None
    replica.turn()
    replica.turn()
    assert bench.outcome(request) is Outcome.FINISHED


def test_request_that_comes_back_without_a_token_has_the_time_that_it_had() -> None:
    bench = Bench(PATIENT)
    replica = bench.replica()
    request = bench.submit("a", tokens=2, terms=Terms(ttft_slo_s=2))
    passed(bench, 1.9)
    replica.die()
    assert outcome_after(bench, request, 0.2) is Outcome.EXPIRED_IN_QUEUE


def test_losses_before_the_first_token_do_not_lengthen_the_longest_wait() -> None:
    bench = Bench(RouterConfig(max_queue_s=10, silent_after_s=1e4, fenced_after_s=1e5))
    replica = bench.replica()
    request = bench.submit("a", tokens=2)
    passed(bench, 9.9)
    replica.die()
    assert bench.outcome(request) is None
    assert outcome_after(bench, request, 0.2) is Outcome.EXPIRED_IN_QUEUE


def test_request_that_comes_back_with_tokens_has_no_first_token_to_wait_for() -> None:
    bench = Bench(PATIENT)
    replica = bench.replica()
    request = bench.submit("a", tokens=3, terms=Terms(ttft_slo_s=2))
    replica.turn()
    passed(bench, 5)
    replica.die()
    assert outcome_after(bench, request, 5) is None
    other = bench.replica("r2")
    for _ in range(2):
        other.turn()
    assert bench.text(request) == expected_text(request)


def test_class_ends_what_has_waited_its_longest_wait_and_no_other_class() -> None:
    classes = (
        PriorityClass(name="standard", priority=0, longest_wait_s=5),
        PriorityClass(name="batch", priority=-10),
    )
    bench = Bench(RouterConfig(classes=classes, silent_after_s=1e4, fenced_after_s=1e5, minimum_share=0))
    replica = bench.replica(slots=1)
    bench.submit("running", tokens=99)
    batch, standard = bench.submit("b", "batch"), bench.submit("s")
    assert outcome_after(bench, standard, 4.9) is None
    assert outcome_after(bench, standard, 0.2) is Outcome.EXPIRED_IN_QUEUE
    assert bench.outcome(batch) is None
    assert len(replica.added) == 1


# --- the whole ---


def test_time_limit_ends_a_running_request_and_frees_its_place() -> None:
    bench = Bench(PATIENT)
    replica = bench.replica(slots=1)
    request = bench.submit("a", tokens=99, terms=Terms(timeout_s=3))
    waiting = bench.submit("next", tokens=1)
    replica.turn()
    assert outcome_after(bench, request, 2.9) is None
    assert outcome_after(bench, request, 0.2) is Outcome.TIMED_OUT
    assert MEANINGS[Outcome.TIMED_OUT].status == 504
    assert replica.aborted == [("a", 1)]
    replica.beat()
    replica.turn()
    assert bench.outcome(waiting) is Outcome.FINISHED
    assert bench.metric("forebay_requests_total", priority_class="standard", outcome="timed_out") == 1


def test_time_limit_counts_from_the_arrival_over_every_attempt() -> None:
    bench = Bench(PATIENT)
    replica = bench.replica()
    request = bench.submit("a", tokens=99, terms=Terms(timeout_s=3))
    replica.turn()
    passed(bench, 2)
    replica.die()
    other = bench.replica("r2")
    other.turn()
    assert outcome_after(bench, request, 1.1) is Outcome.TIMED_OUT
    assert other.aborted == [("a", 2)]


def test_time_limit_that_passes_in_the_queue_is_told_as_such() -> None:
    bench = Bench(PATIENT)
    bench.replica(slots=1)
    bench.submit("running", tokens=99)
    assert outcome_after(bench, bench.submit("a", terms=Terms(timeout_s=3)), 3.1) is Outcome.EXPIRED_IN_QUEUE


def test_request_that_ended_in_time_is_not_ended_again() -> None:
    bench = Bench(PATIENT)
    replica = bench.replica()
    request = bench.submit("a", tokens=1, terms=Terms(ttft_slo_s=1, timeout_s=2))
    replica.turn()
    assert outcome_after(bench, request, 10) is Outcome.FINISHED
    assert bench.metric("forebay_requests_total", priority_class="standard", outcome="timed_out") == 0


# --- at arrival ---


def drained(bench: Bench, replica: FakeReplica, requests: int) -> None:
    """Ten wait at all times; one a second leaves, of 8 prompt and 1 output token: 10 service a second."""
    for k in range(requests):
        bench.submit(f"w{k}", tokens=1)
        if k >= 10:
            bench.clock.advance(1 - 0.001)
            replica.turn()
            bench.core.tick()


def test_first_token_that_would_come_too_late_is_refused_at_arrival_by_what_was_measured() -> None:
    """Ten wait, each taking a second: an eleventh is begun after about ten."""
    bench = Bench(PATIENT)
    replica = bench.replica(slots=1)
    drained(bench, replica, 60)
    waiting = bench.core.bands()[0].queued_requests
    assert waiting in (9, 10)
    hopeless = bench.submit("hopeless", tokens=1, terms=Terms(ttft_slo_s=7))
    possible = bench.submit("possible", tokens=1, terms=Terms(ttft_slo_s=15))
    assert bench.outcome(hopeless) is Outcome.REJECTED_DEADLINE
    assert bench.outcome(possible) is None
    meaning = MEANINGS[Outcome.REJECTED_DEADLINE]
    assert (meaning.status, meaning.code) == (429, "deadline_unreachable")
    assert bench.outcome(bench.submit("short", tokens=1, terms=Terms(timeout_s=7))) is Outcome.REJECTED_DEADLINE
    ending = bench.streams[hopeless.request_id].ending
    assert ending is not None
    assert ending.retry_after_s is not None
    assert 0.75 * waiting <= ending.retry_after_s <= 1.25 * (waiting + 1), "backlog / drain, within a fifth"


def test_another_tenant_s_backlog_refuses_nobody_who_is_served_before_it() -> None:
    bench = Bench(PATIENT)
    replica = bench.replica(slots=1)
    drained(bench, replica, 60)
    light = bench.submit("light", tokens=1, tenant="light", terms=Terms(ttft_slo_s=7))
    assert bench.outcome(light) is None
    replica.turn()
    replica.turn()
    assert bench.outcome(light) is Outcome.FINISHED


def test_what_starts_at_once_says_nothing_of_how_fast_a_queue_drains() -> None:
    """100 start at once and are done; then ten wait and one leaves a second."""
    bench = Bench(PATIENT)
    wide = bench.replica("wide", slots=100)
    for k in range(100):
        bench.submit(f"at once {k}", tokens=1)
    wide.turn()
    wide.die()
    drained(bench, bench.replica("narrow", slots=1), 40)
    assert bench.core._dispatcher.drain_per_s("standard", bench.clock.monotonic()) == pytest.approx(10, rel=0.15)


def test_nothing_is_refused_by_a_prediction_before_anything_was_measured() -> None:
    bench = Bench(PATIENT)
    bench.replica(slots=1)
    for k in range(50):
        assert bench.outcome(bench.submit(f"q{k}", terms=Terms(ttft_slo_s=0.5, timeout_s=0.6))) is None


# --- explanations ---


def test_explanation_follows_a_request_with_the_numbers_of_each_decision() -> None:
    bench = Bench(PATIENT)
    replica = bench.replica(slots=1)
    first = bench.submit("first", tokens=2)
    second = bench.submit("second", tokens=1, prompt=20)
    queued = bench.core.explain(second.request_id, "t")
    assert queued is not None
    assert (queued.state, queued.outcome, queued.replica) == ("queued", None, "")
    (decision,) = queued.decisions
    assert (decision.event, decision.numbers["ahead"], decision.numbers["band"]) == ("queued", 0, 0)
    assert (decision.numbers["tenant_counter"], decision.numbers["least_counter"]) == (8, 8), "the first's prompt"
    running = bench.core.explain(first.request_id, "t")
    assert running is not None
    assert (running.state, running.replica) == ("running", "r1")
    replica.turn()
    replica.turn()
    replica.turn()
    ended = bench.core.explain(second.request_id, "t")
    assert ended is not None
    assert (ended.state, ended.outcome, ended.finish) == ("ended", "finished", "length")
    assert [d.event for d in ended.decisions] == ["queued", "dispatched"]
    dispatched = ended.decisions[1]
    assert (dispatched.replica, dispatched.numbers["blocks"], dispatched.numbers["score"]) == ("r1", 2, 1.0)
    assert (ended.prompt_tokens, ended.output_tokens, ended.attempts) == (20, 1, 1)


def test_refusal_is_explained_by_its_bound_and_what_fills_it() -> None:
    classes = (PriorityClass(name="standard", priority=0, max_queued_requests=1),)
    bench = Bench(RouterConfig(classes=classes))
    bench.replica(slots=1)
    for name in ("running", "queued"):
        bench.submit(name, tokens=9)
    refused = bench.core.explain(bench.submit("refused").request_id, "t")
    assert refused is not None
    assert (refused.state, refused.outcome) == ("ended", "rejected_queue_full")
    (decision,) = refused.decisions
    assert (decision.event, decision.why) == ("rejected", "rejected_queue_full")
    assert (decision.numbers["queued"], decision.numbers["bound"]) == (1, 1)
    assert decision.numbers["backlog"] == 8 + 2 * 9


def test_only_the_own_tenant_is_told_and_of_what_is_unknown_nobody() -> None:
    bench = Bench()
    bench.replica()
    request = bench.submit("a", tenant="mine")
    assert bench.core.explain(request.request_id, "mine") is not None
    assert bench.core.explain(request.request_id, "other") is None
    bench.core.cancel(request.request_id)
    assert bench.core.explain(request.request_id, "other") is None
    assert bench.core.explain(request.request_id, "mine") is not None
    assert bench.core.explain(RequestId("never"), "mine") is None


def test_what_an_explanation_is_counted_as_is_no_less_than_it_holds() -> None:
    bench = Bench(PATIENT)
    replica = bench.replica(slots=1)

    def end(first: int, count: int) -> None:
        for k in range(first, first + count):
            bench.submit(f"chatcmpl-{k:032}", tokens=1, tenant=f"tenant-{k % 20}")
        while bench.core._live:
            replica.turn()
        bench.streams.clear()
        replica.added.clear()
        replica.done.clear()
        gc.collect()

    end(0, 20)
    ended = bench.core._endings.ended
    counted = ended._bytes
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        end(20, 300)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(ended) == 320
    assert after - before <= ended._bytes - counted


@pytest.mark.parametrize(("requests", "size_bytes", "kept"), [(3, 10**6, 3), (100, 3 * 612 + 611, 3), (0, 10**6, 0)])
def test_explanations_are_kept_up_to_a_number_and_a_size_the_latest_ones(
    requests: int, size_bytes: int, kept: int
) -> None:
    """One of 100 bytes holds 612 by our count."""
    ended = Ended(requests, size_bytes)
    for k in range(20):
        ended.add(RequestId(str(k)), b"%100d" % k)
    assert len(ended) == kept
    known = [k for k in range(20) if RequestId(str(k)) in ended]
    assert known == list(range(20 - kept, 20))


def test_what_has_ended_is_explained_as_it_was() -> None:
    ended, first, again = Ended(2, 10**6), explanation("a"), explanation("b")
    ended.add(RequestId("a"), encode(first))
    ended.add(RequestId("a"), encode(again))
    assert len(ended) == 1
    assert ended.get(RequestId("a")) == again
    assert ended.get(RequestId("b")) is None


def explanation(name: str) -> Explanation:
    return Explanation(
        request_id=name,
        tenant="t",
        priority_class="standard",
        priority=0,
        state="ended",
        prompt_tokens=1,
        output_tokens=1,
        attempts=1,
        age_ms=1,
        decisions=(Decision(0, "admitted"),),
    )
