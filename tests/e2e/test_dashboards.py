"""Every query of every dashboard, run by a real Prometheus that has scraped a real line under load: each returns data, and what the
load concerns is not zero.

Controllers, routers and replicas are processes of their own. The load is of three classes, on two routers: prefixes that are
shared, a drain, a pool too small for what runs, more than can be served, a replica that is killed. What stays zero all the
same is listed, with its reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import msgspec
import pytest

from cluster.metrics import (
    CONTINUED,
    GATE_HELD,
    MOVES,
    PREEMPTIONS,
    REFUSALS,
    REPLICA_RUNNING,
    SHARED,
    SUSPECTS,
)
from cluster.model import ModelFolder
from deployments.checks import free_ports
from deployments.settings import Profile, ServeAccess, url_of
from ops.dashboards.render import DASHBOARDS, document
from tests.e2e.test_faults import Heard
from tests.e2e.test_moves import emptied
from tests.line import read_metric, until
from tests.load import Flow, Offer, Offered
from tests.processes import Cluster, Process, running_cluster
from tests.prometheus import SCRAPE_INTERVAL_S, needs_prometheus, prometheus, query, query_range
from tests.ray.streams import client_of
from tests.unit.test_scaler import Dashboard as Serve

STEP_S = 0.02
ROUTERS, REPLICAS, SLOTS = 2, 2, 4
FLOWS = (Flow("priority", 8, 20.0), Flow("default", 16, 6.0), Flow("flex", 16, 4.0))
"""On each router. In all 640 tokens a second, half of them urgent, for replicas that make 400 at most: 8 slots, steps of 20 ms."""
LOADED_S = 12.0
CLASSES = ("interactive", "standard", "batch")

ZERO = {
    "forebay-replicas / Put out for faults / B": "the replica that is put out is one that has died, and it leaves the roster",
    "forebay-replicas / Prompt tokens that were run / B": "batching is continuous, and pads nothing",
    "forebay-replicas / Urgent work that had to wait / A": "a fault of its own: there is always one that can be preempted",
    "forebay-decisions / Errors of engines, by what was decided / A": "a fault of its own: no engine errs here",
    "forebay-decisions / Of superseded controllers / A": "there is one that leads, and none before it",
    "forebay-decisions / Deltas dropped and asked for again / A": "only what is on its way as an attempt ends comes too late",
    "forebay-decisions / Deltas dropped and asked for again / B": "no token is lost on the way",
}
"""What may be 0 under this load, by dashboard, panel and query, and why that is right."""


def profile() -> Profile:
    """Little room and small patience: what takes minutes elsewhere takes seconds here."""
    interactive, standard, batch = (
        {"name": name, "priority": priority, "service_tiers": [tier], "max_queued_requests": 20}
        for name, priority, tier in zip(CLASSES, (10, 0, -10), ("priority", "default", "flex"), strict=True)
    )
    interactive |= {"first_token_slo_s": 0.25, "max_queued_requests": 1000}
    standard |= {"first_token_slo_s": 2.0}
    batch |= {"longest_wait_s": 30.0}
    engine = {"slots": SLOTS, "step_token_budget": 128, "blocks": 48, "max_model_len": 512, "host_blocks": 24}
    router = {"minimum_share": 0.1, "ageing_after_s": 0.5, "outlier_faults": 1}
    first_port = free_ports("127.0.0.1", 2)
    return Profile.model_validate(
        {
            # Two routers that fill a replica at once are told that it is full.
            "engine": engine | {"max_held": 2 * SLOTS},
            "scale": {"min": REPLICAS, "max": REPLICAS, "average_s": 10.0},
            "router": router | {"classes": [interactive, standard, batch]},
            "control": {"standby": True},
            "metrics": {"replica_port": first_port, "controller_port": first_port + 1},
        }
    )


@contextlib.asynccontextmanager
async def line(model: ModelFolder, folder: Path) -> AsyncIterator[tuple[Cluster, list[str]]]:
    """It, and all that it shows metrics at. Replicas share a port, as on one host: the one that has it shows its own."""
    told, serve = profile(), Serve()
    replicas = [{"replica_id": f"replica-{number}", "state": "RUNNING"} for number in range(REPLICAS)]
    deployment = {"target_num_replicas": REPLICAS, "replicas": replicas}
    serve.answer = 200, {"applications": {"forebay": {"deployments": {model.name: deployment}}}}
    access = ServeAccess(url=serve.url)
    try:
        async with running_cluster(model, told, folder, step_s=STEP_S, routers=ROUTERS, serve=access) as cluster:
            ports = (told.metrics.replica_port, told.metrics.controller_port)
            yield cluster, [*cluster.urls, *(url_of("127.0.0.1", port) for port in ports if port is not None)]
    finally:
        serve.close()


def queries(range_s: int) -> Iterator[tuple[str, str]]:
    """Each query of a panel, by dashboard, panel and its letter, with its variables replaced as Grafana does while all is chosen
    that can be: a rate's window is four scrapes."""
    for one in DASHBOARDS:
        made = document(one)
        values = {
            variable["name"]: (variable["allValue"] if chosen == "$__all" else chosen)
            for variable in made["templating"]["list"]
            if variable["type"] == "query"
            for chosen in variable["current"]["value"]
        }
        values |= {v["name"]: v["query"] for v in made["templating"]["list"] if v["type"] == "textbox"}
        values |= {"__rate_interval": f"{4 * SCRAPE_INTERVAL_S}s", "__range": f"{range_s}s"}
        for panel in made["panels"]:
            for target in panel.get("targets", ()):
                parts = re.split(r"\$\{?(\w+)\}?", target["expr"])  # each second one is a variable's name
                expression = "".join(values[part] if n % 2 else part for n, part in enumerate(parts))
                yield f"{one.uid} / {panel['title']} / {target['refId']}", expression


