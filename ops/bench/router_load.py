"""The load client of `bench router`, alone in its process: holds streams open, counts tokens, checks every text.

    python -m ops.bench.router_load

Owns: what a client reads and what it must have read. On asyncio's protocols: a read is counted as it comes, and taken
apart when the measured time is over. It reads the processor time of other processes itself, at the moments at which it
begins and ends counting. Invariants: an answer that is not the whole text of its request fails the question; nothing is
waited for without an end.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Mapping
from functools import partial
from typing import cast

import msgspec
import psutil
import uvloop

from deployments.open_files import allow_many_connections
from ops.bench.prompts import WORDS
from ops.bench.router_wire import (
    MARK,
    STEP_S,
    WINDOW_S,
    Answer,
    Counted,
    Failed,
    Load,
    Opened,
    OpenStreams,
    Probed,
    Probes,
    Question,
    Requests,
    Streams,
    Windows,
    answer,
    say,
)

PROMPT_WORDS = 70
"""About 400 bytes."""
PROMPT_IDS = 100
"""As many as those are with a chat's template, about."""
RAMP_S = 0.002
"""Between the beginnings of two streams."""
BEGIN_S = 0.01
"""Allowed for the beginning of a stream: the first must still run when the last has begun."""
SLACK_S = 3.0
"""Streams are so much longer than what is measured of them."""
PATIENCE_S = 30.0
"""Longest wait for what should have come by now."""
PROBE_TOKENS = 2
FIRST_STREAMS = 50
"""After these a router has loaded what it loads with its first work."""
_SHOWN_BYTES = 600
_EVENT_END = b"\n\n"
_LAST_CHUNK = b"0\r\n\r\n"
_MARK = MARK.encode()


class LoadError(Exception):
    """An answer is not what it must be, or did not come."""


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    choices: tuple[_Choice, ...]


class _Message(msgspec.Struct):
    content: str


class _WholeChoice(msgspec.Struct):
    message: _Message | None = None
    text: str | None = None


class _Whole(msgspec.Struct):
    choices: tuple[_WholeChoice, ...]


_decode_event = msgspec.json.Decoder(_Event).decode
_decode_whole = msgspec.json.Decoder(_Whole).decode


def dechunk(data: bytes) -> bytes:
    """The body that HTTP's chunked form holds. Raises LoadError where it is none, or not whole."""
    parts: list[bytes] = []
    at = 0
    while (end := data.find(b"\r\n", at)) >= 0:
        try:
            length = int(data[at:end].partition(b";")[0], 16)
        except ValueError:
            break
        at = end + 2
        if length == 0:
            return b"".join(parts)
        parts.append(data[at : at + length])
        at += length
        if data[at : at + 2] != b"\r\n":
            break
        at += 2
    raise LoadError(f"no whole chunked body: {data[at : at + 60]!r}")


def streamed_text(raw: bytes) -> str:
    """The text of a streamed answer, from the first byte of its head to the last of its body.

    Raises:
        LoadError: it is no stream that ended well.
    """
    head, _, body = raw.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200 ") or b"transfer-encoding: chunked" not in head.lower():
        raise LoadError(f"no stream: {raw[:_SHOWN_BYTES]!r}")
    events = dechunk(body).split(_EVENT_END)
    if events[-2:] != [b"data: [DONE]", b""]:
        raise LoadError(f"the stream ended with {events[-2:]!r}")
    text, finish = "", None
    for event in events[:-2]:
        for choice in _decode_event(event.removeprefix(b"data: ")).choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    if finish != "length":
        raise LoadError(f"the stream finished with {finish}")
    return text


class Tally:
    """What all streams have read so far, and what they wait for."""

    def __init__(self) -> None:
        self.tokens = 0
        self.single = 0
        self.begun = 0
        self.open = 0
        self.refused: bytes | None = None
        """The beginning of the first answer that was no stream."""
        self.changed = asyncio.Event()

    async def until(self, begun: int = 0, open_: int | None = None) -> None:
        """Wait until so many streams have begun, or only so many are open. Raises LoadError where one was refused."""
        async with asyncio.timeout(PATIENCE_S):
            while self.begun < begun or (open_ is not None and self.open > open_):
                if self.refused is not None:
                    raise LoadError(f"no stream: {self.refused!r}")
                self.changed.clear()
                await self.changed.wait()


