"""Several routers before one fleet keep one order, are fair as one, waste no slot, and go on alone without a controller.

Time is the kit's: one period of demands or gates is 50 ms, a step of a replica 25 ms.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.config import PriorityClass, RouterConfig
from cluster.control.gates import EXPIRES_S, HELD_S, LET_OUT_MIN
from cluster.messages import BandDemand, BandLevel, Gate, Gates, RouterDemand, RouterService, TenantService, Waiter
from cluster.types import RefusalReason, RouterId
from router.bands import FairShares
from router.gates import APART_S, GateKeeper
from router.queue import BandQueue
from tests.unit.fake_replica import Held
from tests.unit.fleet_kit import TICK_S, FleetBench

PERIOD_S = 0.05
PROMPT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0


def saturated(*, controlled: bool = True, routers: int = 2, replicas: int = 2, slots: int = 2) -> FleetBench:
    """Every slot runs standard work of the first router, more of which waits there; all know it."""
    fleet = FleetBench(routers=routers, controlled=controlled)
    for _ in range(replicas):
        fleet.replica(slots=slots)
    for _ in range(5 * replicas * slots):
        fleet.submit(0, tokens=20)
        fleet.advance(TICK_S)
    fleet.advance(0.2)
    fleet.sent.clear()
    return fleet


# --- one order ---


def test_an_urgent_request_of_one_router_is_sent_out_before_an_older_low_one_that_waits_on_another() -> None:
    orders = {}
    for controlled in (True, False):
        fleet = saturated(controlled=controlled)
        for _ in range(8):
            fleet.submit(1, "batch", age_s=60.0)
        fleet.advance(4.0)
        orders[controlled] = [request.priority_class for _, request in fleet.sent]
        assert len(fleet.waiting) == 0
    first_low = orders[True].index("batch")
    assert orders[True][:first_low].count("standard") == orders[True].count("standard") > 8
    assert orders[False].index("batch") < 4, "without a controller it goes as soon as it sees a slot"


def test_work_above_the_front_is_let_out_at_once_on_any_router() -> None:
    fleet = saturated()
    urgent = fleet.submit(1, "interactive")
    assert fleet.sent[-1] == (1, urgent)


@pytest.mark.parametrize("routers", [2, 3])
def test_within_a_band_nobody_is_passed_by_more_later_ones_than_are_let_out_at_once(routers: int) -> None:
    """Of one tenant, so that the order is by arrival. Who came a tenth of a second ago has been told of everywhere."""
    assert most_passed_by(saturated(routers=routers)) <= 2 * LET_OUT_MIN, "this window's and the last's"
    assert most_passed_by(saturated(routers=routers, controlled=False)) > 2 * LET_OUT_MIN


def most_passed_by(fleet: FleetBench) -> int:
    """Of all that waited, the most later ones that went before one of them."""
    rng = random.Random(5)
    passed: Counter[str] = Counter()

    def submit() -> None:
        if len(fleet.waiting) < 40:
            fleet.submit(rng.randrange(len(fleet.cores)) if rng.random() < 0.4 else 0, tokens=8)
        while fleet.sent:
            _, sent = fleet.sent.pop()
            told_unix_s = fleet.clock.unix() - 2 * PERIOD_S - 2 * TICK_S
            earlier = min(sent.arrived_unix_s, told_unix_s)
            passed.update(request.request_id for request in fleet.waiting if request.arrived_unix_s < earlier)

    fleet.advance(8.0, submit)
    return max(passed.values(), default=0)


def test_a_large_request_that_waits_for_room_is_not_starved_by_small_ones_of_other_routers() -> None:
    """It needs 20 of 24 blocks; the small ones on the other router take 1 of them each, and never stop coming."""
    fleet = FleetBench()
    fleet.replica(slots=8, blocks=24)

    def small() -> None:
        while len(fleet.cores[1]._dispatcher.queue) < 6:
            fleet.submit(1, tokens=8)

    fleet.advance(1.0, small)
    large = fleet.submit(0, prompt=300, tokens=8, age_s=9.0)
    fleet.advance(3.0, small)
    assert (0, large) in fleet.sent


def test_a_request_that_a_gate_holds_back_says_so_once_and_is_judged_as_one_that_waits() -> None:
    fleet = saturated()
    low = fleet.submit(1, "batch")
    fleet.advance(0.5)
    explanation = fleet.cores[1].explain(low.request_id, "t")
    assert explanation is not None
    assert [d.event for d in explanation.decisions] == ["queued", "held"]
    assert explanation.decisions[1].numbers == {"band": -10, "front": 0, "sent": 0, "sent_max": 0}
    labels = {"priority_class": "batch"}
    registry = fleet.registries[1]
    assert registry.get_sample_value("forebay_gate_held_total", labels) == 1
    assert registry.get_sample_value("forebay_gate_shut", labels) == 1
    fleet.advance(4.0)
    assert registry.get_sample_value("forebay_gate_shut", labels) == 0
    assert low.request_id not in {r.request_id for r in fleet.waiting}


# --- no slot is wasted ---


@pytest.mark.parametrize(("replicas", "slots", "tokens"), [(2, 4, 8), (4, 8, 8), (4, 4, 1), (2, 2, 40)])
def test_gated_routers_serve_as_much_as_one_router_does(replicas: int, slots: int, tokens: int) -> None:
    served = {}
    for routers in (1, 2):
        fleet = FleetBench(routers=routers)
        for _ in range(replicas):
            fleet.replica(slots=slots)

        def keep_waiting(fleet: FleetBench = fleet) -> None:
            for number, core in enumerate(fleet.cores):
                while len(core._dispatcher.queue) < 2 * replicas * slots // len(fleet.cores):
                    fleet.submit(number, tokens=tokens)

        fleet.advance(4.0, keep_waiting)
        served[routers] = sum(
            h.made for r in fleet.replicas for h in (*r.engine.done.values(), *r.engine.held.values())
        )
    assert served[2] >= 0.97 * served[1] > 500


def test_a_slot_is_not_left_empty_for_longer_than_a_period_or_two_while_work_waits() -> None:
    fleet = FleetBench()
    for _ in range(2):
        fleet.replica(slots=4)
    rng = random.Random(3)
    empty_since: dict[str, float] = {}
    longest_s = 0.0

    def observe() -> None:
        nonlocal longest_s
        while len(fleet.waiting) < 30:
            fleet.submit(rng.randrange(2), tokens=rng.randint(1, 40))
        for replica in fleet.replicas:
            name, now_s = str(replica.engine.replica_id), fleet.clock.monotonic()
            if len(replica.engine.held) < replica.engine.slots:
                longest_s = max(longest_s, now_s - empty_since.setdefault(name, now_s))
            else:
                empty_since.pop(name, None)

    fleet.advance(20.0, observe)
    assert longest_s <= 2 * PERIOD_S + 2 * TICK_S


def test_room_that_only_one_router_reaches_is_used_by_it_though_more_urgent_work_waits_on_another() -> None:
    """The other's link to that replica is cut: to hold back the work that could run there would help nobody."""
    fleet = saturated()
    fleet.replicas[1].cut(0)
    for _ in range(20):
        fleet.submit(1, "batch", tokens=8)
    fleet.advance(3.0)
    on_cut = [r for _, r in fleet.sent if r.request_id in fleet.replicas[1].owner and r.priority_class == "batch"]
    assert len(on_cut) >= 3


