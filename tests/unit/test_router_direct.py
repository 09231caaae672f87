"""The short way of a token to its client: what is written past the response's task is what that task would have written.

Over the server's own protocol on a wire that the test holds in its hands, so that it stalls and breaks when it is told to.
What a client reads is taken apart by h11's client.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import h11
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from uvicorn.server import ServerState

from cluster.config import RouterConfig
from cluster.metrics import OTHER_TENANTS, SERVED, TOKENS_OUT
from cluster.model import ModelFolder
from cluster.types import FinishReason, Outcome, TokenDelta
from deployments.http_protocol import Connection
from deployments.http_server import uvicorn_config
from router import asgi
from router.app import build_app
from router.replies import ReplyWriter
from tests.unit.fake_replica import expected_text, piece
from tests.unit.http_kit import HI, TEXT, World

TOKENS = 200
"""More than any plan below has."""
STREAM = {**TEXT, "stream": True, "max_tokens": TOKENS}
CHAT_STREAM = {"model": TEXT["model"], "messages": HI, "stream": True, "max_tokens": TOKENS}


class Wire(asyncio.Transport):
    """The client's end of a connection, as the server's protocol sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.received = bytearray()
        self.closed = False
        self.protocol: Connection
        self.number = 0
        """Which of those that were sent out its request is."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.closed, "what was written is lost"
        self.received += data

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def get_extra_info(self, name: str, default: object = None) -> object:
        return {"sockname": ("127.0.0.1", 1), "peername": ("127.0.0.1", 2)}.get(name, default)

    def events(self) -> list[dict[str, Any]]:
        """The stream's events so far, of one answer whose client named no length."""
        body, _ = read_answer(bytes(self.received))
        return parsed(body)


@dataclass
class Side:
    """A router and a way to connect to it."""

    world: World
    connect: Callable[[], Wire]

    async def post(self, body: dict[str, Any], path: str = "/v1/completions", version: str = "1.1") -> Wire:
        """A connection whose request has been sent to the replica, and has had no token."""
        wire = self.connect()
        wire.number = len(self.world.replica.added)
        wire.protocol.data_received(request(body, path, version))
        await self.world.until(lambda: len(self.world.replica.added) > wire.number)
        return wire

    def send(self, number: int, index: int, *pieces: str, finish: FinishReason | None = None) -> None:
        """A frame with so many tokens of the `number`th request that was sent out."""
        sent, attempt = self.world.replica.added[number]
        if finish is not None:
            self.world.replica.forget(sent.request_id)
        self.world.replica.send(TokenDelta(sent.request_id, attempt, index, (7,) * len(pieces), pieces, finish))


def side(model: ModelFolder, *, direct: bool = True, **config: Any) -> Side:
    world = World(RouterConfig(silent_after_s=600, fenced_after_s=900, **config))
    app = build_app(
        pools=world.pools(model),
        config=world.config,
        registry=world.registry,
        cluster_status=world.cluster_status,
        drain=world.drain,
        rng=random.Random(2),
    )

    async def without(scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        await app({**scope, "extensions": {}}, receive, send)

    config_ = uvicorn_config(app if direct else without)
    config_.load()
    state, loop = ServerState(), asyncio.get_running_loop()

    def connect() -> Wire:
        wire = Wire()
        protocol_class = cast(Callable[..., Connection], config_.http_protocol_class)
        wire.protocol = protocol_class(config=config_, server_state=state, app_state={}, _loop=loop)
        wire.protocol.connection_made(wire)
        return wire

    world.replica.connect()
    return Side(world, connect)


def request(body: dict[str, Any], path: str = "/v1/completions", version: str = "1.1", head: str = "") -> bytes:
    raw = json.dumps(body).encode()
    return f"POST {path} HTTP/{version}\r\nhost: x\r\n{head}content-length: {len(raw)}\r\n\r\n".encode() + raw


def read_answer(data: bytes, method: str = "POST") -> tuple[bytes, bytes]:
    """(the body, what follows the answer). Raises h11.RemoteProtocolError where it is no HTTP."""
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method=method, target="/", headers=[("host", "x"), ("content-length", "0")]))
    client.send(h11.EndOfMessage())
    if data:  # none is the connection's end to h11
        client.receive_data(data)
    body = bytearray()
    while True:
        event = client.next_event()
        if isinstance(event, h11.Data):
            body += event.data
        elif event is h11.NEED_DATA or isinstance(event, h11.EndOfMessage):
            return bytes(body), client.trailing_data[0]


