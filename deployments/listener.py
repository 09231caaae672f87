"""A router's listener: the port that it takes, and how it leaves it with no connection lost.

Owns: who has a port, the listening socket, uvicorn's server on it, and the end of each connection. Imports the HTTP
server's settings; knows nothing of requests.

Leaving has two steps. `announce_end`: every answer from now on says that it is the last of its connection, so that whoever
reads it goes elsewhere with the next request. `stop_listening`: no new connection is made, and one that is quiet for
`LINGER_S` is closed; one request that comes before is still answered. (What is sent in the very moment in which a quiet
connection is closed is lost in HTTP/1.1, whoever closes it.)

The kernel makes connections by itself and resets those that nobody has accepted when the listener closes. So the listener
first drops what would begin a connection, accepts what is made, and closes then. A client whose first packet was dropped
sends it again after a second: to who listens there by then, or to be refused.

A port is handed over: a router that comes while each port has one stands by, and has the port of the first that leaves,
which goes on listening beside it until then. So whoever asks on a port that is being handed over is always heard.

Invariants: a connection that was made is accepted and served; a port has one router, and for a moment that which leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import socket
import struct
import sys
from collections.abc import Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.flow_control import CLOSE_HEADER

from deployments.http_server import BACKLOG, uvicorn_config

LINGER_S = 1.0
"""Who asks again on the same connection does so within this, or has it made anew."""
_CLOSING_S = 0.2
"""Long against what making a connection takes within a data centre."""
_LAST_EXCHANGES_S = 1
"""What exchanges get that are open when the server is closed without a drain, or after one that was too short."""
_POLL_S = 0.05
_HAND_OVER_S = 5.0
_SO_ATTACH_FILTER = 26
_DROP_SYN = (
    (0x30, 0, 0, 13),  # A = the flags of the TCP header
    (0x54, 0, 0, 0x12),  # A &= SYN | ACK
    (0x15, 0, 1, 0x02),  # if A is SYN alone:
    (0x06, 0, 0, 0),  # keep no byte of the packet
    (0x06, 0, 0, 0xFFFFFFFF),  # else all
)
"""A classic BPF program: (code, jump if true, jump if false, operand)."""


class Port:
    """A port that this process has for itself, bound, which does not listen yet."""

    def __init__(self, sock: socket.socket, claim: socket.socket | None = None, first_port: int = 0) -> None:
        self.sock = sock
        self._first = first_port
        self.number: int = sock.getsockname()[1]
        self._claim = claim

    async def give_up(self) -> None:
        """Let the next router have this port; returns when it has it, where one stands by, and listens beside this one."""
        if self._claim is None:
            return
        self._claim.close()
        for _ in range(round(_HAND_OVER_S / _POLL_S)):
            if _is_taken(_name(self.number)) or not _is_taken(_stands_by(self._first)):
                return
            await asyncio.sleep(_POLL_S)


def take_port(host: str, port: int, count: int) -> Port | None:
    """The first of the ports `port` … `port + count - 1` that no router of this machine has; None where each has one.
    Port 0 takes a free one.

    Raises:
        OSError: it cannot be had.
    """
    if port == 0 or sys.platform != "linux":
        return Port(_bind(host, port))
    for number in range(port, port + count):
        claim = _take(_name(number))
        if claim is None:
            continue
        try:
            return Port(_bind(host, number), claim, port)
        except OSError:
            claim.close()
            raise
    return None


async def stand_by_for_port(host: str, port: int, count: int) -> Port:
    """`take_port`, as soon as one is given up. Raises OSError where that cannot be had."""
    with contextlib.ExitStack() as stack:
        while True:
            taken = take_port(host, port, count)
            if taken is not None:
                return taken
            if (
                mark := _take(_stands_by(port))
            ) is not None:  # one for all who stand by; it is the next one's when this goes
                stack.callback(mark.close)
            await asyncio.sleep(_POLL_S)


def _name(port: int) -> str:
    return f"\0forebay-router/{port}"


def _stands_by(first_port: int) -> str:
    return f"{_name(first_port)}/stands-by"


def _take(name: str) -> socket.socket | None:
    """What holds a name for this process, until it is closed or the process ends, however that ends; None where another
    has it. A name is an abstract one of a socket: no file, and known in this network namespace, as ports are."""
    held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        held.bind(name)
    except OSError:
        held.close()
        return None
    return held


def _is_taken(name: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(name)
        except OSError:
            return False
        return True


def _bind(host: str, port: int) -> socket.socket:
    """SO_REUSEPORT, so that the next router can listen before this one has ended."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    # Inherited by accepted connections; asyncio sets it only on sockets made with a protocol number.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        sock.bind((host, port))
    except OSError:
        sock.close()
        raise
    return sock


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the process's: it drains first."""
        yield


