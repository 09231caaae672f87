"""`python -m deployments.jobs.batch` as a process: against the line with real engines, and against an endpoint that misbehaves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.types import Message, Receive, Scope, Send

from cluster.clock import SystemClock
from cluster.metrics import IN_FLIGHT, QUEUED, REQUESTS
from deployments.jobs import sender as sending
from deployments.jobs.endpoint import Routers
from deployments.jobs.lines import Ask
from deployments.jobs.pace import Gate, Pace
from deployments.jobs.sender import Sender, SendSettings
from deployments.settings import UsageError
from tests.line import Line, until

LIMIT_S = 60.0
Told = tuple[int, dict[str, str], Any]
"""A status, headers and a body."""
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def asked(number: int, **changes: Any) -> dict[str, Any]:
    body = {"model": "tiny-llama", "prompt": f"line {number}", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    return {"custom_id": f"line-{number}", "method": "POST", "url": COMPLETIONS, "body": body | changes}


def write_lines(path: Path, lines: Sequence[dict[str, Any] | str]) -> None:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def answered_once(output: Path, lines: int) -> list[dict[str, Any]]:
    """All answers, by the law that every line of the input has one."""
    answers = read_lines(output)
    assert len(answers) == lines
    assert len({answer["id"] for answer in answers}) == lines
    return answers


class Batch:
    """The job in a folder of its own, started again and again. in.jsonl and out.jsonl are its files."""

    def __init__(self, folder: Path, url: str, *options: str) -> None:
        self.input, self.output = folder / "in.jsonl", folder / "out.jsonl"
        self._command = [
            *(sys.executable, "-m", "deployments.jobs.batch", "--url", url),
            *("--input", str(self.input), "--output", str(self.output), *options),
        ]
        self.said = ""

    async def start(self, *more: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *self._command,
            *more,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={name: value for name, value in os.environ.items() if name != "FOREBAY_URL"},
        )

    async def end(self, process: asyncio.subprocess.Process) -> int:
        """Its exit code; `said` is what it printed."""
        async with asyncio.timeout(LIMIT_S):
            said, _ = await process.communicate()
        self.said = said.decode()
        assert process.returncode is not None
        return process.returncode

    async def run(self, *more: str) -> int:
        return await self.end(await self.start(*more))

    def answered(self) -> int:
        return self.output.read_bytes().count(b"\n") if self.output.exists() else 0


async def test_a_batch_is_answered_at_batch_priority_and_what_cannot_be_sent_is_answered_with_why(
    line: Line, tmp_path: Path
) -> None:
    batch = Batch(tmp_path, line.url, "--json")
    chat = {"model": "tiny-llama", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    bad: list[dict[str, Any] | str] = [
        "no json",
        {"method": "POST", "url": COMPLETIONS, "body": {}},
        asked(0),
        asked(101, stream=True),
        asked(102) | {"url": "/v1/embeddings"},
        asked(103) | {"method": "GET"},
        asked(104, model="other"),
        asked(105, temperature=9),
    ]
    write_lines(batch.input, [*map(asked, range(40)), asked(100) | {"url": CHAT, "body": chat}, "", *bad])
    assert await batch.run() == 1, batch.said
    answers = answered_once(batch.output, 49)
    served = [a for a in answers if a["response"] and a["response"]["status_code"] == 200]
    assert {a["custom_id"] for a in served} == {f"line-{n}" for n in (*range(40), 100)}
    for answer in served:
        assert answer["error"] is None
        body = answer["response"]["body"]
        assert answer["response"]["request_id"] == body["id"]
        assert body["usage"]["completion_tokens"] == (4 if answer["custom_id"] == "line-100" else 8)
    refused = {a["custom_id"]: a["response"] for a in answers if a["response"] and a["response"]["status_code"] != 200}
    assert {name: told["status_code"] for name, told in refused.items()} == {"line-104": 404, "line-105": 400}
    assert "temperature" in refused["line-105"]["body"]["error"]["param"]
    assert Counter(a["error"]["code"] for a in answers if a["error"]) == {
        "invalid_json_line": 1,
        "missing_required_parameter": 1,
        "duplicate_custom_id": 1,
        "invalid_request": 1,
        "invalid_url": 1,
        "invalid_method": 1,
    }
    assert await line.metric(REQUESTS, priority_class="batch") == 41
    assert await line.metric(REQUESTS) == 41
    told = json.loads(batch.said.splitlines()[-1])
    assert (told["lines"], told["done"], told["failed"], told["output_tokens"]) == (49, 49, 8, 324)

    before = batch.output.read_bytes()
    assert await batch.run() == 1
    assert batch.output.read_bytes() == before
    assert await line.metric(REQUESTS) == 41


class Misbehaving:
    """An endpoint of the same wire that answers as a test says: `behave(custom_id, tries)` is a status, headers and a body,
    JSON or bytes as they are, or None for a connection that is cut within its answer. It gives up what its client has left,
    as the router does."""

    def __init__(self, behave: Callable[[str, int], Told | None], took_s: float = 0.0) -> None:
        self._behave = behave
        self.took_s = took_s
        self.models: Told | None = None
        """What it says at /v1/models instead of an empty list."""
        self.asked: list[str] = []
        """Of each request, in the order that they came, the name of its answer."""
        self.tries: Counter[str] = Counter()
        self.in_flight: set[str] = set()
        self.in_flight_max = 0
        self.at_once: list[str] = []
        """Those that came while the same was in flight."""
        self.left = 0
        """Requests whose clients did not wait for the answer."""
        self.url = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        if scope["path"] == "/v1/models":
            status = 401 if headers.get("authorization") == "Bearer wrong" else 200
            told: Told = (status, {}, {"data": [], "error": {"message": "no such key."}})
            await _reply(send, *(self.models or told))
            return
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        assert headers["x-llm-d-inference-objective"] == "batch"
        name, custom_id = headers["x-request-id"], json.loads(body)["prompt"]
        self.asked.append(name)
        self.tries[custom_id] += 1
        if name in self.in_flight:
            self.at_once.append(name)
        self.in_flight.add(name)
        self.in_flight_max = max(self.in_flight_max, len(self.in_flight))
        try:
            if await _leaves_within(receive, self.took_s):
                self.left += 1
                return
        finally:
            self.in_flight.discard(name)
        behaviour = self._behave(custom_id, self.tries[custom_id])
        if behaviour is None:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"100")]})
            await send({"type": "http.response.body", "body": b"{", "more_body": True})
            return
        await _reply(send, *behaviour)


async def _leaves_within(receive: Callable[[], Awaitable[Message]], seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            return bool((await receive())["type"] == "http.disconnect")
    except TimeoutError:
        return False


async def _reply(send: Send, status: int, headers: dict[str, str], body: Any) -> None:
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body if isinstance(body, bytes) else json.dumps(body).encode()})


def fine(custom_id: str, tries: int) -> Told:
    return 200, {}, {"id": f"cmpl-{custom_id}", "usage": {"completion_tokens": 1}}


@contextlib.asynccontextmanager
async def serving(endpoint: Misbehaving, at: socket.socket | None = None) -> AsyncIterator[Misbehaving]:
    """At a port of its own, or the one that `held_port` holds."""
    server = uvicorn.Server(uvicorn.Config(endpoint, port=0, log_level="critical", lifespan="off"))
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    running = asyncio.create_task(server.serve(None if at is None else [beside(at)]))
    try:
        while not server.started:
            assert not running.done()
            await asyncio.sleep(0.01)
        endpoint.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        yield endpoint
    finally:
        server.should_exit = True
        await running


@contextlib.contextmanager
def held_port() -> Iterator[socket.socket]:
    """Nobody else gets it while servers of the test come and go there (`beside`); without one, who connects is refused."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        yield held


