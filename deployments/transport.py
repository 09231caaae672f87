"""Forebay's TCP links: length-prefixed msgpack frames, guarded by a hello.

Owns: framing, the handshake and the bounds on both. Imports `cluster` only. It knows messages, not what they mean.

A frame is a 4-byte big-endian length and that many bytes of msgpack (one `cluster.messages.Message`). A link begins:

    accepting side                       connecting side
    Challenge(versions, nonce_a)  ──▶
                                  ◀──   Hello(versions, who, nonce_c, proof)
    Welcome(version, who, proof)  ──▶   or Rejected(reason), then the end

`proof` is HMAC-SHA256 with the cluster's secret over the other side's nonce and every other field of the message that
carries it, so neither side can be replayed or altered, and a side without the secret learns nothing. Before the welcome
no frame may exceed 4 KiB and the whole exchange must end within `handshake_timeout_s`. What follows the welcome is
neither encrypted nor signed: the links belong on a network that only the cluster uses. Without a secret a listener
binds loopback addresses only.

Invariant: bad input of any kind ends that one link, with a reason, and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import msgspec

from cluster.config import TransportConfig, is_loopback
from cluster.messages import (
    PROTOCOL_NEWEST,
    PROTOCOL_OLDEST,
    Challenge,
    Handshake,
    Hello,
    Message,
    Rejected,
    Welcome,
)
from cluster.types import Generation

LOG = logging.getLogger("forebay.transport")

HANDSHAKE_MAX_FRAME_BYTES = 4096
_LENGTH_BYTES = 4
_WRITE_HIGH_WATER_BYTES = 256 * 1024
"""Bytes that may wait in the socket's buffer before the sender is asked to hold back."""

_UNANSWERED_S = 15
"""A host that is gone without a word (no power, no network) ends its links after so long, or its processes would be known
for hours; one that is back sooner finds them as they were. So does a process that for so long reads nothing of what waits
for it, once the buffers are full."""
_PROBE_S = 5
"""Where nothing else is sent, its kernel is asked so often."""

_MAX_GREETED = 256
_LAST_WORDS_S = 1.0

_encode = msgspec.msgpack.Encoder().encode
_decode_handshake = msgspec.msgpack.Decoder(Handshake).decode


class TransportError(Exception):
    """A link could not be made or was ended; the message says why."""


class RejectedError(TransportError):
    """The other side answered and refused; trying again without a change is of no use."""


class NobodyListensError(TransportError):
    """The host answered that no process listens on that port: whoever did is gone."""


@dataclass(frozen=True)
class Identity:
    """Who speaks on this side of a link, and with which secret."""

    role: str
    sender_id: str
    secret: bytes
    model_hash: str = ""
    generation: Generation | None = None


class LinkHandler(Protocol):
    """What a link tells its owner, on the event loop."""

    def message(self, message: Any) -> None: ...

    def writable(self) -> None:
        """The socket's buffer has drained; what was held back may be sent."""
        ...

    def closed(self, reason: str) -> None:
        """The link has ended; called exactly once."""
        ...


class Link(asyncio.Protocol):
    """One connection: splits the byte stream into frames and writes frames. Used on one event loop only."""

    def __init__(self, on_frame: Callable[[bytes], None], on_closed: Callable[[str], None]) -> None:
        self._on_frame = on_frame
        self._on_closed = on_closed
        self._on_writable: Callable[[], None] = lambda: None
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self._max_frame_bytes = HANDSHAKE_MAX_FRAME_BYTES
        self._reason = ""
        self._paused = False
        self._open = False
        self.ended = asyncio.Event()

    # --- for the owner ---

    @property
    def congested(self) -> bool:
        """True while the other side reads more slowly than we write, and when the link is closed."""
        return self._paused or not self._open

    def send(self, message: Message) -> None:
        """Write one frame. Without effect on a closed link: `closed` tells."""
        if self._transport is None or not self._open:
            return
        payload = _encode(message)
        self._transport.write(len(payload).to_bytes(_LENGTH_BYTES, "big") + payload)

    def close(self, reason: str) -> None:
        """End the link after what is written has gone out."""
        self._reason = self._reason or reason
        if self._transport is not None:
            self._transport.close()

    def abort(self, reason: str) -> None:
        """End the link now; what is written and not yet sent is dropped."""
        self._reason = self._reason or reason
        if self._transport is not None:
            self._transport.abort()

    def hand_over(self, decode: Callable[[bytes], Any], handler: LinkHandler, max_frame_bytes: int) -> None:
        """From here on every frame is decoded and given to `handler`; an undecodable one ends the link."""

        def on_frame(payload: bytes) -> None:
            try:
                message = decode(payload)
            except msgspec.DecodeError as error:
                self.abort(f"malformed frame: {error}")
                return
            handler.message(message)

        self._on_frame = on_frame
        self._on_closed = handler.closed
        self._on_writable = handler.writable
        self._max_frame_bytes = max_frame_bytes

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio's.
        self._transport = transport = cast(asyncio.Transport, transport)
        self._open = True
        transport.set_write_buffer_limits(high=_WRITE_HIGH_WATER_BYTES)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _end_without_answers(sock)

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        if not buffer and not self._reason:
            length = int.from_bytes(data[:_LENGTH_BYTES], "big")
            if len(data) == _LENGTH_BYTES + length and length <= self._max_frame_bytes:
                self._on_frame(data[_LENGTH_BYTES:])  # one whole frame, as almost always
                return
        buffer += data
        start = 0
        # An aborted link still delivers what it had read: stop at the first frame that ended it.
        while len(buffer) - start >= _LENGTH_BYTES and not self._reason:
            length = int.from_bytes(buffer[start : start + _LENGTH_BYTES], "big")
            if length > self._max_frame_bytes:
                self.abort(f"frame of {length} bytes is over the limit of {self._max_frame_bytes}")
                break
            end = start + _LENGTH_BYTES + length
            if len(buffer) < end:
                break
            payload = bytes(buffer[start + _LENGTH_BYTES : end])
            start = end
            self._on_frame(payload)
        del buffer[:start]

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._on_writable()

    def connection_lost(self, exc: Exception | None) -> None:
        self._open = False
        self._transport = None
        self.ended.set()
        self._on_closed(self._reason or (f"connection lost: {exc}" if exc else "closed by the other side"))


