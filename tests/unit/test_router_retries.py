"""Which request is tried once more after an error of its engine, where, and how many are."""

from __future__ import annotations

import asyncio
import json

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import RouterConfig
from cluster.model import ModelFolder
from cluster.types import FinishReason, Generation, Outcome, ReplicaId, ReplicaState, Request, RequestId, TokenDelta
from router.explain import Explanation
from router.proposals import Verdict
from router.retries import Retry, RetryBudget, decide
from router.stream import Buffer, Stream
from router.terms import NO_TERMS, Terms
from router.view import Condition
from tests.unit.fake_replica import Bench, FakeReplica, expected_ids, expected_text, score
from tests.unit.http_kit import TEXT, plain_client, serving
from tests.unit.test_router_proposals import propose

CONFIG = RouterConfig(retry_share=0.1, retry_burst=3, silent_after_s=1e6, fenced_after_s=1e7)
METRIC = "forebay_retries_total"

# --- the budget ---


@given(
    share=st.floats(0.01, 1),
    burst=st.integers(1, 5),
    drawn=st.lists(st.one_of(st.integers(1, 40), st.none()), max_size=60),
)
def test_retries_in_any_stretch_are_at_most_the_share_of_its_requests_and_the_burst(
    share: float, burst: int, drawn: list[int | None]
) -> None:
    """None is an error, a number so many requests that are let in. Of all stretches that end at an event, the one in which
    most is left unpaid is followed: what it has beyond its share never is more than the burst."""
    config = RouterConfig(retry_share=share, retry_burst=burst)
    budget, most_unpaid = RetryBudget(config), 0.0
    for requests in drawn:
        if requests is not None:
            budget.let_in(requests)
            most_unpaid = max(0.0, most_unpaid - share * requests)
        elif budget.left >= 1:
            budget.spend()
            most_unpaid += 1
        assert most_unpaid <= burst + 1e-9
        assert -1e-9 <= budget.left <= burst + 1e-9


def test_budget_is_full_at_first_and_ten_requests_buy_one_retry_of_a_tenth() -> None:
    budget = RetryBudget(CONFIG)
    for left in (3, 2, 1):
        assert budget.left == left
        budget.spend()
    for requests in range(10):
        assert budget.left < 1, f"{requests} requests have come"
        budget.let_in(1)
    assert budget.left == 1


@pytest.mark.parametrize(
    ("given", "verdict"),
    [
        ({}, Retry.RETRIED),
        ({"left": 0.99}, Retry.BUDGET_SPENT),
        ({"now_s": 20.0}, Retry.TOO_LATE),
        ({"suspect": True}, Retry.SUSPECT),
        ({"attempts": 2}, Retry.FAILED_AGAIN),
        ({"attempts": 2, "suspect": True, "left": 0.0, "now_s": 30.0}, Retry.FAILED_AGAIN),
        ({"suspect": True, "left": 0.0, "now_s": 30.0}, Retry.SUSPECT),
        ({"left": 0.0, "now_s": 30.0}, Retry.TOO_LATE),
    ],
)
def test_what_stands_in_the_way_of_a_retry_whatever_is_left_is_said_first(
    given: dict[str, float], verdict: Retry
) -> None:
    facts = {"left": 1.0, "attempts": 1, "suspect": False, "until_s": 20.0, "now_s": 19.0} | given
    assert decide(CONFIG, **facts) is verdict  # type: ignore[arg-type]
    off = CONFIG.model_copy(update={"retry_share": 0.0})
    assert decide(off, **facts) is Retry.OFF  # type: ignore[arg-type]
    assert RetryBudget(off).left == 0


# --- in the router ---


def two_replicas(config: RouterConfig = CONFIG, **settings: int) -> tuple[Bench, FakeReplica, FakeReplica]:
    bench = Bench(config)
    return bench, bench.replica("r1", **settings), bench.replica("r2", **settings)


