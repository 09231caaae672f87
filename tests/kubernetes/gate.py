"""What stands between Forebay and the API server in these tests: it passes everything on, and can be told to fail.

Owns: that proxy, for plain HTTP/1.1, one exchange to a connection. Answers of its own are those that Kubernetes documents
(https://kubernetes.io/docs/reference/using-api/api-concepts). It keeps a list of what was asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import parse_qs, urlsplit

GONE = {
    "kind": "Status",
    "apiVersion": "v1",
    "metadata": {},
    "status": "Failure",
    "message": "too old resource version: 1 (2)",
    "reason": "Expired",
    "code": 410,
}

RIGHTS = {
    *(("nodes", verb) for verb in ("list", "watch")),
    *(("events", verb) for verb in ("create", "patch")),
    *(("leases", verb) for verb in ("create", "get", "update")),
}
"""All that the code asks of Kubernetes (test_operator.py), and all that the chart grants (tests/chart/test_security.py)."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, as it came."""

    method: str
    path: str
    query: dict[str, str]

    @property
    def watches(self) -> bool:
        return self.query.get("watch") in {"1", "true", "True"}

    @property
    def lists_nodes(self) -> bool:
        return self.path == "/api/v1/nodes" and not self.watches

    @property
    def right(self) -> tuple[str, str]:
        """(resource, verb), as a Role has them."""
        groups = re.fullmatch(r"/apis?/(?:[^/]+/)?v1/(?:namespaces/[^/]+/)?([a-z]+)(/[^/]+)?", self.path)
        assert groups is not None, self.path
        verbs = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
        reads = "watch" if self.watches else "get" if groups[2] else "list"
        return groups[1], verbs.get(self.method, reads)


Answer = bytes | None
"""Whole, with its head; None passes the request on."""


def answered(status: int, body: object) -> bytes:
    text = json.dumps(body).encode()
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(text)}\r\nconnection: close\r\n\r\n"
    return head.encode() + text


def watched(*events: object) -> bytes:
    """A watch that tells these and ends, as it ends when its time is over."""
    lines = b"".join(json.dumps(event).encode() + b"\n" for event in events)
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n" + lines


class Gate:
    """Runs in the test's loop. `url` is where clients go."""

    def __init__(self, upstream: str) -> None:
        parts = urlsplit(upstream)
        assert parts.hostname is not None
        self._upstream = parts.hostname, parts.port
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.asked: list[Asked] = []
        self.answer: Callable[[Asked], Answer] = lambda _: None
        self.away = False
        """It takes connections and ends them at once."""
        self.silent = False
        """It takes requests and never answers them."""
        self.url = ""

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.url = f"http://{host}:{port}"

    async def close(self) -> None:
        self._server.close()
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """End every connection in the middle of what it does."""
        for writer in self._open:
            writer.transport.abort()

    def rights(self) -> set[tuple[str, str]]:
        """What has been asked for."""
        return {asked.right for asked in self.asked}

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._open.add(writer)
        try:
            await self._exchange(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass  # cut
        finally:
            self._open.discard(writer)
            self._tasks.discard(task)
            writer.transport.abort()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.away:
            return
        head = await reader.readuntil(b"\r\n\r\n")
        method, target, _ = head.split(b" ", 2)
        parts = urlsplit(target.decode())
        asked = Asked(method.decode(), parts.path, {name: values[-1] for name, values in parse_qs(parts.query).items()})
        self.asked.append(asked)
        if self.silent:
            await reader.read()
            return
        if (made := self.answer(asked)) is not None:
            writer.write(made)
            await writer.drain()
            writer.write_eof()
            await reader.read()
            return
        above, below = await asyncio.open_connection(*self._upstream)
        self._open.add(below)
        try:
            lines = [
                line for line in head[:-4].split(b"\r\n") if not line.lower().startswith((b"connection:", b"host:"))
            ]
            host = f"Host: {self._upstream[0]}:{self._upstream[1]}".encode()
            below.write(b"\r\n".join([*lines, host, b"Connection: close"]) + b"\r\n\r\n")
            await asyncio.gather(_copy(reader, below), _copy(above, writer, then_close=True))
        finally:
            self._open.discard(below)
            below.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, then_close: bool = False) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        if then_close:
            await writer.drain()
            writer.close()