def test_a_router_that_reaches_no_replica_holds_nobody_back() -> None:
    fleet = saturated()
    for replica in fleet.replicas:
        replica.cut(0)
    low = [fleet.submit(1, "batch", tokens=4) for _ in range(4)]
    fleet.advance(1.5)
    assert len(fleet.cores[0]._dispatcher.queue) > 0
    assert {r.request_id for r in low} <= {r.request_id for _, r in fleet.sent}


# --- without a controller ---


def test_without_a_controller_all_is_open_within_half_a_second() -> None:
    fleet = saturated()
    low = fleet.submit(1, "batch")
    fleet.advance(0.1)
    fleet.controlled = False
    held_until_s = fleet.clock.monotonic() + EXPIRES_S + PERIOD_S + TICK_S
    while fleet.cores[1]._dispatcher.gates.gate(fleet.clock.monotonic()) is not None:
        fleet.advance(TICK_S)
    assert fleet.clock.monotonic() <= held_until_s
    fleet.advance(4.0)
    assert low.request_id in {r.request_id for _, r in fleet.sent}
    assert not fleet.waiting, "nothing is lost"


def test_a_controller_that_starts_anew_hands_out_gates_within_two_periods_and_no_counter_jumps() -> None:
    fleet = saturated()
    tenants = ("a", "b")
    rng = random.Random(1)

    def submit() -> None:
        while len(fleet.waiting) < 30:
            fleet.submit(rng.randrange(2), tokens=8, tenant=rng.choice(tenants))

    fleet.advance(3.0, submit)
    fleet.controlled = False
    fleet.advance(1.0, submit)
    before = {(r, t): fleet.counter(r, t) for r in range(2) for t in tenants}
    fleet.restart_controller()
    fleet.controlled = True
    fleet.gates = [None, None]
    fleet.advance(2 * PERIOD_S + 2 * TICK_S, submit)
    assert any(gates is not None and gates.gate is not None for gates in fleet.gates)
    fleet.advance(2 * PERIOD_S, submit)
    per_s = 4 * (OUTPUT_WEIGHT + 1.0) / 0.025
    for t in tenants:
        now = [fleet.counter(r, t) for r in range(2)]
        assert abs(now[0] - now[1]) <= 3 * PERIOD_S * per_s, "they count the same again"
        grown = max(now) - min(before[r, t] for r in range(2))
        assert 0 <= grown <= (1.0 + 5 * PERIOD_S) * per_s, "by what was served meanwhile and by no more"


