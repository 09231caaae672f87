"""Everything is replaced, one after the other, while clients ask in a closed loop: none of them sees an error.

Controller, routers and replicas are processes of their own, ended by SIGTERM, without Ray (tests/ray/test_upgrade.py has
it with).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import httpx
import pytest

from cluster.metrics import IN_FLIGHT, REPLICA_RUNNING
from cluster.model import ModelFolder
from deployments.checks import free_ports
from deployments.settings import Profile
from tests.balancers import HAPROXY, balanced
from tests.closed_loop import Load, running_load
from tests.line import read_metric, until
from tests.processes import Cluster, running_cluster
from tests.ray.streams import Reader, body, client_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

STEP_S = 0.02
TOKENS = 24
CLIENTS = 12
BETWEEN = 3 * CLIENTS
"""Answers between two replacements: each client has asked again, on a connection that it kept or on a new one."""
PROMPTS = [f"{word} upon a time" for word in ("once", "twice", "thrice")]
FIELDS = body(model="tiny-llama", max_tokens=TOKENS)

Running = Callable[..., AbstractAsyncContextManager[Cluster]]


@pytest.fixture
def running(tiny_model: ModelFolder, tmp_path: Path) -> Running:
    def make(*, routers: int, notice_s: float, orphan_after_s: float = 5.0) -> AbstractAsyncContextManager[Cluster]:
        profile = Profile.model_validate(
            {
                "engine": {"slots": 16, "step_token_budget": 128, "blocks": 512, "max_model_len": 1024},
                "router": {"drain_notice_s": notice_s},
                "transport": {"orphan_after_s": orphan_after_s},
                # Less than an answer takes, so that each replica that leaves hands back what it has begun.
                "health": {"hand_back_after_s": TOKENS * STEP_S / 3, "drain_timeout_s": 30},
            }
        )
        port = free_ports("127.0.0.1", routers)
        return running_cluster(tiny_model, profile, tmp_path, step_s=STEP_S, routers=routers, port=port)

    return make


async def undisturbed(url: str) -> dict[str, str]:
    """The answer to each prompt."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:

        async def one(prompt: str) -> str:
            answer = await client.post("/v1/completions", json=FIELDS | {"prompt": prompt, "stream": False})
            return str(answer.raise_for_status().json()["choices"][0]["text"])

        return dict(zip(PROMPTS, await asyncio.gather(*map(one, PROMPTS)), strict=True))


async def replace_replicas(cluster: Cluster, load: Load) -> None:
    """One after the other, as where there is no GPU to spare: the old one goes before the new one comes."""
    for _ in range(len(cluster.replicas)):
        assert await cluster.replicas.pop(0).leave() == 0
        await cluster.start_replica()
        await load.another(BETWEEN)


@HAPROXY.mark
async def test_replicas_and_one_of_two_routers_behind_haproxy_are_replaced_and_no_client_sees_an_error(
    running: Running, tmp_path: Path
) -> None:
    notice_s = 0.8
    async with (
        running(routers=2, notice_s=notice_s) as cluster,
        balanced(HAPROXY, cluster.urls, tmp_path, notice_s) as url,
    ):
        expected = await undisturbed(url)
        began_s = time.monotonic()
        async with running_load(url, FIELDS, expected, CLIENTS) as load:
            await load.another(BETWEEN)
            await replace_replicas(cluster, load)
            replicas_s = time.monotonic() - began_s
            leaver = cluster.routers.pop(0)
            assert await leaver.leave() == 0
            await load.another(BETWEEN)
            assert await cluster.start_router() in cluster.urls
            await load.another(BETWEEN)
        print(f"{load.whole} answers; replicas took {replicas_s:.1f} s, all {time.monotonic() - began_s:.1f} s")
        assert load.wrong == {}


async def test_the_only_router_is_replaced_on_its_own_port_and_no_client_sees_an_error(running: Running) -> None:
    """The new one stands by before the old one leaves, and no balancer is before them."""
    async with running(routers=1, notice_s=0) as cluster:
        (url,) = cluster.urls
        expected = await undisturbed(url)
        async with running_load(url, FIELDS, expected, CLIENTS) as load:
            await load.another(BETWEEN)
            for _ in range(3):
                assert await cluster.start_router() is None
                assert await cluster.routers.pop(0).leave() == 0
                await load.another(BETWEEN)
        print(f"{load.whole} answers")
        assert load.wrong == {}


async def test_a_killed_router_takes_its_own_clients_with_it_and_nothing_else(running: Running) -> None:
    """Its replicas end its work once it has been away for long enough; another router's goes on."""
    orphan_after_s = 1.0
    async with running(routers=2, notice_s=0, orphan_after_s=orphan_after_s) as cluster:
        urls = cluster.urls
        async with client_of(urls[0]) as doomed, client_of(urls[1]) as other:
            cut = [Reader(doomed, body(max_tokens=1000)) for _ in range(4)]
            whole = [Reader(other, body(max_tokens=400)) for _ in range(4)]
            await asyncio.gather(*(reader.begun.wait() for reader in (*cut, *whole)))
            await until(lambda: read_metric(other, REPLICA_RUNNING), (8.0).__eq__)
            cluster.routers[0].kill()
            ends = await asyncio.gather(*(reader.task for reader in cut), return_exceptions=True)
            assert all(isinstance(end, httpx.TransportError) for end in ends)
            _, waited_s = await until(lambda: read_metric(other, REPLICA_RUNNING), lambda n: n <= 4)
            assert waited_s < orphan_after_s + 2
            assert await read_metric(other, IN_FLIGHT) == 4
            await asyncio.gather(*(reader.task for reader in whole))
            assert [(reader.errors, reader.done) for reader in whole] == [([], True)] * 4
            assert len({reader.text for reader in whole}) == 1


async def test_a_second_signal_ends_a_router_at_once(running: Running) -> None:
    async with running(routers=1, notice_s=20) as cluster:
        (url,), (router,) = cluster.urls, cluster.routers
        async with client_of(url) as client:
            reader = Reader(client, body(max_tokens=1000))
            await reader.begun.wait()
            router.terminate()

            async def ready() -> int:
                return (await client.get("/ready")).status_code

            await until(ready, (503).__eq__)
            began_s = time.monotonic()
            router.terminate()
            assert await router.left() == 0
            assert time.monotonic() - began_s < 5
            with pytest.raises(httpx.TransportError):
                await reader.task
