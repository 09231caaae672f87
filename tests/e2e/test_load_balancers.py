"""What a client sees through HAProxy, nginx and Envoy, as deployments/lb configures them, before real routers.

Each test runs with each of them. What a router that leaves does, whatever is before it, is in test_drain.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import re
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.config import DEFAULT_CLASSES
from cluster.metrics import ADMISSIONS, IN_FLIGHT
from cluster.model import ModelFolder
from deployments.checks import free_ports
from deployments.lb.balancer import Balancer, Kind
from deployments.settings import Profile
from router.exchange import MAX_HEADER_BYTES, MAX_HEADERS
from tests.balancers import HAPROXY, NGINX, PROGRAMS, Program, balanced, write_config
from tests.closed_loop import running_load
from tests.line import read_metric, until
from tests.processes import Cluster, running_cluster
from tests.ray.streams import Reader, body, client_of

each_balancer = pytest.mark.parametrize("program", [pytest.param(p, marks=p.mark, id=p.name) for p in PROGRAMS])
pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

STEP_S = 0.03
ADDED_S = 0.010
"""What a balancer may add to the time of a first token."""
NOTICE_S = 2.0
BODY_BYTES = 16 * 2**20
QUEUED_MAX = 16
PROMPT = [11, 12, 13, 14]
HELD_NOW = 1
"""No sequence is shorter: every step that would draw a token waits."""

Running = Callable[..., AbstractAsyncContextManager[Cluster]]


@pytest.fixture
def running(tiny_model: ModelFolder, tmp_path: Path) -> Running:
    def make(*, routers: int, slots: int = 32) -> AbstractAsyncContextManager[Cluster]:
        profile = Profile.model_validate(
            {
                "engine": {"slots": slots, "step_token_budget": 128, "blocks": 1024, "max_model_len": 1024},
                "router": {
                    "drain_notice_s": NOTICE_S,
                    "classes": [c.model_copy(update={"max_queued_requests": QUEUED_MAX}) for c in DEFAULT_CLASSES],
                    "max_body_bytes": BODY_BYTES,
                    "no_replica_grace_s": 0,
                },
                "transport": {"orphan_after_s": 1.0},
                "health": {"drain_timeout_s": 30},
            }
        )
        port = free_ports("127.0.0.1", routers)
        return running_cluster(tiny_model, profile, tmp_path, step_s=STEP_S, replicas=1, routers=routers, port=port)

    return make


@asynccontextmanager
async def clients_of(urls: Sequence[str]) -> AsyncIterator[list[httpx.AsyncClient]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(client_of(url)) for url in urls]


async def in_flight(client: httpx.AsyncClient) -> float:
    return await read_metric(client, IN_FLIGHT)


async def admitted(client: httpx.AsyncClient) -> float:
    """Requests that have come to this router."""
    return await read_metric(client, ADMISSIONS)


async def arrivals(client: httpx.AsyncClient, fields: dict[str, Any]) -> list[float]:
    """When each event of a stream came, on the clock."""
    async with client.stream("POST", "/v1/completions", json=fields) as response:
        assert response.status_code == 200, await response.aread()
        return [time.monotonic() async for line in response.aiter_lines() if line.startswith("data: {")]


async def first_token_s(url: str) -> float:
    """On a connection of its own, which is the slower way."""
    async with client_of(url) as client:
        began_s = time.monotonic()
        return (await arrivals(client, body(max_tokens=1)))[0] - began_s


@each_balancer
def test_the_program_takes_its_configuration(program: Program, tmp_path: Path) -> None:
    """With addresses of each form. A name must be known where it is checked."""
    routers = ["10.0.0.1:8000", "[fd00::2]:8001", "localhost:8002"]
    for host in ("0.0.0.0", "::1"):
        balancer = Balancer.model_validate({"routers": routers, "host": host, "port": 18_080})
        command = program.command(program.check, write_config(program, balancer, tmp_path))
        checked = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        said = checked.stdout + checked.stderr
        assert checked.returncode == 0, said
        assert not any(word in said.lower() for word in ("[warn", "deprecat")), said


@each_balancer
async def test_the_first_token_and_each_after_it_come_as_soon_as_without_a_balancer(
    program: Program, running: Running, tmp_path: Path
) -> None:
    async with running(routers=1) as cluster, balanced(program, cluster.urls, tmp_path, NOTICE_S) as url:
        (replica,) = cluster.replicas
        added_s = median_s = largest_s = math.inf
        # A machine that does something else as well only ever adds to it: the best of three.
        for _ in range(3):
            pairs = [(await first_token_s(cluster.url), await first_token_s(url)) for _ in range(9)]
            added_s = min(added_s, statistics.median(t for _, t in pairs) - statistics.median(d for d, _ in pairs))
            # Two streams that begin in one step, which another request holds until both wait: each token is made, and
            # leaves the router, in the same step for both.
            async with client_of(cluster.url) as one, client_of(url) as other:
                holder = Reader(one, body(prompt=PROMPT, max_tokens=40))
                await holder.begun.wait()
                await replica.hold(HELD_NOW)
                fields = body(prompt=PROMPT, max_tokens=40)
                both = [asyncio.create_task(arrivals(client, fields)) for client in (one, other)]
                await until(lambda: in_flight(cluster.client), (3.0).__eq__)
                await replica.hold(None)
                direct, through = await asyncio.gather(*both)
                await holder.task
            assert len(direct) == len(through) > 20
            assert direct[-1] - direct[0] > 20 * STEP_S
            later_s = sorted(t - d for d, t in zip(direct, through, strict=True))
            median_s, largest_s = min(median_s, statistics.median(later_s)), min(largest_s, later_s[-2])
            if added_s < ADDED_S and median_s < ADDED_S and largest_s < STEP_S / 2:
                break
        print(
            f"{program.name}: {added_s * 1e3:+.2f} ms to the first token; of {len(through)} tokens one came "
            f"{median_s * 1e3:+.2f} ms later than directly, and all but one at most {largest_s * 1e3:+.2f} ms"
        )
        assert added_s < ADDED_S
        assert median_s < ADDED_S
        assert largest_s < STEP_S / 2, "tokens wait for those after them"


@each_balancer
async def test_answers_are_the_routers_own(program: Program, running: Running, tmp_path: Path) -> None:
    """Bodies and heads of the sizes that a router takes, its refusals of larger ones, and every other status that it has:
    all as without a balancer, headers too."""
    async with (
        running(routers=1, slots=1) as cluster,
        balanced(program, cluster.urls, tmp_path, NOTICE_S) as url,
        clients_of([cluster.url, url]) as (direct, through),
    ):
        compared: Counter[int] = Counter()

        async def same(method: str, path: str, **request: Any) -> httpx.Response:
            ours, theirs = [await client.request(method, path, **request) for client in (direct, through)]
            assert theirs.status_code == ours.status_code, theirs.text
            assert _kept(theirs) == _kept(ours)
            compared[ours.status_code] += 1
            return theirs

        fields = body(prompt=PROMPT, max_tokens=2, stream=False)
        asked = {"x-llm-d-inference-objective": "batch", "x-request-id": "mine", "x-session-id": "talk"}
        answer = await same("POST", "/v1/completions", json=fields, headers=asked)
        assert (answer.headers["x-forebay-priority-class"], answer.headers["x-request-id"]) == ("batch", "mine")
        await same("POST", "/v1/completions", json=body(prompt=PROMPT, max_tokens=2))
        large = json.dumps(fields).encode().ljust(BODY_BYTES)
        as_json = {"content-type": "application/json"}
        assert (await same("POST", "/v1/completions", content=large, headers=as_json)).status_code == 200
        assert (await same("POST", "/v1/completions", content=large + b" ", headers=as_json)).status_code == 413
        many = {f"x-{n}": "1" for n in range(MAX_HEADERS)}
        assert (await same("GET", "/v1/models", headers={"x-long": "x" * (MAX_HEADER_BYTES - 1000)})).status_code == 200
        assert (await same("GET", "/v1/models", headers={"x-long": "x" * MAX_HEADER_BYTES})).status_code == 431
        assert (await same("GET", "/v1/models", headers=many)).status_code == 431
        await same("POST", "/v1/completions", json=fields | {"tools": [1]})
        await same("GET", "/nowhere")
        await same("POST", "/v1/completions", content=b"x", headers={"content-type": "text/plain"})
        old = await _raw(url, b"GET /ready HTTP/1.0\r\n\r\n")  # as health checks of some ask
        assert b" 200 " in old.splitlines()[0]
        (replica,) = cluster.replicas
        await replica.hold(HELD_NOW)
        limited = {"x-forebay-timeout-ms": "15000"}
        flood = [direct.post("/v1/completions", json=fields, headers=limited) for _ in range(4 * QUEUED_MAX)]
        flooding = set(map(asyncio.create_task, flood))
        await asyncio.wait(flooding, return_when=asyncio.FIRST_COMPLETED)  # the first that is refused
        full = await same("POST", "/v1/completions", json=fields, headers=limited)
        assert (full.status_code, int(full.headers["retry-after"]) >= 1) == (429, True)
        await replica.hold(None)
        await asyncio.gather(*flooding)
        cluster.kill(cluster.replicas[0])
        await until(lambda: _status(through, "/ready"), (503).__eq__)

        async def status() -> int:
            impatient = {"x-forebay-timeout-ms": "100"}  # what comes just then waits for another replica
            return (await direct.post("/v1/completions", json=fields, headers=impatient)).status_code

        await until(status, (503).__eq__)
        # Now HAProxy and Envoy see no router that is ready, and ask one all the same.
        for _ in range(5):
            none = await same("POST", "/v1/completions", json=fields, headers=limited)
            assert (none.status_code, int(none.headers["retry-after"]) >= 1) == (503, True)
        print(f"{program.name}: the same answers, by status: {dict(compared)}")


def _kept(answer: httpx.Response) -> tuple[dict[str, str], object]:
    """What must be the same of two answers: all but the time, what tells one from the other, and how it is framed."""
    own = {"date", "x-request-id", "connection", "keep-alive", "content-length", "transfer-encoding", "server"}
    headers = {name: value for name, value in answer.headers.items() if name not in own}
    if "retry-after" in headers:
        headers["retry-after"] = "some seconds"  # drawn
    return headers, None if answer.status_code in {200, 429, 503} else answer.content


async def _raw(url: str, said: bytes) -> bytes:
    """All that is answered, to the end of the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(url).port)
    writer.write(said)
    try:
        async with asyncio.timeout(10):
            return await reader.read()
    finally:
        writer.close()


