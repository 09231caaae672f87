"""One exchange of an HTTP/1.1 connection: its request's body in, its answer framed and out.

Owns: how answers are framed, and the short way of a chunk to its client. Imports ASGI's types. Invariants: an answer has
the length or the chunks that its head promises, or the connection is closed; no body is held beyond what `flow` allows.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from http import HTTPStatus
from typing import Any, Protocol

from router.asgi import Receive, Scope, Send

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
_BODILESS = frozenset({204, 304})

App = Callable[[Scope, Receive, Send], Awaitable[None]]

_log = logging.getLogger("uvicorn.error")


class Carrier(Protocol):
    """The connection that an exchange is of."""

    write_paused: bool

    def read_on(self) -> None:
        """There is room for more of the body."""

    async def drained(self, exchange: Exchange) -> None:
        """Return once the client has read enough of what was written, or is gone."""

    def answered(self) -> None:
        """Everything of the answer is written."""

    def left(self) -> None: ...

    def refuse(self, status: int, message: str, code: str, kind: str = ...) -> None: ...

    def close(self) -> None: ...


class ChunkWrites:
    """The chunks that are written in one pass of the event loop, to whichever clients: they leave at its end.

    Writing a socket takes most of a token's time, and each time its code and ours drive each other out of the caches, and
    its reader falls asleep and is woken again. So all of ours runs first, and then all of the system's.
    """

    __slots__ = ("_chunks",)

    def __init__(self) -> None:
        self._chunks: list[tuple[asyncio.Transport, bytes]] = []

    def add(self, transport: asyncio.Transport, chunk: bytes) -> None:
        if not self._chunks:
            asyncio.get_running_loop().call_soon(self.flush)
        self._chunks.append((transport, chunk))

    def flush(self) -> None:
        """Write what there is."""
        chunks, self._chunks = self._chunks, []
        for transport, chunk in chunks:
            if not transport.is_closing():
                transport.write(chunk)


class Exchange:
    """One request and its answer: ASGI's `receive` and `send`, and `router.asgi.Exchange`."""

    __slots__ = (
        "_complete",
        "_connection",
        "_expects_continue",
        "_fresh",
        "_head",
        "_is_chunked",
        "_keep_alive",
        "_left_bytes",
        "_may_write",
        "_on_gone",
        "_parts",
        "_transport",
        "_waiter",
        "_writes",
        "default_headers",
        "gone",
        "held_bytes",
        "more",
        "response_started",
        "scope",
    )

    def __init__(
        self,
        connection: Carrier,
        transport: asyncio.Transport,
        writes: ChunkWrites,
        scope: Scope,
        *,
        keep_alive: bool,
        expects_continue: bool,
    ) -> None:
        self.scope = scope
        self.default_headers: list[tuple[bytes, bytes]] = []
        """Of its answer, before the application's."""
        self._connection = connection
        self._transport = transport
        self._writes = writes
        self._keep_alive = keep_alive
        self._expects_continue = expects_continue
        self.gone = False
        """The client has left, or will read nothing more."""
        self._on_gone: Callable[[], None] | None = None
        self._waiter: asyncio.Future[None] | None = None
        # The request's body.
        self.more = True
        """There is more of it to come."""
        self._parts: list[bytes] = []
        self.held_bytes = 0
        self._fresh = False
        """Something has come since it was asked for."""
        # The answer.
        self.response_started = False
        """It has a head, which leaves with the first of its body."""
        self._head = b""
        self._is_chunked = False
        self._left_bytes = 0
        """Of a body of stated length, those that have not been sent."""
        self._complete = False
        self._may_write = False
        """A chunk can be written now: all that is to be known for that, in one place, as it is asked for each token."""

    @property
    def complete(self) -> bool:
        """Whether the whole answer has been sent."""
        return self._complete

    async def run(self, app: App) -> None:
        """Have it answered."""
        try:
            await app(self.scope, self.receive, self.send)
        except Exception:
            _log.exception("Exception in ASGI application")
        except BaseException:
            self.leave()
            self._connection.close()
            raise
        finally:
            self._connection.left()
            del self.scope["extensions"]  # it leads back here
        if not self._complete and not self.gone:
            if not self.response_started or self._head:
                self._connection.refuse(500, "The server made an error.", "internal_error", "server_error")
            self._connection.close()

    # --- what the connection says ---

    def body_came(self, part: bytes) -> None:
        self._expects_continue = False
        self._parts.append(part)
        self.held_bytes += len(part)
        self._fresh = True
        self._wake()

    def body_ended(self) -> None:
        self._expects_continue = False
        self.more = False
        self._fresh = True
        self._wake()

    def leave(self) -> None:
        """The client has gone, or nothing can be said to it any more."""
        self._may_write = False
        if not self.gone and not self._complete:
            self.gone = True
            if self._on_gone is not None:
                self._on_gone()
        self._wake()

    def flow(self, paused: bool) -> None:
        """The client does not read what is written, or reads again."""
        begun = self.response_started and not self._head and not self._complete
        self._may_write = begun and self._is_chunked and not self.gone and not paused

    def close_after(self) -> None:
        """The answer is its connection's last."""
        self._keep_alive = False

    def probe(self) -> None:
        """Write what means nothing, which a client that has left resets the connection for: an interim answer, or a zero
        before the next chunk's size."""
        if self._connection.write_paused or self.scope["http_version"] != "1.1":
            return
        if not self.response_started or self._head:
            self._transport.write(CONTINUE)
        elif self._is_chunked:
            self._transport.write(b"0")

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    # --- router.asgi.Exchange ---

    def take_body(self) -> bytes | None:
        if self.more or self.gone:
            return None
        self._fresh = False
        return self._take_parts()

    def when_gone(self, call: Callable[[], None] | None) -> None:
        self._on_gone = call
        if self.gone and call is not None:
            asyncio.get_running_loop().call_soon(call)

    def write_chunk(self, head: bytes, middle: bytes, tail: bytes) -> bool:
        transport = self._transport
        if not self._may_write or transport.is_closing():
            return False
        length = len(head) + len(middle) + len(tail)
        assert length, "an empty chunk is the last one"
        self._writes.add(transport, b"%x\r\n%b%b%b\r\n" % (length, head, middle, tail))
        return True

    # --- ASGI ---

    async def receive(self) -> MutableMapping[str, Any]:
        if self._expects_continue and not self.response_started and not self.gone:
            self._expects_continue = False
            self._transport.write(CONTINUE)
        while not (self.gone or self._complete):
            if not self._fresh:
                self._connection.read_on()
            if self._fresh:
                self._fresh = False
                return {"type": "http.request", "body": self._take_parts(), "more_body": self.more}
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return {"type": "http.disconnect"}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if self._connection.write_paused:
            await self._connection.drained(self)
        if self.gone:
            return
        kind = message["type"]
        if kind == "http.response.start" and not self.response_started:
            self._begin(message["status"], message.get("headers", ()))
        elif kind == "http.response.body" and self.response_started and not self._complete:
            self._continue(message.get("body", b""), more=message.get("more_body", False))
        else:
            raise RuntimeError(f"{kind} does not come here in an answer")

    def _begin(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        parts = [STATUS_LINES[status]]
        length: int | None = None
        says_close = False
        for name, value in (*self.default_headers, *headers):
            parts += (name, b": ", value, b"\r\n")
            if name == b"content-length":
                length = int(value)
            elif name == b"connection" and value.lower() == b"close":
                says_close, self._keep_alive = True, False
        if self._expects_continue:  # it was never told to go on: what it sends next might be its body or not
            self._keep_alive = False
        bodiless = self.scope["method"] == "HEAD" or status in _BODILESS
        if length is None and not bodiless:
            if self.scope["http_version"] == "1.1":
                self._is_chunked = True
                parts.append(b"transfer-encoding: chunked\r\n")
            else:
                self._keep_alive = False  # the connection's end is the body's
                length = -1
        if not self._keep_alive and not says_close:
            parts.append(b"connection: close\r\n")
        head = b"".join((*parts, b"\r\n"))
        lines = head.count(b"\r\n")
        if head.count(b"\n") != lines or head.count(b"\r") != lines or head.find(b"\r\n\r\n") != len(head) - 4:
            raise RuntimeError("a header of the answer has a line end in it")
        self._left_bytes = 0 if bodiless or length is None else length
        self._head = head
        self.response_started = True

    def _continue(self, body: bytes, *, more: bool) -> None:
        head = self._head
        self._writes.flush()  # what was written before goes first
        if self._is_chunked:
            end = b"" if more else b"0\r\n\r\n"
            data = b"%b%x\r\n%b\r\n%b" % (head, len(body), body, end) if body else head + end
        elif self._left_bytes < 0:
            data = head + body
        elif self.scope["method"] == "HEAD":
            data = head
        else:
            self._left_bytes -= len(body)
            if self._left_bytes < 0 or (self._left_bytes and not more):
                raise RuntimeError("the answer's body is not as long as its head says")
            data = head + body
        self._head = b""
        if data:
            self._transport.write(data)
        if more:
            self.flow(self._connection.write_paused)
        else:
            self._complete = True
            self._may_write = False
            self._take_parts()  # nobody will
            if not self._keep_alive:
                self._connection.close()
            self._wake()
            self._connection.answered()

    def _take_parts(self) -> bytes:
        parts, self._parts = self._parts, []
        self.held_bytes = 0
        return parts[0] if len(parts) == 1 else b"".join(parts)
