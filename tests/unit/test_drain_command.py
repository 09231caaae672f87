"""`forebay drain`: who may ask for it, what is asked of the controller, and when it says that a replica is empty.

What a drain does to the work there is tested over real replicas (tests/e2e/test_drain.py).
"""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from cluster.config import DEFAULT_CLASSES, Auth
from cluster.messages import ClusterStatus, ReplicaSummary, RosterEntry
from cluster.model import ModelFolder
from cluster.types import EngineLoad, Generation, PriorityLoad, ReplicaId, ReplicaReport, ReplicaState
from ops import drain_cli, endpoint
from router.keys import KeyFile, KeyRing
from tests.unit.http_kit import World, plain_client, serving
from tests.unit.test_explain import forebay

ONE, TWO = ReplicaId("r1"), ReplicaId("r2")
GENERATION = Generation(1, "u")


def status(state: ReplicaState | None, requests: int = 0) -> ClusterStatus:
    """`state` None: nothing has been heard from the replica."""
    running = (PriorityLoad(0, requests, 1),) if requests else ()
    load = EngineLoad(slots_total=4, blocks_total=8, blocks_free=3, block_size_tokens=16, running=running)
    report = None
    if state is not None:
        report = ReplicaReport(
            replica_id=ONE, generation=GENERATION, state=state, observed_unix_s=1.0, load=load, step_age_s=None
        )
    entry = RosterEntry(ONE, GENERATION, "10.0.0.1", 1, "m")
    return ClusterStatus(
        1, GENERATION, 1, 1.0, (ReplicaSummary(entry, 1, report, None if report is None else 0.1),), ()
    )


NOBODY = ClusterStatus(1, GENERATION, 1, 1.0, (), ())
"""A controller to which no replica has come yet."""


def controlled(world: World) -> None:
    world.meant = {"r1": (ONE,), "10.0.0.1": (ONE, TWO)}


async def test_put_drains_and_delete_takes_back_all_that_the_name_means(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model) as world, plain_client(world) as http:
        controlled(world)
        answer = await http.put("/drain/10.0.0.1")
        assert (answer.status_code, answer.json()) == (200, {"draining": True, "replica_ids": ["r1", "r2"]})
        answer = await http.delete("/drain/r1")
        assert (answer.status_code, answer.json()) == (200, {"draining": False, "replica_ids": ["r1"]})
        assert world.drains == [("10.0.0.1", True), ("r1", False)]


async def test_a_name_that_is_nobodys_is_said_to_be_and_so_is_a_controller_that_is_gone(
    tiny_model: ModelFolder,
) -> None:
    async with serving(tiny_model) as world, plain_client(world) as http:
        answer = await http.put("/drain/r1")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_controller")
        controlled(world)
        answer = await http.put("/drain/r9")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "replica_not_found")
        assert (await http.post("/drain/r1")).status_code == 405


