"""Open-loop load of mixed classes, from a process of its own, for tests of overload.

    python -m tests.load

Owns: when each request leaves and what became of it. On asyncio's protocols and kept connections, so that it is not what
gives way; how late it was is a part of its answer. It answers each question with one line and ends when its standard
input does. Invariants: requests leave at their planned times, whatever became of the earlier ones; nothing outlives the
question that it was sent for.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Iterator, Mapping
from typing import cast

import msgspec

from ops.bench.router_wire import Line, say

_HEAD_END = b"\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"
_DONE = b"data: [DONE]"
RETRY_S = 0.1


class Flow(msgspec.Struct, frozen=True):
    """Requests of one kind."""

    service_tier: str
    output_tokens: int
    per_s: float = 0.0
    """At the times of a Poisson process."""
    insisting: int = 0
    """Clients that each ask again as soon as they have an answer, and RETRY_S after a refusal, whatever it says."""


class Offer(Line, frozen=True):
    """Send these flows for `seconds`, then leave off and drop what is not finished."""

    port: int
    model: str
    seed: int
    flows: tuple[Flow, ...]
    seconds: float


class Fate(msgspec.Struct, frozen=True, array_like=True):
    """What became of one request. Times in seconds from the beginning of the question."""

    flow: int
    sent_s: float
    late_s: float
    """How much later than planned it left."""
    status: int
    """0: dropped at the end, before an answer had begun."""
    first_s: float | None
    """The first token of a stream: its head leaves with it."""
    end_s: float | None
    retry_after_s: int | None
    """What the header says, where the answer has it."""
    reason: bool
    """Whether a refusal says why, in its header."""


class Offered(Line, frozen=True):
    fates: tuple[Fate, ...]


class Connection(asyncio.Protocol):
    """One kept connection: one request at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self._answered: asyncio.Future[None] | None = None
        self._head: dict[bytes, bytes] = {}
        self.status = 0
        self.first_s: float | None = None
        self._buffer = b""
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def ask(self, request: bytes) -> asyncio.Future[None]:
        """Done when the answer is whole. Raises ConnectionError where the server hangs up first."""
        assert self.transport is not None
        self.status, self.first_s, self._head, self._buffer = 0, None, {}, b""
        self._answered = self._loop.create_future()
        self.transport.write(request)
        return self._answered

    def header(self, name: bytes) -> bytes | None:
        return self._head.get(name)

    def data_received(self, data: bytes) -> None:
        answered = self._answered
        if answered is None or answered.done():
            return
        self._buffer += data
        if not self.status:
            head, found, rest = self._buffer.partition(_HEAD_END)
            if not found:
                return
            first, *lines = head.split(b"\r\n")
            self.status = int(first.split(b" ")[1])
            self._head = dict(line.lower().split(b": ", 1) for line in lines)
            self._buffer = rest
            if self.status == 200:
                self.first_s = self._loop.time()
        if self.status == 200:
            if self._buffer.endswith(_LAST_CHUNK):
                whole = _DONE in self._buffer
                if whole:
                    answered.set_result(None)
                else:
                    answered.set_exception(ConnectionError("a stream ended without [DONE]"))
            elif len(self._buffer) > 256:  # the end is all that is still looked for
                self._buffer = self._buffer[-64:]
        elif len(self._buffer) >= int(self._head[b"content-length"]):
            answered.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(ConnectionError(f"the server hung up: {exc}"))


class Client:
    """Sends one question's requests."""

    def __init__(self, offer: Offer) -> None:
        self._offer = offer
        self._rng = random.Random(offer.seed)
        self._loop = asyncio.get_running_loop()
        self._began_s = 0.0
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()
        self._fates: list[Fate] = []

    async def run(self) -> Offered:
        plan = sorted(self._plan())
        self._began_s = self._loop.time()
        tasks: set[asyncio.Task[int] | asyncio.Task[None]] = {
            asyncio.create_task(self._insist(number))
            for number, flow in enumerate(self._offer.flows)
            for _ in range(flow.insisting)
        }
        for at_s, flow in plan:
            await asyncio.sleep(max(0.0, at_s - self._now_s()))
            tasks.add(asyncio.create_task(self._one(flow, at_s)))
        await asyncio.sleep(max(0.0, self._offer.seconds - self._now_s()))
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(ended, BaseException) and not isinstance(ended, asyncio.CancelledError):
                raise ended
        for connection in self._open:
            assert connection.transport is not None
            connection.transport.abort()
        return Offered(tuple(self._fates))

    def _plan(self) -> Iterator[tuple[float, int]]:
        for number, flow in enumerate(self._offer.flows):
            at_s = 0.0
            while flow.per_s and (at_s := at_s + self._rng.expovariate(flow.per_s)) < self._offer.seconds:
                yield at_s, number

    def _now_s(self) -> float:
        return self._loop.time() - self._began_s

    async def _insist(self, number: int) -> None:
        while True:
            if await self._one(number, self._now_s()) != 200:
                await asyncio.sleep(RETRY_S)

    async def _one(self, number: int, at_s: float) -> int:
        """Returns the status of the answer."""
        request = self._request(number)
        connection = self._idle.pop() if self._idle else await self._connect()
        sent_s, end_s = self._now_s(), None
        try:
            await connection.ask(request)
            end_s = self._now_s()
            self._idle.append(connection)
        finally:
            retry_after = connection.header(b"retry-after")
            self._fates.append(
                Fate(
                    number,
                    sent_s,
                    sent_s - at_s,
                    connection.status,
                    None if connection.first_s is None else connection.first_s - self._began_s,
                    end_s,
                    None if retry_after is None else int(retry_after),
                    connection.header(b"x-llm-d-request-dropped-reason") is not None,
                )
            )
        return connection.status

    async def _connect(self) -> Connection:
        _, connection = await self._loop.create_connection(Connection, "127.0.0.1", self._offer.port)
        self._open.add(connection)
        return connection

    def _request(self, number: int) -> bytes:
        flow = self._offer.flows[number]
        body: Mapping[str, object] = {
            "model": self._offer.model,
            "prompt": [self._rng.randrange(10, 1000) for _ in range(8)],
            "max_tokens": flow.output_tokens,
            "expected_output_tokens": flow.output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "service_tier": flow.service_tier,
        }
        raw = msgspec.json.encode(body)
        return b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(raw) + raw


async def run() -> None:
    decode = msgspec.json.Decoder(Offer).decode
    while line := await asyncio.to_thread(sys.stdin.buffer.readline):
        say(await Client(decode(line)).run())


def main() -> None:
    asyncio.run(run())


if __name__ == "__main__":
    main()
