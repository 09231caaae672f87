"""How many replicas there are follows what is asked: up at once, down late and never to and fro; and which one goes."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from cluster.config import ScaleConfig
from cluster.control.demand import Meter, ModelLoad, ReplicaLoad
from cluster.control.scale import (
    Deployed,
    Retire,
    ScaleState,
    SetTarget,
    Step,
    TakeWorkAgain,
    TellToLeave,
    decide,
    first_to_go,
    next_step,
)
from cluster.messages import RosterEntry
from cluster.types import Generation, ReplicaId, ReplicaState
from tests.unit.scale_model import ScaledModel, engine_load, report

READY, DRAINING = ReplicaState.READY, ReplicaState.DRAINING
CONFIG = ScaleConfig(min=1, max=10)
"""0.8 and 0.7 of what they do, 30 s for what waits, 3 s up, 900 s down."""


def loaded(
    name: str,
    *,
    requests: int = 0,
    blocks: int | None = None,
    machine: str = "h",
    zone: str = "",
    number: int = 1,
    state: ReplicaState = READY,
    retiring: bool = False,
) -> ReplicaLoad:
    blocks = 10 * requests if blocks is None else blocks
    return ReplicaLoad(ReplicaId(name), Generation(number, "u"), machine, zone, state, retiring, requests, 8, blocks)


def asked(
    per_s: float | None = None,
    *replicas: ReplicaLoad,
    full_per_s: float | None = 100.0,
    occupied: float | None = 0.0,
    queued: int = 0,
    queued_service: float = 0.0,
    attained: float | None = None,
    idle_s: float = 0.0,
    routers: int = 1,
) -> ModelLoad:
    by_id = tuple(sorted(replicas, key=lambda r: r.replica_id))
    return ModelLoad(by_id, routers, per_s, full_per_s, occupied, queued, queued_service, attained, idle_s)


def fleet(count: int) -> tuple[ReplicaLoad, ...]:
    return tuple(loaded(f"r{number}") for number in range(count))


def after(
    load: ModelLoad, for_s: float, state: ScaleState, config: ScaleConfig = CONFIG, from_s: float = 0.0
) -> ScaleState:
    """What comes of the same load seen every second for so long."""
    for second in range(1, round(for_s) + 1):
        state = decide(load, config, from_s + second, state).state
    return state


# --- up ---


@pytest.mark.parametrize(("per_s", "wanted"), [(160, 2), (161, 3), (240, 3), (241, 4), (5000, 10)])
def test_there_are_as_many_as_keep_demand_at_the_utilisation_and_at_most_max(per_s: float, wanted: int) -> None:
    """Of 100 each at 0.8: ceil(demand / 80)."""
    assert after(asked(per_s, *fleet(2)), 10, ScaleState(2, 0.0)).wanted == wanted


def test_what_waits_counts_as_demand_that_drains_it_in_time() -> None:
    """150 + 3,000 / 30 s = 250 per second: four of 80."""
    load = asked(150, *fleet(2), queued=20, queued_service=3000)
    assert after(load, 10, ScaleState(2, 0.0)).wanted == 4


def test_what_waits_does_not_count_again_while_replicas_start_for_it() -> None:
    load = asked(150, *fleet(2), queued=20, queued_service=3000)
    assert after(load, 600, ScaleState(4, 0.0)).wanted == 4
    assert after(load, 600, ScaleState(2, 0.0)).wanted == 4, "as many as were needed when they were added"


def test_demand_must_last() -> None:
    state = ScaleState(2, 0.0)
    for second in range(61):
        state = decide(asked(1000 if second % 3 else 100, *fleet(2)), CONFIG, second, state).state
    assert state.wanted == 2
    first = decide(asked(1000, *fleet(2)), CONFIG, 100.0, state).state
    assert decide(asked(1000, *fleet(2)), CONFIG, 102.9, first).state.wanted == 2
    assert decide(asked(1000, *fleet(2)), CONFIG, 103.0, first).state.wanted == 10


def test_before_any_was_full_one_at_a_time_is_added_where_requests_wait() -> None:
    waits = asked(500, *fleet(2), full_per_s=None, occupied=2.0, queued=3, queued_service=300)
    assert after(waits, 600, ScaleState(2, 0.0)).wanted == 3, "the third starts: it is to be seen what it changes"
    assert after(asked(500, *fleet(2), full_per_s=None, occupied=2.0), 600, ScaleState(2, 0.0)).wanted == 2


def test_one_is_added_where_too_few_first_tokens_come_in_time() -> None:
    late = asked(110, *fleet(2), attained=0.94)
    assert after(late, 600, ScaleState(2, 0.0)).wanted == 3, "and no further one before it is there"
    assert after(asked(110, *fleet(2), attained=0.95), 600, ScaleState(2, 0.0)).wanted == 2
    assert after(asked(110, *fleet(2)), 600, ScaleState(2, 0.0)).wanted == 2
    unknown = asked(110, *fleet(2), full_per_s=None, occupied=0.8, attained=0.5)
    assert after(unknown, 600, ScaleState(2, 0.0)).wanted == 3


def test_late_first_tokens_of_replicas_that_do_little_add_none() -> None:
    """Two of 100, at half of 0.7: 70."""
    assert after(asked(69, *fleet(2), attained=0.1), 600, ScaleState(2, 0.0)).wanted == 2
    assert after(asked(71, *fleet(2), attained=0.1), 600, ScaleState(2, 0.0)).wanted == 3
    unknown = asked(71, *fleet(2), full_per_s=None, occupied=0.69, attained=0.1)
    assert after(unknown, 600, ScaleState(2, 0.0)).wanted == 2


def test_none_goes_while_first_tokens_are_late() -> None:
    """130 is less than two do at 0.7, and three are in use by 0.43."""
    assert after(asked(130, *fleet(3)), 950, ScaleState(3, 0.0)).wanted == 2
    late = asked(130, *fleet(3), attained=0.9)
    assert after(late, 5000, ScaleState(3, 0.0), ScaleConfig(min=1, max=3)).wanted == 3


# --- down ---


def test_one_goes_only_once_the_highest_demand_in_the_time_fits_into_fewer() -> None:
    """Two of 100 at 0.7 do 140."""
    state = after(asked(200, *fleet(3)), 100, ScaleState(3, 0.0))
    quiet = asked(139, *fleet(3))
    assert after(quiet, 890, state, from_s=100).wanted == 3
    assert after(quiet, 930, state, from_s=100).wanted == 2
    assert after(asked(141, *fleet(3)), 5000, state, from_s=100).wanted == 3


def test_what_starts_is_not_taken_away_while_requests_wait() -> None:
    waits = asked(10, *fleet(1), queued=1, queued_service=100)
    assert after(waits, 5000, ScaleState(3, 0.0)).wanted == 3
    assert after(asked(10, *fleet(1)), 5000, ScaleState(3, 0.0)).wanted == 1


def test_none_goes_within_the_time_after_one_was_added() -> None:
    state = after(asked(300, *fleet(2)), 10, ScaleState(2, -5000.0))
    assert state.wanted == 4
    spike = replace(state, peaks=())
    assert after(asked(10, *fleet(4)), 880, spike, from_s=10).wanted == 4


def test_before_any_was_full_one_at_a_time_goes_while_what_runs_fills_little_of_the_others() -> None:
    """2.0 replicas' slots at 0.7: three."""
    light = asked(30, *fleet(5), full_per_s=None, occupied=2.0)
    for at_s, wanted in ((890, 5), (910, 4), (1790, 4), (1820, 3), (5000, 3)):
        state = after(light, at_s, ScaleState(5, 0.0))
        assert state.wanted == wanted, at_s