def _end_without_answers(sock: socket.socket) -> None:
    """Have the connection end where the other side says nothing, not even that it is there."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNANSWERED_S * 1000)


# --- the handshake ---


def _proof(secret: bytes, peer_nonce: bytes, message: Hello | Welcome) -> bytes:
    """HMAC over the peer's nonce and the message without its proof."""
    unsigned = _encode(msgspec.structs.replace(message, proof=b""))
    return hmac.digest(secret, type(message).__name__.encode() + peer_nonce + unsigned, "sha256")


def _hello(identity: Identity, challenge: Challenge, nonce: bytes) -> Hello:
    hello = Hello(
        version_oldest=PROTOCOL_OLDEST,
        version_newest=PROTOCOL_NEWEST,
        role=identity.role,
        sender_id=identity.sender_id,
        nonce=nonce,
        proof=b"",
        model_hash=identity.model_hash,
        generation=identity.generation,
    )
    return msgspec.structs.replace(hello, proof=_proof(identity.secret, challenge.nonce, hello))


def _proven(hello: Hello, secret: bytes, nonce: bytes) -> bool:
    return hmac.compare_digest(hello.proof, _proof(secret, nonce, hello))


def _refusal(hello: Hello, identity: Identity, roles: frozenset[str]) -> str | None:
    """Why this hello, which is proven, is not let in, by name; or None."""
    if hello.version_oldest > PROTOCOL_NEWEST or hello.version_newest < PROTOCOL_OLDEST:
        return (
            f"protocol version: {hello.version_oldest} to {hello.version_newest} spoken there, "
            f"{PROTOCOL_OLDEST} to {PROTOCOL_NEWEST} here"
        )
    if hello.role not in roles:
        return f"role: {hello.role!r} is not served on this port"
    if identity.model_hash and hello.model_hash != identity.model_hash:
        return f"model: {hello.model_hash[:12]!r} there, {identity.model_hash[:12]!r} here"
    return None


