"""The two endpoints that generate text, as raw ASGI.

Owns: one HTTP exchange from its body to its last byte: limits on reading, the answer's head held back until the first
token or the end is known, and the watch for a client that goes away. Imports no web framework: it speaks ASGI itself,
which costs a third less per token than a response object. Invariants: a client that leaves is cancelled in the core at
once, in whatever phase; an exchange that was begun is ended; the choices of one request end together where one ends
badly.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import Awaitable, Callable, Iterable, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

from cluster.config import RouterConfig
from cluster.ports import Clock
from cluster.types import Outcome, Request, RequestId
from router.errors import ApiError, error_json
from router.logprobs import Vocabulary
from router.openai import OBJECTIVE_HEADER, Api, Prepared, RequestParser
from router.outcomes import Ending
from router.replies import ReplyWriter, ending_error
from router.stream import Batch, Choices, Stream

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

CLASS_HEADER = "x-forebay-priority-class"
DROPPED_HEADER = "x-llm-d-request-dropped-reason"
INLINE_BODY_BYTES = 4096
"""Bodies up to this are parsed and tokenised on the event loop: about 2 ms; longer ones go to a thread."""
INLINE_LOGPROBS = 64
"""Up to so many are written on the event loop: about 2 ms; more go to a thread."""
PARSER_THREADS = 2
PARSER_MAX_BYTES = 64 * 2**20
"""Bodies that wait for a parser thread, in all; beyond it a request is sent away."""
LAST_WORD_S = 30.0
"""How long a client may take to read what is left once its request has ended."""
REQUEST_ID_CHARS = 128
REQUEST_ID_MAX_BYTES = 1024
"""A longer x-request-id is refused; one between is cut."""

_log = logging.getLogger("forebay.http")


class Core(Protocol):
    """What this file needs of `router.core.RouterCore`."""

    @property
    def clock(self) -> Clock: ...

    def submit(self, members: Sequence[tuple[Request, Stream]]) -> None: ...

    def cancel(self, *request_ids: RequestId) -> None: ...


class Completions:
    """Answers POST on one of the two endpoints."""

    def __init__(
        self, api: Api, core: Core, gate: ParserGate, config: RouterConfig, model_name: str, vocabulary: Vocabulary
    ) -> None:
        self._api = api
        self._core = core
        self._gate = gate
        self._config = config
        self._model_name = model_name
        self._vocabulary = vocabulary

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = _headers(scope)
        prefix = "chatcmpl" if self._api is Api.CHAT else "cmpl"
        request_id = RequestId(f"{prefix}-{secrets.token_hex(16)}")
        reply = _Reply(send, request_id)
        try:
            reply.echo_request_id(headers.get("x-request-id"))
            if "x-request-id" in headers:
                _log.info("%s is %s to its client", request_id, reply.headers[0][1])
            raw = await self._body(receive)
            if raw is None:
                return
            arrived_unix_s = self._core.clock.unix()
            objective = headers.get(OBJECTIVE_HEADER)
            prepared = await self._gate.prepare(self._api, raw, objective, request_id, arrived_unix_s)
        except ApiError as error:
            await reply.error(error)
            return
        del raw
        await self._answer(prepared, receive, reply)

    async def _body(self, receive: Receive) -> bytes | None:
        """The request's body, or None where the client left before it had sent it.

        Of one that is too large as much again is read and dropped: a client in the midst of sending reads no answer.

        Raises:
            ApiError: 413 beyond the limit, 408 after the time allowed.
        """
        limit, parts, size, more = self._config.max_body_bytes, list[bytes](), 0, True
        try:
            async with asyncio.timeout(self._config.body_timeout_s):
                while more and size <= 2 * limit:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    part: bytes = message.get("body", b"")
                    more = message.get("more_body", False)
                    size += len(part)
                    if size <= limit:
                        parts.append(part)
                    else:
                        parts.clear()
        except TimeoutError:
            late = f"The body did not arrive within {self._config.body_timeout_s:g} s."
            raise ApiError(408, late, headers={"connection": "close"}) from None
        if size > limit:
            raise ApiError(413, f"The body is larger than {limit} bytes.", headers={"connection": "close"})
        return b"".join(parts)

    async def _answer(self, prepared: Prepared, receive: Receive, reply: _Reply) -> None:
        requests = prepared.requests
        writer = ReplyWriter(self._api, prepared, self._vocabulary, self._model_name)
        reply.headers.append((CLASS_HEADER, prepared.request.priority_class))
        deadline = _LastWord()

        def over() -> None:
            deadline.start()
            if len(requests) > 1:  # from within the core: what is left of the others is ended in its next turn
                asyncio.get_running_loop().call_soon(self._cancel, requests)

        choices = Choices(len(requests), self._config.max_stream_bytes, over)
        watch = asyncio.create_task(self._watch(receive, requests))
        try:
            self._core.submit(tuple(zip(requests, choices.streams, strict=True)))
            if prepared.stream:
                await _streamed(choices, writer, reply)
            else:
                await _whole(choices, writer, reply)
        except asyncio.CancelledError:
            if not deadline.passed:
                raise
            _log.warning("%s: the client did not read the end of its answer", prepared.request.request_id)
        except OSError:
            pass  # The server says so where a write finds the client gone; `finally` ends the request.
        finally:
            watch.cancel()
            self._cancel(requests)
            deadline.stop()  # last: that cancel ends the streams, which starts it

    async def _watch(self, receive: Receive, requests: Sequence[Request]) -> None:
        """Cancel the request as soon as the client is gone. After the body, nothing else can be received."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._cancel(requests)

    def _cancel(self, requests: Sequence[Request]) -> None:
        """End what has not ended."""
        self._core.cancel(*(request.request_id for request in requests))