def where(request: Request, *replicas: FakeReplica) -> FakeReplica:
    (replica,) = (r for r in replicas if request.request_id in r.held)
    return replica


def fail(request: Request, replica: FakeReplica, error: str = "it failed") -> None:
    replica.fail(request.request_id, error=error)
    replica.deliver()


def explained(bench: Bench, request: Request) -> Explanation:
    explanation = bench.core.explain(request.request_id, None)
    assert explanation is not None
    return explanation


def events(bench: Bench, request: Request) -> list[str]:
    return [decision.event for decision in explained(bench, request).decisions]


@pytest.mark.parametrize("made", [0, 1, 5])
def test_error_is_unseen_where_another_replica_goes_on_from_the_token_after_the_last(made: int) -> None:
    bench, *replicas = two_replicas()
    request = bench.submit("a", tokens=9, logprobs=2, prompt_logprobs=2)
    erring = where(request, *replicas)
    for _ in range(made):
        erring.turn()
    fail(request, erring)
    other = where(request, *replicas)
    assert other is not erring
    told, attempt = other.added[0]
    assert (told.emitted_ids, attempt, told.arrived_unix_s) == (
        expected_ids(request)[:made], 2, request.arrived_unix_s
    )  # fmt: skip
    for _ in range(9 - made):
        other.turn()
    assert bench.text(request) == expected_text(request)
    assert bench.outcome(request) is Outcome.FINISHED
    parts = bench.scores[request.request_id]
    assert [s for part in parts for s in part.logprobs] == [score(t, k, 2) for k, t in enumerate(expected_ids(request))]
    assert [s for part in parts for s in part.prompt_logprobs] == [score(k + 1, k, 2) for k in range(1, 8)]
    ending = bench.streams[request.request_id].ending
    assert ending is not None
    assert (ending.prompt_tokens, ending.completion_tokens) == (8, 9)
    assert bench.metric("forebay_output_tokens_total", priority_class="standard") == 9
    assert events(bench, request) == ["admitted", "dispatched", "retried", "dispatched"]


def test_tokens_that_come_with_the_error_are_kept() -> None:
    bench, *replicas = two_replicas()
    request = bench.submit("a", tokens=4)
    erring = where(request, *replicas)
    ids = expected_ids(request)[:2]
    pieces = tuple(f"{token} " for token in ids)
    erring.forget(request.request_id)
    erring.send(TokenDelta(request.request_id, 1, 0, ids, pieces, FinishReason.ERROR, "no numbers"))
    other = where(request, *replicas)
    assert other.added[0][0].emitted_ids == ids
    for _ in range(2):
        other.turn()
    assert bench.text(request) == expected_text(request)


def test_what_the_erring_attempt_still_says_changes_nothing() -> None:
    bench, *replicas = two_replicas()
    request = bench.submit("a", tokens=4)
    erring = where(request, *replicas)
    fail(request, erring)
    erring.send(TokenDelta(request.request_id, 1, 0, (1,), ("wrong ",), FinishReason.ERROR, "again"))
    other = where(request, *replicas)
    for _ in range(4):
        other.turn()
    assert bench.text(request) == expected_text(request)
    assert bench.metric(METRIC, outcome="retried") == 1


def test_retry_is_no_continuation_and_is_told_with_the_numbers_used() -> None:
    bench, *replicas = two_replicas()
    request = bench.submit("a")
    erring = where(request, *replicas)
    erring.turn()
    fail(request, erring, "no numbers")
    decision = explained(bench, request).decisions[2]
    assert (decision.event, decision.replica, decision.why) == ("retried", erring.replica_id, "no numbers")
    assert decision.numbers == {
        "emitted": 1, "errors": 1, "errors_max": 2, "budget_left": 3, "budget_share": 0.1, "budget_burst": 3
    }  # fmt: skip
    assert bench.metric(METRIC, outcome="retried") == 1
    samples = [s for m in bench.registry.collect() for s in m.samples if s.name == "forebay_continued_total"]
    assert sum(s.value for s in samples) == 0
    assert not bench.core._live[request.request_id].continued
    assert bench.core._live[request.request_id].losses == 0


