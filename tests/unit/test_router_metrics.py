"""What the metrics of a router say is what happened, by arithmetic, under labels that are bounded."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from cluster.config import DEFAULT_CLASSES, PriorityClass, RouterConfig, TenantConfig
from cluster.messages import ScaleDecision, ScaleStatus
from cluster.metrics import ITL_BUCKETS_SECONDS, MODEL_LABEL
from cluster.types import EngineLoad, Outcome, PriorityLoad, ReplicaId
from router.exposition import ByModel, page
from router.live import BYTES_PER_REQUEST, BYTES_PER_TOKEN
from router.metrics_sink import RouterMetrics
from router.slo import without_token
from router.view import Condition, ReplicaView
from tests.promtool import check_metrics, needs_promtool
from tests.unit.fake_replica import Bench

LASTING = RouterConfig(silent_after_s=1000.0, fenced_after_s=2000.0)
PROMISING = RouterConfig(
    classes=(PriorityClass(name="interactive", priority=10, first_token_slo_s=0.5), *DEFAULT_CLASSES[1:]),
    silent_after_s=1000.0,
    fenced_after_s=2000.0,
)

LOAD = EngineLoad(slots_total=4, blocks_total=8, blocks_free=8, block_size_tokens=16)


def view(name: str, **figures: int) -> ReplicaView:
    load = msgspec.structs.replace(LOAD, **figures)
    return ReplicaView(replica_id=ReplicaId(name), condition=Condition.ROUTABLE, load=load, observed_at_s=0.5)


def test_totals_of_replicas_only_rise_and_go_on_counting_when_one_starts_anew() -> None:
    registry = CollectorRegistry()
    metrics = RouterMetrics(registry)

    def blocked() -> float | None:
        return registry.get_sample_value("forebay_replica_urgent_blocked_total", {"replica": "a"})

    for reported, expected in ((2, 2), (2, 2), (5, 5), (1, 6), (3, 8)):
        metrics.replicas([view("a", urgent_blocked_total=reported)], 1.0)
        assert blocked() == expected


def test_a_replica_that_is_gone_leaves_no_series_behind() -> None:
    registry = CollectorRegistry()
    metrics = RouterMetrics(registry)
    metrics.replicas([view("a", prefill_tokens_total=7, host_blocks_free=3), view("b")], 1.0)
    assert registry.get_sample_value("forebay_replica_prefill_tokens_total", {"replica": "a"}) == 7
    assert registry.get_sample_value("forebay_replica_host_blocks_free", {"replica": "a"}) == 3
    metrics.replicas([view("b")], 1.0)
    left = {s.labels["replica"] for family in registry.collect() for s in family.samples if "replica" in s.labels}
    assert left == {"b"}


def test_what_the_number_of_replicas_is_decided_by_is_shown_as_far_as_it_is_measured() -> None:
    registry = CollectorRegistry()
    metrics = RouterMetrics(registry)

    def shown() -> dict[str, float]:
        of_scale = (s for family in registry.collect() for s in family.samples if s.name == "forebay_scale")
        return {s.labels["figure"]: s.value for s in of_scale}

    assert shown() == {}
    for numbers in ({"demand_per_s": 250.0, "attained": 0.9, "idle_s": 3.0}, {"queued": 2.0}):
        metrics.scaled(ScaleStatus("m", ScaleDecision(0.0, 2, 3, "why", numbers), kept=2))
        assert shown() == {"wanted": 3.0} | {name: value for name, value in numbers.items() if name != "idle_s"}


def test_tenants_that_the_config_does_not_name_are_one_series_however_many_they_are() -> None:
    bench = Bench(RouterConfig(tenants=(TenantConfig(name="named"),)))
    replica = bench.replica(slots=200)
    for tenant in ("named", *(f"made-up-{k}" for k in range(100))):
        bench.submit(tenant, tenant=tenant, prompt=10, tokens=1)
    replica.turn()
    shown = {
        sample.labels["tenant"]: sample.value
        for family in bench.registry.collect()
        for sample in family.samples
        if sample.name == "forebay_tenant_service_tokens_total"
    }
    assert shown == {"named": 12.0, "other": 1200.0}


def test_queue_is_shown_in_the_service_that_it_is_expected_to_take_and_its_drain_once_measured() -> None:
    """Each of 8 prompt and 2 output tokens: 12. One leaves each second."""
    bench = Bench(RouterConfig(silent_after_s=100, fenced_after_s=200))
    replica = bench.replica(slots=1)
    labels = {"priority_class": "standard"}
    for k in range(30):
        bench.submit(f"q{k}", tokens=2)
    bench.core.tick()
    assert bench.metric("forebay_queued_service_tokens", **labels) == 29 * 12
    assert bench.registry.get_sample_value("forebay_drain_service_tokens_per_second", labels) is None
    for _ in range(20):
        replica.turn()
        replica.turn()
        bench.clock.advance(1)
        bench.core.tick()
    assert bench.metric("forebay_queued_service_tokens", **labels) == 9 * 12
    assert bench.metric("forebay_drain_service_tokens_per_second", **labels) == pytest.approx(12, rel=0.1)


# --- what is there from the start ---


def test_every_series_that_alerts_take_rates_of_is_there_at_0_before_anything_happens() -> None:
    slo = PriorityClass(name="fast", priority=5, first_token_slo_s=1.0)
    bench = Bench(RouterConfig(classes=(slo, *DEFAULT_CLASSES)))
    shown = {(s.name, *s.labels.values()): s.value for f in bench.registry.collect() for s in f.samples}
    names = [c.name for c in bench.config.classes]
    expected: set[tuple[str, ...]] = {
        ("forebay_slo_requests_total", "fast", attained) for attained in ("true", "false")
    }
    expected |= {("forebay_requests_total", name, outcome.value) for name in names for outcome in Outcome}
    at_arrival = ("admitted", "queued", *(o.value for o in Outcome if o.value.startswith("rejected_")))
    expected |= {("forebay_admissions_total", name, decision) for name in names for decision in at_arrival}
    expected |= {("forebay_itl_seconds_count", name) for name in names}
    expected |= {("forebay_gate_shut", name) for name in names}
    assert {key: shown.get(key) for key in expected} == dict.fromkeys(expected, 0.0)
    assert {key[1] for key in shown if key[0] == "forebay_slo_requests_total"} == {"fast"}


@needs_promtool
def test_what_a_router_shows_is_what_prometheus_reads_and_its_linter_accepts() -> None:
    bench = Bench(RouterConfig(tenants=(TenantConfig(name='quo"ted\\tenant'),)))
    replica = bench.replica()
    bench.submit("a", stated=4)
    replica.turn()
    registry = CollectorRegistry()
    registry.register(ByModel({'m"1': bench.registry}))
    text = generate_latest(registry).decode()
    families = {f.name: f for f in text_string_to_metric_families(text)}
    assert families["forebay_itl_seconds"].type == "histogram"
    assert {s.labels["tenant"] for s in families["forebay_tenant_queued_requests"].samples} == {
        "other",
        'quo"ted\\tenant',
    }
    assert {s.labels[MODEL_LABEL] for f in families.values() for s in f.samples} == {'m"1'}
    check_metrics(text)


# --- between tokens ---


def itl(bench: Bench, priority_class: str = "standard") -> tuple[dict[float, float], float, float]:
    """Cumulative counts by bound, how many, and their sum."""
    samples = [
        s
        for family in bench.registry.collect()
        for s in family.samples
        if s.name.startswith("forebay_itl_seconds") and s.labels["priority_class"] == priority_class
    ]
    buckets = {float(s.labels["le"]): s.value for s in samples if "le" in s.labels}
    count, total = (next(s.value for s in samples if s.name.endswith(end)) for end in ("_count", "_sum"))
    return buckets, count, total


def gaps(bench: Bench) -> list[float]:
    """How many, and their sum."""
    _, *figures = itl(bench)
    return figures


def test_seconds_between_arrivals_are_counted_after_the_first_of_each_request_in_the_bucket_whose_bound_they_reach() -> (
    None
):
    """Gaps of 10, 50.1 and 400 ms. The clock of the test is exact to 1e-12 s."""
    bench = Bench(LASTING)
    replica = bench.replica()
    bench.submit("a", tokens=8)
    replica.turn()
    assert itl(bench)[1] == 0, "a first token is no gap"
    for gap_s in (0.0099, 0.0501, 0.4):
        bench.clock.advance(gap_s)
        replica.turn()
    buckets, count, total = itl(bench)
    assert count == 3
    assert total == pytest.approx(0.46)
    assert [buckets[bound] for bound in (0.005, 0.01, 0.05, 0.075, 0.3, 0.5, math.inf)] == [0, 1, 1, 2, 2, 3, 3]
    assert list(buckets) == [*ITL_BUCKETS_SECONDS, math.inf]


def test_tokens_that_come_together_are_one_arrival_and_a_gap_across_replicas_counts_whole() -> None:
    bench = Bench(LASTING)
    replica = bench.replica(tokens_per_step=2)
    bench.submit("a", tokens=6)
    replica.turn()
    bench.clock.advance(0.02)
    replica.turn()
    assert gaps(bench) == [1, pytest.approx(0.02)]
    replica.die()
    bench.clock.advance(2.0)
    bench.replica("r2", tokens_per_step=2).turn()
    assert gaps(bench) == [2, pytest.approx(2.02)]


def test_of_many_requests_each_counts_between_its_own_tokens() -> None:
    """Three that came at different times have their tokens in the same frames: two gaps of 30 ms each after the last came."""
    bench = Bench(LASTING)
    replica = bench.replica()
    for name in "abc":
        bench.submit(name, tokens=9)
        replica.turn()
    before = itl(bench)
    for _ in range(2):
        bench.clock.advance(0.03)
        replica.turn()
    after = itl(bench)
    assert after[1] - before[1] == 6
    assert after[2] - before[2] == pytest.approx(0.18)
    assert itl(bench, "batch")[1] == 0


# --- the promise of a class ---


def judged(bench: Bench) -> tuple[float, float]:
    """In time, and late."""
    labels = {"priority_class": "interactive"}
    return (
        bench.metric("forebay_slo_requests_total", attained="true", **labels),
        bench.metric("forebay_slo_requests_total", attained="false", **labels),
    )


@pytest.mark.parametrize(("waits_s", "expected"), [(0.4, (1, 0)), (0.6, (0, 1))])
def test_a_first_token_is_in_time_or_late_by_its_class_and_counts_once(
    waits_s: float, expected: tuple[float, float]
) -> None:
    bench = Bench(PROMISING)
    replica = bench.replica()
    bench.submit("a", "interactive", tokens=3)
    bench.submit("b", "standard", tokens=3)
    bench.clock.advance(waits_s)
    for _ in range(3):
        replica.turn()
    assert judged(bench) == expected
    promised = {s.labels["priority_class"] for f in bench.registry.collect() for s in f.samples if "_slo_" in f.name}
    assert promised == {"interactive"}


def test_who_is_refused_or_expires_was_not_served_in_time_and_who_leaves_counts_only_once_late() -> None:
    bench = Bench(PROMISING)
    bench.replica(slots=1)
    first = [bench.submit(f"a{k}", "interactive") for k in range(2)]
    bench.core.cancel(*(r.request_id for r in first))
    assert judged(bench) == (0, 0), "they left in time"
    patient = bench.submit("b", "interactive")
    bench.clock.advance(0.6)
    bench.core.cancel(patient.request_id)
    assert judged(bench) == (0, 1), "it was late when it left"
    bench.submit("huge", "interactive", prompt=10**5, tokens=10)
    assert judged(bench) == (0, 1), "no replica could ever hold it"
    bench.core.shut_down()
    bench.submit("refused", "interactive")
    assert judged(bench) == (0, 2)
    bench.submit("scored", "interactive", tokens=0)
    assert judged(bench) == (0, 2), "it asked for no token"


@pytest.mark.parametrize("outcome", Outcome)
@pytest.mark.parametrize("waited_s", [0.5, 0.5000001])
def test_every_ending_without_a_token_is_judged(outcome: Outcome, waited_s: float) -> None:
    """By the table of what is whose doing; 0.5 s are promised."""
    served = {Outcome.FINISHED, Outcome.REJECTED_TOO_LARGE}
    clients = {
        Outcome.CANCELLED, Outcome.SLOW_CLIENT, Outcome.REJECTED_DEADLINE, Outcome.EXPIRED_IN_QUEUE, Outcome.TIMED_OUT
    }  # fmt: skip
    expected = None if outcome in served or (outcome in clients and waited_s <= 0.5) else False
    assert without_token(outcome, waited_s, 0.5) is expected


# --- gauges ---


def test_the_queue_is_shown_by_tenant_and_by_how_long_its_oldest_waits() -> None:
    bench = Bench(RouterConfig(tenants=(TenantConfig(name="named"),)))
    bench.replica(slots=1)
    bench.submit("runs")
    bench.clock.advance(1.0)
    bench.submit("b1", "batch", tenant="named")
    bench.clock.advance(2.0)
    for k in range(50):
        bench.submit(f"s{k}", tenant=f"made-up-{k}")
    assert bench.metric("forebay_tenant_queued_requests", tenant="named") == 1
    assert bench.metric("forebay_tenant_queued_requests", tenant="other") == 50
    series = [s for f in bench.registry.collect() for s in f.samples if s.name == "forebay_tenant_queued_requests"]
    assert len(series) == 2
    assert bench.metric("forebay_queued_oldest_seconds", priority_class="batch") == pytest.approx(2.05)
    assert bench.metric("forebay_queued_oldest_seconds", priority_class="standard") == pytest.approx(0.049)
    assert bench.metric("forebay_queued_oldest_seconds", priority_class="interactive") == 0


def test_the_journal_is_shown_with_what_its_requests_are_charged_for_prompts_and_output() -> None:
    bench = Bench(LASTING)
    replica = bench.replica()
    bench.submit("a", prompt=10, tokens=4)
    bench.submit("b", prompt=20, tokens=4)
    replica.turn()
    replica.turn()
    assert bench.metric("forebay_journal_requests") == 2
    assert bench.metric("forebay_journal_bytes") == 2 * BYTES_PER_REQUEST + BYTES_PER_TOKEN * (10 + 20 + 2 + 2)
    for _ in range(2):
        replica.turn()
    assert bench.metric("forebay_journal_requests") == bench.metric("forebay_journal_bytes") == 0


def test_replicas_are_shown_by_their_condition_and_the_age_of_their_reports_when_somebody_asks() -> None:
    bench = Bench(RouterConfig(silent_after_s=1.0, fenced_after_s=3.0))
    bench.replica("r1")
    bench.clock.advance(0.7)
    two = bench.replica("r2")
    bench.clock.advance(0.5)
    shown = {c.value: bench.metric("forebay_replicas", condition=c.value) for c in Condition}
    assert shown == dict.fromkeys((c.value for c in Condition), 0.0) | {"silent": 1.0, "routable": 1.0}
    assert bench.metric("forebay_replica_report_age_seconds", replica="r1") == pytest.approx(1.2)
    assert bench.metric("forebay_replica_report_age_seconds", replica="r2") == pytest.approx(0.5)
    two.beat()
    assert bench.metric("forebay_replica_report_age_seconds", replica="r2") == 0


def test_blocks_of_a_replica_are_shown_by_class_of_what_runs_and_what_is_paused_there() -> None:
    bench = Bench()
    registry = CollectorRegistry()
    metrics = RouterMetrics(registry)
    metrics.begin(bench.config, lambda: None)
    running, waiting = (PriorityLoad(10, 1, 3), PriorityLoad(3, 1, 4)), (PriorityLoad(-10, 2, 5), PriorityLoad(0, 1, 0))
    load = msgspec.structs.replace(LOAD, running=running, waiting=waiting)
    view = ReplicaView(replica_id=ReplicaId("a"), condition=Condition.ROUTABLE, load=load, observed_at_s=0.5)
    metrics.replicas([view], 1.0)
    held = {
        name: registry.get_sample_value("forebay_replica_class_kv_blocks", {"replica": "a", "priority_class": name})
        for name in ("interactive", "standard", "batch")
    }
    assert held == {"interactive": 3, "standard": 4, "batch": 5}
    metrics.replicas([], 1.0)
    assert not [s for f in registry.collect() for s in f.samples if "replica" in s.labels]


async def test_a_page_is_the_registrys_without_when_series_began_and_lets_others_on_while_it_is_written() -> None:
    bench = Bench()
    bench.submit("a")
    registry = CollectorRegistry()
    registry.register(ByModel({"m": bench.registry}))
    turns = 0
    taken_after = []
    written = asyncio.Event()

    class Late(Collector):
        def collect(self) -> Iterable[Metric]:
            taken_after.append(turns)
            return ()

    registry.register(Late())
    Counter("forebay_whole_router", "Of no model.", registry=registry).inc()

    async def another() -> None:
        nonlocal turns
        while not written.is_set():
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(another())
    text = (await page(registry)).decode()
    written.set()
    await beside
    families = {f.name for f in text_string_to_metric_families(text)}
    assert families == {f.name for f in bench.registry.collect()} | {"forebay_whole_router"}
    assert taken_after[-1] >= len(list(bench.registry.collect())), "others had a turn before the next family was taken"
    assert "_created" not in text
    assert "_created" in generate_latest(bench.registry).decode()
