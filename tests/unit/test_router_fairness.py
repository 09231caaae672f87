"""Tenants of one band are served evenly by their weights, whatever they send and whatever fails, and nothing is wasted."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.config import PriorityClass, RouterConfig, TenantConfig, WithinTenant
from cluster.engine.text import TextCodec
from cluster.model import ModelFolder
from cluster.types import Generation, Outcome, RefusalReason, Request, RequestId, Sampling
from router.bands import MAX_IDLE_BANDS, FairShares
from router.fairness import TenantBand
from router.queue import Band, FifoBand, Waiting
from router.rank import rank_of
from router.terms import Terms
from tests.unit.fake_replica import Bench, expected_text

PROMPT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0


def waiting(name: str, tenant: str = "a", arrived: float = 0.0, rank: float = 0.0, continued: bool = False) -> Waiting:
    return Waiting(RequestId(name), 0, "c", arrived, 1, tenant=tenant, rank=rank, continued=continued)


def drain(band: Band) -> list[str]:
    order = []
    while (head := band.peek()) is not None:
        order.append(str(head.request_id))
        band.remove(head)
    return order


# --- the bound ---


@dataclass
class Job:
    waiting: Waiting
    prompt: int
    output: int
    made: int = 0
    cached: int = 0
    """Of the prompt, what its replica need not compute."""
    paid: bool = False
    """It has had a token: its prompt is charged for good."""


class World:
    """A fleet of slots under a band, which takes what is next whenever a slot is free. Service is added up here, by the
    definition, and not read from the band."""

    def __init__(
        self, band: TenantBand | FifoBand, slots: int, longest: tuple[int, int], seed: int, hits: float = 0.0
    ) -> None:
        """`hits`: the chance that some of a prompt is cached."""
        self.band, self.slots, self.longest, self.hits = band, slots, longest, hits
        self.rng = random.Random(seed)
        self.jobs: dict[RequestId, Job] = {}
        self.open: list[Job] = []
        self.service: dict[str, float] = {}
        self.backlog: dict[str, int] = {}
        self.number = 0

    def submit(self, tenant: str, large: bool) -> None:
        self.number += 1
        prompt_max, output_max = self.longest
        prompt = prompt_max if large else self.rng.randint(1, max(1, prompt_max // 8))
        output = output_max if large else self.rng.randint(1, max(1, output_max // 8))
        job = Job(waiting(f"{self.number:06}", tenant, float(self.number)), prompt, output)
        if self.rng.random() < self.hits:
            job.cached = self.rng.randint(1, prompt)
        self.jobs[job.waiting.request_id] = job
        self.push(job)

    def push(self, job: Job) -> None:
        self.band.push(job.waiting)
        if not job.waiting.continued:
            self.backlog[job.waiting.tenant] = self.backlog.get(job.waiting.tenant, 0) + 1

    def fill(self) -> None:
        while len(self.open) < self.slots and (head := self.band.peek()) is not None:
            self.band.remove(head)
            job, tenant = self.jobs[head.request_id], head.tenant
            if not head.continued:
                self.backlog[tenant] -= 1
            charge = 0.0 if job.paid else PROMPT_WEIGHT * job.prompt
            self.service[tenant] = self.service.get(tenant, 0.0) + charge
            if isinstance(self.band, TenantBand):
                self.band.begin(tenant, charge)
            self.open.append(job)

    def step(self, refused: float, lost: float) -> None:
        """Each open request makes a token, is refused, or is lost with its replica."""
        for job in list(self.open):
            tenant, chance = job.waiting.tenant, self.rng.random()
            charge = PROMPT_WEIGHT * job.prompt
            if chance < refused + lost and not job.paid:
                self.open.remove(job)
                self.service[tenant] -= charge
                if isinstance(self.band, TenantBand):
                    self.band.end(tenant, charge)
                self.push(job)
            elif chance < lost:
                self.open.remove(job)
                if isinstance(self.band, TenantBand):
                    self.band.end(tenant, 0.0)
                job.waiting = msgspec.structs.replace(job.waiting, continued=True)
                self.push(job)
            elif self.rng.random() < 0.7:
                self.make_token(job)

    def make_token(self, job: Job) -> None:
        tenant, band = job.waiting.tenant, self.band
        if not job.paid:
            self.service[tenant] -= PROMPT_WEIGHT * job.cached
        if isinstance(band, TenantBand):
            if not job.paid:
                band.keep(tenant, PROMPT_WEIGHT * job.prompt, PROMPT_WEIGHT * job.cached)
            band.add(tenant, OUTPUT_WEIGHT)
        job.paid, job.made = True, job.made + 1
        self.service[tenant] += OUTPUT_WEIGHT
        if job.made == job.output:
            self.open.remove(job)
            del self.jobs[job.waiting.request_id]
            if isinstance(band, TenantBand):
                band.end(tenant, 0.0)


def widest_gap(world: World, weights: Mapping[str, float], steps: int, refused: float, lost: float) -> float:
    """Of two tenants that always wait, a with large requests only and b with small ones, beside others that come and
    go: the most by which what they got over any stretch of time, each over its weight, has differed."""
    low = high = 0.0
    for _ in range(steps):
        for tenant, large in (("a", True), ("b", False)):
            while world.backlog.get(tenant, 0) <= world.slots:
                world.submit(tenant, large)
        if world.rng.random() < 0.1:
            world.submit(f"other{world.rng.randrange(5)}", world.rng.random() < 0.5)
        world.fill()
        assert len(world.open) == world.slots, "no slot is left free while somebody waits"
        assert world.backlog["a"], "both wait at every moment"
        assert world.backlog["b"]
        gap = world.service.get("a", 0.0) / weights.get("a", 1.0) - world.service.get("b", 0.0) / weights.get("b", 1.0)
        low, high = min(low, gap), max(high, gap)
        world.step(refused, lost)
    return high - low


@settings(max_examples=25, deadline=None)
@given(
    slots=st.integers(1, 12),
    prompt=st.integers(1, 200),
    output=st.integers(1, 40),
    weight_a=st.sampled_from([1.0, 0.25, 4.0]),
    refused=st.sampled_from([0.0, 0.05, 0.4]),
    lost=st.sampled_from([0.0, 0.02, 0.2]),
    hits=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 2**32),
)
def test_two_tenants_that_wait_get_the_same_over_their_weights_within_twice_what_the_fleet_holds(
    slots: int, prompt: int, output: int, weight_a: float, refused: float, lost: float, hits: float, seed: int
) -> None:
    weights = {"a": weight_a}
    world = World(TenantBand(weights), slots, (prompt, output), seed, hits)
    fleet_tokens = slots * (prompt + output)
    bound = 2 * max(PROMPT_WEIGHT, OUTPUT_WEIGHT) * fleet_tokens / min(1.0, weight_a)
    assert widest_gap(world, weights, 300, refused, lost) <= bound


def test_over_a_long_run_the_gap_stays_within_the_bound_while_first_come_first_served_leaves_it() -> None:
    """20,000 steps of 4 slots, prompts to 64 and outputs to 16 tokens: the bound is 2 x 2 x 4 x 80."""
    gaps = {}
    for band in (TenantBand({}), FifoBand()):
        world = World(band, 4, (64, 16), 7)
        gaps[type(band)] = widest_gap(world, {}, 20_000, 0.02, 0.02)
        assert min(world.service["a"], world.service["b"]) > 10 * 1280, "it is a long run"
    assert gaps[TenantBand] <= 1280
    assert gaps[FifoBand] > 10 * 1280


def test_weights_are_what_tenants_get_of_each_other() -> None:
    weights = {"a": 3.0}
    world = World(TenantBand(weights), 4, (64, 16), 7)
    widest_gap(world, weights, 20_000, 0.0, 0.0)
    assert world.service["a"] / world.service["b"] == pytest.approx(3.0, rel=0.05)


# --- one tenant and none, idle time ---


def test_lone_tenant_gets_every_slot_in_the_order_of_its_requests() -> None:
    band = TenantBand({})
    for k in (3, 1, 2):
        band.push(waiting(f"q{k}", "lone", float(k)))
    assert len(band) == 3
    assert drain(band) == ["q1", "q2", "q3"]
    assert band.peek() is None


def test_idle_time_earns_nothing() -> None:
    """b comes after a has had 1,000: from then on they alternate, and b does not get 1,000 first."""
    band = TenantBand({})
    for k in range(20):
        band.push(waiting(f"a{k:02}", "a", float(k)))
    for k in range(10):
        band.remove(waiting(f"a{k:02}", "a", float(k)))
        band.begin("a", 100.0)
    for k in range(10):
        band.push(waiting(f"b{k:02}", "b", 100.0 + k))
    order = []
    while (head := band.peek()) is not None:
        order.append(head.tenant)
        band.remove(head)
        band.begin(head.tenant, 100.0)
    assert order == ["a", "b"] * 10


def test_idle_time_earns_nothing_where_nobody_waits_either() -> None:
    """The last one that waited had had 500; who comes into the empty band starts there."""
    band = TenantBand({})
    band.push(waiting("a0", "a"))
    band.remove(waiting("a0", "a"))
    band.begin("a", 500.0)
    band.push(waiting("b0", "b", 1.0))
    assert band.counters("b") == (500.0, 500.0)


# --- what is given back ---


def test_refused_attempt_leaves_its_tenant_as_if_it_had_never_been_sent() -> None:
    refused, never = TenantBand({}), TenantBand({})
    for band in (refused, never):
        for tenant in ("a", "b"):
            for k in range(4):
                band.push(waiting(f"{tenant}{k}", tenant, float(k)))
    first = waiting("a0", "a")
    for _ in range(3):
        refused.remove(first)
        refused.begin("a", 70.0)
        assert refused.counters("a") == (70.0, 0.0)
        refused.end("a", 70.0)
        refused.push(first)
    assert drain(refused) == drain(never)


@pytest.mark.parametrize("cached", [False, True])
def test_charge_is_not_given_back_below_what_idle_time_was_denied(cached: bool) -> None:
    """a is charged 70 and idles while b, alone, gets 500: when it is back it stands level, and a refund of the 70, of
    which nothing is left, changes nothing: neither where the attempt is refused nor where all was cached."""
    band = TenantBand({})
    for tenant in ("a", "b"):
        band.push(waiting(f"{tenant}0", tenant))
        band.push(waiting(f"{tenant}1", tenant, 1.0))
    band.remove(waiting("a0", "a"))
    band.remove(waiting("a1", "a", 1.0))
    band.begin("a", 70.0)
    band.remove(waiting("b0", "b"))
    band.begin("b", 500.0)
    band.push(waiting("a2", "a", 2.0))
    assert band.counters("a") == (500.0, 500.0)
    if cached:
        band.keep("a", 70.0, 70.0)
    band.end("a", 0.0 if cached else 70.0)
    assert band.counters("a") == (500.0, 500.0)


def test_first_token_makes_a_charge_final() -> None:
    band = TenantBand({})
    band.begin("a", 70.0)
    band.keep("a", 70.0)
    band.add("a", 2.0)
    band.end("a", 0.0)
    band.begin("a", 30.0)
    band.end("a", 30.0)
    assert band.counters("a")[0] == 72.0


def test_what_a_replica_had_cached_of_a_prompt_is_given_back_at_the_first_token_and_the_order_follows() -> None:
    """Both sent 100 tokens; of a's 90 were cached, so a is behind and next."""
    band = TenantBand({})
    for name, tenant in (("a1", "a"), ("b1", "b")):
        band.push(waiting(name, tenant))
    for name, tenant, cached in (("a1", "a", 90.0), ("b1", "b", 0.0)):
        band.remove(waiting(name, tenant))
        band.begin(tenant, 100.0)
        band.push(waiting(f"{tenant}2", tenant, arrived=2.0 if tenant == "a" else 1.0))
        band.keep(tenant, 100.0, cached)
    assert (band.counters("a")[0], band.counters("b")[0]) == (10.0, 100.0)
    assert drain(band) == ["a2", "b2"]
    band.end("a", 0.0)
    assert band.counters("a")[0] == 10.0, "what was kept is not given back again"


