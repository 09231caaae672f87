"""`forebay serve` as a person runs it: on Ray, with processes that die and signals that come."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from cluster.model import ModelFolder
from ops.examples.priority import demonstrate
from tests.line import until
from tests.ray.conftest import Served, served
from tests.ray.streams import Reader, body, client_of
from tests.tiny_model import make_tiny_llama

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STREAMS = 64


def served_name(model: ModelFolder) -> str:
    return model.path.name


async def test_a_killed_replica_costs_no_stream_its_text_and_comes_back_and_is_used(
    instance: Served, tiny_model: ModelFolder
) -> None:
    model = served_name(tiny_model)
    async with client_of(instance.url) as client:
        reference = (await client.post("/v1/completions", json=body(model=model, stream=False))).json()
        text = reference["choices"][0]["text"]
        readers = [Reader(client, body(model=model)) for _ in range(STREAMS)]
        await asyncio.gather(*(reader.begun.wait() for reader in readers))
        before = instance.replicas()
        victim, pid = sorted(before.items())[0]
        os.kill(pid, signal.SIGKILL)
        await asyncio.gather(*(reader.task for reader in readers))
        for reader in readers:
            assert reader.done != bool(reader.errors), "a stream ends with [DONE] or with one error, never silently"
            assert len(reader.errors) <= 1
        assert [r.text == text for r in readers if r.done].count(False) == 0
        assert sum(r.done for r in readers) == STREAMS, "what ran on the killed replica goes on elsewhere"

        async def replicas() -> dict[str, int]:
            return instance.replicas()

        after, _ = await until(replicas, lambda now: len(now) == 2 and victim not in now, within_s=60)
        (newcomer,) = set(after) - set(before)

        async def newcomer_steps() -> int:
            await asyncio.gather(
                *(client.post("/v1/completions", json=body(model=model, max_tokens=4, stream=False)) for _ in range(8))
            )
            reports = {r["entry"]["replica_id"]: r["report"] for r in instance.status()["cluster"]["replicas"]}
            return int(reports[newcomer]["load"]["tokens_total"]) if reports.get(newcomer) else 0

        await until(newcomer_steps, lambda tokens: tokens > 0, within_s=30)


async def test_streams_survive_pauses_of_the_router_and_of_a_replica(instance: Served, tiny_model: ModelFolder) -> None:
    """A suspended machine, a stopped process: silence on both sides, and no engine has died."""
    model = served_name(tiny_model)
    async with client_of(instance.url) as client:
        reference = (await client.post("/v1/completions", json=body(model=model, max_tokens=900, stream=False))).json()
        readers = [Reader(client, body(model=model, max_tokens=900)) for _ in range(16)]
        await asyncio.gather(*(reader.begun.wait() for reader in readers))
        (router,) = instance.status()["cluster"]["routers"]
        paused = [router["pid"], router["pid"], router["pid"], *instance.replicas().values()]
        for pid in paused:
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(3.6)
            os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(0.3)
        await asyncio.gather(*(reader.task for reader in readers))
        assert [reader.errors for reader in readers] == [[]] * 16
        assert {reader.text for reader in readers} == {reference["choices"][0]["text"]}


async def test_streams_go_on_while_the_controller_is_dead_and_it_comes_back(
    instance: Served, tiny_model: ModelFolder
) -> None:
    model = served_name(tiny_model)
    async with client_of(instance.url) as client:
        readers = [Reader(client, body(model=model, max_tokens=900)) for _ in range(8)]
        await asyncio.gather(*(reader.begun.wait() for reader in readers))
        cluster = instance.status()["cluster"]
        generation = cluster["controller_generation"]["number"]
        os.kill(cluster["controller_pid"], signal.SIGKILL)
        (answer,) = (await client.post("/v1/completions", json=body(model=model, max_tokens=3, stream=False))).json()[
            "choices"
        ]
        assert answer["finish_reason"] == "length"
        await asyncio.gather(*(reader.task for reader in readers))
        assert all(reader.done for reader in readers)

        async def status() -> dict[str, Any]:
            return instance.status()

        again, _ = await until(
            status, lambda s: s["cluster"] is not None and len(s["cluster"]["replicas"]) == 2, within_s=30
        )
        assert again["cluster"]["controller_generation"]["number"] > generation


def test_ctrl_c_lets_streams_finish_and_leaves_nothing(tiny_model: ModelFolder, tmp_path: Path) -> None:
    async def run(instance: Served) -> list[Reader]:
        async with client_of(instance.url) as client:
            readers = [Reader(client, body(model=served_name(tiny_model), max_tokens=900)) for _ in range(8)]
            await asyncio.gather(*(reader.begun.wait() for reader in readers))
            instance.interrupt()

            async def refused() -> bool:
                try:
                    await client.get("/health", headers={"connection": "close"})
                except httpx.ConnectError:
                    return True
                return False

            await until(refused, bool, within_s=10)
            await asyncio.gather(*(reader.task for reader in readers))
            return readers

    with served(tiny_model, tmp_path) as instance:
        family = instance.family()
        readers = asyncio.run(run(instance))
        assert [reader.done for reader in readers] == [True] * 8
        assert instance.wait(60) == 0, instance.output.read_text()
        shown = instance.output.read_text()
    _, alive = psutil.wait_procs(family, timeout=5)
    assert alive == []
    assert list((tmp_path / "cache" / "run").glob("*")) == []
    assert shown.splitlines()[-1] == "Stopped; nothing is left running."
    assert "raylet" not in shown, "what Ray says on its way out is no concern of the person at the terminal"


def test_a_second_ctrl_c_ends_at_once_and_leaves_nothing(tiny_model: ModelFolder, tmp_path: Path) -> None:
    async def run(instance: Served) -> float:
        async with client_of(instance.url) as client:
            readers = [Reader(client, body(model=served_name(tiny_model), max_tokens=900)) for _ in range(STREAMS)]
            await asyncio.gather(*(reader.begun.wait() for reader in readers))
            instance.interrupt()
            await asyncio.sleep(0.3)
            started = time.monotonic()
            instance.interrupt()
            code = await asyncio.to_thread(instance.wait, 30)
            assert code == 130, instance.output.read_text()
            await asyncio.gather(*(reader.task for reader in readers), return_exceptions=True)
            assert not all(reader.done for reader in readers)
            return time.monotonic() - started

    with served(tiny_model, tmp_path) as instance:
        family = instance.family()
        assert asyncio.run(run(instance)) < 10
    _, alive = psutil.wait_procs(family, timeout=5)
    assert alive == []


def test_sigterm_while_ray_starts_ends_what_was_started_and_says_so(tiny_model: ModelFolder, tmp_path: Path) -> None:
    """Ray has handlers of its own then."""
    command = [sys.executable, "-m", "ops.cli", "serve", "--port", "0", "--model", str(tiny_model.path)]
    environment = os.environ | {"FOREBAY_CACHE_DIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "Starting Ray …\n"
        root = psutil.Process(process.pid)
        while not (family := root.children(recursive=True)):  # the first of Ray's own is there
            time.sleep(0.05)
        process.terminate()
        said = process.stdout.read()
    assert (process.returncode, said) == (130, "Interrupted while starting; ending what was started …\n")
    _, alive = psutil.wait_procs(family, timeout=5)
    assert alive == []
    assert list((tmp_path / "run").glob("*")) == []


def test_when_ray_itself_dies_serve_says_so_and_leaves_nothing(tiny_model: ModelFolder, tmp_path: Path) -> None:
    with served(tiny_model, tmp_path, "--replicas", "1") as instance:
        family = instance.family()
        (raylet,) = [process for process in family if process.name() == "raylet"]
        raylet.kill()
        assert instance.wait(60) == 1
        assert (
            instance.output.read_text().splitlines()[-1]
            == "forebay: Ray has ended (raylet); what it served is gone with it"
        )
    _, alive = psutil.wait_procs(family, timeout=5)
    assert alive == []


def test_a_ray_that_does_not_start_is_one_clear_line(tiny_model: ModelFolder, tmp_path: Path) -> None:
    """Its sockets' paths are too long for the kernel where temporary files lie deep."""
    deep = tmp_path / ("d" * 90)
    deep.mkdir()
    command = [sys.executable, "-m", "ops.cli", "serve", "--port", "0", "--model", str(tiny_model.path)]
    environment = os.environ | {"TMPDIR": str(deep), "FOREBAY_CACHE_DIR": str(tmp_path / "cache")}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert line.startswith("forebay: Ray did not start: ")
    assert "107 bytes" in line
    assert list(deep.iterdir()) == []


