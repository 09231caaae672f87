"""The HTTP server under a router: uvicorn, with an end to every wait for a client's head.

Owns: the server's settings, what a client is told that speaks no HTTP or does not finish, and the short way of a chunk to
its client. Imports the form of errors, and ASGI's types. uvicorn itself waits for ever for the first byte of a connection
and for the rest of a head.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import h11
import uvicorn
from h11._writers import ChunkedWriter
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from router.asgi import CHUNK_WRITER, Receive, Scope, Send
from router.errors import ErrorBody, error_json
from router.exchange import MAX_HEADER_BYTES

HEAD_TIMEOUT_S = 10.0
"""From the first byte of a request's head to its last; and for what is left of a body that nobody wants any more."""
HEAD_MAX_BYTES = 2 * MAX_HEADER_BYTES
"""Beyond it a head is not even read to its end. What is between is answered as too large by the application."""
KEEP_ALIVE_S = 75
"""A connection may be without a request so long, also before its first."""
BACKLOG = 2048


class DirectWriter:
    """The `router.asgi.ChunkWriter` of one exchange.

    h11 keeps no count of a chunked body, so that what passes it by is nothing to it.
    """

    __slots__ = ("_chunked", "_cycle")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._chunked = False

    def __call__(self, data: bytes) -> bool:
        cycle = self._cycle
        transport = cycle.transport
        if cycle.flow.write_paused or cycle.disconnected or cycle.response_complete or transport.is_closing():
            return False
        if not self._chunked:
            # h11 chooses how a body is framed as the head is sent, and does not tell.
            if not cycle.response_started or type(getattr(cycle.conn, "_writer", None)) is not ChunkedWriter:
                return False
            self._chunked = True
        assert data, "an empty chunk is the last one"
        transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True


class ImpatientProtocol(H11Protocol):
    """uvicorn's HTTP/1.1, with those limits."""

    def __init__(self, *arguments: Any, head_timeout_s: float, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._head_timeout_s = head_timeout_s
        self._head_timer: asyncio.TimerHandle | None = None
        self._app: Callable[[Scope, Receive, Send], Awaitable[None]] = self.app
        self.app = self._offer

    def _offer(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """The application, told of the short way. No coroutine of its own: each one costs with every wake-up."""
        if scope["method"] != "HEAD":
            # The next exchange of a connection begins when this one has ended.
            extensions: dict[str, object] = {CHUNK_WRITER: DirectWriter(self.cycle)}
            scope["extensions"] = extensions
        return self._app(scope, receive, send)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_head()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_head()  # the next one may have begun to come meanwhile

    def send_400_response(self, msg: str) -> None:
        """The client sent what is no HTTP; what it was is not repeated."""
        self._refuse(400, f"{msg} Its head may have {HEAD_MAX_BYTES} bytes at most.", "invalid_http")

    def _watch_head(self) -> None:
        """Hold one timer exactly while a head has begun and is not whole, or a body comes that was answered already."""
        theirs, ours = self.conn.their_state, self.conn.our_state
        begun = theirs is h11.IDLE and bool(self.conn.trailing_data[0])
        unwanted = theirs is h11.SEND_BODY and ours is h11.DONE
        if not (begun or unwanted) or self.transport.is_closing():
            self._forget_head()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self._head_timeout_s, self._late)

    def _forget_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _late(self) -> None:
        self._head_timer = None
        self._refuse(408, f"The request's head did not arrive within {self._head_timeout_s:g} s.", "head_timeout")

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Answer what never reached the application, and hang up."""
        if self.conn.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
            body = error_json(ErrorBody(message, "invalid_request_error", None, code))
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"connection", b"close"),
            ]
            for event in (h11.Response(status_code=status, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def uvicorn_config(app: Any, *, head_timeout_s: float = HEAD_TIMEOUT_S, graceful_s: int = 5) -> uvicorn.Config:
    """How an ASGI application is served; `graceful_s` is how long a server that is told to stop waits for exchanges."""
    return uvicorn.Config(
        app,
        # httptools would be faster; but with it uvicorn forgets to tell a request that its client has left when
        # another is pipelined behind it, loses the body of one that offers an upgrade, and takes endless headers.
        http=partial(ImpatientProtocol, head_timeout_s=head_timeout_s),  # type: ignore[arg-type]
        log_config=None,
        access_log=False,
        proxy_headers=False,  # nothing here asks who the client was
        lifespan="on",
        server_header=False,
        ws="none",
        backlog=BACKLOG,
        h11_max_incomplete_event_size=HEAD_MAX_BYTES,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=graceful_s,
    )
