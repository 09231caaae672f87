"""Moves of live requests, and the drains that use them: the router's side."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from cluster.config import RouterConfig
from cluster.messages import MoveNotice, MoveStage, StepFrame
from cluster.types import EngineLoad, Generation, Outcome, PriorityLoad, ReplicaId, ReplicaState, Request, RequestId
from router.journal import Decision
from router.moving import MoveOutcome, Stage, Standing, Then, judge
from router.relocate import Resident, who_leaves
from router.terms import Terms
from tests.unit.fake_replica import Bench, FakeReplica, Manner, expected_text

CONFIG = RouterConfig(expected_output_tokens=8)


def draining_pair(bench: Bench, *requests: str, tokens: int = 8, slots: int = 4, **submit: object) -> list[Request]:
    """r1 runs these, each has a token; r2 is empty; r1 has just begun to drain."""
    source = bench.replica("r1", slots=slots)
    submitted = [bench.submit(name, tokens=tokens, **submit) for name in requests]  # type: ignore[arg-type]
    source.turn()
    bench.replica("r2", slots=slots)
    source.state = ReplicaState.DRAINING
    source.beat()
    return submitted


def pair(bench: Bench) -> tuple[FakeReplica, FakeReplica]:
    return bench.peers[ReplicaId("r1")], bench.peers[ReplicaId("r2")]


def finish(bench: Bench, request: Request, *replicas: FakeReplica, turns: int = 60) -> None:
    """Run until it has ended; then no replica holds anything of it, and none has a reservation."""
    for _ in range(turns):
        if bench.outcome(request) is not None:
            break
        bench.clock.advance(0.05)
        for one in replicas:
            one.turn()
        bench.core.tick()
    assert bench.outcome(request) is Outcome.FINISHED
    assert bench.text(request) == expected_text(request)
    for one in replicas:
        one.turn()
        assert not one.held
    assert not len(bench.core._moves)
    assert all(not one.reservations and not one.expected and not one._held for one in bench.core._fleet)


def decisions(bench: Bench, request: Request, event: str) -> list[Decision]:
    explanation = bench.core.explain(request.request_id, "t")
    assert explanation is not None
    return [d for d in explanation.decisions if d.event == event]


def outcomes(bench: Bench) -> dict[str, float]:
    counts = {o.value: bench.metric("forebay_moves_total", outcome=o.value) for o in MoveOutcome}
    return {name: count for name, count in counts.items() if count}


# --- the whole way ---


def test_what_runs_on_a_draining_replica_moves_and_its_client_sees_nothing_of_it() -> None:
    bench = Bench(CONFIG)
    (request,) = draining_pair(bench, "a")
    source, target = pair(bench)
    bench.core.tick()
    assert source.moves == [("a", 1, 2, "r2")]
    source.turn()
    assert target.grants == [("a", 2, 1)]
    assert source.released == []
    bench.clock.advance(0.02)
    target.turn()
    assert source.released == [("a", 1)]
    assert len(source.added) == 1
    assert not target.added, "it is not sent again"
    finish(bench, request, source, target)
    assert outcomes(bench) == {"moved": 1}
    assert bench.metric("forebay_move_pause_seconds_sum") == pytest.approx(0.02)
    (moved,) = decisions(bench, request, "moved")
    assert (moved.replica, moved.why) == ("r2", "from r1: it drains")
    assert moved.numbers == {"attempt": 2, "emitted": 2, "pause_ms": 20}
    assert source.aborted == []


def test_a_move_charges_nothing_and_gives_nothing_back() -> None:
    bench = Bench(CONFIG)
    (request,) = draining_pair(bench, "a")
    source, target = pair(bench)
    band = bench.core._dispatcher.band(0)

    def account() -> tuple[object, ...]:
        gates, tenant = bench.core._dispatcher.gates, band._tenants["t"]
        return band.sent, band.counters("t"), tenant.open, tenant.outstanding, gates._sent_service, gates._open_service

    before = account()
    bench.core.tick()
    source.turn()
    assert account() == before
    finish(bench, request, source, target)
    explanation = bench.core.explain(request.request_id, "t")
    assert explanation is not None
    assert explanation.attempts == 2


def test_a_target_counts_what_moves_there_before_it_is_there() -> None:
    bench = Bench(CONFIG)
    draining_pair(bench, "a", "b", "c", slots=4)
    source, target = pair(bench)
    target.slots = 2
    target.beat()
    bench.core.tick()
    assert [name for name, *_ in source.moves] == ["a", "b"], "there is room for two"
    assert bench.core._fleet[ReplicaId("r2")].expected.keys() == {"a", "b"}


def test_at_most_so_many_move_at_once_and_each_that_is_there_makes_room_for_the_next() -> None:
    bench = Bench(CONFIG.model_copy(update={"moves_at_once": 1}))
    draining_pair(bench, "a", "b")
    source, target = pair(bench)
    bench.core.tick()
    assert [name for name, *_ in source.moves] == ["a"]
    source.turn()
    bench.core.tick()
    assert [name for name, *_ in source.moves] == ["a"], "the first is granted, and not there yet"
    target.turn()
    assert [name for name, *_ in source.moves] == ["a", "b"]


def test_the_most_urgent_move_first() -> None:
    bench = Bench(CONFIG.model_copy(update={"moves_at_once": 1}))
    source = bench.replica("r1")
    for name, priority_class in (("low", "batch"), ("mid", "standard"), ("high", "interactive")):
        bench.submit(name, priority_class, tokens=8)
    source.turn()
    bench.replica("r2")
    source.state = ReplicaState.DRAINING
    source.beat()
    bench.core.tick()
    assert [name for name, *_ in source.moves] == ["high"]


def test_nothing_moves_where_somebody_would_have_to_give_way() -> None:
    bench = Bench(CONFIG)
    source = bench.replica("r1", slots=1)
    request = bench.submit("urgent", "interactive", tokens=8)
    source.turn()
    target = bench.replica("r2", slots=1)
    bench.submit("low", "batch", tokens=4)
    target.turn()
    source.state = ReplicaState.DRAINING
    source.beat()
    bench.core.tick()
    assert source.moves == []
    finish(bench, request, source, target)


def test_one_that_has_a_single_token_left_when_it_moves_ends_with_its_first_on_the_target() -> None:
    bench = Bench(CONFIG)
    (request,) = draining_pair(bench, "a", tokens=2)
    source, target = pair(bench)
    bench.core.tick()
    finish(bench, request, source, target)
    (moved,) = decisions(bench, request, "moved")
    assert (moved.replica, moved.numbers["emitted"]) == ("r2", 2), "the target gave the last one"
    assert outcomes(bench) == {"moved": 1}


def test_a_session_follows_its_move() -> None:
    bench = Bench(CONFIG)
    (request,) = draining_pair(bench, "a", terms=Terms(session="s"))
    source, target = pair(bench)
    bench.core.tick()
    source.turn()
    finish(bench, request, source, target)
    other = bench.replica("r0")
    bench.submit("b", terms=Terms(session="s"))
    assert [r.request_id for r, _ in target.added] == ["b"]
    assert not other.added


def test_what_waits_on_a_draining_replica_without_a_token_is_called_back_to_its_place() -> None:
    bench = Bench(CONFIG)
    source = bench.replica("r1", slots=1)
    running = bench.submit("a", "batch", tokens=8)
    source.turn()
    waiting = bench.submit("b", "interactive", tokens=4)  # it preempts a, which then waits
    source.turn()
    source.held[waiting.request_id].running = True
    third = bench.submit("c", "interactive", tokens=4)
    assert [r.request_id for r, _ in source.added] == ["a", "b"], "c waits in the queue"
    source.slots = 2
    source.beat()
    source.slots = 1
    source.beat()
    assert [r.request_id for r, _ in source.added] == ["a", "b", "c"], "and now there"
    source.state = ReplicaState.DRAINING
    source.beat()
    bench.core.tick()
    assert source.aborted == [], "nobody else takes work: it may yet be served where it is"
    target = bench.replica("r2", slots=4)
    bench.core.tick()
    assert source.aborted == [("c", 1)]
    assert [(r.request_id, k) for r, k in target.added] == [("c", 2)]
    for request in (running, waiting, third):
        finish(bench, request, source, target)


# --- what goes wrong before the grant ---


@pytest.mark.parametrize("refusal", ["source", "target"])
def test_what_is_refused_stays_where_it_is_and_is_not_asked_again_at_once(refusal: str) -> None:
    bench = Bench(CONFIG)
    (request,) = draining_pair(bench, "a", tokens=20)
    source, target = pair(bench)
    if refusal == "source":
        source.moving = Manner.REFUSE
    else:
        target.room = False
    bench.core.tick()
    source.turn()
    bench.core.tick()
    assert len(source.moves) == 1
    assert target.grants == []
    assert bench.core._fleet[ReplicaId("r2")].expected == {}
    bench.clock.advance(1.1)
    target.beat()
    source.turn()
    bench.core.tick()
    bench.core.tick()
    assert [(attempt, number) for _, attempt, number, _ in source.moves] == [(1, 2), (1, 3)], "a number is used once"
    target.room, source.moving = True, Manner.OBEY
    finish(bench, request, source, target)
    assert outcomes(bench)["refused"] >= 1


def test_a_source_that_says_nothing_is_called_off_in_time() -> None:
    bench = Bench(CONFIG)
    (request,) = draining_pair(bench, "a", tokens=400)
    source, target = pair(bench)
    source.moving = Manner.SILENT
    bench.core.tick()
    for _ in range(310):
        bench.clock.advance(0.1)
        source.turn()
        target.beat()
        bench.core.tick()
    assert source.called_off[0] == ("a", 1)
    assert outcomes(bench) == {"called_off": 1}
    finish(bench, request, source, target, turns=120)


@pytest.mark.parametrize("how", ["link", "death", "drain", "silence"])
def test_a_target_that_is_lost_before_the_grant_costs_nothing(how: str) -> None:
    bench = Bench(CONFIG)
    (request,) = draining_pair(bench, "a", tokens=12)
    source, target = pair(bench)
    bench.core.tick()
    source.step()  # it is frozen, and the word of it is on its way
    if how == "link":
        target.break_link()
    elif how == "death":
        target.die()
    elif how == "drain":
        target.state = ReplicaState.DRAINING
        target.beat()
    else:
        bench.clock.advance(1.5)
        source.beat()
    source.deliver()
    assert target.grants == []
    assert ("a", 1) in source.called_off
    source.turn()
    assert bench.text(request).split() == expected_text(request).split()[: source.held[request.request_id].made]
    assert outcomes(bench) == {"called_off": 1}


def test_a_source_whose_link_broke_is_told_when_it_is_up_again() -> None:
    bench = Bench(CONFIG)
    (request,) = draining_pair(bench, "a")
    source, target = pair(bench)
    bench.core.tick()
    source.step()
    source.break_link()
    assert source.called_off == []
    assert bench.core._fleet[ReplicaId("r2")].expected == {}
    source.connect()
    assert source.called_off == [("a", 1)]
    finish(bench, request, source, target)


def test_tokens_that_are_missing_when_it_stands_still_call_the_move_off() -> None:
    bench = Bench(CONFIG)
    (request,) = draining_pair(bench, "a")
    source, target = pair(bench)
    source.step()  # a token that will be lost
    bench.core.tick()
    source.step()
    del source.frames[0]
    source.deliver()
    assert target.grants == []
    assert source.called_off == [("a", 1)]
    finish(bench, request, source, target)


@pytest.mark.parametrize("heard", [False, True])
def test_a_cancel_ends_both_copies(heard: bool) -> None:
    bench = Bench(CONFIG)
    (request,) = draining_pair(bench, "a")
    source, target = pair(bench)
    bench.core.tick()
    source.step()
    if heard:
        source.deliver()
    bench.core.cancel(request.request_id)
    source.deliver()
    target.turn()
    source.turn()
    assert not source.held
    assert not target.held
    assert not target.coming
    assert outcomes(bench) == {"ended": 1}
    assert bench.outcome(request) is Outcome.CANCELLED


# --- and after it ---


@pytest.mark.parametrize("manner", [Manner.REFUSE, Manner.SILENT])
def test_a_grant_that_comes_to_nothing_goes_on_from_the_journal_and_counts_as_no_loss(manner: Manner) -> None:
    bench = Bench(CONFIG.model_copy(update={"max_attempts": 1}))
    (request,) = draining_pair(bench, "a")
    source, target = pair(bench)
    target.taking = manner
    bench.core.tick()
    source.turn()
    assert target.grants == [("a", 2, 1)]
    target.turn()
    if manner is Manner.SILENT:
        bench.clock.advance(1.9)
        target.beat()
        bench.core.tick()
        assert not target.added
        bench.clock.advance(0.2)
        target.beat()
        bench.core.tick()
    assert [(r.emitted_ids, k) for r, k in target.added] == [(expected_ids_of(request, 1), 3)]
    assert source.aborted == [("a", 1)]
    finish(bench, request, source, target)
    assert outcomes(bench) == {"failed": 1}


def expected_ids_of(request: Request, tokens: int) -> tuple[int, ...]:
    return tuple(int(word) for word in expected_text(request).split()[:tokens])


@pytest.mark.parametrize("taken", [False, True])
def test_a_targets_death_makes_suspects_of_those_only_that_it_had_taken(taken: bool) -> None:
    bench = Bench(CONFIG)
    (request,) = draining_pair(bench, "a")
    source, target = pair(bench)
    bench.core.tick()
    source.turn()
    if taken:
        target.send()  # no word of it
        target.listener.frame(
            target.replica_id, target.generation, StepFrame(target.report(), moves=(notice(MoveStage.TAKEN, 2),))
        )
    target.die()
    assert bool(decisions(bench, request, "suspected")) is taken
    other = bench.replica("r3")
    finish(bench, request, source, other)


def test_the_first_token_says_that_it_is_there_where_the_word_of_it_was_lost() -> None:
    bench = Bench(CONFIG)
    (request,) = draining_pair(bench, "a")
    source, target = pair(bench)
    bench.core.tick()
    source.turn()
    target.step()
    target.frames = [msgspec.structs.replace(frame, moves=()) for frame in target.frames]
    target.deliver()
    assert source.released == [("a", 1)]
    finish(bench, request, source, target)
    assert outcomes(bench) == {"moved": 1}


def test_a_source_that_died_after_the_grant_takes_nothing_with_it() -> None:
    bench = Bench(CONFIG)
    (request,) = draining_pair(bench, "a")
    source, target = pair(bench)
    bench.core.tick()
    source.turn()
    source.die()
    finish(bench, request, target)
    assert not target.added
    assert decisions(bench, request, "suspected") == []


def test_a_source_that_was_not_told_in_time_is_told_that_its_copy_is_no_longer_wanted() -> None:
    bench = Bench(CONFIG)
    (request,) = draining_pair(bench, "a")
    source, target = pair(bench)
    bench.core.tick()
    source.turn()
    source.break_link()
    target.turn()
    assert source.released == []
    source.connect()
    assert source.aborted == [("a", 1)]
    finish(bench, request, source, target)


def test_words_that_come_twice_or_late_change_nothing() -> None:
    bench = Bench(CONFIG)
    (request,) = draining_pair(bench, "a")
    source, target = pair(bench)
    bench.core.tick()
    source.step()
    frozen = source.frames[-1]
    source.deliver()
    bench.core.frame(source.replica_id, source.generation, frozen)
    assert target.grants == [("a", 2, 1)]
    assert source.aborted == []
    target.step()
    taken = target.frames[-1]
    target.deliver()
    bench.core.frame(target.replica_id, target.generation, taken)
    bench.core.frame(source.replica_id, source.generation, replace_moves(frozen, notice(MoveStage.OFF, 1)))
    finish(bench, request, source, target)
    assert outcomes(bench) == {"moved": 1}


def replace_moves(frame: StepFrame, *moves: MoveNotice) -> StepFrame:
    return msgspec.structs.replace(frame, moves=moves)


# --- the decisions ---


def notice(stage: MoveStage, attempt: int = 1, index: int = 0) -> MoveNotice:
    return MoveNotice(RequestId("a"), attempt, stage, index)


ASKED = Standing(Stage.ASKED, from_target=False, is_open=True, tokens=3, whole=True, target_takes=True)


def test_a_frozen_attempt_is_granted_only_whole_and_to_a_target_that_takes_it() -> None:
    frozen = notice(MoveStage.FROZEN, index=3)
    assert judge(frozen, ASKED) is Then.GRANT
    for wrong in (replace(ASKED, tokens=2), replace(ASKED, whole=False), replace(ASKED, target_takes=False)):
        assert judge(frozen, wrong) is Then.CALL_OFF
    assert judge(frozen, replace(ASKED, stage=Stage.OFF)) is Then.CALL_OFF
    assert judge(frozen, replace(ASKED, stage=None)) is Then.CALL_OFF
    assert judge(frozen, replace(ASKED, stage=None, is_open=False)) is Then.END_COPY


def test_after_the_grant_the_copy_of_the_source_never_counts_again() -> None:
    for stage in (Stage.GRANTED, Stage.TAKEN):
        for word in (MoveStage.FROZEN, MoveStage.OFF):
            found = replace(ASKED, stage=stage, is_open=False)
            assert judge(notice(word, index=3), found) is Then.NOTHING


def test_a_target_is_believed_only_after_the_grant() -> None:
    there = replace(ASKED, stage=Stage.GRANTED, from_target=True)
    assert judge(notice(MoveStage.TAKEN, 2), there) is Then.ARRIVE
    assert judge(notice(MoveStage.OFF, 2), there) is Then.GIVE_UP
    early = replace(there, stage=Stage.ASKED, is_open=False)
    assert judge(notice(MoveStage.TAKEN, 2), early) is Then.END_COPY
    assert judge(notice(MoveStage.OFF, 2), early) is Then.NOTHING


def resident(name: str, priority: int = 0, **parts: object) -> Resident:
    facts = {"begun": True, "reported": True, "parked": False, "movable": True} | parts
    return Resident(RequestId(name), priority, float(ord(name)), **facts)  # type: ignore[arg-type]


def load(*waiting: PriorityLoad) -> EngineLoad:
    return EngineLoad(slots_total=4, blocks_total=100, blocks_free=50, block_size_tokens=16, waiting=waiting)


def test_as_many_of_the_latest_without_a_token_are_called_back_as_wait() -> None:
    residents = [resident("a"), *(resident(name, begun=False) for name in "dcb"), resident("p", parked=True)]
    leaving = who_leaves(residents, load(PriorityLoad(0, 3, 0)), None)
    assert leaving.called_back == ("c", "d"), "of three that wait, one was preempted and has kept its place"
    assert leaving.to_move == ("a", "p")
    assert who_leaves(residents, load(), None).called_back == ()
    assert who_leaves(residents, None, None).called_back == ()


def test_what_the_report_does_not_count_is_not_taken_for_waiting() -> None:
    leaving = who_leaves([resident("a", begun=False, reported=False)], load(PriorityLoad(0, 1, 0)), None)
    assert leaving.called_back == ()


def test_nothing_takes_the_room_that_more_urgent_work_waits_for() -> None:
    residents = [resident("a", -10), resident("b", 0), resident("c", 10)]
    assert who_leaves(residents, load(), 0).to_move == ("c", "b")


def test_a_number_that_came_to_nothing_is_not_used_again() -> None:
    bench = Bench(CONFIG)
    (request,) = draining_pair(bench, "a")
    source, target = pair(bench)
    bench.core.tick()
    source.step()
    source.die()
    assert [k for _, k in target.added] == [3]
    assert target.coming.keys() == {(request.request_id, 2)}
    finish(bench, request, target)
    assert Generation(1, "a") == source.generation