def beside(held: socket.socket) -> socket.socket:
    """Another at the same port, that may listen."""
    another = socket.socket()
    another.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    another.bind(held.getsockname())
    return another


def short(number: int) -> dict[str, Any]:
    """Its prompt is its custom_id, by which a Misbehaving knows it."""
    return asked(number, prompt=f"line-{number}")


async def test_a_job_killed_at_any_moment_sends_no_finished_line_again_and_none_twice_at_once(tmp_path: Path) -> None:
    rng = random.Random(7)
    async with serving(Misbehaving(fine, took_s=0.05)) as endpoint:
        batch = Batch(tmp_path, endpoint.url, "--concurrency-max", "16")
        write_lines(batch.input, [short(number) for number in range(400)])

        async def answered() -> int:
            return batch.answered()

        for _ in range(3):
            finished = set(ids_of(batch.output))
            sent = len(endpoint.asked)
            process = await batch.start()
            await until(answered, (len(finished) + rng.randrange(20, 100)).__le__)
            process.kill()
            await batch.end(process)
            assert not finished & set(endpoint.asked[sent:])
        finished, sent = set(ids_of(batch.output)), len(endpoint.asked)
        assert await batch.run() == 0, batch.said
        assert len(endpoint.asked) - sent == 400 - len(finished)
    answered_once(batch.output, 400)
    assert endpoint.at_once == []
    assert 4 < endpoint.in_flight_max <= 16
    assert len(endpoint.asked) <= 400 + 3 * 16


