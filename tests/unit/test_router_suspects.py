"""Requests that kill the engine that runs them: each ends in one 500, and nobody else does."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.config import RouterConfig
from cluster.types import Generation, Outcome, RefusalReason, ReplicaId, ReplicaState, Request, RequestId
from router.suspects import CLEARED_AFTER_TOKENS, Present, Suspicion, Trial, judge, without
from router.terms import Terms
from tests.unit.fake_replica import Bench, FakeReplica, expected_text

# --- the decision ---


def present(name: str, suspicion: Suspicion | None = None, tokens: int = 7) -> Present:
    return Present(RequestId(name), tokens, suspicion)


A, B = RequestId("a"), RequestId("b")
APART, ALONE = Suspicion(frozenset((1,)), Trial.APART, 9), Suspicion(frozenset((1, 2)), Trial.ALONE, 9)


@pytest.mark.parametrize("strangers", [False, True])
def test_all_that_ran_when_an_engine_died_are_suspects(strangers: bool) -> None:
    verdict = judge(5, [present("a"), present("b", tokens=0)], strangers=strangers)
    assert verdict.blamed is None
    assert verdict.suspects == {
        A: Suspicion(frozenset((5,)), Trial.APART, 7 + CLEARED_AFTER_TOKENS),
        B: Suspicion(frozenset((5,)), Trial.APART, CLEARED_AFTER_TOKENS),
    }


def test_nobody_is_blamed_for_what_another_beside_it_may_have_done() -> None:
    for suspicion in (APART, ALONE):
        verdict = judge(5, [present("a", suspicion), present("b")], strangers=False)
        assert verdict.blamed is None
        assert verdict.suspects[A].trial is Trial.ALONE
        assert verdict.suspects[A].deaths == suspicion.deaths | {5}
        assert verdict.suspects[B].trial is Trial.APART
    assert judge(5, [present("a", APART)], strangers=True).blamed is None
    assert judge(5, [present("a")], strangers=False).blamed is None, "once is no pattern"


def test_suspect_whose_engine_dies_under_it_alone_is_blamed() -> None:
    assert judge(5, [present("a", APART)], strangers=False).blamed == "a"
    assert judge(5, [present("a", ALONE)], strangers=False).blamed == "a"
    assert judge(5, [present("a", ALONE)], strangers=True).blamed is None, "one that never began killed nothing"


def test_suspicion_is_left_for_the_deaths_that_are_not_explained() -> None:
    assert without(ALONE, {1, 2, 3}) is None
    assert without(ALONE, {2}) == Suspicion(frozenset((1,)), Trial.ALONE, 9)
    assert without(ALONE, {7}) is ALONE


# --- engines that die ---


@dataclass
class MortalReplica(FakeReplica):
    """Dies in the step that would make the token with which one of its running requests kills, by `kills`."""

    kills: dict[str, int] = field(default_factory=dict)
    dying: bool = False

    def step(self) -> None:
        order = sorted(self.held.values(), key=lambda h: (-h.request.priority, h.request.arrived_unix_s))
        if any(self.kills.get(h.request.request_id) == h.made for h in order[: self.slots]):
            self.dying = True
        else:
            super().step()


class Hospital:
    """Replicas that are replaced some turns after they have died. The last frames before a death may be lost with it."""

    def __init__(self, replicas: int, slots: int, kills: dict[str, int], rng: random.Random, lost_frames: int) -> None:
        self.bench = Bench(
            RouterConfig(expected_output_tokens=4, max_queue_s=1e6, silent_after_s=1e6, fenced_after_s=2e6)
        )
        self.slots, self.kills, self.rng, self.lost_frames = slots, kills, rng, lost_frames
        self.generation = self.deaths = 0
        self.due: dict[str, int] = {}
        self.replicas: dict[str, MortalReplica] = {}
        for k in range(replicas):
            self.start(f"r{k}")

    def start(self, name: str) -> None:
        self.generation += 1
        replica = MortalReplica(
            self.bench.core, ReplicaId(name), Generation(self.generation, "g"), slots=self.slots, kills=self.kills
        )
        self.replicas[name] = replica
        replica.connect()

    def turn(self) -> None:
        self.bench.clock.advance(0.05)
        for name in sorted(self.replicas):
            replica = self.replicas[name]
            replica.step()
            if replica.dying:
                del replica.frames[max(0, len(replica.frames) - self.rng.randint(0, self.lost_frames)) :]
                replica.deliver()
                self.deaths += 1
                replica.die()
                del self.replicas[name]
                self.due[name] = self.rng.randint(0, 5)
            elif len(replica.frames) > self.lost_frames or self.rng.random() < 0.5:
                replica.deliver()
        for name in [name for name, turns in self.due.items() if not turns]:
            del self.due[name]
            self.start(name)
        self.due = {name: turns - 1 for name, turns in self.due.items()}
        self.bench.core.tick()

    def run(self, turns: int) -> None:
        for _ in range(turns):
            if not self.bench.core._live:
                return
            self.turn()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    replicas=st.integers(1, 4),
    slots=st.integers(1, 16),
    poisons=st.integers(1, 2),
    lost_frames=st.integers(0, CLEARED_AFTER_TOKENS - 2),
)
def test_each_poison_ends_in_one_500_and_all_bystanders_finish(
    seed: int, replicas: int, slots: int, poisons: int, lost_frames: int
) -> None:
    """32 requests, at most m(2m + 1) deaths of m poisons: 3 of one, 10 of two. Where frames are lost, m more."""
    rng = random.Random(seed)
    kills = {f"q{k}": rng.randint(0, 19) for k in rng.sample(range(32), poisons)}
    world = Hospital(replicas, slots, kills, rng, lost_frames)
    requests = []
    for k in range(32):
        while not world.replicas:  # with none to hope for, a request is refused at arrival
            world.turn()
        requests.append(world.bench.submit(f"q{k}", rng.choice(("interactive", "standard", "batch")), tokens=20))
        if rng.random() < 0.2:
            world.turn()
    world.run(6000)
    ends = {r.request_id: world.bench.outcome(r) for r in requests}
    assert ends == {name: Outcome.QUARANTINED if name in kills else Outcome.FINISHED for name in ends}
    assert all(world.bench.text(r) == expected_text(r) for r in requests if r.request_id not in kills)
    assert world.deaths <= poisons * (2 * poisons + 1 + (lost_frames > 0))
    assert world.bench.metric("forebay_engine_deaths_total") == world.deaths
    world.bench.core.tick()
    assert world.bench.metric("forebay_suspects") == 0


def test_bystander_outlives_many_engines_that_others_kill() -> None:
    """Twelve poisons come one after another, each beside the same long request."""
    kills = {f"poison{k}": 3 for k in range(12)}
    world = Hospital(2, 8, kills, random.Random(2), 0)
    bystander = world.bench.submit("bystander", tokens=2000)
    for name in kills:
        poison = world.bench.submit(name, tokens=20)
        for _ in range(200):
            world.turn()
            if world.bench.outcome(poison) is not None:
                break
        assert world.bench.outcome(poison) is Outcome.QUARANTINED
    assert world.deaths >= 2 * len(kills)
    world.run(5000)
    assert world.bench.outcome(bystander) is Outcome.FINISHED
    assert world.bench.text(bystander) == expected_text(bystander)


# --- one at a time, and in nobody's way ---


def ids_added(replica: FakeReplica) -> list[str]:
    return [request.request_id for request, _ in replica.added]


def two_suspects(bench: Bench, priority_class: str = "standard") -> list[Request]:
    """Two requests that lost their engine; no replica is left."""
    first = bench.replica("first")
    requests = [bench.submit(f"s{k}", priority_class, tokens=30) for k in range(2)]
    first.turn()
    first.die()
    return requests


def test_suspects_are_tried_one_at_a_time_on_each_replica_and_others_pass_them() -> None:
    bench = Bench()
    two_suspects(bench)
    replica = bench.replica("r1", slots=9)
    assert ids_added(replica) == ["s0"]
    new = bench.submit("new", tokens=30), bench.submit("new-lower", "batch", tokens=30)
    assert ids_added(replica) == ["s0", "new", "new-lower"], "neither in its band nor below"
    for _ in range(CLEARED_AFTER_TOKENS - 1):
        replica.turn()
    assert ids_added(replica)[-1] != "s1"
    replica.turn()
    assert ids_added(replica)[-1] == "s1", "the first has gone on beyond where its engine died"
    assert all(bench.outcome(r) is None for r in new)


def test_suspects_spread_over_the_replicas_that_have_none() -> None:
    bench = Bench()
    two_suspects(bench)
    r1 = bench.replica("r1")
    r2 = bench.replica("r2")
    assert (ids_added(r1), ids_added(r2)) == (["s0"], ["s1"])


def test_suspect_set_aside_does_not_make_arrivals_wait_nor_fills_the_queue() -> None:
    bench = Bench()
    two_suspects(bench, "interactive")
    replica = bench.replica("r1", slots=9)
    bench.submit("new", "interactive", tokens=30)
    told = bench.core.explain(RequestId("new"), "t")
    assert told is not None
    assert told.decisions[0].event == "admitted", "it is not judged as one that waits"
    assert ids_added(replica) == ["s0", "new"]


def test_suspect_set_aside_is_shown_as_queued_and_can_be_cancelled() -> None:
    bench = Bench()
    two_suspects(bench)
    bench.replica("r1", slots=9)
    (band,) = bench.core.bands()
    assert (band.queued_requests, band.running_requests) == (1, 1)
    bench.core.cancel(RequestId("s1"))
    (band,) = bench.core.bands()
    assert (band.queued_requests, band.running_requests) == (0, 1)


def test_suspect_comes_back_at_its_old_place() -> None:
    """Set aside, it goes before what came later to its band as soon as it can be tried."""
    bench = Bench()
    two_suspects(bench)
    replica = bench.replica("r1", slots=2)
    bench.submit("new", tokens=CLEARED_AFTER_TOKENS)
    later = bench.submit("later", tokens=30)
    assert ids_added(replica) == ["s0", "new"]
    for _ in range(CLEARED_AFTER_TOKENS):
        replica.turn()
    assert ids_added(replica) == ["s0", "new", "s1"]
    assert bench.outcome(later) is None


def test_where_there_is_no_room_at_all_a_suspect_keeps_its_place_in_the_line() -> None:
    bench = Bench()
    two_suspects(bench)
    replica = bench.replica("r1", slots=1)
    bench.submit("new", tokens=30)
    assert ids_added(replica) == ["s0"]
    for _ in range(29):
        replica.turn()
    assert ids_added(replica) == ["s0", "s1"]


def test_suspect_that_its_engine_pauses_is_taken_back_so_that_others_can_be_tried() -> None:
    bench = Bench()
    two_suspects(bench, "batch")
    replica = bench.replica("r1", slots=1)
    replica.turn()
    bench.submit("urgent", "interactive", tokens=2)
    replica.turn()
    assert replica.aborted == [("s0", 2)]
    assert not bench.core._fleet[replica.replica_id].reservations.keys() - {"urgent"}
    replica.turn()
    assert ids_added(replica) == ["s0", "urgent", "s0"], "at its old place"


@pytest.mark.parametrize(("priority_class", "passes"), [("interactive", True), ("batch", False)])
def test_suspect_takes_the_trial_of_a_less_urgent_one_and_of_no_equal(priority_class: str, passes: bool) -> None:
    bench = Bench()
    first, second = bench.replica("first", slots=1), bench.replica("second", slots=1)
    bench.submit("low", "batch", tokens=30)
    bench.submit("other", priority_class, tokens=30)
    last = bench.replica("last", slots=9)
    holder = {name: replica for replica in (first, second) for name in replica.held}
    holder[RequestId("low")].die()
    assert ids_added(last) == ["low"]
    holder[RequestId("other")].die()
    assert last.aborted == ([("low", 2)] if passes else [])
    assert ids_added(last) == (["low", "other"] if passes else ["low"])
    for _ in range(CLEARED_AFTER_TOKENS):
        last.turn()
    assert ids_added(last) == (["low", "other", "low"] if passes else ["low", "other"])


def test_requests_of_a_replica_that_was_leaving_are_no_suspects() -> None:
    bench = Bench()
    first = bench.replica("first")
    for k in range(2):
        bench.submit(f"s{k}", tokens=30)
    first.state = ReplicaState.DRAINING
    first.turn()
    first.die()
    assert ids_added(bench.replica("r1")) == ["s0", "s1"]


def test_paused_requests_of_a_dead_engine_are_no_suspects() -> None:
    bench = Bench()
    first = bench.replica("first", slots=1)
    bench.submit("paused", "batch", tokens=30)
    first.turn()
    bench.submit("urgent", "interactive", tokens=30)
    first.turn()
    first.die()
    assert [live.suspicion is not None for live in bench.core._live.values()] == [False, True]


def test_who_was_paused_on_two_engines_that_died_is_a_suspect_of_the_second_death() -> None:
    """It may be what kills, each time in a step whose frame is lost with the engine."""
    bench = Bench()
    for name, suspects in (("first", [False]), ("second", [True])):
        replica = bench.replica(name, slots=1)
        if name == "first":
            bench.submit("paused", "batch", tokens=30)
        replica.turn()
        bench.submit(f"urgent-{name}", "interactive", tokens=30)
        replica.turn()
        replica.die()
        bench.core.cancel(RequestId(f"urgent-{name}"))
        assert [live.suspicion is not None for live in bench.core._live.values()] == suspects


def test_engine_that_was_replaced_without_a_word_has_died_too() -> None:
    bench = Bench()
    bench.replica("r1", generation=Generation(1, "a"))
    request = bench.submit("poison", tokens=30)
    assert ids_added(bench.replica("r1", generation=Generation(2, "b"))) == ["poison"]
    assert ids_added(bench.replica("r1", generation=Generation(3, "c"))) == []
    assert bench.outcome(request) is Outcome.QUARANTINED


def test_paused_request_that_its_engine_may_have_resumed_is_a_suspect() -> None:
    bench = Bench()
    first = bench.replica("first", slots=1)
    bench.submit("paused", "batch", tokens=30)
    first.turn()
    bench.submit("urgent", "interactive", tokens=30)
    first.turn()
    bench.core.cancel(RequestId("urgent"))
    first.beat()
    first.die()
    assert [live.suspicion is not None for live in bench.core._live.values()] == [True]


def accused(bench: Bench) -> FakeReplica:
    """s0 is to be tried alone and is set aside; returns a replica with other work that has a slot free."""
    two_suspects(bench, "batch")
    bench.core.cancel(RequestId("s1"))
    second = bench.replica("second", slots=2)
    bench.submit("beside", "batch", tokens=30)
    assert ids_added(second) == ["s0", "beside"]
    busy = bench.replica("busy", slots=1)
    bench.submit("filler", "interactive", tokens=30)
    assert ids_added(busy)[-1] == "filler"
    busy.turn()
    second.die()
    bench.core.cancel(RequestId("beside"))
    busy.slots = 2
    busy.beat()
    assert "s0" not in ids_added(busy)
    return busy


def test_trial_alone_goes_to_an_empty_replica_before_its_own_band() -> None:
    bench = Bench()
    accused(bench)
    assert ids_added(bench.replica("third", slots=1)) == ["s0"]


def test_trial_alone_takes_no_replica_from_more_urgent_work() -> None:
    bench = Bench()
    busy = accused(bench)
    for name in ("new", "waits"):
        bench.submit(name, "interactive", tokens=30)
    assert ids_added(busy)[-1] == "new"
    assert ids_added(bench.replica("third", slots=1)) == ["waits"]


# --- several routers ---


def trial_there(bench: Bench, replica: FakeReplica, name: str) -> Trial:
    return bench.core._fleet[replica.replica_id].reservations[RequestId(name)].trial


def test_beside_other_routers_a_suspect_on_an_empty_replica_is_tried_alone_and_blamed_for_its_death() -> None:
    bench = Bench()
    first, second = two_suspects(bench)
    replica = bench.replica("r1", slots=9, others=True)
    assert trial_there(bench, replica, "s0") is Trial.ALONE
    bench.submit("new", tokens=30)
    assert ids_added(replica) == ["s0"], "nobody else is sent there meanwhile"
    for _ in range(CLEARED_AFTER_TOKENS):
        replica.turn()
    assert ids_added(replica) == ["s0", "s1", "new"]
    assert trial_there(bench, replica, "s1") is Trial.APART
    bench.core.cancel(RequestId("s0"), RequestId("new"))
    replica.die()
    assert [bench.outcome(r) for r in (first, second)] == [Outcome.CANCELLED, None]
    last = bench.replica("r2", others=True)
    assert trial_there(bench, last, "s1") is Trial.ALONE
    last.beat()
    last.die()
    assert bench.outcome(second) is Outcome.QUARANTINED


def test_a_suspect_is_not_blamed_for_a_replica_that_has_not_said_that_its_trial_alone_has_begun() -> None:
    """It had a stranger's work when the trial reached it, or died before."""
    bench = Bench()
    first, _ = two_suspects(bench)
    replica = bench.replica("r1", slots=9, others=True)
    assert trial_there(bench, replica, "s0") is Trial.ALONE
    replica.die()
    assert bench.outcome(first) is None
    again = bench.replica("r2", others=True)
    assert trial_there(bench, again, "s0") is Trial.ALONE
    again.beat()
    again.die()
    assert bench.outcome(first) is Outcome.QUARANTINED