async def _status(client: httpx.AsyncClient, path: str) -> int:
    return (await client.get(path)).status_code


@each_balancer
async def test_a_client_that_leaves_is_known_to_the_router_within_two_seconds(
    program: Program, running: Running, tmp_path: Path
) -> None:
    """Before the first token, in a stream that stands still, and in one that goes on: its work ends."""
    async with running(routers=1) as cluster, balanced(program, cluster.urls, tmp_path, NOTICE_S) as url:
        (replica,) = cluster.replicas
        for held_first, held_then in ((HELD_NOW, HELD_NOW), (None, HELD_NOW), (None, None)):
            await replica.hold(held_first)
            async with client_of(url) as client:
                reader = Reader(client, body(prompt=PROMPT, max_tokens=900))
                await until(lambda: in_flight(cluster.client), (1.0).__eq__)
                if held_first is None:
                    await reader.begun.wait()
                await replica.hold(held_then)
                reader.task.cancel()
                await asyncio.gather(reader.task, return_exceptions=True)
            _, waited_s = await until(lambda: in_flight(cluster.client), (0.0).__eq__, within_s=2)
            print(f"{program.name}: ended {waited_s * 1e3:.0f} ms after its client")
            await replica.hold(None)


@each_balancer
async def test_a_router_that_leaves_gets_nothing_new_and_no_client_sees_an_error(
    program: Program, running: Running, tmp_path: Path
) -> None:
    """Under load in a closed loop; with a stream of each router that lasts longer than the notice. Then it comes back."""
    fields = body(max_tokens=12)
    async with (
        running(routers=2) as cluster,
        balanced(program, cluster.urls, tmp_path, NOTICE_S) as url,
        clients_of(cluster.urls) as routers,
        client_of(url) as client,
    ):
        answer = await client.post("/v1/completions", json=fields | {"prompt": "once", "stream": False})
        expected = {"once": str(answer.json()["choices"][0]["text"])}
        long = await _streams_on_each(client, routers, body(max_tokens=150))
        async with running_load(url, fields, expected, 8) as load:
            await load.another(16)
            leaver = cluster.routers.pop(0)
            told_s = last_s = time.monotonic()
            leaver.terminate()
            leaving = asyncio.create_task(leaver.left())
            came = await admitted(routers[0])
            looked_s, late_s = told_s, 0.0
            while (now := await _admitted_if_there(cluster.urls[0])) is not None:
                looks_s = time.monotonic()
                late_s, looked_s = max(late_s, looks_s - looked_s), looks_s
                if now > came:
                    came, last_s = now, looks_s
                await asyncio.sleep(0.02)
            assert await leaving == 0
            await load.another(32)
            await cluster.start_router()
            async with client_of(cluster.urls[0]) as again:
                await until(lambda: admitted(again), (4.0).__le__)
            await load.another(16)
        print(
            f"{program.name}: {load.whole} answers; the last one that was new came {last_s - told_s:.2f} s after SIGTERM, "
            f"seen {late_s:.2f} s late at most"
        )
        assert load.wrong == {}
        await asyncio.gather(*(reader.task for reader in long))
        assert {(reader.done, len(reader.errors)) for reader in long} == {(True, 0)}
        assert len({reader.text for reader in long}) == 1
        if program is not NGINX:  # which asks no router whether it is ready
            balancer = Balancer.model_validate({"routers": ["a:1"], "drain_notice_s": NOTICE_S})
            # Without checks work comes until the notice is over. By then it is out, with a check to spare, and besides
            # what this machine was late with whatever it did.
            assert last_s - told_s < NOTICE_S - balancer.check_every_s + late_s