class Stream(asyncio.Protocol):
    """One streamed request on a connection of its own."""

    def __init__(self, request: bytes, tally: Tally) -> None:
        self._request = request
        self._tally = tally
        self._tail = b""
        self.reads: list[bytes] = []
        self.sent_s = 0.0
        self.begun_s: float | None = None
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass of asyncio's
        self._tally.open += 1
        self.sent_s = time.perf_counter()
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self.reads and not data.startswith(b"HTTP/1.1 200 "):
            self._tally.refused = data[:_SHOWN_BYTES]
            self._tally.changed.set()
        self.reads.append(data)
        tally = self._tally
        tokens = data.count(_MARK)
        tally.tokens += tokens
        if tokens == 1:
            tally.single += 1
        if self.begun_s is None and tokens:
            self.begun_s = time.perf_counter()
            tally.begun += 1
            tally.changed.set()
        self._tail = data[-5:] if len(data) >= 5 else (self._tail + data)[-5:]
        if self._tail == _LAST_CHUNK:
            assert self.transport is not None
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._tally.open -= 1
        self._tally.changed.set()


class Exchange(asyncio.Protocol):
    """One connection that asks for whole answers, one after the other, for as long as `more` says."""

    def __init__(self, requests: RequestMaker, count: list[int], ended: asyncio.Future[None]) -> None:
        self._requests = requests
        self._count = count
        self._ended = ended
        self._buffer = bytearray()
        self.stopped = False
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._requests.make())

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        self._buffer += data
        head, found, body = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return
        try:
            if not head.startswith(b"HTTP/1.1 200 "):
                raise LoadError(f"no answer: {bytes(self._buffer[:_SHOWN_BYTES])!r}")
            _, named, rest = bytes(head).lower().partition(b"content-length:")
            if not named:
                raise LoadError(f"an answer without a length: {bytes(head)!r}")
            if len(body) < int(rest.partition(b"\r\n")[0]):
                return
            choice = _decode_whole(body).choices[0]
            text = choice.text if choice.message is None else choice.message.content
            if text != answer(1):
                raise LoadError(f"the answer is {text!r}")
        except (LoadError, msgspec.MsgspecError) as error:
            self._end(error)
            return
        self._buffer.clear()
        self._count[0] += 1
        if self.stopped:
            self._end(None)
        else:
            self._transport.write(self._requests.make())

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(LoadError(f"the connection ended: {exc}"))

    def _end(self, error: Exception | None) -> None:
        if not self._ended.done():
            if error is None:
                self._ended.set_result(None)
            else:
                self._ended.set_exception(error)
            assert self._transport is not None
            self._transport.close()


class RequestMaker:
    """Makes HTTP requests, each with a prompt of its own."""

    def __init__(self, load: Load, *, tokens: int, stream: bool, pretokenised: bool = False) -> None:
        self._draw = random.Random(load.seed)
        self._model = load.model
        self._tokens = tokens
        self._stream = stream
        self._pretokenised = pretokenised

    def make(self) -> bytes:
        body: dict[str, object] = {"model": self._model, "max_tokens": self._tokens, "stream": self._stream}
        if self._pretokenised:
            path, body["prompt"] = "/v1/completions", [self._draw.randrange(10, 1000) for _ in range(PROMPT_IDS)]
        else:
            words = " ".join(self._draw.choices(WORDS, k=PROMPT_WORDS))
            path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": words}]
        raw = msgspec.json.encode(body)
        head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        return f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw


class Meter:
    """Reads processor time: of processes, to the nanosecond, and of the machine."""

    def __init__(self, processes: Mapping[str, tuple[int, ...]]) -> None:
        self._processes = processes
        self._machine = psutil.cpu_times()
        self._cpu_s = self._read()
        self._wall_s = time.perf_counter()

    def _read(self) -> dict[str, float]:
        return {name: sum(map(process_cpu_s, pids)) for name, pids in self._processes.items()}

    def counted(self, done: int, single: int) -> Counted:
        """What passed since this was made."""
        wall_s = time.perf_counter() - self._wall_s
        cpu_s = {name: now - self._cpu_s[name] for name, now in self._read().items()}
        machine = psutil.cpu_times()
        passed = sum(machine) - sum(self._machine)
        idle = machine.idle + machine.iowait - self._machine.idle - self._machine.iowait
        return Counted(wall_s, done, single, cpu_s, max(0.0, idle / passed) if passed else 0.0)


def process_cpu_s(pid: int) -> float:
    """User and system time of all threads that a process has and had.

    By Linux's clock of that process (its number is made as in the kernel's include/linux/posix-timers.h): /proc gives
    hundredths of a second, which is too coarse for a few seconds of a small load.
    """
    return time.clock_gettime((~pid << 3) | 2)


async def _open(load: Load, streams: int, maker: RequestMaker, tally: Tally) -> list[Stream]:
    """Begin so many streams, one after the other, and wait until each has its first token."""
    loop, opened = asyncio.get_running_loop(), []
    for number in range(streams):
        port = load.ports[number % len(load.ports)]
        _, stream = await loop.create_connection(lambda: Stream(maker.make(), tally), "127.0.0.1", port)
        opened.append(stream)
        await asyncio.sleep(RAMP_S)
    await tally.until(begun=streams)
    return opened