def test_two_instances_do_not_disturb_each_other(instance: Served, tiny_model: ModelFolder, tmp_path: Path) -> None:
    def answer(of: Served) -> str:
        fields = body(model=served_name(tiny_model), max_tokens=8, stream=False)
        return str(httpx.post(f"{of.url}/v1/completions", json=fields, timeout=30).raise_for_status().json()["choices"])

    before = answer(instance)
    with served(tiny_model, tmp_path, "--replicas", "1") as second:
        assert second.url != instance.url
        assert answer(second) == answer(instance) == before
        assert len(second.replicas()) == 1
        assert len(instance.replicas()) == 2
    assert answer(instance) == before
    assert len(instance.replicas()) == 2


def test_the_readme_example_holds_on_the_real_model(smollm2: ModelFolder, tmp_path: Path) -> None:
    """Every slot of both replicas is taken, one request is preempted, and every text is that of a run alone."""
    with served(smollm2, tmp_path, profile="local") as instance:
        result = asyncio.run(demonstrate(instance.url))
    assert result.slots == 48
    assert result.preemptions == 1
    assert result.texts_equal == result.slots
    assert result.flex_ended_before_it == 0


def test_status_shows_the_replicas_and_as_json_what_the_router_answered(instance: Served) -> None:
    command = [sys.executable, "-m", "ops.cli", "status", "--url", instance.url]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    state = json.loads(
        subprocess.run([*command, "--json"], capture_output=True, text=True, check=True, timeout=60).stdout
    )
    for replica in state["cluster"]["replicas"]:
        assert replica["entry"]["replica_id"] in shown
    assert "0/32" in shown


