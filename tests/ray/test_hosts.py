"""A cluster of hosts, each with a Ray node: what moves, drains, cut cables and killed parts of Ray cost its clients.

One cluster for all of the tests, which leave it as they found it: a first host with Serve's controller, ours and the
router, one with two replicas and one with one. Figures in seconds are judged where the machine's speed decides little of
them, else against what the same machine takes for the like just then.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from typing import Any

import httpx
import pytest

from cluster.config import HealthConfig
from cluster.metrics import CONTINUED, ENGINE_DEATHS, FENCED, MOVES, REPLICAS_READY
from cluster.model import ModelFolder
from tests.closed_loop import Load, running_load
from tests.e2e.test_faults import KINDS, PROMPT, Heard, across
from tests.line import read_metric, until
from tests.ray.hosts import REDIS, Host, Hosts, hosts
from tests.ray.streams import body, client_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

HAND_BACK_AFTER_S = 120.0
BLOCKS, BLOCK_TOKENS = 2048, 16
PROFILE = {
    "engine": {"blocks": BLOCKS, "max_model_len": 4096, "slots": 32, "step_token_budget": 256},
    "health": {"hand_back_after_s": HAND_BACK_AFTER_S},
    # The controller evens out nothing by itself: what moves here, the tests have moved.
    "control": {"move_value_s": 3600.0},
}
GPUS = (2, 1)
REPLICAS = sum(GPUS)
WHOLE_AGAIN_S = 120.0
TOKENS = 900
STREAMS = 24
GAP_MAX_MS = 2000
STEPS_TO_GO_ON = 24
"""Of computing again what had been said, that of several streams in a step; each as long as an undisturbed stream's longest."""
LATE_WITHIN_S = 20.0
"""TCP tries again after 6.4 s, then after 12.8 s."""
SUCCESSOR_S = 5.0
BARE_STARTS = 4.0
"""Or the time of so many bare starts of such a process beside it: on a machine that does something else as well."""
GCS_AWAY_S = 10.0
DRAIN_S = HealthConfig().drain_timeout_s
SERVES_OWN_S = 10.0
"""What Serve gives a replica beyond that; see deployments/app.py."""
REPLACED_WITHIN_S = 5.0
LOAD_TOKENS = 400
CLIENTS = 12
PROMPTS = ("once upon a time", "twice upon a time")
MARGIN_TOKENS = 50
"""Before and after each move that counts."""
MOVES_WANTED = 100
ALIKE = 4
"""Streams of each kind at once."""
ROUNDS = 8
"""Of streams, at most, until there were as many moves."""


