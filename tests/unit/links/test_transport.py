"""The links between processes: framing, the hello, and that bad input ends one link and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import TransportConfig
from cluster.messages import (
    PROTOCOL_NEWEST,
    PROTOCOL_OLDEST,
    Abort,
    Challenge,
    Goodbye,
    Hello,
    Message,
    Rejected,
    Welcome,
)
from cluster.types import Generation, RequestId
from deployments.transport import (
    HANDSHAKE_MAX_FRAME_BYTES,
    Acceptor,
    Identity,
    Link,
    NobodyListensError,
    RejectedError,
    TransportError,
    connect,
)

SECRET = b"s" * 32
CONFIG = TransportConfig(handshake_timeout_s=2.0, max_frame_bytes=65536, outbox_max_bytes=16384)
decode = msgspec.msgpack.Decoder(Abort | Goodbye).decode


@dataclass(eq=False)
class Recorder:
    """A LinkHandler that keeps what it is told."""

    link: Link | None = None
    messages: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)
    ended: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def message(self, message: Any) -> None:
        self.messages.put_nowait(message)

    def writable(self) -> None:
        pass

    def closed(self, reason: str) -> None:
        self.ended.set_result(reason)


@dataclass
class Listener:
    host: str
    port: int
    accepted: asyncio.Queue[Recorder]
    clients: list[Link]


Listen = Callable[..., Awaitable[Listener]]


@pytest.fixture
async def listen() -> AsyncIterator[Listen]:
    acceptors: list[Acceptor] = []
    clients: list[Link] = []

    async def start(*, secret: bytes = SECRET, model_hash: str = "m1", config: TransportConfig = CONFIG) -> Listener:
        accepted: asyncio.Queue[Recorder] = asyncio.Queue()

        def on_link(link: Link, hello: Hello) -> Recorder:
            recorder = Recorder(link)
            accepted.put_nowait(recorder)
            return recorder

        identity = Identity("replica", "r1", secret, model_hash, Generation(3, "u"))
        acceptor = Acceptor(lambda _: identity, frozenset({"router"}), decode, on_link, config)
        acceptors.append(acceptor)
        host, port = await acceptor.listen("127.0.0.1", 0, secret)
        return Listener(host, port, accepted, clients)

    yield start
    for acceptor in acceptors:
        await acceptor.close()
    for link in clients:
        await link.ended.wait()


def router(secret: bytes = SECRET, role: str = "router", model_hash: str = "m1") -> Identity:
    return Identity(role, "router-1", secret, model_hash)


async def link_to(listener: Listener, identity: Identity) -> tuple[Link, Recorder, Welcome]:
    recorder = Recorder()
    welcomes: list[Welcome] = []

    def greeted(link: Link, welcome: Welcome) -> Recorder:
        welcomes.append(welcome)
        return recorder

    link = await connect(listener.host, listener.port, identity, decode, greeted, CONFIG)
    listener.clients.append(link)
    return link, recorder, welcomes[0]


def frame(message: Message | bytes) -> bytes:
    payload = message if isinstance(message, bytes) else msgspec.msgpack.encode(message)
    return len(payload).to_bytes(4, "big") + payload


@contextlib.asynccontextmanager
async def serving(
    talk: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[tuple[str, int]]:
    """A server that talks by hand; on leaving, every conversation has ended."""
    ended: list[asyncio.Event] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        over = asyncio.Event()
        ended.append(over)
        await talk(reader, writer)
        await reader.read()
        writer.close()
        await writer.wait_closed()
        over.set()

    server = await asyncio.start_server(handler, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()
    server.close()
    await server.wait_closed()
    for over in ended:
        await over.wait()


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    return await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))


async def test_messages_pass_both_ways_after_the_welcome(listen: Listen) -> None:
    listener = await listen()
    link, here, welcome = await link_to(listener, router())
    there = await listener.accepted.get()
    assert (welcome.sender_id, welcome.generation) == ("r1", Generation(3, "u"))
    link.send(Abort(request_id=RequestId("a"), attempt=1))
    assert await there.messages.get() == Abort(request_id=RequestId("a"), attempt=1)
    assert there.link is not None
    there.link.send(Goodbye())
    assert await here.messages.get() == Goodbye()
    link.close("done")
    assert await here.ended == "done"
    assert await there.ended == "closed by the other side"


def sockets(link: Link, there: Recorder) -> list[Any]:
    """Of both ends."""
    ends = [link._transport, None if there.link is None else there.link._transport]
    return [end.get_extra_info("socket") for end in ends if end is not None]


async def test_both_ends_send_without_waiting_for_acknowledgements(listen: Listen) -> None:
    listener = await listen()
    link, _, _ = await link_to(listener, router())
    both = sockets(link, await listener.accepted.get())
    assert [sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0 for sock in both] == [True, True]
    link.close("done")


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="only Linux can be told")
async def test_both_ends_give_up_a_silent_host_in_20_s_though_neither_sends_anything(listen: Listen) -> None:
    """A partition of 10 s is outlived. What it comes to on a network: tests/ray/test_hosts.py."""
    listener = await listen()
    link, _, _ = await link_to(listener, router())
    both = sockets(link, await listener.accepted.get())
    for sock in both:
        asked_s, unanswered_ms = (
            sock.getsockopt(socket.IPPROTO_TCP, option) for option in (socket.TCP_KEEPIDLE, socket.TCP_USER_TIMEOUT)
        )
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert unanswered_ms > 10_000
        assert asked_s * 1000 + unanswered_ms <= 20_000
    assert len(both) == 2
    link.close("done")


@pytest.mark.parametrize(
    ("identity", "named"),
    [
        (router(secret=b"x" * 32), "secret"),
        (router(role="client"), "role"),
        (router(model_hash="m2"), "model"),
    ],
)
async def test_a_mismatch_is_refused_by_name(listen: Listen, identity: Identity, named: str) -> None:
    listener = await listen()
    with pytest.raises(RejectedError, match=f"^{named}"):
        await link_to(listener, identity)
    await link_to(listener, router())


async def test_a_protocol_version_that_is_not_spoken_is_refused_by_name(
    listen: Listen, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = await listen()
    monkeypatch.setattr("deployments.transport.PROTOCOL_OLDEST", PROTOCOL_NEWEST + 7)
    monkeypatch.setattr("deployments.transport.PROTOCOL_NEWEST", PROTOCOL_NEWEST + 9)
    from deployments import transport

    nonce = b"n" * 32
    hello = transport._hello(
        router(), Challenge(version_oldest=PROTOCOL_OLDEST, version_newest=PROTOCOL_NEWEST, nonce=nonce), b"c" * 32
    )
    monkeypatch.undo()
    identity = Identity("replica", "r1", SECRET, "m1")
    assert transport._proven(hello, SECRET, nonce)
    reason = transport._refusal(hello, identity, frozenset({"router"}))
    assert (
        reason
        == f"protocol version: {PROTOCOL_NEWEST + 7} to {PROTOCOL_NEWEST + 9} spoken there, {PROTOCOL_OLDEST} to {PROTOCOL_NEWEST} here"
    )
    del listener


async def test_a_side_without_the_secret_is_not_believed_when_it_welcomes() -> None:
    """An impostor answers on the replica's port: it has no secret, so its welcome proves nothing."""

    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(frame(Challenge(version_oldest=PROTOCOL_OLDEST, version_newest=PROTOCOL_NEWEST, nonce=b"0" * 32)))
        await read_frame(reader)
        writer.write(
            frame(
                Welcome(
                    version=PROTOCOL_NEWEST,
                    sender_id="r1",
                    generation=Generation(1, ""),
                    proof=b"p" * 32,
                    max_frame_bytes=99,
                )
            )
        )

    async with serving(impostor) as (host, port):
        with pytest.raises(RejectedError, match=r"^secret"):
            await connect(host, port, router(), decode, lambda link, welcome: Recorder(), CONFIG)