class _Connections(set[Any]):
    """uvicorn's protocols, each in it while its connection is open."""

    def __init__(self) -> None:
        super().__init__()
        self.none_left = asyncio.Event()
        self.none_left.set()

    def add(self, connection: Any) -> None:
        super().add(connection)
        self.none_left.clear()

    def discard(self, connection: Any) -> None:
        super().discard(connection)
        if not self:
            self.none_left.set()


class Listener:
    """Serves `app` on a port from `start` to `close`."""

    def __init__(self, app: Any) -> None:
        self._server = _Server(uvicorn_config(app, graceful_s=_LAST_EXCHANGES_S))
        self._server.server_state.connections = self._connections = _Connections()
        self._port: Port | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self, port: Port) -> asyncio.Task[None]:
        """Listen. The task that is returned serves until `close`."""
        # From here on connections are made, and wait for the server that starts within milliseconds.
        port.sock.listen(BACKLOG)
        self._port = port
        self._task = asyncio.create_task(self._server.serve(sockets=[port.sock]), name="http")
        return self._task

    def announce_end(self) -> None:
        """Every answer that has not begun says that it is its connection's last."""
        config, state = self._server.config, self._server.server_state
        # uvicorn makes the default headers anew every second, of the configuration's.
        config.encoded_headers.append(CLOSE_HEADER)
        state.default_headers = [*state.default_headers, CLOSE_HEADER]
        for connection in self._connections:
            cycle = connection.cycle
            if cycle is not None and not cycle.response_started:
                cycle.default_headers = [*cycle.default_headers, CLOSE_HEADER]

    async def stop_listening(self) -> None:
        """Take no new connection; returns when those that were made have been accepted."""
        if self._port is None:
            return
        if _drop_syn(self._port.sock):
            await asyncio.sleep(_CLOSING_S)
        await asyncio.sleep(0)  # the loop accepts what came while it was kept from it
        if self._server.started:
            for server in self._server.servers:
                server.close()
        self._server.config.timeout_keep_alive = LINGER_S  # type: ignore[assignment]  # it is given to call_later
        loop = asyncio.get_running_loop()
        for connection in self._connections:
            connection.timeout_keep_alive = LINGER_S
            quiet = connection.timeout_keep_alive_task
            if quiet is not None:
                quiet.cancel()
                connection.timeout_keep_alive_task = loop.call_later(LINGER_S, connection.timeout_keep_alive_handler)

    async def emptied(self) -> None:
        """Return once no connection is left."""
        await self._connections.none_left.wait()

    async def close(self) -> None:
        """End the server and every connection."""
        if self._task is not None:
            self._server.should_exit = True
            await self._task


def _drop_syn(sock: socket.socket) -> bool:
    """Drop what would begin a connection, from here on. False where this system cannot."""
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in _DROP_SYN))
    try:
        sock.setsockopt(
            socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", len(_DROP_SYN), ctypes.addressof(program))
        )
    except OSError:
        return False
    return True