async def _admitted_if_there(url: str) -> float | None:
    """None where it takes no connection any more."""
    try:
        async with client_of(url) as client:
            client.timeout = httpx.Timeout(0.3)
            return await admitted(client)
    except httpx.TransportError:
        return None


async def _streams_on_each(
    client: httpx.AsyncClient, routers: Sequence[httpx.AsyncClient], fields: dict[str, Any], count: int = 2
) -> list[Reader]:
    """As many as it takes for each router to have `count`: Envoy chooses by chance. Each has begun."""
    readers: list[Reader] = []
    while min([await in_flight(router) for router in routers]) < count:
        assert len(readers) < 30
        readers.append(Reader(client, fields))
        await readers[-1].begun.wait()
    return readers


@each_balancer
async def test_a_killed_router_breaks_its_streams_visibly_and_no_request_is_sent_twice(
    program: Program, running: Running, tmp_path: Path
) -> None:
    async with (
        running(routers=2) as cluster,
        balanced(program, cluster.urls, tmp_path, NOTICE_S) as url,
        clients_of(cluster.urls) as routers,
        client_of(url) as client,
    ):
        (replica,) = cluster.replicas
        doomed, other = routers
        streams = await _streams_on_each(client, routers, body(max_tokens=120))
        await replica.hold(HELD_NOW)
        on_doomed = await in_flight(doomed)
        whole = body(prompt=PROMPT, max_tokens=4, stream=False)
        asked = [asyncio.create_task(client.post("/v1/completions", json=whole)) for _ in range(10)]

        async def come() -> float:
            return sum([await admitted(router) for router in routers])

        await until(come, float(len(streams) + len(asked)).__eq__)
        unanswered = await in_flight(doomed) - on_doomed
        assert unanswered >= 1
        before = await admitted(other)
        cluster.routers[0].kill()
        # At once, before any check can have failed: it has the fewest connections, and takes none.
        padded = json.dumps(whole).encode().ljust(3 * 2**20)
        contents = itertools.chain([padded] * 4, itertools.repeat(json.dumps(whole).encode(), 8))
        as_json = {"content-type": "application/json"}
        new = [
            asyncio.create_task(client.post("/v1/completions", content=content, headers=as_json))
            for content in contents
        ]
        await until(lambda: admitted(other), (before + len(new)).__eq__, within_s=10)
        await replica.hold(None)
        assert {(await request).status_code for request in new} == {200}
        ends = Counter(_end(answer) for answer in await asyncio.gather(*asked, return_exceptions=True))
        assert ends == {"200": len(asked) - unanswered, "lost": unanswered}
        broken = await asyncio.gather(*(reader.task for reader in streams), return_exceptions=True)
        assert Counter(isinstance(end, httpx.RemoteProtocolError) for end in broken)[True] == on_doomed
        assert all(reader.done == (end is None) for reader, end in zip(streams, broken, strict=True))
        assert await admitted(other) == before + len(new)
        print(
            f"{program.name}: {on_doomed:.0f} streams broke, {unanswered:.0f} requests were lost, {len(new)} went elsewhere"
        )


