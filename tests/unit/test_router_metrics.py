"""What the metrics say of replicas is what their reports say, and nothing once they are gone."""

from __future__ import annotations

import msgspec
from prometheus_client import CollectorRegistry

from cluster.types import EngineLoad, ReplicaId
from router.metrics_sink import RouterMetrics
from router.view import Condition, ReplicaView

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