async def test_a_recorded_hello_opens_no_second_link(listen: Listen) -> None:
    listener = await listen()
    recorded = b""

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal recorded
        up_reader, up_writer = await asyncio.open_connection(listener.host, listener.port)
        writer.write(frame(await read_frame(up_reader)))
        recorded = await read_frame(reader)
        up_writer.write(frame(recorded))
        writer.write(frame(await read_frame(up_reader)))
        up_writer.close()
        await up_writer.wait_closed()

    async with serving(relay) as (host, port):
        link = await connect(host, port, router(), decode, lambda link, welcome: Recorder(), CONFIG)
        link.close("recorded")

    reader, writer = await asyncio.open_connection(listener.host, listener.port)
    await read_frame(reader)
    writer.write(frame(recorded))
    answer = msgspec.msgpack.decode(await read_frame(reader), type=Welcome | Rejected)
    assert isinstance(answer, Rejected)
    assert answer.reason.startswith("secret")
    writer.close()
    await writer.wait_closed()


async def test_without_a_secret_only_loopback_is_served() -> None:
    acceptor = Acceptor(lambda _: router(), frozenset(), decode, lambda link, hello: Recorder(), CONFIG)
    with pytest.raises(TransportError, match=r"no secret is set, so 0\.0\.0\.0 is refused"):
        await acceptor.listen("0.0.0.0", 0, b"")