def test_nothing_goes_while_nothing_is_known() -> None:
    assert after(asked(None, *fleet(3), full_per_s=None), 5000, ScaleState(3, 0.0)).wanted == 3
    assert after(asked(0.0, *fleet(3), routers=0), 5000, ScaleState(3, 0.0)).wanted == 3
    assert after(asked(1e6, *fleet(3), routers=0), 5000, ScaleState(3, 0.0)).wanted == 3


def test_without_demand_there_is_the_least_and_one_at_least_where_it_is_not_idle() -> None:
    assert after(asked(0.0, *fleet(3)), 950, ScaleState(3, 0.0), ScaleConfig(min=2, max=5)).wanted == 2
    assert after(asked(0.0, *fleet(3)), 950, ScaleState(3, 0.0), ScaleConfig(min=0, max=5)).wanted == 1


# --- to none and back ---


def test_all_go_when_there_was_no_work_for_the_time_and_min_is_zero() -> None:
    config = ScaleConfig(min=0, max=5, idle_after_s=60)
    assert decide(asked(50, *fleet(3), idle_s=59), config, 100.0, ScaleState(3, 0.0)).state.wanted == 3
    assert decide(asked(50, *fleet(3), idle_s=60), config, 100.0, ScaleState(3, 0.0)).state.wanted == 0
    assert after(asked(0.0, *fleet(3), idle_s=1e6), 100, ScaleState(3, 0.0)).wanted == 3, "min 1"