def test_retry_waits_at_its_old_place_before_what_came_later_and_behind_what_came_before() -> None:
    """One replica, one slot: a request that was lost would go before all others of its priority."""
    bench = Bench(CONFIG)
    replica = bench.replica(slots=1)
    bench.submit("urgent", "interactive", tokens=1)
    older = bench.submit("older", tokens=1)
    replica.turn()
    assert where(older, replica) is replica
    newer = bench.submit("newer", tokens=1)
    bench.submit("urgent too", "interactive", tokens=1)
    before = len(replica.added)
    fail(older, replica)
    for _ in range(4):
        replica.turn()
    assert [r.request_id for r, _ in replica.added[before:]] == ["older", newer.request_id]
    assert replica.added[before][1] == 2


@pytest.mark.parametrize("made", [0, 1])
def test_tenant_has_had_nothing_of_a_prompt_whose_attempt_errs_before_the_first_token(made: int) -> None:
    bench = Bench(CONFIG)
    replica = bench.replica()
    tenants = bench.core._dispatcher.band(0)
    request = bench.submit("a", prompt=100)
    for _ in range(made):
        replica.turn()
    charged, _ = tenants.counters(request.tenant)
    assert charged >= 100
    replica.state = ReplicaState.DRAINING
    fail(request, replica)
    assert bench.outcome(request) is None
    assert tenants.counters(request.tenant)[0] == (charged if made else 0)


def test_replica_that_erred_is_tried_again_where_no_other_takes_the_request() -> None:
    bench, *replicas = two_replicas(slots=1)
    first, second = bench.submit("a", tokens=9), bench.submit("b", tokens=9)
    for replica in replicas:
        replica.turn()
    erring = where(first, *replicas)
    fail(first, erring)
    assert where(first, *replicas) is erring
    assert where(second, *replicas) is not erring
    for _ in range(9):
        erring.turn()
    assert bench.text(first) == expected_text(first)


def test_other_replica_is_taken_before_one_that_erred_though_others_give_way_there() -> None:
    bench, *replicas = two_replicas(slots=1)
    low = bench.submit("low", "batch", tokens=99)
    urgent = bench.submit("urgent", "interactive", tokens=2)
    for replica in replicas:
        replica.turn()
    erring, other = where(urgent, *replicas), where(low, *replicas)
    fail(urgent, erring)
    assert where(urgent, *replicas) is other
    other.turn()
    assert other.preemptions == 1


def test_other_replica_is_taken_though_the_one_that_erred_has_computed_the_prompt() -> None:
    bench, *replicas = two_replicas(slots=4)
    session = Terms(session="s")
    before = bench.submit("before", prompt=400, tokens=1, terms=session)
    habitual = where(before, *replicas)
    habitual.turn()
    request = bench.submit("a", prompt=400, terms=session)
    assert where(request, *replicas) is habitual
    fail(request, habitual)
    assert where(request, *replicas) is not habitual


def test_second_error_is_the_one_that_the_client_is_told() -> None:
    bench, *replicas = two_replicas()
    request = bench.submit("a")
    fail(request, where(request, *replicas), "the first")
    fail(request, where(request, *replicas), "the second")
    ending = bench.streams[request.request_id].ending
    assert ending is not None
    assert (ending.outcome, ending.message, ending.meaning.status) == (Outcome.ENGINE_ERROR, "the second", 500)
    assert [bench.metric(METRIC, outcome=o.value) for o in (Retry.RETRIED, Retry.FAILED_AGAIN)] == [1, 1]
    last = explained(bench, request).decisions[-1]
    assert (last.event, last.why, last.numbers["errors"]) == ("not retried", "failed again", 2)
    assert not any(replica.held for replica in replicas)


