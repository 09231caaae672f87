"""The laws of the HTTP side: a real server on loopback, the official client, and raw sockets where it matters."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from cluster.config import PriorityClass, RouterConfig
from cluster.messages import ClusterStatus, ReplicaSummary, RosterEntry
from cluster.model import ModelFolder
from cluster.types import (
    FinishReason,
    Generation,
    Outcome,
    RefusalReason,
    ReplicaId,
    RequestId,
    TokenDelta,
)
from router import completions, parsing
from router.auth import Guard
from router.errors import ApiError
from router.fields import PATHS_NOT_OFFERED
from router.limits import Limiter
from router.openai import Api
from router.openapi import OPERATIONS
from tests.unit.fake_replica import FakeReplica, expected_text
from tests.unit.http_kit import CHAT, HI, MAX_LEN, TEXT, World, client, events, plain_client, post, raw_post, serving

# --- what the official client sees ---


async def test_official_client_gets_the_same_text_whole_and_streamed(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model) as world, client(world) as api:
        whole = await api.chat.completions.create(model="tiny-llama", messages=HI, max_tokens=5)  # type: ignore[arg-type]
        request = world.replica.added[0][0]
        assert whole.id == request.request_id
        assert whole.object == "chat.completion"
        assert whole.choices[0].message.content == expected_text(request)
        assert whole.choices[0].message.role == "assistant"
        assert whole.choices[0].finish_reason == "length"
        assert whole.usage is not None
        assert whole.usage.prompt_tokens == len(request.prompt_ids)
        assert (whole.usage.completion_tokens, whole.usage.total_tokens) == (5, 5 + len(request.prompt_ids))
        assert whole.service_tier == "default"

        stream = await api.chat.completions.create(
            model="tiny-llama", messages=HI, max_tokens=5, stream=True, stream_options={"include_usage": True}
        )  # type: ignore[call-overload]
        chunks = [chunk async for chunk in stream]
        request = world.replica.added[1][0]
        assert {chunk.id for chunk in chunks} == {request.request_id}
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == expected_text(request)
        assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["length"]
        assert chunks[-1].choices == []
        assert chunks[-1].usage == whole.usage
        assert all(c.usage is None for c in chunks[:-1])


async def test_official_client_gets_completions(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model) as world, client(world) as api:
        whole = await api.completions.create(model="tiny-llama", prompt="hello", max_tokens=3)
        assert whole.choices[0].text == expected_text(world.replica.added[0][0])
        assert whole.choices[0].finish_reason == "length"
        stream = await api.completions.create(model="tiny-llama", prompt="hello", max_tokens=3, stream=True)
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].text for c in chunks) == expected_text(world.replica.added[1][0])
        assert chunks[-1].choices[0].finish_reason == "length"
        assert [m.id async for m in api.models.list()] == ["tiny-llama"]
        assert (await api.models.retrieve("tiny-llama")).id == "tiny-llama"


async def test_official_client_raises_its_own_errors(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model) as world, client(world) as api:
        with pytest.raises(openai.BadRequestError) as bad:
            await api.completions.create(model="tiny-llama", prompt="", max_tokens=3)
        assert bad.value.param == "prompt"
        with pytest.raises(openai.NotFoundError) as missing:
            await api.completions.create(model="gpt-4", prompt="x")
        assert missing.value.code == "model_not_found"
        world.core.shut_down()
        with pytest.raises(openai.InternalServerError) as draining:
            await api.completions.create(model="tiny-llama", prompt="x", stream=True)
        assert draining.value.status_code == 503


# --- the form of a stream ---


@pytest.mark.parametrize(
    ("options", "usages"), [(None, 0), ({}, 0), ({"include_usage": False}, 0), ({"include_usage": True}, 1)]
)
async def test_usage_is_one_chunk_before_the_end_and_only_when_asked(
    tiny_model: ModelFolder, options: dict[str, bool] | None, usages: int
) -> None:
    async with serving(tiny_model) as world:
        got = await events(
            await post(world, "/v1/chat/completions", CHAT | {"stream": True, "stream_options": options})
        )
        assert got[-1] == "[DONE]"
        chunks = [json.loads(event) for event in got[:-1]]
        with_usage = [chunk for chunk in chunks if chunk.get("usage") is not None]
        assert len(with_usage) == usages
        assert [chunk["choices"] for chunk in with_usage] == [[]] * usages
        assert got.count("[DONE]") == 1
        assert sum(c["choices"][0]["finish_reason"] is not None for c in chunks if c["choices"]) == 1


async def test_each_delta_is_one_event(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model, auto=False) as world, plain_client(world) as http:
        asking = asyncio.create_task(http.post("/v1/completions", json=TEXT | {"stream": True}))
        await world.until(lambda: world.replica.held)
        request_id = world.held().request_id
        for k, text in enumerate(["水", "", '"\\\n\u2028', "<|", "🙂"]):
            finish = FinishReason.STOP if k == 4 else None
            world.replica.send(TokenDelta(request_id, 1, k, (k,), (text,), finish))
            await asyncio.sleep(0.01)
        chunks = [json.loads(event) for event in (await events(await asking))[:-1]]
        texts = [chunk["choices"][0]["text"] for chunk in chunks]
        assert texts == ["水", '"\\\n\u2028', "<|", "🙂", ""]
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


async def test_head_is_held_back_until_the_first_token(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model, auto=False) as world:
        reader, writer = await raw_post(world, TEXT | {"stream": True})
        await world.until(lambda: world.replica.held)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 0.05)
        world.replica.turn()
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        assert b" 200 OK" in head.splitlines()[0]
        assert b"text/event-stream" in head
        writer.close()


async def test_stream_that_breaks_gets_one_error_event_and_no_end_mark(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model, auto=False, max_attempts=1) as world:
        async with plain_client(world) as http:
            asking = asyncio.create_task(http.post("/v1/chat/completions", json=CHAT | {"stream": True}))
            await world.until(lambda: world.replica.held)
            world.replica.turn()
            await asyncio.sleep(0.01)
            world.replica.die()
            response = await asking
        got = [json.loads(event) for event in await events(response)]
        assert response.status_code == 200
        assert [set(event) for event in got if "error" in event] == [{"error"}]
        assert got[-1]["error"]["code"] == "replica_lost"
        assert set(got[-1]["error"]) == {"message", "type", "param", "code"}
        assert all(c["finish_reason"] is None for event in got[:-1] for c in event["choices"])


@pytest.mark.parametrize("stream", [False, True])
async def test_outcome_before_the_first_token_is_a_real_status(tiny_model: ModelFolder, stream: bool) -> None:
    body = TEXT | {"stream": stream}
    classes = (
        PriorityClass(name="standard", priority=0, service_tiers=("default",), max_queued_requests=1),
        PriorityClass(name="batch", priority=-10, service_tiers=("flex",)),
    )
    settings: dict[str, Any] = {"classes": classes, "max_attempts": 1, "max_queue_s": 0.05}
    async with serving(tiny_model, auto=False, connect=False, **settings) as world:
        refused = await post(world, "/v1/completions", body)
        assert refused.status_code == 503
        assert refused.headers["x-llm-d-request-dropped-reason"] == "rejected-no-endpoints"
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "no_replica"
        assert refused.headers["content-type"] == "application/json"

        world.replica.slots = 1
        world.replica.connect()
        async with plain_client(world) as http:
            running = asyncio.create_task(http.post("/v1/completions", json=body))
            await world.until(lambda: world.replica.held)
            queued = asyncio.create_task(http.post("/v1/completions", json=body))
            await world.until(lambda: any(b.queued_requests for b in world.core.bands()))
            full = await http.post("/v1/completions", json=body)
            assert full.status_code == 429
            assert full.headers["x-llm-d-request-dropped-reason"] == "rejected-saturated"
            assert 1 <= int(full.headers["retry-after"]) <= 60
            assert full.json()["error"]["type"] == "rate_limit_error"
            assert full.headers["x-forebay-priority-class"] == "standard"
            await asyncio.sleep(0.06)
            world.core.tick()
            expired = await queued
            assert expired.status_code == 504
            assert expired.headers["x-llm-d-request-dropped-reason"] == "rejected-ttl-expired"
            world.replica.die()
            lost = await running
            assert (lost.status_code, lost.json()["error"]["code"]) == (500, "replica_lost")
            assert "x-should-retry" not in lost.headers


async def test_what_killed_its_engines_is_told_not_to_come_again(tiny_model: ModelFolder) -> None:
    """OpenAI's clients send again what ends with a 500, unless they are told not to."""
    async with serving(tiny_model, auto=False) as world, plain_client(world) as http:
        asking = asyncio.create_task(http.post("/v1/completions", json=TEXT))
        await world.until(lambda: world.replica.held)
        world.replica.die()
        second = FakeReplica(world.core, ReplicaId("second")).connect()
        assert len(second.added) == 1
        second.die()
        response = await asking
        assert (response.status_code, response.json()["error"]["code"]) == (500, "quarantined")
        assert response.headers["x-should-retry"] == "false"


