"""Each name that a router shows has a source: something that happens to requests or replicas moves it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
from prometheus_client import CollectorRegistry

from cluster.config import PriorityClass, RouterConfig, TenantConfig
from cluster.messages import Gate, Gates, ScaleDecision, ScaleStatus, StepFrame
from cluster.types import RefusalReason, RequestId, TokenDelta
from router.errors import ApiError
from router.metrics_sink import ControllerMetrics, DoorMetrics, RouterMetrics
from tests.unit.fake_replica import Bench, token_id
from tests.unit.test_router_proposals import propose

CLASSES = (
    PriorityClass(name="interactive", priority=10, first_token_slo_s=0.5),
    PriorityClass(name="standard", priority=0),
    PriorityClass(name="batch", priority=-10),
)
CONFIG = RouterConfig(
    classes=CLASSES,
    tenants=(TenantConfig(name="named"),),
    minimum_share=0.5,
    ageing_after_s=1.0,
    expected_output_tokens=8,
    outlier_faults=1,
    silent_after_s=1000.0,
    fenced_after_s=2000.0,
)
Values = Mapping[tuple[str, str], float]


def values(registry: CollectorRegistry) -> Values:
    """By the family's name, and by what tells a series from the others of it."""
    return {
        (family.name, f"{s.name}{sorted(s.labels.items())}"): s.value
        for family in registry.collect()
        for s in family.samples
        if not s.name.endswith("_created")
    }


def families(registry: CollectorRegistry) -> set[str]:
    return {family.name for family in registry.collect()}


def moved(before: Values, after: Values) -> set[str]:
    """Families of which a series has another value, or is new and not 0."""
    return {key[0] for key, value in after.items() if value != before.get(key, 0.0)}


# --- what happens ---


def urgent_work_pushes_out_what_runs_and_all_of_it_ends(bench: Bench) -> set[str]:
    replica = bench.replica(slots=1)
    bench.submit("running", tenant="named", stated=2)
    replica.turn()
    bench.submit("urgent", "interactive")
    for _ in range(12):
        bench.clock.advance(0.1)
        replica.turn()
    return set()


def more_comes_than_is_served(bench: Bench) -> set[str]:
    replica = bench.replica(slots=1)
    for k in range(20):
        bench.submit(f"s{k}", tokens=2)
        bench.submit(f"b{k}", "batch", tokens=2)
    for _ in range(20):
        bench.clock.advance(1.0)
        replica.turn()
    return moved({}, values(bench.registry))


def a_gate_keeps_back(bench: Bench) -> set[str]:
    bench.replica()
    bench.core.hear(Gates("m", Gate(10, 0), (), ()))
    bench.submit("kept", "batch")
    return moved({}, values(bench.registry))


def a_replica_refuses_repeats_and_leaves_out(bench: Bench) -> set[str]:
    replica = bench.replica()
    replica.refuse_with = RefusalReason.FULL
    bench.submit("a")
    replica.turn()
    replica.refuse_with = None
    replica.beat()
    replica.turn()
    later = TokenDelta(RequestId("a"), 2, 3, (token_id("a", 3),), ("x",))
    replica.send(later, TokenDelta(RequestId("unknown"), 1, 0, (1,), ("x",)))
    return set()


def an_engine_dies_and_a_link_breaks(bench: Bench) -> set[str]:
    replica = bench.replica("r1")
    bench.submit("a")
    replica.turn()
    replica.die()
    while_suspected = moved({}, values(bench.registry))
    bench.replica("r2")
    other = bench.replica("r3")
    other.break_link()
    other.connect()
    return while_suspected


def an_engine_fails_on_a_request(bench: Bench) -> set[str]:
    replica = bench.replica()
    bench.submit("a")
    replica.fail(RequestId("a"))
    replica.deliver()
    return set()


def a_request_moves(bench: Bench) -> set[str]:
    source = bench.replica("r1")
    bench.submit("a", tokens=8)
    source.turn()
    target = bench.replica("r2")
    assert bench.core.propose(propose("a", "r2"))
    source.turn()
    bench.clock.advance(0.1)
    target.turn()
    return set()


def a_report_tells_all_that_it_can(bench: Bench) -> set[str]:
    replica = bench.replica()
    bench.submit("a", prompt=40)
    replica.turn()
    report = replica.report()
    load = msgspec.structs.replace(
        report.load, blocks_cached=1, host_blocks_free=2, urgent_blocked_total=3, prefill_tokens_total=4,
        prefix_hit_tokens_total=5, padding_tokens_total=6, waiting=report.load.running,
    )  # fmt: skip
    told = StepFrame(msgspec.structs.replace(report, load=load))
    bench.core.frame(replica.replica_id, replica.generation, told)
    bench.clock.advance(0.3)
    return moved({}, values(bench.registry))


def the_controller_decides_how_many_replicas_there_are_to_be(bench: Bench) -> set[str]:
    bench.core.scaled(ScaleStatus("m", ScaleDecision(0.0, 1, 2, "why", {"queued": 3.0}), kept=1))
    return set()


HAPPENINGS: tuple[Callable[[Bench], set[str]], ...] = (
    urgent_work_pushes_out_what_runs_and_all_of_it_ends,
    more_comes_than_is_served,
    a_gate_keeps_back,
    a_replica_refuses_repeats_and_leaves_out,
    an_engine_dies_and_a_link_breaks,
    an_engine_fails_on_a_request,
    a_request_moves,
    a_report_tells_all_that_it_can,
    the_controller_decides_how_many_replicas_there_are_to_be,
)


def test_every_name_of_a_core_is_moved_by_something_that_happens() -> None:
    seen: set[str] = set()
    for happens in HAPPENINGS:
        bench = Bench(CONFIG)
        before = values(bench.registry)
        meanwhile = happens(bench)  # a gauge may be back where it began when all is over
        seen |= moved(before, values(bench.registry)) | (meanwhile - moved({}, before))
    core = CollectorRegistry()
    RouterMetrics(core)
    # Figures of the configuration: they are there, and do not move.
    promised = {"forebay_slo_first_token_seconds", "forebay_queued_limit_bytes"}
    assert families(core) - seen == promised
    limits = {c.name: bench.metric("forebay_queued_limit_bytes", priority_class=c.name) for c in CONFIG.classes}
    assert limits == {c.name: c.max_queued_bytes for c in CONFIG.classes}
    assert bench.metric("forebay_slo_first_token_seconds", priority_class="interactive") == 0.5


def test_what_is_turned_away_at_the_door_and_what_is_known_of_controllers_moves() -> None:
    registry = CollectorRegistry()
    door, controllers = DoorMetrics(registry), ControllerMetrics(registry)
    before = values(registry)
    door.turned_away(ApiError(401, "no key", code="invalid_api_key"))
    controllers.show(3, 1, 2, led=True)
    assert moved(before, values(registry)) == families(registry)
    controllers.show(3, 1, 5, led=True)
    assert registry.get_sample_value("forebay_controller_refused_total") == 5
