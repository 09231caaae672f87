"""The gates that the controller hands out make one queue of many: what is decided from what routers told."""

from __future__ import annotations

import heapq
import math
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.control.gates import BLOCKED_S, EXPIRES_S, GATHER_S, HELD_S, LET_OUT_MIN, decide, levels
from cluster.control.routers import PENDING_MAX, Routers
from cluster.messages import BandDemand, BandLevel, Gate, RouterDemand, TenantService, Waiter
from cluster.types import RouterId

A, B, C = RouterId("a"), RouterId("b"), RouterId("c")


def waiter(arrived: float, tenant: str = "t", counter: float = 0.0, charge: float = 0.0, rank: float = 0.0) -> Waiter:
    return Waiter(tenant, counter, rank, arrived, charge)


def demand(
    priority: int = 0,
    *heads: Waiter,
    sent: int = 0,
    waiting: int | None = None,
    first_for_s: float = 0.0,
    blocked: bool = False,
    held_s: float = 0.0,
    sent_per_s: float = 0.0,
    open_service: float = math.inf,
    number: int = 1,
    service: tuple[TenantService, ...] = (),
    model: str = "m",
) -> RouterDemand:
    count = len(heads) if waiting is None else waiting
    return RouterDemand(
        model=model,
        number=number,
        bands=(BandDemand(priority, count, sent, min((h.counter for h in heads), default=0.0)),),
        heads=heads,
        first_for_s=first_for_s,
        blocked=blocked,
        held_s=held_s,
        sent_per_s=sent_per_s,
        sent_service=0.0,
        open_service=open_service,
        service=service,
    )


def line(*arrived: float) -> tuple[Waiter, ...]:
    return tuple(waiter(at) for at in arrived)


# --- the front ---


def test_nothing_waits_and_nothing_is_held_back() -> None:
    decision = decide({A: demand(), B: demand()}, 0)
    assert [decision.gate(r) for r in (A, B, C)] == [None, None, None]


def test_below_the_most_urgent_band_that_waits_anywhere_all_others_are_shut() -> None:
    decision = decide({A: demand(10, *line(9.0)), B: demand(0, *line(1.0), sent=7)}, 0)
    assert decision.gate(A) is None, "all of the front is its own: its own order is the whole order"
    assert decision.gate(B) == Gate(10, 0)
    assert decision.gate(C) == Gate(10, 0), "one that has nothing yet too"


def test_within_the_front_the_first_of_all_are_let_out_each_by_its_router() -> None:
    """Arrivals a: 1 4 5 6 7, b: 2 3 8; four are let out: 1 2 3 4."""
    decision = decide({A: demand(0, *line(1, 4, 5, 6, 7), sent=10), B: demand(0, *line(2, 3, 8), sent=20)}, 0)
    assert LET_OUT_MIN == 4
    assert decision.gate(A) == Gate(0, 12)
    assert decision.gate(B) == Gate(0, 22)
    assert decision.gate(C) == Gate(0, 0)


def test_tenants_take_turns_by_what_all_routers_charged_them() -> None:
    """t has had 100 less than u and is charged 60 a request: two of t go before the first of u, wherever they wait."""
    of_t = [waiter(at, "t", 0.0, 60.0) for at in (5.0, 7.0)]
    of_u = [waiter(at, "u", 100.0, 60.0) for at in (1.0, 2.0)]
    decision = decide({A: demand(0, *of_u), B: demand(0, *of_t, waiter(9.0, "t", 0.0, 60.0))}, 0)
    assert decision.gate(A) == Gate(0, 1), "the fourth, after t t u comes t at 120 before u at 160"
    assert decision.gate(B) == Gate(0, 3)


def test_what_goes_on_after_a_loss_goes_before_the_new_work_of_every_router() -> None:
    decision = decide({A: demand(0, *line(1, 2, 3, 4)), B: demand(0, waiter(9.0, "u", -math.inf), waiter(8.0, "u"))}, 0)
    assert decision.gate(B) == Gate(0, 1)
    assert decision.gate(A) == Gate(0, 3)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), routers=st.integers(2, 5), slots=st.integers(0, 40), per_s=st.floats(0, 400))
