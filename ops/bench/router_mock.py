"""Mock OpenAI servers for the routers that are compared with ours: eight ports, eight mock engines, one process.

    python -m ops.bench.router_mock

Owns: as much of HTTP as those routers speak to their workers. Imports the messages alone; on asyncio's protocols, without
a web framework, so that it takes little of the machine that is measured. A stream's first token comes at once, each
further one with a step of its engine, as one event in one chunk. An answer that is not streamed comes whole at once.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Callable
from functools import partial
from typing import cast

import msgspec
import uvloop

from ops.bench.router_wire import REPLICAS, STEP_S, Listening, answer, piece, say

_MAX_REQUEST_BYTES = 2**20
_SERVER_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: "
_JSON_HEAD = _SERVER_HEAD + b"application/json\r\ncontent-length: %d\r\n\r\n"
_STREAM_HEAD = _SERVER_HEAD + b"text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"


class Body(msgspec.Struct):
    """What a mock reads of a request; routers may have added fields."""

    model: str
    stream: bool = False
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    """What some routers make of the other."""

    @property
    def tokens(self) -> int:
        return self.max_tokens or self.max_completion_tokens or 1


def every_step(phase_s: float, step: Callable[[], None]) -> None:
    """Call `step` at `phase_s` and every STEP_S after it, on the running loop. A step that is late is not made up for."""
    loop = asyncio.get_running_loop()
    due_s = loop.time() + phase_s

    def tick() -> None:
        nonlocal due_s
        step()
        due_s += STEP_S
        now_s = loop.time()
        while due_s <= now_s:
            due_s += STEP_S
        loop.call_at(due_s, tick)

    loop.call_at(due_s, tick)


def chunk(data: bytes) -> bytes:
    """In HTTP's chunked form."""
    return b"%x\r\n%b\r\n" % (len(data), data)


class Answer:
    """One stream on its way."""

    __slots__ = ("_head", "_made", "_tail", "_tokens", "_transport")

    def __init__(self, transport: asyncio.Transport, request_id: str, body: Body) -> None:
        fixed = {"id": request_id, "object": "chat.completion.chunk", "created": 1, "model": body.model}
        self._head = b"data: " + msgspec.json.encode(fixed)[:-1] + b',"choices":[{"index":0,"delta":'
        self._tail = b',"logprobs":null,"finish_reason":null}]}\n\n'
        self._transport = transport
        self._tokens = body.tokens
        self._made = 0

    def begin(self) -> bool:
        """Send what opens a stream, and the first token; False where that is all."""
        role = self._head + b'{"role":"assistant","content":""}' + self._tail
        self._transport.write(_STREAM_HEAD + chunk(role))
        return self.step()

    def step(self) -> bool:
        """Send one token; False where it was the last, or the client has left."""
        if self._transport.is_closing():
            return False
        event = self._head + b'{"content":"%b"}' % piece(self._made).encode() + self._tail
        self._made += 1
        if self._made < self._tokens:
            self._transport.write(chunk(event))
            return True
        finish = self._head + b'{},"logprobs":null,"finish_reason":"length"}]}\n\n'
        self._transport.write(chunk(event) + chunk(finish) + chunk(b"data: [DONE]\n\n") + _LAST_CHUNK)
        return False


class Replica:
    """One mock engine behind one port."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.ids = itertools.count()
        self.running: list[Answer] = []
        every_step(number / REPLICAS * STEP_S, self._step)

    def _step(self) -> None:
        self.running = [stream for stream in self.running if stream.step()]


class Connection(asyncio.Protocol):
    """One connection of a router."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self._decode = msgspec.json.Decoder(Body).decode

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass of asyncio's

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._buffer[:end]).lower()
            start = end + 4
            _, named, rest = head.partition(b"\r\ncontent-length:")
            length = int(rest.partition(b"\r\n")[0]) if named else 0
            if length > _MAX_REQUEST_BYTES:
                self._transport.abort()
                return
            if len(self._buffer) < start + length:
                return
            body = bytes(self._buffer[start : start + length])
            del self._buffer[: start + length]
            self._answer(head, body)
        if len(self._buffer) > _MAX_REQUEST_BYTES:
            self._transport.abort()

    def _answer(self, head: bytes, raw: bytes) -> None:
        assert self._transport is not None
        if not head.startswith(b"post "):  # what routers ask of a worker before they use it
            self._transport.write(_JSON_HEAD % 2 + b"{}")
            return
        body, request_id = self._decode(raw), f"chatcmpl-{self._replica.number}-{next(self._replica.ids)}"
        if body.stream:
            stream = Answer(self._transport, request_id, body)
            if stream.begin():
                self._replica.running.append(stream)
            return
        message = {"role": "assistant", "content": answer(body.tokens)}
        whole = {
            "id": request_id,
            "object": "chat.completion",
            "created": 1,
            "model": body.model,
            "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}],
        }
        encoded = msgspec.json.encode(whole)
        self._transport.write(_JSON_HEAD % len(encoded) + encoded)


async def run() -> None:
    loop = asyncio.get_running_loop()
    ports = []
    for number in range(REPLICAS):
        replica = Replica(number)
        server = await loop.create_server(partial(Connection, replica), "127.0.0.1", 0)
        ports.append(int(server.sockets[0].getsockname()[1]))
    say(Listening(tuple(ports)))
    await asyncio.to_thread(sys.stdin.buffer.read)


if __name__ == "__main__":
    uvloop.run(run())