def test_one_that_starts_or_has_just_been_started_is_not_idle() -> None:
    """It starts for 300 s, and is idle 60 s after that."""
    config = ScaleConfig(min=0, max=5, idle_after_s=60)
    starting, there = asked(0.0, idle_s=1e6), asked(0.0, *fleet(1), idle_s=1e6)
    state = after(starting, 300, ScaleState(1, 0.0), config)
    assert state.wanted == 1
    state = after(there, 59, state, config, from_s=300)
    assert state.wanted == 1
    assert after(there, 1, state, config, from_s=359).wanted == 0


def test_with_none_the_first_request_starts_one_at_once() -> None:
    config = ScaleConfig(min=0, max=5)
    nothing = asked(0.0, full_per_s=100.0)
    assert after(nothing, 5000, ScaleState(0, 0.0), config).wanted == 0
    one = asked(0.0, queued=1, queued_service=200)
    assert decide(one, config, 1.0, ScaleState(0, 0.0)).state.wanted == 1
    unknown = asked(None, full_per_s=None, queued=1, queued_service=200)
    assert decide(unknown, config, 1.0, ScaleState(0, 0.0)).state.wanted == 1


def test_with_none_a_crowd_starts_as_many_as_it_needs() -> None:
    """12,000 within 30 s: 400 per second, five of 80."""
    crowd = asked(0.0, queued=60, queued_service=12_000)
    assert decide(crowd, ScaleConfig(min=0, max=8), 1.0, ScaleState(0, 0.0)).state.wanted == 5


@given(wanted=st.integers(0, 20), low=st.integers(0, 5), more=st.integers(1, 5))
def test_the_bounds_hold_whatever_was_before(wanted: int, low: int, more: int) -> None:
    config = ScaleConfig(min=low, max=low + more)
    state = decide(asked(0.0, *fleet(wanted)), config, 1.0, ScaleState(wanted, 0.0)).state
    assert low <= state.wanted <= low + more


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"min": 3, "max": 2}, "min (3) must not exceed max (2)"),
        ({"max": 2, "utilisation": 0.5}, "spare_utilisation (0.7) must be below utilisation (0.5)"),
        ({}, "max"),
    ],
)
def test_what_cannot_be_is_said(fields: dict[str, float], said: str) -> None:
    with pytest.raises(ValidationError) as error:
        ScaleConfig.model_validate(fields)
    assert said in str(error.value)


@pytest.mark.parametrize("told", [True, False])
def test_a_successor_that_is_told_what_a_full_replica_does_takes_none_away_that_is_needed(told: bool) -> None:
    """Replicas here do as much with a few as with a full batch, so that slots say little: half as many seem enough."""
    model = ScaledModel(
        ScaleConfig(min=1, max=6, down_after_s=300), 3, replicas=1, full_per_s=400, slots=64, fixed_part=0.1
    )
    model.run(1200.0, lambda _: 6.0)  # 900 tokens per second, and somewhat more at times: three do 840 at 0.7
    assert model.state.wanted == 4
    model.succeed(told=told)
    model.changes.clear()
    model.run(3000.0, lambda _: 6.0)
    assert (model.changes == []) is told


def test_a_change_says_why_and_by_which_numbers() -> None:
    verdict = decide(asked(0.0, queued=1, queued_service=200.04), ScaleConfig(min=0, max=5), 1.0, ScaleState(0, 0.0))
    assert verdict.why == "a request waits"
    assert verdict.numbers["from"] == 0
    assert verdict.numbers["to"] == 1
    assert verdict.numbers["queued_service"] == 200.04
    assert "of_one_per_s" in verdict.numbers
    unmeasured = decide(asked(None, full_per_s=None, queued=1), ScaleConfig(min=0, max=5), 1.0, ScaleState(0, 0.0))
    assert not {"demand_per_s", "of_one_per_s", "attained"} & unmeasured.numbers.keys(), "missing is not nothing"


