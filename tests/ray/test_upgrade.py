"""Serve replaces the controller, every replica and both routers while clients ask: none of them sees an error."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from pathlib import Path

import pytest

from cluster.model import ModelFolder
from deployments.settings import Instance, Profile, ServeAccess, url_of
from tests.closed_loop import running_load
from tests.line import until
from tests.ray.conftest import Served, served
from tests.ray.streams import body, client_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

TOKENS = 64
CLIENTS = 4
"""On each router."""
PROMPTS = ["once upon a time", "twice upon a time"]
PROFILE = {
    "replicas": 2,
    "routers": 2,
    "engine": {"blocks": 1024, "max_model_len": 1024, "slots": 32, "step_token_budget": 64},
    # Shorter than some answers take here, so that what runs is handed back too.
    "health": {"hand_back_after_s": 0.2},
}


async def test_a_rollout_of_everything_costs_no_client_an_error(tiny_model: ModelFolder, tmp_path: Path) -> None:
    """No balancer stands before the routers: a new one takes the port of an old one, which then leaves. The new profile
    begins with one replica, but lets the load decide: as many stay as there are."""
    fields = body(model=tiny_model.path.name, max_tokens=TOKENS)
    with served(tiny_model, tmp_path, profile=PROFILE) as instance:
        first = int(instance.url.rsplit(":", 1)[1])
        changed = {"replicas": 1, "scale": {"max": 3}, "router": {"port": first, "max_queue_s": 599.0}}
        profile = Profile.model_validate(PROFILE | changed)
        urls = [url_of("127.0.0.1", port) for port in profile.ports]
        (state,) = (instance.cache / "run").glob("*.json")
        folder = Path(json.loads(state.read_text())["folder"])
        instance_file = tmp_path / "instance.json"
        upgraded = Instance(
            profile=profile,
            model_folders=(tiny_model.path,),
            secret_path=folder / "secret",
            serve=ServeAccess(url="http://127.0.0.1:9"),  # where nobody is: this controller changes no number
        )
        instance_file.write_text(upgraded.model_dump_json())

        async with client_of(urls[0]) as client:
            answers = [
                await client.post("/v1/completions", json=fields | {"prompt": p, "stream": False}) for p in PROMPTS
            ]
        expected = {p: a.raise_for_status().json()["choices"][0]["text"] for p, a in zip(PROMPTS, answers, strict=True)}
        before = pids(instance)
        assert len(before) == 5, "two routers, two replicas and the controller"
        async with contextlib.AsyncExitStack() as stack:
            loads = [await stack.enter_async_context(running_load(url, fields, expected, CLIENTS)) for url in urls]
            await asyncio.gather(*(load.another(5 * CLIENTS) for load in loads))
            began_s = time.monotonic()
            command = (
                sys.executable,
                "-m",
                "tests.ray.deploy",
                str(folder),
                ray_address(instance),
                "run",
                str(instance_file),
            )
            assert await (await asyncio.create_subprocess_exec(*command)).wait() == 0

            async def now() -> frozenset[int]:
                return pids(instance)

            after, _ = await until(now, lambda seen: len(seen) == 5 and not seen & before, within_s=120)
            took_s = time.monotonic() - began_s
            await asyncio.gather(*(load.another(5 * CLIENTS) for load in loads))
        print(f"{sum(load.whole for load in loads)} answers; everything was replaced in {took_s:.1f} s")
        assert [load.wrong for load in loads] == [{}, {}]
        assert len(after) == 5


def pids(instance: Served) -> frozenset[int]:
    """Of all that the controller knows, and its own; none while there is no controller."""
    cluster = instance.status()["cluster"]
    if cluster is None:
        return frozenset()
    return frozenset({cluster["controller_pid"], *(part["pid"] for part in cluster["routers"] + cluster["replicas"])})


def ray_address(instance: Served) -> str:
    """Of its cluster, as its raylet was told."""
    (raylet,) = [process for process in instance.family() if process.name() == "raylet"]
    prefix = "--gcs-address="
    (address,) = [word.removeprefix(prefix) for word in raylet.cmdline() if word.startswith(prefix)]
    return address
