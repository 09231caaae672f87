"""The controller's proposals and what it is told of a first that has no place: the router's side."""

from __future__ import annotations

import itertools
import math
import random

import msgspec
import pytest

from cluster.config import RouterConfig
from cluster.messages import Gate, Gates, Left, Propose, Stays
from cluster.types import Generation, Outcome, ReplicaId, ReplicaState, Request, RequestId
from router.proposals import Demand, Found, Verdict, judge
from router.suspects import Trial
from tests.unit.fake_replica import FIRST_GENERATION, Bench, FakeReplica, expected_text
from tests.unit.test_router_moves import decisions, finish

CONFIG = RouterConfig(expected_output_tokens=8, minimum_share=0.0)
CONTROLLER = Generation(3, "c")


def propose(
    request: Request | str,
    target: str | None,
    *,
    source: str = "r1",
    attempt: int = 1,
    sake: Request | None = None,
    generation: Generation = CONTROLLER,
    why: str = "r2 is idle",
    numbers: dict[str, float] | None = None,
) -> Propose:
    return Propose(
        generation=generation,
        request_id=RequestId(request) if isinstance(request, str) else request.request_id,
        attempt=attempt,
        source=ReplicaId(source),
        source_generation=FIRST_GENERATION,
        target=None if target is None else ReplicaId(target),
        target_generation=None if target is None else FIRST_GENERATION,
        for_request_id=None if sake is None else sake.request_id,
        why=why,
        numbers=numbers or {},
    )


def running(bench: Bench, *names: str, slots: int = 4, **submit: object) -> tuple[FakeReplica, FakeReplica]:
    """r1 runs these, each has a token; r2 came later and is empty."""
    source = bench.replica("r1", slots=slots)
    for name in names:
        bench.submit(name, **{"tokens": 8, **submit})  # type: ignore[arg-type]
    source.turn()
    return source, bench.replica("r2", slots=slots)


def verdicts(bench: Bench) -> dict[str, float]:
    counts = {v.value: bench.metric("forebay_proposals_total", outcome=v.value) for v in Verdict}
    return {name: count for name, count in counts.items() if count}


# --- the decision ---


def test_it_is_done_exactly_where_it_still_fits() -> None:
    """Every proposal against everything that it can find."""
    generations = (None, Generation(2, "b"), CONTROLLER, Generation(3, "other"), Generation(4, "d"))
    flags = ("is_open", "busy", "whole", "rests", "below_demand", "waits", "has_place")
    moves = calls = 0
    for target, newest, demand in itertools.product(("r2", None), generations, Demand):
        for values in itertools.product((False, True), repeat=len(flags)):
            f = Found(newest, demand, **dict(zip(flags, values, strict=True)))
            verdict = judge(propose("a", target), f)
            current = newest is None or newest == CONTROLLER or newest.number < CONTROLLER.number
            fits = current and f.is_open and not f.busy and not f.rests and demand is not Demand.OVER
            if target is not None:
                assert (verdict is Verdict.MOVES) == (fits and f.whole and f.has_place)
            elif demand is Demand.WAITS:
                assert (verdict is Verdict.CALLED_BACK) == (fits and (f.waits or f.below_demand))
            else:
                assert (verdict is Verdict.CALLED_BACK) == (fits and f.waits and f.has_place)
            assert (verdict is Verdict.STALE) == (not current)
            moves += verdict is Verdict.MOVES
            calls += verdict is Verdict.CALLED_BACK
    assert moves
    assert calls


# --- moves ---


def test_a_proposed_request_moves_and_explain_says_why_and_by_which_numbers() -> None:
    bench = Bench(CONFIG)
    source, target = running(bench, "a")
    request = bench.core._live[RequestId("a")].request
    assert bench.core.propose(propose("a", "r2", numbers={"gain_s": 2.5}))
    assert source.moves == [("a", 1, 2, "r2")]
    source.turn()
    target.turn()
    (moved,) = decisions(bench, request, "moved")
    assert (moved.replica, moved.why, moved.numbers["gain_s"]) == ("r2", "from r1: r2 is idle", 2.5)
    finish(bench, request, source, target)
    assert verdicts(bench) == {"moves": 1}
    assert len(source.added) == 1
    assert not target.added, "nothing is begun anew"


