"""A router that leaves loses no request and no stream, and a replica that leaves hands back what it does not finish.

Raw sockets where the end of a connection is what matters.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.clock import SystemClock
from cluster.config import EngineConfig
from cluster.engine.runner import EngineRunner
from cluster.metrics import CONTINUED, IN_FLIGHT, QUEUED
from cluster.model import ModelFolder
from cluster.ports import EnginePort
from deployments.checks import free_ports
from deployments.listener import LINGER_S, stand_by_for_port, take_port
from deployments.settings import Profile
from tests.e2e.conftest import STEP_S
from tests.line import Line, running_line, until
from tests.padded import PaddedBackend, engine_over
from tests.ray.streams import Reader, body

NOTICE_S = 1.0
GRACE_S = 4.0

Start = Callable[..., AbstractAsyncContextManager[Line]]


@pytest.fixture
def start(tiny_model: ModelFolder, tmp_path: Path) -> Start:
    """A line of two replicas whose steps take 60 ms, with these settings."""

    def make(
        *, notice_s: float = 0, drain_timeout_s: float = 60, hand_back_after_s: float = 30, slots: int = 32
    ) -> AbstractAsyncContextManager[Line]:
        profile = Profile.model_validate(
            {
                "engine": {"slots": slots, "step_token_budget": 64, "blocks": 1024, "max_model_len": 1024},
                "router": {"drain_notice_s": notice_s},
                "health": {"drain_timeout_s": drain_timeout_s, "hand_back_after_s": hand_back_after_s},
            }
        )
        return running_line(tiny_model, profile, tmp_path, partial(_padded_engine, profile.models[0].engine))

    return make


def _padded_engine(config: EngineConfig, model: ModelFolder) -> EnginePort:
    from cluster.engine.torch.backend import TorchBackend

    return EngineRunner(engine_over(PaddedBackend(TorchBackend(model, config), STEP_S), model, config), SystemClock())


class Wire:
    """One connection to a router, and what came on it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, fields: dict[str, Any]) -> None:
        self._writer.write(posted(fields))

    async def head(self) -> tuple[int, dict[str, str]]:
        lines = (await asyncio.wait_for(self._reader.readuntil(b"\r\n\r\n"), 20)).decode().lower().split("\r\n")
        return int(lines[0].split()[1]), dict(one.split(": ", 1) for one in lines[1:] if one)

    async def answer(self) -> tuple[int, dict[str, str], Any]:
        """One whole answer: (status, headers, JSON)."""
        status, headers = await self.head()
        return status, headers, json.loads(await self._reader.readexactly(int(headers["content-length"])))

    async def stream(self) -> list[Any]:
        """What is left of a streamed answer, as its events; the connection stays where it is."""
        events: list[Any] = []
        while size := int(await asyncio.wait_for(self._reader.readline(), 20), 16):
            chunk = (await self._reader.readexactly(size + 2))[:-2]
            said = [one.removeprefix("data: ") for one in chunk.decode().split("\n\n") if one]
            events += [json.loads(data) for data in said if data != "[DONE]"]
        await self._reader.readexactly(2)
        return events

    async def ended(self) -> bytes:
        """What comes until the router closes the connection."""
        return await asyncio.wait_for(self._reader.read(), 20)


Open = Callable[[socket.socket], Awaitable[Wire]]
Connect = Callable[[Line], Awaitable[Wire]]


@pytest.fixture
async def open_wire() -> AsyncIterator[Open]:
    """A connection that was made, as a Wire that the test need not close."""
    writers: list[asyncio.StreamWriter] = []

    async def opened(sock: socket.socket) -> Wire:
        reader, writer = await asyncio.open_connection(sock=sock)
        writers.append(writer)
        return Wire(reader, writer)

    yield opened
    for writer in writers:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


@pytest.fixture
async def connect(open_wire: Open) -> Connect:
    return lambda line: open_wire(socket.create_connection(address(line)))


def address(line: Line) -> tuple[str, int]:
    host, port = line.url.removeprefix("http://").split(":")
    return host, int(port)


def posted(fields: dict[str, Any]) -> bytes:
    payload = json.dumps(body(**fields)).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(payload)}\r\n\r\n"
    return head.encode() + payload


WHOLE = {"stream": False, "max_tokens": 3}


