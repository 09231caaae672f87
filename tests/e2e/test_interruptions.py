"""Controller, routers and replicas that stop, die and come back, several at once: no stream loses a token, and order and
capacity are what they were.

Each is a process of its own. What `test_faults.py` asks of one fault is asked here of two that meet.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import httpx
import pytest

from cluster.metrics import CONTINUED, ENGINE_DEATHS, FENCED, GATE_SHUT, IN_FLIGHT, REPLICAS_READY, REQUESTS
from cluster.model import ModelFolder
from deployments.settings import Profile
from tests.e2e.test_faults import PROMPT, Heard, placed
from tests.line import read_metric, until
from tests.process_parts import POISON_ID
from tests.processes import Cluster, ReplicaPart, running_cluster
from tests.ray.streams import client_of

SLOTS = 8
PROFILE = Profile.model_validate(
    {
        "engine": {"slots": SLOTS, "step_token_budget": 256, "blocks": 1024, "max_model_len": 1024},
        "router": {"step_age_limit_s": 600.0},  # steps are held here
        "health": {"hand_back_after_s": 0.5},
    }
)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # replicas start anew in most, seconds each on a busy machine
STEP_S = 0.02
TOKENS = 60


@contextlib.asynccontextmanager
async def running(model: ModelFolder, folder: Path, *, replicas: int = 2, routers: int = 1) -> AsyncIterator[Cluster]:
    async with running_cluster(model, PROFILE, folder, step_s=STEP_S, replicas=replicas, routers=routers) as cluster:
        yield cluster


async def reference(cluster: Cluster, tokens: int = TOKENS) -> str:
    heard = Heard(cluster.client, max_tokens=tokens)
    await heard.task
    return json.dumps(heard.said())


async def begun(client: httpx.AsyncClient, count: int, tokens: int = TOKENS) -> list[Heard]:
    """So many streams, each with a token."""
    streams = [Heard(client, max_tokens=tokens) for _ in range(count)]
    await asyncio.gather(*(heard.begun.wait() for heard in streams))
    return streams


async def all_whole(streams: Sequence[Heard], expected: str) -> None:
    await asyncio.gather(*(heard.task for heard in streams))
    assert {json.dumps(heard.said()) for heard in streams} == {expected}


async def all_used(cluster: Cluster) -> None:
    """Every replica takes new work."""
    streams = await begun(cluster.client, 4 * len(cluster.replicas), tokens=8)
    await asyncio.gather(*(heard.task for heard in streams))
    where = {(await placed(cluster, heard))[0] for heard in streams}
    assert where == {replica.replica_id for replica in cluster.replicas}


async def test_a_replica_that_dies_with_the_controller_and_returns_by_its_old_name_is_used_again(
    tiny_model: ModelFolder, tmp_path: Path
) -> None:
    async with running(tiny_model, tmp_path) as cluster:
        expected = await reference(cluster)
        streams = await begun(cluster.client, 8)
        _, victim = cluster.replicas
        cluster.controller.kill()
        cluster.kill(victim)
        streams += await begun(cluster.client, 4)
        await cluster.start_controller()
        await cluster.start_replica(victim.replica_id)
        await cluster.until_ready(2)
        await all_whole(streams, expected)
        await all_used(cluster)


async def test_of_a_replica_that_is_killed_twice_within_a_second_one_stream_at_most_is_blamed_and_no_other_is_touched(
    tiny_model: ModelFolder, tmp_path: Path
) -> None:
    """Its successor by the same name is killed as soon as it has work: from within, that is a request that kills."""
    async with running(tiny_model, tmp_path, replicas=1) as cluster:
        expected = await reference(cluster)
        streams = await begun(cluster.client, 4)
        (first,) = cluster.replicas
        cluster.kill(first)
        second = await cluster.start_replica(first.replica_id)
        await until(lambda: cluster.metric(REPLICAS_READY), bool)
        cluster.kill(second)
        await cluster.start_replica(first.replica_id)
        await asyncio.gather(*(heard.task for heard in streams))
        blamed = [heard for heard in streams if heard.errors]
        assert [heard.errors[0]["code"] for heard in blamed] in ([], ["quarantined"])
        await all_whole([heard for heard in streams if heard not in blamed], expected)


async def test_streams_whose_replicas_are_all_killed_wait_for_new_ones_and_end_whole(
    tiny_model: ModelFolder, tmp_path: Path
) -> None:
    async with running(tiny_model, tmp_path) as cluster:
        expected = await reference(cluster)
        streams = await begun(cluster.client, 12)
        for replica in list(cluster.replicas):
            cluster.kill(replica)
        await until(lambda: cluster.metric(REPLICAS_READY), (0.0).__eq__)
        await asyncio.gather(cluster.start_replica(), cluster.start_replica())
        await all_whole(streams, expected)
        await cluster.until_ready(2)
        await all_used(cluster)


@pytest.mark.parametrize("moment", ["while it drains", "while it hands back"])
async def test_a_replica_killed_on_its_way_out_costs_its_streams_nothing_and_makes_no_suspect(
    tiny_model: ModelFolder, tmp_path: Path, moment: str
) -> None:
    async with running(tiny_model, tmp_path) as cluster:
        expected = await reference(cluster)
        leaving, staying = cluster.replicas
        for replica in cluster.replicas:
            await replica.hold(len(PROMPT) + 30)
        streams = await begun(cluster.client, 2 * SLOTS)  # no other has room for what leaves
        await leaving.drain()
        await cluster.until_ready(1)
        if moment == "while it hands back":
            await until(lambda: cluster.metric(CONTINUED), bool)
        cluster.kill(leaving)
        await staying.hold(None)
        await all_whole(streams, expected)
        assert await cluster.metric(ENGINE_DEATHS) == 0
        assert await cluster.metric(REQUESTS, outcome="finished") == 1 + len(streams)


@pytest.mark.parametrize("stopped_s", [1.5, 6.0])
async def test_a_router_that_stops_for_a_while_goes_on_with_every_stream_where_it_was_and_holds_no_other_up(
    tiny_model: ModelFolder, tmp_path: Path, stopped_s: float
) -> None:
    """Its links stay up: nothing of its work is ended or begun anew, though it is away for longer than an orphan lives."""
    tokens = round((stopped_s + 4.0) / STEP_S)  # streams outlast it
    async with running(tiny_model, tmp_path, routers=2) as cluster, client_of(cluster.urls[1]) as second:
        await until(lambda: read_metric(second, REPLICAS_READY), (2.0).__eq__)
        expected = await reference(cluster, tokens)
        streams = await begun(cluster.client, 4, tokens)
        for _ in range(16):  # its demand, of more than there are slots, is in force when it stops
            streams.append(Heard(cluster.client, max_tokens=tokens))
        await until(lambda: read_metric(second, GATE_SHUT, priority_class="batch"), (1.0).__eq__)
        cluster.routers[0].stop()
        try:
            lower = [Heard(second, max_tokens=8, service_tier="flex") for _ in range(2)]
            open_s = (await until(lambda: read_metric(second, GATE_SHUT, priority_class="batch"), (0.0).__eq__))[1]
            await asyncio.sleep(stopped_s - min(open_s, stopped_s))
        finally:
            cluster.routers[0].go_on()
        assert open_s <= 1.5, "its demand counts for half a second, and the gate that it made for as long"
        await all_whole(streams, expected)
        await asyncio.gather(*(heard.task for heard in lower))
        assert [await cluster.metric(metric) for metric in (CONTINUED, ENGINE_DEATHS)] == [0, 0]
        assert await cluster.metric(FENCED) == 0
        assert await cluster.metric(REQUESTS, outcome="finished") == 1 + len(streams)


async def test_a_controller_that_stops_for_a_while_shuts_nobody_out_and_then_hands_out_gates_again(
    tiny_model: ModelFolder, tmp_path: Path
) -> None:
    async with running(tiny_model, tmp_path, routers=2) as cluster, client_of(cluster.urls[1]) as second:
        await until(lambda: read_metric(second, REPLICAS_READY), (2.0).__eq__)
        expected = await reference(cluster)

        async def shut() -> float:
            return await read_metric(second, GATE_SHUT, priority_class="batch")

        urgent = [Heard(cluster.client, max_tokens=TOKENS) for _ in range(96)]
        await until(shut, (1.0).__eq__)
        lower = [Heard(second, max_tokens=TOKENS, service_tier="flex") for _ in range(4)]
        cluster.controller.stop()
        try:
            _, open_s = await until(shut, (0.0).__eq__, within_s=5)
            await asyncio.sleep(2.0 - min(open_s, 2.0))
        finally:
            cluster.controller.go_on()
        assert open_s <= 1.5
        assert any(not heard.done for heard in urgent)
        _, shut_s = await until(shut, (1.0).__eq__, within_s=5)
        assert shut_s <= 1.0
        await all_whole(urgent, expected)
        await asyncio.gather(*(heard.task for heard in lower))
        assert await cluster.metric(CONTINUED) == 0
        await until(lambda: read_metric(second, IN_FLIGHT), (0.0).__eq__, within_s=5)  # a gauge is set twice a second


@contextlib.asynccontextmanager
async def replaced(cluster: Cluster) -> AsyncIterator[list[str]]:
    """Replicas that die are replaced by one of their name, as Serve does it; yields who has died so far."""
    deaths: list[str] = []

    async def watch(replica: ReplicaPart) -> None:
        while True:
            await replica.ended()
            deaths.append(replica.replica_id)
            cluster.replicas.remove(replica)
            replica = await cluster.start_replica(replica.replica_id)

    watching = [asyncio.create_task(watch(replica)) for replica in cluster.replicas]
    try:
        yield deaths
    finally:
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)


async def test_prompts_that_kill_their_engines_at_two_routers_at_once_end_in_a_500_each_and_no_bystander_is_blamed(
    tiny_model: ModelFolder, tmp_path: Path
) -> None:
    async with (
        running(tiny_model, tmp_path, replicas=3, routers=2) as cluster,
        client_of(cluster.urls[1]) as second,
        replaced(cluster) as deaths,
    ):
        await until(lambda: read_metric(second, REPLICAS_READY), (3.0).__eq__)
        expected = await reference(cluster)
        bystanders = [*await begun(cluster.client, 6), *await begun(second, 6)]
        poisons = [Heard(client, prompt=[POISON_ID, *PROMPT]) for client in (cluster.client, second)]
        await asyncio.gather(*(heard.task for heard in poisons))
        assert [(heard.status, heard.events[0]["error"]["code"]) for heard in poisons] == [(500, "quarantined")] * 2
        await all_whole(bystanders, expected)
        print(f"[interruptions] two poisons at two routers: {len(deaths)} engines died of them")
        assert len(deaths) <= 2 * (2 * 2 + 1)


async def test_a_prompt_that_kills_its_engine_asked_for_three_choices_ends_in_one_500_and_bystanders_are_whole(
    tiny_model: ModelFolder, tmp_path: Path
) -> None:
    """Each choice kills: three poisons, of which the first that is found ends all."""
    async with running(tiny_model, tmp_path, replicas=3) as cluster, replaced(cluster) as deaths:
        expected = await reference(cluster)
        bystanders = await begun(cluster.client, 12)
        poison = Heard(cluster.client, prompt=[POISON_ID, *PROMPT], n=3)
        await poison.task
        assert poison.status == 500
        await all_whole(bystanders, expected)
        print(f"[interruptions] poison asked for three choices: {len(deaths)} engines died of it")
        assert len(deaths) <= 3 * (2 * 3 + 1)
