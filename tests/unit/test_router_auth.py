"""The laws of identity: who gets in, as whom, to what; over a real socket, with a real file of keys."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from pydantic import ValidationError
from starlette.routing import Route

from cluster.config import DEFAULT_CLASSES, Auth, PriorityClass, RouterConfig
from cluster.metrics import TURNED_AWAY
from cluster.model import ModelFolder
from cluster.types import FinishReason, Outcome, TokenDelta
from deployments.router_process import RouterProcess
from deployments.settings import Environment, Instance, Profile, UsageError, load_profile
from ops import cli
from ops.bench.prompts import CALIBRATION_WORDS
from ops.examples import priority
from router import auth
from router.app import Front
from router.auth import ANYBODY, OPEN_PATHS, Guard, identity_of
from router.headers import Asked
from router.keys import Identity, KeyFile, KeyRing
from router.limits import Limits
from tests.unit.http_kit import CHAT, HI, TEXT, World, plain_client, raw_post, serving

TRACE = Path(__file__).parents[1] / "data" / "trace_azure.csv"
OPENAI_FORM = {"message", "type", "param", "code"}


@pytest.fixture
def keys(tmp_path: Path) -> KeyFile:
    file = KeyFile(tmp_path / "keys.json")
    file.create("somebody-else")
    return file


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@asynccontextmanager
async def guarded(model: ModelFolder, keys: KeyFile, **settings: Any) -> AsyncIterator[World]:
    """A router that serves holders of the keys that the file has now."""
    ring = KeyRing(keys, settings.get("classes", DEFAULT_CLASSES))
    async with serving(model, identify=ring.identify, auth=Auth.KEYS, keys_file=keys.path, **settings) as world:
        yield world


def assert_refused(response: httpx.Response) -> None:
    assert response.status_code == 401, response.url
    assert response.headers["www-authenticate"] == "Bearer"
    assert set(response.json()) == {"error"}
    assert set(response.json()["error"]) == OPENAI_FORM
    assert response.json()["error"]["code"] == "invalid_api_key"


# --- which paths ask for a key ---


async def test_every_route_but_the_open_ones_asks_for_a_key(tiny_model: ModelFolder, keys: KeyFile) -> None:
    key = keys.create("acme")[1]
    async with guarded(tiny_model, keys) as world, plain_client(world) as http:
        assert world.app is not None
        assert isinstance(world.app.app, Front)
        framework = world.app.app.framework
        assert len(framework.routes) >= 8
        for route in framework.routes:
            assert isinstance(route, Route)
            path = re.sub(r"{[^}]*}", "x", route.path)
            for method in {*(route.methods or ()), "GET", "POST", "OPTIONS", "DELETE"}:
                response = await http.request(method, path)
                if path in OPEN_PATHS:
                    assert response.status_code in {200, 204, 405}
                elif method == "HEAD":
                    assert (response.status_code, response.content) == (401, b"")
                else:
                    assert_refused(response)
                    assert (await http.request(method, path, headers=bearer(key))).status_code != 401
        for path in ("/", "/v1", "/admin", "/v1/engines", "/docs", "/favicon.ico"):
            assert_refused(await http.get(path))
            assert (await http.get(path, headers=bearer(key))).status_code == 404


SPELLINGS = (
    "//health", "/health/", "/health//", "/./health", "/v1/../health", "/health/../v1/models", "/health/..%2fv1/models",
    "/%68ealth", "/healt%68", "/%2fhealth", "/health%2f", "/health%00", "/health%20", "/health.", "/health;x=1",
    "/HEALTH", "/Health", "/health.json", "/healthz", "/health/x", "/ready/", "/metrics", "//metrics", "/status",
    "//v1/models", "/v1//models", "/v1/models/", "/v1/models/../../health", "/v1/%2e%2e/health", "/%2e/v1/models",
    "/V1/MODELS", "/v1/models%2f", "/v1%2fmodels", "/v1/models?x=/health", "/v1/models#/health", "\\health",
    "http://127.0.0.1/health", "http://127.0.0.1/v1/models", "*", "/v1/models;/health", "/openapi.json",
)  # fmt: skip


async def test_no_spelling_of_a_path_opens_anything(tiny_model: ModelFolder, keys: KeyFile) -> None:
    async with guarded(tiny_model, keys) as world:
        for target in SPELLINGS:
            reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
            writer.write(f"GET {target} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
            answer = await asyncio.wait_for(reader.read(), 10)
            writer.close()
            # What is no path at all is refused before anybody asks for a key.
            refused = b"HTTP/1.1 401 " if target.startswith("/") else (b"HTTP/1.1 401 ", b"HTTP/1.1 400 ")
            assert answer.startswith(refused), (target, answer.splitlines()[0])


async def test_open_paths_need_no_key_whatever_comes_with_them(tiny_model: ModelFolder, keys: KeyFile) -> None:
    async with guarded(tiny_model, keys) as world, plain_client(world) as http:
        for path in ("/health", "/ready", "/health?probe=1"):
            assert (await http.get(path)).status_code == 200
            assert (await http.get(path, headers=bearer("wrong"))).status_code == 200


async def test_metrics_are_open_where_the_operator_says_so(tiny_model: ModelFolder, keys: KeyFile) -> None:
    async with guarded(tiny_model, keys) as world, plain_client(world) as http:
        assert_refused(await http.get("/metrics"))
    async with guarded(tiny_model, keys, open_metrics=True) as world, plain_client(world) as http:
        assert "forebay_requests" in (await http.get("/metrics")).text
        assert_refused(await http.get("/status"))


async def test_what_is_no_http_never_reaches_the_application() -> None:
    async def application(*_: object) -> None:
        raise AssertionError("it was asked")

    async def receive() -> dict[str, Any]:
        raise AssertionError("something is received")

    async def send(_: object) -> None:
        raise AssertionError("something is sent")

    await Guard(application, None)({"type": "websocket", "path": "/health"}, receive, send)


async def test_path_without_its_raw_form_is_not_open() -> None:
    """ASGI leaves `raw_path` to the server; without it there is no telling what was asked for."""
    sent: list[dict[str, Any]] = []

    async def application(*_: object) -> None:
        raise AssertionError("it was asked")

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    guard = Guard(application, lambda key: None)
    for raw in ({}, {"raw_path": None}, {"raw_path": b"/v1/models"}):
        await guard({"type": "http", "path": "/health", "headers": [], **raw}, receive, send)
    assert [message["status"] for message in sent if "status" in message] == [401, 401, 401]


def test_request_that_no_guard_has_seen_has_no_identity() -> None:
    with pytest.raises(KeyError):
        identity_of({"type": "http", "headers": []})


# --- how a key is presented ---


async def test_every_wrong_key_is_refused_alike(tiny_model: ModelFolder, keys: KeyFile) -> None:
    record, revoked = keys.create("acme")
    good = keys.create("acme")[1]
    keys.revoke(record.id)
    wrong: list[list[tuple[str, str]]] = [
        [],
        [("authorization", f"Bearer {revoked}")],
        [("authorization", f"Bearer fb-{'0' * 12}-{'0' * 48}")],
        [("authorization", "Bearer sk-1234")],
        [("authorization", "Bearer")],
        [("authorization", good)],
        [("authorization", f"Basic {good}")],
        [("authorization", f"Bearer {good}x")],
        [("authorization", f"Bearer {good} {good}")],
        [("authorization", f"Bearer {good}, Bearer {good}")],
        [("authorization", f"Bearer {good}"), ("authorization", f"Bearer {good}")],
        [("authorization", f"Bearer {good}"), ("authorization", "Bearer other")],
        [("authorization", f"Bearer {'x' * 10_000}")],
        [("x-api-key", good)],
        [("cookie", f"authorization=Bearer {good}")],
    ]
    async with guarded(tiny_model, keys) as world, plain_client(world) as http:
        answers = [await http.post("/v1/completions", json=TEXT, headers=headers) for headers in wrong]
        query = await http.post(f"/v1/completions?api_key={good}", json=TEXT)
        for answer in (*answers, query):
            assert_refused(answer)
        assert len({(a.content, *sorted(a.headers.items() - {("date", a.headers["date"])})) for a in answers}) == 1
        assert not world.replica.added


@pytest.mark.parametrize("form", ["Bearer {}", "bearer {}", "BEARER {}", "bEaReR   {}"])
async def test_scheme_is_read_in_any_case(tiny_model: ModelFolder, keys: KeyFile, form: str) -> None:
    key = keys.create("acme")[1]
    async with guarded(tiny_model, keys) as world, plain_client(world) as http:
        answer = await http.get("/v1/models", headers={"Authorization": form.format(key)})
        assert answer.status_code == 200


async def test_official_client_gets_in_with_a_key_and_its_own_error_without(
    tiny_model: ModelFolder, keys: KeyFile
) -> None:
    key = keys.create("acme")[1]
    async with guarded(tiny_model, keys) as world:
        async with openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key=key, max_retries=0) as api:
            answer = await api.chat.completions.create(model="tiny-llama", messages=HI, max_tokens=2)  # type: ignore[arg-type]
            assert answer.choices[0].finish_reason == "length"
        async with openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key="none", max_retries=0) as api:
            with pytest.raises(openai.AuthenticationError) as caught:
                await api.models.list()
            assert caught.value.code == "invalid_api_key"


async def test_body_of_a_refused_request_is_read_and_dropped_within_bounds(
    tiny_model: ModelFolder, keys: KeyFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "DRAIN_S", 0.2)
    async with guarded(tiny_model, keys) as world, plain_client(world) as http:
        small = await http.post("/v1/completions", content=b"x" * 60_000)
        assert_refused(small)
        assert "connection" not in small.headers
        # One that never comes: the answer does, and the connection ends.
        reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\nx")
        answer = await asyncio.wait_for(reader.read(), 10)
        assert answer.startswith(b"HTTP/1.1 401 ")
        assert b"connection: close" in answer.lower()
        writer.close()
        # One that never ends: no more of it is taken than the bound and what is on the way.
        reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000000\r\n\r\n")
        sent = 0
        with contextlib.suppress(OSError):
            while sent < 50 * 2**20:
                writer.write(b"x" * 2**16)
                await asyncio.wait_for(writer.drain(), 10)
                sent += 2**16
        assert sent < 50 * 2**20, "it was read on and on"
        writer.transport.abort()


# --- as whom ---


async def test_tenant_of_the_key_goes_with_the_request(tiny_model: ModelFolder, keys: KeyFile) -> None:
    first, second, other = (keys.create(tenant)[1] for tenant in ("acme", "acme", "b.2_x-y"))
    async with guarded(tiny_model, keys) as world, plain_client(world) as http:
        for key in (first, second, other):
            assert (await http.post("/v1/completions", json=TEXT, headers=bearer(key))).status_code == 200
        assert [request.tenant for request, _ in world.replica.added] == ["acme", "acme", "b.2_x-y"]


async def test_without_keys_whoever_comes_is_the_default_tenant(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model) as world, plain_client(world) as http:
        for headers in ({}, bearer("none"), bearer("fb-nonsense"), {"authorization": "Basic x"}):
            assert (await http.post("/v1/completions", json=TEXT, headers=headers)).status_code == 200
        assert {request.tenant for request, _ in world.replica.added} == {"default"}


def test_share_of_the_queue_goes_from_the_key_to_the_terms() -> None:
    assert Asked().by(Identity("acme", "k", queue_share=0.25)).terms.queue_share == 0.25
    assert Asked().by(ANYBODY).terms.queue_share == 1.0


async def test_tenant_fills_its_share_of_the_queue_and_leaves_the_rest_to_others(
    tiny_model: ModelFolder, keys: KeyFile
) -> None:
    half, whole = keys.create("acme", queue_share=0.5)[1], keys.create("other")[1]
    classes = (PriorityClass(name="standard", priority=0, max_queued_requests=4),)
    async with guarded(tiny_model, keys, auto=False, classes=classes) as world, plain_client(world) as http:
        world.replica.slots = 1
        world.replica.beat()

        def queued() -> int:
            return sum(band.queued_requests for band in world.core.bands())

        def ask(key: str) -> asyncio.Task[httpx.Response]:
            return asyncio.create_task(http.post("/v1/completions", json=TEXT, headers=bearer(key)))

        asking = [ask(whole)]
        await world.until(lambda: world.replica.held)
        for number, key in enumerate((half, half, whole), start=1):
            asking.append(ask(key))
            await world.until(lambda number=number: queued() == number)  # type: ignore[misc]
        refused = await ask(half)
        assert (refused.status_code, queued()) == (429, 3)
        asking.append(ask(whole))
        await world.until(lambda: queued() == 4)
        while not all(task.done() for task in asking):
            world.replica.turn()
            await asyncio.sleep(0)
        assert {(await task).status_code for task in asking} == {200}


async def test_no_key_is_in_a_log_or_an_answer(
    tiny_model: ModelFolder, keys: KeyFile, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    key = keys.create("acme")[1]
    record, revoked = keys.create("acme")
    keys.revoke(record.id)
    async with guarded(tiny_model, keys) as world, plain_client(world) as http:
        for presented in (key, revoked):
            for leak in ({}, {"x-request-id": presented}, {"x-request-id": f"a-{presented}" + "b" * 300}):
                for body in (TEXT, {"nonsense": 1}, TEXT | {"stream": True}):
                    answer = await http.post("/v1/completions", json=body, headers=bearer(presented) | leak)
                    said = answer.text + str(answer.headers)
                    assert presented[16:] not in said
        assert (await http.get("/v1/models", headers=bearer(key))).status_code == 200
    ours = "\n".join(r.getMessage() for r in caplog.records if not r.name.startswith(("httpx", "httpcore", "hpack")))
    assert "request_ended" in ours
    assert key[16:] not in ours
    assert revoked[16:] not in ours


# --- which classes ---


@pytest.mark.parametrize(
    ("highest", "body", "headers", "named", "refused"),
    [
        ("standard", {"service_tier": "priority"}, {}, "service_tier", "interactive"),
        ("batch", {"service_tier": "default"}, {}, "service_tier", "standard"),
        ("standard", {}, {"x-llm-d-inference-objective": "interactive"}, "x-llm-d-inference-objective", "interactive"),
        ("standard", {"priority": -10}, {}, "priority", "interactive"),
        ("batch", {"priority": 0}, {}, "priority", "standard"),
        ("standard", {"priority": -1000}, {}, "priority", "interactive"),
    ],
)
async def test_class_above_the_key_s_is_403_naming_it_what_named_it_and_what_is_allowed(
    tiny_model: ModelFolder,
    keys: KeyFile,
    highest: str,
    body: dict[str, Any],
    headers: dict[str, str],
    named: str,
    refused: str,
) -> None:
    key = keys.create("acme", highest_class=highest)[1]
    free = keys.create("acme")[1]
    async with guarded(tiny_model, keys) as world, plain_client(world) as http:
        answer = await http.post("/v1/completions", json=TEXT | body, headers=bearer(key) | headers)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (403, named, "class_not_allowed")
        assert repr(refused) in error["message"]
        allowed = {"standard": "'standard', 'batch'", "batch": "'batch'"}[highest]
        assert f"it may use {allowed}." in error["message"]
        assert not world.replica.added
        answer = await http.post("/v1/completions", json=TEXT | body, headers=bearer(free) | headers)
        assert (answer.status_code, answer.headers["x-forebay-priority-class"]) == (200, refused)


@pytest.mark.parametrize(
    ("highest", "body", "in_force"),
    [
        ("interactive", {"service_tier": "priority"}, "interactive"),
        ("standard", {"service_tier": "default"}, "standard"),
        ("standard", {"service_tier": "flex"}, "batch"),
        ("standard", {"priority": -9}, "standard"),
        ("interactive", {}, "standard"),
        ("batch", {}, "batch"),
    ],
)
async def test_class_within_the_key_s_is_in_force_and_none_named_is_the_default_or_the_key_s_if_lower(
    tiny_model: ModelFolder, keys: KeyFile, highest: str, body: dict[str, Any], in_force: str
) -> None:
    key = keys.create("acme", highest_class=highest)[1]
    async with guarded(tiny_model, keys) as world, plain_client(world) as http:
        answer = await http.post("/v1/completions", json=TEXT | body, headers=bearer(key))
        assert (answer.status_code, answer.headers["x-forebay-priority-class"]) == (200, in_force)


# --- what is turned away is counted ---


async def test_what_is_turned_away_is_counted_by_its_reason_and_by_nothing_that_a_client_makes_up(
    tiny_model: ModelFolder, keys: KeyFile
) -> None:
    key = keys.create("acme", highest_class="batch", limits=Limits(requests_per_s=6))[1]
    headers = {"unknown": {}, "wrong": bearer("fb_no_such_key"), "known": bearer(key)}
    async with guarded(tiny_model, keys) as world, plain_client(world) as http:

        async def ask(who: str, path: str = "/v1/completions", **body: Any) -> int:
            return (await http.post(path, json=TEXT | body, headers=headers[who])).status_code

        assert [await ask("unknown"), await ask("wrong"), await ask("wrong", "/made/up")] == [401] * 3
        assert [await ask("known", service_tier="priority"), await ask("known", made_up=1)] == [403, 400]
        assert [await ask("known", "/tokenize", made_up=2), await ask("known")] == [400, 200]
        statuses = [await ask("known") for _ in range(12)]

        def counted(status: str, code: str) -> float | None:
            labels = {"status": status, "code": code}
            return world.registry.get_sample_value(f"{TURNED_AWAY.name}_total", labels)

        assert counted("401", "invalid_api_key") == 3
        assert counted("403", "class_not_allowed") == 1
        assert counted("400", "unknown_parameter") == 2
        assert statuses.count(429) > 0
        assert counted("429", "rate_limit_exceeded") == statuses.count(429)
        assert "made_up" not in (await http.get("/metrics", headers=headers["known"])).text


# --- limits, over the wire ---


async def test_over_the_rate_is_429_that_the_official_client_obeys(tiny_model: ModelFolder, keys: KeyFile) -> None:
    key = keys.create("acme", limits=Limits(requests_per_s=1))[1]
    async with guarded(tiny_model, keys) as world, plain_client(world) as http:
        assert (await http.post("/v1/completions", json=TEXT, headers=bearer(key))).status_code == 200
        answer = await http.post("/v1/completions", json=TEXT, headers=bearer(key))
        assert answer.status_code == 429
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert "requests_per_s" in error["message"]
        assert answer.headers["retry-after"] == "1"
        assert answer.headers["x-llm-d-request-dropped-reason"] == "rejected-rate-limited"
        assert (await http.get("/v1/models", headers=bearer(key))).status_code == 200
        async with openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key=key, max_retries=2) as api:
            started_s = asyncio.get_running_loop().time()
            await api.completions.create(model="tiny-llama", prompt="hello", max_tokens=2)
            assert asyncio.get_running_loop().time() - started_s >= 0.9


async def test_tokens_are_charged_at_arrival_and_what_was_not_used_comes_back(
    tiny_model: ModelFolder, keys: KeyFile
) -> None:
    minute, now_s = 6000, asyncio.get_running_loop().time
    key = keys.create("acme", limits=Limits(tokens_per_min=minute))[1]
    async with guarded(tiny_model, keys, auto=False) as world, plain_client(world, headers=bearer(key)) as http:
        began_s = now_s()
        asking = asyncio.create_task(http.post("/v1/completions", json=TEXT | {"max_tokens": 1500, "n": 3}))
        await world.until(lambda: len(world.replica.held) == 3)
        prompt = len(world.replica.added[0][0].prompt_ids)

        def left(answer: httpx.Response, taken: int) -> None:
            """What is left is what was not taken, and what has flowed in since."""
            remaining = int(answer.headers["x-ratelimit-remaining-tokens"])
            assert minute - taken <= remaining <= minute - taken + (now_s() - began_s) * minute / 60

        # 3 x 1,500 and the prompt are out: 3,000 more do not fit, though nothing has been generated.
        over = await http.post("/v1/completions", json=TEXT | {"max_tokens": 1500, "n": 2})
        assert over.status_code == 429
        assert "tokens_per_min" in over.json()["error"]["message"]
        left(over, prompt + 4500)
        for request_id in list(world.replica.held):
            world.replica.send(TokenDelta(request_id, 1, 0, (5,) * 1200, ("a",) * 1200, FinishReason.STOP))
            world.replica.forget(request_id)
        used = prompt + 3 * 1200
        assert (await asking).json()["usage"]["total_tokens"] == used
        asking = asyncio.create_task(http.post("/v1/completions", json=TEXT | {"max_tokens": 1500}))
        await world.until(lambda: world.replica.held)
        (request_id,) = world.replica.held
        world.replica.send(TokenDelta(request_id, 1, 0, (5,), ("a",), FinishReason.STOP))
        left(await asking, used + prompt + 1500)
        huge = await http.post("/v1/completions", json=TEXT | {"max_tokens": 1900, "n": 4})
        assert (huge.status_code, huge.json()["error"]["code"]) == (400, "request_too_large")


async def _finishes(world: World, http: httpx.AsyncClient, stream: bool) -> None:
    asking = asyncio.create_task(http.post("/v1/completions", json=TEXT | {"stream": stream}))
    await world.until(lambda: world.replica.held)
    for _ in range(5):
        world.replica.turn()
    assert (await asking).status_code == 200


async def _fails_in_the_engine(world: World, http: httpx.AsyncClient, stream: bool) -> None:
    asking = asyncio.create_task(http.post("/v1/completions", json=TEXT | {"stream": stream}))
    await world.until(lambda: world.replica.held)
    for _ in range(2):  # the second time it is no more tried again
        world.replica.fail(world.held().request_id)
        world.replica.deliver()
    assert (await asking).status_code == 500


async def _breaks_after_its_first_token(world: World, http: httpx.AsyncClient, stream: bool) -> None:
    asking = asyncio.create_task(http.post("/v1/completions", json=TEXT | {"stream": stream}))
    await world.until(lambda: world.replica.held)
    for _ in range(2):
        world.replica.turn()
        world.replica.fail(world.held().request_id)
        world.replica.deliver()
    await asking


async def _is_unusable(world: World, http: httpx.AsyncClient, stream: bool) -> None:
    assert (await http.post("/v1/completions", json=TEXT | {"stream": stream, "top_p": 7})).status_code == 400


async def _is_of_a_class_not_allowed(world: World, http: httpx.AsyncClient, stream: bool) -> None:
    body = TEXT | {"stream": stream, "service_tier": "priority"}
    assert (await http.post("/v1/completions", json=body)).status_code == 403


async def _needs_more_than_any_replica_has(world: World, http: httpx.AsyncClient, stream: bool) -> None:
    world.replica.blocks = 1
    world.replica.beat()
    assert (await http.post("/v1/completions", json=TEXT | {"stream": stream, "max_tokens": 900})).status_code == 400
    world.replica.blocks = 1000
    world.replica.beat()


async def _leaves(world: World, http: httpx.AsyncClient, stream: bool) -> None:
    cancelled = world.ended(Outcome.CANCELLED)
    asking = asyncio.create_task(http.post("/v1/completions", json=TEXT | {"stream": stream}))
    await world.until(lambda: world.replica.held)
    asking.cancel()
    await world.until(lambda: world.ended(Outcome.CANCELLED) == cancelled + 1)


async def _leaves_before_its_body_is_whole(world: World, http: httpx.AsyncClient, stream: bool) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", world.port)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: {http.headers['authorization']}\r\n"
    writer.write(f"{head}content-length: 1000\r\n\r\n{{".encode())
    await writer.drain()
    writer.close()


async def _let_in(world: World, http: httpx.AsyncClient, *, may_wait: bool) -> asyncio.Task[httpx.Response]:
    """A request that runs; `may_wait`: that a client has left is noticed in the server's own time."""
    while True:
        asking = asyncio.create_task(http.post("/v1/completions", json=TEXT))
        running = asyncio.create_task(world.until(lambda: world.replica.held))
        await asyncio.wait([asking, running], return_when=asyncio.FIRST_COMPLETED)
        running.cancel()
        if world.replica.held:
            return asking
        assert may_wait, (await asking).text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "ends",
    [
        _finishes,
        _fails_in_the_engine,
        _breaks_after_its_first_token,
        _is_unusable,
        _is_of_a_class_not_allowed,
        _needs_more_than_any_replica_has,
        _leaves,
        _leaves_before_its_body_is_whole,
    ],
)
async def test_lease_is_given_back_once_however_a_request_ends(
    tiny_model: ModelFolder,
    keys: KeyFile,
    ends: Callable[[World, httpx.AsyncClient, bool], Awaitable[None]],
    stream: bool,
) -> None:
    """One stream at a time: a lease kept would refuse the next, one given back twice would let two in."""
    key = keys.create("acme", highest_class="standard", limits=Limits(max_streams=1, tokens_per_min=10**6))[1]
    async with guarded(tiny_model, keys, auto=False) as world, plain_client(world, headers=bearer(key)) as http:
        for _ in range(2):
            await ends(world, http, stream)
            asking = await _let_in(world, http, may_wait=ends in {_leaves, _leaves_before_its_body_is_whole})
            refused = await http.post("/v1/completions", json=TEXT)
            assert (refused.status_code, "max_streams" in refused.text) == (429, True)
            for _ in range(5):
                world.replica.turn()
            assert (await asking).status_code == 200