def test_those_let_out_are_the_first_that_one_router_would_send_out(
    seed: int, routers: int, slots: int, per_s: float
) -> None:
    """The reference is a single virtual token counter queue over all of them."""
    rng = random.Random(seed)
    counters = {f"t{k}": float(rng.randrange(0, 500)) for k in range(rng.randint(1, 5))}
    of_router: dict[RouterId, list[Waiter]] = {RouterId(f"r{k}"): [] for k in range(routers)}
    for number in range(rng.randint(routers, 60)):
        tenant = rng.choice(list(counters))
        owner = rng.choice(list(of_router)) if number >= routers else list(of_router)[number]
        of_router[owner].append(waiter(float(number), tenant, counters[tenant], float(rng.randint(1, 100))))
    demands = {r: demand(0, *ws, sent_per_s=per_s) for r, ws in of_router.items()}
    let_out = max(4, slots, math.ceil(routers * per_s * 0.125))

    lines: dict[str, list[tuple[float, RouterId, float]]] = {}
    for r, ws in of_router.items():
        for w in ws:
            heapq.heappush(lines.setdefault(w.tenant, []), (w.arrived_unix_s, r, w.charge))
    expected = dict.fromkeys(of_router, 0)
    for _ in range(min(let_out, sum(map(len, of_router.values())))):
        tenant = min((t for t in lines if lines[t]), key=lambda t: (counters[t], lines[t][0][0]))
        _, r, charge = heapq.heappop(lines[tenant])
        counters[tenant] += charge
        expected[r] += 1

    decision = decide(demands, slots)
    assert {r: gate.sent_max for r in of_router if (gate := decision.gate(r)) is not None} == expected


def test_a_router_with_more_than_it_has_told_may_send_what_is_left() -> None:
    decision = decide({A: demand(0, *line(1), waiting=500), B: demand(0, *line(2))}, free_slots=64)
    assert decision.gate(A) == Gate(0, 1 + 62)
    assert decision.gate(B) == Gate(0, 1)


# --- no slot stays empty for the order's sake, and no large request starves for it ---


def test_a_first_that_waits_for_room_to_gather_is_let_out_alone() -> None:
    small = demand(0, *line(2, 3), held_s=9.0)
    for first_for_s, gates in ((BLOCKED_S, (2, 2)), (BLOCKED_S + 0.1, (1, 0))):
        large = demand(0, *line(1, 4), blocked=True, first_for_s=first_for_s)
        decision = decide({A: large, B: small}, free_slots=3)
        assert (decision.gate(A), decision.gate(B)) == (Gate(0, gates[0]), Gate(0, gates[1]))


def test_a_router_that_alone_reaches_the_room_there_is_may_use_it() -> None:
    waits = demand(10, *line(1, 2, 3, 4, 5))
    for held_s, gate in ((HELD_S, Gate(10, 0)), (HELD_S + 0.1, Gate(0, 6))):
        decision = decide({A: waits, B: demand(0, *line(9.0), sent=5, held_s=held_s)}, free_slots=1)
        assert decision.gate(B) == gate


# --- what is told of the others ---


def test_levels_are_the_least_of_the_others_that_wait_or_else_the_greatest_of_their_last() -> None:
    latest = {
        A: demand(0, waiter(1.0, counter=5.0)),
        B: demand(0, waiter(1.0, counter=70.0)),
        C: msgspec.structs.replace(demand(0), bands=(BandDemand(0, 0, 0, 90.0),)),
    }
    assert levels(latest, {A, B, C}, C) == (BandLevel(0, 5.0, 2),)
    assert levels(latest, {A, B, C}, A) == (BandLevel(0, 70.0, 1),)
    assert levels(latest, {A, C}, A) == (BandLevel(0, 90.0, 0),), "b was heard too long ago to say what waits"


def hand_out(routers: Routers, now_s: float) -> dict[tuple[RouterId, str], Gate | None]:
    return {(r, gates.model): gates.gate for r, gates in routers.hand_out(now_s, lambda _: 0, lambda _: True)}


def both() -> Routers:
    routers = Routers()
    routers.joined(A)
    routers.joined(B)
    return routers


def test_a_lone_router_is_never_gated() -> None:
    routers = Routers()
    routers.joined(A)
    routers.heard(A, demand(0, *line(1.0)), 0.0)
    assert set(hand_out(routers, 0.0).values()) <= {None}