def parsed(body: bytes) -> list[dict[str, Any]]:
    """Each event of a stream, whole; the end mark is left out."""
    assert not body or body.endswith(b"\n\n"), body[-80:]
    events = [event.removeprefix(b"data: ") for event in body.split(b"\n\n")[:-1]]
    return [json.loads(event) for event in events if event != b"[DONE]"]


def said(events: list[dict[str, Any]]) -> str:
    return "".join(choice["text"] for event in events for choice in event["choices"])


async def settled() -> None:
    """Until every task has done all that it can: none of them waits for more than a few turns of the loop."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_token_is_on_the_wire_in_the_next_pass_of_the_event_loop(tiny_model: ModelFolder) -> None:
    one = side(tiny_model)
    wire = await one.post(STREAM)
    one.send(0, 0, "a")
    await settled()
    for index in range(1, 50):
        one.send(0, index, f" {index}")
        await asyncio.sleep(0)
        assert wire.events()[-1]["choices"][0]["text"] == f" {index}"


async def test_tokens_of_one_pass_leave_in_their_order_and_one_who_leaves_meanwhile_costs_no_other(
    tiny_model: ModelFolder,
) -> None:
    one = side(tiny_model)
    wires = [await one.post(STREAM) for _ in range(3)]
    for number in range(3):
        one.send(number, 0, "a")
    await settled()
    for index in (1, 2):
        for number in range(3):
            one.send(number, index, f" {index}")
    before = bytes(wires[1].received)
    wires[1].close()
    one.send(0, 3, " end", finish=FinishReason.STOP)
    await settled()
    assert [said(wires[number].events()) for number in (0, 2)] == ["a 1 2 end", "a 1 2"]
    assert bytes(wires[1].received) == before


async def test_token_is_not_written_past_what_has_been_taken_and_not_written(tiny_model: ModelFolder) -> None:
    one = side(tiny_model)
    wire = await one.post(STREAM)
    text = ""
    for index in range(100):
        one.send(0, index, f" {index}")
        text += f" {index}"
        for _ in range(index % 4):  # so that the task is met in each of its states
            await asyncio.sleep(0)
    await settled()
    assert said(wire.events()) == text


Step = tuple[str, Any]
PIECES = st.text(st.sampled_from('ab\n"\\é水😀\r\x00\x1f'), max_size=5)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("tokens"), st.lists(PIECES, min_size=1, max_size=3)),
        st.tuples(st.just("turns"), st.integers(1, 6)),
        st.tuples(st.just("stall"), st.just(None)),
        st.tuples(st.just("flow"), st.just(None)),
    ),
    max_size=40,
)


async def play(one: Side, steps: list[Step], *, cut: bool = False, settle: bool = False) -> tuple[str, Wire]:
    """Send tokens over a wire that stalls and flows; `cut`: the client leaves at the end, else the answer ends."""
    wire, text, index, stalled = await one.post(STREAM), "", 0, False
    for kind, what in steps:
        match kind:
            case "tokens":
                one.send(wire.number, index, *what)
                text, index = text + "".join(what), index + len(what)
            case "turns":
                for _ in range(what):
                    await asyncio.sleep(0)
            case "stall" if not stalled:
                wire.protocol.pause_writing()
                stalled = True
            case "flow" if stalled:
                wire.protocol.resume_writing()
                stalled = False
        if settle:
            await settled()
    if cut:
        wire.closed = True
        wire.protocol.connection_lost(None)
    else:
        one.send(wire.number, index, "end", finish=FinishReason.STOP)
        text += "end"
        if stalled:
            wire.protocol.resume_writing()
    await settled()
    return text, wire


def holds(model: ModelFolder, law: Callable[[Side, list[Step]], Awaitable[None]], examples: int = 60) -> None:
    """Whether a law holds of any steps, on one router."""
    with asyncio.Runner() as runner:
        one = runner.run(made(model))

        @settings(max_examples=examples, deadline=None)
        @given(steps=STEPS)
        def check(steps: list[Step]) -> None:
            runner.run(cast(Coroutine[Any, Any, None], law(one, steps)))

        check()


async def made(model: ModelFolder, **how: Any) -> Side:
    return side(model, **how)


def test_body_is_the_text_of_all_tokens_in_whole_events_whatever_stalls(tiny_model: ModelFolder) -> None:
    async def law(one: Side, steps: list[Step]) -> None:
        text, wire = await play(one, steps)
        body, rest = read_answer(bytes(wire.received))
        assert said(parsed(body)) == text
        assert body.endswith(b"data: [DONE]\n\n")
        assert rest == b""

    holds(tiny_model, law)


def test_wire_carries_the_same_bytes_either_way(tiny_model: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the task has time for each token. The id and the time, which differ from one run to the next, are fixed."""
    monkeypatch.setattr("secrets.token_hex", lambda count: "0" * 2 * count)
    monkeypatch.setattr("cluster.clock.time.time", lambda: 1_700_000_000.0)
    others: list[Side] = []

    async def law(one: Side, steps: list[Step]) -> None:
        if not others:
            others.append(side(tiny_model, direct=False))
        _, directly = await play(one, steps, settle=True)
        _, by_task = await play(others[0], steps, settle=True)
        assert directly.received == by_task.received

    holds(tiny_model, law)