@asynccontextmanager
async def draining(line: Line) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(line.router.drain())
    await asyncio.sleep(0)
    yield task
    await task


async def test_a_router_that_leaves_is_not_ready_at_once_and_serves_on_for_the_notice_with_last_answers(
    start: Start, connect: Connect
) -> None:
    async with start(notice_s=NOTICE_S) as line:
        kept, waiting = await connect(line), await connect(line)
        kept.send(WHOLE)
        status, headers, before = await kept.answer()
        assert (status, "connection" in headers) == (200, False)
        waiting.send(WHOLE | {"max_tokens": 8})
        await until(lambda: line.metric(IN_FLIGHT), lambda n: n == 1)
        began_s = time.monotonic()
        async with draining(line) as drain, httpx.AsyncClient(base_url=line.url) as fresh:
            ready = await fresh.get("/ready")
            assert (ready.status_code, ready.headers["connection"]) == (503, "close")
            assert ready.json()["error"]["code"] == "not_ready"
            kept.send(WHOLE)
            status, headers, answer = await kept.answer()
            assert (status, headers["connection"]) == (200, "close")
            assert answer["choices"] == before["choices"]
            assert await kept.ended() == b""
            new = await fresh.post("/v1/completions", json=body(**WHOLE))
            assert (new.status_code, new.headers["connection"]) == (200, "close")
            status, headers, _ = await waiting.answer()  # which had been asked for before
            assert (status, headers["connection"]) == (200, "close")
            assert not drain.done()
        assert NOTICE_S <= time.monotonic() - began_s < NOTICE_S + LINGER_S + 5
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address(line))


async def test_connections_that_the_kernel_made_and_nobody_has_accepted_are_served(
    start: Start, open_wire: Open
) -> None:
    """They are made while the router's loop stands still, so that all of them wait as it closes its listener."""
    async with start() as line:
        made = [socket.create_connection(address(line)) for _ in range(100)]
        for sock in made:
            sock.sendall(posted(WHOLE))
        async with draining(line):
            answers = [await (await open_wire(sock)).answer() for sock in made]
        assert [(status, headers["connection"]) for status, headers, _ in answers] == [(200, "close")] * 100


async def test_a_stream_that_runs_as_the_router_leaves_is_whole_and_the_next_request_on_its_connection_too(
    start: Start, connect: Connect
) -> None:
    """Its head had left without a word of an end, so that its client may ask again there."""
    async with start() as line:
        wire = await connect(line)
        wire.send({"max_tokens": 20})
        status, headers = await wire.head()
        assert (status, "connection" in headers) == (200, False)
        async with draining(line) as drain:
            events = await wire.stream()
            assert [e["choices"][0]["finish_reason"] for e in events][-1] == "length"
            wire.send(WHOLE)
            status, headers, _ = await wire.answer()
            assert (status, headers["connection"]) == (200, "close")
            assert await wire.ended() == b""
            await asyncio.wait_for(drain, LINGER_S + 4)


async def test_a_connection_that_stays_quiet_is_closed_and_holds_nobody_up(start: Start, connect: Connect) -> None:
    async with start() as line:
        used, unused = await connect(line), await connect(line)
        used.send(WHOLE)
        await used.answer()
        async with draining(line) as drain:
            assert [await used.ended(), await unused.ended()] == [b"", b""]
            await asyncio.wait_for(drain, 5)


async def test_at_the_end_of_the_grace_time_each_is_told_and_no_replica_works_on(start: Start) -> None:
    """Two run, one waits; none would end in time."""
    async with start(drain_timeout_s=GRACE_S, slots=1) as line:
        readers = [Reader(line.client, body(max_tokens=900)) for _ in range(2)]
        await asyncio.gather(*(reader.begun.wait() for reader in readers))
        queued = asyncio.create_task(line.client.post("/v1/completions", json=body(max_tokens=900)))
        await until(lambda: line.metric(QUEUED), lambda n: n == 1)
        began_s = time.monotonic()
        async with draining(line):
            await asyncio.gather(*(reader.task for reader in readers))
        assert time.monotonic() - began_s < GRACE_S + 1
        assert [(len(r.errors), r.done) for r in readers] == [(1, False)] * 2
        assert {reader.errors[0]["error"]["code"] for reader in readers} == {"shut_down"}
        refused = await queued
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")

        async def used() -> list[int]:
            return line.blocks_used()

        await until(used, lambda blocks: not any(blocks), within_s=2)