def test_error_beyond_the_budget_ends_its_request_and_says_so() -> None:
    bench, *replicas = two_replicas()
    requests = [bench.submit(f"q{k}") for k in range(4)]
    for request in requests:
        fail(request, where(request, *replicas))
    assert [bench.outcome(request) for request in requests] == [None, None, None, Outcome.ENGINE_ERROR]
    last = explained(bench, requests[3]).decisions[-1]
    assert (last.event, last.why) == ("not retried", "budget spent")
    assert (last.numbers["budget_left"], last.numbers["budget_share"], last.numbers["budget_burst"]) == (0, 0.1, 3)
    assert bench.metric(METRIC, outcome="budget_spent") == 1


def test_requests_that_are_refused_at_arrival_and_retries_themselves_buy_none() -> None:
    bench = Bench(CONFIG)
    replica = bench.replica(slots=1)
    for k in range(3):
        fail(bench.submit(f"q{k}"), replica)
        bench.core.cancel(RequestId(f"q{k}"))
    assert bench.core._losses.retries.left == pytest.approx(0.2), "what came while it was full bought nothing"
    bench.core.shut_down()
    for k in range(20):
        assert bench.outcome(bench.submit(f"refused{k}")) is Outcome.REJECTED_DRAINING
    assert bench.core._losses.retries.left == pytest.approx(0.2)


def test_each_choice_of_a_request_buys_its_part_of_a_retry() -> None:
    bench, *replicas = two_replicas()
    fail(bench.submit("a"), replicas[0] if replicas[0].held else replicas[1])
    left = bench.core._losses.retries.left
    one = bench.submit("b", tokens=1)
    choices = [msgspec.structs.replace(one, request_id=RequestId(f"c{k}")) for k in range(3)]
    bench.core.submit(tuple((choice, Stream(Buffer(1 << 20))) for choice in choices), NO_TERMS)
    assert bench.core._losses.retries.left == pytest.approx(left + 0.4)


def test_suspect_is_not_tried_again() -> None:
    """It may be what kills engines."""
    bench = Bench(CONFIG)
    replica = bench.replica("r1")
    request = bench.submit("a", tokens=9)
    replica.turn()
    replica.die()
    trial = bench.replica("r2")
    fail(request, trial)
    assert bench.outcome(request) is Outcome.ENGINE_ERROR
    assert bench.metric(METRIC, outcome="suspect") == 1
    assert not len(bench.core._trials)


@pytest.mark.parametrize("draws", range(6))
def test_suspect_that_is_tried_alone_keeps_away_from_the_replica_that_erred(draws: int) -> None:
    """There it would end with the next error, whatever killed its engines."""
    bench = Bench(CONFIG)
    erring = bench.replica("r1")
    request = bench.submit("a", tokens=9)
    first, other = bench.replica("r2"), bench.replica("r3")
    closed = [bench.core._fleet[replica.replica_id] for replica in (erring, other)]
    closed[1].back_off()
    fail(request, erring)
    closed[0].back_off()
    bench.submit("b", tokens=9)
    first.turn()
    first.die()
    bench.core.cancel(RequestId("b"))
    second = bench.replica("r4")
    bench.submit("c", tokens=9)
    second.turn()
    busy = bench.replica("r5")
    bench.core._fleet[second.replica_id].back_off()
    bench.submit("d", tokens=9)
    busy.turn()
    second.die()
    assert bench.core._trials.waiting == 1, "it is to be alone, and the one that takes work is not empty"
    for _ in range(draws):
        bench.core._losses._rng.random()
    bench.core.cancel(RequestId("c"))
    for replica in closed:
        replica._backing_off = False
        replica._change()
    bench.core.tick()
    assert where(request, erring, other) is other


