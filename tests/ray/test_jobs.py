"""What `ray job submit` starts: Forebay itself on a Ray cluster that runs, a batch on it, a load test of it. What is seen of the
batch on the dashboards, an alert that is delivered, and what becomes of batches whose cluster is started again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from cluster.config import DEFAULT_CLASSES
from cluster.metrics import REQUESTS
from cluster.model import ModelFolder
from cluster.types import Outcome
from deployments.checks import free_ports
from ops.alerts.__main__ import RULES_FILE
from tests.alertmanager import ALERTMANAGER, Webhook, alertmanager, webhook
from tests.alerts.kit import ALERTS
from tests.e2e.test_dashboards import queries
from tests.line import read_metric, until
from tests.prometheus import PROMETHEUS, SCRAPE_INTERVAL_S, prometheus, query, query_range
from tests.ray.conftest import Endpoint
from tests.ray.streams import Reader, body, client_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
LIMIT_S = 120.0
TELL_S = 30.0
"""For scrapes, evaluations and messages."""
NOT_HERE = {
    "forebay-overview / Turned away at the door / A": "nobody is",
    "forebay-batch / Until the queue is served / A": "a batch sends no more than is begun at once, so that nothing need wait",
}
"""Queries that may be empty, and why."""
CLASSES = [
    c.model_dump(mode="json") | {"first_token_slo_s": 5.0 if c.name == "interactive" else None} for c in DEFAULT_CLASSES
]
LINES = 360
TTFT_MORE_S = 0.5
"""What a batch may cost people, with a replica killed meanwhile; without priorities they would wait for all that is in flight."""


@dataclass
class Cluster:
    """A Ray cluster as its operator has it, from `start` to `stop` or `kill`, and from `start` again."""

    folder: Path
    model: ModelFolder
    port: int
    dashboard: str = field(init=False)
    head: subprocess.Popen[str] = field(init=False)

    def start(self) -> None:
        # Jobs call `python` by this name.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.head = subprocess.Popen(
            [sys.executable, "-m", "tests.ray.head", str(self.folder), "{}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PATH": path},
        )
        assert self.head.stdout is not None
        self.dashboard = next(line.strip() for line in self.head.stdout if line.startswith("http"))

    def stop(self) -> None:
        """Does nothing where it has ended."""
        if self.head.returncode is not None:
            return
        assert self.head.stdin is not None
        assert self.head.stdout is not None
        self.head.stdin.close()
        with self.head.stdout as output:
            output.read()
        self.head.wait(60)

    def kill(self) -> None:
        """Everything that it consists of at once, what runs on it too; returns when it is gone."""
        family = psutil.Process(self.head.pid).children(recursive=True)
        self.head.kill()
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        _, left = psutil.wait_procs(family, timeout=LIMIT_S)
        assert not left
        self.stop()

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(f"http://127.0.0.1:{self.port}")

    @property
    def profile(self) -> Path:
        return self.folder / "profile.yaml"

    def cli(self, *command: str, options: tuple[str, ...] = ()) -> str:
        """What `ray job submit --working-dir .` prints, given in the repository; the job must succeed."""
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.folder / "ray-token")}
        ray = str(Path(sys.executable).with_name("ray"))
        done = subprocess.run(
            [ray, "job", "submit", "--address", self.dashboard, "--working-dir", ".", *options, "--", *entry(command)],
            cwd=ROOT,
            env=os.environ | token,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        said = done.stdout + done.stderr
        assert done.returncode == 0, said
        return said

    def begin(self, *command: str) -> str:
        """The same by the call that it makes, where the code is what the cluster has installed; returns the job's id."""
        told = self.ask("POST", "/api/jobs/", json={"entrypoint": " ".join(entry(command))})
        return str(told["submission_id"])

    def end(self, job: str, expected: str = "SUCCEEDED") -> str:
        """What it printed, once it has ended like that."""
        end_s = time.monotonic() + LIMIT_S
        while (status := self.ask("GET", f"/api/jobs/{job}")["status"]) in ("PENDING", "RUNNING"):
            assert time.monotonic() < end_s, self.log(job)
            time.sleep(0.1)
        assert status == expected, self.log(job)
        return self.log(job)

    def log(self, job: str) -> str:
        return str(self.ask("GET", f"/api/jobs/{job}/logs")["logs"])

    def up(self, *options: str) -> tuple[str, ...]:
        return ("deployments.up", "--profile", str(self.profile), *options)

    def ask(self, method: str, path: str, **options: Any) -> Any:
        """Ray's dashboard."""
        bearer = {"Authorization": f"Bearer {(self.folder / 'ray-token').read_text()}"}
        return (
            httpx.request(method, self.dashboard + path, headers=bearer, timeout=30, **options)
            .raise_for_status()
            .json()
        )

    def pids(self) -> set[int]:
        """Of controller, routers and replicas."""
        told = self.serve()["deployments"].values()
        return {replica["pid"] for deployment in told for replica in deployment["replicas"]}

    def serve(self) -> dict[str, Any]:
        application: dict[str, Any] = self.ask("GET", "/api/serve/applications/")["applications"]["forebay"]
        return application

    def processes(self, *words: str) -> list[psutil.Process]:
        """Those of the cluster whose command has all these words."""
        found = []
        for process in psutil.Process(self.head.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if set(words) <= set(process.cmdline()):
                    found.append(process)
        return found


def entry(command: tuple[str, ...]) -> tuple[str, ...]:
    return ("python", "-m", *command)


@pytest.fixture(scope="module")
def cluster(tiny_model: ModelFolder) -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="fb-"))  # short: Ray puts sockets deep below it
    for name in ("ray-token", "secret"):
        (folder / name).touch(mode=0o600)
        (folder / name).write_text(secrets.token_hex(32))
    made = Cluster(folder, tiny_model, free_ports("127.0.0.1", 1))
    profile = {
        "model": str(tiny_model.path),
        "served_name": "tiny-llama",
        "replicas": 2,
        "engine": {"blocks": 1024, "max_model_len": 1024, "slots": 16, "step_token_budget": 64},
        "router": {"port": made.port, "classes": CLASSES},
    }
    made.profile.write_text(json.dumps(profile))
    made.start()
    try:
        yield made
    finally:
        made.stop()
        shutil.rmtree(folder)