def test_weights_that_are_no_weights_are_refused_before_anything_starts(tmp_path: Path) -> None:
    model = make_tiny_llama(tmp_path / "noise")
    (model.path / "model.safetensors").write_bytes(b"these are not the weights")
    command = [sys.executable, "-m", "ops.cli", "serve", "--port", "0", "--model", str(model.path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert "model.safetensors is no safetensors file" in line
    assert "Starting" not in ended.stdout


def test_a_model_that_does_not_load_is_one_clear_line_and_exit_code_2(tmp_path: Path) -> None:
    model = make_tiny_llama(tmp_path / "broken")
    weights = model.path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    command = [sys.executable, "-m", "ops.cli", "serve", "--port", "0", "--replicas", "1", "--model", str(model.path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2, ended.stderr
    (line,) = ended.stderr.splitlines()
    assert str(model.path) in line or "tiny-llama" in line or "broken" in line


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--port", "{port}"], "port {port} is in use"),
        (["--model", "{folder}"], "no config.json"),
        (["--model", "/nonexistent"], "is not a folder"),
        (["--replicas", "100000"], "too little memory"),
        (["--profile", "nope"], "no profile 'nope'"),
    ],
)
def test_what_cannot_be_is_one_clear_line_and_exit_code_2(
    arguments: list[str], named: str, tiny_model: ModelFolder, tmp_path: Path
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        fill = {"port": str(taken.getsockname()[1]), "folder": str(tmp_path)}
        options = [a.format(**fill) for a in arguments]
        if "--model" not in options:
            options += ["--model", str(tiny_model.path)]
        ended = subprocess.run(
            [sys.executable, "-m", "ops.cli", "serve", *options],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert ended.returncode == 2
    assert named.format(**fill) in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1
