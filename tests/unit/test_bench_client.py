"""A replay against a real HTTP server: what goes over the wire, and every way in which an answer can fail.

The server is uvicorn on a free loopback port with a scripted application; only its behaviour is made up.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from ops.bench.client import Api, Ask, Endpoint
from ops.bench.open_loop import run_open_loop
from ops.bench.replay import Progress, ReplayResult, ReplaySettings, build_report, replay, warnings
from ops.bench.schedule import PlannedRequest
from ops.bench.stats import Answer, Failure, Slo
from ops.errors import CommandError

Send = Callable[[dict[str, Any]], Awaitable[None]]
Stream = Callable[[dict[str, Any], Send], Awaitable[None]]

TOKENS_PER_WORD = 2
OVERHEAD_TOKENS = 3
CLOCK_MS = 0.01
"""An event loop may wake a timer early by its clock's resolution, and differences of times are rounded."""


def prompt_tokens(body: dict[str, Any]) -> int:
    text: str = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
    return len(text.split()) * TOKENS_PER_WORD + OVERHEAD_TOKENS


async def start(send: Send, status: int = 200, kind: bytes = b"text/event-stream") -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})


async def write(send: Send, data: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": more})


def sse(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def token(text: str = " a", finish: str | None = None) -> bytes:
    return sse(choices=[{"index": 0, "text": text, "finish_reason": finish}])


async def whole_answer(body: dict[str, Any], send: Send, first_s: float = 0.0, gap_s: float = 0.0) -> None:
    await start(send)
    n = body["max_tokens"]
    for i in range(n):
        await asyncio.sleep(gap_s if i else first_s)
        await write(send, token(finish="length" if i == n - 1 else None))
    usage = {"prompt_tokens": prompt_tokens(body), "completion_tokens": n}
    await write(send, sse(choices=[], usage=usage) + b"data: [DONE]\n\n", more=False)


class ScriptedServer:
    """Lists one model, counts prompt tokens, and streams by `stream`. Keeps the bodies it was sent."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.streamed: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.all_arrived = asyncio.Event()
        self.expected = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        raw, more = b"", True
        while more:
            message = await receive()
            raw, more = raw + message.get("body", b""), message.get("more_body", False)
        if scope["path"] == "/v1/models":
            await start(send, kind=b"application/json")
            await write(send, json.dumps({"object": "list", "data": [{"id": "scripted"}]}).encode(), more=False)
            return
        body = json.loads(raw)
        self.paths.append(scope["path"])
        if not body["stream"]:
            await start(send, kind=b"application/json")
            usage = {"prompt_tokens": prompt_tokens(body), "completion_tokens": 1}
            await write(send, json.dumps({"choices": [{"text": "a"}], "usage": usage}).encode(), more=False)
            return
        self.streamed.append(body)
        if len(self.streamed) == self.expected:
            self.all_arrived.set()
        await self._stream(body, send)


@asynccontextmanager
async def serving(app: ScriptedServer) -> AsyncIterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(
            app, log_level="critical", interface="asgi3", lifespan="off", ws="none", timeout_graceful_shutdown=1
        )
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve([listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task


def settings(url: str, **changes: Any) -> ReplaySettings:
    base = ReplaySettings(
        url=url,
        api=Api.COMPLETIONS,
        model=None,
        tokenizer=None,
        trace=Path("trace.csv"),
        trace_format="azure",
        skip=0,
        time_scale=Fraction(1),
        token_scale=Fraction(1),
        classes={"code": "interactive"},
        slos={"interactive": Slo(), "standard": Slo(), "batch": Slo()},
        seed=0,
        timeout_s=30.0,
    )
    return replace(base, **changes)


def planned(count: int, *, gap_s: float = 0.0, tokens: int = 4, prompt: int = 103) -> list[PlannedRequest]:
    names = ("interactive", "standard", "batch")
    return [PlannedRequest(i, i * gap_s, names[i % 3], prompt, tokens) for i in range(count)]


async def run(url: str, requests: list[PlannedRequest], **changes: Any) -> ReplayResult:
    return await replay(requests, settings(url, **changes), Progress(lambda _: None), {})


async def one_answer(stream: Stream, timeout_s: float = 30.0) -> Answer:
    async with serving(ScriptedServer(stream)) as url:
        endpoint = Endpoint(url, Api.COMPLETIONS, timeout_s, {})
        return await endpoint.send(Ask(0, "standard", "default", 0.0, "a b c", 9, 4))


@pytest.mark.parametrize("api", list(Api))
async def test_requests_carry_class_length_and_words_to_the_traced_length(api: Api) -> None:
    server = ScriptedServer(whole_answer)
    async with serving(server) as url:
        result = await run(url + "/v1/", planned(6, prompt=103), api=api)
    assert set(server.paths) == {"/v1/completions" if api is Api.COMPLETIONS else "/v1/chat/completions"}
    assert sorted(body["service_tier"] for body in server.streamed) == sorted(["priority", "default", "flex"] * 2)
    for body in server.streamed:
        assert (body["model"], body["max_tokens"], body["ignore_eos"], body["stream"]) == ("scripted", 4, True, True)
        assert prompt_tokens(body) == 103, "two tokens per word and three more were learnt from the server"
    assert result.lexicon.tokens_per_word == TOKENS_PER_WORD
    assert result.lexicon.overhead_tokens == OVERHEAD_TOKENS
    assert [a.index for a in result.answers] == list(range(6))
    assert {(a.failure, a.output_tokens, a.prompt_tokens) for a in result.answers} == {(None, 4, 103)}


async def test_times_hold_the_servers_delays() -> None:
    async def slow(body: dict[str, Any], send: Send) -> None:
        await whole_answer(body, send, first_s=0.15, gap_s=0.05)

    async with serving(ScriptedServer(slow)) as url:
        before = time.monotonic()
        result = await run(url, planned(8, tokens=5))
        elapsed_ms = (time.monotonic() - before) * 1000
    for a in result.answers:
        assert a.tpot_ms is not None
        assert a.ttft_ms >= 150 - CLOCK_MS
        assert a.e2e_ms >= 150 + 4 * 50 - CLOCK_MS
        assert a.e2e_ms <= elapsed_ms
        assert a.ttft_ms + 4 * a.tpot_ms == pytest.approx(a.e2e_ms)


async def test_server_that_never_answers_delays_no_arrival() -> None:
    """The open-loop law: all twenty arrive although not one was answered."""
    release = asyncio.Event()

    async def silent(body: dict[str, Any], send: Send) -> None:
        await release.wait()
        await whole_answer(body, send)

    server = ScriptedServer(silent)
    server.expected = 20
    async with serving(server) as url:
        task = asyncio.create_task(run(url, planned(20, gap_s=0.01)))
        await asyncio.wait_for(server.all_arrived.wait(), 30)
        assert not task.done()
        release.set()
        result = await task
    assert [a.failure for a in result.answers] == [None] * 20
    sent = [a.sent_s for a in result.answers]
    assert sent == sorted(sent)
    assert all(a.lateness_ms >= -CLOCK_MS for a in result.answers), "none leaves before its time"


async def test_request_is_prepared_only_when_the_one_before_has_left() -> None:
    order: list[str] = []

    def departures() -> Any:
        for i in range(3):
            order.append(f"prepare {i}")

            async def call(i: int = i) -> int:
                order.append(f"send {i}")
                return i

            yield 0.0, call

    assert await run_open_loop(departures(), time.monotonic) == [0, 1, 2]
    assert order == ["prepare 0", "send 0", "prepare 1", "send 1", "prepare 2", "send 2"]


async def test_refused_request_is_counted_by_status_with_the_servers_words() -> None:
    async def busy(body: dict[str, Any], send: Send) -> None:
        await start(send, 429, b"application/json")
        await write(send, b'{"error": {"message": "queue\\nfull", "code": "queue_full"}}', more=False)

    answer = await one_answer(busy)
    assert (answer.failure, answer.failure_label, answer.detail) == (Failure.HTTP_STATUS, "http_429", "queue full")


async def test_refusal_whose_body_breaks_off_is_still_counted_by_its_status() -> None:
    async def broken(body: dict[str, Any], send: Send) -> None:
        headers = [(b"content-type", b"application/json"), (b"content-length", b"500")]
        await send({"type": "http.response.start", "status": 503, "headers": headers})
        await write(send, b'{"error"', more=False)

    answer = await one_answer(broken)
    assert (answer.failure, answer.failure_label) == (Failure.HTTP_STATUS, "http_503")


async def test_error_event_in_a_stream_is_an_error() -> None:
    async def lost(body: dict[str, Any], send: Send) -> None:
        await start(send)
        await write(send, token())
        await write(send, sse(error={"message": "replica lost"}) + b"data: [DONE]\n\n", more=False)

    answer = await one_answer(lost)
    assert (answer.failure, answer.detail) == (Failure.ERROR_EVENT, "replica lost")


async def test_stream_that_ends_politely_but_early_is_truncated() -> None:
    async def early(body: dict[str, Any], send: Send) -> None:
        await start(send)
        await write(send, token())
        await write(send, b"data: [DONE]\n\n", more=False)

    assert (await one_answer(early)).failure is Failure.TRUNCATED


async def test_connection_that_breaks_within_the_stream_is_truncated() -> None:
    async def crash(body: dict[str, Any], send: Send) -> None:
        await start(send)
        await write(send, token())
        raise RuntimeError("crash")

    assert (await one_answer(crash)).failure is Failure.TRUNCATED


async def test_answer_that_takes_too_long_is_a_timeout() -> None:
    async def endless(body: dict[str, Any], send: Send) -> None:
        await start(send)
        await write(send, token())
        await asyncio.sleep(60)

    answer = await one_answer(endless, timeout_s=0.3)
    assert answer.failure is Failure.TIMEOUT
    assert answer.e2e_ms >= 300 - CLOCK_MS


async def test_server_gone_during_the_replay_is_counted_as_connect() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    endpoint = Endpoint(f"http://127.0.0.1:{port}", Api.COMPLETIONS, 5.0, {})
    answer = await endpoint.send(Ask(0, "standard", "default", 0.0, "a", 1, 1))
    assert (answer.failure, answer.status) == (Failure.CONNECT, None)


async def test_nobody_at_the_address_is_one_line_and_exit_code_2() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(CommandError, match="is the server running") as caught:
        await run(f"http://127.0.0.1:{port}", planned(1))
    assert caught.value.exit_code == 2


async def test_failures_of_every_kind_reach_the_report_and_the_warnings() -> None:
    async def mixed(body: dict[str, Any], send: Send) -> None:
        match body["service_tier"]:
            case "flex":
                await start(send, 503, b"text/plain")
                await write(send, b"draining", more=False)
            case "default":
                await start(send)
                await write(send, token(), more=False)
            case _:
                await whole_answer(body, send)

    async with serving(ScriptedServer(mixed)) as url:
        result = await run(url, planned(9))
    report, _ = build_report(result, "forebay bench replay")
    assert report.context["errors_by_kind"] == {"http_503": 3, "truncated": 3}
    assert [report.value(f"{name}.errors") for name in ("interactive", "standard", "batch", "all")] == [0, 3, 3, 6]
    assert report.value("all.output_tokens") == 3 * 4
    said = "\n".join(warnings(report, result))
    assert "3 failed with http_503, the first: draining" in said
    assert "3 failed with truncated" in said


async def test_wrong_length_and_missing_usage_are_told() -> None:
    async def short(body: dict[str, Any], send: Send) -> None:
        await start(send)
        await write(send, token() + token(finish="stop") + b"data: [DONE]\n\n", more=False)

    async with serving(ScriptedServer(short)) as url:
        result = await run(url, planned(3, tokens=4))
    report, _ = build_report(result, "forebay bench replay")
    assert report.value("all.errors") == 0
    assert report.context["output_length_wrong"] == 3
    assert report.context["output_tokens_counted_by"] == "events"
    assert report.value("all.output_tokens") == 3 * 2
    said = "\n".join(warnings(report, result))
    assert "ignore_eos" in said
    assert "reports no usage" in said


async def test_late_client_is_warned_about() -> None:
    async with serving(ScriptedServer(whole_answer)) as url:
        result = await run(url, planned(3))
    late = replace(result, answers=tuple(replace(a, sent_s=a.planned_s + 0.051) for a in result.answers))
    on_time = replace(result, answers=tuple(replace(a, sent_s=a.planned_s + 0.049) for a in result.answers))
    assert any("sent late (p99 51 ms" in w for w in warnings(build_report(late, "")[0], late))
    assert warnings(build_report(on_time, "")[0], on_time) == []
