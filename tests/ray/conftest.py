"""Real instances: `forebay serve` as a process, on a Ray cluster of its own, with the tiny model."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from cluster.model import ModelFolder

READY_TIMEOUT_S = 120.0
PROFILE = {"engine": {"blocks": 1024, "max_model_len": 1024, "slots": 32, "step_token_budget": 64}}


@dataclass
class Endpoint:
    """A Forebay on Ray, as one of its routers tells of it."""

    url: str

    def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = httpx.get(f"{self.url}/status", timeout=10).raise_for_status().json()
        return answer

    def replicas(self) -> dict[str, int]:
        """Process ids of the replicas that the controller knows, by replica."""
        cluster = self.status()["cluster"]
        return {r["entry"]["replica_id"]: r["pid"] for r in cluster["replicas"]} if cluster else {}


@dataclass
class Served(Endpoint):
    """One `forebay serve`. `family` are its processes and all that they started."""

    process: subprocess.Popen[str]
    output: Path
    cache: Path
    ready_after_s: float

    def family(self) -> list[psutil.Process]:
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def wait(self, timeout_s: float) -> int:
        return self.process.wait(timeout_s)


@contextlib.contextmanager
def served(
    model: ModelFolder | None,
    folder: Path,
    *options: str,
    profile: str | Mapping[str, object] = PROFILE,
    ready_within_s: float = READY_TIMEOUT_S,
) -> Iterator[Served]:
    """Start an instance of a profile, by its name or its content, and wait until it says that it is ready; leaving
    interrupts it twice if it still runs. `model` is for a profile that names none."""
    folder.mkdir(parents=True, exist_ok=True)
    own_profile, output, cache = folder / "profile.yaml", folder / "output.txt", folder / "cache"
    if not isinstance(profile, str):
        own_profile.write_text(json.dumps(profile))
        profile = str(own_profile)
    of_model = [] if model is None else ["--model", str(model.path)]
    arguments = ["serve", "--profile", profile, *of_model, "--port", "0", *options]
    started = time.monotonic()
    with output.open("w") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", "ops.cli", *arguments],
            stdout=sink,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"FOREBAY_CACHE_DIR": str(cache)},
        )
    try:
        while not (url := _url(cache)):
            assert process.poll() is None, f"it ended with {process.returncode}: {output.read_text()}"
            assert time.monotonic() - started < ready_within_s, output.read_text()
            time.sleep(0.05)
        yield Served(url, process, output, cache, time.monotonic() - started)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            raise


def _url(cache: Path) -> str:
    """Empty until the instance is ready."""
    for state in cache.glob("run/*.json"):
        return str(json.loads(state.read_text())["url"])
    return ""


@pytest.fixture(scope="module")
def instance(tiny_model: ModelFolder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One instance for the tests of a module that leave it as they found it."""
    with served(tiny_model, tmp_path_factory.mktemp("instance")) as running:
        yield running