async def _streamed(choices: Choices, writer: ReplyWriter, reply: _Reply) -> None:
    """Server-sent events; the status and headers leave with the first token, or with what came instead of one."""
    begun = False
    while True:
        batches = await choices.take()
        failure, data = choices.failure, b""
        if not begun:
            if failure is not None:
                await reply.ending(failure)
                return
            await reply.start_stream()
            begun, data = True, writer.first()
        for index, batch in batches:
            if batch.scores and _is_long(batch):
                data += await asyncio.to_thread(writer.events, index, batch)
            else:
                data += writer.events(index, batch)
        if failure is not None:
            cancelled = failure.outcome is Outcome.CANCELLED
            await reply.finish(b"" if cancelled else data + writer.broken(failure))
            return
        if choices.over:
            await reply.finish(data + writer.closing())
            return
        if data:
            await reply.write(data)


async def _whole(choices: Choices, writer: ReplyWriter, reply: _Reply) -> None:
    while not choices.over:
        for index, batch in await choices.take():
            if batch.scores and _is_long(batch):
                await asyncio.to_thread(writer.gather, index, batch)
            else:
                writer.gather(index, batch)
        if choices.failure is not None:
            await reply.ending(choices.failure)
            return
    await reply.json(200, await asyncio.to_thread(writer.whole) if writer.scored else writer.whole())


def _is_long(batch: Batch) -> bool:
    """Whether it has so many logprobs, as those of a prompt, that writing them would keep other streams waiting."""
    return sum(len(s.prompt_logprobs) + len(s.logprobs) for s in batch.scores) > INLINE_LOGPROBS