@pytest.mark.parametrize(
    ("load", "state", "config", "why"),
    [
        (asked(500, *fleet(2), routers=0), ScaleState(2, 0.0), CONFIG, "no router is connected"),
        (asked(500, *fleet(2)), ScaleState(2, 0.0), CONFIG, "has not been for long"),
        (asked(500, *fleet(2)), ScaleState(2, 0.0), ScaleConfig(min=1, max=2), "there may be no more"),
        (asked(10, *fleet(1)), ScaleState(1, 0.0), CONFIG, "as few as there may be"),
        (asked(None, *fleet(3)), ScaleState(3, -5000.0), CONFIG, "not measured yet"),
        (asked(10, *fleet(3)), ScaleState(3, 0.0), CONFIG, "so soon after"),
        (asked(250, *fleet(4)), ScaleState(4, -5000.0), CONFIG, "as many are needed"),
        (asked(0.0), ScaleState(0, 0.0), ScaleConfig(min=0, max=5), "nothing waits"),
    ],
)
def test_where_nothing_changes_it_says_what_holds_it_back(
    load: ModelLoad, state: ScaleState, config: ScaleConfig, why: str
) -> None:
    verdict = decide(load, config, 1.0, state)
    assert verdict.state.wanted == state.wanted
    assert why in verdict.why
    assert verdict.numbers.get("demand_per_s") == load.demand_per_s


# --- under load, in virtual time ---


def close_turns(model: ScaledModel) -> list[tuple[float, float]]:
    """Pairs of turns within 15 minutes."""
    turns = model.turns()
    return [(a, b) for a, b in itertools.pairwise(turns) if b - a <= 900]


@settings(max_examples=5, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    replicas_asked=st.floats(0.1, 2.5),
    error=st.sampled_from([0.3, 1.0, 3.0]),
)
def test_a_steady_load_with_noise_turns_the_direction_at_most_once_in_15_minutes(
    seed: int, replicas_asked: float, error: float
) -> None:
    """Poisson arrivals, log-normal lengths, which routers expect wrongly by `error`; an hour and a half."""
    model = ScaledModel(ScaleConfig(min=1, max=8), seed, expected_tokens=error * 150)
    per_s = replicas_asked * model.full_per_s / model.mean_tokens
    model.run(5400, lambda _: per_s)
    assert close_turns(model) == []
    assert len(model.turns()) <= 2, "and settles"
    assert len(model.queue) < 50, "with as many as do the work"
    assert model.state.wanted <= math.ceil(2 * replicas_asked) + 1, "and not many more: noise keeps one or two"


def test_five_times_the_load_has_as_many_as_it_needs_within_their_start_and_fewer_after_it() -> None:
    """From 0.5 to 2.5 replicas' work at 1,800 s, back at 5,400 s. Replicas take 30 s to start."""
    model = ScaledModel(ScaleConfig(min=1, max=8), seed=1)
    model.run(1800, lambda _: 0.5 * 400 / 150)
    assert model.state.wanted <= 2
    model.run(1900, lambda _: 2.5 * 400 / 150)
    assert model.changes[-1][0] <= 1900
    assert model.state.wanted >= 4, "2.5 / 0.8"
    first = next(at for at, by in model.changes if by > 0 and at > 1800)
    assert first <= 1815
    model.run(5400, lambda _: 2.5 * 400 / 150)
    assert model.queue == model.queue.__class__()
    model.run(7500, lambda _: 0.5 * 400 / 150)
    assert model.state.wanted <= 2
    assert close_turns(model) == []


def test_a_model_without_traffic_sleeps_and_wakes_for_the_first_request() -> None:
    model = ScaledModel(ScaleConfig(min=0, max=4, idle_after_s=600), seed=3)
    model.run(300, lambda _: 0.5)
    model.run(1200, lambda _: 0.0)
    assert model.state.wanted == 0
    model.run(1300, lambda now_s: 1.0 if now_s < 1203 else 0.0)
    assert model.state.wanted == 1
    assert not model.queue


# --- which one goes ---