@pytest.mark.parametrize(("hand_back_after_s", "free_slots"), [(0.0, 28), (0.5, 0)])
async def test_a_replica_that_leaves_hands_back_what_no_other_has_room_for_in_time_and_each_stream_is_whole(
    start: Start, hand_back_after_s: float, free_slots: int
) -> None:
    async with start(hand_back_after_s=hand_back_after_s, slots=4 + free_slots) as line:
        undisturbed = Reader(line.client, body(max_tokens=30))
        await undisturbed.task
        readers = [Reader(line.client, body(max_tokens=30)) for _ in range(8)]
        await asyncio.gather(*(reader.begun.wait() for reader in readers))
        assert all(line.blocks_used())
        began_s = time.monotonic()
        await line.replicas[0].drain()
        assert time.monotonic() - began_s < hand_back_after_s + 3
        await line.replicas[0].close()
        assert await line.metric(CONTINUED) == await line.metric(CONTINUED, reason="draining") == 4
        await asyncio.gather(*(reader.task for reader in readers))
        assert [(r.errors, r.done, r.text == undisturbed.text) for r in readers] == [([], True, True)] * 8


@pytest.mark.parametrize("named", ["replica-0", "127.0.0.1"])
async def test_who_is_ordered_to_drain_is_emptied_and_no_stream_is_cut_until_that_is_taken_back(
    start: Start, named: str
) -> None:
    """The host has both replicas: then what is handed back waits for one of them, and what is new is refused."""
    async with start(hand_back_after_s=0.3) as line:
        meant = ["replica-0", "replica-1"] if named == "127.0.0.1" else [named]

        async def used() -> list[int]:
            return line.blocks_used()[: len(meant)]

        undisturbed = Reader(line.client, body(max_tokens=30))
        await undisturbed.task
        readers = [Reader(line.client, body(max_tokens=30)) for _ in range(8)]
        await asyncio.gather(*(reader.begun.wait() for reader in readers))
        assert all(line.blocks_used())
        told = await line.client.put(f"/drain/{named}")
        assert (told.status_code, told.json()) == (200, {"draining": True, "replica_ids": meant})
        await until(used, lambda blocks: not any(blocks), within_s=5)
        late = [Reader(line.client, body(max_tokens=30)) for _ in range(4 if len(meant) == 1 else 0)]
        await until(line.ready_replicas, (2.0 - len(meant)).__eq__)
        assert not any(await used())
        await line.client.put(f"/drain/{named}")  # again changes nothing
        assert (await line.client.delete(f"/drain/{named}")).status_code == 200
        await until(line.ready_replicas, (2.0).__eq__)
        await asyncio.gather(*(reader.task for reader in (*readers, *late)))
        assert [(r.errors, r.done, r.text == undisturbed.text) for r in (*readers, *late)] == [([], True, True)] * (
            8 + len(late)
        )


# --- ports ---


async def test_routers_of_one_machine_have_ports_in_turn_and_one_that_leaves_waits_for_who_stands_by() -> None:
    first = free_ports("127.0.0.1", 2)
    ports = ("127.0.0.1", first, 2)
    old = [take_port(*ports), take_port(*ports)]
    assert [port and port.number for port in old] == [first, first + 1]
    assert take_port(*ports) is None
    coming = asyncio.create_task(stand_by_for_port(*ports))
    await asyncio.sleep(0)
    assert old[1] is not None
    await old[1].give_up()
    assert take_port(*ports) is None, "it has been handed over already"
    new = await asyncio.wait_for(coming, 1)
    assert new.number == first + 1
    assert old[0] is not None
    await asyncio.wait_for(old[0].give_up(), 0.01)  # nobody stands by
    for port in (old[0], old[1], new):
        port.sock.close()
    await new.give_up()


async def test_a_port_of_somebody_else_is_refused_and_not_kept() -> None:
    ports = ("127.0.0.1", free_ports("127.0.0.1", 1), 1)
    with socket.socket() as other:
        other.bind(ports[:2])
        with pytest.raises(OSError, match="Address already in use"):
            take_port(*ports)
    port = take_port(*ports)
    assert port is not None
    port.sock.close()
    await port.give_up()