@pytest.mark.parametrize("terms", [Terms(timeout_s=2.0), Terms(ttft_slo_s=2.0)])
def test_request_whose_time_is_over_is_not_tried_again(terms: Terms) -> None:
    for wait_s, outcome in ((1.9, None), (2.0, Outcome.ENGINE_ERROR)):
        bench, *replicas = two_replicas()
        request = bench.submit("a", terms=terms)
        bench.clock.advance(wait_s)
        fail(request, where(request, *replicas))
        assert bench.outcome(request) is outcome
        assert bench.metric(METRIC, outcome="too_late") == (outcome is not None)


def test_time_to_the_first_token_says_nothing_once_that_has_come() -> None:
    bench, *replicas = two_replicas()
    request = bench.submit("a", terms=Terms(ttft_slo_s=2.0))
    erring = where(request, *replicas)
    erring.turn()
    bench.clock.advance(5)
    fail(request, erring)
    assert bench.outcome(request) is None


@pytest.mark.parametrize("settings", [{"retry_share": 0.0}, {"retry_attempts": 1}])
def test_retries_can_be_turned_off(settings: dict[str, float]) -> None:
    bench, *replicas = two_replicas(CONFIG.model_copy(update=settings))
    request = bench.submit("a")
    fail(request, where(request, *replicas))
    assert bench.outcome(request) is Outcome.ENGINE_ERROR
    assert explained(bench, request).decisions[-1].why == "off", "`failed again` would say that the request is at fault"
    assert bench.metric(METRIC, outcome="off") == 1


def test_retried_request_whose_engine_dies_goes_on_as_any_other() -> None:
    """Continuing spends nothing of the budget, before and after."""
    bench = Bench(CONFIG)
    first = bench.replica("r1")
    request = bench.submit("a", tokens=6)
    first.turn()
    second = bench.replica("r2")
    fail(request, first)
    second.turn()
    third = bench.replica("r3")
    second.die()
    assert where(request, first, third) is third, "it still keeps away from the one that erred"
    for _ in range(4):
        third.turn()
    assert bench.text(request) == expected_text(request)
    assert bench.core._losses.retries.left == 2
    assert bench.metric("forebay_continued_total", reason="lost") == 1


def test_error_of_a_request_that_is_moving_is_as_any_other() -> None:
    bench = Bench(CONFIG)
    source = bench.replica("r1")
    request = bench.submit("a", tokens=6)
    source.turn()
    target = bench.replica("r2")
    source.state = source.state.DRAINING
    source.beat()
    bench.core.tick()
    assert len(bench.core._moves) == 1
    fail(request, source)
    assert not len(bench.core._moves)
    assert where(request, source, target) is target
    for _ in range(5):
        target.turn()
    assert bench.text(request) == expected_text(request)
    assert not target.coming


@pytest.mark.parametrize("others", [True, False])
def test_request_does_not_move_back_to_the_replica_that_erred_while_another_has_a_place(others: bool) -> None:
    bench = Bench(CONFIG)
    erring = bench.replica("r1")
    request = bench.submit("a", tokens=9)
    draining = bench.replica("r2")
    erring.turn()
    fail(request, erring)
    draining.turn()
    if others:
        bench.replica("r3")
    draining.state = ReplicaState.DRAINING
    draining.beat()
    bench.core.tick()
    assert [move[3] for move in draining.moves] == ["r3" if others else "r1"]


def test_controller_moves_no_request_to_a_replica_that_it_has_erred_on() -> None:
    bench, *replicas = two_replicas()
    request = bench.submit("a", tokens=9)
    erring = where(request, *replicas)
    fail(request, erring)
    source = where(request, *replicas)
    source.turn()
    asked = propose(request, erring.replica_id, source=source.replica_id, attempt=2)
    assert bench.core.propose(asked) is Verdict.NO_PLACE
    assert not source.moves


# --- what it means to replicas ---


def condition(bench: Bench, replica: FakeReplica) -> Condition:
    return bench.core._fleet[replica.replica_id].condition(bench.config, bench.clock.monotonic())