async def test_engine_error_is_a_500_for_that_request_alone(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model, auto=False, retry_share=0) as world, plain_client(world) as http:
        asking = asyncio.create_task(http.post("/v1/completions", json=TEXT))
        await world.until(lambda: world.replica.held)
        request_id = world.held().request_id
        world.replica.send(TokenDelta(request_id, 1, 0, (), (), FinishReason.ERROR, "bad logits"))
        response = await asking
        assert (response.status_code, response.json()["error"]["message"]) == (500, "bad logits")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["hello there", [5]])
async def test_engine_error_on_a_prompt_that_is_scored_is_told_as_any_other(
    tiny_model: ModelFolder, prompt: object, stream: bool
) -> None:
    body = TEXT | {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": 0, "stream": stream}
    async with serving(tiny_model, auto=False, retry_share=0) as world, plain_client(world) as http:
        asking = asyncio.create_task(http.post("/v1/completions", json=body))
        await world.until(lambda: world.replica.held)
        request_id = world.held().request_id
        world.replica.send(TokenDelta(request_id, 1, 0, (), (), FinishReason.ERROR, "bad logits"))
        response = await asking
        assert (response.status_code, response.json()["error"]["message"]) == (500, "bad logits")
        assert response.json()["error"]["code"] == "engine_error"


# --- clients that leave or lag ---


@pytest.mark.parametrize("stream", [False, True])
async def test_client_gone_is_cancelled_at_once_in_every_phase(tiny_model: ModelFolder, stream: bool) -> None:
    async with serving(tiny_model, auto=False) as world:
        world.replica.slots = 1
        world.replica.beat()
        body = TEXT | {"max_tokens": 500, "stream": stream}
        _, decoding = await raw_post(world, body)
        await world.until(lambda: world.replica.held)
        world.replica.turn()
        _, queued = await raw_post(world, body)
        await world.until(lambda: any(b.queued_requests for b in world.core.bands()))
        queued.close()
        await world.until(lambda: world.ended(Outcome.CANCELLED) == 1)
        assert not world.replica.aborted
        decoding.close()
        await world.until(lambda: world.ended(Outcome.CANCELLED) == 2)
        assert not world.replica.held
        assert world.core.bands() == ()
        _, prefilling = await raw_post(world, body)
        world.replica.beat()
        await world.until(lambda: world.replica.held)
        prefilling.close()
        await world.until(lambda: world.ended(Outcome.CANCELLED) == 3)
        assert not world.replica.held


async def test_same_request_id_twice_is_two_requests_and_only_echoed(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model, auto=False) as world, plain_client(world) as http:
        headers = {"x-request-id": "same"}
        first = asyncio.create_task(http.post("/v1/completions", json=TEXT, headers=headers))
        second = asyncio.create_task(http.post("/v1/completions", json=TEXT, headers=headers))
        await world.until(lambda: len(world.replica.held) == 2)
        for _ in range(5):
            world.replica.turn()
        answers = [await first, await second]
        assert [a.headers["x-request-id"] for a in answers] == ["same", "same"]
        assert len({a.json()["id"] for a in answers}) == 2
        by_id = {request.request_id: request for request, _ in world.replica.added}
        for answer in answers:
            assert answer.json()["choices"][0]["text"] == expected_text(by_id[RequestId(answer.json()["id"])])


async def test_client_s_id_is_bounded_and_clean(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model) as world:
        echoed = await post(world, "/v1/completions", TEXT, x_request_id="a b\tc" + "d" * 500)
        assert echoed.headers["x-request-id"] == "abc" + "d" * 125
        huge = await post(world, "/v1/completions", TEXT, x_request_id="d" * 5000)
        assert (huge.status_code, huge.json()["error"]["param"]) == (400, "x-request-id")
        own = await post(world, "/v1/completions", TEXT)
        assert own.headers["x-request-id"] == own.json()["id"]


async def test_slow_client_overflows_alone_and_is_told_when_it_reads_again(tiny_model: ModelFolder) -> None:
    async with (
        serving(tiny_model, auto=False, max_stream_bytes=100_000) as world,
        plain_client(world) as http,
    ):
        reader, writer = await raw_post(world, TEXT | {"max_tokens": 1900, "stream": True})
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await world.until(lambda: world.replica.held)
        slow = world.held().request_id
        quick = asyncio.create_task(http.post("/v1/completions", json=TEXT))
        await world.until(lambda: len(world.replica.held) == 2)
        sent = 0
        while not world.ended(Outcome.SLOW_CLIENT):
            assert sent < 1900
            world.replica.send(TokenDelta(slow, 1, sent, (1,), ("x" * 20_000,)))
            sent += 1
            await asyncio.sleep(0)
        assert world.replica.aborted == [(slow, 1)]
        for _ in range(5):
            world.replica.turn()
        assert (await quick).status_code == 200
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        received = await asyncio.wait_for(reader.read(), 10)
        assert received.count(b'"error"') == 1
        assert b'"slow_client"' in received
        assert b"[DONE]" not in received
        writer.close()


async def test_client_that_never_reads_its_end_does_not_hold_the_exchange(
    tiny_model: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completions, "LAST_WORD_S", 0.05)
    async with serving(tiny_model, auto=False, max_stream_bytes=100_000) as world:
        before = len(asyncio.all_tasks())
        _, writer = await raw_post(world, TEXT | {"max_tokens": 1900, "stream": True})
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await world.until(lambda: world.replica.held)
        slow = world.held().request_id
        for sent in range(1900):
            if world.ended(Outcome.SLOW_CLIENT):
                break
            world.replica.send(TokenDelta(slow, 1, sent, (1,), ("x" * 20_000,)))
            await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) > before
        await world.until(lambda: len(asyncio.all_tasks()) == before)
        writer.transport.abort()


