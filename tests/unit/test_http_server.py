"""Nobody holds a connection by being slow, and what is no HTTP gets an answer in the one form. Raw sockets throughout."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from cluster.model import ModelFolder
from cluster.types import Outcome
from deployments import http_server
from tests.unit.http_kit import CHAT, TEXT, World, post, raw_post, serving

HEAD_S = 0.15


async def connect(world: World) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", world.port)


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], dict[str, Any]]:
    """One response with a body of stated length: (status, headers, JSON)."""
    head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)).decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
    body = await asyncio.wait_for(reader.readexactly(int(headers["content-length"])), 5)
    return int(head[0].split()[1]), headers, json.loads(body)


async def hung_up(reader: asyncio.StreamReader) -> bytes:
    """What is left until the server hangs up; on one who is still sending that is a reset, which may overtake it."""
    received = b""
    try:
        async with asyncio.timeout(5):
            while data := await reader.read(2**16):
                received += data
    except ConnectionResetError:
        pass
    return received


async def drip(writer: asyncio.StreamWriter, data: bytes, every_s: float = 0.01) -> None:
    """Byte by byte, for as long as anybody takes them."""
    for byte in data:
        if writer.is_closing():
            return
        writer.write(bytes([byte]))
        await asyncio.sleep(every_s)


@pytest.mark.parametrize(
    "begin",
    [b"GET", b"GET /health HTTP/1.1\r\n", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-le"],
    ids=["half a line", "half a head", "half a name"],
)
async def test_head_that_does_not_come_is_timed_out_in_the_one_form(tiny_model: ModelFolder, begin: bytes) -> None:
    async with serving(tiny_model, head_timeout_s=HEAD_S) as world:
        reader, writer = await connect(world)
        began = time.monotonic()
        writer.write(begin)
        status, headers, body = await answer(reader)
        assert (status, headers["connection"], body["error"]["code"]) == (408, "close", "head_timeout")
        assert await hung_up(reader) == b""
        assert HEAD_S <= time.monotonic() - began < HEAD_S + 2
        writer.close()


async def test_head_that_drips_is_timed_out_though_bytes_keep_coming(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model, head_timeout_s=HEAD_S) as world:
        reader, writer = await connect(world)
        began = time.monotonic()
        dripping = asyncio.create_task(drip(writer, b"GET /health HTTP/1.1\r\nx-a: " + b"a" * 5000))
        assert b" 200 " not in await hung_up(reader)
        assert HEAD_S <= time.monotonic() - began < HEAD_S + 2
        dripping.cancel()
        writer.close()


async def test_second_head_on_a_connection_is_timed_out_as_the_first_is(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model, head_timeout_s=HEAD_S) as world:
        reader, writer = await connect(world)
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nGET /hea")
        assert (await answer(reader))[0] == 200
        assert (await answer(reader))[0] == 408
        writer.close()


async def test_connection_that_says_nothing_is_ended_as_an_idle_one_is(
    tiny_model: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "KEEP_ALIVE_S", 0.1)
    async with serving(tiny_model) as world:
        reader, writer = await connect(world)
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()


async def test_slow_answer_is_no_slow_head(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model, auto=False, head_timeout_s=HEAD_S) as world:
        reader, writer = await raw_post(world, TEXT)
        await world.until(lambda: world.replica.held)
        await asyncio.sleep(2 * HEAD_S)
        for _ in range(5):
            world.replica.turn()
        assert (await answer(reader))[0] == 200
        writer.close()


async def test_body_that_drips_is_timed_out_though_bytes_keep_coming(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model, body_timeout_s=HEAD_S) as world:
        reader, writer = await connect(world)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5000\r\n\r\n")
        began = time.monotonic()
        dripping = asyncio.create_task(drip(writer, b" " * 5000))
        assert b" 200 " not in await hung_up(reader)
        assert HEAD_S <= time.monotonic() - began < HEAD_S + 2
        dripping.cancel()
        writer.close()


async def test_body_that_nobody_wants_does_not_hold_the_connection(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model, head_timeout_s=HEAD_S) as world:
        reader, writer = await connect(world)
        writer.write(b"POST /nothing HTTP/1.1\r\nhost: x\r\ncontent-length: 5000\r\n\r\n")
        assert (await answer(reader))[0] == 404
        began = time.monotonic()
        dripping = asyncio.create_task(drip(writer, b" " * 5000))
        await hung_up(reader)
        assert time.monotonic() - began < HEAD_S + 2
        dripping.cancel()
        writer.close()


async def test_slow_clients_keep_no_other_from_being_served(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model, head_timeout_s=5) as world:
        slow = [await connect(world) for _ in range(200)]
        for _, writer in slow:
            writer.write(b"POST /v1/completions HTTP/1.1\r\ncontent-")
        assert (await post(world, "/v1/chat/completions", CHAT)).status_code == 200
        for _, writer in slow:
            writer.close()


@pytest.mark.parametrize(
    "said",
    [
        b"hello\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
        b"GET /health\r\n\r\n",
        b"GET /h\xc3\xa9 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET /health HTTP/1.1\r\nx: \x00\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + b"x-a: " + b"a" * 100_000,
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip\r\n\r\n",
    ],
    ids=["words", "TLS", "no version", "no ASCII", "no colon", "NUL", "endless", "negative", "two lengths", "coding"],
)
async def test_what_is_no_http_is_refused_in_the_one_form_and_hung_up_on(tiny_model: ModelFolder, said: bytes) -> None:
    async with serving(tiny_model) as world:
        reader, writer = await connect(world)
        writer.write(said)
        status, headers, body = await answer(reader)
        assert status in {400, 501}
        assert headers["content-type"] == "application/json"
        assert body["error"].keys() == {"message", "type", "param", "code"}
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
        assert (await post(world, "/v1/completions", TEXT)).status_code == 200


async def test_chunks_that_are_none_end_their_own_connection_only(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model) as world:
        reader, writer = await connect(world)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n")
        status, _, body = await answer(reader)
        assert (status, body["error"]["code"]) == (400, "invalid_http")
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
        assert not world.replica.added


async def test_body_in_chunks_is_a_body(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model) as world:
        reader, writer = await connect(world)
        raw = json.dumps(TEXT).encode()
        parts = b"".join(b"%x\r\n%b\r\n" % (1, raw[k : k + 1]) for k in range(len(raw)))
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" + parts + b"0\r\n\r\n"
        )
        assert (await answer(reader))[0] == 200
        writer.close()


async def test_head_larger_than_the_limit_is_431_even_where_it_comes_at_once(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model) as world:
        reader, writer = await connect(world)
        writer.write(
            b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx-a: " + b"a" * 15_000 + b"\r\nx-b: " + b"b" * 2_000 + b"\r\n\r\n"
        )
        status, _, body = await answer(reader)
        assert (status, body["error"]["code"]) == (431, "headers_too_large")
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()


def posted(body: dict[str, Any], head: str = "") -> bytes:
    raw = json.dumps(body).encode()
    return f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{head}content-length: {len(raw)}\r\n\r\n".encode() + raw


@pytest.mark.parametrize("chunked", [False, True], ids=["sized", "in chunks"])
async def test_request_that_offers_an_upgrade_is_answered_with_its_body_and_so_is_the_next(
    tiny_model: ModelFolder, chunked: bool
) -> None:
    async with serving(tiny_model) as world:
        reader, writer = await connect(world)
        raw = json.dumps(TEXT).encode()
        form = "transfer-encoding: chunked" if chunked else f"content-length: {len(raw)}"
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(raw), raw) if chunked else raw
        offer = "connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__"
        writer.write(f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{offer}\r\n{form}\r\n\r\n".encode() + body)
        writer.write(posted(TEXT))
        for _ in range(2):
            status, headers, answered = await answer(reader)
            assert (status, answered["usage"]["completion_tokens"]) == (200, 5)
            assert "close" not in headers.get("connection", "")
        writer.close()


async def test_client_that_leaves_is_noticed_though_other_requests_wait_behind_the_one_that_runs(
    tiny_model: ModelFolder,
) -> None:
    async with serving(tiny_model, auto=False) as world:
        _, writer = await connect(world)
        writer.write(posted(TEXT) + posted(TEXT))
        await world.until(lambda: world.replica.held)
        writer.transport.abort()
        await world.until(lambda: world.ended(Outcome.CANCELLED) == 1)
        assert len(world.replica.added) == 1


@pytest.mark.parametrize("pieces", [1, 2], ids=["at once", "after it"])
async def test_what_is_no_http_is_refused_behind_the_answers_to_what_came_before_it(
    tiny_model: ModelFolder, pieces: int
) -> None:
    async with serving(tiny_model, auto=False) as world:
        reader, writer = await connect(world)
        parts = [posted(TEXT) + posted(TEXT), b"\x16\x03\x01 nonsense\r\n\r\n"]
        writer.write(b"".join(parts) if pieces == 1 else parts[0])
        await world.until(lambda: world.replica.held)
        if pieces == 2:
            writer.write(parts[1])
        turning = asyncio.create_task(world.replica.run())
        assert [(await answer(reader))[0] for _ in range(3)] == [200, 200, 400]
        assert await hung_up(reader) == b""
        turning.cancel()
        writer.close()


async def test_broken_body_of_a_waiting_request_leaves_the_answer_before_it_whole(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model, auto=False) as world:
        reader, writer = await connect(world)
        broken = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n"
        writer.write(posted(TEXT) + broken)
        await world.until(lambda: world.replica.held)
        turning = asyncio.create_task(world.replica.run())
        assert [(await answer(reader))[0] for _ in range(2)] == [200, 400]
        assert await hung_up(reader) == b""
        turning.cancel()
        writer.close()


async def test_more_requests_than_may_wait_are_all_answered_in_their_order(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model) as world:
        reader, writer = await connect(world)
        count = 100
        for number in range(count):
            writer.write(posted({**TEXT, "max_tokens": 1 + number % 7}))
        for number in range(count):
            status, _, body = await answer(reader)
            assert (status, body["usage"]["completion_tokens"]) == (200, 1 + number % 7)
        writer.close()


@pytest.mark.parametrize(
    "said",
    [
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n",
        b"GET /health HTTP/2.0\r\nhost: x\r\n\r\n",
        b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\ncontent-length: 5\r\n\r\nhello",
        b"GET /health HTTP/1.1\r\nhost: x\r\nx-a : b\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\nx-a: b\r\n c\r\n\r\n",
        b"GET /health HTTP/1.1\nhost: x\n\n",
    ],
    ids=[
        "no host",
        "two hosts",
        "HTTP/2",
        "CONNECT",
        "two codings",
        "chunks in 1.0",
        "two framings",
        "space",
        "folded",
        "bare LF",
    ],
)
async def test_request_that_two_readers_might_take_differently_is_refused(tiny_model: ModelFolder, said: bytes) -> None:
    async with serving(tiny_model) as world:
        reader, writer = await connect(world)
        writer.write(said)
        status, _, body = await answer(reader)
        assert (status in {400, 501}, body["error"]["code"]) == (True, "invalid_http")
        assert await hung_up(reader) == b""
        writer.close()
        assert not world.replica.added


async def test_fields_behind_a_body_in_chunks_are_no_headers_of_its_request(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model) as world:
        reader, writer = await connect(world)
        raw = json.dumps(TEXT).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
            b"%x\r\n%b\r\n0\r\nx-request-id: behind\r\n\r\n" % (len(raw), raw)
        )
        status, headers, _ = await answer(reader)
        assert status == 200
        assert headers["x-request-id"] != "behind"
        writer.close()


async def test_client_that_waits_to_be_told_to_go_on_is_told(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model) as world:
        reader, writer = await connect(world)
        head, _, raw = posted(TEXT, "expect: 100-continue\r\n").partition(b"\r\n\r\n")
        writer.write(head + b"\r\n\r\n")
        told = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        assert told == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(raw)
        assert (await answer(reader))[0] == 200
        writer.close()


async def test_large_head_that_comes_in_pieces_behind_a_body_is_read_to_its_end(tiny_model: ModelFolder) -> None:
    """What came before it in the same read is not counted with it."""
    async with serving(tiny_model) as world:
        reader, writer = await connect(world)
        padded = json.dumps({**TEXT, "user": "u" * 40_000}).encode()
        first = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(padded)}\r\n\r\n".encode() + padded
        writer.write(first + b"GET /health HTTP/1.1\r\nhost: x\r\nx-a: ")
        assert (await answer(reader))[0] == 200
        writer.write(b"a" * 10_000 + b"\r\n\r\n")
        assert (await answer(reader))[0] == 200
        writer.close()
