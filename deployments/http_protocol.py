"""HTTP/1.1 between one client's connection and an ASGI application, with an end to every wait.

Owns: what of a connection's bytes is which request's, and what a client is told that speaks no HTTP or does not finish.
`httptools` takes requests apart; answers are framed by http_exchange.py. Imports the form of errors, and ASGI's types.

A server of uvicorn drives it as it drives its own protocols, which wait for ever for the first byte of a connection and
for the rest of a head. With httptools they also forget to tell a request that its client has left when another is
pipelined behind it, lose the body of one that offers an upgrade, and take endless heads.

Invariants: one exchange of a connection runs at a time, in the order of their requests; what is not plain HTTP/1.1 is
refused, behind the answers to what came before it; all that is held for a client has an end, in bytes and in time; who
has only ended its own half of the connection gets its answers, and who has left is noticed.
"""

from __future__ import annotations

import array
import asyncio
import fcntl
import select
import termios
from collections import deque
from typing import Any, cast
from urllib.parse import unquote

import httptools
import uvicorn
from uvicorn.server import ServerState

from deployments.http_exchange import STATUS_LINES, App, ChunkWrites, Exchange
from router.asgi import EXCHANGE
from router.completions import LAST_WORD_S
from router.errors import ErrorBody, error_json
from router.exchange import MAX_HEADER_BYTES

HEAD_TIMEOUT_S = 10.0
"""From the first byte of a request's head to its last; and for what is left of a body that nobody wants any more."""
HEAD_MAX_BYTES = 2 * MAX_HEADER_BYTES
"""Beyond it a head is not read to its end. What is between is answered as too large by the application."""
_HELD_BYTES = 64 * 2**10
"""Of a body that nobody has asked for yet; beyond it, and one read, the client must wait."""
_PIPELINED_MAX = 16
"""The same for requests behind the one that is answered."""
_PIECE_BYTES = 4096
"""Of what was read, taken apart at once: what it can hold of requests, when each is as short as can be, is little."""
_HALF_CLOSED_S = 0.1
"""How soon is noticed that one who has ended its half of the connection has left it, from what it was sent."""