async def test_only_an_operators_key_may_drain(
    tiny_model: ModelFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = KeyFile(tmp_path / "keys.json")
    plain, operator = keys.create("acme")[1], keys.create("acme", operator=True)[1]
    ring = KeyRing(keys, DEFAULT_CLASSES)
    async with serving(tiny_model, identify=ring.identify, auth=Auth.KEYS, keys_file=keys.path) as world:
        controlled(world)
        arguments = ("drain", "r1", "--no-wait", "--url", world.url)
        assert (await forebay(capsys, *arguments))[0] == 2
        monkeypatch.setenv("FOREBAY_API_KEY", plain)
        code, _, err = await forebay(capsys, *arguments)
        assert (code, "forebay keys create --operator" in err) == (1, True)
        assert world.drains == []
        monkeypatch.setenv("FOREBAY_API_KEY", operator)
        assert (await forebay(capsys, *arguments))[:2] == (0, "r1 drains.\n")
        assert world.drains == [("r1", True)]


async def test_command_returns_once_the_replica_drains_and_nothing_is_left_there(
    tiny_model: ModelFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(tiny_model) as world:
        controlled(world)
        world.cluster = status(ReplicaState.READY, 0)
        code, _, err = await forebay(capsys, "drain", "r1", "--url", world.url, "--timeout-s", "0")
        assert (code, "r1 takes work after 0 s" in err) == (1, True), "it has not said that it drains"
        world.cluster = status(ReplicaState.DRAINING, 3)
        code, out, err = await forebay(capsys, "drain", "r1", "--url", world.url, "--timeout-s", "0")
        assert (code, out) == (1, "")
        assert err == "forebay: 3 requests are still there after 0 s; the drain goes on\n"
        world.cluster = status(ReplicaState.DRAINING, 0)
        code, out, _ = await forebay(capsys, "drain", "r1", "--url", world.url, "--json")
        assert (code, json.loads(out)) == (0, {"draining": True, "replica_ids": ["r1"]})
        code, out, _ = await forebay(capsys, "drain", "r1", "--undo", "--url", world.url)
        assert (code, out) == (0, "r1 takes work again.\n")


@pytest.mark.parametrize(
    ("cluster", "says"),
    [
        (None, "the controller does not answer after 0 s; the drain goes on"),
        (NOBODY, "nothing is heard from r1 after 0 s; the drain goes on"),
        (status(None), "nothing is heard from r1 after 0 s; the drain goes on"),
    ],
)
async def test_a_replica_that_nothing_is_heard_of_is_not_said_to_be_empty(
    tiny_model: ModelFolder, capsys: pytest.CaptureFixture[str], cluster: ClusterStatus | None, says: str
) -> None:
    async with serving(tiny_model) as world:
        controlled(world)
        world.cluster = cluster
        code, out, err = await forebay(capsys, "drain", "r1", "--url", world.url, "--timeout-s", "0")
        assert (code, out, err) == (1, "", f"forebay: {says}\n")


async def test_an_interrupt_says_that_the_drain_goes_on(
    tiny_model: ModelFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    async with serving(tiny_model) as world:
        controlled(world)
        world.cluster = status(ReplicaState.DRAINING, 3)
        monkeypatch.setattr(time, "sleep", interrupt)
        code, out, err = await forebay(capsys, "drain", "r1", "--url", world.url)
        assert (code, out, err) == (130, "", "forebay: interrupted; the drain goes on (--undo ends it)\n")


async def test_what_has_come_to_a_host_while_it_drains_is_drained_too(
    tiny_model: ModelFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tiny_model) as world:
        world.meant = {"10.0.0.1": (ONE,)}
        world.cluster = status(ReplicaState.DRAINING)
        ask = endpoint.ask

        def asked(url: str | None, path: str, *more: str) -> Any:
            if path == "/status":
                world.meant = {"10.0.0.1": (ONE, TWO)}  # a controller that is new has met the second only now
            return ask(url, path, *more)

        monkeypatch.setattr(drain_cli, "ask", asked)
        monkeypatch.setattr(drain_cli, "_GONE_S", 0.5)
        code, out, _ = await forebay(capsys, "drain", "10.0.0.1", "--url", world.url)
        assert (code, out) == (0, "r1 is empty.\nr2 is gone.\n"), (
            "it tells of the second, of which nothing was reported"
        )


async def test_a_replica_that_ends_while_it_drains_is_said_to_be_gone(
    tiny_model: ModelFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain_cli, "_GONE_S", 0.5)
    async with serving(tiny_model) as world:
        controlled(world)
        world.cluster = NOBODY
        code, out, _ = await forebay(capsys, "drain", "r1", "--url", world.url)
        assert (code, out) == (0, "r1 is gone.\n")


async def test_what_the_router_answers_is_said_in_its_own_words_and_what_is_no_router_is_said_to_be_none(
    tiny_model: ModelFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(tiny_model) as world:
        code, _, err = await forebay(capsys, "drain", "r1", "--url", world.url)
        assert code == 1
        assert err == f"forebay: {world.url}: The controller does not answer; try again in a few seconds.\n"
        code, _, err = await forebay(capsys, "drain", "", "--url", world.url)
        assert (code, "the name is empty" in err) == (2, True)

    async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")
        writer.close()

    async with await asyncio.start_server(other, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        code, _, err = await forebay(capsys, "status", "--url", f"http://{host}:{port}")
    assert code == 2
    assert "what answered there (status 200) is no router of Forebay's" in err