# --- fair as one ---


class Served:
    """What each tenant got, from the engines' own books."""

    def __init__(self, fleet: FleetBench) -> None:
        self.engines = [replica.engine for replica in fleet.replicas]
        self.done: Counter[str] = Counter()
        self.counted = [0] * len(self.engines)

    def of(self, tenant: str) -> float:
        for k, engine in enumerate(self.engines):
            for held in islice(engine.done.values(), self.counted[k], None):
                self.done[held.request.tenant] += service_of(held)
            self.counted[k] = len(engine.done)
        open_ = [h for engine in self.engines for h in engine.held.values() if h.request.tenant == tenant]
        return self.done[tenant] + sum(map(service_of, open_))


def service_of(held: Held) -> int:
    return round(PROMPT_WEIGHT * len(held.request.prompt_ids) + OUTPUT_WEIGHT * held.made)


def keep_backlogged(fleet: FleetBench, rng: random.Random, mix: float, longest: tuple[int, int]) -> Iterator[None]:
    """a with large requests and b with small ones, both always with work waiting: a on the first router, b on the last,
    but for the part `mix` that comes to any."""
    prompt, output = longest
    at_home = {"a": 0, "b": len(fleet.cores) - 1}
    slots = sum(r.engine.slots for r in fleet.replicas)
    while True:
        waiting = [r.tenant for r in fleet.waiting]
        for tenant, part in (("a", 1), ("b", 4)):
            for _ in range(2 * slots - waiting.count(tenant)):
                router = rng.randrange(len(fleet.cores)) if rng.random() < mix else at_home[tenant]
                fleet.submit(router, tenant=tenant, prompt=max(1, prompt // part), tokens=max(1, output // part))
        if rng.random() < 0.02:
            fleet.submit(rng.randrange(len(fleet.cores)), tenant=f"other{rng.randrange(5)}", tokens=4)
        yield


def widest_gap(
    fleet: FleetBench, rng: random.Random, mix: float, longest: tuple[int, int], seconds: float, refused: float
) -> float:
    """The most by which what a and b got over any stretch of time has differed."""
    served, low, high = Served(fleet), 0.0, 0.0
    load = keep_backlogged(fleet, rng, mix, longest)

    def each_tick() -> None:
        nonlocal low, high
        for replica in fleet.replicas:
            replica.engine.refuse_with = RefusalReason.FULL if rng.random() < refused else None
        next(load)
        gap = served.of("a") - served.of("b")
        low, high = min(low, gap), max(high, gap)

    fleet.advance(seconds, each_tick)
    return high - low


def fleet_of(routers: int, slots: int, *, controlled: bool = True) -> FleetBench:
    fleet = FleetBench(routers=routers, controlled=controlled)
    for _ in range(2):
        fleet.replica(slots=slots)
    fleet.advance(0.2)
    return fleet


def bound(routers: int, slots: int, longest: tuple[int, int]) -> float:
    """Twice the larger weight times what the fleet holds, and what is served until all have heard of it."""
    tokens = slots * sum(longest)
    per_s = slots * (OUTPUT_WEIGHT + PROMPT_WEIGHT * longest[0]) / 0.025
    return 2 * max(PROMPT_WEIGHT, OUTPUT_WEIGHT) * tokens + routers * PERIOD_S * per_s


@settings(max_examples=8, deadline=None)
@given(
    routers=st.integers(2, 3),
    slots=st.integers(1, 4),
    prompt=st.integers(4, 60),
    output=st.integers(4, 24),
    mix=st.sampled_from([0.0, 0.3, 1.0]),
    refused=st.sampled_from([0.0, 0.05, 0.3]),
    seed=st.integers(0, 2**32),
)
def test_two_tenants_on_any_mix_of_routers_get_the_same_within_what_the_fleet_holds(
    routers: int, slots: int, prompt: int, output: int, mix: float, refused: float, seed: int
) -> None:
    fleet = fleet_of(routers, slots)
    gap = widest_gap(fleet, random.Random(seed), mix, (prompt, output), 3.0, refused)
    assert gap <= bound(routers, 2 * slots, (prompt, output))


def test_over_a_long_run_the_gap_stays_within_the_bound_while_routers_without_a_controller_leave_it() -> None:
    longest = (64, 16)
    gaps = {}
    for controlled in (True, False):
        fleet = fleet_of(2, 1, controlled=controlled)
        gaps[controlled] = widest_gap(fleet, random.Random(7), 0.0, longest, 15.0, 0.02)
    assert gaps[True] <= bound(2, 2, longest)
    assert gaps[False] > bound(2, 2, longest)


def test_a_router_that_joins_late_makes_its_tenants_neither_owe_nor_own_the_past() -> None:
    """a has been served for seconds before the second router starts, to which b, new, and a come: from then on both get
    the same, within the bound."""
    fleet = fleet_of(1, 2)
    rng = random.Random(2)
    served = Served(fleet)

    def only_a() -> None:
        while len(fleet.waiting) < 10:
            fleet.submit(0, tenant="a", prompt=16, tokens=8)

    fleet.advance(4.0, only_a)
    joined = fleet.add_router()
    before = served.of("a")
    assert before > 2000

    def both() -> None:
        waiting = [r.tenant for r in fleet.waiting]
        for tenant in ("a", "b"):
            for _ in range(10 - waiting.count(tenant)):
                fleet.submit(joined if tenant == "b" else rng.randrange(2), tenant=tenant, prompt=16, tokens=8)

    fleet.advance(6.0, both)
    assert abs(served.of("a") - before - served.of("b")) <= bound(2, 4, (16, 8))
    assert abs(fleet.counter(0, "a") - fleet.counter(1, "b")) <= bound(2, 4, (16, 8))


# --- the minimum share ---


@pytest.mark.parametrize("routers", [2, 3])
def test_a_minimum_share_is_what_the_routers_that_have_such_work_send_out_together_and_it_is_served(
    routers: int,
) -> None:
    """Urgent work floods the first router; batch work waits on the others alone."""
    share = 0.1
    classes = (
        PriorityClass(name="interactive", priority=10, longest_wait_s=600),
        PriorityClass(name="batch", priority=-10, longest_wait_s=600),
    )
    config = RouterConfig(
        classes=classes, default_class="batch", minimum_share=share, ageing_after_s=2.0, expected_output_tokens=8
    )
    fleet = FleetBench(routers=routers, config=config)
    for _ in range(2):
        fleet.replica(slots=2)

    def flood() -> None:
        while len(fleet.cores[0]._dispatcher.queue) < 30:
            fleet.submit(0, "interactive", tokens=8)

    fleet.advance(0.3, flood)
    for router in range(1, routers):
        for _ in range(60):
            fleet.submit(router, "batch", tokens=8)
    fleet.sent.clear()
    fleet.advance(20.0, flood)
    sent = [request.priority_class for _, request in fleet.sent]
    finished = [h.request.priority_class for r in fleet.replicas for h in r.engine.done.values()]
    assert share / 2 * len(sent) <= sent.count("batch") <= share * len(sent) + routers - 1
    assert finished.count("batch") >= 0.9 * sent.count("batch") - 4
    by_router = [sum(owner == k and r.priority_class == "batch" for owner, r in fleet.sent) for k in range(1, routers)]
    assert max(by_router) - min(by_router) <= 2, "they share it evenly"


# --- what is heard is counted once ---


def keeper() -> tuple[GateKeeper, FairShares]:
    tenants = FairShares(RouterConfig())
    return GateKeeper(BandQueue(tenants.band), tenants, lambda _: 0.0, 0.0), tenants


def heard(*service: TenantService, number: int = 1, sent: float = 0.0, levels: tuple[BandLevel, ...] = ()) -> Gates:
    return Gates("m", None, levels, (RouterService(RouterId("other"), number, sent, service),))


def test_a_total_that_is_told_again_or_out_of_a_loss_counts_once_and_whole() -> None:
    gates, tenants = keeper()
    gates.hear(heard(TenantService(0, "t", 1, 10.0)), 0.0)
    gates.hear(heard(TenantService(0, "t", 1, 10.0), number=2), 0.1)
    assert tenants.band(0).counters("t")[0] == 10.0
    gates.hear(heard(TenantService(0, "t", 1, 45.0), number=9), 0.2)
    assert tenants.band(0).counters("t")[0] == 45.0
    gates.hear(heard(TenantService(0, "t", 1, 30.0), number=10), 0.3)
    assert tenants.band(0).counters("t")[0] == 30.0, "a part was taken back"


def test_what_a_router_served_before_it_was_met_is_nobody_s_debt() -> None:
    gates, tenants = keeper()
    gates.hear(heard(TenantService(0, "t", 3, 1e6), number=500), 0.0)
    assert tenants.band(0).counters("t")[0] == 0.0
    gates.hear(heard(TenantService(0, "t", 3, 1e6 + 7), TenantService(0, "u", 501, 5.0), number=501), 0.1)
    assert tenants.band(0).counters("t")[0] == 7.0
    assert tenants.band(0).counters("u")[0] == 5.0, "u was new then: all of its service was told"


def test_what_passes_while_nothing_is_heard_for_long_is_nobody_s_debt_and_for_a_moment_it_is() -> None:
    for silence_s, counted in ((APART_S - 0.1, 900.0), (APART_S + 0.1, 0.0)):
        gates, tenants = keeper()
        gates.hear(heard(TenantService(0, "t", 1, 100.0)), 0.0)
        gates.hear(heard(TenantService(0, "t", 1, 1000.0), number=2), silence_s)
        assert tenants.band(0).counters("t")[0] - 100.0 == counted


def test_others_totals_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.gates.OTHERS_MAX", 500)
    gates, _ = keeper()
    for number in range(0, 2000, 100):
        gates.hear(heard(*(TenantService(0, f"t{number + k}", 1, 1.0) for k in range(100))), 0.0)
    assert len(gates._counted) == 500


def test_gate_ends_by_the_router_s_own_clock() -> None:
    gates, _ = keeper()
    gates.hear(Gates("m", Gate(0, 0), (), ()), 5.0)
    assert gates.gate(5.0 + EXPIRES_S) == Gate(0, 0)
    assert not gates.lets_out(0, 5.0 + EXPIRES_S)
    assert gates.lets_out(1, 5.0)
    assert gates.gate(5.0 + EXPIRES_S + 0.001) is None
    assert gates.lets_out(0, 5.0 + EXPIRES_S + 0.001)


# --- a router that says what is not so ---


def test_a_router_that_claims_endless_urgent_work_holds_the_others_up_for_half_a_second_and_then_slows_them_only() -> (
    None
):
    """The claim is of the most urgent work there can be and of more than could ever be served. Nothing of it is true: there
    is room for all that the other has, which after HELD_S gets one place with each gate."""
    fleet = FleetBench(routers=2)
    fleet.replica(slots=64)
    heads = (Waiter("liar", -math.inf, 0.0, 0.0, 1e12),)
    lie = RouterDemand("m", 1, (BandDemand(10**6, 10**9, 0, 0.0),), heads, 1e9, False, 1e9, 1e12, 1e12, 1e12, ())
    fleet.cores[0].demand = lambda model: lie  # type: ignore[method-assign]
    fleet.advance(0.5)
    fleet.sent.clear()
    for _ in range(20):
        fleet.submit(1, tokens=4)
    assert not fleet.sent, "it is believed"
    fleet.advance(HELD_S + 4 * PERIOD_S)
    assert fleet.sent
    fleet.advance(20 * 3 * PERIOD_S)
    assert len(fleet.sent) == 20
