"""A controller's part in Kubernetes against a real API server, and against one that is cut, away, silent or forgetful.

Replicas are values that do what they are told; the line of real ones is in test_line.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from operator import lt
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from cluster.clock import SystemClock
from cluster.config import KubernetesConfig
from cluster.control import happenings
from cluster.control.happenings import ReplicaSeen, ScaleSeen
from cluster.messages import DrainOrder
from cluster.metrics import (
    KUBERNETES_EVENTS,
    KUBERNETES_LEASE_HELD,
    KUBERNETES_NODES_GOING,
    KUBERNETES_WATCH_AGE,
    KUBERNETES_WATCHES,
)
from cluster.types import DrainedBy, Generation, PodRef, ReplicaId
from deployments.kube import api, calls
from deployments.kube.figures import KubernetesFigures
from deployments.kube.operator import Operator
from tests.kubernetes.conftest import TOKEN, Kube, kubeconfig_of
from tests.kubernetes.gate import GONE, RIGHTS, Answer, Asked, Gate, answered, watched
from tests.line import until

FIRST = Generation(1, "aaaaaaaaaaaaaaaa")
ELSEWHERE = ReplicaId("elsewhere")


@dataclass
class Fleet:
    """Replicas by node, and who leads. The first is on a node that nobody knows: work has a place to go."""

    generation: Generation | None = FIRST
    drained: dict[ReplicaId, frozenset[DrainedBy]] = field(default_factory=lambda: {ELSEWHERE: frozenset()})
    at: dict[ReplicaId, str] = field(default_factory=lambda: {ELSEWHERE: "nobody-knows-it"})
    scale: dict[str, ScaleSeen] = field(default_factory=dict)

    def put(self, name: str, node: str) -> None:
        self.at[ReplicaId(name)], self.drained[ReplicaId(name)] = node, frozenset()

    def replicas(self) -> dict[ReplicaId, ReplicaSeen]:
        return {
            r: ReplicaSeen(Generation(1, "r"), "m", node, PodRef(f"pod-{r}", f"uid-{r}"), self.drained[r])
            for r, node in self.at.items()
        }

    def scales(self) -> dict[str, ScaleSeen]:
        return dict(self.scale)

    def tell_replica(self, replica_id: ReplicaId, message: DrainOrder) -> None:
        assert message.node
        assert not message.retire
        one = frozenset({DrainedBy.NODE})
        self.drained[replica_id] = self.drained[replica_id] | one if message.drain else self.drained[replica_id] - one

    async def draining(self) -> set[str]:
        return {r for r, by in self.drained.items() if DrainedBy.NODE in by}


class World:
    """An operator that runs, through the gate."""

    def __init__(self, kube: Kube, gate: Gate, folder: Path) -> None:
        self.kube, self.gate, self.fleet = kube, gate, Fleet()
        self._config = KubernetesConfig(
            kubeconfig=kubeconfig_of(gate.url, folder),
            namespace=kube.namespace,
            nodes=kube.selector,
            return_after_s=0.2,
            watch_s=5,
            backoff_max_s=0.5,
            call_timeout_s=1,
            lease_s=3,
        )

    @contextlib.asynccontextmanager
    async def running(self, fleet: Fleet | None = None, **changes: Any) -> AsyncIterator[Operator]:
        config = self._config.model_copy(update=changes)
        operator = Operator(
            config, fleet or self.fleet, SystemClock(), random.Random(1), PodRef("controller-0", "uid-c")
        )
        task = asyncio.create_task(operator.run())
        try:
            yield operator
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def until_drains(self, *replicas: str) -> None:
        await until(self.fleet.draining, set(replicas).__eq__)


@pytest.fixture
def world(kube: Kube, gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(calls, "_PAUSE_S", 0.05)
    return World(kube, gate, tmp_path)


def of(value: Callable[[], Any]) -> Callable[[], Awaitable[Any]]:
    async def look() -> Any:
        return value()

    return look


async def until_listed(operator: Operator, nodes: int) -> None:
    await until(of(lambda: operator.status().nodes), lambda listed: listed == nodes)


# --- nodes ---


async def test_a_cordon_and_a_taint_drain_the_nodes_replicas_and_their_end_gives_them_back(world: World) -> None:
    kube, fleet = world.kube, world.fleet
    first, second = await kube.add_node("first"), await kube.add_node("second", unschedulable=True)
    fleet.put("r1", first)
    fleet.put("r2", second)
    async with world.running() as operator:
        await world.until_drains("r2")
        taint = {"key": "aws-node-termination-handler/spot-itn", "effect": "NoSchedule", "value": "e"}
        await kube.change_node(first, taints=[taint])
        await world.until_drains("r1", "r2")
        going = {node.node: node.why for node in operator.status().going}
        assert going == {
            first: "AWS ends its spot instance (taint aws-node-termination-handler/spot-itn)",
            second: "it is cordoned (spec.unschedulable)",
        }
        fleet.drained[ReplicaId("r2")] |= {DrainedBy.OPERATOR}
        await kube.change_node(second, unschedulable=None)
        await kube.change_node(first, taints=None)
        await world.until_drains()
        assert fleet.drained[ReplicaId("r2")] == {DrainedBy.OPERATOR}, "somebody else's drain is not taken back"
        fleet.put("r4", first)
        await kube.change_node(first, unschedulable=True)
        await world.until_drains("r1", "r4")
        fleet.put("r1", first)  # another in its place, that has heard nothing
        await world.until_drains("r1", "r4")


async def test_a_controller_that_does_not_lead_watches_and_says_nothing_until_it_leads(world: World) -> None:
    kube, fleet = world.kube, world.fleet
    fleet.put("r1", await kube.add_node("first", unschedulable=True))
    fleet.generation = None
    async with world.running() as operator:
        await until_listed(operator, 1)
        await asyncio.sleep(0.8)  # more than a look
        assert await fleet.draining() == set()
        assert (await kube.lease(), await kube.events()) == (None, [])
        asked = len(world.gate.asked)
        fleet.generation = Generation(2, "bbbbbbbbbbbbbbbb")
        await world.until_drains("r1")
        assert not any(a.lists_nodes for a in world.gate.asked[asked:]), "it knew by then"


async def test_a_watch_that_ends_as_agreed_goes_on_without_a_listing_and_misses_nothing(world: World) -> None:
    kube, fleet = world.kube, world.fleet
    nodes = [await kube.add_node(f"n{number}") for number in range(4)]
    for number, node in enumerate(nodes):
        fleet.put(f"r{number}", node)
    async with world.running(watch_s=1) as operator:
        await until_listed(operator, 4)
        for number, node in enumerate(nodes):
            await kube.change_node(node, unschedulable=True)
            await until(of(lambda: operator.figures().watches["agreed"]), partial(lt, number))
        await world.until_drains("r0", "r1", "r2", "r3")
        assert sum(asked.lists_nodes for asked in world.gate.asked) == 1
        assert operator.figures().watches["failed"] == 0


async def test_nodes_are_listed_in_parts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_PAGE", 2)
    for number in range(5):
        world.fleet.put(f"r{number}", await world.kube.add_node(f"n{number}", unschedulable=True))
    async with world.running() as operator:
        await world.until_drains(*(f"r{number}" for number in range(5)))
        assert operator.status().nodes == 5
        assert sum(asked.lists_nodes for asked in world.gate.asked) == 3


async def test_a_connection_that_is_cut_costs_a_listing_and_nothing_is_missed(world: World) -> None:
    kube, fleet = world.kube, world.fleet
    first, second = await kube.add_node("first"), await kube.add_node("second", unschedulable=True)
    fleet.put("r1", first)
    fleet.put("r2", second)
    async with world.running() as operator:
        await world.until_drains("r2")
        world.gate.away = True
        world.gate.cut()
        await kube.change_node(first, unschedulable=True)
        await kube.change_node(second, unschedulable=None)
        await until(of(lambda: operator.figures().watches["failed"]), lambda failed: failed >= 2)
        assert await fleet.draining() == {"r2"}, "nothing changes while nobody answers"
        world.gate.away = False
        await world.until_drains("r1")
        assert operator.status().trouble == ""


async def test_an_api_server_that_is_away_is_seen_to_be_and_is_not_asked_without_pause(world: World) -> None:
    first = await world.kube.add_node("first", unschedulable=True)
    world.fleet.put("r1", first)
    async with world.running(backoff_max_s=0.4) as operator:
        await world.until_drains("r1")
        world.gate.silent = True
        world.gate.cut()
        before = len(world.gate.asked)
        status, _ = await until(of(operator.status), lambda status: (status.heard_s or 0.0) > 3.0 and status.trouble)
        assert "the API server does not answer" in status.trouble
        assert TOKEN not in status.trouble
        # Of the watch and of the lease, each a second of waiting and 0.2 to 0.4 of a pause, the first ones of less.
        assert len(world.gate.asked) - before <= 2 * (3.0 / 1.2 + 6)
        await world.kube.remove_node(first)
        world.gate.silent = False
        world.gate.cut()
        await until_listed(operator, 0)
        await asyncio.sleep(0.6)
        assert await world.fleet.draining() == {"r1"}, "a node that is gone says nothing"


async def test_while_the_api_server_is_silent_the_controllers_loop_goes_on(world: World) -> None:
    world.gate.silent = True
    async with world.running() as operator:
        turns = 0
        while not operator.status().trouble:
            turns += 1
            await asyncio.sleep(0.01)
        # A call takes a second to give up; a loop that waited for it would have made a turn or two.
        assert turns > 30


GONES: dict[str, bytes] = {
    "an answer": answered(410, GONE),
    "an event": watched({"type": "ERROR", "object": GONE}),
}


@pytest.mark.parametrize("gone", GONES.values(), ids=GONES)
async def test_410_costs_a_listing_at_once_and_nothing_is_missed(world: World, gone: bytes) -> None:
    kube, fleet = world.kube, world.fleet
    first = await kube.add_node("first")
    fleet.put("r1", first)
    async with world.running(watch_s=1) as operator:
        await until_listed(operator, 1)
        told = 0

        def once(asked: Asked) -> Answer:
            nonlocal told
            if asked.watches and not told:
                told += 1
                return gone
            return None

        world.gate.answer = once
        await until(of(lambda: operator.figures().watches["gone"]), (1).__eq__)
        await kube.change_node(first, unschedulable=True)
        await world.until_drains("r1")
        assert sum(asked.lists_nodes for asked in world.gate.asked) == 2
        assert operator.figures().watches["failed"] == 0


async def test_a_server_that_always_forgets_or_ends_its_watches_at_once_is_asked_with_pauses(world: World) -> None:
    await world.kube.add_node("first")
    for ending in (
        *GONES.values(),
        watched(),
        answered(500, {}),
        answered(403, {"message": "no"}),
        b"nonsense\r\n\r\n",
    ):
        world.gate.asked.clear()
        world.gate.answer = lambda asked, ending=ending: ending if asked.watches else None  # type: ignore[misc]
        async with world.running(backoff_max_s=0.4):
            await until(of(lambda: sum(asked.watches for asked in world.gate.asked)), lambda watches: watches >= 2)
            before = len(world.gate.asked)
            await asyncio.sleep(1.0)
            # With pauses of 0.2 to 0.4 s once they have grown; each turn lists and watches, and the lease is asked for.
            assert len(world.gate.asked) - before <= 2 * (1.0 / 0.2 + 4) + 4


async def test_an_answer_that_is_cut_off_or_is_none_is_an_error_and_the_next_is_asked_for(world: World) -> None:
    world.fleet.put("r1", await world.kube.add_node("first", unschedulable=True))
    wrong = [b"HTTP/1.1 200 OK\r\n\r\nnot json", answered(200, {"items": 3}), answered(200, {}), answered(503, {})]

    def nonsense(asked: Asked) -> Answer:
        return wrong.pop() if asked.lists_nodes and wrong else None

    world.gate.answer = nonsense
    async with world.running() as operator:
        await world.until_drains("r1")
        assert operator.figures().watches["failed"] == 4
    half = watched({"type": "MODIFIED", "object": {"metadata": {"name": "x"}}})[:-9]
    world.gate.answer = lambda asked: half if asked.watches else None
    async with world.running() as operator:
        await until(of(lambda: operator.status().trouble), lambda said: "in the middle of an event" in said)


# --- the lease ---


async def test_the_lease_is_the_leaders_is_renewed_and_is_given_back(world: World) -> None:
    async with world.running() as operator:
        first, _ = await until(world.kube.lease, bool)
        assert first is not None
        assert first["spec"]["holderIdentity"] == "controller-0_1_aaaaaaaa"
        assert first["spec"]["leaseDurationSeconds"] == 3
        assert first["metadata"]["annotations"]["forebay/generation"] == "1/aaaaaaaaaaaaaaaa"

        async def renewed() -> bool:
            return bool(((await world.kube.lease()) or {})["spec"]["renewTime"] > first["spec"]["renewTime"])

        await until(renewed, bool)
        await until(of(lambda: operator.status().holds_lease), bool)
    ended = await world.kube.lease()
    assert ended is not None
    assert ended["spec"]["holderIdentity"] == ""


async def test_a_successor_has_the_lease_at_once_and_the_older_that_leads_on_writes_nothing(world: World) -> None:
    old, new = world.fleet, Fleet(Generation(2, "bbbbbbbbbbbbbbbb"))
    for fleet in (old, new):
        fleet.put("r1", "elsewhere")
    async with world.running(old) as older:
        await until(of(lambda: older.status().holds_lease), bool)
        await until(world.kube.events, lambda events: len(events) == 1)
        async with world.running(new) as younger:
            await until(of(lambda: younger.status().holds_lease), bool)
            await until(of(lambda: older.status().holds_lease), lambda holds: not holds)
            assert older.status().lease_holder == younger.status().lease_holder == "controller-0_2_bbbbbbbb"
            old.drained[ReplicaId("r1")] = frozenset({DrainedBy.OPERATOR})
            new.drained[ReplicaId("r1")] = frozenset({DrainedBy.OPERATOR})
            events, _ = await until(world.kube.events, lambda events: len(events) == 3)
            await asyncio.sleep(1.0)  # for one that should not come
            assert [e["reason"] for e in await world.kube.events()] == [
                "ControllerLeads",
                "ControllerLeads",
                "DrainBegan",
            ]
            assert events[-1]["reportingInstance"] == "controller-0_2_bbbbbbbb"
            lease = await world.kube.lease()
            assert lease is not None
            assert lease["spec"]["leaseTransitions"] == 1
    # That of a cluster that began anew counts from 1 again: it has the Lease once the one before has let it run out.
    lease["metadata"].pop("resourceVersion")
    await world.kube.put_lease(lease)
    async with world.running(Fleet(Generation(1, "cccccccccccccccc"))) as anew:
        await until(of(lambda: anew.status().lease_holder), "controller-0_2_bbbbbbbb".__eq__)
        assert not anew.status().holds_lease
        await until(of(lambda: anew.status().holds_lease), bool)


async def test_a_lease_that_cannot_be_written_keeps_nobody_from_leading(world: World) -> None:
    world.fleet.put("r1", await world.kube.add_node("first", unschedulable=True))
    world.gate.answer = lambda asked: (
        answered(403, {"message": "leases is forbidden"}) if asked.right[0] == "leases" else None
    )
    async with world.running() as operator:
        await world.until_drains("r1")
        await until(of(lambda: operator.status().trouble), lambda said: "403" in said and "is forbidden" in said)
        assert await world.kube.events() == []
        world.gate.answer = lambda _: None
        events, _ = await until(world.kube.events, lambda events: len(events) == 2)
        assert [event["reason"] for event in events] == ["ControllerLeads", "DrainBegan"]


# --- events ---


async def test_what_happens_is_an_event_that_kubernetes_takes_and_people_understand(
    world: World, tmp_path: Path, kubeconfig: Path
) -> None:
    first = await world.kube.add_node("first")
    world.fleet.put("r1", first)
    world.fleet.put("r2", first)
    world.fleet.scale["m"] = ScaleSeen(2, "")
    async with world.running() as operator:
        await until(world.kube.events, lambda events: len(events) == 1)
        await world.kube.change_node(first, unschedulable=True)
        await until(world.kube.events, lambda events: len(events) == 3)
        world.fleet.scale["m"] = ScaleSeen(3, "a request waits")
        await until(world.kube.events, lambda events: len(events) == 4)
        assert operator.status().events_written == 4
    leads, *drains, scaled = await world.kube.events()
    assert leads["regarding"] | {"namespace": ""} == {
        "apiVersion": "v1", "kind": "Pod", "name": "controller-0", "uid": "uid-c", "namespace": "",
    }  # fmt: skip
    assert {d["regarding"]["name"] for d in drains} == {"pod-r1", "pod-r2"}
    assert all(d["related"]["name"] == first and "it is cordoned" in d["note"] for d in drains)
    assert scaled["note"] == "m: 2 -> 3 replicas wanted: a request waits"


async def test_what_happens_again_is_counted_in_its_event(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(happenings, "TELL_COUNT_S", 0.5)
    first = await world.kube.add_node("first")
    world.fleet.put("r1", first)
    async with world.running() as operator:
        for _ in range(2):
            await world.kube.change_node(first, unschedulable=True)
            await world.until_drains("r1")
            await asyncio.sleep(0.6)  # looks at what has happened lie so far apart
            await world.kube.change_node(first, unschedulable=None)
            await world.until_drains()
            await asyncio.sleep(0.6)
        counted = {"ControllerLeads": None, "DrainBegan": 2, "DrainEnded": 2}

        async def counts() -> dict[str, int | None]:
            return {e["reason"]: e.get("series", {}).get("count") for e in await world.kube.events()}

        await until(counts, counted.__eq__)
        assert operator.status().events_dropped == 0
    assert world.gate.rights() == RIGHTS, "and for all that no other right was used"


async def test_events_that_are_refused_are_counted_and_nothing_else_suffers(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    world.fleet.put("r1", await world.kube.add_node("first", unschedulable=True))
    world.gate.answer = lambda asked: answered(403, {"message": "no events"}) if asked.right[0] == "events" else None
    async with world.running() as operator:
        await world.until_drains("r1")
        await until(of(lambda: operator.status().events_dropped), (2).__eq__)
        assert operator.status().holds_lease
    assert "the Event ControllerLeads is not written: the API server answers 403" in caplog.text
    assert TOKEN not in caplog.text


async def test_an_event_waits_for_an_api_server_that_fails_and_is_written_once(world: World) -> None:
    world.fleet.put("r1", await world.kube.add_node("first", unschedulable=True))
    failures = 3

    def fails(asked: Asked) -> Answer:
        nonlocal failures
        if asked.right[0] == "events" and failures:
            failures -= 1
            return answered(500, {"message": "etcd is slow"}) if failures else b""
        return None

    world.gate.answer = fails
    async with world.running() as operator:
        await until(of(lambda: operator.status().events_written), (2).__eq__)
        assert [event["reason"] for event in await world.kube.events()] == ["ControllerLeads", "DrainBegan"]
        assert operator.status().events_dropped == 0


# --- what is shown ---


async def test_what_a_controller_shows_of_kubernetes_is_in_its_metrics_and_moves(world: World) -> None:
    await world.kube.add_node("first", unschedulable=True)
    registry = CollectorRegistry()
    async with world.running(watch_s=1) as operator:
        registry.register(KubernetesFigures(operator.figures))

        async def shown() -> dict[str, float]:
            text = (await asyncio.to_thread(generate_latest, registry)).decode()
            samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
            return {" ".join([sample.name, *sample.labels.values()]): sample.value for sample in samples}

        agreed = f"{KUBERNETES_WATCHES.name}_total agreed"
        seen, _ = await until(shown, lambda shown: shown[agreed] >= 1 and shown[KUBERNETES_LEASE_HELD.name])
        assert seen[KUBERNETES_NODES_GOING.name] == 1
        assert seen[f"{KUBERNETES_EVENTS.name}_total written"] == 1
        assert seen[f"{KUBERNETES_EVENTS.name}_total dropped"] == 0
        world.gate.away = True
        world.gate.cut()
        failed = f"{KUBERNETES_WATCHES.name}_total failed"
        await until(shown, lambda shown: shown[failed] >= 1 and shown[KUBERNETES_WATCH_AGE.name] > 1.0)
        await until(shown, lambda shown: not shown[KUBERNETES_LEASE_HELD.name])
        world.gate.away = False
        await until(shown, lambda shown: shown[KUBERNETES_WATCH_AGE.name] < 1.0)


# --- access ---


async def test_access_that_is_not_there_is_said_in_one_line_and_is_looked_for_again(
    world: World, tmp_path: Path
) -> None:
    world.fleet.put("r1", await world.kube.add_node("first", unschedulable=True))
    late = tmp_path / "late"
    async with world.running(kubeconfig=late) as operator:
        trouble, _ = await until(of(lambda: operator.status().trouble), bool)
        assert trouble.startswith(f"kubernetes.kubeconfig: {late} is of no use")
        late.write_text("- not: [a kubeconfig")
        await asyncio.sleep(0.3)
        assert operator.status().nodes is None
        late.write_bytes((tmp_path / "kubeconfig").read_bytes())
        await world.until_drains("r1")
    async with world.running(kubeconfig=None) as operator:
        trouble, _ = await until(of(lambda: operator.status().trouble), bool)
        assert trouble.startswith("the pod has no service account's token")


@pytest.mark.filterwarnings("ignore:Unverified HTTPS request")
async def test_over_tls_a_node_that_is_cordoned_is_seen_as_well(world: World, kubeconfig: Path) -> None:
    """As in a cluster: HTTP/2, where the server has it."""
    first = await world.kube.add_node("first")
    world.fleet.put("r1", first)
    async with world.running(kubeconfig=kubeconfig, watch_s=1) as operator:
        await until_listed(operator, 1)
        await until(of(lambda: operator.figures().watches["agreed"]), lambda ended: ended >= 2)
        await world.kube.change_node(first, unschedulable=True)
        await world.until_drains("r1")
        await until(of(lambda: operator.status().events_written), (2).__eq__)
        assert operator.figures().watches["failed"] == 0
