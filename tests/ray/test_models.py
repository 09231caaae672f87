"""Two models served by one `forebay serve`: a Serve deployment each, one router for both."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.model import ModelFolder
from ops import cli
from tests.line import until
from tests.ray.conftest import PROFILE, served
from tests.ray.streams import Reader, body, client_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


async def test_two_models_are_served_and_a_replica_that_dies_comes_back_to_its_own(
    tiny_model: ModelFolder, other_model: ModelFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine, names = PROFILE["engine"], (tiny_model.name, other_model.name)
    models = [{"model": str(m.path), "replicas": 1, "engine": engine} for m in (tiny_model, other_model)]
    with served(None, tmp_path, profile={"models": models}) as instance:
        assert all(name in instance.output.read_text() for name in names)

        async def replicas() -> dict[str, tuple[str, int]]:
            """Id and process of each model's replica."""
            cluster = instance.status()["cluster"]
            entries = cluster["replicas"] if cluster else []
            return {r["entry"]["model"]: (r["entry"]["replica_id"], r["pid"]) for r in entries}

        before = await replicas()
        assert set(before) == set(names)
        async with client_of(instance.url) as client:
            readers = [Reader(client, body(model=name, max_tokens=300)) for name in names for _ in range(8)]
            await asyncio.gather(*(reader.begun.wait() for reader in readers))
            os.kill(before[names[0]][1], signal.SIGKILL)
            await asyncio.gather(*(reader.task for reader in readers))
            assert all(reader.done and not reader.errors for reader in readers)
            texts = [{reader.text for reader in readers[:8]}, {reader.text for reader in readers[8:]}]
            assert [len(text) for text in texts] == [1, 1]
            assert texts[0] != texts[1]
            after, _ = await until(
                replicas, lambda now: set(now) == set(names) and now[names[0]] != before[names[0]], within_s=60
            )
            assert after[names[1]] == before[names[1]]
            again = await client.post("/v1/completions", json=body(model=names[0], max_tokens=300, stream=False))
            assert again.json()["choices"][0]["text"] in texts[0]
        capsys.readouterr()
        assert cli.run(("status", "--url", instance.url)) == 0
        shown = capsys.readouterr().out
        assert all(name in shown for name in names)


def test_a_start_that_takes_longer_than_the_profile_allows_says_what_it_waited_for(
    tiny_model: ModelFolder, tmp_path: Path
) -> None:
    profile = tmp_path / "impatient.yaml"
    profile.write_text(json.dumps(PROFILE | {"replicas": 1, "health": {"start_timeout_s": 0.01}}))
    command = [sys.executable, "-m", "ops.cli", "serve", "--port", "0", "--profile", str(profile)]
    command += ["--model", str(tiny_model.path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert "not ready after 0.01 s (health.start_timeout_s): 0 of 1 replicas of tiny-llama loaded" in line