def _end(answer: httpx.Response | BaseException) -> str:
    """`lost`: the client is told so, by an error of the balancer's in the API's form or by a connection that breaks."""
    if isinstance(answer, httpx.RemoteProtocolError):
        return "lost"
    if isinstance(answer, BaseException):
        raise answer
    if answer.status_code == 502:
        assert answer.json()["error"]["code"] == "router_lost"
        assert answer.headers["content-type"] == "application/json"
        return "lost"
    return str(answer.status_code)


@each_balancer
async def test_a_balancers_own_errors_have_the_apis_form(program: Program, tmp_path: Path) -> None:
    nobody = f"http://127.0.0.1:{free_ports('127.0.0.1', 1)}"
    async with balanced(program, [nobody], tmp_path, NOTICE_S) as url:
        async with client_of(url) as client:
            answer = await client.post("/v1/completions", json={})
            expected = (502, "router_lost") if program is NGINX else (503, "no_router")
            assert (answer.status_code, answer.json()["error"]["code"]) == expected
            assert answer.headers["content-type"] == "application/json"
            assert answer.headers.get("retry-after") == (None if program is NGINX else "1")
        head, _, content = (await _raw(url, b"NOT HTTP AT ALL\r\n\r\n")).partition(b"\r\n\r\n")
        assert b" 400 " in head.splitlines()[0]
        if program is not HAPROXY:  # whose words for what is no HTTP lie in a file of their own
            error = {"type": "invalid_request_error", "param": None, "code": "invalid_http"}
            assert error.items() <= json.loads(content)["error"].items()