OUTLIERS = CONFIG.model_copy(update={"outlier_faults": 2, "out_for_s": 10.0, "retry_burst": 50})


def four_replicas() -> tuple[Bench, list[FakeReplica]]:
    bench = Bench(OUTLIERS)
    return bench, [bench.replica(f"r{k}", slots=9) for k in range(4)]


def only(bench: Bench, replica: FakeReplica, *, among: list[FakeReplica]) -> None:
    """Requests can go nowhere else until its next report."""
    for other in among:
        bench.core._fleet[other.replica_id]._backing_off = other is not replica
        bench.core._fleet[other.replica_id]._change()


def test_each_error_is_held_against_the_replica_that_made_it() -> None:
    bench, replicas = four_replicas()
    request = bench.submit("a")
    one = where(request, *replicas)
    fail(request, one)
    other = where(request, *replicas)
    fail(request, other)
    for replica in (one, other):
        assert [mark.request_id for mark in bench.core._fleet[replica.replica_id].record.marks] == ["a"]


def test_one_request_that_errs_on_two_replicas_puts_out_one_at_most() -> None:
    """Each of them is an error short of it."""
    bench, replicas = four_replicas()
    one, two = replicas[:2]
    for k, replica in enumerate((one, two)):
        only(bench, replica, among=replicas)
        request = bench.submit(f"before{k}", tenant=f"t{k}")
        fail(request, replica)
        bench.core.cancel(request.request_id)
    only(bench, one, among=replicas)
    request = bench.submit("a", tenant="other")
    only(bench, two, among=replicas)
    fail(request, one)
    assert condition(bench, one) is Condition.EJECTED
    only(bench, two, among=replicas)
    fail(request, where(request, two))
    assert bench.outcome(request) is Outcome.ENGINE_ERROR
    assert condition(bench, two) is not Condition.EJECTED
    only(bench, two, among=replicas)
    later = bench.submit("later", tenant="another")
    fail(later, two)
    assert condition(bench, two) is Condition.EJECTED, "it does not wash it clean either"


def test_probe_that_has_erred_elsewhere_says_nothing_of_a_replica_that_is_half_open() -> None:
    bench, replicas = four_replicas()
    one, two = replicas[:2]
    for k in range(2):
        only(bench, two, among=replicas)
        request = bench.submit(f"q{k}", tenant=f"t{k}")
        fail(request, two)
        bench.core.cancel(request.request_id)
    assert condition(bench, two) is Condition.EJECTED
    only(bench, one, among=replicas)
    request = bench.submit("a")
    bench.clock.advance(10)
    only(bench, two, among=replicas)
    fail(request, one)
    assert bench.core._fleet[two.replica_id].probe == "a"
    fail(request, two)
    assert condition(bench, two) is not Condition.EJECTED
    only(bench, two, among=replicas)
    fail(bench.submit("next"), two)
    assert condition(bench, two) is Condition.EJECTED


def seen_by_clients(retry_share: float) -> tuple[int, int]:
    """(requests that ended with an error, attempts of all) of 300, two at a time, on four replicas one of which fails on
    whatever it gets; the default faults put it out."""
    bench = Bench(RouterConfig(retry_share=retry_share, silent_after_s=1e6, fenced_after_s=1e7))
    replicas = [bench.replica(f"r{k}") for k in range(4)]
    for k in range(150):
        pair = [bench.submit(f"q{k}-{j}", tenant=f"t{k % 7}", tokens=2) for j in range(2)]
        for _ in range(6):
            if replicas[0].held:
                replicas[0].fail(*replicas[0].held)
                replicas[0].deliver()
            for replica in replicas[1:]:
                replica.turn()
        assert all(bench.outcome(request) is not None for request in pair)
        bench.clock.advance(1)
        bench.core.tick()
    errors = bench.metric("forebay_requests_total", priority_class="standard", outcome="engine_error")
    return int(errors), sum(len(replica.added) for replica in replicas)