# --- places ---


def test_continued_work_goes_before_the_new_work_of_every_tenant_and_by_its_age() -> None:
    band = TenantBand({})
    band.push(waiting("new", "b", 0.0))
    band.push(waiting("late", "a", 9.0, continued=True))
    band.push(waiting("early", "c", 8.0, continued=True))
    band.begin("a", 1e6)
    assert drain(band) == ["early", "late", "new"]


def test_returned_request_is_the_next_of_its_tenant_again() -> None:
    band = TenantBand({})
    for k in range(3):
        band.push(waiting(f"q{k}", arrived=float(k)))
    band.remove(waiting("q0"))
    band.begin("a", 5.0)
    band.end("a", 5.0)
    band.push(waiting("q0"))
    assert drain(band) == ["q0", "q1", "q2"]


# --- memory ---


def test_tenants_that_are_gone_are_forgotten() -> None:
    """20,000 tenants come once, have their one request served, and go; three always wait."""
    band = TenantBand({})
    order: deque[Waiting] = deque()
    for k in range(20_000):
        tenant = f"once{k}" if k % 4 else f"steady{k % 3}"
        band.push(waiting(f"{k:05}", tenant, float(k)))
        if k < 30:
            continue
        head = band.peek()
        assert head is not None
        band.remove(head)
        band.begin(head.tenant, 10.0)
        band.keep(head.tenant, 10.0)
        order.append(head)
        if len(order) > 8:
            band.end(order.popleft().tenant, 0.0)
    assert len(band._tenants) < 400
    assert len(band._heap) < 1200