def ids_of(output: Path) -> list[str]:
    """Of its whole lines."""
    content = output.read_bytes() if output.exists() else b""
    return [json.loads(line)["id"] for line in content[: content.rfind(b"\n") + 1].splitlines()]


async def test_a_storm_of_refusals_costs_few_requests_and_no_line(tmp_path: Path) -> None:
    refused: list[str] = []

    def storm(custom_id: str, tries: int) -> Told:
        # All at first, then two in a row now and then: whoever comes.
        if len(refused) < 8 or (len(endpoint.asked) % 60 < 2 and len(refused) < 14):
            refused.append(custom_id)
            return 429 if len(refused) % 2 else 503, {"retry-after": "1"}, {"error": {"message": "full"}}
        return fine(custom_id, tries)

    endpoint = Misbehaving(storm)
    async with serving(endpoint):
        batch = Batch(tmp_path, endpoint.url, "--json")
        write_lines(batch.input, [short(number) for number in range(200)])
        assert await batch.run() == 0, batch.said
    answered_once(batch.output, 200)
    assert len(endpoint.asked) == 200 + len(refused)
    # Four in flight are refused, then two, then one and one: so many seconds, where a busy loop had sent thousands.
    assert json.loads(batch.said.splitlines()[-1])["took_s"] >= 4


async def test_what_breaks_is_tried_again_and_what_must_not_be_is_not(tmp_path: Path) -> None:
    def broken(custom_id: str, tries: int) -> Told | None:
        match custom_id:
            case "line-0" if tries <= 2:
                return None
            case "line-1" if tries <= 2:
                return 502, {}, {"error": {"message": "bad gateway"}}
            case "line-2":
                return 500, {"x-should-retry": "false"}, {"error": {"code": "quarantined"}}
            case "line-3":
                return 400, {}, {"error": {"code": "request_too_large"}}
        return fine(custom_id, tries)

    async with serving(Misbehaving(broken)) as endpoint:
        batch = Batch(tmp_path, endpoint.url, "--errors", str(tmp_path / "errors.jsonl"))
        write_lines(batch.input, [short(number) for number in range(6)])
        assert await batch.run() == 1, batch.said
        assert [endpoint.tries[f"line-{number}"] for number in range(6)] == [3, 3, 1, 1, 1, 1]
    assert {a["custom_id"] for a in answered_once(batch.output, 4)} == {f"line-{n}" for n in (0, 1, 4, 5)}
    failed = {a["custom_id"]: a["response"] for a in answered_once(tmp_path / "errors.jsonl", 2)}
    assert {name: (told["status_code"], told["body"]["error"]["code"]) for name, told in failed.items()} == {
        "line-2": (500, "quarantined"),
        "line-3": (400, "request_too_large"),
    }


async def test_while_no_router_is_there_a_job_waits_and_gives_nothing_up(tmp_path: Path) -> None:
    async def answered() -> int:
        return batch.answered()

    cuts = 0

    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal cuts
        cuts += 1
        writer.transport.abort()

    async def cut_off() -> int:
        return cuts

    with held_port() as held:
        async with serving(Misbehaving(fine, took_s=0.02), held) as endpoint:
            batch = Batch(tmp_path, endpoint.url, "--concurrency-max", "8")
            write_lines(batch.input, [short(number) for number in range(200)])
            process = await batch.start()
            await until(answered, (50).__le__)
        while_gone = len(endpoint.asked)
        assert while_gone < 200
        async with await asyncio.start_server(cut, sock=beside(held)):
            await until(cut_off, (3).__le__)
        assert process.returncode is None
        assert batch.answered() <= while_gone
        async with serving(Misbehaving(fine), held) as another:
            assert await batch.end(process) == 0, batch.said
            assert len(another.asked) >= 200 - while_gone
    assert {a["response"]["status_code"] for a in answered_once(batch.output, 200)} == {200}


@pytest.mark.parametrize("way", ["502", "cut"])
async def test_an_outage_behind_a_balancer_costs_no_line_a_try(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "TRIES", 2)
    gone: Told = (502, {}, {"error": {"message": "bad gateway"}})

    def broken(custom_id: str, tries: int) -> Told | None:
        if tries <= 2:
            return gone if way == "502" else None
        endpoint.models = None
        return fine(custom_id, tries)

    async with serving(Misbehaving(broken)) as endpoint, sender_to(endpoint.url) as sender:
        endpoint.models = gone
        sent = await sender.answer(bytes(16), Ask("a", COMPLETIONS, b'{"prompt": "a"}'))
        assert not sent.failed
        assert endpoint.tries["a"] == 3