async def test_choices_of_one_request_are_one_stream(tiny_model: ModelFolder, keys: KeyFile) -> None:
    key = keys.create("acme", limits=Limits(max_streams=1))[1]
    async with guarded(tiny_model, keys) as world, plain_client(world, headers=bearer(key)) as http:
        assert (await http.post("/v1/chat/completions", json=CHAT | {"n": 4})).status_code == 200


# --- a router that runs ---


def instance(model: ModelFolder, tmp_path: Path, **router: Any) -> Instance:
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef" * 4)
    profile = Profile(router=RouterConfig(port=0, **router))
    return Instance(profile=profile, model_folders=(model.path,), secret_path=secret)


async def test_keys_made_and_revoked_by_the_command_count_in_a_running_router_within_seconds(
    tiny_model: ModelFolder, keys: KeyFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def nobody() -> tuple[str, int]:
        raise TimeoutError("there is no controller here")

    def forebay(*arguments: str) -> str:
        assert cli.run(("keys", *arguments, "--file", str(keys.path))) == 0
        return capsys.readouterr().out.strip()

    stays = forebay("create", "--tenant", "stays")
    router = RouterProcess(instance(tiny_model, tmp_path, auth=Auth.KEYS, keys_file=keys.path), nobody)
    await router.start()
    try:
        async with httpx.AsyncClient(base_url=router.url, verify=False) as http:

            async def answers(key: str, status: int) -> None:
                async with asyncio.timeout(20):  # a minute is promised
                    while (await http.get("/v1/models", headers=bearer(key))).status_code != status:  # noqa: ASYNC110 - it is for the router to notice
                        await asyncio.sleep(0.02)

            comes = forebay("create", "--tenant", "comes")
            await answers(comes, 200)
            forebay("revoke", comes[3:15])
            await answers(comes, 401)
            await answers(stays, 200)
        router.check()
    finally:
        await router.close()


def test_router_without_its_file_of_keys_does_not_start_and_names_the_command(
    tiny_model: ModelFolder, tmp_path: Path
) -> None:
    async def nobody() -> tuple[str, int]:
        raise TimeoutError

    missing = tmp_path / "missing.json"
    with pytest.raises(UsageError) as caught:
        RouterProcess(instance(tiny_model, tmp_path, auth=Auth.KEYS, keys_file=missing), nobody)
    assert f"`forebay keys create --tenant NAME --file {missing}`" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.5", "::", "example.org", ""])
def test_address_that_others_reach_is_served_only_where_it_is_said_to_whom(host: str) -> None:
    with pytest.raises(ValidationError, match="set auth to keys"):
        RouterConfig(host=host)
    assert RouterConfig(host=host, auth=Auth.NONE).auth is Auth.NONE
    assert RouterConfig(host=host, auth=Auth.KEYS).auth is Auth.KEYS


@pytest.mark.parametrize("host", ["127.0.0.1", "127.5.5.5", "::1", "localhost"])
def test_loopback_is_served_without_a_word(host: str) -> None:
    assert RouterConfig(host=host).auth is None


def test_local_profile_says_openly_that_it_asks_for_no_key() -> None:
    assert load_profile("local", {}).router.auth is Auth.NONE


async def test_status_command_presents_the_key_of_the_environment(
    tiny_model: ModelFolder,
    keys: KeyFile,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    key = keys.create("acme")[1]
    async with guarded(tiny_model, keys) as world:
        monkeypatch.setenv("FOREBAY_URL", world.url)
        assert await asyncio.to_thread(cli.run, ("status",)) == 2
        assert "set FOREBAY_API_KEY" in capsys.readouterr().err
        monkeypatch.setenv("FOREBAY_API_KEY", key)
        assert await asyncio.to_thread(cli.run, ("status", "--json")) == 0
        assert '"router"' in capsys.readouterr().out
        assert key not in repr(Environment())


async def test_replay_presents_the_key_of_the_environment_with_every_request(
    tiny_model: ModelFolder, keys: KeyFile, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    key = keys.create("acme")[1]
    async with guarded(tiny_model, keys) as world:
        replay = ("bench", "replay", "--trace", str(TRACE), "--url", world.url, "--token-scale", "1/100")
        assert await asyncio.to_thread(cli.run, replay) == 2
        assert "set FOREBAY_API_KEY" in capsys.readouterr().err
        monkeypatch.setenv("FOREBAY_API_KEY", key)
        assert await asyncio.to_thread(cli.run, replay) == 0
        said = capsys.readouterr()
        assert key not in said.out + said.err
        requests = len(TRACE.read_text().splitlines()) - 1
        calibrations = len(CALIBRATION_WORDS)
        assert sum(world.ended(Outcome.FINISHED, one.name) for one in DEFAULT_CLASSES) == requests + calibrations


async def test_example_of_urgent_work_presents_the_key_of_the_environment(
    tiny_model: ModelFolder, keys: KeyFile, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """To the router's status and to the API alike. What it shows is shown on real engines (tests/e2e/test_line.py)."""
    key = keys.create("acme")[1]
    async with guarded(tiny_model, keys) as world:
        monkeypatch.setattr("sys.argv", ["priority", "--url", world.url])
        assert await asyncio.to_thread(priority.main) == 2
        assert "401" in capsys.readouterr().err
        monkeypatch.setenv("FOREBAY_API_KEY", key)
        assert await asyncio.to_thread(priority.main) == 2
        assert "no replica has reported yet" in capsys.readouterr().err, (
            "it was let in, and there is no controller here"
        )
        async with priority.openai_client(world.url, key) as client:
            result = await priority.stream(client, "tiny-llama", "once", "priority", 4, asyncio.Event())
        assert len(result.arrivals) >= 4


async def test_keys_and_their_look_up_come_together_or_not_at_all(tiny_model: ModelFolder) -> None:
    with pytest.raises(ValueError, match="auth is keys"):
        async with serving(tiny_model, auth=Auth.KEYS):
            pass
    with pytest.raises(ValueError, match="identify is"):
        async with serving(tiny_model, identify=lambda key: None):
            pass


async def test_slow_body_holds_one_of_the_key_s_streams(tiny_model: ModelFolder, keys: KeyFile) -> None:
    key = keys.create("acme", limits=Limits(max_streams=1))[1]
    async with guarded(tiny_model, keys) as world, plain_client(world, headers=bearer(key)) as http:
        reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-length: 9\r\n\r\n"
        writer.write(head.encode())
        await writer.drain()
        async with asyncio.timeout(10):
            while (await http.post("/v1/completions", json=TEXT)).status_code != 429:  # noqa: ASYNC110 - it is for the server to notice
                await asyncio.sleep(0.005)
        writer.write(b"nonsense!")
        assert b" 400 " in await asyncio.wait_for(reader.readline(), 10)
        writer.close()


async def test_keyless_request_over_a_raw_socket_is_served_where_no_key_is_asked_for(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model) as world:
        reader, writer = await raw_post(world, TEXT)
        assert b" 200 " in await asyncio.wait_for(reader.readline(), 10)
        writer.close()