class Remembering(TenantBand):
    """Never forgets anybody."""

    def _sweep(self) -> None:
        self._sweep_at = 10**9


class Forgetting(TenantBand):
    """Forgets whom it may at every new tenant."""

    def _sweep(self) -> None:
        super()._sweep()
        self._sweep_at = 0


@pytest.mark.parametrize("seed", range(8))
def test_forgetting_changes_no_decision(seed: int) -> None:
    rng = random.Random(seed)
    bands = [Remembering({}), Forgetting({})]
    opened: list[tuple[Waiting, float]] = []
    picks = forgotten = 0
    for band in bands:
        band._sweep()
    for k in range(4000):
        action = rng.random()
        if action < 0.3:
            w = waiting(f"{k:05}", f"t{rng.randrange(40)}", float(k))
            for band in bands:
                band.push(w)
        elif action < 0.7:
            heads = [band.peek() for band in bands]
            assert heads[0] == heads[1]
            if heads[0] is not None:
                picks += 1
                charge = float(rng.randint(1, 100))
                for band in bands:
                    band.remove(heads[0])
                    band.begin(heads[0].tenant, charge)
                opened.append((heads[0], charge))
        elif opened:
            w, charge = opened.pop(rng.randrange(len(opened)))
            refused, tokens = rng.random() < 0.3, rng.randint(1, 50)
            for band in bands:
                if refused:
                    band.end(w.tenant, charge)
                    band.push(w)
                else:
                    band.keep(w.tenant, charge)
                    band.add(w.tenant, tokens)
                    band.end(w.tenant, 0.0)
        forgotten = max(forgotten, len(bands[0]._tenants) - len(bands[1]._tenants))
    assert picks > 1000
    assert forgotten > 10