def test_a_demand_counts_for_half_a_second_and_then_all_is_open() -> None:
    routers = both()
    routers.heard(A, demand(10, *line(1.0)), 0.0)
    assert hand_out(routers, 0.1)[B, "m"] == Gate(10, 0)
    assert hand_out(routers, EXPIRES_S)[B, "m"] == Gate(10, 0)
    assert hand_out(routers, EXPIRES_S + 0.01)[B, "m"] is None
    assert hand_out(routers, EXPIRES_S + 0.06) == {}, "said once"
    assert routers.settled


def test_what_a_router_held_back_is_open_once_it_is_gone() -> None:
    routers = both()
    routers.joined(C)
    routers.heard(A, demand(10, *line(1.0)), 0.0)
    assert hand_out(routers, 0.0)[B, "m"] == Gate(10, 0)
    routers.left(A)
    assert hand_out(routers, 0.05)[B, "m"] is None


def test_models_do_not_hold_each_other_back() -> None:
    routers = both()
    routers.heard(A, demand(10, *line(1.0), model="one"), 0.0)
    routers.heard(B, demand(0, *line(1.0), model="two"), 0.0)
    gates = hand_out(routers, 0.0)
    assert gates[B, "one"] == Gate(10, 0)
    assert gates[B, "two"] is None


def test_service_is_passed_on_to_every_other_router_once_and_the_latest_total_counts() -> None:
    routers = both()
    for number, total in ((1, 5.0), (2, 9.0)):
        routers.heard(A, demand(number=number, service=(TenantService(0, "t", 1, total),)), 0.0)
    told = {r: gates.others for r, gates in routers.hand_out(0.0, lambda _: 0, lambda _: True)}
    (other,) = told[B]
    assert (other.router_id, other.number, other.service) == (A, 1, (TenantService(0, "t", 1, 9.0),))
    assert told.get(A, ()) == ()
    assert routers.hand_out(0.05, lambda _: 0, lambda _: True) == []


def test_what_is_kept_for_a_router_that_does_not_read_is_bounded_and_comes_later() -> None:
    routers = both()
    for number in range(3 * PENDING_MAX // 256):
        service = tuple(TenantService(0, f"t{number}.{k}", 1, 1.0) for k in range(256))
        routers.heard(A, demand(number=number, service=service), 0.0)
    assert {r for r, _ in routers.hand_out(0.0, lambda _: 0, lambda r: r != B)} == {A}
    assert not routers.settled
    ((_, gates),) = [(r, g) for r, g in routers.hand_out(0.0, lambda _: 0, lambda _: True) if r == B]
    assert 0 < len(gates.others[0].service) <= PENDING_MAX


@pytest.mark.parametrize("count", [1, 2, 8])
def test_a_demand_that_has_nobody_waiting_behind_its_figures_breaks_nothing(count: int) -> None:
    odd = demand(0, waiting=count)
    assert decide({A: odd, B: odd}, 0).gate(A) is None


# --- routers whose clocks or words are wrong ---


@pytest.mark.parametrize("ahead_s", [-300.0, 0.0, 300.0])
@pytest.mark.parametrize("ranked", [False, True])
def test_clocks_of_routers_that_differ_by_minutes_change_nobody_s_turn(ahead_s: float, ranked: bool) -> None:
    """Five requests of one tenant have come to A and B by turns; B's clock is ahead, or behind."""
    routers = Routers()
    for router_id, clock_s, waited_s in ((A, 1e9, (9.0, 7.0, 5.0)), (B, 1e9 + ahead_s, (8.0, 6.0))):
        routers.joined(router_id)
        at = [clock_s - s for s in waited_s]
        heads = (waiter(arrived, rank=arrived if ranked else 0.0) for arrived in at)
        told = msgspec.structs.replace(demand(0, *heads, first_for_s=1.0, blocked=True), observed_unix_s=clock_s)
        routers.heard(router_id, told, now_s=50.0)
    gates = {r: g.gate for r, g in routers.hand_out(50.0, lambda _: 0, lambda _: True)}
    assert gates == {A: Gate(0, 1), B: Gate(0, 0)}, "the oldest of all is the first"


def test_a_first_that_gathers_no_room_in_the_stated_time_holds_nobody_up_any_longer() -> None:
    small = demand(0, *line(2, 3), held_s=9.0)
    for first_for_s, gate in ((GATHER_S, 0), (GATHER_S + 0.1, 2)):
        large = demand(0, *line(1, 4), blocked=True, first_for_s=first_for_s)
        assert decide({A: large, B: small}, free_slots=3).gate(B) == Gate(0, gate)