async def test_exchange_that_has_ended_leaves_the_task_that_ran_it_alone(
    tiny_model: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completions, "LAST_WORD_S", 0.01)
    world = World(RouterConfig())
    world.replica.connect()
    pools = world.pools(tiny_model)
    rng = random.Random(0)
    gate = parsing.ParserGate(rng)
    exchange = completions.Completions(Api.COMPLETION, pools, gate, Limiter(rng), world.config, rng)
    messages = [{"type": "http.request", "body": json.dumps(TEXT | {"stream": True}).encode()}]

    async def receive() -> dict[str, Any]:
        return messages.pop() if messages else await asyncio.Future()

    async def send(_: object) -> None:
        raise ConnectionResetError

    async def connection() -> str:
        await Guard(exchange, None)({"type": "http", "headers": []}, receive, send)
        await asyncio.sleep(0.05)
        return "the next exchange"

    task = asyncio.create_task(connection())
    await world.until(lambda: world.replica.held)
    world.replica.turn()
    assert await task == "the next exchange"
    assert world.ended(Outcome.CANCELLED) == 1
    gate.close()


async def test_body_that_trickles_is_timed_out(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model, body_timeout_s=0.05) as world:
        reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
        writer.write(b'POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n\r\n{"mod')
        answer = await asyncio.wait_for(reader.read(), 5)
        assert b" 408 " in answer.splitlines()[0]
        assert b'"error"' in answer
        writer.close()