def test_bands_without_work_are_bounded_and_one_with_work_is_never_forgotten() -> None:
    shares = FairShares(RouterConfig())
    busy = shares.band(-1)
    busy.begin("a", 9.0)
    for priority in range(1000):
        shares.band(priority)
    assert len(shares._bands) <= MAX_IDLE_BANDS
    assert shares.band(-1) is busy


# --- the order within a tenant ---


def request(arrived: float, *, name: str = "q", priority_class: str = "standard") -> Request:
    return Request(
        request_id=RequestId(name),
        tenant="a",
        priority=0,
        priority_class=priority_class,
        arrived_unix_s=arrived,
        prompt_ids=(1,),
        sampling=Sampling(max_tokens=10, seed=0),
    )


def ranked(order: WithinTenant, *sent: tuple[str, float, float, Terms]) -> list[str]:
    classes = (PriorityClass(name="standard", priority=0, longest_wait_s=50),)
    config = RouterConfig(within_tenant=order, classes=classes)
    band = TenantBand({})
    for name, arrived, expected, terms in sent:
        band.push(waiting(name, arrived=arrived, rank=rank_of(config, request(arrived), terms, expected)))
    return drain(band)


def test_shortest_expected_goes_first_and_nobody_is_passed_by_who_came_too_much_later() -> None:
    """A second counts like 20 tokens, and 60 s are the most that anybody is passed by."""
    none = Terms()
    assert ranked(WithinTenant.SJF, ("long", 0.0, 200, none), ("short", 9.9, 1, none)) == ["short", "long"]
    assert ranked(WithinTenant.SJF, ("long", 0.0, 200, none), ("short", 10.0, 1, none)) == ["long", "short"]
    assert ranked(WithinTenant.SJF, ("endless", 0.0, 1e9, none), ("short", 59.9, 1, none))[0] == "short"
    assert ranked(WithinTenant.SJF, ("endless", 0.0, 1e9, none), ("short", 60.0, 1, none))[0] == "endless"