def test_replica_that_fails_on_all_that_it_gets_costs_no_client_an_error() -> None:
    errors, attempts = seen_by_clients(retry_share=0.1)
    assert errors == 0
    assert 300 < attempts <= 300 * 1.1 + 32
    errors, attempts = seen_by_clients(retry_share=0.0)
    assert errors >= 5, "else there was nothing to retry"
    assert attempts == 300


def test_where_all_replicas_fail_they_get_no_more_to_do_than_the_budget_allows() -> None:
    bench = Bench(RouterConfig(silent_after_s=1e6, fenced_after_s=1e7, retry_burst=5))
    replicas = [bench.replica(f"r{k}") for k in range(3)]
    for k in range(200):
        bench.submit(f"q{k}", tenant=f"t{k % 7}")
        for _ in range(2):
            for replica in replicas:
                if replica.held:
                    replica.fail(*replica.held)
                    replica.deliver()
        bench.clock.advance(1)
        bench.core.tick()
    attempts = sum(len(replica.added) for replica in replicas)
    retried, refused = (bench.metric(METRIC, outcome=o) for o in ("retried", "budget_spent"))
    assert attempts == 200 + retried
    assert 200 * 0.1 <= retried <= 200 * 0.1 + 5
    assert refused > 100


# --- what clients see ---


@pytest.mark.parametrize("stream", [False, True])
async def test_client_sees_nothing_of_a_retry_that_works(tiny_model: ModelFolder, stream: bool) -> None:
    async with serving(tiny_model, auto=False) as world, plain_client(world) as http:
        body = TEXT | {"stream": stream, "n": 2, "max_tokens": 6}
        asking = asyncio.create_task(http.post("/v1/completions", json=body))
        await world.until(lambda: len(world.replica.held) == 2)
        asked = [request for request, _ in world.replica.added]
        for _ in range(3):
            world.replica.turn()
        await asyncio.sleep(0)
        second = FakeReplica(world.core, ReplicaId("second"), Generation(1, "s")).connect()
        world.replica.fail(asked[1].request_id)
        world.replica.deliver()
        assert [request.request_id for request, _ in second.added] == [asked[1].request_id]
        for _ in range(3):
            world.replica.turn()
            second.turn()
        response = await asking
        assert response.status_code == 200
        assert said(response, stream) == [expected_text(request) for request in asked]


@pytest.mark.parametrize("replicas", [1, 2])
async def test_client_is_told_not_to_send_again_what_two_replicas_have_failed_with(
    tiny_model: ModelFolder, replicas: int
) -> None:
    """OpenAI's clients would send it again twice, and each time it would be tried twice. One replica that fails twice may
    be all that is wrong."""
    async with serving(tiny_model, auto=False) as world, plain_client(world) as http:
        asking = asyncio.create_task(http.post("/v1/completions", json=TEXT))
        await world.until(lambda: world.replica.held)
        there = [world.replica]
        if replicas == 2:
            there.append(FakeReplica(world.core, ReplicaId("second"), Generation(1, "s")).connect())
        for erring in (there[0], there[-1]):
            (name,) = erring.held
            erring.fail(name, error="no numbers")
            erring.deliver()
        response = await asking
        assert (response.status_code, response.json()["error"]["code"]) == (500, "engine_error")
        assert response.json()["error"]["message"] == "no numbers"
        assert response.headers.get("x-should-retry") == ("false" if replicas == 2 else None)


def said(response: httpx.Response, stream: bool) -> list[str]:
    """The text of each choice."""
    texts = ["", ""]
    events = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")] if stream else []
    assert not stream or events[-1] == "[DONE]"
    for body in [json.loads(event) for event in events[:-1]] if stream else [response.json()]:
        assert "error" not in body
        for choice in body["choices"]:
            texts[choice["index"]] += choice["text"]
    return texts