async def test_body_that_is_too_large_is_refused_in_a_way_that_its_sender_can_read(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model, max_body_bytes=1000) as world:
        large = await post(world, "/v1/completions", TEXT | {"prompt": "x" * 1000})
        assert (large.status_code, set(large.json()["error"])) == (413, {"message", "type", "param", "code"})

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(20):
                yield b"x" * 100

        async with plain_client(world) as http:
            undeclared = await http.post("/v1/completions", content=chunks())
        assert undeclared.status_code == 413


# --- everything else ---


async def test_every_error_has_one_form(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model) as world, plain_client(world) as http:
        answers = [
            (404, await http.get("/nothing")),
            (404, await http.get("/")),
            (404, await http.post("/v1/chat/completions/", json=CHAT)),
            (404, await http.get("/v1/models/other")),
            (405, await http.get("/v1/completions")),
            (405, await http.delete("/v1/models")),
            (400, await http.post("/v1/completions", content=b"{")),
            (400, await http.post("/v1/completions", json=TEXT | {"n": 0})),
            (404, await http.post("/v1/completions", json=TEXT | {"model": "x"})),
        ]
        for status, answer in answers:
            assert answer.status_code == status
            assert set(answer.json()) == {"error"}
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert answers[4][1].headers["allow"] == "POST"


async def test_head_and_options_are_answered_without_a_body(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model) as world, plain_client(world) as http:
        head = await http.head("/v1/models")
        assert (head.status_code, head.content) == (200, b"")
        options = await http.options("/v1/completions")
        assert (options.status_code, options.headers["allow"], options.content) == (204, "POST", b"")
        assert (await http.options("/nothing")).status_code == 404