class Acceptor:
    """The accepting side of every link on one port.

    `identity` is called for each hello, so that a generation may change between links; `on_link` makes the handler of
    a link that was let in. At most `_MAX_GREETED` connections wait in the handshake; beyond that the
    oldest is closed.
    """

    def __init__(
        self,
        identity: Callable[[Hello], Identity],
        roles: frozenset[str],
        decode: Callable[[bytes], Any],
        on_link: Callable[[Link, Hello], LinkHandler],
        config: TransportConfig,
    ) -> None:
        self._identity = identity
        self._roles = roles
        self._decode = decode
        self._on_link = on_link
        self._config = config
        self._server: asyncio.Server | None = None
        self._secret = b""
        self._links: set[Link] = set()
        self._greeted: dict[Link, None] = {}
        """Those of `_links` that have not been let in yet, oldest first."""

    async def listen(self, host: str, port: int, secret: bytes) -> tuple[str, int]:
        """Bind and return the address. Raises TransportError where there is no secret and `host` is not loopback."""
        if not secret and not is_loopback(host):
            raise TransportError(f"no secret is set, so {host} is refused: set a secret or listen on 127.0.0.1")
        self._secret = secret
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._accept, host, port)
        bound = self._server.sockets[0].getsockname()
        return str(bound[0]), int(bound[1])

    async def close(self) -> None:
        """Stop listening; end every link once what is written on it has gone out, or after `_LAST_WORDS_S`."""
        if self._server is not None:
            self._server.close()
        links = list(self._links)
        for link in links:
            link.close("the listener closed")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_S):
                for link in links:
                    await link.ended.wait()
        for link in links:
            link.abort("the listener closed")

    def _accept(self) -> Link:
        nonce = secrets.token_bytes(32)
        loop = asyncio.get_running_loop()

        def on_frame(payload: bytes) -> None:
            timer.cancel()
            try:
                hello = _decode_handshake(payload)
            except msgspec.DecodeError as error:
                link.abort(f"malformed hello: {error}")
                return
            if not isinstance(hello, Hello):
                link.abort(f"expected a Hello, got {type(hello).__name__}")
                return
            self._answer(link, hello, nonce)

        def on_closed(reason: str) -> None:
            timer.cancel()
            self._links.discard(link)
            self._greeted.pop(link, None)
            LOG.info("link refused or broken before its welcome: %s", reason)

        link = _GreetingLink(
            on_frame, on_closed, Challenge(version_oldest=PROTOCOL_OLDEST, version_newest=PROTOCOL_NEWEST, nonce=nonce)
        )
        timer = loop.call_later(self._config.handshake_timeout_s, link.abort, "no hello in time")
        self._links.add(link)
        self._greeted[link] = None
        if len(self._greeted) > _MAX_GREETED:
            # The oldest: one of ours says its hello at once, so whoever has waited longest is none of ours.
            next(iter(self._greeted)).abort("too many connections in the handshake")
        return link

    def _answer(self, link: Link, hello: Hello, nonce: bytes) -> None:
        # Nothing is decided or learnt from a hello before it is proven.
        if not _proven(hello, self._secret, nonce):
            self._refuse(link, "secret: the proof does not match this cluster's secret")
            return
        identity = self._identity(hello)
        if (reason := _refusal(hello, identity, self._roles)) is None:
            welcome = Welcome(
                version=min(PROTOCOL_NEWEST, hello.version_newest),
                sender_id=identity.sender_id,
                generation=identity.generation or Generation(0, ""),
                proof=b"",
                max_frame_bytes=self._config.max_frame_bytes,
            )
            link.send(msgspec.structs.replace(welcome, proof=_proof(identity.secret, hello.nonce, welcome)))
            self._greeted.pop(link, None)
            tracked = _Tracked(self._on_link(link, hello), link, self._links)
            link.hand_over(self._decode, tracked, self._config.max_frame_bytes)
        else:
            self._refuse(link, reason)

    def _refuse(self, link: Link, reason: str) -> None:
        link.send(Rejected(reason=reason))
        link.close(f"refused: {reason}")


class _GreetingLink(Link):
    """A link that speaks first."""

    def __init__(
        self, on_frame: Callable[[bytes], None], on_closed: Callable[[str], None], greeting: Challenge
    ) -> None:
        super().__init__(on_frame, on_closed)
        self._greeting = greeting

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.send(self._greeting)


class _Tracked:
    """A handler whose link is forgotten by its acceptor when it closes."""

    def __init__(self, handler: LinkHandler, link: Link, links: set[Link]) -> None:
        self.message = handler.message
        self.writable = handler.writable
        self._handler = handler
        self._link = link
        self._links = links

    def closed(self, reason: str) -> None:
        self._links.discard(self._link)
        self._handler.closed(reason)


async def connect(
    host: str,
    port: int,
    identity: Identity,
    decode: Callable[[bytes], Any],
    make_handler: Callable[[Link, Welcome], LinkHandler],
    config: TransportConfig,
) -> Link:
    """Connect, prove, check the other side's proof, and hand the link to its handler.

    Raises:
        RejectedError: the other side refused us, or could not prove that it knows the secret.
        TransportError: no connection, a broken one, or no welcome within `handshake_timeout_s`.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    nonce = secrets.token_bytes(32)
    challenged = False

    def fail(error: TransportError) -> None:
        if not done.done():
            done.set_exception(error)

    def on_frame(payload: bytes) -> None:
        nonlocal challenged
        try:
            message = _decode_handshake(payload)
        except msgspec.DecodeError as error:
            fail(TransportError(f"malformed handshake: {error}"))
            return
        match message:
            case Challenge() if not challenged:
                challenged = True
                link.send(_hello(identity, message, nonce))
            case Rejected(reason=reason):
                fail(RejectedError(reason))
            case Welcome() if challenged:
                if not hmac.compare_digest(message.proof, _proof(identity.secret, nonce, message)):
                    fail(RejectedError("secret: the other side's proof does not match this cluster's secret"))
                elif not done.done():
                    try:
                        handler = make_handler(link, message)
                    except TransportError as error:
                        fail(error)
                        return
                    link.hand_over(decode, handler, message.max_frame_bytes)
                    done.set_result(None)
            case _:
                fail(TransportError(f"unexpected {type(message).__name__} in the handshake"))

    link = Link(on_frame, lambda reason: fail(TransportError(reason)))
    made = False
    try:
        async with asyncio.timeout(config.handshake_timeout_s):
            await loop.create_connection(lambda: link, host, port)
            await done
        made = True
        return link
    except TimeoutError as error:
        raise TransportError(f"no welcome from {host}:{port} within {config.handshake_timeout_s} s") from error
    except ConnectionRefusedError as error:
        raise NobodyListensError(f"nobody listens on {host}:{port}") from error
    except (OSError, ValueError) as error:  # ValueError: no such thing can be the name of a host
        raise TransportError(f"cannot connect to {host!r}:{port}: {error}") from error
    finally:
        if not made:
            link.abort("handshake failed")