async def test_a_line_that_breaks_each_time_while_the_router_is_there_fails_with_what_came_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sending, "TRIES", 2)
    bad: list[Told] = [
        (502, {}, {"error": {"message": "bad gateway"}}),
        (404, {}, b"<html>"),
        (200, {}, b"<html>"),
        (200, {}, b""),
        (200, {}, b'{"id": "cut'),
        (200, {}, b"[]"),
    ]
    async with (
        serving(Misbehaving(lambda custom_id, _: bad[int(custom_id)])) as endpoint,
        sender_to(endpoint.url) as sender,
    ):
        asks = [
            sender.answer(bytes(16), Ask(str(number), COMPLETIONS, b'{"prompt": "%d"}' % number))
            for number in range(len(bad))
        ]
        sents = await asyncio.gather(*asks)
        assert set(endpoint.tries.values()) == {2}
    assert all(sent.failed for sent in sents)
    told = [json.loads(sent.line) for sent in sents]
    assert [line["response"] and line["response"]["status_code"] for line in told] == [502, 404, *[None] * 4]
    assert [line["error"] and line["error"]["code"] for line in told] == [None, None, *["invalid_response"] * 4]


@contextlib.asynccontextmanager
async def sender_to(url: str, *, unreachable_s: float = LIMIT_S) -> AsyncIterator[Sender]:
    """Alone, in this process."""
    clock = SystemClock()
    settings = SendSettings("batch", timeout_s=5, window_s=LIMIT_S, unreachable_s=unreachable_s)
    async with httpx.AsyncClient(trust_env=False) as client:
        yield Sender(client, Routers((url,), None, clock), Gate(Pace(8.0, 8), clock), settings, {}, clock)


async def test_where_no_router_comes_back_the_job_ends_and_the_line_is_left_for_the_next() -> None:
    with held_port() as held:
        gone = f"http://127.0.0.1:{held.getsockname()[1]}"
        async with sender_to(gone, unreachable_s=1.5) as sender:
            with pytest.raises(UsageError, match=f"no answer from {gone} for 2 s"):
                await sender.answer(bytes(16), Ask("a", COMPLETIONS, b"{}"))


async def test_a_line_that_finds_no_room_within_its_window_expires_as_openais_do(tmp_path: Path) -> None:
    def full(custom_id: str, tries: int) -> Told:
        return 429, {"retry-after": "1"}, {"error": {"message": "full"}}

    async with serving(Misbehaving(full)) as endpoint:
        batch = Batch(tmp_path, endpoint.url, "--window-s", "2")
        write_lines(batch.input, [short(0)])
        assert await batch.run() == 1, batch.said
        assert 2 <= endpoint.tries["line-0"] <= 4
    (answer,) = answered_once(batch.output, 1)
    assert (answer["response"], answer["error"]["code"]) == (None, "batch_expired")


async def stopped(batch: Batch, endpoint: Misbehaving, *options: str) -> None:
    """Run it until it has 4 requests in flight, with which it begins, and send it SIGTERM, as `ray job stop` does."""

    async def in_flight() -> int:
        return len(endpoint.in_flight)

    process = await batch.start("--concurrency-max", "4", *options)
    await until(in_flight, (4).__eq__)
    process.send_signal(signal.SIGTERM)
    assert await batch.end(process) == 143
    assert f"stopped: {batch.answered()} of 60 answered; submit the job again to go on" in batch.said


async def test_a_job_that_is_stopped_takes_what_is_nearly_there_leaves_the_rest_and_can_go_on(tmp_path: Path) -> None:
    async with serving(Misbehaving(fine, took_s=0.3)) as endpoint:
        batch = Batch(tmp_path, endpoint.url)
        write_lines(batch.input, [short(number) for number in range(60)])
        await stopped(batch, endpoint, "--grace-s", "30")
        assert batch.answered() == len(endpoint.asked)
        assert endpoint.left == 0
        assert await batch.run() == 0, batch.said
        assert len(endpoint.asked) == 60
    answered_once(batch.output, 60)


async def test_a_job_that_is_stopped_leaves_what_takes_longer_than_its_grace(tmp_path: Path) -> None:
    async def left() -> int:
        return endpoint.left

    async with serving(Misbehaving(fine, took_s=LIMIT_S)) as endpoint:
        batch = Batch(tmp_path, endpoint.url)
        write_lines(batch.input, [short(number) for number in range(60)])
        await stopped(batch, endpoint, "--grace-s", "0.2")
        assert (len(endpoint.asked), batch.answered()) == (4, 0)
        await until(left, (4).__eq__)