def test_the_one_with_least_to_move_goes_and_of_equals_the_newest() -> None:
    assert first_to_go([loaded("a", requests=3), loaded("b", requests=1), loaded("c", requests=2)]).replica_id == "b"
    few_blocks = [loaded("a", requests=1, blocks=90), loaded("b", requests=4, blocks=80)]
    assert first_to_go(few_blocks).replica_id == "b", "what is moved are blocks"
    assert first_to_go([loaded("a", number=1), loaded("b", number=7), loaded("c", number=3)]).replica_id == "b"


def test_the_only_one_of_a_machine_or_zone_stays_where_another_has_several() -> None:
    machines = [loaded("a", machine="1"), loaded("b", machine="2", requests=9), loaded("c", machine="2", requests=5)]
    assert first_to_go(machines).replica_id == "c"
    zones = [
        loaded("a", machine="1", zone="x"),
        loaded("b", machine="2", zone="y", requests=9),
        loaded("c", machine="3", zone="y", requests=5),
    ]
    assert first_to_go(zones).replica_id == "c"
    assert first_to_go([loaded("a", machine="1", requests=1), loaded("b", machine="2")]).replica_id == "b"


def test_of_pods_one_of_the_node_that_has_several_goes_and_elsewhere_one_of_such_a_host() -> None:
    """As the meter of the model has them of what they report. Each pod is a host of its own."""
    for at in ([("p1", "n1"), ("p2", "n2"), ("p3", "n2")], [("h1", ""), ("h2", ""), ("h2", "")]):
        meter = Meter(1.0, 1.0, 0.0, 30.0)
        for place, (host, node) in enumerate(at):
            entry = RosterEntry(ReplicaId("abc"[place]), Generation(1, "u"), host, 1, "m", node=node)
            meter.replica(entry, report(entry, engine_load(0 if place == 0 else 3)), retiring=False, now_s=0.0)
        assert first_to_go(meter.load(0.0).replicas).replica_id == "b"


def step(
    wanted: int, *replicas: ReplicaLoad, target: int | None = None, starting: int = 0, top: int = 8
) -> Step | None:
    running = frozenset(r.replica_id for r in replicas)
    there = len(running) + starting
    return next_step(
        asked(0.0, *replicas), wanted, Deployed(there if target is None else target, running, starting), top
    )


def test_more_are_asked_of_serve_and_never_more_than_max() -> None:
    assert step(3, *fleet(1)) == SetTarget(3)
    assert step(9, *fleet(1)) == SetTarget(8)
    assert step(3, *fleet(1), starting=2) is None
    assert step(2, *fleet(8), target=8) == Retire(ReplicaId("r0"))


def test_one_that_retires_takes_work_again_before_another_is_started() -> None:
    retiring = loaded("x", requests=2, state=DRAINING, retiring=True)
    assert step(3, *fleet(2), retiring) == TakeWorkAgain(ReplicaId("x"))
    assert step(4, *fleet(2), retiring) == TakeWorkAgain(ReplicaId("x"))


def test_one_that_retires_leaves_when_it_is_empty_and_no_second_retires_meanwhile() -> None:
    busy = loaded("x", requests=1, state=DRAINING, retiring=True)
    assert step(1, *fleet(2), busy) is None
    assert step(1, *fleet(2), replace(busy, requests=0)) == TellToLeave(ReplicaId("x"))
    assert step(1, *fleet(2), replace(busy, requests=0, state=READY)) is None, "it has not heard of it yet"


def test_the_target_is_lowered_only_when_what_serve_stops_is_only_starting() -> None:
    left = asked(0.0, *fleet(2))
    unseen = Deployed(3, frozenset(map(ReplicaId, ("r0", "r1", "gone"))), 0)
    assert next_step(left, 2, unseen, 8) is None, "Serve has not seen that it left"
    assert next_step(left, 2, Deployed(3, frozenset(map(ReplicaId, ("r0", "r1"))), 1), 8) == SetTarget(2)
    assert step(1, *fleet(2), starting=3) == SetTarget(2)
    silent = Deployed(4, frozenset(map(ReplicaId, ("r0", "r1", "silent"))), 1)
    assert next_step(left, 2, silent, 8) is None, "it may be one that an operator drains"


def test_what_an_operator_drains_is_kept_and_counts_as_not_there() -> None:
    aside = loaded("x", state=DRAINING)
    assert step(2, *fleet(2), aside) is None
    assert step(3, *fleet(2), aside) == SetTarget(4)
    assert step(1, *fleet(2), aside) == Retire(ReplicaId("r0"))
    assert step(0, aside) is None


