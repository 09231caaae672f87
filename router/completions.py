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
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from cluster.config import RouterConfig
from cluster.types import Outcome, Request, RequestId
from router.asgi import ChunkWriter, Exchange, Receive, Scope, Send, exchange_of
from router.auth import identity_of
from router.core import RouterCore
from router.errors import ApiError
from router.exchange import REQUEST_ID_HEADER, Reply, check_media, headers_of, internal_error, read_body
from router.headers import CLASS_HEADER, asked_by
from router.limits import Lease, Limiter, used_tokens
from router.openai import Api, Origin, Prepared
from router.parsing import ParserGate
from router.pools import Pools
from router.replies import ReplyWriter
from router.stream import Batch, Choices

INLINE_LOGPROBS = 64
"""Up to so many are written on the event loop: about 2 ms; more go to a thread."""
LAST_WORD_S = 30.0
"""How long a client may take to read what is left once its request has ended."""

_log = logging.getLogger("forebay.http")


class Completions:
    """Answers POST on one of the two endpoints."""

    def __init__(
        self,
        api: Api,
        pools: Pools,
        gate: ParserGate,
        limiter: Limiter,
        config: RouterConfig,
        rng: random.Random,
        turned_away: Callable[[ApiError], None] = lambda _: None,
    ) -> None:
        """`rng` draws the seeds of requests that have none. `turned_away` is told of each error that a request is answered
        with before it is submitted."""
        self._turned_away = turned_away
        self._api = api
        self._pools = pools
        self._gate = gate
        self._limiter = limiter
        self._config = config
        self._rng = rng

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = headers_of(scope)
        prefix = "chatcmpl" if self._api is Api.CHAT else "cmpl"
        request_id = RequestId(f"{prefix}-{secrets.token_hex(16)}")
        reply = Reply(send, request_id)
        try:
            await self._exchange(scope, receive, headers, request_id, reply)
        except ApiError as error:
            self._turned_away(error)
            await reply.error(error)
        except Exception:
            if not reply.begun:
                await reply.error(internal_error(scope))
            raise  # so that the server logs it, and hangs up where the answer had begun

    async def _exchange(
        self, scope: Scope, receive: Receive, headers: Mapping[str, str], request_id: RequestId, reply: Reply
    ) -> None:
        """Raises ApiError where the answer is one, which has not begun then."""
        identity, clock = identity_of(scope), self._pools.clock
        reply.echo_request_id(headers.get(REQUEST_ID_HEADER))
        if REQUEST_ID_HEADER in headers:
            _log.info("%s is %s to its client", request_id, reply.headers[0][1])
        check_media(headers)
        asked = asked_by(scope["headers"]).by(identity)
        lease = self._limiter.begin(identity.key_id, identity.limits, clock.monotonic())
        try:
            raw = await read_body(scope, receive, self._config.max_body_bytes, self._config.body_timeout_s)
            if raw is None:
                return
            origin = Origin(asked, identity.tenant, request_id, clock.unix(), self._rng.getrandbits(63))
            prepared = await self._gate.run(len(raw), partial(self._pools.prepare, self._api, raw, origin))
            del raw
            try:
                lease.charge(prepared.most_tokens, clock.monotonic())
            finally:
                reply.headers += lease.headers(clock.monotonic())
            await self._answer(prepared, receive, reply, lease, exchange_of(scope))
        finally:
            lease.end(clock.monotonic())

    async def _answer(
        self, prepared: Prepared, receive: Receive, reply: Reply, lease: Lease, exchange: Exchange | None
    ) -> None:
        requests, pool = prepared.requests, self._pools[prepared.model]
        core, writer = pool.core, ReplyWriter(self._api, prepared, pool.vocabulary)
        reply.headers.append((CLASS_HEADER, prepared.request.priority_class))
        deadline = _LastWord()

        def over() -> None:
            deadline.start()
            if len(requests) > 1:  # from within the core: what is left of the others is ended in its next turn
                asyncio.get_running_loop().call_soon(_cancel, core, requests)

        choices = Choices(len(requests), self._config.max_stream_bytes, over)
        watch = None
        if exchange is None:
            watch = asyncio.create_task(_watch(receive, core, requests))
        else:
            exchange.when_gone(partial(_cancel, core, requests))
        try:
            core.submit(tuple(zip(requests, choices.streams, strict=True)), prepared.terms)
            if prepared.stream:
                await _streamed(choices, writer, reply, None if exchange is None else exchange.write_chunk)
            else:
                await _whole(choices, writer, reply)
        except asyncio.CancelledError:
            if not deadline.passed:
                raise
            _log.warning("%s: the client did not read the end of its answer", prepared.request.request_id)
        except OSError:
            pass  # The server says so where a write finds the client gone; `finally` ends the request.
        finally:
            if watch is not None:
                watch.cancel()
            if exchange is not None:
                exchange.when_gone(None)
            _cancel(core, requests)
            lease.used_tokens = used_tokens(stream.ending for stream in choices.streams)
            deadline.stop()  # last: that cancel ends the streams, which starts it


async def _watch(receive: Receive, core: RouterCore, requests: Sequence[Request]) -> None:
    """Cancel the request as soon as the client is gone. After the body, nothing else can be received."""
    while (await receive())["type"] != "http.disconnect":
        pass
    _cancel(core, requests)


def _cancel(core: RouterCore, requests: Sequence[Request]) -> None:
    """End what has not ended."""
    core.cancel(*(request.request_id for request in requests))


async def _streamed(
    choices: Choices, writer: ReplyWriter, reply: Reply, write_chunk: ChunkWriter | None = None
) -> None:
    """Server-sent events; the status and headers leave with the first token, or with what came instead of one.

    After these the core writes plain text itself, by `write_chunk`, for as long as this task waits for it.
    """
    begun = direct = False
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
        if not direct and write_chunk is not None:
            direct = True
            _write_directly(choices, writer, write_chunk)


def _write_directly(choices: Choices, writer: ReplyWriter, write_chunk: ChunkWriter) -> None:
    write = writer.plain(write_chunk)
    if write is not None:
        choices.write_directly(write)


async def _whole(choices: Choices, writer: ReplyWriter, reply: Reply) -> None:
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


class _LastWord:
    """Gives the task that made it `LAST_WORD_S` from the end of its answer, then cancels it. Almost every task is through
    before the loop has turned once, and needs no timer."""

    def __init__(self) -> None:
        self._task = asyncio.current_task()
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = False
        self.passed = False

    def start(self) -> None:
        asyncio.get_running_loop().call_soon(self._arm)

    def _arm(self) -> None:
        if not self._stopped:
            self._timer = asyncio.get_running_loop().call_later(LAST_WORD_S, self._pass)

    def stop(self) -> None:
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()

    def _pass(self) -> None:
        assert self._task is not None
        self.passed = True
        self._task.cancel()