def test_nobody_is_blamed_for_what_another_router_may_have_sent_there_since_the_last_report() -> None:
    """s0 is the only one of this router on a replica that had work of another, and by its last report has none any more."""
    bench = Bench()
    first, _ = two_suspects(bench)
    replica = FakeReplica(bench.core, ReplicaId("r1"), slots=9, others=True)
    stranger = msgspec.structs.replace(first, request_id=RequestId("stranger"))
    replica.add(stranger, 1)
    replica.connect()
    assert trial_there(bench, replica, "s0") is Trial.APART
    replica.forget(stranger.request_id)
    replica.beat()
    replica.die()
    assert bench.outcome(first) is None
    assert bench.core._live[first.request_id].trial is Trial.ALONE


@pytest.mark.parametrize(("trial", "sent"), [(Trial.ALONE, []), (Trial.APART, ["new"])])
def test_where_another_router_tries_a_suspect_goes_what_may_be_beside_it(trial: Trial, sent: list[str]) -> None:
    bench = Bench()
    two_suspects(bench)
    replica = bench.replica("r1", slots=9, others=True, trial=trial)
    bench.submit("new", tokens=30)
    assert ids_added(replica) == sent
    replica.trial = Trial.NONE
    replica.beat()
    assert ids_added(replica)[len(sent)] == "s0"


