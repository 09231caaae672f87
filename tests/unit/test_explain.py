"""What was decided about a request can be asked for by whose it is, over HTTP and on a terminal, and by nobody else."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from cluster.config import Auth
from cluster.model import ModelFolder
from ops import cli
from router.keys import Identity
from tests.unit.http_kit import TEXT, World, plain_client, serving

PATH = "/v1/requests/{}/explain"


def identify(key: bytes) -> Identity | None:
    return {b"a": Identity("tenant-a", "a"), b"a2": Identity("tenant-a", "a2"), b"b": Identity("tenant-b", "b")}.get(
        key
    )


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def ask_as(http: httpx.AsyncClient, key: str, request_id: str) -> httpx.Response:
    return await http.get(PATH.format(request_id), headers=bearer(key))


async def test_only_the_tenant_of_a_request_is_told_of_it_live_and_ended(tiny_model: ModelFolder) -> None:
    async with (
        serving(tiny_model, auto=False, auth=Auth.KEYS, identify=identify) as world,
        plain_client(world) as http,
    ):
        asking = asyncio.create_task(http.post("/v1/completions", json=TEXT, headers=bearer("a")))
        await world.until(lambda: world.replica.held)
        request_id = world.held().request_id

        async def check(state: str) -> None:
            for key in ("a", "a2"):
                told = (await ask_as(http, key, request_id)).json()
                assert (told["request_id"], told["tenant"], told["state"]) == (request_id, "tenant-a", state)
                assert [d["event"] for d in told["decisions"]][:2] == ["admitted", "dispatched"]
            other = await ask_as(http, "b", request_id)
            unknown = await ask_as(http, "b", "cmpl-unknown")
            assert other.status_code == unknown.status_code == 404
            assert other.json() == unknown.json(), "that it exists is not told either"
            assert other.json()["error"]["code"] == "request_not_found"
            assert (await http.get(PATH.format(request_id))).status_code == 401

        await check("running")
        for _ in range(5):
            world.replica.turn()
        assert (await asking).status_code == 200
        await check("ended")


async def test_nothing_of_what_a_request_says_is_in_its_explanation(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model) as world, plain_client(world) as http:
        body = TEXT | {"prompt": "a secret word", "stop": ["another secret"], "user": "a secret name"}
        answer = (await http.post("/v1/completions", json=body)).json()
        told = (await http.get(PATH.format(answer["id"]))).text
        assert "secret" not in told
        assert answer["choices"][0]["text"] not in told


async def forebay(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = await asyncio.to_thread(cli.run, arguments)
    said = capsys.readouterr()
    return code, said.out, said.err


async def queued_and_refused(world: World, http: httpx.AsyncClient) -> tuple[str, httpx.Response]:
    """The id of a request that waited for its turn, and the answer to one for which the queue had no room."""
    world.replica.slots = 1
    world.replica.beat()
    asking = [asyncio.create_task(http.post("/v1/completions", json=TEXT))]
    await world.until(lambda: world.replica.held)
    asking.append(asyncio.create_task(http.post("/v1/completions", json=TEXT)))
    await world.until(lambda: any(b.queued_requests for b in world.core.bands()))
    for _ in range(12):
        world.replica.turn()
    first, second = [(await a).json() for a in asking]
    assert first["id"] != second["id"]
    return second["id"], await http.get(PATH.format(second["id"]))


async def test_terminal_shows_every_decision_with_its_numbers(
    tiny_model: ModelFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(tiny_model, auto=False) as world, plain_client(world) as http:
        request_id, answer = await queued_and_refused(world, http)
        told: dict[str, Any] = answer.json()
        code, out, err = await forebay(capsys, "explain", request_id, "--url", world.url)
        assert (code, err) == (0, "")
        assert all(word in out for word in (request_id, "standard (priority 0)", "ended: finished (length)"))
        events = [d["event"] for d in told["decisions"]]
        assert events[:2] == ["queued", "dispatched"]
        lines = out.splitlines()
        for decision in told["decisions"]:
            (line,) = [line for line in lines if f" {decision['event']} " in line]
            assert all(name in line for name in decision.get("numbers", {}))
        code, out, _ = await forebay(capsys, "explain", request_id, "--url", world.url, "--json")
        assert (code, json.loads(out)) == (0, told)


async def test_help_says_what_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    assert "explain" in (await forebay(capsys, "--help"))[1]
    code, out, _ = await forebay(capsys, "explain", "--help")
    assert code == 0
    assert all(word in out for word in ("REQUEST_ID", "--json", "--url"))


async def test_terminal_says_why_there_is_nothing_to_show(
    tiny_model: ModelFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tiny_model, auth=Auth.KEYS, identify=identify) as world:
        code, out, err = await forebay(capsys, "explain", "cmpl-0", "--url", world.url)
        assert (code, out) == (2, "")
        assert "FOREBAY_API_KEY" in err
        monkeypatch.setenv("FOREBAY_API_KEY", "a")
        code, out, err = await forebay(capsys, "explain", "../../health", "--url", world.url)
        assert (code, out) == (1, "")
        code, out, err = await forebay(capsys, "explain", "cmpl-0", "--url", world.url)
        assert (code, out) == (1, "")
        assert "No request of yours with this id" in err
    code, out, err = await forebay(capsys, "explain", "cmpl-0", "--url", "http://127.0.0.1:1")
    assert (code, out) == (2, "")
    assert err.startswith("forebay: no explain from http://127.0.0.1:1; is it running?")