class ParserGate:
    """Where bodies are parsed: small ones at once, others in a few threads with a bounded backlog."""

    def __init__(self, parser: RequestParser, rng: random.Random) -> None:
        self._parser = parser
        self._rng = rng
        self._pool = ThreadPoolExecutor(PARSER_THREADS, thread_name_prefix="parser")
        self._held_bytes = 0

    async def prepare(
        self, api: Api, raw: bytes, objective: str | None, request_id: RequestId, arrived_unix_s: float
    ) -> Prepared:
        """`RequestParser.prepare`, where it suits.

        Raises:
            ApiError: as there, and 429 where too much waits for a thread.
        """
        work = partial(
            self._parser.prepare,
            api,
            raw,
            objective=objective,
            request_id=request_id,
            arrived_unix_s=arrived_unix_s,
            random_seed=self._rng.getrandbits(63),
        )
        if len(raw) <= INLINE_BODY_BYTES:
            return work()
        if self._held_bytes + len(raw) > PARSER_MAX_BYTES:
            message = "Too many long prompts are waiting to be read; try again later."
            retry_after = str(self._rng.randint(1, 3))
            raise ApiError(429, message, code="queue_full", headers={"retry-after": retry_after})
        self._held_bytes += len(raw)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self._held_bytes -= len(raw)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class _LastWord:
    """Gives the task that made it `LAST_WORD_S` from the end of its answer, then cancels it."""

    def __init__(self) -> None:
        self._task = asyncio.current_task()
        self._timer: asyncio.TimerHandle | None = None
        self.passed = False

    def start(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(LAST_WORD_S, self._pass)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _pass(self) -> None:
        assert self._task is not None
        self.passed = True
        self._task.cancel()


class _Reply:
    """The response of one exchange, written to ASGI's `send`."""

    def __init__(self, send: Send, request_id: RequestId) -> None:
        self._send = send
        self.headers: list[tuple[str, str]] = [("x-request-id", request_id)]

    def echo_request_id(self, given: str | None) -> None:
        """Return the client's own id to it, without what a log or a header cannot bear. It is never a key here.

        Raises:
            ApiError: it is absurdly long.
        """
        if given is None:
            return
        if len(given) > REQUEST_ID_MAX_BYTES:
            raise ApiError(400, f"x-request-id is longer than {REQUEST_ID_MAX_BYTES} bytes.", param="x-request-id")
        kept = "".join(c for c in given if "!" <= c <= "~")[:REQUEST_ID_CHARS]
        if kept:
            self.headers[0] = ("x-request-id", kept)

    async def json(self, status: int, body: bytes, headers: Iterable[tuple[str, str]] = ()) -> None:
        sized = [("content-type", "application/json"), ("content-length", str(len(body)))]
        await self._start(status, [*sized, *headers])
        await self._send({"type": "http.response.body", "body": body})

    async def error(self, error: ApiError) -> None:
        await self.json(error.status, error_json(error.body), error.headers.items())

    async def ending(self, ending: Ending) -> None:
        """Answer with the status of an ending before anything else was sent. One who has left gets nothing."""
        if ending.outcome is Outcome.CANCELLED:
            return
        headers: list[tuple[str, str]] = []
        if ending.retry_after_s is not None:
            headers.append(("retry-after", str(ending.retry_after_s)))
        if ending.meaning.dropped_reason is not None:
            headers.append((DROPPED_HEADER, ending.meaning.dropped_reason))
        await self.json(ending.meaning.status, error_json(ending_error(ending)), headers)

    async def start_stream(self) -> None:
        # Proxies that buffer would turn a stream into one late answer.
        kind = [("content-type", "text/event-stream; charset=utf-8"), ("cache-control", "no-cache")]
        await self._start(200, [*kind, ("x-accel-buffering", "no")])

    async def write(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data})

    async def _start(self, status: int, headers: list[tuple[str, str]]) -> None:
        encoded = [(name.encode(), value.encode("latin-1")) for name, value in (*headers, *self.headers)]
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})


def _headers(scope: Scope) -> dict[str, str]:
    """Names are lower case in ASGI already; of a repeated one the first counts."""
    headers: dict[str, str] = {}
    for name, value in scope["headers"]:
        headers.setdefault(name.decode("latin-1"), value.decode("latin-1").strip())
    return headers