async def test_ready_needs_a_replica_that_takes_work_and_health_does_not(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model, connect=False) as world, plain_client(world) as http:
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/ready")).status_code == 503
        world.replica.connect()
        assert (await http.get("/ready")).status_code == 200
        world.core.retire()
        assert (await http.get("/ready")).status_code == 503
        assert (await http.get("/health")).status_code == 200


async def test_status_shows_bands_and_the_cluster_or_null_where_no_controller_answers(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model, auto=False) as world, plain_client(world) as http:
        asking = asyncio.create_task(http.post("/v1/completions", json=TEXT | {"service_tier": "flex"}))
        await world.until(lambda: world.replica.held)
        status = (await http.get("/status")).json()
        assert status["cluster"] is None
        (shown,) = status["router"]["models"]
        assert (shown["model"], shown["ready"]) == ("tiny-llama", True)
        assert shown["bands"] == [
            {
                "priority": -10,
                "priority_class": "batch",
                "queued_requests": 0,
                "queued_bytes": 0,
                "running_requests": 1,
                "oldest_s": None,
            }
        ]
        for _ in range(5):
            world.replica.turn()
        answer = await asking
        entry = RosterEntry(world.replica.replica_id, world.replica.generation, "127.0.0.1", 5, "tiny-llama")
        world.cluster = ClusterStatus(
            ask_id=1,
            controller_generation=Generation(3, "c"),
            controller_pid=7,
            uptime_s=1.5,
            replicas=(ReplicaSummary(entry, 8, world.replica.report(), 0.25),),
            routers=(),
        )
        cluster = (await http.get("/status")).json()["cluster"]
        assert cluster["controller_generation"] == {"number": 3, "uuid": "c"}
        assert cluster["replicas"][0]["entry"]["replica_id"] == "r1"
        assert cluster["replicas"][0]["report"]["load"]["slots_total"] == 4
        assert answer.json()["service_tier"] == "flex"
        assert answer.headers["x-forebay-priority-class"] == "batch"


async def test_metrics_do_not_grow_with_what_clients_make_up(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model) as world, plain_client(world) as http:
        await http.post("/v1/completions", json=TEXT)

        async def make_up(k: int) -> None:
            await http.post("/v1/completions", json=TEXT | {"model": f"model-{k}"})
            await http.get(f"/path-{k}")
            await http.post("/v1/completions", json=TEXT | {"service_tier": f"tier-{k}"})

        await make_up(0)  # each kind of error has a series of its own
        before = len((await http.get("/metrics")).text.splitlines())
        for k in range(1, 100):
            await make_up(k)
        after = await http.get("/metrics")
        assert len(after.text.splitlines()) == before
        assert "forebay_requests_total{" in after.text


async def test_sixty_four_streams_at_once_each_get_their_own_text(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model) as world:
        world.replica.slots = 48
        world.replica.beat()
        limits = httpx.Limits(max_connections=64)
        async with plain_client(world, limits=limits, timeout=30) as http:
            body = TEXT | {"max_tokens": 30, "stream": True}
            answers = await asyncio.gather(*(http.post("/v1/completions", json=body) for _ in range(64)))
        requests = {request.request_id: request for request, _ in world.replica.added}
        assert len(requests) == 64
        for answer in answers:
            got = await events(answer)
            chunks = [json.loads(event) for event in got[:-1]]
            text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
            assert got[-1] == "[DONE]"
            assert text == expected_text(requests[chunks[0]["id"]])


async def test_long_prompt_is_read_in_a_thread(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model) as world:
        answer = await post(world, "/v1/completions", TEXT | {"prompt": [5] * 1990})
        assert answer.json()["usage"]["prompt_tokens"] == 1990