def test_a_suspect_whose_trial_a_replica_refuses_is_tried_as_soon_as_it_reports_again() -> None:
    bench = Bench()
    requests = two_suspects(bench)
    replica = bench.replica("r1", slots=9, others=True, refuse_with=RefusalReason.FULL)
    assert ids_added(replica) == ["s0"]
    replica.turn()
    replica.refuse_with = None
    replica.beat()
    assert ids_added(replica) == ["s0", "s0"]
    for _ in range(60):
        replica.turn()
    assert [bench.outcome(r) for r in requests] == [Outcome.FINISHED] * 2
    assert [bench.text(r) for r in requests] == [expected_text(r) for r in requests]


@pytest.mark.parametrize("waits", ["on trial", "set aside"])
def test_a_suspect_whose_client_leaves_or_whose_time_is_up_leaves_its_place_to_the_next(waits: str) -> None:
    for leave in (True, False):
        bench = Bench()
        first = bench.replica("first")
        requests = [
            bench.submit(f"s{k}", tokens=30, terms=Terms(timeout_s=5.0 if f"s{k}" == gone else None))
            for k, gone in enumerate(["s0", ""] if waits == "on trial" else ["", "s1"])
        ]
        first.turn()
        first.die()
        replica = bench.replica("r1", slots=9)
        gone, stays = requests if waits == "on trial" else requests[::-1]
        if leave:
            bench.core.cancel(gone.request_id)
        else:
            bench.clock.advance(5.0)
            replica.beat()
            bench.core.tick()
        for _ in range(60):
            replica.turn()
        queued = waits == "set aside"
        expired = Outcome.EXPIRED_IN_QUEUE if queued else Outcome.TIMED_OUT
        assert bench.outcome(gone) is (Outcome.CANCELLED if leave else expired)
        assert bench.outcome(stays) is Outcome.FINISHED
        assert (len(bench.core._trials), bench.core._trials.waiting) == (0, 0)


