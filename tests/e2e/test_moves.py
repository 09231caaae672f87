"""Live requests that move from replica to replica with their keys and values, while their clients read on.

Controller, router and replicas are processes of their own; drains move the work. What faults do to a move is tested in
test_move_faults.py.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from pathlib import Path
from typing import Any

import pytest

from cluster.metrics import CONTINUED, ENGINE_DEATHS, MOVES, REQUESTS
from cluster.model import ModelFolder
from deployments.settings import Profile
from tests.e2e.test_faults import KINDS, PROMPT, Heard, explained
from tests.line import until
from tests.processes import Cluster, running_cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

BLOCK_TOKENS = 16
PROFILE = Profile.model_validate(
    {
        "engine": {"slots": 32, "step_token_budget": 256, "blocks": 1024, "max_model_len": 1024},
        "health": {"hand_back_after_s": 60.0},
    }
)
STEP_S = 0.02
TOKENS = 620
MARGIN_TOKENS = 50
"""Before and after each move that counts."""
MOVES_WANTED = 100
ALIKE = 4
"""Clients' requests of each kind."""


async def reported(cluster: Cluster, replica_id: str) -> dict[str, Any] | None:
    """What a replica has said last to the controller."""
    told = (await cluster.client.get("/status")).json()["cluster"]
    return next((r["report"] for r in told["replicas"] if r["entry"]["replica_id"] == replica_id), None)


async def emptied(cluster: Cluster, replica_id: str) -> float:
    """Have a replica drained; returns after how many seconds nothing was left there, and has it take work again."""
    began_s = time.monotonic()
    (await cluster.client.put(f"/drain/{replica_id}")).raise_for_status()

    def is_empty(report: dict[str, Any] | None) -> bool:
        if report is None or report["state"] != "draining":
            return False
        return not report["load"]["running"] and not report["load"]["waiting"]

    await until(lambda: reported(cluster, replica_id), is_empty)
    waited_s = time.monotonic() - began_s
    (await cluster.client.delete(f"/drain/{replica_id}")).raise_for_status()
    await cluster.until_ready(2)
    return waited_s


async def moves_of(cluster: Cluster, heard: Heard) -> list[dict[str, Any]]:
    """The decisions that moved each choice of a request."""
    first = await explained(cluster, heard)
    return [decision for decision in first["decisions"] if decision["event"] == "moved"]


async def test_100_moves_under_load_each_with_50_tokens_before_and_after_change_no_token(
    tiny_model: ModelFolder, tmp_path: Path
) -> None:
    kinds = {name: kind for name, kind in KINDS.items() if "n" not in kind}
    async with running_cluster(tiny_model, PROFILE, tmp_path, step_s=STEP_S) as cluster:
        expected = {}
        for name, kind in kinds.items():
            undisturbed = Heard(cluster.client, max_tokens=TOKENS, **kind)
            await undisturbed.task
            expected[name] = undisturbed
        usual_ms = max(heard.longest_gap_ms() for heard in expected.values())
        streams = [
            (name, Heard(cluster.client, max_tokens=TOKENS, **kinds[name])) for name in kinds for _ in range(ALIKE)
        ]
        await asyncio.gather(*(heard.begun.wait() for _, heard in streams))
        took_s, next_at = [], MARGIN_TOKENS + 5
        for replica in itertools.cycle(list(cluster.replicas)):
            fewest, _ = await until(lambda: _fewest(streams), next_at.__le__)
            if fewest > TOKENS - 2 * MARGIN_TOKENS:
                break
            took_s.append(await emptied(cluster, replica.replica_id))
            next_at = fewest + MARGIN_TOKENS
        await asyncio.gather(*(heard.task for _, heard in streams))
        for name, heard in streams:
            assert heard.said() == expected[name].said(), name
            assert heard.logprobs() == pytest.approx(expected[name].logprobs(), abs=1e-3)
        moved = [decision for _, heard in streams for decision in await moves_of(cluster, heard)]
        counting = [d for d in moved if MARGIN_TOKENS <= d["numbers"]["emitted"] <= TOKENS - MARGIN_TOKENS]
        assert len(counting) >= MOVES_WANTED
        assert await cluster.metric(MOVES, outcome="moved") == len(moved)
        assert [await cluster.metric(metric) for metric in (CONTINUED, ENGINE_DEATHS)] == [0, 0], "none was begun anew"
        assert await cluster.metric(REQUESTS, outcome="finished") == len(streams) + len(expected)
        reports = [await reported(cluster, replica.replica_id) for replica in cluster.replicas]
        computed = sum(report["load"]["prefill_tokens_total"] for report in reports if report is not None)
        whole = len(PROMPT) * (len(streams) + len(expected))
        assert computed <= whole + BLOCK_TOKENS * len(moved), "keys and values came with them, but for a block at most"
        pauses_ms = sorted(d["numbers"]["pause_ms"] for d in moved)
        gaps_ms = sorted(heard.longest_gap_ms() for _, heard in streams)
        print(
            f"[moves] {len(moved)} moves in {len(took_s)} drains of {min(took_s):.2f} to {max(took_s):.2f} s; pause p50 "
            f"{pauses_ms[len(pauses_ms) // 2]} ms, p99 {pauses_ms[len(pauses_ms) * 99 // 100]} ms at steps of "
            f"{STEP_S * 1000:.0f} ms; longest gap of a stream p50 {gaps_ms[len(gaps_ms) // 2]:.0f} ms, worst {gaps_ms[-1]:.0f} ms, "
            f"undisturbed {usual_ms:.0f} ms; {computed - whole} tokens computed again"
        )


async def _fewest(streams: list[tuple[str, Heard]]) -> int:
    """Tokens of the stream that has had fewest."""
    return min(len(heard.events) for _, heard in streams)


async def test_choices_of_one_request_move_each_for_itself_and_say_what_they_would_have_said(
    tiny_model: ModelFolder, tmp_path: Path
) -> None:
    kind = KINDS["three choices"] | {"max_tokens": 400}
    async with running_cluster(tiny_model, PROFILE, tmp_path, step_s=STEP_S) as cluster:
        undisturbed = Heard(cluster.client, **kind)
        await undisturbed.task
        streams = [Heard(cluster.client, **kind) for _ in range(4)]
        await asyncio.gather(*(heard.begun.wait() for heard in streams))
        for replica in list(cluster.replicas):
            await emptied(cluster, replica.replica_id)
        await asyncio.gather(*(heard.task for heard in streams))
        assert [heard.said() == undisturbed.said() for heard in streams] == [True] * 4
        assert await cluster.metric(MOVES, outcome="moved") >= 12, "all of them at least once"
        assert await cluster.metric(CONTINUED) == 0


async def test_a_busy_replica_is_empty_long_before_it_would_hand_back_and_nothing_is_computed_again(
    tiny_model: ModelFolder, tmp_path: Path
) -> None:
    async with running_cluster(tiny_model, PROFILE, tmp_path, step_s=STEP_S) as cluster:
        streams = [Heard(cluster.client, max_tokens=TOKENS) for _ in range(24)]
        await asyncio.gather(*(heard.begun.wait() for heard in streams))
        waited_s = await emptied(cluster, cluster.replicas[0].replica_id)
        assert waited_s < PROFILE.health.hand_back_after_s / 6
        assert await cluster.metric(MOVES, outcome="moved") == 12
        await asyncio.gather(*(heard.task for heard in streams))
        assert len({str(heard.said()) for heard in streams}) == 1
        assert await cluster.metric(CONTINUED) == 0
