"""Real replicas, routers and controllers on nodes of a real API server: what becomes of a node there becomes of its replica
here, and its streams never notice."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from cluster.config import ControlConfig, EngineConfig, HealthConfig, KubernetesConfig
from cluster.metrics import CONTINUED, MOVES
from cluster.model import ModelFolder
from deployments.settings import ModelConfig, Profile
from tests.kubernetes.conftest import Kube
from tests.line import until
from tests.processes import Cluster, running_cluster
from tests.ray.streams import Reader, body
from tests.unit.test_explain import forebay

pytestmark = [pytest.mark.alone, pytest.mark.timeout(240)]

STEP_S = 0.04


@contextlib.asynccontextmanager
async def on_two_nodes(
    model: ModelFolder, folder: Path, kube: Kube, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Cluster]:
    """Two controllers, and a replica on each of the nodes `first` and `second`."""
    profile = Profile(
        models=(ModelConfig(engine=EngineConfig(slots=16, blocks=512, max_model_len=512)),),
        health=HealthConfig(hand_back_after_s=0.3),
        control=ControlConfig(standby=True),
        kubernetes=KubernetesConfig(
            kubeconfig=kubeconfig,
            namespace=kube.namespace,
            nodes=kube.selector,
            return_after_s=0.2,
            watch_s=5,
            lease_s=3,
        ),
    )
    for name in ("first", "second"):
        await kube.add_node(name)
    monkeypatch.setenv("FOREBAY_NODE", kube.node("first"))
    monkeypatch.setenv("FOREBAY_POD", "pod-of-first")
    async with running_cluster(model, profile, folder, step_s=STEP_S, replicas=1) as cluster:
        monkeypatch.setenv("FOREBAY_NODE", kube.node("second"))
        monkeypatch.setenv("FOREBAY_POD", "pod-of-second")
        await cluster.start_replica()
        await cluster.until_ready(2)
        yield cluster


async def controller_status(cluster: Cluster) -> dict[str, Any]:
    """What the one that leads says; nothing while none does."""
    status: dict[str, Any] = (await cluster.client.get("/status")).raise_for_status().json()
    return status["cluster"] or {}


async def until_leads_with_the_lease(cluster: Cluster, kube: Kube, after: int = 0) -> int:
    """Wait until a controller of a later generation than `after` leads, and the Lease says so. Returns its generation."""

    async def both() -> tuple[int, str]:
        leads = (await controller_status(cluster)).get("controller_generation", {"number": 0})["number"]
        lease = await kube.lease() or {"spec": {}}
        return leads, lease["spec"].get("holderIdentity") or ""

    (leads, _), _ = await until(both, lambda seen: seen[0] > after and f"_{seen[0]}_" in seen[1])
    return leads


async def on(cluster: Cluster, replica_id: str) -> int:
    """Requests that are on a replica."""
    (replica,) = [r for r in (await controller_status(cluster))["replicas"] if r["entry"]["replica_id"] == replica_id]
    load = replica["report"]["load"]
    return sum(level["requests"] for part in ("running", "waiting") for level in load[part])


async def whole(readers: list[Reader], text: str) -> None:
    await asyncio.gather(*(reader.task for reader in readers))
    assert [(r.errors, r.done, r.text == text) for r in readers] == [([], True, True)] * len(readers)


async def test_a_cordoned_nodes_streams_go_elsewhere_and_its_replica_works_again_whoever_leads(
    tiny_model: ModelFolder,
    tmp_path: Path,
    kube: Kube,
    kubeconfig: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with on_two_nodes(tiny_model, tmp_path, kube, kubeconfig, monkeypatch) as cluster:
        second, fields = kube.node("second"), body(max_tokens=120)
        undisturbed = Reader(cluster.client, fields)
        await undisturbed.task
        leads = await until_leads_with_the_lease(cluster, kube)

        readers = [Reader(cluster.client, fields) for _ in range(8)]
        await asyncio.gather(*(reader.begun.wait() for reader in readers))
        await until(lambda: on(cluster, "replica-1"), bool)
        await kube.change_node(second, unschedulable=True)
        await cluster.until_ready(1)
        await until(lambda: on(cluster, "replica-1"), (0).__eq__)
        await whole(readers, undisturbed.text)
        left = await cluster.metric(CONTINUED) + await cluster.metric(MOVES)
        assert left > 0, "some had to leave before they were done"

        async def said() -> set[tuple[str, str, str]]:
            events = await kube.events()
            return {(e["reason"], e["regarding"]["name"], e.get("related", {}).get("name", "")) for e in events}

        await until(said, lambda seen: ("DrainBegan", "pod-of-second", second) in seen)
        code, out, _ = await forebay(capsys, "status", "--url", cluster.url)
        assert code == 0
        assert "Kubernetes 2 nodes, last heard" in out
        assert "holds the Lease" in out
        assert f"{second} is about to go: it is cordoned (spec.unschedulable)" in out
        assert "draining (node)" in " ".join(out.split())

        await kube.change_node(second, unschedulable=None)
        await cluster.until_ready(2)
        await until(said, lambda seen: ("DrainEnded", "pod-of-second", second) in seen)
        readers = [Reader(cluster.client, fields) for _ in range(8)]
        await asyncio.gather(*(reader.begun.wait() for reader in readers))
        await until(lambda: on(cluster, "replica-1"), bool)  # it takes work again

        pid = (await controller_status(cluster))["controller_pid"]
        (old,) = [controller for controller in cluster.controllers.values() if controller.pid == pid]
        old.kill()
        await until_leads_with_the_lease(cluster, kube, leads)
        await kube.change_node(second, unschedulable=True)
        await cluster.until_ready(1)
        await whole(readers, undisturbed.text)
        leaders = [e["note"] for e in await kube.events() if e["reason"] == "ControllerLeads"]
        assert leaders[0] == f"this controller leads, as generation {leads}"
        assert len(leaders) == 2


async def test_an_operators_drain_outlives_the_nodes_and_a_node_is_drained_by_hand_by_its_name(
    tiny_model: ModelFolder, tmp_path: Path, kube: Kube, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with on_two_nodes(tiny_model, tmp_path, kube, kubeconfig, monkeypatch) as cluster:
        second = kube.node("second")

        async def drained_by() -> list[str]:
            return next(
                r["drained_by"] for r in (await controller_status(cluster))["replicas"] if r["entry"]["node"] == second
            )

        told = (await cluster.client.put(f"/drain/{second}")).json()
        assert told == {"draining": True, "replica_ids": ["replica-1"]}
        await kube.change_node(second, unschedulable=True)
        await until(drained_by, ["node", "operator"].__eq__)
        await kube.change_node(second, unschedulable=None)
        await until(drained_by, ["operator"].__eq__)
        await cluster.until_ready(1)
        await kube.change_node(second, taints=[{"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"}])
        await until(drained_by, ["node", "operator"].__eq__)
        await cluster.client.delete(f"/drain/{second}")
        await until(drained_by, ["node"].__eq__)
        await cluster.until_ready(1)
        # A replica that is new on such a node drains as soon as it is heard of.
        (there,) = [replica for replica in cluster.replicas if replica.replica_id == "replica-1"]
        cluster.kill(there)
        await cluster.start_replica("replica-1")
        await until(drained_by, ["node"].__eq__)