def test_fenced_replica_makes_no_suspects() -> None:
    bench = Bench()
    bench.replica("silent")
    for k in range(2):
        bench.submit(f"q{k}", tokens=30)
    bench.clock.advance(10)
    bench.core.tick()
    assert ids_added(bench.replica("r1")) == ["q0", "q1"]


def test_quarantine_is_one_500_with_a_code_a_log_line_and_its_decisions(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    first = bench.replica("r1")
    poison, bystander = bench.submit("poison", tokens=30), bench.submit("bystander", tokens=30)
    first.turn()
    first.die()
    second = bench.replica("r2")
    assert ids_added(second) == ["poison"]
    second.die()
    ending = bench.streams[poison.request_id].ending
    assert ending is not None
    assert (ending.outcome, ending.meaning.status, ending.meaning.code) == (Outcome.QUARANTINED, 500, "quarantined")
    assert bench.outcome(bystander) is None
    third = bench.replica("r3")
    later = bench.submit("later", tokens=30)
    assert ids_added(third) == ["bystander", "later"], "it is cleared with the blame"
    assert bench.outcome(later) is None
    for name, events in (
        ("poison", ["admitted", "dispatched", "suspected", "returned", "dispatched", "blamed"]),
        ("bystander", ["admitted", "dispatched", "suspected", "returned", "set aside", "cleared", "dispatched"]),
    ):
        told = bench.core.explain(RequestId(name), "t")
        assert told is not None
        assert [d.event for d in told.decisions] == events
    assert bench.metric("forebay_requests_total", priority_class="standard", outcome="quarantined") == 1
    assert "request poison is quarantined" in caplog.text