def test_what_moved_before_its_first_token_says_nothing_of_how_long_prompts_take() -> None:
    """It was sent out behind 10 steps of prompts, and had its first token 0.1 s after it moved: that is no step of 10 ms."""
    bench = Bench(CONFIG)
    source, target = bench.replica("r1", step_tokens=16), bench.replica("r2", step_tokens=16)
    for k in range(8):
        target.state = ReplicaState.DRAINING
        target.beat()
        request = bench.submit(f"{k}", prompt=160)
        target.state = ReplicaState.READY
        target.beat()
        bench.core.propose(propose(request, "r2"))
        source.turn()
        bench.clock.advance(0.1)
        target.turn()
        finish(bench, request, source, target)
    assert bench.metric("forebay_moves_total", outcome="moved") == 8
    assert bench.core._dispatcher.arrivals.times.prompt_step_s("standard") is None


def test_a_proposal_that_comes_to_nothing_is_explained_with_its_numbers_too() -> None:
    bench = Bench(CONFIG)
    source, target = running(bench, "a")
    target.room = False
    request = bench.core._live[RequestId("a")].request
    bench.core.propose(propose("a", "r2", numbers={"gain_s": 2.5}))
    source.turn()
    source.turn()
    (stays,) = decisions(bench, request, "stays")
    assert (stays.replica, stays.numbers["gain_s"]) == ("r1", 2.5)
    assert stays.why == "to r2: r2 is idle; refused by the target"
    finish(bench, request, source, target)


def test_what_is_said_twice_is_done_once_and_what_was_said_of_an_earlier_attempt_never() -> None:
    bench = Bench(CONFIG)
    source, target = running(bench, "a", tokens=30)
    for _ in range(2):
        bench.core.propose(propose("a", "r2"))
    assert len(source.moves) == 1
    source.turn()
    target.turn()
    bench.core.propose(propose("a", "r2"))
    bench.core.propose(propose("a", "r1", source="r2", attempt=1))
    assert (len(source.moves), target.moves) == (1, [])
    assert verdicts(bench) == {"moves": 1, "busy": 1, "gone": 2}


def test_it_rests_after_a_proposal_and_may_leave_again_after_that() -> None:
    bench = Bench(CONFIG)
    source, target = running(bench, "a", tokens=60)
    bench.core.propose(propose("a", "r2"))
    source.turn()
    target.turn()
    back = propose("a", "r1", source="r2", attempt=2)
    bench.core.propose(back)
    assert target.moves == []
    bench.clock.advance(CONFIG.request_rest_s)
    source.beat()
    target.beat()
    bench.core.propose(back)
    assert target.moves == [("a", 2, 3, "r1")]
    assert verdicts(bench) == {"moves": 2, "rests": 1}


def test_nothing_moves_to_where_no_work_goes_where_it_is_already_or_where_somebody_had_to_give_way() -> None:
    bench = Bench(CONFIG)
    source, target = running(bench, "a", slots=1)
    bench.core.propose(propose("a", "r1"))
    bench.core.propose(propose("a", "r3"))
    bench.core.propose(msgspec.structs.replace(propose("a", "r2"), target_generation=Generation(1, "before")))
    target.state = ReplicaState.DRAINING
    target.beat()
    bench.core.propose(propose("a", "r2"))
    target.state = ReplicaState.READY
    target.beat()
    bench.submit("low", "batch", tokens=8)
    target.turn()
    bench.core.propose(propose("a", "r2"))
    assert source.moves == []
    assert verdicts(bench) == {"no_place": 5}
    assert not bench.core.propose(propose("a", "r2", source="r9")), "no such replica is here"


def test_nothing_moves_from_where_nobody_can_be_asked() -> None:
    bench = Bench(CONFIG)
    source, target = running(bench, "a")
    request = bench.core._live[RequestId("a")].request
    source.break_link()
    bench.core.propose(propose("a", "r2"))
    source.connect()
    assert source.moves == []
    bench.core.propose(propose("a", "r2"))
    assert source.moves == [("a", 1, 2, "r2")]
    finish(bench, request, source, target)
    assert verdicts(bench) == {"busy": 1, "moves": 1}


def test_a_suspect_moves_for_nobody() -> None:
    bench = Bench(CONFIG)
    source = bench.replica("r1")
    bench.submit("a", tokens=8)
    source.turn()
    source.die()
    other = bench.replica("r2")
    other.turn()
    bench.replica("r3")
    bench.core.propose(propose("a", "r3", source="r2", attempt=2))
    bench.core.propose(propose("a", None, source="r2", attempt=2))
    assert other.moves == []
    assert verdicts(bench) == {"busy": 2}