async def test_what_cannot_be_done_is_said_in_one_line_before_anything_is_sent(tmp_path: Path) -> None:
    async with serving(Misbehaving(fine)) as endpoint:
        batch = Batch(tmp_path, endpoint.url)
        write_lines(batch.input, [short(number) for number in range(3)])

        async def refused(*options: str) -> str:
            assert await batch.run(*options) == 2, batch.said
            return batch.said.splitlines()[-1]

        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("FOREBAY_API_KEY", "wrong")
            assert "answers 401: no such key. Set FOREBAY_API_KEY" in await refused()
        assert endpoint.asked == []
        assert "--errors: " in await refused("--errors", str(batch.output))
        assert "--input: nowhere cannot be read: No such file" in await refused("--input", "nowhere")
        assert await batch.run() == 0, batch.said
        write_lines(batch.input, [short(number) for number in (0, 1, 9)])
        assert "(custom_id 'line-2') was changed or taken out" in await refused()
        assert len(endpoint.asked) == 3


@pytest.mark.parametrize(
    "models",
    [
        (404, {}, {"detail": "Not Found"}),
        (301, {"location": "https://elsewhere/"}, b""),
        (200, {}, b"<html>"),
        (200, {}, {"data": {}}),
    ],
)
async def test_an_address_where_no_router_is_ends_the_job_and_nothing_is_sent_or_written(
    models: Told, tmp_path: Path
) -> None:
    async with serving(Misbehaving(fine)) as endpoint:
        endpoint.models = models
        batch = Batch(tmp_path, endpoint.url)
        write_lines(batch.input, [short(0)])
        assert await batch.run() == 2, batch.said
        assert f"{endpoint.url} is no router: " in batch.said.splitlines()[-1]
        assert (endpoint.asked, batch.answered()) == ([], 0)


async def test_a_balancer_whose_routers_are_still_starting_is_waited_for(tmp_path: Path) -> None:
    looks = 0

    class Starting(Misbehaving):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            nonlocal looks
            looks += 1
            self.models = (503, {}, b"no server is available") if looks <= 2 else None
            await super().__call__(scope, receive, send)

    async with serving(Starting(fine)) as endpoint:
        batch = Batch(tmp_path, endpoint.url)
        write_lines(batch.input, [short(0)])
        assert await batch.run() == 0, batch.said
    answered_once(batch.output, 1)


async def test_a_key_or_a_class_that_no_line_may_have_ends_the_job_and_answers_nothing(
    line: Line, tmp_path: Path
) -> None:
    def forbidden(custom_id: str, tries: int) -> Told:
        return (403, {}, {"error": {"message": "not this class."}}) if tries == 1 else fine(custom_id, tries)

    async with serving(Misbehaving(forbidden)) as endpoint:
        batch = Batch(tmp_path, endpoint.url)
        write_lines(batch.input, [short(0)])
        assert await batch.run() == 2
        assert "answers 403: not this class. Set FOREBAY_API_KEY" in batch.said
    batch = Batch(tmp_path, line.url)
    assert await batch.run("--class", "urgent") == 2
    assert "not 'urgent'" in batch.said
    assert batch.answered() == 0


async def test_the_router_gives_up_what_a_killed_job_had_in_flight_and_the_next_gets_the_same_texts(
    slow_line: Line, tmp_path: Path
) -> None:
    line = slow_line
    batch = Batch(tmp_path, line.url)
    write_lines(batch.input, [asked(number, max_tokens=30) for number in range(12)])

    async def running() -> float:
        return await line.metric(IN_FLIGHT) + await line.metric(QUEUED)

    process = await batch.start()
    await until(running, lambda requests: requests >= 4)
    process.kill()
    await batch.end(process)
    await until(running, (0.0).__eq__, within_s=5)
    cancelled = await line.metric(REQUESTS, outcome="cancelled")
    assert cancelled >= 1
    assert await batch.run() == 0, batch.said
    asks = [line.client.post(COMPLETIONS, json=asked(number, max_tokens=30)["body"]) for number in range(12)]
    alone = [told.json()["choices"] for told in await asyncio.gather(*asks)]
    for answer in answered_once(batch.output, 12):
        number = int(answer["custom_id"].removeprefix("line-"))
        assert answer["response"]["body"]["choices"] == alone[number]