@needs_prometheus
@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_every_query_of_a_panel_returns_data_and_what_the_load_concerns_is_not_zero(
    tiny_model: ModelFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with line(tiny_model, tmp_path) as (cluster, targets), prometheus(targets, tmp_path) as url:
        await until(lambda: query(url, "up == 1"), lambda up: len(up) == len(targets))
        began_s = time.time()
        async with client_of(cluster.urls[1]) as other:
            await idle_and_moved(cluster)
            low = await too_little_memory(cluster)
            await more_than_can_be_served(cluster, other, url)
        await asyncio.gather(*(one.task for one in low))
        for one in low:
            one.said()
        over_s = time.time()
        await until(lambda: query(url, "min(timestamp(up))"), lambda at: float(at[0]["value"][1]) > over_s + 2)
        ended_s = math.ceil(time.time())
        asked, empty, zero = set(), [], []
        for name, expression in queries(math.ceil(ended_s - began_s)):
            series = await query_range(url, expression, began_s, ended_s, SCRAPE_INTERVAL_S)
            values = [float(value) for one in series for _, value in one["values"]]
            asked.add(name)
            if not any(map(math.isfinite, values)):
                empty.append(f"{name}: {expression}")
            elif not any(value for value in values if math.isfinite(value)):
                zero.append(name)
        with capsys.disabled():
            print(
                f"\n[dashboards] {len(asked)} queries over {ended_s - began_s:.0f} s of load; zero: {', '.join(zero)}"
            )
        assert empty == []
        assert set(zero) <= ZERO.keys() <= asked
        assert await variables(url) == {
            "job": {"forebay"},
            "model": {tiny_model.name},
            "priority_class": set(CLASSES),
            "replica": {replica.replica_id for replica in cluster.replicas},
        }


async def idle_and_moved(cluster: Cluster) -> None:
    """Requests that are turned away, prompts that begin alike, and a drain while streams run."""
    shared = [10 + k % 50 for k in range(96)]
    for last in range(4):
        assert (await cluster.client.post("/v1/completions", json={"model": "tiny-llama"})).status_code == 400
        await Heard(cluster.client, prompt=[*shared, 100 + last], max_tokens=8).task
    # They are as many as the other replica has room for.
    streams = [Heard(cluster.client, max_tokens=150) for _ in range(SLOTS)]
    await asyncio.gather(*(one.begun.wait() for one in streams))
    await emptied(cluster, cluster.replicas[0].replica_id)
    assert await cluster.metric(MOVES, outcome="moved") > 0
    assert (await cluster.client.post("/v1/completions", json={"model": "tiny-llama"})).status_code == 400
    await asyncio.gather(*(one.task for one in streams))


async def too_little_memory(cluster: Cluster) -> list[Heard]:
    """Batch work alone: short requests that wait for each other, and then long ones, which grow until blocks run out."""

    def batch(first: int, count: int, tokens: int) -> list[Heard]:
        prompts = ([10 + (k * n) % 97 for k in range(64)] for n in range(first, first + count))
        return [Heard(cluster.client, prompt=one, max_tokens=tokens, service_tier="flex") for one in prompts]

    short = batch(1, 2 * REPLICAS * SLOTS, 32)
    await asyncio.gather(*(one.task for one in short))
    long = batch(50, REPLICAS * SLOTS, 220)
    await until(lambda: cluster.metric(PREEMPTIONS, cause="kv_full"), bool)
    return long


async def more_than_can_be_served(cluster: Cluster, other: httpx.AsyncClient, url: str) -> None:
    """All classes on both routers; when all has happened that does then, a replica is killed and comes again. What ran on it is
    suspect until it has run elsewhere, which the other replica lets it only once Prometheus, at `url`, has seen that."""
    loads = [Process(f"load-{number}", cluster.command("tests.load")) for number in range(ROUTERS)]
    with contextlib.ExitStack() as stack:
        for seed, (one, router) in enumerate(zip(loads, cluster.urls, strict=True)):
            stack.callback(one.close)
            one.tell(Offer(int(router.rpartition(":")[2]), "tiny-llama", seed, FLOWS, LOADED_S))

        async def quiet() -> list[str]:
            """What has not happened on either router."""
            seen = {
                m: [await read_metric(c, m) for c in (cluster.client, other)] for m in (SHARED, GATE_HELD, REFUSALS)
            }
            seen[PREEMPTIONS] = [await read_metric(c, PREEMPTIONS, cause="urgent") for c in (cluster.client, other)]
            return [metric.name for metric, values in seen.items() if not any(values)]

        await until(quiet, lambda names: not names, within_s=LOADED_S)
        victim, survivor = cluster.replicas
        await until(lambda: cluster.metric(REPLICA_RUNNING, replica=victim.replica_id), bool)
        await survivor.hold(0)
        cluster.kill(victim)
        await until(lambda: query(url, f"{SUSPECTS.name} > 0"), bool)
        await survivor.hold(None)
        await until(lambda: cluster.metric(CONTINUED, reason="lost"), bool)
        await cluster.start_replica(victim.replica_id)
        hear = msgspec.json.Decoder(Offered).decode
        offered = await asyncio.gather(*(asyncio.to_thread(one.hear, hear, 60.0) for one in loads))
    assert {fate.status for one in offered for fate in one.fates} <= {0, 200, 429, 504}


async def variables(url: str) -> dict[str, set[str]]:
    """What each variable offers, of all dashboards together."""
    offered: dict[str, set[str]] = {}
    for dashboard in DASHBOARDS:
        for variable in document(dashboard)["templating"]["list"]:
            if variable["type"] != "query":
                continue
            found = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
            assert found is not None
            assert found[2] == variable["name"]
            of_all = re.sub(r"\$\w+", variable["allValue"], found[1])
            series = await query(url, f"count by ({found[2]}) ({of_all})")
            offered.setdefault(found[2], set()).update(one["metric"][found[2]] for one in series)
    return offered
