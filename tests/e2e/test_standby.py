"""One controller that leads and one that stands by, each a process, while clients read on: whichever is killed or stops, the
other goes on at once with what it has heard all along, and what it leaves half done is neither lost nor done twice."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.metrics import (
    CONTINUED,
    CONTROLLER_GENERATION,
    CONTROLLER_REFUSED,
    CONTROLLER_STANDBYS,
    ENGINE_DEATHS,
    GATE_SHUT,
    MOVES,
    PROPOSALS,
    REPLICA_RUNNING,
    REPLICAS_READY,
)
from cluster.model import ModelFolder
from tests.e2e.test_faults import KINDS, TOKENS, Heard
from tests.e2e.test_rebalance import ROW_S, STEP_S, all_whole, closed, counts, decided, none_began_anew, opened, profile
from tests.line import read_metric, until
from tests.processes import Cluster, Process, running_cluster
from tests.ray.streams import client_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TAKE_OVER_S = 2.0


@asynccontextmanager
async def cluster_of(model: ModelFolder, folder: Path, routers: int = 1) -> AsyncIterator[Cluster]:
    both = profile({"standby": True})
    async with running_cluster(model, both, folder, step_s=STEP_S, row_s=ROW_S, routers=routers) as cluster:
        await until_stands_by(cluster)
        yield cluster


async def until_stands_by(cluster: Cluster) -> None:
    await until(lambda: cluster.metric(CONTROLLER_STANDBYS), (1.0).__eq__)


async def leads(client: httpx.AsyncClient) -> dict[str, Any]:
    """What the controller that this router follows says; nothing where none answers."""
    status: dict[str, Any] = (await client.get("/status")).raise_for_status().json()
    return status["cluster"] or {}


async def in_charge(cluster: Cluster) -> tuple[int, Process, Process]:
    """The number of the one that leads, it, and the other: on a busy machine the second may have been there first."""
    pid = (await leads(cluster.client))["controller_pid"]
    at = next(place for place, controller in cluster.controllers.items() if controller.pid == pid)
    return at, cluster.controllers[at], cluster.controllers[1 - at]


async def took_over(cluster: Cluster, successor: Process, old: Callable[[], None]) -> dict[str, Any]:
    """Have the old one go; what the new one knows. Asserts that a router has followed it in time: on a busy machine it may
    take as much longer as the router takes to answer."""
    asked_s = [0.0]

    async def generation() -> float:
        began_s = time.monotonic()
        try:
            return await cluster.metric(CONTROLLER_GENERATION)  # a status would wait for one that has stopped
        finally:
            asked_s.append(time.monotonic() - began_s)

    before = await generation()
    old()
    _, waited_s = await until(generation, lambda now: now > before)
    assert waited_s <= TAKE_OVER_S + max(asked_s), (waited_s, asked_s)
    status_of, _ = await until(lambda: leads(cluster.client), lambda now: now.get("controller_pid") == successor.pid)
    return status_of


async def test_what_a_killed_controller_has_begun_is_ended_once_by_the_one_that_stood_by_and_leads_within_2_s(
    tiny_model: ModelFolder, tmp_path: Path
) -> None:
    """One killed while streams move and a replica is drained; then its successor, once another stands by in turn."""
    async with cluster_of(tiny_model, tmp_path) as cluster:
        kinds = {name: kind for name, kind in KINDS.items() if "n" not in kind}
        undisturbed = {name: Heard(cluster.client, max_tokens=TOKENS, **kind) for name, kind in kinds.items()}
        await all_whole(list(undisturbed.values()))
        before = await cluster.metric(MOVES, outcome="moved")
        await closed(cluster, 1)
        streams = [(name, Heard(cluster.client, max_tokens=TOKENS, **kinds[name])) for name in kinds for _ in range(2)]
        await asyncio.gather(*(heard.begun.wait() for _, heard in streams))
        at, first, second = await in_charge(cluster)
        generation = await cluster.metric(CONTROLLER_GENERATION)

        seen = await took_over(cluster, second, first.kill)
        assert [r["report"]["state"] for r in seen["replicas"]].count("draining") == 1, "it is drained still"
        assert len(seen["routers"]) == 1
        await opened(cluster, 1)
        await until(lambda: cluster.metric(PROPOSALS, outcome="moves"), lambda made: made > before)

        await cluster.start_controller(at)
        await until_stands_by(cluster)
        await took_over(cluster, cluster.controllers[at], second.kill)
        await until(lambda: counts(cluster, REPLICA_RUNNING), lambda now: sorted(now) in ([3, 5], [4, 4], [0, 0]))
        await all_whole([heard for _, heard in streams])
        for name, heard in streams:
            assert heard.said() == undisturbed[name].said(), name
        moved = [decision for _, heard in streams for decision in await decided(cluster, heard, "moved")]
        assert await cluster.metric(MOVES, outcome="moved") - before == len(moved) > 0
        await none_began_anew(cluster, [heard for _, heard in streams], len(moved))
        assert await cluster.metric(ENGINE_DEATHS) == 0
        assert await cluster.metric(CONTROLLER_GENERATION) == generation + 2


async def test_a_controller_that_stops_has_a_successor_within_2_s_and_is_refused_everywhere_when_it_wakes_and_stands_by(
    tiny_model: ModelFolder, tmp_path: Path
) -> None:
    async with cluster_of(tiny_model, tmp_path, routers=2) as cluster, client_of(cluster.urls[1]) as other:
        await until(lambda: read_metric(other, REPLICAS_READY), (2.0).__eq__)
        _, first, second = await in_charge(cluster)

        async def shut() -> float:
            return await read_metric(other, GATE_SHUT, priority_class="batch")

        async def refused() -> list[float]:
            return [await read_metric(client, CONTROLLER_REFUSED) for client in (cluster.client, other)]

        async def generations() -> list[float]:
            return [await read_metric(client, CONTROLLER_GENERATION) for client in (cluster.client, other)]

        led = (await generations())[0]
        urgent = [Heard(cluster.client, max_tokens=TOKENS // 2) for _ in range(48)]
        await until(shut, (1.0).__eq__)
        lower = [Heard(other, max_tokens=8, service_tier="flex") for _ in range(2)]
        try:
            await took_over(cluster, second, first.stop)
            await until(shut, (1.0).__eq__, within_s=5)  # by the successor
            assert await refused() == [0, 0]
        finally:
            first.go_on()
        # The gates that it meant to hand out before it has read anything.
        await until(refused, lambda counts: counts[1] > 0, within_s=5)
        await until_stands_by(cluster)
        assert (await leads(cluster.client))["controller_pid"] == second.pid
        await all_whole([*urgent, *lower])
        assert await generations() == [led + 1, led + 1], "nobody has led since"
        assert (await leads(other))["controller_pid"] == second.pid
        assert await cluster.metric(CONTINUED) == 0
