"""Live moves in which something dies, stops, ends, leaves or finds no room: no stream loses a token, and nothing is kept.

Controller, router and replicas are processes of their own. All streams run on the one replica that there is when they
begin; another comes, and the first is drained. A stage of the moves is held by holding an engine before a call that it
is made of (tests/process_parts.py), so that each fault hits its stage on any machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.metrics import CONTINUED, MOVES, PREEMPTIONS, REQUESTS
from cluster.model import ModelFolder
from deployments.settings import Profile
from tests.e2e.test_faults import PROMPT, Heard, explained
from tests.line import until
from tests.process_parts import MoveCall
from tests.processes import Cluster, ReplicaPart, running_cluster
from tests.ray.streams import client_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

STEP_S = 0.02
TOKENS = 160
HELD_AT = 60
"""So many tokens each has when the first replica is drained."""
STREAMS = 4
SETTLED_S = 10.0
"""Whatever becomes of a move, nothing of it is kept anywhere for longer."""
ENGINE = {"slots": 8, "step_token_budget": 256, "blocks": 256, "max_model_len": 1024}
PROFILE: dict[str, Any] = {
    "engine": ENGINE,
    "router": {"step_age_limit_s": 600.0, "move_timeout_s": 60.0, "move_taken_s": 60.0},
    "health": {"hand_back_after_s": 120.0, "drain_timeout_s": 300.0},
    "transport": {"move_answer_s": 60.0, "move_expiry_s": 60.0},  # a held stage lasts until the test lets go
}
PROMPT_TOKENS = 200
"""Long enough that keys and values travel before the request is frozen."""


def prompt(number: int) -> list[int]:
    """Of a stream: none shares a block with another's."""
    return [100 + number, *(PROMPT * (PROMPT_TOKENS // len(PROMPT)))]


def body_of(number: int) -> dict[str, Any]:
    """Greedy, seeded and with logprobs in turn."""
    kind = ({}, {"temperature": 1, "seed": 5}, {"temperature": 1, "seed": 3, "logprobs": 2})[number % 3]
    return {"prompt": prompt(number), "max_tokens": TOKENS} | kind


def all_said(heard: Heard) -> str:
    """What can be compared between runs: how much of a prompt was found in a cache cannot."""
    said = heard.said()
    said["usage"] = [usage["completion_tokens"] for usage in said["usage"]]
    return json.dumps(said)


class Moving:
    """Streams on a replica, `source`, that is about to be drained, and an idle one that they can move to."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.source, self.target = cluster.replicas
        self.streams: list[Heard] = []
        self.expected: list[str] = []

    async def drain(self, *replicas: ReplicaPart) -> None:
        """Returns when the router has heard that they take nothing new; then they go on."""
        for replica in replicas:
            (await self.cluster.client.put(f"/drain/{replica.replica_id}")).raise_for_status()
        await self.cluster.until_ready(len(self.cluster.replicas) - len(replicas))
        for replica in replicas:
            await replica.hold(None)

    async def all_whole(self, streams: Sequence[Heard] = ()) -> None:
        await asyncio.gather(*(heard.task for heard in self.streams))
        for heard, expected in zip(self.streams, self.expected, strict=True):
            assert all_said(heard) == expected

    async def events(self) -> list[list[str]]:
        """What the router decided about each stream, in order."""
        told = await asyncio.gather(*(explained(self.cluster, heard) for heard in self.streams))
        return [[decision["event"] for decision in one["decisions"]] for one in told]


@contextlib.asynccontextmanager
async def running(
    model: ModelFolder, folder: Path, *, streams: int = STREAMS, routers: int = 1, **changes: Any
) -> AsyncIterator[Moving]:
    profile = Profile.model_validate(PROFILE | changes)
    async with running_cluster(model, profile, folder, step_s=STEP_S, replicas=1, routers=routers) as cluster:
        undisturbed = [Heard(cluster.client, **body_of(number)) for number in range(streams)]
        await asyncio.gather(*(heard.task for heard in undisturbed))
        expected = [all_said(heard) for heard in undisturbed]
        (source,) = cluster.replicas
        await source.hold(PROMPT_TOKENS + 1 + HELD_AT)
        begun = [Heard(cluster.client, **body_of(number)) for number in range(streams)]
        starting = asyncio.create_task(cluster.start_replica())
        await asyncio.gather(*(heard.begun.wait() for heard in begun))
        await starting
        await cluster.until_ready(2)
        moving = Moving(cluster)
        moving.streams, moving.expected = begun, expected
        yield moving


@contextlib.asynccontextmanager
async def held(moving: Moving, replica: ReplicaPart, call: MoveCall) -> AsyncIterator[None]:
    """The source is drained, and `replica` stands before such a call of the first move that comes to it."""
    await replica.hold_moves(call)
    await moving.drain(moving.source)
    await replica.until_move_held()
    yield


async def loads(client: httpx.AsyncClient) -> dict[str, dict[str, Any]]:
    """What each replica has reported to the controller; nothing where there is none."""
    told = (await client.get("/status")).json()["cluster"]
    replicas = told["replicas"] if told else ()
    return {one["entry"]["replica_id"]: one["report"]["load"] for one in replicas if one["report"]}


def is_idle(load: dict[str, Any]) -> bool:
    """Nothing runs or is held: what is cached counts as free."""
    return not load["running"] and not load["waiting"] and load["blocks_free"] == load["blocks_total"]


def replica_is_idle(replica_id: str, reported: dict[str, dict[str, Any]]) -> bool:
    return is_idle(reported[replica_id])


async def nothing_is_kept(cluster: Cluster, client: httpx.AsyncClient | None = None) -> None:
    """On any replica that lives. A router that lives is asked by `client`."""

    def holds(reported: dict[str, dict[str, Any]]) -> bool:
        return all(r.replica_id in reported and is_idle(reported[r.replica_id]) for r in cluster.replicas)

    await until(lambda: loads(client or cluster.client), holds, within_s=SETTLED_S)


# --- the source dies ---


@pytest.mark.parametrize(
    ("side", "call"),
    [("target", "import_begin"), ("target", "import_blocks"), ("source", "freeze"), ("source", "export_rest")],
)
async def test_a_source_killed_before_it_has_told_that_all_is_sent_costs_its_streams_nothing(
    tiny_model: ModelFolder, tmp_path: Path, side: str, call: MoveCall
) -> None:
    async with running(tiny_model, tmp_path) as moving:
        async with held(moving, moving.source if side == "source" else moving.target, call):
            moving.cluster.kill(moving.source)
        await moving.target.hold_moves(None)
        await moving.all_whole()
        await nothing_is_kept(moving.cluster)


async def test_a_source_killed_while_its_router_has_the_target_begin_costs_its_streams_nothing(
    tiny_model: ModelFolder, tmp_path: Path
) -> None:
    """All is sent and granted: they are the target's."""
    async with running(tiny_model, tmp_path) as moving:
        async with held(moving, moving.target, "import_commit"):
            moving.cluster.kill(moving.source)
        await moving.target.hold_moves(None)
        await moving.all_whole()
        await nothing_is_kept(moving.cluster)


# --- the target dies, or stops ---


@pytest.mark.parametrize("call", ["import_begin", "import_blocks"])
async def test_a_target_killed_before_the_grant_leaves_its_streams_running_where_they_are(
    tiny_model: ModelFolder, tmp_path: Path, call: MoveCall
) -> None:
    async with running(tiny_model, tmp_path) as moving:
        async with held(moving, moving.target, call):
            moving.cluster.kill(moving.target)
        await moving.all_whole()
        assert await moving.cluster.metric(CONTINUED) == 0, "none was begun anew"
        assert await moving.cluster.metric(MOVES, outcome="moved") == 0
        await nothing_is_kept(moving.cluster)


async def test_a_target_killed_after_the_grant_costs_its_streams_nothing_and_makes_no_suspect(
    tiny_model: ModelFolder, tmp_path: Path
) -> None:
    async with running(tiny_model, tmp_path) as moving:
        async with held(moving, moving.target, "import_commit"):
            moving.cluster.kill(moving.target)
        await moving.cluster.start_replica()
        await moving.all_whole()
        assert await moving.cluster.metric(REQUESTS, outcome="finished") == 2 * STREAMS
        await nothing_is_kept(moving.cluster)


async def test_a_target_that_stops_is_left_out_its_streams_run_on_where_they_are_and_it_keeps_nothing_of_them(
    tiny_model: ModelFolder, tmp_path: Path
) -> None:
    async with running(tiny_model, tmp_path, transport={}, router={"step_age_limit_s": 600.0}) as moving:
        async with held(moving, moving.target, "import_blocks"):
            moving.target.stop()
        try:
            await moving.all_whole()
        finally:
            moving.target.go_on()
        await moving.target.hold_moves(None)
        assert await moving.cluster.metric(CONTINUED) == 0
        await moving.cluster.until_ready(1)
        await nothing_is_kept(moving.cluster)


# --- router and controller die ---


@pytest.mark.parametrize(
    ("side", "call"),
    [("target", "import_blocks"), ("source", "export_rest"), ("target", "import_commit"), ("source", "release")],
)
async def test_of_a_killed_routers_moves_no_replica_keeps_anything(
    tiny_model: ModelFolder, tmp_path: Path, side: str, call: MoveCall
) -> None:
    async with running(tiny_model, tmp_path, routers=2) as moving, client_of(moving.cluster.urls[1]) as second:
        replica = moving.source if side == "source" else moving.target
        async with held(moving, replica, call):
            moving.cluster.routers[0].kill()
        await asyncio.gather(*(heard.task for heard in moving.streams), return_exceptions=True)
        await replica.hold_moves(None)
        assert not any(heard.done for heard in moving.streams)
        await nothing_is_kept(moving.cluster, second)


async def test_a_controller_killed_while_streams_move_is_not_missed(tiny_model: ModelFolder, tmp_path: Path) -> None:
    async with running(tiny_model, tmp_path) as moving:
        async with held(moving, moving.target, "import_blocks"):
            moving.cluster.controller.kill()
        await moving.target.hold_moves(None)
        await moving.all_whole()
        assert await moving.cluster.metric(MOVES, outcome="moved") == STREAMS
        assert await moving.cluster.metric(CONTINUED) == 0
        await moving.cluster.start_controller()
        await nothing_is_kept(moving.cluster)


# --- requests that end, or are preempted, as they move ---


@pytest.mark.parametrize("call", ["import_blocks", "import_commit"])
async def test_a_client_that_leaves_while_its_stream_moves_leaves_nothing_behind_and_the_others_move(
    tiny_model: ModelFolder, tmp_path: Path, call: MoveCall
) -> None:
    """Before the grant, and right after it."""
    async with running(tiny_model, tmp_path) as moving:
        leaves, stays = moving.streams[: STREAMS // 2], moving.streams[STREAMS // 2 :]
        async with held(moving, moving.target, call):
            for heard in leaves:
                heard.task.cancel()
            await until(lambda: moving.cluster.metric(REQUESTS, outcome="cancelled"), float(len(leaves)).__eq__)
        await moving.target.hold_moves(None)
        moving.streams, moving.expected = stays, moving.expected[STREAMS // 2 :]
        await moving.all_whole()
        await nothing_is_kept(moving.cluster)


async def test_streams_that_end_while_they_are_copied_end_as_they_would_have(
    tiny_model: ModelFolder, tmp_path: Path
) -> None:
    async with running(tiny_model, tmp_path) as moving:
        async with held(moving, moving.target, "import_blocks"):
            await moving.all_whole()
        assert await moving.cluster.metric(MOVES, outcome="moved") == 0
        await moving.target.hold_moves(None)
        await nothing_is_kept(moving.cluster)


async def test_streams_that_are_preempted_while_they_are_copied_say_what_they_would_have_said(
    tiny_model: ModelFolder, tmp_path: Path
) -> None:
    """The pool holds fewer blocks than they come to want, and the router expects them to stay short."""
    router = PROFILE["router"] | {"expected_output_tokens": 8}
    async with running(tiny_model, tmp_path, engine=ENGINE | {"blocks": 75}, router=router) as moving:
        async with held(moving, moving.target, "import_blocks"):
            await until(lambda: moving.cluster.metric(PREEMPTIONS), bool)
        await moving.target.hold_moves(None)
        await moving.all_whole()
        await nothing_is_kept(moving.cluster)


# --- nowhere to go ---


async def test_where_all_replicas_are_drained_streams_finish_where_they_are(
    tiny_model: ModelFolder, tmp_path: Path
) -> None:
    async with running(tiny_model, tmp_path) as moving:
        await moving.drain(moving.target, moving.source)
        await moving.all_whole()
        assert [await moving.cluster.metric(MOVES, outcome="moved"), await moving.cluster.metric(CONTINUED)] == [0, 0]
        await nothing_is_kept(moving.cluster)


async def test_where_all_replicas_are_drained_and_one_comes_streams_move_there(
    tiny_model: ModelFolder, tmp_path: Path
) -> None:
    async with running(tiny_model, tmp_path) as moving:
        for replica in (moving.target, moving.source):
            (await moving.cluster.client.put(f"/drain/{replica.replica_id}")).raise_for_status()
        await moving.cluster.until_ready(0)
        await moving.cluster.start_replica()
        await moving.cluster.until_ready(1)
        await moving.source.hold(None)
        await moving.all_whole()
        assert await moving.cluster.metric(MOVES, outcome="moved") == STREAMS
        assert await moving.cluster.metric(CONTINUED) == 0


async def test_streams_for_which_no_replica_has_room_stay_until_they_are_handed_back_and_are_whole(
    tiny_model: ModelFolder, tmp_path: Path
) -> None:
    """The other replica's pool is full of longer streams."""
    engine = ENGINE | {"blocks": 64, "max_model_len": 1000}
    async with running(tiny_model, tmp_path, streams=2, engine=engine, health={"hand_back_after_s": 1.0}) as moving:
        filling = [Heard(moving.cluster.client, prompt=prompt(50), max_tokens=700)]
        await asyncio.gather(*(heard.begun.wait() for heard in filling))
        await moving.drain(moving.source)
        await moving.all_whole()
        await asyncio.gather(*(heard.task for heard in filling))
        assert all(heard.done for heard in filling)
        print(f"[moves] no room: {await moving.events()}")
        await nothing_is_kept(moving.cluster)


async def test_drains_to_and_fro_under_a_flood_of_short_requests_and_with_a_long_prompt_lose_nothing(
    tiny_model: ModelFolder, tmp_path: Path
) -> None:
    async with running(tiny_model, tmp_path) as moving:
        client = moving.cluster.client
        await moving.source.hold(None)
        long = {"prompt": [90, *(PROMPT * 75)], "max_tokens": 400}
        short = {"prompt": [91, *PROMPT], "max_tokens": 4}
        undisturbed = [Heard(client, **fields) for fields in (long, short)]
        await asyncio.gather(*(heard.task for heard in undisturbed))
        expected_long, expected_short = [all_said(heard) for heard in undisturbed]
        moving.streams.append(Heard(client, **long))
        moving.expected.append(expected_long)
        await moving.streams[-1].begun.wait()
        over = asyncio.Event()
        said: list[str] = []

        async def flood() -> None:
            while not over.is_set():
                heard = Heard(client, **short)
                await heard.task
                said.append(all_said(heard))

        flooding = [asyncio.create_task(flood()) for _ in range(6)]
        for replica in itertools.islice(itertools.cycle((moving.source, moving.target)), 6):
            await moving.drain(replica)
            await until(lambda: loads(client), partial(replica_is_idle, replica.replica_id))
            (await client.delete(f"/drain/{replica.replica_id}")).raise_for_status()
            await moving.cluster.until_ready(2)
        await moving.all_whole()
        over.set()
        await asyncio.gather(*flooding)
        assert set(said) == {expected_short}
        assert (await moving.events())[-1].count("moved") >= 2, "it ran while each was drained"
        # Short ones that waited there are called back; those that cross with the word of a drain are refused.
        by_drain = {why: await moving.cluster.metric(CONTINUED, reason=why) for why in ("drained", "draining")}
        begun_anew = await moving.cluster.metric(CONTINUED) - sum(by_drain.values())
        assert begun_anew == 0, f"none but those that had no token there yet: {by_drain}"
        print(
            f"[moves] {await moving.cluster.metric(MOVES, outcome='moved'):.0f} moves beside {len(said)} short requests"
        )
        await nothing_is_kept(moving.cluster)