# --- back to the queue ---


def waits_on_a_full_replica(bench: Bench) -> tuple[FakeReplica, Request, Request]:
    """r1 has one slot; in it runs `first`, and `second` waits there behind it."""
    source = bench.replica("r1", slots=2)
    first = bench.submit("first", tokens=30)
    second = bench.submit("second", tokens=8)
    source.slots = 1
    source.turn()
    return source, first, second


def test_one_that_waits_there_is_called_back_and_served_where_there_is_room() -> None:
    bench = Bench(CONFIG)
    source, first, second = waits_on_a_full_replica(bench)
    target = bench.replica("r2", slots=1)
    bench.core.propose(propose(second, None, why="it waits, and r2 has room", numbers={"waits": 1}))
    assert source.aborted == [("second", 1)]
    assert [(r.request_id, attempt) for r, attempt in target.added] == [("second", 2)]
    (called,) = decisions(bench, second, "called_back")
    assert (called.replica, called.why, called.numbers) == ("r1", "it waits, and r2 has room", {"waits": 1})
    finish(bench, first, target, source)
    finish(bench, second, target, source)
    assert bench.metric("forebay_continued_total", reason="called_back") == 1


def test_one_that_runs_is_called_back_for_nobodys_sake_never() -> None:
    bench = Bench(CONFIG)
    source, _ = running(bench, "a")
    bench.core.propose(propose("a", None))
    assert source.aborted == []
    assert verdicts(bench) == {"runs": 1}


@pytest.mark.parametrize("lower", [True, False])
def test_one_that_waits_is_called_back_where_less_urgent_work_gives_way_for_it_and_nobody_else(lower: bool) -> None:
    bench = Bench(CONFIG)
    source, _, second = waits_on_a_full_replica(bench)
    other = bench.replica("r2", slots=1)
    third = bench.submit("third", "batch" if lower else "standard", tokens=30)
    other.turn()
    assert [request.request_id for request, _ in other.added] == [third.request_id]
    bench.core.propose(propose(second, None))
    assert source.aborted == ([("second", 1)] if lower else [])
    assert verdicts(bench) == ({"called_back": 1} if lower else {"no_place": 1})
    if lower:
        assert [(request.request_id, attempt) for request, attempt in other.added][1:] == [("second", 2)]


def test_one_that_waits_stays_where_it_would_be_served_nowhere_sooner() -> None:
    bench = Bench(CONFIG)
    source, _, second = waits_on_a_full_replica(bench)
    bench.core.propose(propose(second, None))
    other = bench.replica("r2", slots=1)
    bench.submit("third", tokens=30)
    other.turn()
    bench.core.propose(propose(second, None))
    assert source.aborted == []
    assert verdicts(bench) == {"no_place": 2}


def test_called_back_it_has_lost_no_engine_and_spends_no_retry() -> None:
    bench = Bench(CONFIG.model_copy(update={"max_attempts": 1}))
    source, _, second = waits_on_a_full_replica(bench)
    bench.replica("r2", slots=1)
    bench.core.propose(propose(second, None))
    live = bench.core._live[second.request_id]
    assert (live.losses, live.replica_id) == (0, "r2")
    assert bench.outcome(second) is None
    assert source.aborted


# --- for a request that has no place ---


def crowded(bench: Bench) -> tuple[FakeReplica, FakeReplica, Request, Request, Request]:
    """Each of two replicas of 10 blocks runs work that takes 4 of them, the lower on r2; `large` needs 7 and waits."""
    one = bench.replica("r1", blocks=10)
    equal = bench.submit("equal", "interactive", prompt=56, tokens=8)
    one.turn()
    two = bench.replica("r2", blocks=10)
    lower = bench.submit("lower", prompt=56, tokens=8)
    two.turn()
    seen = bench.core._fleet[ReplicaId("r2")]
    seen._marked[lower.request_id] = seen.reservations[lower.request_id]
    seen.reservations[lower.request_id].shared_s = math.inf  # out of reach: a minimum share sent it past what waited
    two.beat()
    large = bench.submit("large", "interactive", prompt=104, tokens=8)
    return one, two, equal, lower, large