def test_earliest_deadline_goes_first_and_who_has_none_has_that_of_its_class() -> None:
    """Of its class: 50 s. The first token's time counts before the whole's."""
    order = ranked(
        WithinTenant.DEADLINE,
        ("none", 0.0, 0, Terms()),
        ("ttft", 1.0, 0, Terms(ttft_slo_s=10, timeout_s=1000)),
        ("timeout", 2.0, 0, Terms(timeout_s=20)),
        ("patient", 3.0, 0, Terms(timeout_s=500)),
    )
    assert order == ["ttft", "timeout", "none", "patient"]


def test_first_come_first_served_looks_at_nothing_else() -> None:
    sent = [("b", 1.0, 1.0, Terms(ttft_slo_s=1)), ("a", 0.0, 99.0, Terms())]
    assert ranked(WithinTenant.FCFS, *sent) == ["a", "b"]


# --- in the core ---


def test_tenant_that_floods_does_not_keep_another_waiting() -> None:
    bench = Bench()
    replica = bench.replica(slots=1)
    for k in range(20):
        bench.submit(f"flood{k:02}", tenant="flood", tokens=2)
    other = bench.submit("other", tenant="other", tokens=2)
    for _ in range(4):
        replica.turn()
    assert bench.outcome(other) is Outcome.FINISHED
    assert [r.request_id for r, _ in replica.added][:3] == ["flood00", "other", "flood01"]


def test_refused_attempts_cost_a_tenant_nothing_and_continued_ones_are_not_paid_twice() -> None:
    config = RouterConfig(tenants=(TenantConfig(name="a"),))
    bench = Bench(config)
    r1 = bench.replica("r1", slots=1, refuse_with=RefusalReason.OVERFLOW)
    moved = bench.submit("moved", tenant="a", prompt=8, tokens=5)
    r1.refuse_with = None
    r1.turn()
    r1.turn()
    r1.turn()
    r2 = bench.replica("r2", slots=1)
    r1.die()
    for _ in range(5):
        r2.turn()
    assert bench.text(moved) == expected_text(moved)
    assert len(r1.added) + len(r2.added) == 3
    band = bench.core._dispatcher._tenants.band(0)
    assert band.counters("a")[0] == 8 * PROMPT_WEIGHT + 5 * OUTPUT_WEIGHT
    assert bench.metric("forebay_tenant_service_tokens_total", tenant="a") == 18
    assert bench.metric("forebay_tenant_service_tokens_total", tenant="other") == 0


@pytest.mark.parametrize("tokens_before", [0, 2])
def test_work_lost_with_its_replica_goes_on_before_new_work_of_tenants_that_had_less(tokens_before: int) -> None:
    bench = Bench()
    first = bench.replica("r1", slots=1)
    lost = bench.submit("lost", tenant="a", prompt=100, tokens=9)
    bench.submit("new", tenant="b", prompt=1, tokens=1)
    for _ in range(tokens_before):
        first.turn()
    first.die()
    second = bench.replica("r2", slots=1)
    assert [r.request_id for r, _ in second.added] == [lost.request_id]


def test_refused_work_waits_for_its_turn_by_what_its_tenant_had() -> None:
    """a has had a prompt of 100; refused, its second request stands behind the first of b, who has had nothing."""
    bench = Bench()
    replica = bench.replica("r1", slots=2)
    bench.submit("had", tenant="a", prompt=100, tokens=99)
    replica.turn()
    replica.refuse_with = RefusalReason.FULL
    bench.submit("refused", tenant="a", prompt=1, tokens=1)
    bench.submit("new", tenant="b", prompt=1, tokens=1)
    replica.refuse_with = None
    replica.turn()
    replica.beat()
    assert [r.request_id for r, _ in replica.added] == ["had", "refused", "new"]


