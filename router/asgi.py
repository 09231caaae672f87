"""ASGI as this package speaks it without a framework.

Owns: the three types, the one extension that a server may offer, and how a JSON answer is sent. Imports nothing of ours.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, Protocol

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

CHUNK_WRITER = "forebay.chunk_writer"
"""Where a server that offers it has an exchange's ChunkWriter, in the scope's `extensions`."""


class ChunkWriter(Protocol):
    """Writes a piece of an answer's body at once, which spares a task to be woken for a `send` of it.

    Not to be called while a `send` of the same exchange is awaited.
    """

    def __call__(self, data: bytes) -> bool:
        """Write `data`, of at least a byte, behind all that was sent before. False: nothing was written, and `send` says
        why or waits: the answer's head has not been sent or its end has, its body is not sent in chunks, the client is
        gone, or it has not read enough of what was written before."""
        ...


def chunk_writer(scope: Scope) -> ChunkWriter | None:
    """The exchange's, where its server has one."""
    extensions: MutableMapping[str, Any] = scope.get("extensions") or {}
    return extensions.get(CHUNK_WRITER)


async def send_json(send: Send, status: int, body: bytes, headers: Iterable[tuple[str, str]] = ()) -> None:
    sized = (("content-type", "application/json"), ("content-length", str(len(body))), *headers)
    encoded = [(name.encode(), value.encode("latin-1")) for name, value in sized]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})