def test_up_deploys_forebay_and_leaves_alone_what_is_deployed_already(cluster: Cluster) -> None:
    began = time.monotonic()
    said = cluster.cli(*cluster.up("--secret", str(cluster.folder / "secret"), "--wait"))
    print(f"deployed by a job after {time.monotonic() - began:.1f} s")
    assert f"served at {cluster.endpoint.url}" in said
    assert len(cluster.endpoint.replicas()) == 2
    before = cluster.pids()
    assert "nothing to change" in cluster.end(cluster.begin(*cluster.up()))
    assert cluster.pids() == before


def write_batch(path: Path, lines: int) -> None:
    path.write_text("".join(json.dumps(asked(number)) + "\n" for number in range(lines)))


def asked(number: int) -> dict[str, Any]:
    fields = {"model": "tiny-llama", "prompt": f"line {number}", "max_tokens": 96, "temperature": 0, "ignore_eos": True}
    return {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/completions", "body": fields}


class Interactive:
    """People: one stream after another, each with the time of its first token."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self.first_token_s: list[float] = []
        self.task = asyncio.create_task(self._go())

    async def _go(self) -> None:
        while True:
            began_s = time.monotonic()
            reader = Reader(self._client, body(max_tokens=4, service_tier="priority"))
            await reader.begun.wait()
            self.first_token_s.append(time.monotonic() - began_s)
            await reader.task
            assert reader.done
            await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def interactive(url: str) -> AsyncIterator[Interactive]:
    async with client_of(url) as client:
        people = Interactive(client)
        try:
            yield people
        finally:
            if people.task.done():
                people.task.result()
            people.task.cancel()
            await asyncio.wait([people.task])


@dataclass
class Watched:
    """What an operator has beside the cluster: Prometheus with the rules, and somebody who is told of alerts."""

    prometheus: str
    hook: Webhook
    began_s: float

    async def shows(self, dashboards: set[str]) -> None:
        """No query of a panel of theirs is empty, but for what did not happen, and not all of any is zero."""
        over_s = time.time()
        await until(lambda: query(self.prometheus, "min(timestamp(up))"), lambda at: float(at[0]["value"][1]) > over_s)
        empty, moved = set[str](), set[str]()
        for name, expression in queries(round(over_s - self.began_s)):
            dashboard = name.partition(" / ")[0]
            if dashboard in dashboards:
                found = await query_range(self.prometheus, expression, self.began_s, time.time(), SCRAPE_INTERVAL_S)
                values = [float(value) for series in found for _, value in series["values"]]
                empty |= set() if any(map(math.isfinite, values)) else {name}
                moved |= {dashboard} if any(value > 0 for value in values) else set()
        assert empty <= NOT_HERE.keys()
        assert moved == dashboards

    async def tells(self, endpoint: Endpoint) -> None:
        """That no replica takes work, once all are drained, and that it is over."""
        alert = ALERTS["ForebayNoReplicaReady"]

        def is_it(status: str) -> Callable[[dict[str, Any]], bool]:
            return lambda told: (told["labels"]["alertname"], told["status"]) == (alert.name, status)

        async with client_of(endpoint.url) as client:
            names = list(endpoint.replicas())
            for name in names:
                (await client.put(f"/drain/{name}")).raise_for_status()
            fired = await self.hook.heard(is_it("firing"), alert.for_s + TELL_S)
            assert fired["annotations"]["runbook_url"] == f"ops/runbooks/{alert.name}.md"
            for name in names:
                (await client.delete(f"/drain/{name}")).raise_for_status()
            await self.hook.heard(is_it("resolved"), TELL_S)


@contextlib.asynccontextmanager
async def watched(endpoint: Endpoint, folder: Path) -> AsyncIterator[Watched | None]:
    """None where Prometheus or Alertmanager is not installed."""
    if PROMETHEUS is None or ALERTMANAGER is None:
        yield None
        return
    async with (
        webhook() as hook,
        alertmanager(hook, folder) as told,
        prometheus([endpoint.url], folder, [RULES_FILE], told) as url,
    ):
        await until(lambda: query(url, "up == 1"), bool)
        yield Watched(url, hook, time.time())


async def test_a_batch_that_is_stopped_and_killed_and_loses_a_replica_is_answered_once_and_nobody_waits_for_it(
    cluster: Cluster, tmp_path: Path
) -> None:
    async with watched(cluster.endpoint, tmp_path) as watch:
        await batch_is_stopped_and_killed(cluster, tmp_path)
        if watch is not None:
            await watch.shows({"forebay-overview", "forebay-batch"})
            await watch.tells(cluster.endpoint)


async def batch_is_stopped_and_killed(cluster: Cluster, tmp_path: Path) -> None:
    into, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_batch(into, LINES)
    batch = ("deployments.jobs.batch", "--input", str(into), "--output", str(out))

    async def answered() -> int:
        return out.read_bytes().count(b"\n") if out.exists() else 0

    async with interactive(cluster.endpoint.url) as people:
        await until(lambda: _of(people.first_token_s), lambda times: len(times) >= 10)
        alone_s = list(people.first_token_s)
        people.first_token_s.clear()

        job = cluster.begin(*batch)
        first, _ = await until(answered, lambda lines: lines >= LINES // 6, LIMIT_S)
        cluster.ask("POST", f"/api/jobs/{job}/stop")  # as `ray job stop` does
        log = await asyncio.to_thread(cluster.end, job, "STOPPED")
        assert f"of {LINES} answered; submit the job again to go on" in log
        kept = out.read_bytes()

        job = cluster.begin(*batch)
        await until(answered, lambda lines: lines >= LINES // 3, LIMIT_S)
        replicas = cluster.endpoint.replicas()
        os.kill(next(iter(replicas.values())), signal.SIGKILL)
        await until(answered, lambda lines: lines >= LINES // 2, LIMIT_S)
        for process in cluster.processes("deployments.jobs.batch", str(out)):
            process.kill()
        await asyncio.to_thread(cluster.end, job, "FAILED")
        second = await answered()

        log = await asyncio.to_thread(cluster.cli, *batch)
    assert f"all {LINES} lines answered, 0 of them failed" in log
    assert out.read_bytes().startswith(kept)
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert {a["custom_id"] for a in answers} == {f"line-{n}" for n in range(LINES)}
    assert len(answers) == LINES
    assert all(a["response"]["body"]["usage"]["completion_tokens"] == 96 for a in answers)
    beside_s = people.first_token_s
    print(
        f"stopped at {first}, killed at {second} of {LINES}; first token, p50/max: alone "
        f"{statistics.median(alone_s) * 1000:.0f}/{max(alone_s) * 1000:.0f} ms, beside the batch "
        f"{statistics.median(beside_s) * 1000:.0f}/{max(beside_s) * 1000:.0f} ms of {len(beside_s)}"
    )
    assert statistics.median(beside_s) < statistics.median(alone_s) + TTFT_MORE_S


async def _of(times: list[float]) -> list[float]:
    return times


async def test_a_change_replaces_what_runs_and_no_stream_ends_for_it(cluster: Cluster) -> None:
    before = cluster.pids()
    async with client_of(cluster.endpoint.url) as client:

        def read() -> list[Reader]:
            return [Reader(client, body(max_tokens=700, prompt=f"stream {number}")) for number in range(6)]

        readers = read()
        for reader in readers:
            await reader.begun.wait()
        job = cluster.begin(*cluster.up("--set", "router.max_queue_s=300", "--set", "replicas=1", "--wait"))
        said = await asyncio.to_thread(cluster.end, job)
        alone = read()
        for reader in (*readers, *alone):
            await reader.task
    assert "profile.router.max_queue_s: 600.0 → 300.0" in said
    assert "profile.models[0].replicas: 2 → 1" in said
    assert not before & cluster.pids()
    assert len(cluster.endpoint.replicas()) == 1
    assert all(reader.done and not reader.errors for reader in (*readers, *alone))
    assert [reader.text for reader in readers] == [reader.text for reader in alone]


def test_a_load_test_runs_as_a_job_and_its_report_is_in_the_log(cluster: Cluster) -> None:
    trace = str(ROOT / "tests" / "data" / "trace_azure.csv")
    job = cluster.begin("ops.jobs.loadtest", "--trace", trace, "--token-scale", "1/64", "--time-scale", "1/8")
    report = json.loads(next(line for line in cluster.end(job).splitlines() if line.startswith('{"command"')))
    rows = {row["name"]: row["value"] for row in report["rows"]}
    assert (rows["all.requests"], rows["all.errors"]) == (len(Path(trace).read_text().splitlines()) - 1, 0)


class Batch:
    """One of `lines` lines, with its files in a folder."""

    def __init__(self, folder: Path, name: str, lines: int) -> None:
        self._into, self._out, self.lines = folder / f"{name}.in.jsonl", folder / f"{name}.out.jsonl", lines
        write_batch(self._into, lines)
        self.command = ("deployments.jobs.batch", "--input", str(self._into), "--output", str(self._out))

    def answered(self) -> list[str]:
        """The whole lines of its output."""
        *whole, _ = self._out.read_text().split("\n") if self._out.exists() else [""]
        return whole


async def until_answered(lines: int, *batches: Batch) -> None:
    """Of each batch so many at least."""

    async def fewest() -> int:
        return min(len(batch.answered()) for batch in batches)

    await until(fewest, lines.__le__, LIMIT_S)


@contextlib.asynccontextmanager
async def outside_of_ray(*command: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process beside the cluster, which is ended if it still runs."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", *command, stdout=asyncio.subprocess.PIPE)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def test_batches_in_and_beside_a_cluster_that_is_started_again_go_on_where_they_were(
    cluster: Cluster, tmp_path: Path
) -> None:
    """One that is a job of it, submitted again; one that runs outside, which waits for a router to be back."""
    inside, outside = batches = Batch(tmp_path, "inside", 300), Batch(tmp_path, "outside", 120)
    deploy = cluster.up("--secret", str(cluster.folder / "secret"), "--set", "replicas=1", "--wait")

    async def done(*command: str) -> str:
        return await asyncio.to_thread(lambda: cluster.end(cluster.begin(*command)))

    cluster.begin(*inside.command, "--concurrency-max", "8")  # so that it lasts until the other has begun too
    await until_answered(1, inside)
    async with outside_of_ray(*outside.command, "--url", cluster.endpoint.url) as own:
        await until_answered(10, inside, outside)
        await asyncio.to_thread(cluster.kill)
        began_s = time.monotonic()
        await asyncio.to_thread(cluster.start)
        kept = [batch.answered() for batch in batches]  # also what was on its way to the disk
        await done(*deploy)
        away_s = time.monotonic() - began_s
        assert f"all {inside.lines} lines answered, 0 of them failed" in await done(*inside.command)
        said, _ = await own.communicate()
    assert own.returncode == 0
    assert f"all {outside.lines} lines answered, 0 of them failed" in said.decode()

    for batch, before in zip(batches, kept, strict=True):
        lines = batch.answered()
        assert lines[: len(before)] == before
        assert sorted(json.loads(line)["custom_id"] for line in lines) == sorted(
            f"line-{number}" for number in range(batch.lines)
        )
    async with client_of(cluster.endpoint.url) as client:
        served = await read_metric(client, REQUESTS, priority_class="batch", outcome=Outcome.FINISHED.value)
    print(f"{[len(before) for before in kept]} answered before; without a router for {away_s:.1f} s; {served:.0f} sent")
    assert all(10 <= len(before) < batch.lines for batch, before in zip(batches, kept, strict=True))
    assert served == sum(batch.lines for batch in batches) - sum(map(len, kept))
