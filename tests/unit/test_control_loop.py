"""One controller incarnation: what it is told makes its proposals, and nothing else does."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import pairwise

import msgspec
import pytest

from cluster.config import ControlConfig
from cluster.control.gates import DEMAND_PERIOD_S
from cluster.control.loop import GONE_AFTER_S, WEIGH_FOR_S, Control
from cluster.control.preempt import SEEN_S
from cluster.control.view import Proposal
from cluster.messages import HeldRequest, Left, RosterEntry, Stays, Unplaced
from cluster.types import Generation, ReplicaId, RequestId, RouterId
from tests.unit.control_kit import MODEL, NOW_S, ROUTER, entry, load, paused, report, request, waits

CONFIG = ControlConfig()
STATUS_S = 0.1


class Told:
    """A controller, and replicas that tell it how they are with every status. They do nothing that is proposed."""

    def __init__(self, config: ControlConfig = CONFIG) -> None:
        self.config = config
        self.control = Control(config)
        self.now_s = NOW_S
        self.replicas: dict[RosterEntry, tuple[HeldRequest, ...]] = {}
        self.demands: dict[RouterId, Unplaced] = {}
        self.steps: Callable[[float], int] = lambda now_s: int(now_s / 0.05)

    def has(self, who: RosterEntry, *held: HeldRequest) -> None:
        self.replicas[who] = held

    def status(self, who: RosterEntry) -> None:
        held = self.replicas[who]
        engine = load(held, slots=4, blocks=200, steps=self.steps(self.now_s))
        self.control.replica(who, report(who, engine), held or None, self.now_s)

    def for_s(
        self, seconds: float, order: Callable[[Iterable[RosterEntry]], Iterable[RosterEntry]] = list
    ) -> list[Proposal]:
        """All that is proposed in that time."""
        proposed: list[Proposal] = []
        for tick in range(round(seconds / self.config.tick_s)):
            self.now_s += self.config.tick_s
            if tick % round(STATUS_S / self.config.tick_s) == 0:
                for who in order(self.replicas):
                    self.status(who)
            for router_id, told in self.demands.items():
                self.control.unplaced(router_id, told, self.now_s)
            proposed += self.control.tick(self.now_s)
        return proposed


def runners(
    count: int, *, name: str = "r", blocks: int = 4, priority: int = 0, remaining: int = 16
) -> list[HeldRequest]:
    return [request(f"{name}{n}", blocks=blocks, priority=priority, remaining=remaining) for n in range(count)]


def asks(
    blocks: int, *, name: str = "urgent", priority: int = 10, model: str = MODEL, waits_s: float = 1.0
) -> Unplaced:
    return Unplaced(model, RequestId(name), priority, blocks, waits_s)


def test_what_waits_is_given_back_once_it_has_been_seen_to_wait_long_enough_and_once_only() -> None:
    told = Told()
    told.has(entry("full"), *runners(4), waits("w"))
    told.has(entry("idle"))
    assert told.for_s(CONFIG.stall_s * 0.9) == []
    (proposal,) = told.for_s(CONFIG.proposal_expiry_s * 0.9)
    assert (proposal.request_id, proposal.source, proposal.target) == ("w", "full", None)
    assert proposal.router_id == ROUTER
    assert proposal.source_generation == entry("full").generation
    told.has(entry("full"), *runners(4), waits("w", attempt=2))  # it was sent there again
    assert told.for_s(CONFIG.request_rest_s - CONFIG.proposal_expiry_s) == []
    assert len(told.for_s(CONFIG.proposal_expiry_s)) == 1


def test_what_runs_is_moved_once_the_steps_of_its_replica_are_known() -> None:
    told = Told()
    told.has(entry("hot"), *runners(4, remaining=100))
    told.has(entry("cold"))
    proposed = told.for_s(1.0)
    assert {(p.source, p.target) for p in proposed} == {("hot", "cold")}
    assert proposed[0].numbers["step_here_s"] == pytest.approx(0.05, rel=0.2)
    stands = Told()
    stands.steps = lambda _: 0
    stands.has(entry("hot"), *runners(4, remaining=100))
    stands.has(entry("cold"))
    assert stands.for_s(1.0) == []


def test_models_are_apart() -> None:
    told = Told()
    told.has(entry("full"), *runners(4), waits("w"))
    told.has(entry("idle", model="other"))
    assert told.for_s(1.0) == []
    told.demands[ROUTER] = asks(190, model="other")
    assert told.for_s(1.0) == []
    told.has(entry("idle-too"))
    assert {p.request_id for p in told.for_s(1.0)} == {"w"}  # whom the other model's demand does not hold up


def test_while_something_fits_nowhere_its_models_replicas_are_to_say_what_they_hold_often_enough_to_do_so_throughout() -> (
    None
):
    told = Told()
    for model in (MODEL, "other"):
        told.has(entry(f"of-{model}", model=model))
    told.for_s(1.0)
    assert told.control.to_weigh(told.now_s) == ()
    told.demands[ROUTER] = asks(190)
    said_s = []
    for _ in range(100):
        told.for_s(CONFIG.tick_s)
        if models := told.control.to_weigh(told.now_s):
            assert models == (MODEL,)
            said_s.append(told.now_s)
    assert said_s[0] == pytest.approx(NOW_S + 1.0 + CONFIG.tick_s)
    assert len(said_s) == 5, "in five seconds"
    assert all(later - s < WEIGH_FOR_S / 2 for s, later in pairwise(said_s)), "one may be lost"
    told.demands.clear()
    told.for_s(2 * GONE_AFTER_S)
    assert told.control.to_weigh(told.now_s) == ()


def test_a_demand_makes_those_leave_who_are_less_urgent() -> None:
    told = Told()
    told.has(entry("r"), *runners(4, blocks=50, remaining=1))
    told.demands[ROUTER] = asks(98)
    proposed = told.for_s(CONFIG.proposal_expiry_s * 0.9)
    assert Counter(p.for_request_id for p in proposed) == {"urgent": 2}


def test_where_who_is_asked_to_leave_stays_another_is_asked_at_once_and_it_counts_as_no_park() -> None:
    told = Told(ControlConfig(max_parks=1))
    told.has(
        entry("r"), request("cheap", blocks=98, remaining=1), request("dear", blocks=100, tokens=9999, remaining=1)
    )
    told.demands[ROUTER] = asks(98)
    (first,) = told.for_s(1.0)
    told.control.stays(Stays(first.request_id, first.attempt, RequestId("another")))
    told.control.stays(Stays(first.request_id, first.attempt + 1, RequestId("urgent")))
    assert told.for_s(CONFIG.proposal_expiry_s - 1.1) == [], "of none of these was it asked"
    told.control.stays(Stays(first.request_id, first.attempt, RequestId("urgent")))
    (second,) = told.for_s(CONFIG.tick_s)
    assert (first.request_id, second.request_id) == ("cheap", "dear")
    told.control.stays(Stays(second.request_id, second.attempt, RequestId("urgent")))
    assert told.for_s(CONFIG.request_rest_s - 2 * CONFIG.proposal_expiry_s) == [], "both rest"
    (again,) = told.for_s(2 * CONFIG.proposal_expiry_s)
    assert again.request_id == "cheap", "it was not parked"


TEN_MINUTES = ControlConfig(proposal_expiry_s=600.0)


def for_room(told: Told) -> tuple[Proposal, HeldRequest]:
    """The cheapest of two leaves for a request that needs 98 blocks of 200, of which 2 are free. The other stays."""
    dear = request("dear", blocks=100, tokens=9999, remaining=1)
    told.has(entry("r"), request("cheap", blocks=98, remaining=1), dear)
    told.demands[ROUTER] = asks(98)
    (first,) = told.for_s(5.0)
    assert first.request_id == "cheap"
    return first, dear


def went(first: Proposal) -> Left:
    return Left(first.request_id, first.attempt, RequestId("urgent"))


@pytest.mark.parametrize("left", [True, False])
def test_where_growth_undoes_the_room_that_was_made_more_leave_at_once_and_not_before_who_was_asked_has_left(
    left: bool,
) -> None:
    told = Told(TEN_MINUTES)
    first, dear = for_room(told)
    if left:
        told.control.left(went(first), told.now_s)
    assert told.for_s(STATUS_S) == [], "what the reports say is older"
    told.has(entry("r"), msgspec.structs.replace(dear, blocks=110))
    again = told.for_s(5 * STATUS_S)
    assert [p.request_id for p in again] == ["dear"] * left
    assert told.for_s(20.0) == [], "once"


def test_room_that_was_made_and_is_there_is_left_to_its_router_and_to_nobody_else() -> None:
    told = Told(TEN_MINUTES)
    first, dear = for_room(told)
    told.control.left(went(first), told.now_s)
    told.has(entry("r"), dear)
    told.has(entry("full"), *runners(4, blocks=1, priority=20), waits("w", priority=20))
    assert told.for_s(0.4) == []
    del told.demands[ROUTER]  # it has its place
    assert told.for_s(5.0) == []


@pytest.mark.parametrize("waits", [False, True])
def test_room_that_the_request_itself_may_have_taken_is_made_again_only_where_its_router_says_so_since(
    waits: bool,
) -> None:
    told = Told(TEN_MINUTES)
    first, dear = for_room(told)
    told.control.left(went(first), told.now_s)
    told.has(entry("r"), dear)
    assert told.for_s(0.2) == [], "the reports show the room"
    last_word = told.demands.pop(ROUTER)
    told.has(entry("r"), dear, request("it", blocks=98, priority=10))
    assert told.for_s(CONFIG.tick_s) == [], "the last word still counts, and is older than that"
    if waits:
        told.demands[ROUTER] = last_word
    assert [p.request_id for p in told.for_s(0.5)] == ["dear"] * waits


@pytest.mark.parametrize("waits_s", [1.0, 700.0])
def test_who_still_has_no_place_where_reports_show_the_room_has_others_asked_once_its_router_has_seen_it(
    waits_s: float,
) -> None:
    told = Told(TEN_MINUTES)
    first, dear = for_room(told)
    told.demands[ROUTER] = asks(98, waits_s=waits_s)
    told.control.left(went(first), told.now_s)
    told.has(entry("r"), dear)
    told.has(entry("other"), request("third", blocks=199, tokens=99999, remaining=1))
    assert told.for_s(0.15 + SEEN_S) == [], "the second report shows it"
    assert [p.request_id for p in told.for_s(0.5)] == ["third"]


@pytest.mark.parametrize("slow", [0, 1])
def test_of_several_that_leave_the_last_that_is_shown_is_the_one_that_its_router_must_have_seen(slow: int) -> None:
    told = Told(TEN_MINUTES)
    stays = request("stays", blocks=100, priority=20)
    told.has(entry("r"), request("a", blocks=50, remaining=1), request("b", blocks=48, remaining=1), stays)
    told.has(entry("other"), request("third", blocks=198, tokens=99999, remaining=1))
    told.demands[ROUTER] = asks(98)
    both = told.for_s(1.0)
    assert [p.request_id for p in both] == ["a", "b"]
    told.control.left(went(both[1 - slow]), told.now_s)
    assert told.for_s(1.0) == []
    told.control.left(went(both[slow]), told.now_s)
    told.has(entry("r"), stays)
    assert told.for_s(0.15 + SEEN_S) == []
    assert [p.request_id for p in told.for_s(0.5)] == ["third"]


def test_who_has_no_place_in_any_room_that_is_made_has_others_asked_at_once_only_once() -> None:
    """Its router may have lost its links: it would empty replica after replica, some in each second."""
    told = Told(TEN_MINUTES)
    first, dear = for_room(told)
    told.control.left(went(first), told.now_s)
    told.has(entry("r"), dear)
    for n in range(5):
        told.has(entry(f"r{n}"), request(f"of-{n}", blocks=199, tokens=99999, remaining=1))
    asked = []
    for _ in range(20):
        for proposal in told.for_s(1.0):
            asked.append(proposal.source)
            told.control.left(went(proposal), told.now_s)
            told.has(entry(proposal.source))
    assert len(asked) == 1


def test_until_a_step_has_ended_since_what_has_left_is_not_taken_to_have_freed_its_blocks() -> None:
    told = Told(TEN_MINUTES)
    first, _ = for_room(told)
    steps = told.steps(told.now_s)
    told.steps = lambda _: steps
    told.control.left(went(first), told.now_s)
    assert told.for_s(2.0) == [], "its step goes on"
    told.steps = lambda _: steps + 1
    assert [p.request_id for p in told.for_s(STATUS_S + CONFIG.tick_s)] == ["dear"]


def test_whose_replica_is_gone_has_left() -> None:
    told = Told(TEN_MINUTES)
    first, dear = for_room(told)
    told.has(entry("other"), dear, request("more", blocks=99, remaining=9))
    told.for_s(1.0)
    told.control.left(went(first), told.now_s)
    del told.replicas[entry("r")]
    told.control.replica_gone(entry("r").replica_id, entry("r").generation)
    assert [p.source for p in told.for_s(2 * CONFIG.tick_s)] == ["other"]


def test_a_demand_that_is_not_told_of_any_more_makes_nobody_leave() -> None:
    for after_s, goes in ((2 * DEMAND_PERIOD_S, True), (1.1 * GONE_AFTER_S, False)):
        told = Told()
        told.has(entry("r"), *runners(4, blocks=50))
        told.status(entry("r"))
        told.control.unplaced(ROUTER, asks(100), told.now_s)
        assert bool(told.control.tick(told.now_s + after_s)) is goes


@pytest.mark.parametrize("ends", ["router", "other router", "its queue"])
def test_a_demand_ends_with_its_router_and_with_its_place_at_the_head(ends: str) -> None:
    told = Told()
    told.has(entry("r"), *runners(4, blocks=50))
    told.status(entry("r"))
    told.control.unplaced(ROUTER, asks(100), told.now_s)
    if ends == "router":
        told.control.router_gone(ROUTER)
    elif ends == "other router":
        told.control.router_gone(RouterId("other"))
    else:
        told.control.unplaced(ROUTER, asks(100, name="next", priority=-10), told.now_s)
    assert bool(told.control.tick(told.now_s)) is (ends == "other router")


def test_who_was_parked_as_often_as_it_may_be_stays_until_that_is_long_ago() -> None:
    config = ControlConfig(request_rest_s=0, proposal_expiry_s=0.1, max_parks=2, parks_window_s=5.0)
    told = Told(config)
    told.has(entry("r"), request("a", blocks=200, remaining=1))
    told.demands[ROUTER] = asks(100)
    assert [p.request_id for p in told.for_s(2.0)] == ["a", "a"]
    assert told.for_s(2.9) == []
    assert len(told.for_s(1.0)) == 2


def test_a_replica_that_is_gone_is_neither_source_nor_target() -> None:
    told = Told()
    told.has(entry("full"), *runners(4), waits("w"))
    told.has(entry("idle"))
    told.for_s(CONFIG.stall_s * 0.9)
    told.control.replica_gone(ReplicaId("idle"), entry("idle").generation)
    del told.replicas[entry("idle")]
    assert told.for_s(1.0) == []
    told.control.replica_gone(ReplicaId("idle"), entry("idle").generation)  # twice is as good as once
    told.control.replica_gone(ReplicaId("full"), Generation(99, "g"))  # another incarnation has ended
    told.has(entry("idle2"))
    assert [p.request_id for p in told.for_s(1.0)] == ["w"]


def test_the_later_incarnation_of_a_replica_counts_and_begins_anew() -> None:
    told = Told()
    old, new = entry("full", generation=1), entry("full", generation=2)
    told.has(old, *runners(4), waits("w"))
    told.has(entry("idle"))
    told.for_s(CONFIG.stall_s * 0.9)
    told.replicas[new] = told.replicas.pop(old)
    assert told.for_s(CONFIG.stall_s * 0.9) == []  # by it, `w` has waited for less
    told.control.replica(old, report(old, load((), slots=4, blocks=200)), None, told.now_s)  # what was late on its way
    (proposal,) = told.for_s(1.0)
    assert proposal.source_generation == new.generation


def test_a_replica_that_serves_another_model_now_is_no_place_for_the_first() -> None:
    told = Told()
    told.has(entry("full"), *runners(4), waits("w"))
    told.has(entry("idle"))
    told.for_s(CONFIG.stall_s * 0.9)
    del told.replicas[entry("idle")]
    told.has(entry("idle", generation=2, model="other"))
    assert told.for_s(1.0) == []


def test_the_same_events_give_the_same_proposals_in_whatever_order_replicas_came() -> None:
    def run(seed: int | None) -> list[Proposal]:
        told = Told()
        rng = random.Random(7)
        for number in range(20):
            name = f"r{number:02}"
            runs = runners(
                rng.randint(2, 4), name=f"{name}-", blocks=rng.randint(31, 40), remaining=rng.randint(1, 150)
            )
            kept = [paused(f"{name}-p", blocks=9)] if len(runs) == 4 and rng.random() < 0.5 else []
            told.has(entry(name, host=f"h{number % 3}"), *runs, *kept)
        order = list if seed is None else _shuffle(seed)
        evened = told.for_s(1.0, order)
        for router in range(3):
            told.demands[RouterId(f"router{router}")] = asks(150 + router, name=f"d{router}", priority=router + 1)
        made_room = told.for_s(1.0, order)
        assert len(evened) > 3
        assert len(made_room) >= 3
        return evened + made_room

    first = run(None)
    assert all(run(seed) == first for seed in range(3))


def _shuffle(seed: int) -> Callable[[Iterable[RosterEntry]], list[RosterEntry]]:
    rng = random.Random(seed)

    def shuffled(entries: Iterable[RosterEntry]) -> list[RosterEntry]:
        other = list(entries)
        rng.shuffle(other)
        return other

    return shuffled


def test_a_successor_proposes_what_its_predecessor_would_have_once_all_have_reported() -> None:
    told = Told()
    told.has(entry("full"), *runners(4), waits("w"))
    told.has(entry("idle"))
    told.for_s(CONFIG.stall_s * 0.9)
    told.control = Control(CONFIG)
    (proposal,) = told.for_s(1.0)
    assert (proposal.request_id, proposal.source) == ("w", "full")


def test_nothing_is_kept_of_what_is_gone() -> None:
    config = ControlConfig(request_rest_s=0.5, parks_window_s=0.5, proposal_expiry_s=0.5)
    told = Told(config)
    told.has(entry("r"), request("a", blocks=200, remaining=1))
    told.demands[ROUTER] = asks(100)
    assert told.for_s(0.5)
    (model,) = told.control._models.values()
    del told.demands[ROUTER]
    told.for_s(2.0)
    assert [len(kept) for kept in (model.demands, model._lately, model._left, model._parked, model._parks)] == [0] * 5
    told.control.unplaced(ROUTER, asks(1, model="unheard of"), told.now_s)
    told.control.replica_gone(ReplicaId("r"), entry("r").generation)
    assert (told.control._models, told.control._model_of) == ({}, {})