HELD_REQUESTS = 100
FEW_FILES = 64
"""Less than twice as many, which they take."""


@asynccontextmanager
async def _holds(count: int, within_s: float) -> AsyncIterator[str]:
    """A URL that answers `count` requests for / once all have come, or have not for so long, and others at once: for what a
    balancer does of itself."""
    come, all_here = 0, asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal come
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"GET / "):
                come += 1
                if come == count:
                    all_here.set()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(all_here.wait(), within_s)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            await writer.drain()
        finally:
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0, backlog=count) as server:
        host, port = server.sockets[0].getsockname()
        yield f"http://{host}:{port}"


async def _asked_at_once(url: str) -> Counter[tuple[bytes, bytes]]:
    """Of HELD_REQUESTS, how many had each first line and each content."""
    raw = await asyncio.gather(*(_raw(url, b"GET / HTTP/1.0\r\n\r\n") for _ in range(HELD_REQUESTS)))
    heads_and_contents = [answer.partition(b"\r\n\r\n") for answer in raw]
    return Counter((head.splitlines()[0], content) for head, _, content in heads_and_contents)


def _one_worker(config: str) -> str:
    return config.replace("worker_processes auto", "worker_processes 1")


def _few_files(config: str) -> str:
    return re.sub(r"worker_rlimit_nofile \d+", f"worker_rlimit_nofile {FEW_FILES}", _one_worker(config))


def _files(folder: Path) -> tuple[int, int, int]:
    """Of the one worker of the nginx that runs there: its soft and hard limit of open files, and its connections."""
    master = (folder / "nginx.pid").read_text().strip()
    (worker,) = Path(f"/proc/{master}/task/{master}/children").read_text().split()
    limits = re.findall(r"Max open files +(\d+) +(\d+)", Path(f"/proc/{worker}/limits").read_text())
    connections = re.findall(r"worker_connections (\d+)", (folder / "nginx.conf").read_text())
    return int(limits[0][0]), int(limits[0][1]), int(connections[0])


@NGINX.mark
async def test_nginx_has_files_for_all_its_connections_whatever_soft_limit_it_is_started_with(tmp_path: Path) -> None:
    async with (
        _holds(HELD_REQUESTS, 5) as router,
        balanced(NGINX, [router], tmp_path, NOTICE_S, soft_files=FEW_FILES, change=_one_worker) as url,
    ):
        soft, hard, connections = _files(tmp_path / "nginx")
        if hard < 2 * connections:
            pytest.skip(f"nginx is to have {2 * connections} files, and the hard limit here is {hard}")
        assert soft >= 2 * connections
        assert await _asked_at_once(url) == {(b"HTTP/1.1 200 OK", b""): HELD_REQUESTS}


@NGINX.mark
async def test_nginx_without_files_says_so_in_the_apis_form(tmp_path: Path) -> None:
    async with (
        _holds(HELD_REQUESTS, 0.3) as router,
        balanced(NGINX, [router], tmp_path, NOTICE_S, change=_few_files) as url,
    ):
        answers = await _asked_at_once(url)
    assert answers.pop((b"HTTP/1.1 200 OK", b"")) > 0
    ((line, content),) = answers
    assert b" 500 " in line
    assert json.loads(content)["error"].items() >= {"type": "server_error", "code": "balancer_failed"}.items()


def test_there_is_a_program_for_each_kind() -> None:
    assert [program.kind for program in PROGRAMS] == list(Kind)
