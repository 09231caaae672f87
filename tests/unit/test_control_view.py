"""What a replica tells becomes what the controller decides by, and nothing that it has not told is taken for known."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cluster.config import ControlConfig
from cluster.control import rebalance
from cluster.control.view import STEPS_WINDOW_S, Replica, frees, observe, takes
from cluster.messages import HeldRequest, Propose
from cluster.types import EngineLoad, Generation, PriorityLoad, RequestId
from tests.unit.control_kit import BLOCK, NOW_S, demand, entry, load, paused, replica, report, request, view, waits

R = entry("r")


def told(*held: HeldRequest, steps: int = 0, slots: int = 4, blocks: int = 100) -> EngineLoad:
    return load(held, slots=slots, blocks=blocks, steps=steps)


# --- how long a step takes ---


def test_a_step_takes_the_time_between_two_reports_by_the_steps_between_them() -> None:
    runs = (request("a"),)
    first = observe(None, R, report(R, told(*runs, steps=100)), runs, 10.0)
    assert first.steps.step_s is None
    early = observe(first, R, report(R, told(*runs, steps=105)), runs, 10.1)
    assert early.steps.step_s is None  # so few steps say little
    later = observe(early, R, report(R, told(*runs, steps=150)), runs, 11.0)
    assert later.steps.step_s == 1.0 / 50
    slower = observe(later, R, report(R, told(*runs, steps=155)), runs, 12.0)
    assert slower.steps.step_s == 1.0 / 5


def test_time_in_which_nothing_ran_is_no_step_and_makes_what_was_measured_unknown() -> None:
    runs = (request("a"),)
    busy = observe(None, R, report(R, told(*runs, steps=0)), runs, 0.0)
    busy = observe(busy, R, report(R, told(*runs, steps=100)), runs, 1.0)
    assert busy.steps.step_s == 0.01
    idle = observe(busy, R, report(R, told(steps=100)), None, 2.0)
    assert idle.steps.step_s is None
    again = observe(idle, R, report(R, told(*runs, steps=101)), runs, 30.0)
    assert again.steps.step_s is None
    assert observe(again, R, report(R, told(*runs, steps=201)), runs, 31.0).steps.step_s == 0.01


def test_a_replica_that_makes_no_step_while_something_runs_has_no_known_step() -> None:
    runs = (request("a"),)
    before = observe(None, R, report(R, told(*runs, steps=7)), runs, 0.0)
    assert observe(before, R, report(R, told(*runs, steps=7)), runs, 2 * STEPS_WINDOW_S).steps.step_s is None


# --- what waits ---


def test_what_waits_goes_back_most_urgent_first_and_of_equals_what_kept_its_blocks() -> None:
    held = (waits("a"), paused("b"), waits("c", priority=10), request("d"), paused("e", priority=-10))
    seen = replica("r", *held)
    assert [s.held.request_id for s in seen.stalled] == ["c", "b", "a", "e"]
    assert seen.waits_above == 10


def test_what_waits_keeps_the_time_at_which_it_was_first_seen_to_and_loses_it_once_it_runs() -> None:
    seen: Replica | None = None

    def at(now_s: float, *held: HeldRequest) -> list[tuple[str, float]]:
        nonlocal seen
        seen = observe(seen, R, report(R, told(*held)), held, now_s)
        return [(s.held.request_id, s.since_s) for s in seen.stalled]

    assert at(1.0, waits("a")) == [("a", 1.0)]
    assert at(2.0, waits("a"), paused("b")) == [("b", 2.0), ("a", 1.0)]
    assert at(3.0, request("a"), paused("b")) == [("b", 2.0)]
    assert at(4.0, waits("a"), paused("b")) == [("b", 2.0), ("a", 4.0)]


# --- room ---


def test_blocks_that_running_work_is_still_to_fill_are_not_left() -> None:
    # 4 blocks hold 64 tokens; 33 more fill 3 blocks. What is paused fills nothing.
    held = (request("a", blocks=4, remaining=33), paused("b", blocks=5, remaining=500))
    seen = replica("r", *held, blocks=100)
    assert seen.load.blocks_free == 91
    assert seen.blocks_left == 88
    assert seen.listed_frees == 4 + 3 + 5


def test_a_request_takes_all_its_blocks_and_frees_those_that_nobody_shares() -> None:
    engine = told()
    shares = request("a", blocks=1, tokens=4 * BLOCK, remaining=1)
    assert takes(shares, engine) == 5
    assert frees(shares, engine) == 1 + 1  # its own, and the one that it was to fill


@given(tokens=st.integers(0, 500), remaining=st.integers(1, 500), blocks=st.integers(0, 32))
def test_what_a_request_frees_is_never_more_than_it_takes_elsewhere(tokens: int, remaining: int, blocks: int) -> None:
    engine = told()
    own = min(blocks, -(-tokens // BLOCK))
    held = request("a", blocks=own, tokens=tokens, remaining=remaining)
    assert own <= frees(held, engine) <= takes(held, engine)


def test_what_a_replica_does_not_list_still_fills_it() -> None:
    seen = replica("r", slots=10, blocks=100, more=[PriorityLoad(0, 6, 30)])
    assert (seen.running, seen.requests, seen.blocks_left) == (6, 6, 70)
    assert seen.fullness == 0.6
    assert replica("r", slots=10, blocks=100, more=[PriorityLoad(0, 1, 80)]).fullness == 0.8


def test_what_waits_fills_a_replica_beyond_its_slots() -> None:
    held = [request(f"r{n}", blocks=1) for n in range(4)] + [waits(f"w{n}") for n in range(2)]
    assert replica("r", *held, slots=4).fullness == 1.5


# --- the rest ---


def test_a_demand_grows_older_between_two_tellings() -> None:
    assert demand(waits_s=0.25, at_s=5.0).waits_s(5.25) == 0.5


def test_a_proposal_is_told_with_all_that_it_says() -> None:
    full = replica("full", *(request(f"r{n}") for n in range(4)), paused("p"), slots=4)
    (underway,) = rebalance.decide(view(full, replica("idle")), ControlConfig(), NOW_S)
    proposal = underway.proposal
    said = proposal.message(Generation(7, "c"))
    assert isinstance(said, Propose)
    assert said.generation == Generation(7, "c")
    assert said.request_id == RequestId("p")
    for name in Propose.__struct_fields__:
        if name != "generation":
            assert getattr(said, name) == getattr(proposal, name)