async def test_nobody_listening_is_told_from_a_broken_link() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    with pytest.raises(NobodyListensError):
        await connect("127.0.0.1", port, router(), decode, lambda link, welcome: Recorder(), CONFIG)


@pytest.mark.parametrize(
    "first",
    [
        b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
        frame(b""),
        frame(b"\xc1"),
        frame(Goodbye()),
        frame(Rejected(reason="no")),
        (HANDSHAKE_MAX_FRAME_BYTES + 1).to_bytes(4, "big"),
        b"\xff\xff\xff\xff",
    ],
)
async def test_a_stranger_is_closed_and_others_go_on(listen: Listen, first: bytes) -> None:
    listener = await listen()
    link, _, _ = await link_to(listener, router())
    there = await listener.accepted.get()
    reader, writer = await asyncio.open_connection(listener.host, listener.port)
    await read_frame(reader)
    writer.write(first)
    assert await reader.read() == b""
    writer.close()
    await writer.wait_closed()
    link.send(Goodbye())
    assert await there.messages.get() == Goodbye()
    link.close("done")


async def test_a_silent_stranger_is_closed_in_time(listen: Listen) -> None:
    listener = await listen(config=TransportConfig(handshake_timeout_s=0.05))
    reader, writer = await asyncio.open_connection(listener.host, listener.port)
    await read_frame(reader)
    assert await reader.read() == b""
    writer.close()
    await writer.wait_closed()


async def test_silent_strangers_keep_nobody_out(listen: Listen) -> None:
    listener = await listen()
    strangers = [await asyncio.open_connection(listener.host, listener.port) for _ in range(300)]
    link, _, _ = await link_to(listener, router())
    link.send(Goodbye())
    assert await (await listener.accepted.get()).messages.get() == Goodbye()
    for _, writer in strangers:
        writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def test_connecting_to_a_silent_listener_ends_in_time() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        del reader, writer

    impatient = TransportConfig(handshake_timeout_s=0.05)
    async with serving(silent) as (host, port):
        with pytest.raises(TransportError, match="no welcome"):
            await connect(host, port, router(), decode, lambda link, welcome: Recorder(), impatient)


@pytest.mark.parametrize("payload", [b"\xc1", msgspec.msgpack.encode(["Nonsense", 1]), b"x" * 65537])
async def test_a_bad_frame_ends_its_link_alone(listen: Listen, payload: bytes) -> None:
    listener = await listen()
    bad, _, _ = await link_to(listener, router())
    bad_there = await listener.accepted.get()
    good, _, _ = await link_to(listener, router())
    good_there = await listener.accepted.get()
    assert bad._transport is not None
    bad._transport.write(frame(payload))
    assert "frame" in await bad_there.ended
    good.send(Goodbye())
    assert await good_there.messages.get() == Goodbye()
    good.close("done")


@given(st.lists(st.binary(max_size=200), max_size=20), st.lists(st.integers(1, 50), min_size=1, max_size=20))
def test_frames_do_not_depend_on_how_the_stream_is_cut(payloads: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(frame(p) for p in payloads)
    got: list[bytes] = []
    link = Link(got.append, lambda reason: None)
    position, turn = 0, 0
    while position < len(stream):
        size = cuts[turn % len(cuts)]
        link.data_received(stream[position : position + size])
        position, turn = position + size, turn + 1
    assert got == payloads