async def test_backlog_of_long_prompts_is_bounded_and_what_is_read_makes_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = threading.Event()

    def work() -> str:
        assert read.wait(10)
        return "read"

    monkeypatch.setattr(parsing, "PARSER_MAX_BYTES", 12_000)
    gate = parsing.ParserGate(random.Random(0))
    waiting = [asyncio.create_task(gate.run(5000, work)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(ApiError) as refused:
        await gate.run(5000, work)
    assert (refused.value.status, refused.value.body.code) == (429, "queue_full")
    assert int(refused.value.headers["retry-after"]) >= 1
    read.set()
    await asyncio.gather(*waiting)
    assert await gate.run(5000, work) == "read"
    gate.close()


async def test_request_moves_to_another_replica_under_a_stream_that_does_not_notice(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model, auto=False) as world, plain_client(world) as http:
        asking = asyncio.create_task(http.post("/v1/completions", json=TEXT | {"stream": True}))
        await world.until(lambda: world.replica.held)
        request = world.held()
        world.replica.turn()
        other = FakeReplica(world.core, ReplicaId("r2"), Generation(1, "b"), refuse_with=RefusalReason.FULL).connect()
        world.replica.die()
        other.refuse_with = None
        other.turn()
        other.beat()
        for _ in range(5):
            other.turn()
        got = await events(await asking)
        assert "".join(json.loads(e)["choices"][0]["text"] for e in got[:-1]) == expected_text(request)
        assert got[-1] == "[DONE]"


@pytest.mark.parametrize("path", sorted(PATHS_NOT_OFFERED))
async def test_paths_that_others_serve_say_what_is_not_offered(tiny_model: ModelFolder, path: str) -> None:
    async with serving(tiny_model) as world, plain_client(world) as http:
        body = {"model": "tiny-llama", "input": "x"}
        for answer in (
            await http.post(path, json=body),
            await http.post(f"{path}/some/thing", json=body),
            await http.get(path),
        ):
            assert answer.status_code == 404
            error = answer.json()["error"]
            assert (error["code"], error["param"], error["type"]) == ("not_offered", None, "invalid_request_error")
            assert PATHS_NOT_OFFERED[path] in error["message"]
        assert (await http.post(f"{path}x", json=body)).json()["error"]["code"] == "unknown_path"


async def test_head_is_answered_as_get_is_but_for_the_body(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model) as world, plain_client(world) as http:
        done = (await http.post("/v1/completions", json=TEXT)).json()["id"]
        for operation in OPERATIONS:
            path = operation.path.format(name="tiny-llama", request_id=done)
            head = await http.head(path)
            if operation.method != "get":
                allowed = {o.method.upper() for o in OPERATIONS if o.path == operation.path}
                assert (head.status_code, head.content) == (405, b"")
                assert set(head.headers["allow"].split(", ")) == allowed
                continue
            got = await http.get(path)
            assert (head.status_code, head.content) == (got.status_code, b"") == (200, b"")
            assert head.headers["content-type"] == got.headers["content-type"]


async def test_models_are_told_whole(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model) as world, plain_client(world) as http:
        listed = (await http.get("/v1/models")).json()
        (card,) = listed["data"]
        assert listed["object"] == "list"
        assert (card["id"], card["object"], card["max_model_len"]) == ("tiny-llama", "model", MAX_LEN)
        assert (await http.get("/v1/models/tiny-llama")).json() == card
        other = await http.get("/v1/models/org%2Fother")
        assert (other.status_code, other.json()["error"]["param"]) == (404, "model")
        assert "org/other" in other.json()["error"]["message"]


async def test_nothing_that_a_client_says_is_logged_but_its_own_id(
    tiny_model: ModelFolder, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    secret = "hush"
    async with serving(tiny_model) as world, plain_client(world) as http:
        headers = {"authorization": f"Bearer {secret}", "x-session-id": secret, "x-request-id": "mine"}
        said: list[dict[str, Any]] = [
            TEXT | {"prompt": secret, "stop": [secret], "user": secret, "metadata": {secret: secret}},
            TEXT | {"prompt": secret, "stream": True},
            TEXT | {"model": secret},
            TEXT | {secret: secret},
            TEXT | {"service_tier": secret},
            CHAT | {"messages": [{"role": "user", "content": secret, "name": secret}]},
            CHAT | {"messages": [{"role": secret, "content": secret}]},
        ]
        for body in said:
            path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
            await http.post(path, json=body, headers=headers)
            await http.post("/tokenize", json=body, headers=headers)
        await http.post("/v1/completions", content=b'{"prompt": "' + secret.encode(), headers=headers)
        await http.get(f"/v1/requests/{secret}/explain", headers=headers)
        reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
        writer.write(f"{secret} HTTP/1.1\r\nx: {secret}\x00\r\n\r\n".encode())
        await reader.read()
        writer.close()
    ours = [r for r in caplog.records if not r.name.startswith(("httpx", "httpcore", "asyncio"))]
    assert any("is mine to its client" in record.getMessage() for record in ours)
    assert not [r for r in ours if secret in r.getMessage() or secret in str(r.exc_info) or secret in str(r.__dict__)]