@pytest.mark.parametrize("retiring", [True, False])
def test_what_serve_is_stopping_anyway_is_nobodys(retiring: bool) -> None:
    stopping = loaded("x", state=DRAINING, retiring=retiring)
    serve = Deployed(2, frozenset(map(ReplicaId, ("r0", "r1"))), 0)
    assert next_step(asked(0.0, *fleet(2), stopping), 2, serve, 8) is None


@dataclass
class World:
    """Serve, which keeps a number of replicas and stops by its own rules, and the replicas, whose work ends in time."""

    rng: random.Random
    target: int
    running: dict[ReplicaId, ReplicaLoad] = field(default_factory=dict)
    starting: int = 0
    unseen: set[ReplicaId] = field(default_factory=set)
    """That have left, which Serve is still to see."""
    stopped_busy: int = 0
    made: int = 0

    def apply(self, todo: Step | None) -> None:
        match todo:
            case SetTarget(replicas):
                self.target = replicas
            case Retire(name):
                assert self.running[name].state is READY
                assert not any(r.retiring for r in self.running.values()), "one at a time"
                self.running[name] = replace(self.running[name], state=DRAINING, retiring=True)
            case TakeWorkAgain(name):
                assert self.running[name].retiring
                self.running[name] = replace(self.running[name], state=READY, retiring=False)
            case TellToLeave(name):
                gone = self.running.pop(name)
                assert gone.retiring
                assert not gone.requests
                self.unseen.add(name)

    def serve(self, act: Callable[[], bool]) -> None:
        """What Serve does by itself, each in its time. What starts is seen starting once."""
        starting = self.starting
        if self.unseen and act():
            self.unseen.pop()
        there = len(self.running) + len(self.unseen)
        while there + self.starting < self.target:
            self.starting += 1
        while there + self.starting > self.target and self.starting:
            self.starting -= 1
        while len(self.running) + len(self.unseen) > self.target:
            victim = self.running.pop(max(self.running, key=lambda r: self.running[r].generation.number))
            self.stopped_busy += victim.requests
        for _ in range(starting):
            if not act() or not self.starting:
                continue
            self.starting -= 1
            self.made += 1
            new = loaded(f"s{self.made}", number=self.made, machine=str(self.made % 3))
            self.running[new.replica_id] = new

    def work(self, act: Callable[[], bool]) -> None:
        for name, r in self.running.items():
            requests = r.requests + (1 if r.state is READY and act() else -1 if act() else 0)
            self.running[name] = replace(r, requests=max(0, requests))

    def view(self) -> tuple[ModelLoad, Deployed]:
        names = frozenset(self.running) | self.unseen
        return asked(0.0, *self.running.values()), Deployed(self.target, names, self.starting)


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 80))
def test_whatever_is_wanted_when_serve_stops_nothing_that_works_and_the_wanted_number_comes_about(
    seed: int, steps: int
) -> None:
    """Wanted numbers, and operators' drains and undos, at any time; each step is decided from what there is alone."""
    rng = random.Random(seed)
    world, wanted, top = World(rng, target=2), 2, 5
    by_operator: set[ReplicaId] = set()

    def chance() -> bool:
        return rng.random() < 0.5

    for _ in range(steps):
        if rng.random() < 0.3:
            wanted = rng.randrange(top + 1)
        if world.running and rng.random() < 0.1:
            name = rng.choice(sorted(world.running))
            drains = name not in by_operator
            (by_operator.add if drains else by_operator.discard)(name)
            world.running[name] = replace(world.running[name], state=DRAINING if drains else READY, retiring=False)
        world.serve(chance)
        world.work(chance)
        load, deployed = world.view()
        world.apply(next_step(load, wanted, deployed, top))
        assert by_operator <= set(world.running), "what an operator drains is not ended"
        assert world.target <= top
    for _ in range(60):
        world.serve(lambda: True)
        for name, r in world.running.items():
            world.running[name] = replace(r, requests=0)
        world.apply(next_step(world.view()[0], wanted, world.view()[1], top))
    assert world.stopped_busy == 0
    ready = sum(r.state is READY for r in world.running.values())
    assert ready == min(wanted, top - len(by_operator))
    assert len(world.running) == world.target == ready + len(by_operator)
