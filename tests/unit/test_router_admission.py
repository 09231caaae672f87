"""The laws of admission, on literal views."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from cluster.config import PriorityClass
from cluster.types import EngineLoad, Outcome, PriorityLoad, ReplicaId
from router.admission import (
    AdmissionView,
    Admit,
    DrainRate,
    Queue,
    Reject,
    RequestFacts,
    backlog_seconds,
    decide,
    retry_after_s,
)
from router.routing import Need
from router.view import Condition, ReplicaView

STANDARD = PriorityClass(name="standard", priority=0, max_queued_requests=10, max_queued_bytes=1000)
FREE = EngineLoad(slots_total=2, blocks_total=10, blocks_free=10, block_size_tokens=16)
FULL = EngineLoad(slots_total=1, blocks_total=10, blocks_free=9, block_size_tokens=16, running=(PriorityLoad(0, 1, 1),))


def replica(load: EngineLoad | None, condition: Condition = Condition.ROUTABLE) -> ReplicaView:
    return ReplicaView(replica_id=ReplicaId("r"), condition=condition, load=load)


def judge(size_bytes: int = 100, tokens: int = 16, count: int = 1, **changes: Any) -> Admit | Queue | Reject:
    fields: dict[str, Any] = {
        "draining": False,
        "replicas": [replica(FULL)],
        "ahead_requests": 0,
        "class_requests": 0,
        "class_bytes": 0,
        "drain_per_s": 1.0,
    }
    facts = RequestFacts(Need(0, tokens, tokens), size_bytes, STANDARD, count)
    return decide(facts, AdmissionView(**(fields | changes)), random.Random(0))


def test_admitted_only_where_nothing_is_ahead_and_a_replica_has_room() -> None:
    assert judge(replicas=[replica(FREE)]) == Admit()
    assert judge(replicas=[replica(FREE)], ahead_requests=3) == Queue(3)
    assert judge(replicas=[replica(FULL)]) == Queue(0)


def test_several_are_let_in_together_where_the_queue_holds_all_that_must_wait() -> None:
    """At most ten wait, of 1,000 bytes together; where the first starts at once it does not wait."""
    assert judge(count=10) == Queue(0)
    assert isinstance(judge(count=11), Reject)
    assert judge(count=3, class_requests=7) == Queue(0)
    assert isinstance(judge(count=3, class_requests=8), Reject)
    assert isinstance(judge(count=5, size_bytes=201), Reject)
    assert judge(count=11, size_bytes=1, replicas=[replica(FREE)]) == Admit()
    assert isinstance(judge(count=12, size_bytes=1, replicas=[replica(FREE)]), Reject)
    assert isinstance(judge(count=6, size_bytes=201, replicas=[replica(FREE)]), Reject)


def test_bounds_of_the_queue_do_not_matter_to_what_starts_at_once() -> None:
    assert judge(replicas=[replica(FREE)], class_requests=10, class_bytes=1000) == Admit()


@pytest.mark.parametrize(
    ("class_requests", "class_bytes", "refused"),
    [(9, 900, False), (10, 0, True), (0, 901, True)],
)
def test_class_is_bounded_in_requests_and_in_bytes(class_requests: int, class_bytes: int, refused: bool) -> None:
    decision = judge(class_requests=class_requests, class_bytes=class_bytes)
    assert (isinstance(decision, Reject) and decision.outcome is Outcome.REJECTED_QUEUE_FULL) is refused


def test_draining_refuses_before_anything_else() -> None:
    decision = judge(draining=True, replicas=[replica(FREE)])
    assert isinstance(decision, Reject)
    assert decision.outcome is Outcome.REJECTED_DRAINING


@pytest.mark.parametrize("condition", list(Condition))
def test_waits_for_a_replica_that_may_come_back_and_not_for_one_that_leaves(condition: Condition) -> None:
    decision = judge(replicas=[replica(FREE, condition)], ahead_requests=1)
    if condition is Condition.DRAINING:
        assert isinstance(decision, Reject)
        assert decision.outcome is Outcome.REJECTED_NO_REPLICA
    else:
        assert decision == Queue(1)


def test_no_replica_at_all_is_told_at_once() -> None:
    decision = judge(replicas=[])
    assert isinstance(decision, Reject)
    assert decision.outcome is Outcome.REJECTED_NO_REPLICA
    assert decision.retry_after_s is not None


def test_too_large_for_all_is_no_matter_of_retrying() -> None:
    assert judge(tokens=161) == Reject(Outcome.REJECTED_TOO_LARGE, None)
    assert judge(tokens=160) == Queue(0)


def test_retry_after_is_backlog_over_drain_rate_within_a_fifth() -> None:
    rng = random.Random(5)
    seconds = [retry_after_s(backlog_seconds(40, 2.0), rng) for _ in range(500)]
    assert min(seconds) == 16
    assert max(seconds) == 24
    assert len(set(seconds)) == 9


def test_retry_after_is_at_least_one_second_and_at_most_sixty_and_jittered_at_the_cap() -> None:
    rng = random.Random(5)
    assert {retry_after_s(0.0, rng) for _ in range(50)} == {1}
    capped = {retry_after_s(backlog_seconds(10**6, 0.0), rng) for _ in range(500)}
    assert max(capped) == 60
    assert min(capped) == 40
    assert len(capped) > 15


def test_drain_rate_is_unbiased_early_and_follows_a_change() -> None:
    rate = DrainRate(now_s=0.0)
    assert rate.per_s(0.0) == 0.0
    for k in range(1, 51):
        rate.left(k * 0.1)
    assert math.isclose(rate.per_s(5.0), 10.0, rel_tol=0.05)
    for k in range(1, 181):
        rate.left(5.0 + k)
    assert math.isclose(rate.per_s(185.0), 1.0, rel_tol=0.1)
    assert rate.per_s(485.0) < 0.001