def test_client_that_leaves_has_read_a_beginning_and_its_request_is_cancelled(tiny_model: ModelFolder) -> None:
    async def law(one: Side, steps: list[Step]) -> None:
        cancelled = one.world.ended(Outcome.CANCELLED)
        text, wire = await play(one, steps, cut=True)
        assert text.startswith(said(wire.events()))
        (sent, attempt) = one.world.replica.added[wire.number]
        assert one.world.replica.aborted[-1] == (sent.request_id, attempt)
        assert one.world.ended(Outcome.CANCELLED) == cancelled + 1

    holds(tiny_model, law)


async def test_nothing_is_written_to_a_client_that_has_left_though_nobody_has_noticed_yet(
    tiny_model: ModelFolder,
) -> None:
    one = side(tiny_model)
    wire = await one.post(STREAM)
    one.send(0, 0, "a")
    await settled()
    wire.closed = True
    one.send(0, 1, "b")  # Wire refuses what is written now
    wire.protocol.connection_lost(ConnectionResetError())
    one.send(0, 2, "c")
    await settled()
    assert said(wire.events()) == "a"
    assert one.world.ended(Outcome.CANCELLED) == 1


async def test_stalled_client_holds_no_more_than_its_bound_and_is_ended_alone(tiny_model: ModelFolder) -> None:
    bound = 2**16
    one = side(tiny_model, max_stream_bytes=bound)
    slow, quick = await one.post(STREAM), await one.post(STREAM)
    for number in (0, 1):
        one.send(number, 0, "a")
    await settled()
    slow.protocol.pause_writing()
    written, index = len(slow.received), 1
    while not one.world.ended(Outcome.SLOW_CLIENT):
        assert index * 1000 <= 2 * bound, "it was held without an end"  # one batch taken and not written, one held
        one.send(0, index, "x" * 1000)
        one.send(1, index, "y" * 1000)
        index += 1
        if index % 7 == 0:
            await settled()
    assert len(slow.received) == written
    assert [request_id for request_id, _ in one.world.replica.aborted] == [one.world.replica.added[0][0].request_id]
    one.send(1, index, "end", finish=FinishReason.STOP)
    await settled()
    assert said(quick.events()) == "a" + "y" * 1000 * (index - 1) + "end"
    slow.protocol.resume_writing()
    await settled()
    assert slow.events()[-1]["error"]["code"] == "slow_client"


async def test_pipelined_request_is_answered_behind_the_stream_before_it(tiny_model: ModelFolder) -> None:
    one = side(tiny_model)
    wire = one.connect()
    wire.protocol.data_received(request(STREAM) + request(STREAM) + request({**TEXT, "max_tokens": 1}))
    text = []
    for number in range(2):
        await one.world.until(lambda number=number: len(one.world.replica.added) > number)  # type: ignore[misc]
        for index in range(20):
            one.send(number, index, f" {number}/{index}")
            await asyncio.sleep(0)
        one.send(number, 20, "", finish=FinishReason.STOP)
        text.append("".join(f" {number}/{index}" for index in range(20)))
    await one.world.until(lambda: len(one.world.replica.added) > 2)
    one.send(2, 0, "last", finish=FinishReason.LENGTH)
    await settled()
    first, rest = read_answer(bytes(wire.received))
    second, rest = read_answer(rest)
    third, rest = read_answer(rest)
    assert [said(parsed(first)), said(parsed(second))] == text
    assert json.loads(third)["choices"][0]["text"] == "last"
    assert rest == b""
    assert not wire.closed