@pytest.fixture(scope="module")
def running(tiny_model: ModelFolder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with hosts(tiny_model, tmp_path_factory.mktemp("hosts"), PROFILE, GPUS) as started:
        yield started


@pytest.fixture
def cluster(running: Hosts) -> Hosts:
    """All of it, whatever a test that failed has left."""
    running.mend()
    return running


@contextlib.asynccontextmanager
async def loaded(cluster: Hosts, client: httpx.AsyncClient) -> AsyncIterator[Load]:
    """Clients in a closed loop that check each answer, once each has had one."""
    fields = body(model=cluster.model.path.name, max_tokens=LOAD_TOKENS)
    expected = {}
    for prompt in PROMPTS:
        answer = await client.post("/v1/completions", json=fields | {"prompt": prompt, "stream": False})
        expected[prompt] = answer.raise_for_status().json()["choices"][0]["text"]
    async with running_load(cluster.url, fields, expected, CLIENTS) as load:
        await load.another(CLIENTS)
        yield load


async def whole(cluster: Hosts, client: httpx.AsyncClient, replicas: int = REPLICAS) -> float:
    """Wait until the controller knows so many replicas and the router can use as many; after how many seconds."""

    async def seen() -> tuple[int, float]:
        return len(await asyncio.to_thread(cluster.replicas)), await read_metric(client, REPLICAS_READY)

    _, waited_s = await until(seen, lambda now: now == (replicas, replicas), within_s=WHOLE_AGAIN_S)
    return waited_s


async def decided(client: httpx.AsyncClient, heard: Heard, event: str) -> list[dict[str, Any]]:
    """What was decided about a stream, of this kind."""
    told = (await client.get(f"/v1/requests/{heard.request_id}/explain")).raise_for_status().json()
    return [decision for decision in told["decisions"] if decision["event"] == event]


async def ttft_s(client: httpx.AsyncClient, heard: Heard) -> float:
    told = (await client.get(f"/v1/requests/{heard.request_id}/explain")).raise_for_status().json()
    return float(told["ttft_ms"]) / 1000


async def order(client: httpx.AsyncClient, host: Host, *, drain: bool) -> None:
    """Have all replicas of a host drained, or take work again."""
    told = (await client.request("PUT" if drain else "DELETE", f"/drain/{host.address}")).raise_for_status().json()
    assert len(told["replica_ids"]) == host.gpus


async def reports(client: httpx.AsyncClient, host: Host) -> list[dict[str, Any]]:
    """What each replica on a host has said last to the controller."""
    told = (await client.get("/status")).json()["cluster"]
    assert told is not None, "there is no controller"
    found = [one["report"] for one in told["replicas"] if one["entry"]["host"] == host.address]
    assert len(found) == host.gpus
    return found


def is_empty(told: Sequence[Mapping[str, Any]]) -> bool:
    """They drain, and nothing is there."""
    loads = [report["load"] for report in told if report["state"] == "draining"]
    return len(loads) == len(told) and not any(load["running"] or load["waiting"] for load in loads)


def works(told: Sequence[Mapping[str, Any]]) -> bool:
    """Something runs on each."""
    return all(report["load"]["running"] for report in told)


async def emptied(cluster: Hosts, client: httpx.AsyncClient, host: Host) -> float:
    """Drain a host; returns after how many seconds nothing was left there, and has it take work again."""
    began_s = time.monotonic()
    await order(client, host, drain=True)

    await until(lambda: reports(client, host), is_empty, within_s=HAND_BACK_AFTER_S)
    waited_s = time.monotonic() - began_s
    await order(client, host, drain=False)
    await whole(cluster, client)
    return waited_s


@contextlib.asynccontextmanager
async def cut(host: Host) -> AsyncIterator[None]:
    """Its cable is out."""
    await asyncio.to_thread(host.cut)
    try:
        yield
    finally:
        await asyncio.to_thread(host.heal)


async def counts(client: httpx.AsyncClient) -> list[float]:
    """Of what must not be where nothing is lost: requests begun anew, engines that died, tokens that came twice or late."""
    return [await read_metric(client, metric) for metric in (CONTINUED, ENGINE_DEATHS, FENCED)]


async def stranded(client: httpx.AsyncClient, streams: Sequence[Heard], replicas: Collection[str]) -> list[Heard]:
    """Those that were sent to one of these first."""
    return [heard for heard in streams if (await decided(client, heard, "dispatched"))[0]["replica"] in replicas]


async def fewest_tokens(streams: Sequence[Heard], at_least: int) -> int:
    """Of the stream that has had fewest, once each has had so many; an event may hold several."""

    async def tokens() -> int:
        return min(TOKENS if heard.task.done() else len(heard.events) for heard in streams)

    return (await until(tokens, at_least.__le__, within_s=WHOLE_AGAIN_S))[0]


async def test_100_moves_between_hosts_under_load_each_with_50_tokens_before_and_after_change_no_token(
    cluster: Hosts, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = {name: kind for name, kind in KINDS.items() if "n" not in kind}
    async with client_of(cluster.url) as client:
        await whole(cluster, client)
        before = [await read_metric(client, metric) for metric in (CONTINUED, ENGINE_DEATHS)]
        expected = {name: Heard(client, max_tokens=TOKENS, **kind) for name, kind in kinds.items()}
        await asyncio.gather(*(heard.task for heard in expected.values()))
        moved: list[dict[str, Any]] = []
        took_s: list[float] = []
        hosts_in_turn = itertools.cycle(cluster.workers)
        for _ in range(ROUNDS):
            streams = [(name, Heard(client, max_tokens=TOKENS, **kinds[name])) for name in kinds for _ in range(ALIKE)]
            await asyncio.gather(*(heard.begun.wait() for _, heard in streams))
            next_at = MARGIN_TOKENS
            while (
                fewest := await fewest_tokens([heard for _, heard in streams], next_at)
            ) <= TOKENS - 2 * MARGIN_TOKENS:
                took_s.append(await emptied(cluster, client, next(hosts_in_turn)))
                next_at = fewest + MARGIN_TOKENS
            await asyncio.gather(*(heard.task for _, heard in streams))
            for name, heard in streams:
                assert heard.said() == expected[name].said(), name
                assert heard.logprobs() == pytest.approx(expected[name].logprobs(), abs=1e-3)
                moved += await decided(client, heard, "moved")
            counting = [d for d in moved if MARGIN_TOKENS <= d["numbers"]["emitted"] <= TOKENS - MARGIN_TOKENS]
            if len(counting) >= MOVES_WANTED:
                break
        pauses_ms = sorted(d["numbers"]["pause_ms"] for d in counting)
        with capsys.disabled():
            print(
                f"\n[hosts] {len(counting)} moves that count of {len(moved)}, in {len(took_s)} drains of "
                f"{min(took_s):.2f} to {max(took_s):.2f} s; pause p50 {pauses_ms[len(pauses_ms) // 2]} ms, "
                f"p99 {pauses_ms[len(pauses_ms) * 99 // 100]} ms"
            )
        assert len(counting) >= MOVES_WANTED
        assert [await read_metric(client, metric) for metric in (CONTINUED, ENGINE_DEATHS)] == before, "none begun anew"


async def test_an_urgent_request_that_fits_nowhere_is_let_in_by_moving_one_and_parking_one_of_27_on_three_full_replicas(
    cluster: Hosts, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of what each replica can hold, requests as urgent as it (seven large ones and one of 100 blocks) and lesser ones
    leave 110 blocks on two and 5 on one, and it takes 250. Without its 60 blocks of lesser work one still has too few: one
    as urgent must move as well, which there is room for on the other, and then none for the lesser one."""
    large, small, lesser, demand = 254, 100, (165, 60, 60), 250
    left = BLOCKS - 7 * large - small
    assert all(room < demand for room in (left, left - 60 + small))
    assert left - 60 >= small
    async with client_of(cluster.url) as client:
        await whole(cluster, client)
        ends = {"priority": await ending(client, 21, 500), "flex": await ending(client, 22, 500)}
        stop, said = await ending(client, 23, 40)
        before = await counts(client)

        def stream(blocks: int, tier: str) -> Heard:
            seed = 21 if tier == "priority" else 22
            return Heard(client, **stating(blocks, tier, seed, stop=[ends[tier][0]]))

        urgent = [stream(blocks, "priority") for blocks in (large,) * 7 * REPLICAS + (small,) * REPLICAS]
        await asyncio.gather(*(heard.begun.wait() for heard in urgent))
        lower = []
        for blocks in lesser:
            lower.append(stream(blocks, "flex"))
            await lower[-1].begun.wait()
        asked_s = time.monotonic()
        demanding = Heard(client, **stating(demand, "priority", 23, stop=[stop]))
        await demanding.begun.wait()
        took_s = time.monotonic() - asked_s
        assert not any(heard.task.done() for heard in (*urgent, *lower)), "it waited for the end of none"
        await asyncio.gather(*(heard.task for heard in (*urgent, *lower, demanding)))
        assert text_of(demanding) == said
        assert {text_of(heard) for heard in urgent} == {ends["priority"][1]}
        assert {text_of(heard) for heard in lower} == {ends["flex"][1]}
        (moved,) = [d for heard in (*urgent, *lower) for d in await decided(client, heard, "moved")]
        (parked,) = [d for heard in (*urgent, *lower) for d in await decided(client, heard, "called_back")]
        (placed,) = await decided(client, demanding, "dispatched")
        for decision in (moved, parked):
            assert f"it makes room on {placed['replica']} for a" in decision["why"]
            assert [decision["numbers"][name] for name in ("demand_blocks", "leave_with_it")] == [demand, 1]
        assert parked["replica"] == placed["replica"] != moved["replica"]
        assert (await counts(client))[:2] == [before[0] + 1, before[1]], "only who was parked was begun again"
        with capsys.disabled():
            waits_s = parked["numbers"]["demand_waits_s"]
            print(f"\n[hosts] let in after {took_s * 1000:.0f} ms, {waits_s * 1000:.0f} ms of them undecided")


def stating(blocks: int, tier: str, seed: int, **more: Any) -> dict[str, Any]:
    """A stream that says it will take so many blocks, and is given as many."""
    output = blocks * BLOCK_TOKENS - len(PROMPT)
    of_seed = {"temperature": 1, "seed": seed, "service_tier": tier}
    return {**of_seed, "max_tokens": output, "expected_output_tokens": output, **more}


async def ending(client: httpx.AsyncClient, seed: int, tokens: int) -> tuple[str, str]:
    """A stop string that ends a stream of this seed within so many tokens, late, and all that it says then."""
    undisturbed = Heard(client, temperature=1, seed=seed, max_tokens=tokens)
    await undisturbed.task
    text = text_of(undisturbed)
    stop = across(text, len(text) * 9 // 10)
    return stop, text[: text.index(stop)]


def text_of(heard: Heard) -> str:
    return str(heard.said()[0]["text"])


async def test_forebay_drain_of_a_host_under_load_empties_it_by_moves_and_cuts_no_stream(
    cluster: Hosts, capsys: pytest.CaptureFixture[str]
) -> None:
    host = cluster.workers[0]
    forebay = (sys.executable, "-m", "ops.cli", "drain", host.address, "--url", cluster.url)
    async with client_of(cluster.url) as client:
        await whole(cluster, client)
        async with loaded(cluster, client) as load:
            before, moved = await counts(client), await read_metric(client, MOVES, outcome="moved")
            began_s = time.monotonic()
            process = await asyncio.create_subprocess_exec(*forebay, stdout=asyncio.subprocess.PIPE)
            said, _ = await process.communicate()
            took_s = time.monotonic() - began_s
            assert process.returncode == 0
            assert sorted(said.decode().split()[::3]) == sorted(cluster.on(host)), "each is named: ID is empty."
            moved = await read_metric(client, MOVES, outcome="moved") - moved
            await load.another(2 * CLIENTS)
            assert is_empty(await reports(client, host)), "what came since went elsewhere"
            assert await counts(client) == before
            process = await asyncio.create_subprocess_exec(*forebay, "--undo", stdout=asyncio.subprocess.DEVNULL)
            assert await process.wait() == 0
            await until(lambda: reports(client, host), works, within_s=WHOLE_AGAIN_S)
        with capsys.disabled():
            print(f"\n[hosts] forebay drain HOST returned after {took_s:.1f} s; {moved:.0f} streams moved")
        assert load.wrong == {}
        assert moved > 0
        assert took_s < HAND_BACK_AFTER_S, "nothing is handed back before"


async def test_the_busiest_replica_picked_by_serve_as_its_victim_cuts_no_stream_and_begins_none_anew(
    cluster: Hosts, capsys: pytest.CaptureFixture[str]
) -> None:
    """Serve stops one where fewest are on a host: what it does, it does not see."""
    others, host = cluster.workers
    async with client_of(cluster.url) as client:
        await whole(cluster, client)
        undisturbed = Heard(client, max_tokens=TOKENS)
        await undisturbed.task
        before, moved = await counts(client), await read_metric(client, MOVES, outcome="moved")
        (victim,) = cluster.on(host)
        with cluster.scaling() as scale:
            await order(client, others, drain=True)
            await until(lambda: read_metric(client, REPLICAS_READY), lambda ready: ready == host.gpus)
            streams = [Heard(client, max_tokens=TOKENS) for _ in range(STREAMS)]
            await fewest_tokens(streams, MARGIN_TOKENS)
            await order(client, others, drain=False)
            await asyncio.to_thread(scale, REPLICAS - 1)
            began_s = time.monotonic()
            await asyncio.gather(*(heard.task for heard in streams))
            await whole(cluster, client, REPLICAS - 1)
            gone_s = time.monotonic() - began_s
            assert victim not in cluster.replicas()
            assert await stranded(client, streams, {victim}) == streams
            assert {str(heard.said()) for heard in streams} == {str(undisturbed.said())}
            assert await counts(client) == before
            moved = await read_metric(client, MOVES, outcome="moved") - moved
            await asyncio.to_thread(scale, REPLICAS)
        await whole(cluster, client)
        with capsys.disabled():
            print(f"\n[hosts] the busiest of {REPLICAS} stopped by Serve in {gone_s:.1f} s: {moved:.0f} streams moved")
        assert moved > 0


async def test_a_partition_of_800_ms_loses_nothing_and_begins_no_stream_anew(cluster: Hosts) -> None:
    host = cluster.workers[0]
    async with client_of(cluster.url) as client:
        await whole(cluster, client)
        undisturbed = Heard(client, max_tokens=TOKENS)
        await undisturbed.task
        streams = [Heard(client, max_tokens=TOKENS) for _ in range(STREAMS)]
        await fewest_tokens(streams, MARGIN_TOKENS)
        before = await counts(client)
        async with cut(host):
            await asyncio.sleep(0.8)
        there = await stranded(client, streams, cluster.on(host))
        await asyncio.gather(*(heard.task for heard in streams))
        assert there
        assert {str(heard.said()) for heard in streams} == {str(undisturbed.said())}
        assert await counts(client) == before


async def test_a_partition_of_10_s_costs_2_s_from_its_detection_and_what_comes_late_is_dropped_and_counted(
    cluster: Hosts, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ray gives up a node after 20 s, so that nothing is replaced: the replicas are there again when the cable is."""
    host = cluster.workers[0]
    async with client_of(cluster.url) as client:
        await whole(cluster, client)
        undisturbed = Heard(client, max_tokens=TOKENS)
        await undisturbed.task
        zombies = cluster.on(host)
        streams = [Heard(client, max_tokens=TOKENS) for _ in range(STREAMS)]
        await fewest_tokens(streams, MARGIN_TOKENS)
        late = await read_metric(client, FENCED, kind="stale")
        async with cut(host):
            await asyncio.sleep(10.0)
        there = await stranded(client, streams, zombies)
        await asyncio.gather(*(heard.task for heard in streams))
        assert there
        usual_ms = undisturbed.longest_gap_ms()
        for heard in streams:
            assert heard.said() == undisturbed.said()
        gaps_ms, from_detection_ms = [], []
        for heard in there:
            (returned,) = (d for d in await decided(client, heard, "returned") if d["why"] == "fenced")
            arrived_s = heard.at_s[0] - await ttft_s(client, heard)
            from_detection_ms.append(heard.gap_ms(arrived_s + returned["at_ms"] / 1000))
            gaps_ms.append(heard.longest_gap_ms())

        async def fenced() -> float:
            return await read_metric(client, FENCED, kind="stale")

        dropped, _ = await until(fenced, lambda now: now > late, within_s=LATE_WITHIN_S)
        await whole(cluster, client)
        with capsys.disabled():
            print(
                f"\n[hosts] 10 s without a cable: {len(there)} streams went on elsewhere {max(from_detection_ms):.0f} ms "
                f"after detection at most, {max(gaps_ms):.0f} ms after their last token; undisturbed {usual_ms:.0f} ms; "
                f"{dropped - late:.0f} late tokens dropped"
            )
        assert max(from_detection_ms) <= GAP_MAX_MS + STEPS_TO_GO_ON * usual_ms
        assert cluster.on(host) == zombies, "the same processes"
        async with loaded(cluster, client) as load:
            await load.another(2 * CLIENTS)
        assert load.wrong == {}


async def test_a_killed_raylet_costs_no_stream_its_text_and_its_host_is_used_again_once_it_is_back(
    cluster: Hosts, tiny_model: ModelFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its replicas serve on until Ray ends them, two at once: for seconds, or 15 and more."""
    host = cluster.workers[0]
    async with client_of(cluster.url) as client:
        await whole(cluster, client)
        lost = cluster.on(host)
        async with loaded(cluster, client) as load:
            host.kill("raylet")
            noticed_s = await whole(cluster, client, REPLICAS - len(lost))
            await load.another(2 * CLIENTS)
            await asyncio.to_thread(cluster.mend)
            await whole(cluster, client)
            assert not cluster.on(host).keys() & lost.keys()
            await load.another(2 * CLIENTS)
        with capsys.disabled():
            print(f"\n[hosts] a killed raylet: its replicas gone after {noticed_s:.1f} s; {load.whole} answers whole")
        assert load.wrong == {}


async def test_a_pod_that_kubernetes_ends_is_left_by_its_streams_before_it_goes_and_ends_once_they_have(
    cluster: Hosts, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kubernetes sends SIGTERM to `ray start --block`; there is no place for another in its stead."""
    host = cluster.workers[1]
    host.end()
    async with client_of(cluster.url) as client:
        await whole(cluster, client, REPLICAS - 1)
        pod = cluster.start_pod(host, DRAIN_S + SERVES_OWN_S + REPLACED_WITHIN_S)
        await whole(cluster, client)
        async with loaded(cluster, client) as load:
            before = await counts(client)
            pod.terminate()
            told_s = time.monotonic()
            await asyncio.to_thread(pod.wait, REPLACED_WITHIN_S + WHOLE_AGAIN_S)
            ended_s = time.monotonic() - told_s
            await load.another(CLIENTS)
            assert await counts(client) == before, "its replica died with work"
        with capsys.disabled():
            print(f"\n[hosts] a pod that Kubernetes ends: gone after {ended_s:.1f} s; {load.whole} answers whole")
        assert load.wrong == {}
        assert ended_s >= REPLACED_WITHIN_S, "a replica that takes its place is waited for"


async def test_a_killed_controller_has_a_successor_within_5_s_and_costs_no_stream_its_text(
    cluster: Hosts, capsys: pytest.CaptureFixture[str]
) -> None:
    async with client_of(cluster.url) as client:
        await whole(cluster, client)
        async with loaded(cluster, client) as load:
            before = await counts(client)
            killed = (await status(client))["cluster"]
            os.kill(killed["controller_pid"], signal.SIGKILL)
            killed_s = time.monotonic()
            yardstick = asyncio.create_task(starting_s())

            def in_charge(told: Mapping[str, Any]) -> bool:
                now = told["cluster"]
                if now is None or now["controller_pid"] == killed["controller_pid"]:
                    return False
                return len(now["replicas"]) == REPLICAS and len(now["routers"]) == 1

            after, _ = await until(lambda: status(client), in_charge, within_s=WHOLE_AGAIN_S)
            took_s, alone_s = time.monotonic() - killed_s, await yardstick
            await load.another(2 * CLIENTS)
            assert await counts(client) == before
        with capsys.disabled():
            print(
                f"\n[hosts] a killed controller: its successor knew all after {took_s:.1f} s, beside a bare start of such a "
                f"process in {alone_s:.1f} s; {load.whole} answers whole"
            )
        assert load.wrong == {}
        generations = [told["controller_generation"]["number"] for told in (killed, after["cluster"])]
        assert generations[0] < generations[1]
        assert took_s <= max(SUCCESSOR_S, BARE_STARTS * alone_s)


async def test_a_host_without_power_costs_no_stream_its_text_and_is_forgotten_though_nobody_heard_it_go(
    cluster: Hosts, capsys: pytest.CaptureFixture[str]
) -> None:
    """No connection to it ends: there is silence. The controller may be there."""
    told = cluster.status()["cluster"]
    controls = {host.name: told["controller_pid"] in host.pids() for host in cluster.workers}
    host = max(cluster.workers, key=lambda host: controls[host.name])
    async with client_of(cluster.url) as client:
        await whole(cluster, client)
        async with loaded(cluster, client) as load:
            began_s = time.monotonic()
            await asyncio.to_thread(host.cut)
            await asyncio.to_thread(host.end)
            await whole(cluster, client, REPLICAS - host.gpus)
            forgotten_s = time.monotonic() - began_s
            await load.another(2 * CLIENTS)
            await asyncio.to_thread(cluster.mend)
            await whole(cluster, client)
        with capsys.disabled():
            what = "controller" if controls[host.name] else "no controller"
            print(
                f"\n[hosts] a host with {host.gpus} replicas and {what} lost its power: forgotten after {forgotten_s:.1f} s; {load.whole} answers whole"
            )
        assert load.wrong == {}


async def test_ray_without_gcs_for_10_s_fails_no_request_and_replaces_what_dies_afterwards(
    cluster: Hosts, capsys: pytest.CaptureFixture[str]
) -> None:
    if REDIS is None:
        pytest.skip("redis-server is not installed (Debian: apt-get install redis-server)")
    async with client_of(cluster.url) as client:
        await whole(cluster, client)
        async with loaded(cluster, client) as load:
            before = await counts(client)
            known = cluster.replicas()
            with cluster.without_gcs():
                away_s = time.monotonic()
                while time.monotonic() < away_s + GCS_AWAY_S:
                    await load.another(1)
                answers = load.whole
            assert await counts(client) == before
            assert cluster.replicas() == known
            victim, pid = min(known.items())
            os.kill(pid, signal.SIGKILL)
            killed_s = time.monotonic()

            async def replicas() -> Collection[str]:
                return (await asyncio.to_thread(cluster.replicas)).keys()

            await until(replicas, lambda now: len(now) == REPLICAS and victim not in now, within_s=WHOLE_AGAIN_S)
            replaced_s = time.monotonic() - killed_s
            await whole(cluster, client)
            await load.another(2 * CLIENTS)
        with capsys.disabled():
            print(
                f"\n[hosts] {answers} answers until GCS was back; a replica killed then replaced in {replaced_s:.1f} s"
            )
        assert load.wrong == {}


async def status(client: httpx.AsyncClient) -> dict[str, Any]:
    told: dict[str, Any] = (await client.get("/status")).raise_for_status().json()
    return told


async def starting_s() -> float:
    """How long a process of ours on Ray takes to be there, at the least, on this machine now."""
    began_s = time.monotonic()
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "import deployments.controller")
    assert await process.wait() == 0
    return time.monotonic() - began_s
