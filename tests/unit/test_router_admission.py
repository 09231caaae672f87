"""The laws of admission, on literal views."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import msgspec
import pytest

from cluster.config import PriorityClass, RouterConfig
from cluster.messages import StepFrame
from cluster.types import EngineLoad, Generation, Outcome, PriorityLoad, ReplicaState
from router.admission import (
    AdmissionView,
    Admit,
    Pace,
    Prompts,
    Queue,
    Reject,
    RequestFacts,
    backlog_seconds,
    begun_within_s,
    decide,
    evenly_ahead,
    predicted_wait_s,
    retry_after_s,
)
from router.pace import DrainRate, MeanTime, ServiceTimes
from router.routing import Need
from router.terms import Terms
from tests.unit.fake_replica import Bench, FakeReplica
from tests.unit.test_router_prefixes import hashes, held

STANDARD = PriorityClass(name="standard", priority=0, max_queued_requests=10, max_queued_bytes=1000)


def judge(size_bytes: int = 100, count: int = 1, service: int = 0, **changes: Any) -> Admit | Queue | Reject:
    """Of a request that would wait for a replica which is only full, with nothing in front of it."""
    of_request = {name: changes.pop(name) for name in ("age_s", "terms", "output_tokens") if name in changes}
    facts = RequestFacts(Need(0, 16, 16), size_bytes, STANDARD, count, service, **of_request)
    fields: dict[str, Any] = {
        "draining": False,
        "leaving": False,
        "too_large": False,
        "room": False,
        "ahead_requests": 0,
        "class_requests": 0,
        "class_bytes": 0,
    }
    return decide(facts, AdmissionView(**(fields | changes)), random.Random(0))


def test_admitted_only_where_nothing_is_ahead_and_a_replica_has_room() -> None:
    assert judge(room=True) == Admit()
    assert judge(room=True, ahead_requests=3) == Queue(3)
    assert judge(room=False) == Queue(0)


def test_several_are_let_in_together_where_the_queue_holds_all_that_must_wait() -> None:
    """At most ten wait, of 1,000 bytes together; where the first starts at once it does not wait."""
    assert judge(count=10) == Queue(0)
    assert isinstance(judge(count=11), Reject)
    assert judge(count=3, class_requests=7) == Queue(0)
    assert isinstance(judge(count=3, class_requests=8), Reject)
    assert isinstance(judge(count=5, size_bytes=201), Reject)
    assert judge(count=11, size_bytes=1, room=True) == Admit()
    assert isinstance(judge(count=12, size_bytes=1, room=True), Reject)
    assert isinstance(judge(count=6, size_bytes=201, room=True), Reject)


def test_bounds_of_the_queue_do_not_matter_to_what_starts_at_once() -> None:
    assert judge(room=True, class_requests=10, class_bytes=1000) == Admit()


@pytest.mark.parametrize(
    ("class_requests", "class_bytes", "refused"),
    [(9, 900, False), (10, 0, True), (0, 901, True)],
)
def test_class_is_bounded_in_requests_and_in_bytes(class_requests: int, class_bytes: int, refused: bool) -> None:
    decision = judge(class_requests=class_requests, class_bytes=class_bytes)
    assert (isinstance(decision, Reject) and decision.outcome is Outcome.REJECTED_QUEUE_FULL) is refused


def test_draining_refuses_before_anything_else() -> None:
    decision = judge(draining=True, room=True)
    assert isinstance(decision, Reject)
    assert decision.outcome is Outcome.REJECTED_DRAINING


@pytest.mark.parametrize("condition", ["link_down", "no_report", "silent", "draining"])
def test_waits_for_a_replica_that_may_come_back_and_not_for_one_that_leaves(condition: str) -> None:
    bench = Bench()
    replica = bench.replica(state=ReplicaState.DRAINING if condition == "draining" else ReplicaState.READY)
    match condition:
        case "link_down":
            replica.break_link()
        case "no_report":
            bench.core.link_up(type(replica)(bench.core, generation=Generation(2, "b")), None)
        case "silent":
            bench.clock.advance(1.5)
    outcome = bench.outcome(bench.submit("a"))
    assert outcome is (Outcome.REJECTED_NO_REPLICA if condition == "draining" else None)


def test_no_replica_at_all_is_told_at_once() -> None:
    decision = judge(leaving=True)
    assert isinstance(decision, Reject)
    assert decision.outcome is Outcome.REJECTED_NO_REPLICA
    assert decision.retry_after_s is not None


def test_too_large_for_all_is_no_matter_of_retrying() -> None:
    assert judge(too_large=True) == Reject(Outcome.REJECTED_TOO_LARGE, None)


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


def test_retry_after_an_empty_queue_is_the_least_and_after_one_that_was_not_measured_a_few_seconds() -> None:
    rng = random.Random(5)
    for drain_per_s in (None, 0.0, 3.0):
        assert retry_after_s(backlog_seconds(0, drain_per_s), rng) == 1
    assert {retry_after_s(backlog_seconds(10**6, None), rng) for _ in range(200)} == {4, 5, 6}


# --- what a tenant may fill ---


def test_tenant_fills_at_most_its_part_of_the_queue_and_never_less_than_one_request() -> None:
    half = Terms(queue_share=0.5)
    assert judge(terms=half, tenant_requests=4) == Queue(0)
    over = judge(terms=half, tenant_requests=5)
    assert isinstance(over, Reject)
    assert (over.outcome, "part" in over.error) == (Outcome.REJECTED_QUEUE_FULL, True)
    assert (over.numbers["queued"], over.numbers["bound"]) == (5, 5)
    assert isinstance(judge(terms=half, tenant_bytes=401), Reject), "500 of its 1,000 bytes"
    assert judge(terms=half, tenant_bytes=400) == Queue(0)
    assert judge(terms=Terms(queue_share=0.01), size_bytes=1) == Queue(0)
    assert isinstance(judge(terms=half, tenant_requests=3, count=3), Reject)
    assert judge(terms=half, tenant_requests=5, room=True) == Admit(), "what starts at once fills nothing"


# --- what is predicted ---


def test_wait_is_predicted_from_the_faster_of_drain_and_minimum_share_and_from_nothing_unmeasured() -> None:
    assert predicted_wait_s(Pace(backlog=1000, ahead=1000), 10) is None
    assert predicted_wait_s(Pace(ahead=990, drain_per_s=50), 10) == 20
    assert predicted_wait_s(Pace(ahead=990, drain_per_s=5, share_per_s=20, ageing_after_s=30), 10) == 50
    assert predicted_wait_s(Pace(ahead=90, share_per_s=20, ageing_after_s=30), 10) == 30, "not before it is old enough"


def test_other_tenants_stand_in_front_for_no_more_than_the_own_work_by_weight() -> None:
    """Own 100 with weight 2, 8 waiting in all: the others get at most 100 / 2 x 6 before it is through."""
    assert evenly_ahead(backlog=100_000, own=100, weight=2, waiting_weight=8) == 400
    assert evenly_ahead(backlog=300, own=100, weight=2, waiting_weight=8) == 300
    assert evenly_ahead(backlog=700, own=1000, weight=1, waiting_weight=1) == 700


def test_refused_for_its_wait_exactly_where_the_prediction_is_beyond_what_the_class_promises() -> None:
    pace = Pace(backlog=400, ahead=400, drain_per_s=10)
    assert judge(service=50, pace=pace, longest_wait_s=50) == Queue(0), "45 s are nine tenths of it"
    late = judge(service=51, pace=pace, longest_wait_s=50)
    assert isinstance(late, Reject)
    assert late.outcome is Outcome.REJECTED_WAIT
    assert late.numbers["backlog"] == 400
    assert late.retry_after_s is not None
    assert 32 <= late.retry_after_s <= 48, "400 / 10 s, within a fifth"
    assert judge(service=101, pace=pace, longest_wait_s=50, room=True) == Admit()
    assert judge(service=101, longest_wait_s=0.001) == Queue(0), "nothing has been measured"


# --- what waits on the replica ---


def with_ahead(ahead_s: float, own_s: float, longest_wait_s: float = 10.0) -> Admit | Queue | Reject:
    """Of a request that is sent out at once."""
    return judge(room=True, longest_wait_s=longest_wait_s, pace=Pace(prompts=Prompts(ahead_s, own_s)))


@pytest.mark.parametrize(
    ("ahead_s", "own_s", "refused"),
    [
        (8.0, 1.0, False),  # nine tenths of 10 s, less 1 s
        (8.1, 1.0, True),
        (6.0, 3.0, False),
        (6.1, 3.0, True),
        (5.0, 100.0, False),  # half of 10 s, however long
        (5.1, 100.0, True),
        (0.0, 1000.0, False),
    ],
)
def test_refused_where_its_replica_cannot_begin_it_in_time_and_the_sooner_the_longer_it_is(
    ahead_s: float, own_s: float, refused: bool
) -> None:
    decision = with_ahead(ahead_s, own_s)
    assert isinstance(decision, Reject) is refused
    if isinstance(decision, Reject):
        assert decision.outcome is Outcome.REJECTED_WAIT
        assert decision.retry_after_s is not None
        assert 0.8 * ahead_s - 0.5 <= decision.retry_after_s <= 1.2 * ahead_s + 0.5
        numbers = dict(decision.numbers)
        assert (numbers["prompts_ahead_s"], numbers["own_prompt_s"], numbers["longest_wait_s"]) == (ahead_s, own_s, 10)


def test_less_ahead_a_shorter_prompt_and_a_longer_wait_never_lead_to_a_refusal() -> None:
    rng = random.Random(9)
    let_in = 0
    for _ in range(2000):
        ahead_s, own_s, longest_s = rng.uniform(0, 12), rng.uniform(0, 12), rng.uniform(0.1, 12)
        if isinstance(with_ahead(ahead_s, own_s, longest_s), Reject):
            assert ahead_s > begun_within_s(longest_s, own_s) >= longest_s / 2
            continue
        let_in += 1
        easier = ahead_s * rng.random(), own_s * rng.random(), longest_s * (1 + rng.random())
        assert with_ahead(*easier) == Admit()
    assert 200 < let_in < 1800


def test_class_that_states_a_wait_refuses_what_stands_behind_too_long_prompts_and_says_why() -> None:
    """A step of 16 tokens takes a second; the class lets nobody wait for more than 10 s."""
    standard = PriorityClass(name="standard", priority=0, longest_wait_s=10.0)
    bench = Bench(RouterConfig(classes=(standard,), expected_output_tokens=1))
    replica = bench.replica(slots=100, step_tokens=16)
    for k in range(8):
        bench.submit(f"seen {k}", tokens=1, prompt=16)
        bench.clock.advance(0.999)  # with the millisecond of each that is submitted
        replica.turn()
    bench.submit("first", prompt=5 * 16)
    assert bench.outcome(bench.submit("short", prompt=3 * 16)) is None
    long = bench.submit("long", prompt=3 * 16)
    assert bench.outcome(long) is Outcome.REJECTED_WAIT, "8 s stand before it, and 9 s less its own 3 s may"
    assert bench.outcome(bench.submit("shortest", prompt=8)) is None
    explanation = bench.core.explain(long.request_id, "t")
    assert explanation is not None
    numbers = explanation.decisions[-1].numbers
    assert numbers["prompts_ahead_s"] == pytest.approx(8.0, rel=0.01)
    assert numbers["own_prompt_s"] == pytest.approx(3.0, rel=0.01)
    replica.turn()
    assert bench.outcome(bench.submit("later", prompt=3 * 16)) is None, "the prompts have been run"


def test_many_short_prompts_at_once_are_let_in_where_a_few_steps_run_them_all() -> None:
    """A step of 160 tokens takes a second; a prompt has 10 of them, and 48 that come at once take three seconds."""
    standard = PriorityClass(name="standard", priority=0, longest_wait_s=10.0)
    bench = Bench(RouterConfig(classes=(standard,), expected_output_tokens=1))
    replica = bench.replica(slots=100, step_tokens=160)
    for k in range(8):
        bench.submit(f"seen {k}", tokens=1, prompt=10)
        bench.clock.advance(0.999)  # with the millisecond of each that is submitted
        replica.turn()
    submitted = [bench.submit(f"{k}", prompt=10) for k in range(48)]
    assert [bench.outcome(request) for request in submitted] == [None] * 48


SLOTS, STEP_TOKENS, STEP_BLOCKS = 4, 160, 10


def measure_a_second_a_step(bench: Bench) -> float:
    """Eight answers of one step each, from a replica that is gone then. Returns what was measured, about 1."""
    replica = bench.replica("seen", step_tokens=STEP_TOKENS)
    for k in range(8):
        bench.submit(f"seen {k}", tokens=1, prompt=STEP_TOKENS)
        bench.clock.advance(0.999)  # with the millisecond of each that is submitted
        replica.turn()
    replica.die()
    step_s = bench.core._dispatcher.arrivals.times.prompt_step_s("standard")
    assert step_s is not None
    assert step_s == pytest.approx(1.0, rel=0.01)
    return step_s


def tell(replica: FakeReplica, urgent: int, lesser: int, steps: int, blocks: list[int], slots: int = SLOTS) -> None:
    """It runs so many requests, the urgent ones with so many steps of prompts left, and holds these blocks."""
    levels = PriorityLoad(-10, lesser, lesser), PriorityLoad(0, urgent, urgent, STEP_TOKENS * steps)
    load = EngineLoad(
        slots_total=slots, blocks_total=1000, blocks_free=1000 - urgent - lesser, block_size_tokens=16,
        step_tokens=STEP_TOKENS, running=tuple(level for level in levels if level.requests),
    )  # fmt: skip
    told = msgspec.structs.replace(replica.report(), load=load)
    replica.listener.frame(replica.replica_id, replica.generation, StepFrame(told, prefixes=held(blocks, afresh=True)))


@pytest.mark.parametrize(("replicas", "rounds"), [(1, 100), (2, 200), (5, 400), (100, 40)])
def test_refused_for_prompts_ahead_only_where_no_replica_with_a_place_would_begin_it_in_time(
    replicas: int, rounds: int
) -> None:
    """By brute force, over replicas that run urgent and lesser work and hold parts of the prompt. A step takes a second: of its 160
    tokens those who decode take four at most, which makes no difference to a wait of 10.8 s and whole steps. Of a hundred not all
    are looked at: many of them would do, or none."""
    rng = random.Random(replicas)
    standard = PriorityClass(name="standard", priority=0, longest_wait_s=10.8)
    bench = Bench(RouterConfig(classes=(standard,), expected_output_tokens=1))
    step_s = measure_a_second_a_step(bench)
    members = [bench.replica(f"r{k}") for k in range(replicas)]
    seen: Counter[Outcome | None] = Counter()
    for number in range(rounds):
        steps, least, known = rng.randint(1, 16), rng.choice((0, 4, 4, 10)), rng.random() < 0.5
        blocks = hashes(tuple(range(1, STEP_TOKENS * steps + 1)), block=16)
        with_place, in_time = set(), set()
        for member in members:
            urgent = rng.randint(least > 0, SLOTS)
            lesser, ahead = rng.randint(0, SLOTS - urgent), rng.randint(least, 13) if urgent else 0
            holds = rng.choice((0, steps // 2, steps - 1)) if known else 0
            tell(member, urgent, lesser, ahead, blocks[: STEP_BLOCKS * holds])
            if urgent < SLOTS:
                with_place.add(member.replica_id)
                if ahead * step_s <= max(0.9 * 10.8 - (steps - holds) * step_s, 10.8 / 2):
                    in_time.add(member.replica_id)
        request = bench.submit(f"{number}", prompt=STEP_TOKENS * steps)
        outcome = bench.outcome(request)
        went = {m.replica_id for m in members if any(r.request_id == request.request_id for r, _ in m.added)}
        assert (outcome is Outcome.REJECTED_WAIT) is bool(with_place and not in_time)
        assert went <= in_time
        assert len(went) == bool(in_time)
        seen[outcome] += 1
        bench.core.cancel(request.request_id)
    assert min(seen[Outcome.REJECTED_WAIT], seen[None]) > rounds // 20


@pytest.mark.parametrize(("decode", "refused"), [(9, False), (100, True)])
def test_another_replica_begins_it_in_time_only_if_what_decodes_there_lets_the_prompts_be_run_so_soon(
    decode: int, refused: bool
) -> None:
    """Half of 10.8 s is too short for the six steps of prompts on the one that would have the first token soonest. Five steps are
    not, unless 100 others decode beside them: 110 of 160 tokens are left for prompts then."""
    standard = PriorityClass(name="standard", priority=0, longest_wait_s=10.8)
    bench = Bench(RouterConfig(classes=(standard,), expected_output_tokens=1))
    measure_a_second_a_step(bench)
    holder, other = bench.replica("holder"), bench.replica("other")
    blocks = hashes(tuple(range(1, 16 * STEP_TOKENS + 1)), block=16)
    tell(holder, 1, 0, 6, blocks[: 8 * STEP_BLOCKS], slots=200)
    tell(other, 1, decode, 5, [], slots=200)
    outcome = bench.outcome(bench.submit("long", prompt=16 * STEP_TOKENS))
    assert outcome is (Outcome.REJECTED_WAIT if refused else None)
    assert (len(holder.added), len(other.added)) == (0, 0 if refused else 1)


@pytest.mark.parametrize("tenth", [None, 10.0])
def test_prompts_ahead_count_only_where_the_class_states_a_wait(tenth: float | None) -> None:
    """A step of 16 tokens takes a second; without a wait of its own a class's is the router's, which is for the queue."""
    standard = PriorityClass(name="standard", priority=0, longest_wait_s=tenth)
    bench = Bench(RouterConfig(classes=(standard,), expected_output_tokens=1, max_queue_s=10.0))
    replica = bench.replica(slots=100, step_tokens=16)
    for k in range(8):
        bench.submit(f"seen {k}", tokens=1, prompt=16)
        bench.clock.advance(0.999)
        replica.turn()
    bench.submit("ahead", prompt=9 * 16)
    request = bench.submit("stated", prompt=9 * 16, terms=Terms(ttft_slo_s=100.0))
    assert bench.outcome(request) is (None if tenth is None else Outcome.REJECTED_WAIT)


@pytest.mark.parametrize(
    ("terms", "refused"),
    [
        (Terms(ttft_slo_s=17.0), False),
        (Terms(ttft_slo_s=16.9), True),
        (Terms(timeout_s=26.0), False),
        (Terms(timeout_s=25.9), True),
    ],
)
def test_refused_where_first_token_or_end_would_come_too_late(terms: Terms, refused: bool) -> None:
    """1 s old, waits (90 + 10) / 10 s, first token after 6 s more, 10 tokens with 1 s between."""
    pace = Pace(ahead=90, drain_per_s=10, first_token_s=6, next_token_s=1)
    decision = judge(service=10, age_s=1, output_tokens=10, terms=terms, pace=pace)
    assert isinstance(decision, Reject) is refused
    if isinstance(decision, Reject):
        assert decision.outcome is Outcome.REJECTED_DEADLINE


def test_of_what_is_not_measured_only_a_time_that_has_passed_already_refuses() -> None:
    assert judge(age_s=0.9, terms=Terms(ttft_slo_s=1)) == Queue(0)
    assert judge(age_s=1.1, terms=Terms(ttft_slo_s=1)) != Queue(0)
    assert judge(age_s=1.1, terms=Terms(ttft_slo_s=1), room=True) != Admit()


# --- what is measured ---


def test_drain_rate_is_service_over_time_from_the_first_known_on_and_follows_a_change() -> None:
    rate = DrainRate(now_s=0.0)
    rate.waits(0.0, True)
    assert rate.per_s(0.0) is None
    for k in range(1, 51):
        rate.left(k * 0.1, 7)
    assert rate.per_s(5.0) == pytest.approx(70, rel=0.05)
    for k in range(1, 181):
        rate.left(5.0 + k, 7)
    assert rate.per_s(185.0) == pytest.approx(7, rel=0.1)
    assert rate.per_s(485.0) == pytest.approx(0, abs=0.001)


def test_time_in_which_nothing_waits_does_not_lower_the_drain_rate() -> None:
    rate = DrainRate(now_s=0.0)
    for k in range(100):
        rate.waits(10.0 * k, True)
        rate.left(10.0 * k + 0.5, 5)
        rate.waits(10.0 * k + 0.5, False)
    assert rate.per_s(999.0) == pytest.approx(10, rel=0.02)


def test_drain_rate_is_unknown_until_enough_was_seen_and_again_after_a_long_rest() -> None:
    rate = DrainRate(now_s=0.0)
    rate.waits(0.0, True)
    for k in range(3):
        rate.left(k + 1.0, 5)
    assert rate.per_s(3.0) is None
    rate.left(4.0, 5)
    assert rate.per_s(4.0) is not None
    rate.waits(4.0, False)
    rate.waits(303.0, True)
    assert rate.per_s(303.0) is not None
    rate.waits(303.0, False)
    rate.waits(604.0, True)
    assert rate.per_s(604.0) is None


def test_what_came_back_unserved_is_not_drained() -> None:
    rate = DrainRate(now_s=0.0)
    rate.waits(0.0, True)
    for k in range(8):
        rate.left(2.0, 10)
        if k % 2:
            rate.came_back(2.0, 10)
    assert rate.per_s(2.0) == pytest.approx(20, rel=0.05)


def test_times_of_service_are_known_from_eight_of_their_kind_on_and_follow_a_change() -> None:
    times = ServiceTimes()
    for k in range(8):
        assert times.first_token_s(100) is None
        times.first_token(100 + k % 2, 2.0)
    assert times.first_token_s(127) == pytest.approx(2.0)
    assert times.first_token_s(128) is None, "prompts of another size"
    assert times.next_token_s is None
    mean = MeanTime()
    for seconds in [1.0] * 100 + [3.0] * 400:
        mean.observe(seconds)
    assert mean.mean_s == pytest.approx(3.0, rel=0.01)


def test_time_of_a_step_of_prompts_is_known_from_eight_requests_on_and_is_all_time_over_all_steps() -> None:
    times = ServiceTimes()
    for steps, seconds in [(1.0, 3.0), (9.0, 7.0)] * 4:
        assert times.prompt_step_s("standard") is None
        times.prompts("standard", steps, seconds)
    assert times.prompt_step_s("standard") == pytest.approx(1.0)
    assert times.prompt_step_s("interactive") is None, "each class waits for others"
    for _ in range(400):
        times.prompts("standard", 2.0, 6.0)
    assert times.prompt_step_s("standard") == pytest.approx(3.0, rel=0.01)


def test_first_token_takes_a_whole_step_however_short_the_prompts_up_to_it_were() -> None:
    times = ServiceTimes()
    for _ in range(8):
        times.prompts("interactive", 1 / 16, 0.04)
    assert times.prompt_step_s("interactive") == pytest.approx(0.04)
