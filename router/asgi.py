"""ASGI as this package speaks it without a framework.

Owns: the three types, the one extension that a server may offer, and how a JSON answer is sent. Imports nothing of ours.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, Protocol

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

EXCHANGE = "forebay.exchange"
"""Where a server that offers it has the Exchange of a request, in the scope's `extensions`."""


class ChunkWriter(Protocol):
    """Writes a piece of an answer's body in this pass of the event loop, without a task that is woken for a `send` of it.

    Not to be called while a `send` of the same exchange is awaited.
    """

    def __call__(self, head: bytes, middle: bytes, tail: bytes) -> bool:
        """Write these, of at least a byte, in one piece behind all that was sent before. False: nothing was written, and
        `send` says why or waits: the answer's head has not been sent or its end has, its body is not sent in chunks, the
        client is gone, or it has not read enough of what was written before."""
        ...


class Exchange(Protocol):
    """Short ways past `receive` and `send`, for what almost every request needs."""

    @property
    def write_chunk(self) -> ChunkWriter: ...

    def take_body(self) -> bytes | None:
        """What has not been received of the body, if all of it is there, so that there is nothing to wait for."""
        ...

    def when_gone(self, call: Callable[[], None] | None) -> None:
        """Call this once, from the event loop, when the client leaves before its answer has ended. None: nobody asks any
        more."""
        ...


def exchange_of(scope: Scope) -> Exchange | None:
    """The request's, where its server has one."""
    extensions: MutableMapping[str, Any] = scope.get("extensions") or {}
    return extensions.get(EXCHANGE)


async def send_json(send: Send, status: int, body: bytes, headers: Iterable[tuple[str, str]] = ()) -> None:
    sized = (("content-type", "application/json"), ("content-length", str(len(body))), *headers)
    encoded = [(name.encode(), value.encode("latin-1")) for name, value in sized]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})
