"""What the metrics say of replicas is what their reports say, and nothing once they are gone."""

from __future__ import annotations

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from cluster.config import RouterConfig, TenantConfig
from cluster.messages import ScaleDecision, ScaleStatus
from cluster.types import EngineLoad, ReplicaId
from router.metrics_sink import RouterMetrics
from router.view import Condition, ReplicaView
from tests.unit.fake_replica import Bench

LOAD = EngineLoad(slots_total=4, blocks_total=8, blocks_free=8, block_size_tokens=16)


def view(name: str, **figures: int) -> ReplicaView:
    load = msgspec.structs.replace(LOAD, **figures)
    return ReplicaView(replica_id=ReplicaId(name), condition=Condition.ROUTABLE, load=load)


def test_totals_of_replicas_only_rise_and_go_on_counting_when_one_starts_anew() -> None:
    registry = CollectorRegistry()
    metrics = RouterMetrics(registry)

    def blocked() -> float | None:
        return registry.get_sample_value("forebay_replica_urgent_blocked_total", {"replica": "a"})

    for reported, expected in ((2, 2), (2, 2), (5, 5), (1, 6), (3, 8)):
        metrics.replicas([view("a", urgent_blocked_total=reported)])
        assert blocked() == expected


def test_a_replica_that_is_gone_leaves_no_series_behind() -> None:
    registry = CollectorRegistry()
    metrics = RouterMetrics(registry)
    metrics.replicas([view("a", prefill_tokens_total=7, host_blocks_free=3), view("b")])
    assert registry.get_sample_value("forebay_replica_prefill_tokens_total", {"replica": "a"}) == 7
    assert registry.get_sample_value("forebay_replica_host_blocks_free", {"replica": "a"}) == 3
    metrics.replicas([view("b")])
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