def test_a_first_without_room_is_told_with_what_it_needs_and_since_when() -> None:
    bench = Bench(CONFIG)
    *_, large = crowded(bench)
    told = bench.core.unplaced("m")
    assert told is not None
    assert (told.model, told.request_id, told.priority) == ("m", large.request_id, large.priority)
    assert (told.blocks, told.waits_s) == (7, 0)
    bench.clock.advance(0.25)
    again = bench.core.unplaced("m")
    assert again is not None
    assert again.waits_s == pytest.approx(0.25)
    bench.replica("r3", blocks=10)
    assert bench.core.unplaced("m") is None


def test_a_first_that_waits_for_something_else_than_room_is_not_told() -> None:
    bench = Bench(CONFIG)
    nowhere = bench.submit("nowhere")
    assert bench.core.unplaced("m") is None, "no replica takes work"
    bench.core.cancel(nowhere.request_id)
    one, two, _, _, large = crowded(bench)
    assert bench.core.unplaced("m") is not None
    for replica in (one, two):
        replica.trial = Trial.ALONE
        replica.beat()
    assert bench.core.unplaced("m") is None, "a suspect is tried on each of them, alone"
    for replica in (one, two):
        replica.trial = Trial.NONE
        replica.beat()
    assert bench.core.unplaced("m") is not None
    bench.core.hear(Gates("m", Gate(large.priority + 1, 0), (), ()))
    assert bench.core.unplaced("m") is None, "a gate holds it back"
    bench.core.cancel(large.request_id)
    assert bench.core.unplaced("m") is None


def test_what_is_parked_for_it_makes_room_for_it_and_for_nobody_before_it() -> None:
    bench = Bench(CONFIG)
    one, two, _, lower, large = crowded(bench)
    small = bench.submit("small", prompt=8, tokens=8)
    bench.core.propose(propose(lower, None, source="r2", sake=large, why="large needs its blocks"))
    assert two.aborted == [("lower", 1)]
    assert bench.core.settled() == (Left(lower.request_id, 1, large.request_id),)
    assert bench.core.settled() == (), "it is told once"
    two.beat()
    assert [r.request_id for r, _ in two.added] == ["lower", "large"]
    for request in (large, lower, small):
        finish(bench, request, one, two)
    assert verdicts(bench) == {"called_back": 1}


def test_equal_work_moves_for_it_and_is_never_parked_for_it() -> None:
    bench = Bench(CONFIG)
    one, two, equal, _, large = crowded(bench)
    bench.core.propose(propose(equal, None, sake=large))
    assert one.aborted == []
    bench.core.propose(propose(equal, "r2", sake=large, why="large needs its blocks"))
    assert [name for name, *_ in one.moves] == ["equal"]
    one.turn()
    two.turn()
    assert [r.request_id for r, _ in one.added] == ["equal"], "until it is gone there is no room"
    assert bench.core.settled() == (Left(equal.request_id, 1, large.request_id),)
    one.turn()
    assert [r.request_id for r, _ in one.added] == ["equal", "large"]
    assert verdicts(bench) == {"moves": 1, "runs": 1}


@pytest.mark.parametrize("goes_wrong", ["the target is gone", "it takes too long"])
def test_that_a_move_for_it_comes_to_nothing_is_told(goes_wrong: str) -> None:
    bench = Bench(CONFIG)
    one, two, equal, _, large = crowded(bench)
    bench.core.propose(propose(equal, "r2", sake=large))
    assert bench.core.settled() == ()
    if goes_wrong == "the target is gone":
        two.die()
    else:
        for _ in range(math.ceil(CONFIG.move_timeout_s / 0.1)):
            bench.clock.advance(0.1)
            for replica in (one, two):
                replica.beat()
            bench.core.tick()
    assert bench.core.settled() == (Stays(equal.request_id, 1, large.request_id),)


def test_that_a_request_ends_while_it_moves_for_it_is_told_for_it_makes_the_room_as_well() -> None:
    bench = Bench(CONFIG)
    _, _, equal, _, large = crowded(bench)
    bench.core.propose(propose(equal, "r2", sake=large))
    bench.core.cancel(equal.request_id)
    assert bench.core.settled() == (Left(equal.request_id, 1, large.request_id),)


def test_it_is_void_once_the_request_that_it_makes_room_for_has_a_place_or_has_ended() -> None:
    bench = Bench(CONFIG)
    _, two, _, lower, large = crowded(bench)
    three = bench.replica("r3", blocks=10)
    bench.core.tick()
    assert [r.request_id for r, _ in three.added] == ["large"]
    bench.core.propose(propose(lower, None, source="r2", sake=large))
    bench.core.cancel(large.request_id)
    bench.core.propose(propose(lower, "r3", source="r2", sake=large))
    assert (two.aborted, two.moves) == ([], [])
    assert verdicts(bench) == {"served": 2}