async def test_client_of_http_1_0_gets_the_body_as_it_is_and_the_end_of_the_connection(tiny_model: ModelFolder) -> None:
    one = side(tiny_model)
    wire = await one.post(STREAM, version="1.0")
    for index in range(30):
        one.send(0, index, f" {index}")
        await asyncio.sleep(0)
    one.send(0, 30, "", finish=FinishReason.STOP)
    await settled()
    head, _, body = bytes(wire.received).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert said(parsed(body)) == "".join(f" {index}" for index in range(30))
    assert wire.closed


@pytest.mark.parametrize("more", [{"n": 2}, {"logprobs": 0}, {"echo": True}], ids=["choices", "logprobs", "echo"])
async def test_answer_that_is_more_than_one_text_is_whole(tiny_model: ModelFolder, more: dict[str, Any]) -> None:
    one = side(tiny_model)
    wire = await one.post({**STREAM, **more, "max_tokens": 40})
    while one.world.replica.held:
        one.world.replica.turn()
        await asyncio.sleep(0)
    await settled()
    texts: dict[int, str] = {}
    for event in wire.events():
        for choice in event["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    sent = [request for request, _ in one.world.replica.added]
    before = "hello" if "echo" in more else ""
    assert [texts[k] for k in range(len(sent))] == [before + expected_text(request) for request in sent]


async def test_chat_says_who_speaks_first_and_then_each_token(tiny_model: ModelFolder) -> None:
    one = side(tiny_model)
    wire = await one.post(CHAT_STREAM, "/v1/chat/completions")
    for index in range(5):
        one.send(0, index, piece(index))
        await settled()
    deltas = [event["choices"][0]["delta"] for event in wire.events()]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert [delta["content"] for delta in deltas[1:]] == [piece(index) for index in range(5)]


async def test_half_a_character_is_no_empty_chunk_which_would_end_the_body(tiny_model: ModelFolder) -> None:
    one = side(tiny_model)
    wire = await one.post(STREAM)
    for index, text in enumerate(("a", "", "", "水", "")):
        one.send(0, index, text)
        await settled()
    assert said(wire.events()) == "a水"
    assert b"\r\n0\r\n" not in wire.received


async def test_frame_s_tokens_count_alike_whether_steady_or_not(tiny_model: ModelFolder) -> None:
    """Singly they are steady from the second on; in pairs none is."""
    counted = []
    for pairs in (False, True):
        one = side(tiny_model)
        await one.post(STREAM)
        for index in range(0, 100, 2):
            if pairs:
                one.send(0, index, "a", "b")
            else:
                one.send(0, index, "a")
                one.send(0, index + 1, "b")
        one.send(0, 100, "", finish=FinishReason.STOP)
        labels = {"priority_class": "standard"}
        sent = one.world.replica.added[0][0]
        explanation = one.world.core.explain(sent.request_id, sent.tenant)
        assert explanation is not None
        tokens = one.world.registry.get_sample_value(f"{TOKENS_OUT.name}_total", labels)
        served = one.world.registry.get_sample_value(f"{SERVED.name}_total", {"tenant": OTHER_TENANTS})
        counted.append((tokens, explanation.output_tokens, served))
    assert counted[0] == counted[1]
    assert counted[0][:2] == (101.0, 101)


@pytest.mark.parametrize("begun", [False, True], ids=["before its head", "within its stream"])
async def test_bug_of_ours_is_answered_in_the_one_form_where_it_still_can_be(
    tiny_model: ModelFolder, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    def broken(*_: object) -> NoReturn:
        raise RuntimeError("a secret of ours")

    one = side(tiny_model, direct=not begun)
    wire = one.connect()
    if begun:
        wire.protocol.data_received(request(STREAM))
        await one.world.until(lambda: one.world.replica.added)
        one.send(0, 0, "a")
        await settled()
        monkeypatch.setattr(ReplyWriter, "events", broken)
        one.send(0, 1, "b")
        await settled()
        assert wire.closed
        assert b"200 OK" in wire.received
        assert one.world.replica.aborted == [(one.world.replica.added[0][0].request_id, 1)]
    else:
        monkeypatch.setattr(one.world.core, "submit", broken)
        wire.protocol.data_received(request(STREAM))
        await settled()
        body, _ = read_answer(bytes(wire.received))
        assert wire.received.startswith(b"HTTP/1.1 500 ")
        assert json.loads(body)["error"] | {"message": ""} == {
            "message": "", "type": "server_error", "param": None, "code": "internal_error",
        }  # fmt: skip
    assert b"secret" not in wire.received
