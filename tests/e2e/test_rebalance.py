"""What the controller has leave a replica, while clients read on: skewed load is evened out, what waits is served where
there is room, and a large urgent request is given a place that no replica had.

Controller, router and replicas are processes of their own, and a step takes longer the more run in it. Load is skewed by
draining one replica until the other has all of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cluster.metrics import (
    CONTINUED,
    ENGINE_DEATHS,
    MOVES,
    PREEMPTIONS,
    PROPOSALS,
    REPLICA_RUNNING,
    REPLICA_WAITING,
    REQUESTS,
)
from cluster.model import ModelFolder
from deployments.settings import Profile
from tests.e2e.test_faults import KINDS, PROMPT, Heard, explained
from tests.e2e.test_move_faults import loads
from tests.line import until
from tests.processes import Cluster, running_cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STEP_S, ROW_S = 0.005, 0.004
SLOW_ROW_S = 0.06
TOKENS = 250
BLOCKS = 48


def profile(control: dict[str, Any], **engine: Any) -> Profile:
    return Profile.model_validate(
        {
            "engine": {"slots": 8, "step_token_budget": 256, "blocks": 1024, "max_model_len": 768, **engine},
            "router": {"minimum_share": 0.0, "affinity_weight": 0.0, "step_age_limit_s": 600.0},  # steps are held here
            "health": {"hand_back_after_s": 60.0},
            "control": control,
        }
    )


@asynccontextmanager
async def cluster_of(model: ModelFolder, folder: Path) -> AsyncIterator[Cluster]:
    async with running_cluster(model, profile({}), folder, step_s=STEP_S, row_s=ROW_S) as cluster:
        yield cluster


@asynccontextmanager
async def small_cluster_of(model: ModelFolder, folder: Path, slots: int) -> AsyncIterator[Cluster]:
    """Few run, for some seconds, where they are: nobody gains enough by being elsewhere."""
    settled = profile({"move_value_s": 1000.0}, slots=slots, blocks=BLOCKS, host_blocks=0)
    async with running_cluster(model, settled, folder, step_s=STEP_S, row_s=SLOW_ROW_S) as cluster:
        yield cluster


async def closed(cluster: Cluster, number: int) -> None:
    """A replica gets nothing new until it is `opened`."""
    (await cluster.client.put(f"/drain/{cluster.replicas[number].replica_id}")).raise_for_status()
    await cluster.until_ready(len(cluster.replicas) - 1)


async def opened(cluster: Cluster, number: int) -> None:
    (await cluster.client.delete(f"/drain/{cluster.replicas[number].replica_id}")).raise_for_status()
    await cluster.until_ready(len(cluster.replicas))


async def counts(cluster: Cluster, metric: Any) -> list[float]:
    """Of each replica."""
    return [await cluster.metric(metric, replica=replica.replica_id) for replica in cluster.replicas]


async def running_by_report(cluster: Cluster) -> list[int]:
    """On each replica, as the controller has heard."""
    told = await loads(cluster.client)
    return [sum(level["requests"] for level in load["running"]) for load in told.values()]


async def decided(cluster: Cluster, heard: Heard, event: str) -> list[dict[str, Any]]:
    return [d for d in (await explained(cluster, heard))["decisions"] if d["event"] == event]


async def none_began_anew(cluster: Cluster, streams: Sequence[Heard], moves: int) -> None:
    """Each went to one place at a time. On a busy machine a move may be called off, which takes up to two attempts."""
    attempts = [(await explained(cluster, heard))["attempts"] for heard in streams]
    off = [d for heard in streams for event in ("stays", "returned") for d in await decided(cluster, heard, event)]
    assert 0 <= sum(attempts) - len(streams) - moves <= 2 * len(off)


async def all_whole(heard: Sequence[Heard]) -> None:
    await asyncio.gather(*(one.task for one in heard))
    for one in heard:
        one.said()


def outputs(heard: Sequence[Heard]) -> list[Any]:
    """All that each said, but for how much of its prompt was found in a cache."""
    return [one.said()[0] for one in heard]


def prompt(tokens: int, first: int) -> list[int]:
    """Prompts that have nothing in common."""
    return [first + (17 * k) % 100 for k in range(tokens)]


async def test_skewed_load_is_evened_out_also_by_the_successor_of_a_controller_that_is_killed_meanwhile(
    tiny_model: ModelFolder, tmp_path: Path
) -> None:
    async with cluster_of(tiny_model, tmp_path) as cluster:
        kinds = {name: kind for name, kind in KINDS.items() if "n" not in kind}
        undisturbed = {name: Heard(cluster.client, max_tokens=TOKENS, **kind) for name, kind in kinds.items()}
        await all_whole(list(undisturbed.values()))
        before = await cluster.metric(MOVES, outcome="moved")
        await closed(cluster, 1)
        streams = [(name, Heard(cluster.client, max_tokens=TOKENS, **kinds[name])) for name in kinds for _ in range(2)]
        await asyncio.gather(*(heard.begun.wait() for _, heard in streams))
        await opened(cluster, 1)
        assert await counts(cluster, REPLICA_RUNNING) == [len(streams), 0]
        await until(lambda: cluster.metric(PROPOSALS, outcome="moves"), lambda made: made > before)
        cluster.controller.kill()
        await asyncio.gather(*(replica.hold(0) for replica in cluster.replicas))
        await cluster.start_controller()
        await asyncio.gather(*(replica.hold(None) for replica in cluster.replicas))
        await until(lambda: counts(cluster, REPLICA_RUNNING), lambda now: sorted(now) in ([3, 5], [4, 4]))
        await all_whole([heard for _, heard in streams])
        for name, heard in streams:
            assert heard.said() == undisturbed[name].said(), name
            assert heard.logprobs() == pytest.approx(undisturbed[name].logprobs(), abs=1e-3)
        moved = [decision for _, heard in streams for decision in await decided(cluster, heard, "moved")]
        assert await cluster.metric(MOVES, outcome="moved") - before == len(moved) >= 3
        assert all(d["numbers"]["gain_s"] > 0 and "it runs sooner" in d["why"] for d in moved)
        await none_began_anew(cluster, [heard for _, heard in streams], len(moved))
        assert [await cluster.metric(metric) for metric in (CONTINUED, ENGINE_DEATHS)] == [0, 0]
        assert await cluster.metric(REQUESTS, outcome="finished") == len(streams) + len(undisturbed)


async def test_what_waits_on_a_full_replica_is_served_by_one_that_has_room(
    tiny_model: ModelFolder, tmp_path: Path
) -> None:
    """One whose blocks were taken goes back to the queue and is begun there; one that has kept them moves with them."""
    waiting = (
        {"prompt": prompt(300, 100), "max_tokens": 40, "temperature": 1, "seed": 3, "service_tier": "flex"},
        {"prompt": prompt(40, 300), "max_tokens": 40, "temperature": 1, "seed": 4, "service_tier": "default"},
    )
    async with small_cluster_of(tiny_model, tmp_path, slots=2) as cluster:
        undisturbed = [Heard(cluster.client, **kind) for kind in waiting]
        await all_whole(undisturbed)
        await closed(cluster, 1)
        low, kept = (Heard(cluster.client, **kind) for kind in waiting)
        await asyncio.gather(low.begun.wait(), kept.begun.wait())
        urgent = {"service_tier": "priority", "max_tokens": 80}
        above = [Heard(cluster.client, prompt=prompt(tokens, 500), **urgent) for tokens in (520, 8)]
        await asyncio.gather(*(one.begun.wait() for one in above))
        await until(lambda: counts(cluster, REPLICA_WAITING), [2, 0].__eq__)
        await opened(cluster, 1)
        await all_whole([low, kept, *above])
        assert outputs([low, kept]) == outputs(undisturbed)
        assert await cluster.metric(PREEMPTIONS, means="recompute") == 1
        (called,) = await decided(cluster, low, "called_back")
        (moved,) = await decided(cluster, kept, "moved")
        assert "it waits on" in called["why"]
        assert "it waits on" in moved["why"]
        assert await cluster.metric(CONTINUED, reason="called_back") == await cluster.metric(CONTINUED) == 1
        assert await cluster.metric(MOVES, outcome="moved") == 1


async def test_a_large_urgent_request_that_fits_nowhere_is_given_a_place_by_moving_and_parking_others(
    tiny_model: ModelFolder, tmp_path: Path
) -> None:
    """Each replica of 48 blocks has two requests as urgent as itself that take 15 each, and it needs 30. One has a less
    urgent one too, so that only the other has room for one of those four."""
    urgent = {"service_tier": "priority", "temperature": 1}
    equal = [{**urgent, "prompt": prompt(200, 100 * n), "max_tokens": 40, "seed": n} for n in range(1, 5)]
    lower = {"prompt": prompt(40, 550), "max_tokens": 40, "temperature": 1, "seed": 5, "service_tier": "flex"}
    large = {**urgent, "prompt": prompt(460, 600), "max_tokens": 20, "seed": 6}
    async with small_cluster_of(tiny_model, tmp_path, slots=8) as cluster:
        undisturbed = [Heard(cluster.client, **kind) for kind in (*equal, lower)]
        await all_whole(undisturbed)
        undisturbed.append(Heard(cluster.client, **large))
        await all_whole(undisturbed)
        streams = [Heard(cluster.client, **kind) for kind in equal]  # each goes to where least is
        await asyncio.gather(*(one.begun.wait() for one in streams))
        for kind in (lower, large):
            streams.append(Heard(cluster.client, **kind))
            await streams[-1].begun.wait()
        assert not any(one.done for one in streams), "it did not wait for the end of any"
        await all_whole(streams)
        assert outputs(streams) == outputs(undisturbed)
        moved = [d for one in streams[:4] for d in await decided(cluster, one, "moved")]
        assert len(moved) == 1, "one of those that are as urgent makes room for it, and none of them is parked"
        assert "makes room" in moved[0]["why"]
        # It goes back to the queue; where that one had moved before it did, the large one is let in beside it at once, and it
        # gives way there when they have grown too large for the pool, if it has not ended.
        called = await decided(cluster, streams[4], "called_back")
        assert all("makes room" in one["why"] for one in called)
        assert await cluster.metric(CONTINUED, reason="called_back") == await cluster.metric(CONTINUED) == len(called)
        gave_way = called + await decided(cluster, streams[4], "preempted")
        assert len(gave_way) <= 1, "one way or the other"


async def test_under_even_load_nothing_is_proposed(tiny_model: ModelFolder, tmp_path: Path) -> None:
    """From when the controller has seen all of it, and until the first ends: on a busy machine it may hear of one replica's
    half before the other's, and one may be a second behind the other at the end."""
    async with cluster_of(tiny_model, tmp_path) as cluster:
        streams = [Heard(cluster.client, prompt=[*PROMPT, 100 + n], max_tokens=TOKENS) for n in range(12)]
        await asyncio.gather(*(heard.begun.wait() for heard in streams))
        await until(lambda: running_by_report(cluster), [6, 6].__eq__)
        seen: list[list[float]] = []
        while True:
            told = [await cluster.metric(metric) for metric in (PROPOSALS, MOVES, CONTINUED)]
            if any(heard.done for heard in streams):
                break
            seen.append(told)
            await asyncio.wait([heard.task for heard in streams], timeout=0.05, return_when=asyncio.FIRST_COMPLETED)
        assert len(seen) > 10
        assert seen == seen[:1] * len(seen)
        await all_whole(streams)
        assert await cluster.metric(CONTINUED) == 0, "neither before nor after"
        began = [d["replica"] for one in streams for d in await decided(cluster, one, "dispatched")]
        assert [began.count(replica.replica_id) for replica in cluster.replicas] == [6, 6]