async def _streams(load: Streams) -> Windows:
    ramp_s = load.streams * BEGIN_S
    tokens = round((ramp_s + load.warm_s + load.windows * WINDOW_S + SLACK_S) / STEP_S)
    tally = Tally()
    streams = await _open(load, load.streams, RequestMaker(load, tokens=tokens, stream=True), tally)
    await asyncio.sleep(load.warm_s)
    counted = []
    for _ in range(load.windows):
        meter, before, single = Meter(load.processes), tally.tokens, tally.single
        await asyncio.sleep(WINDOW_S)
        if tally.open < load.streams:  # on a busy machine all began so late that the first has ended
            break
        counted.append(meter.counted(tally.tokens - before, tally.single - single))
    await tally.until(open_=0)
    expected = answer(tokens)
    for stream in streams:
        if (text := streamed_text(b"".join(stream.reads))) != expected:
            raise LoadError(f"a stream said {text[:60]!r}… of {len(text)} characters, not {expected[:60]!r}…")
    return Windows(tuple(counted))


async def _requests(load: Requests) -> Counted:
    loop, count = asyncio.get_running_loop(), [0]
    maker = RequestMaker(load, tokens=1, stream=False, pretokenised=load.pretokenised)
    ended: list[asyncio.Future[None]] = [loop.create_future() for _ in range(load.concurrency)]
    exchanges = []
    for number, end in enumerate(ended):
        port = load.ports[number % len(load.ports)]
        _, exchange = await loop.create_connection(partial(Exchange, maker, count, end), "127.0.0.1", port)
        exchanges.append(exchange)
    await asyncio.sleep(load.warm_s)
    meter, before = Meter(load.processes), count[0]
    await asyncio.sleep(load.measure_s)
    counted = meter.counted(count[0] - before, 0)
    for exchange in exchanges:
        exchange.stopped = True
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*ended)
    return counted


async def _probes(load: Probes) -> Probed:
    loop, tally = asyncio.get_running_loop(), Tally()
    tokens = round((load.streams * BEGIN_S + load.warm_s + load.probes * 0.2 + PATIENCE_S) / STEP_S)
    background = await _open(load, load.streams, RequestMaker(load, tokens=tokens, stream=True), tally)
    await asyncio.sleep(load.warm_s)
    maker, ttft_ms = RequestMaker(load, tokens=PROBE_TOKENS, stream=True), []
    for number in range(load.probes):
        probing = Tally()
        port = load.ports[number % len(load.ports)]
        _, probe = await loop.create_connection(partial(Stream, maker.make(), probing), "127.0.0.1", port)
        await probing.until(begun=1, open_=0)
        if (text := streamed_text(b"".join(probe.reads))) != answer(PROBE_TOKENS):
            raise LoadError(f"a probe said {text!r}")
        assert probe.begun_s is not None
        ttft_ms.append((probe.begun_s - probe.sent_s) * 1000)
    if tally.open < load.streams:
        raise LoadError("a stream ended before the measurement did")
    for stream in background:
        assert stream.transport is not None
        stream.transport.abort()
    await tally.until(open_=0)
    return Probed(tuple(ttft_ms))


async def _open_streams(load: OpenStreams) -> Opened:
    def resident_bytes() -> int:
        return sum(psutil.Process(pid).memory_info().rss for pid in load.processes)

    maker, before = RequestMaker(load, tokens=PROBE_TOKENS, stream=True), 0
    for count in (FIRST_STREAMS, load.streams):
        before = resident_bytes()
        tally = Tally()
        streams = await _open(load, count, maker, tally)
        after = resident_bytes()
        if tally.open < count:
            raise LoadError(f"{count - tally.open} of {count} open streams ended")
        for stream in streams:
            assert stream.transport is not None
            stream.transport.abort()
        await tally.until(open_=0)
    return Opened(after - before)


async def answer_to(question: Question) -> Answer:
    """Do what is asked and say what was measured, or why it could not be."""
    try:
        match question:
            case Streams():
                return await _streams(question)
            case Requests():
                return await _requests(question)
            case Probes():
                return await _probes(question)
            case OpenStreams():
                return await _open_streams(question)
    except TimeoutError:
        return Failed(f"nothing came for {PATIENCE_S:.0f} s")
    except (LoadError, OSError, msgspec.MsgspecError) as error:
        return Failed(str(error))


async def run() -> None:
    allow_many_connections()
    decode = msgspec.json.Decoder(Question).decode
    while line := await asyncio.to_thread(sys.stdin.buffer.readline):
        say(await answer_to(decode(line)))


if __name__ == "__main__":
    uvloop.run(run())