class Connection(asyncio.Protocol):
    """One client's connection. `httptools` calls its `on_…`."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        head_timeout_s: float,
        writes: ChunkWrites,
    ) -> None:
        """As uvicorn's server makes them; `app_state`, which an application may have from its lifespan, ours has none.
        `writes` are of all its connections."""
        del app_state
        self._app = cast(App, config.loaded_app)
        self._loop = _loop or asyncio.get_running_loop()
        self._state = server_state
        self._head_timeout_s = head_timeout_s
        self._writes = writes
        self.timeout_keep_alive: float = config.timeout_keep_alive
        self._transport: asyncio.Transport
        self._ends: dict[str, Any] = {}
        """What of the scope all requests of the connection have in common."""
        self._parser: Any = httptools.HttpRequestParser(self)
        # The request that comes.
        self._in_head = False
        self._unread = b""
        """What has come and is not taken apart yet, because too much is held that was."""
        self._idle_bytes = 0
        """Taken apart since a head ended, or something of a body came, or its end."""
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._last: Exchange | None = None
        """The last one whose head has come."""
        # Those that came.
        self.cycle: Exchange | None = None
        """The one that is answered, or was last."""
        self._waiting: deque[Exchange] = deque()
        self._spoilt: tuple[int, str, str] | None = None
        """Why nothing more is read, to be said when what waits has been answered."""
        self._closing = False
        # The connection.
        self._reads = True
        self._is_half_closed = False
        """The client sends nothing more."""
        self.write_paused = False
        self._drain: asyncio.Future[None] | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self.timeout_keep_alive_task: asyncio.TimerHandle | None = None
        self._quiet_since_s = self._loop.time()

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.complete

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._state.connections.add(self)  # type: ignore[arg-type]  # it is none of uvicorn's
        self._ends = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "server": _address(transport.get_extra_info("sockname")),
            "client": _address(transport.get_extra_info("peername")),
            "scheme": "http",
            "root_path": "",
        }
        self._watch_quiet(self.timeout_keep_alive)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._state.connections.discard(self)
        self._forget_head()
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
        self._parser = None
        for exchange in (*filter(None, (self.cycle,)), *self._waiting):
            exchange.leave()
        self._waiting.clear()
        self.resume_writing()

    def data_received(self, data: bytes) -> None:
        self._unread = self._unread + data if self._unread else data
        self.read_on()

    def eof_received(self) -> bool:
        """Answer all that has come whole, if it has not left altogether, which looks the same from here."""
        self._is_half_closed = True
        last = self._last
        if self._in_head or (last is not None and last.more and not last.complete):
            self._spoil(400, "The request ended before its end.", "invalid_http")
        if not self._answering or self._transport.is_closing():
            return False
        if self._spoilt is None:
            assert last is not None
            last.close_after()
        assert self.cycle is not None
        self.cycle.probe()
        self._watch_quiet(_HALF_CLOSED_S)
        return True

    def read_on(self) -> None:
        """Take apart what has come, and let more come, as far as it may be held."""
        at, unread = 0, self._unread
        while at < len(unread) and not self._is_full:
            if self._parser is None or self._spoilt is not None or self._transport.is_closing():
                at = len(unread)
            else:
                self._take_apart(unread[at : at + _PIECE_BYTES])
                at += _PIECE_BYTES
        self._unread = unread[at:]
        if self._is_full:
            self._pause_reading()
        else:
            self._resume_reading()
        self._watch_head()

    @property
    def _is_full(self) -> bool:
        last = self._last
        return len(self._waiting) > _PIPELINED_MAX or (last is not None and last.held_bytes > _HELD_BYTES)

    def _take_apart(self, piece: bytes) -> None:
        self._idle_bytes += len(piece)
        try:
            self._feed(piece)
        except _RefusalError as refusal:
            self._spoil(*refusal.args)
        except httptools.HttpParserError as error:
            # What it was is not repeated.
            cause = error.__context__
            if isinstance(cause, _RefusalError):
                self._spoil(*cause.args)
            else:
                self._spoil(
                    400, f"Invalid HTTP request. Its head may have {HEAD_MAX_BYTES} bytes at most.", "invalid_http"
                )
        else:
            if self._idle_bytes > HEAD_MAX_BYTES:
                self._spoil(400, f"More than {HEAD_MAX_BYTES} bytes came of a head, or without a body.", "invalid_http")

    def _feed(self, data: bytes) -> None:
        while True:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                # Nothing else is spoken here, and who offers it may go on as if it had not. The parser would take what
                # follows for the other protocol: the same request is read again without the offer.
                data = self._without_offer() + data[upgrade.args[0] :]
                self._parser = httptools.HttpRequestParser(self)
            else:
                return

    def _without_offer(self) -> bytes:
        if self._parser.get_method() == b"CONNECT":
            raise _RefusalError(400, "There is no proxy here.", "invalid_http")
        version = self._parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b\r\n" % (self._parser.get_method(), self._url, version)]
        lines += [b"%b: %b\r\n" % header for header in self._headers if header[0] != b"upgrade"]
        return b"".join(lines) + b"\r\n"

    def pause_writing(self) -> None:
        self.write_paused = True
        if self.cycle is not None:
            self.cycle.flow(True)

    def resume_writing(self) -> None:
        self.write_paused = False
        if self.cycle is not None:
            self.cycle.flow(False)
        drain, self._drain = self._drain, None
        if drain is not None and not drain.done():
            drain.set_result(None)

    # --- httptools ---

    def on_message_begin(self) -> None:
        self._in_head = True
        self._url = b""
        self._headers = []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # what comes behind a body in chunks is for nobody
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        parser, headers = self._parser, self._headers
        if parser.should_upgrade():
            return
        self._in_head = False
        self._idle_bytes = 0
        version = parser.get_http_version()
        hosts, expects = 0, False
        for name, value in headers:
            if name == b"host":
                hosts += 1
            elif name == b"transfer-encoding":
                if value.lower() != b"chunked" or version != "1.1":
                    raise _RefusalError(501, "Of transfer codings only chunked is known here.", "invalid_http")
            elif name == b"expect":
                expects = version == "1.1" and value.lower() == b"100-continue"
        if version not in {"1.0", "1.1"} or hosts > 1 or (hosts == 0 and version == "1.1"):
            raise _RefusalError(400, "A request is HTTP/1.1 with one host header, or HTTP/1.0.", "invalid_http")
        if self._url[:1] != b"/" and self._url != b"*":
            raise _RefusalError(400, "A request's target is a path. There is no proxy here.", "invalid_http")
        raw_path, _, query = self._url.partition(b"?")
        path = raw_path.decode("ascii")
        exchange = self._last = Exchange(
            self,
            self._transport,
            self._writes,
            {
                **self._ends,
                "http_version": version,
                "method": parser.get_method().decode("ascii"),
                "path": unquote(path) if "%" in path else path,
                "raw_path": raw_path,
                "query_string": query,
                "headers": headers,
            },
            keep_alive=version == "1.1" and parser.should_keep_alive(),
            expects_continue=expects,
        )
        exchange.scope["extensions"] = {EXCHANGE: exchange}
        if self._answering:
            self._waiting.append(exchange)
        else:
            self._start(exchange)

    def on_body(self, body: bytes) -> None:
        exchange = self._last
        assert exchange is not None
        self._idle_bytes = 0
        if not exchange.complete:
            exchange.body_came(body)

    def on_message_complete(self) -> None:
        if self._in_head:
            return  # the offer of an upgrade, which is read again
        self._idle_bytes = 0
        assert self._last is not None
        self._last.body_ended()

    # --- exchanges ---

    def _start(self, exchange: Exchange) -> None:
        self.cycle = exchange
        exchange.default_headers = self._state.default_headers
        if self._closing:
            exchange.close_after()
        self._state.tasks.add(self._loop.create_task(exchange.run(self._app)))

    def answered(self) -> None:
        """The answer of `cycle` has been sent."""
        self._state.total_requests += 1
        if self._transport.is_closing():
            return
        self._quiet_since_s = self._loop.time()
        if self._waiting:
            self._start(self._waiting.popleft())
        elif self._spoilt is not None:
            self.refuse(*self._spoilt)
            self.close()
            return
        self.read_on()  # the next one may have begun to come meanwhile

    def left(self) -> None:
        """The application has done with an exchange, in the task that was made for it."""
        task = asyncio.current_task()
        assert task is not None
        self._state.tasks.discard(task)

    async def drained(self, exchange: Exchange) -> None:
        """Return when more may be written, or the client has gone."""
        while self.write_paused and not exchange.gone:
            if self._drain is None:
                self._drain = self._loop.create_future()
            await self._drain

    def _pause_reading(self) -> None:
        if self._reads and not self._transport.is_closing():
            self._reads = False
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        if not self._reads and not self._transport.is_closing():
            self._reads = True
            self._transport.resume_reading()

    # --- ends ---

    def shutdown(self) -> None:
        """uvicorn's server ends: what is answered now is the last."""
        self._closing = True
        if self.cycle is not None and self._answering:
            self.cycle.close_after()
        else:
            self.close()

    def close(self) -> None:
        """Close it when what was written has been read, or `LAST_WORD_S` later."""
        self._quiet_since_s = self._loop.time()
        self._transport.close()

    def _spoil(self, status: int, message: str, code: str) -> None:
        """What comes is no request that can be answered: say so, behind the answers to those that came before."""
        last = self._last
        if self._answering and (self._in_head or last is None or not last.more):
            self._spoilt = (status, message, code)
            return
        if last is not None and last.more and last in self._waiting:
            # Its head was taken and its body is broken; those before it are answered.
            self._waiting.remove(last)
            self._spoilt = (status, message, code)
            return
        begun = last is not None and last.more and last.response_started
        if last is not None and last.more:
            last.leave()
        if not begun:
            self.refuse(status, message, code)
        self.close()

    def refuse(self, status: int, message: str, code: str, kind: str = "invalid_request_error") -> None:
        """Write an answer that no application has made; the connection's last."""
        body = error_json(ErrorBody(message, kind, None, code))
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self._transport.write(STATUS_LINES[status] + head + body)

    def timeout_keep_alive_handler(self) -> None:
        """Hang up on who has been quiet for so long. A request that has come in this very moment, and has not been read,
        is served all the same."""
        quiet_s = self._loop.time() - self._quiet_since_s
        after_s = self.timeout_keep_alive
        if self._transport.is_closing():
            after_s = LAST_WORD_S - quiet_s
            if after_s <= 0:
                self._transport.abort()
                return
        elif self._answering:
            if self._is_half_closed:
                after_s = _HALF_CLOSED_S
                if _is_reset(self._transport):
                    self._transport.abort()
                    return
        elif self._in_head or self._head_timer is not None:
            pass
        elif quiet_s < self.timeout_keep_alive:
            after_s -= quiet_s
        elif not _unread(self._transport):
            self.close()
            after_s = LAST_WORD_S
        self._watch_quiet(after_s)

    def _watch_quiet(self, after_s: float) -> None:
        # One timer for as long as the connection lives: one for each request would cost each request.
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
        self.timeout_keep_alive_task = self._loop.call_later(after_s, self.timeout_keep_alive_handler)

    def _watch_head(self) -> None:
        """Hold one timer exactly while a head has begun and is not whole, or a body comes that was answered already."""
        last = self._last
        unwanted = last is not None and last.more and last.complete
        if not ((self._in_head and not self._answering) or unwanted) or self._transport.is_closing():
            self._forget_head()
        elif self._head_timer is None:
            self._head_timer = self._loop.call_later(self._head_timeout_s, self._late)

    def _forget_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _late(self) -> None:
        self._head_timer = None
        if self._in_head:
            self.refuse(408, f"The request's head did not arrive within {self._head_timeout_s:g} s.", "head_timeout")
        self.close()


class _RefusalError(Exception):
    """A request that the parser takes and we do not: (status, message, code)."""


def _address(name: object) -> tuple[str, int] | None:
    return (str(name[0]), int(name[1])) if isinstance(name, (tuple, list)) else None


def _is_reset(transport: asyncio.Transport) -> bool:
    """Whether the client has taken back its half too. (A transport that has read to the end does not look there.)"""
    sock = transport.get_extra_info("socket")
    if sock is None or sock.fileno() < 0:
        return False
    poll = select.poll()
    poll.register(sock.fileno(), 0)
    return bool(poll.poll(0))


def _unread(transport: asyncio.Transport) -> bool:
    """Whether bytes of a client wait in its socket."""
    sock = transport.get_extra_info("socket")
    if sock is None or sock.fileno() < 0:
        return False
    waiting = array.array("i", [0])
    fcntl.ioctl(sock.fileno(), termios.FIONREAD, waiting)
    return waiting[0] > 0