def test_for_one_of_another_router_only_less_urgent_work_is_parked_and_only_while_a_gate_says_that_it_waits() -> None:
    bench = Bench(CONFIG)
    source, _ = running(bench, "a")
    elsewhere = msgspec.structs.replace(bench.core._live[RequestId("a")].request, request_id=RequestId("theirs"))
    bench.core.propose(propose("a", None, sake=elsewhere))
    bench.core.hear(Gates("m", Gate(elsewhere.priority, 0), (), ()))
    bench.core.propose(propose("a", None, sake=elsewhere))
    assert source.aborted == []
    bench.core.hear(Gates("m", Gate(elsewhere.priority + 1, 0), (), ()))
    bench.core.propose(propose("a", None, sake=elsewhere))
    assert source.aborted == [("a", 1)]
    assert verdicts(bench) == {"served": 1, "runs": 1, "called_back": 1}


# --- whose word counts ---


def test_of_two_controllers_the_later_one_is_obeyed_and_the_older_one_never_again() -> None:
    bench = Bench(CONFIG)
    source, _ = running(bench, "a", "b", "c", tokens=30)
    bench.core.propose(propose("a", "r2", generation=Generation(1, "first")))
    bench.core.propose(propose("b", "r2", generation=Generation(2, "second")))
    bench.core.propose(propose("c", "r2", generation=Generation(1, "first")))
    bench.core.propose(propose("c", "r2", generation=Generation(2, "other")))
    assert [name for name, *_ in source.moves] == ["a", "b"]
    bench.core.propose(propose("c", "r2", generation=Generation(3, "other")))
    assert [name for name, *_ in source.moves] == ["a", "b", "c"]
    assert verdicts(bench) == {"moves": 3, "stale": 2}


@pytest.mark.parametrize("seed", range(8))
def test_whatever_is_proposed_every_client_gets_what_it_asked_for(seed: int) -> None:
    """In each turn a controller that knows no reason has something leave for somewhere or for nowhere."""
    rng = random.Random(seed)
    bench = Bench(CONFIG.model_copy(update={"request_rest_s": 0.1}))
    replicas = [bench.replica(name, slots=4, blocks=40) for name in ("r1", "r2", "r3")]
    requests: list[Request] = []
    done_for: list[tuple[RequestId, int, RequestId]] = []
    settled: list[tuple[RequestId, int, RequestId]] = []
    for turn in itertools.count():
        if turn < 80:
            priority_class = rng.choice(("batch", "standard", "interactive"))
            tokens, prompt = rng.randrange(4, 60), rng.randrange(1, 100)
            requests.append(bench.submit(f"q{turn}", priority_class, tokens=tokens, prompt=prompt))
        for live in rng.sample(sorted(bench.core._live.values(), key=lambda one: one.arrived_s), len(bench.core._live)):
            if live.replica_id is not None and live.journal.attempt is not None and rng.random() < 0.2:
                head = bench.core._dispatcher.queue.peek()
                first = None if head is None else bench.core._live[head.request_id].request
                target, sake = rng.choice((None, "r1", "r2", "r3")), rng.choice((None, first, rng.choice(requests)))
                attempt, where = live.journal.attempt, live.replica_id
                verdict = bench.core.propose(propose(live.request, target, source=where, attempt=attempt, sake=sake))
                if sake is not None and verdict is not None and not verdict.stays:
                    done_for.append((live.request.request_id, attempt, sake.request_id))
        bench.clock.advance(0.05)
        for replica in replicas:
            replica.turn()
        bench.core.tick()
        settled += [(told.request_id, told.attempt, told.for_request_id) for told in bench.core.settled()]
        if turn >= 80 and not bench.core._live:
            break
        assert turn < 1000, "work goes round and round"
    assert {bench.outcome(r) for r in requests} == {Outcome.FINISHED}
    assert [bench.text(r) for r in requests] == [expected_text(r) for r in requests]
    assert sorted(settled) == sorted(done_for) != [], "of each that was for another's sake the end is told, once"
    done = verdicts(bench)
    assert done["moves"] > 5
    assert done["called_back"] > 2
    assert all(not one.reservations and not one.expected and not one._held for one in bench.core._fleet)