@pytest.mark.parametrize("seed", range(4))
def test_clients_of_two_tenants_get_the_same_from_replicas_that_refuse_and_die(seed: int) -> None:
    """What the clients hold is within the bound: 4 slots of 40 + 12 tokens, of which prompts without a token yet, up to
    4 x 40 at each end, are charged and not yet held."""
    rng = random.Random(seed)
    bench = Bench(RouterConfig(max_attempts=1000, expected_output_tokens=12, silent_after_s=600, fenced_after_s=900))
    replicas = [bench.replica(f"r{k}", slots=2) for k in range(2)]
    sent: dict[str, list[Request]] = {"a": [], "b": []}
    gaps = []
    number = 0
    for _ in range(1500):
        for tenant, prompt, tokens in (("a", 40, 12), ("b", rng.randint(1, 10), rng.randint(1, 4))):
            alive = [r for r in sent[tenant] if bench.outcome(r) is None]
            queued = [r for r in alive if bench.core._live[r.request_id].replica_id is None]
            for _ in range(3 - len(queued)):
                number += 1
                sent[tenant].append(bench.submit(f"{number:06}", tenant=tenant, prompt=prompt, tokens=tokens))
        replica = replicas[rng.randrange(2)]
        replica.refuse_with = RefusalReason.OVERFLOW if rng.random() < 0.05 else None
        if rng.random() < 0.02:
            replica.die()
            replica.generation = Generation(replica.generation.number + 1, "again")
            replica.connect()
        replica.turn()
        held = {t: sum(kept(bench, r) for r in requests) for t, requests in sent.items()}
        gaps.append(held["a"] - held["b"])
    assert min(held.values()) > 5 * 416, "it is a long run"
    assert max(gaps) - min(gaps) <= 2 * (2 * 4 * (40 + 12) + 4 * 40)


def kept(bench: Bench, request: Request) -> float:
    """Service that a client has: its prompt's once a token has come, and its tokens'."""
    live = bench.core._live.get(request.request_id)
    ending = bench.streams[request.request_id].ending
    tokens = live.journal.next_index if live is not None else ending.completion_tokens if ending is not None else 0
    return PROMPT_WEIGHT * len(request.prompt_ids) + OUTPUT_WEIGHT * tokens if tokens else 0.0


def test_shortest_expected_first_learns_lengths_and_believes_what_is_stated(tiny_model: ModelFolder) -> None:
    """Prompts of 8 tokens have put out 2, those of 64 have put out 40; all may put out 40."""
    bench = Bench(RouterConfig(within_tenant=WithinTenant.SJF, silent_after_s=600, fenced_after_s=900))
    replica = bench.replica(slots=4)
    end_id = tiny_model.eos_token_ids[0]
    replica.script = lambda request, k: end_id if len(request.prompt_ids) == 8 and k == 1 else 70
    replica.codec, replica.end_ids = TextCodec.from_file(tiny_model.tokenizer_path), frozenset([end_id])
    for k in range(40):
        for prompt in (8, 64):
            bench.submit(f"seen{k}.{prompt}", prompt=prompt, tokens=40)
        for _ in range(41):
            replica.turn()
    assert not bench.core._live
    bench.clock.advance(1000)
    before = len(replica.added)
    replica.slots = 1
    replica.beat()
    bench.submit("running", prompt=64, tokens=40)
    for name, prompt, stated in (("long", 64, None), ("short", 8, None), ("shortest", 64, 1)):
        bench.submit(name, prompt=prompt, tokens=40, stated=stated)
    for _ in range(130):
        replica.turn()
    assert [r.request_id for r, _ in replica.added[before:]] == ["running", "shortest", "short", "long"]


def test_request_that_is_refused_has_waited_since_it_came() -> None:
    """It is old enough for its class's share although it was sent out, and back, a moment ago."""
    bench = Bench()
    replica = bench.replica(slots=1, refuse_with=RefusalReason.FULL)
    request = bench.submit("a", "batch")
    bench.clock.advance(0.5)
    replica.turn()
    head = bench.core._dispatcher.queue.peek()
    assert head is not None
    assert bench.clock.monotonic() - head.since_s == pytest.approx(0.5)
    assert bench.outcome(request) is None
