"""What a client that knows HTTP/1.1 may try: to be taken for two, to hold more than its share, to leave unnoticed.

Over raw sockets, and over h11 where an answer is to be taken apart. What is expected comes from RFC 9110 and 9112.
"""

from __future__ import annotations

import asyncio
import gc
import json
import re
import socket
from collections.abc import Callable
from typing import Any, cast

import h11
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from uvicorn.server import ServerState

from cluster.model import ModelFolder
from cluster.types import Outcome
from deployments import http_protocol
from deployments.http_exchange import Exchange
from deployments.http_protocol import HEAD_MAX_BYTES, Connection
from deployments.http_server import uvicorn_config
from router.asgi import Receive, Scope, Send
from tests.unit.http_kit import TEXT, serving
from tests.unit.test_http_server import answer, connect, hung_up, posted
from tests.unit.test_router_direct import Wire

STREAM = {**TEXT, "stream": True}


async def mirror(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with what it was asked."""
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body, more = body + message["body"], message["more_body"]
    said = repr([scope["method"], scope["path"], scope["query_string"], scope["headers"], body]).encode()
    length = (b"content-length", b"%d" % len(said))
    await send({"type": "http.response.start", "status": 200, "headers": [length]})
    await send({"type": "http.response.body", "body": said})


def wired(app: Any) -> Wire:
    config = uvicorn_config(app)
    config.load()
    wire, made = Wire(), cast(Callable[..., Connection], config.http_protocol_class)
    wire.protocol = made(config=config, server_state=ServerState(), app_state={})
    wire.protocol.connection_made(wire)
    return wire


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def told(pieces: list[bytes]) -> tuple[bytes, bool]:
    """(what is answered to these, one after the other, and whether the connection is closed)."""

    async def run() -> tuple[bytes, bool]:
        wire = wired(mirror)
        for piece in pieces:
            if not wire.closed:
                wire.protocol.data_received(piece)
                await settled()
        return bytes(wire.received), wire.closed

    return asyncio.run(run())


GET = b"GET /p?q=1 HTTP/1.1\r\nhost: x\r\n"
POST = b"POST /p HTTP/1.1\r\nhost: x\r\n"
SAID = {
    "sized": POST + b"content-length: 5\r\n\r\nhello",
    "chunked": POST + b"transfer-encoding: chunked\r\n\r\n2;a=b\r\nhe\r\n3\r\nllo\r\n0\r\nx-a: y\r\nhost: z\r\n\r\n",
    "an upgrade": POST + b"connection: upgrade\r\nupgrade: h2c\r\ncontent-length: 2\r\n\r\nhi",
    "an upgrade in chunks": POST
    + b"upgrade: x\r\nconnection: upgrade\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n",
    "empty fields": GET + b"x-a:\r\nx-b:  \r\nx-c: d\r\n\r\n",
    "nothing": GET + b"\r\n",
    "HEAD": b"HEAD /p HTTP/1.1\r\nhost: x\r\n\r\n",
    "the last": GET + b"connection: close\r\n\r\n",
    "1.0": b"GET /p HTTP/1.0\r\nconnection: keep-alive\r\n\r\n",
    "two framings": POST + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "two lengths": POST + b"content-length: 5\r\ncontent-length: 5\r\n\r\nhello",
    "a coding twice": POST + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "no chunk": POST + b"transfer-encoding: chunked\r\n\r\n0x2\r\nhi\r\n0\r\n\r\n",
    "a folded field": GET + b"x: a\r\n b\r\n\r\n",
    "words": b"hello there\r\n\r\n",
}


@settings(max_examples=300, deadline=None)
@given(data=st.data(), names=st.lists(st.sampled_from(sorted(SAID)), min_size=1, max_size=5))
def test_same_bytes_are_answered_alike_wherever_they_are_cut(data: st.DataObject, names: list[str]) -> None:
    said = b"".join(SAID[name] for name in names)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(said) - 1), max_size=30)))
    pieces = [said[start:end] for start, end in zip([0, *cuts], [*cuts, len(said)], strict=True)]
    assert told(pieces) == told([said])


@pytest.mark.parametrize("name", ["sized", "chunked", "empty fields", "nothing", "HEAD", "the last", "1.0"])
def test_plain_requests_are_taken_apart_as_h11_does(name: str) -> None:
    server = h11.Connection(h11.SERVER)
    server.receive_data(SAID[name])
    request = server.next_event()
    assert isinstance(request, h11.Request)
    body = b""
    while isinstance(event := server.next_event(), h11.Data):
        body += event.data
    path, _, query = request.target.partition(b"?")
    expected = [request.method.decode(), path.decode(), query, list(request.headers), body]
    received, closed = told([SAID[name]])
    head, _, said = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert said == (b"" if name == "HEAD" else repr(expected).encode())
    assert closed == (name in {"the last", "1.0"})


@pytest.mark.parametrize("target", ["http://a.b/p", "HTTPS://a.b", "ftp://a.b/p", "a.b:80"])
def test_target_that_is_for_a_proxy_is_refused(target: str) -> None:
    received, closed = told([f"GET {target} HTTP/1.1\r\nhost: x\r\n\r\n".encode()])
    assert (received.split()[1], closed) == (b"400", True)


@pytest.mark.parametrize(
    ("version", "parts", "statuses"),
    [
        ("1.1", [b"", b"hello"], [b"100", b"200"]),
        ("1.1", [b"hello"], [b"200"]),
        ("1.1", [b"he", b"llo"], [b"200"]),
        ("1.0", [b"", b"hello"], [b"200"]),
    ],
    ids=["it waits", "it does not", "it has begun", "1.0"],
)
def test_only_who_waits_to_be_told_to_go_on_is_told(version: str, parts: list[bytes], statuses: list[bytes]) -> None:
    head = f"POST /p HTTP/{version}\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 5\r\n\r\n".encode()
    received, closed = told([head + parts[0], *parts[1:]])
    assert re.findall(rb"HTTP/1.1 (\d+)", received) == statuses
    assert closed == (version == "1.0")


async def test_who_sends_thousands_of_requests_at_once_has_few_of_them_held(tiny_model: ModelFolder) -> None:
    """Each of a few bytes: what is made of one is a hundred times as large."""
    async with serving(tiny_model, auto=False) as world:
        reader, writer = await connect(world)
        count, short = 3_000, b"GET / HTTP/1.1\r\nhost:\r\n\r\n"

        def held() -> int:
            gc.collect()
            return sum(type(thing) is Exchange for thing in gc.get_objects())

        writer.write(posted(TEXT) + short * count)
        await world.until(lambda: world.replica.held)
        await asyncio.sleep(0.1)
        most = held()
        turning = asyncio.create_task(world.replica.run())
        assert (await answer(reader))[0] == 200
        for number in range(count):
            assert (await answer(reader))[0] == 404
            if number == 100:
                most = max(most, held())
        assert most < 2 * http_protocol._PIECE_BYTES / len(short)
        turning.cancel()
        writer.close()


@pytest.mark.parametrize("path", ["/nothing", "/v1/models"])
async def test_large_body_that_was_answered_without_being_read_is_got_over(tiny_model: ModelFolder, path: str) -> None:
    async with serving(tiny_model, head_timeout_s=60) as world:
        reader, writer = await connect(world)
        size = 4 * 2**20
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {size}\r\n\r\n".encode()
        for _ in range(3):
            writer.write(head + b"x" * size)
            assert (await answer(reader))[0] in {404, 405}
        writer.write(posted(TEXT))
        assert (await answer(reader))[0] == 200
        writer.close()


@pytest.mark.parametrize(
    "endless",
    [b"0\r\nx: " + b"y" * 100_000, b"0\r\n" + b"x: y\r\n" * 20_000, b"5;" + b"e" * 100_000],
    ids=["a field behind the body", "fields behind the body", "a chunk's extension"],
)
async def test_what_comes_without_a_body_has_an_end_as_a_head_has(tiny_model: ModelFolder, endless: bytes) -> None:
    async with serving(tiny_model) as world:
        reader, writer = await connect(world)
        writer.write(POST.replace(b"/p", b"/v1/completions") + b"transfer-encoding: chunked\r\n\r\n" + endless)
        assert b" 400 " in await hung_up(reader)
        writer.close()


async def test_lines_without_end_before_a_request_are_no_way_to_stay(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model) as world:
        reader, writer = await connect(world)
        writer.write(b"\r\n" * HEAD_MAX_BYTES)
        assert b" 400 " in await hung_up(reader)
        writer.close()


# --- one half of a connection ---


@pytest.mark.parametrize("body", [TEXT, STREAM], ids=["whole", "stream"])
@pytest.mark.parametrize("begun", [False, True], ids=["before the first token", "after it"])
async def test_client_that_has_only_ended_its_half_gets_its_answer(
    tiny_model: ModelFolder, body: dict[str, Any], begun: bool
) -> None:
    async with serving(tiny_model, auto=False) as world:
        reader, writer = await connect(world)
        writer.write(posted({**body, "max_tokens": 5}))
        await world.until(lambda: world.replica.held)
        if begun:
            world.replica.turn()
        begin = await reader.readuntil(b"\n\n") if begun and "stream" in body else b""
        writer.write_eof()
        await asyncio.sleep(3 * http_protocol._HALF_CLOSED_S)  # it is looked at meanwhile, and found to be there
        turning = asyncio.create_task(world.replica.run())
        received = begin + await hung_up(reader)
        turning.cancel()
        client = h11.Connection(h11.CLIENT)
        client.send(h11.Request(method="POST", target="/", headers=[("host", "x"), ("content-length", "0")]))
        client.send(h11.EndOfMessage())
        client.receive_data(received)
        events = list[Any]()
        while not isinstance(event := client.next_event(), h11.EndOfMessage):
            events.append(event)
        answered = b"".join(event.data for event in events if isinstance(event, h11.Data))
        status = next(event.status_code for event in events if isinstance(event, h11.Response))
        assert status == 200
        if "stream" in body:
            assert answered.endswith(b"data: [DONE]\n\n")
        else:
            assert json.loads(answered)["usage"]["completion_tokens"] == 5
        await world.until(lambda: world.ended(Outcome.FINISHED) == 1)
        writer.close()


async def test_requests_of_who_has_only_ended_its_half_are_all_answered(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model, auto=False) as world:
        reader, writer = await connect(world)
        writer.write(posted(TEXT) + 20 * (GET.replace(b"/p", b"/health") + b"\r\n"))
        writer.write_eof()
        await world.until(lambda: world.replica.held)
        turning = asyncio.create_task(world.replica.run())
        received = await hung_up(reader)
        turning.cancel()
        assert received.count(b"HTTP/1.1 200 ") == 21
        assert received.count(b"connection: close") <= 1
        writer.close()


@pytest.mark.parametrize("begun", [False, True], ids=["before the first token", "after it"])
async def test_client_that_has_left_is_told_from_one_that_has_ended_its_half(
    tiny_model: ModelFolder, begun: bool
) -> None:
    """Nothing comes for it that would be written to it otherwise."""
    async with serving(tiny_model, auto=False) as world:
        with socket.create_connection(("127.0.0.1", world.port)) as sock:
            sock.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(sock, posted(STREAM))
            await world.until(lambda: world.replica.held)
            if begun:
                world.replica.turn()
                received = b""
                while not received.endswith(b"\r\n"):
                    received += await loop.sock_recv(sock, 2**16)
        await world.until(lambda: world.ended(Outcome.CANCELLED) == 1)


@pytest.mark.parametrize(
    "part",
    [b"GET /hea", POST + b"content-length: 5\r\n\r\nhel", POST + b"transfer-encoding: chunked\r\n\r\n5\r\nhel"],
    ids=["a head", "a body", "a chunk"],
)
async def test_request_whose_client_ends_its_half_within_it_is_refused_behind_the_answers_before_it(
    tiny_model: ModelFolder, part: bytes
) -> None:
    async with serving(tiny_model, auto=False) as world:
        reader, writer = await connect(world)
        writer.write(posted(TEXT) + part.replace(b"/p", b"/v1/completions"))
        writer.write_eof()
        await world.until(lambda: world.replica.held)
        turning = asyncio.create_task(world.replica.run())
        received = await hung_up(reader)
        turning.cancel()
        assert re.findall(rb"HTTP/1.1 (\d+)", received) == [b"100", b"200", b"400"]
        assert len(world.replica.added) == 1
        writer.close()


# --- ends ---


async def test_who_does_not_read_its_last_answer_is_hung_up_on_all_the_same(
    tiny_model: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "LAST_WORD_S", 0.2)
    monkeypatch.setattr("deployments.http_server.KEEP_ALIVE_S", 0.2)
    large = b"x" * 64 * 2**20
    ended = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
        await send({"type": "http.response.body", "body": large})

    class Noted(Connection):
        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            ended.set()

    config = uvicorn_config(app)
    config.load()
    loop, state = asyncio.get_running_loop(), ServerState()
    server = await loop.create_server(
        lambda: Noted(config, state, {}, head_timeout_s=5, **_writes(config)), "127.0.0.1", 0
    )
    async with server:
        with socket.create_connection(server.sockets[0].getsockname()) as sock:
            sock.sendall(GET + b"\r\n")
            await asyncio.wait_for(ended.wait(), 10)
            assert not state.connections
            assert not state.tasks


def _writes(config: Any) -> dict[str, Any]:
    made = config.http_protocol_class.keywords
    return {"writes": made["writes"]} if "writes" in made else {}


@pytest.mark.parametrize("said", [b"x" * 3, b"x" * 9], ids=["shorter", "longer"])
async def test_answer_that_is_not_as_long_as_its_head_says_is_500_and_the_last_of_its_connection(said: bytes) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
        await send({"type": "http.response.body", "body": said})

    wire = wired(app)
    wire.protocol.data_received(GET + b"\r\n" + GET + b"\r\n")
    await settled()
    assert wire.received.startswith(b"HTTP/1.1 500 ")
    assert wire.received.count(b"HTTP/1.1 ") == 1
    assert wire.closed


async def test_connection_whose_answer_broke_off_is_not_used_again() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"some", "more_body": True})
        raise RuntimeError("a bug")

    wire = wired(app)
    wire.protocol.data_received(GET + b"\r\n" + GET + b"\r\n")
    await settled()
    assert wire.received.count(b"HTTP/1.1 ") == 1
    assert not wire.received.endswith(b"0\r\n\r\n")
    assert wire.closed


async def test_nothing_is_left_of_clients_that_leave_in_any_phase(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model) as world:
        whole = posted(STREAM)

        async def leaves(after: int, harshly: bool) -> None:
            reader, writer = await connect(world)
            writer.write(whole[:after])
            await writer.drain()
            if after == len(whole):
                await reader.read(1)
            if harshly:
                writer.transport.abort()
            else:
                writer.close()

        def held() -> int:
            gc.collect()
            return sum(type(thing) in {Exchange, Connection} for thing in gc.get_objects())

        for after in (0, 1, 30, whole.index(b"\r\n\r\n") + 4, len(whole) - 1, len(whole)):
            for harshly in (False, True):
                await asyncio.gather(*(leaves(after, harshly) for _ in range(20)))
        await world.until(lambda: held() == 0)
        assert not world.replica.held
