"""What every endpoint that speaks ASGI itself needs: the request's head and body, and the answer's form.

Owns: the limits on what is read of a request, and writing an answer to ASGI's `send`. Imports errors and endings; no web
framework. Invariants: no head and no body is read without an end in bytes and in time; the client's own id is returned
to it and is never a key here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping

from cluster.types import Outcome
from router.asgi import Receive, Scope, Send, exchange_of, send_json
from router.errors import DROPPED_HEADER, RETRY_HEADER, ApiError, ending_error, error_json
from router.keys import holds_key
from router.outcomes import Ending

App = Callable[[Scope, Receive, Send], Awaitable[None]]

REQUEST_ID_HEADER = "x-request-id"
REQUEST_ID_CHARS = 128
REQUEST_ID_MAX_BYTES = 1024
"""A longer x-request-id is refused; one between is cut."""
MAX_HEADERS = 100
MAX_HEADER_BYTES = 16 * 2**10
"""Names and values of all headers together."""
_JSON = "application/json"
_READ = frozenset({REQUEST_ID_HEADER.encode(), b"content-type", b"content-encoding"})

_log = logging.getLogger("forebay.http")


class HeaderLimits:
    """Wraps an application: a head that is too large is answered before anything looks at it."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers: list[tuple[bytes, bytes]] = scope["headers"]
            if len(headers) > MAX_HEADERS or sum(len(n) + len(v) for n, v in headers) > MAX_HEADER_BYTES:
                message = (
                    f"The request has more than {MAX_HEADERS} headers, or more than {MAX_HEADER_BYTES} bytes of them."
                )
                await Reply(send, None).error(
                    ApiError(431, message, code="headers_too_large", headers={"connection": "close"})
                )
                return
        await self._app(scope, receive, send)


class Reply:
    """The response of one exchange, written to ASGI's `send`."""

    def __init__(self, send: Send, request_id: str | None) -> None:
        """`request_id` goes back in a header, unless the client named one of its own."""
        self._send = send
        self.begun = False
        """Whether a head has left, so that there can be no other."""
        self.headers: list[tuple[str, str]] = [] if request_id is None else [(REQUEST_ID_HEADER, request_id)]

    def echo_request_id(self, given: str | None) -> None:
        """Return the client's own id to it, without what a log or a header cannot bear: no key either.

        Raises:
            ApiError: it is absurdly long.
        """
        if given is None:
            return
        if len(given) > REQUEST_ID_MAX_BYTES:
            message = f"{REQUEST_ID_HEADER} is longer than {REQUEST_ID_MAX_BYTES} bytes."
            raise ApiError(400, message, param=REQUEST_ID_HEADER)
        kept = "".join(c for c in given if "!" <= c <= "~")
        if kept and not holds_key(kept):
            self.headers[0] = (REQUEST_ID_HEADER, kept[:REQUEST_ID_CHARS])

    async def json(self, status: int, body: bytes, headers: Iterable[tuple[str, str]] = ()) -> None:
        self.begun = True
        await send_json(self._send, status, body, (*headers, *self.headers))

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
        if not ending.again:
            headers.append((RETRY_HEADER, "false"))
        await self.json(ending.meaning.status, error_json(ending_error(ending)), headers)

    async def start_stream(self) -> None:
        self.begun = True
        # Proxies that buffer would turn a stream into one late answer.
        kind = (("content-type", "text/event-stream; charset=utf-8"), ("cache-control", "no-cache"))
        headers = (*kind, ("x-accel-buffering", "no"), *self.headers)
        encoded = [(name.encode(), value.encode("latin-1")) for name, value in headers]
        await self._send({"type": "http.response.start", "status": 200, "headers": encoded})

    async def write(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data})


def internal_error(scope: Scope) -> ApiError:
    """What a client is told of a bug of ours: no more than that. The server logs the traceback."""
    _log.error("unexpected error at %s", scope["path"])
    return ApiError(500, "The server made an error.", code="internal_error")


async def read_body(scope: Scope, receive: Receive, max_bytes: int, timeout_s: float) -> bytes | None:
    """The request's body, or None where the client left before it had sent it.

    Of one that is too large as much again is read and dropped: a client in the midst of sending reads no answer.

    Raises:
        ApiError: 413 beyond the limit, 408 after the time allowed.
    """
    exchange = exchange_of(scope)
    whole = None if exchange is None else exchange.take_body()
    if whole is not None:
        if len(whole) > max_bytes:
            raise _too_large(max_bytes)
        return whole
    parts, size, more = list[bytes](), 0, True
    try:
        async with asyncio.timeout(timeout_s):
            while more and size <= 2 * max_bytes:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                part: bytes = message.get("body", b"")
                more = message.get("more_body", False)
                size += len(part)
                if size <= max_bytes:
                    parts.append(part)
                else:
                    parts.clear()
    except TimeoutError:
        late = f"The body did not arrive within {timeout_s:g} s."
        raise ApiError(408, late, code="body_timeout", headers={"connection": "close"}) from None
    if size > max_bytes:
        raise _too_large(max_bytes)
    return b"".join(parts)


def _too_large(max_bytes: int) -> ApiError:
    large = f"The body is larger than {max_bytes} bytes."
    return ApiError(413, large, code="body_too_large", headers={"connection": "close"})


def check_media(headers: Mapping[str, str]) -> None:
    """Whether a body is what is read here: JSON, in UTF-8, as it is. A body of no stated kind is taken for that.

    (A web page that nobody trusts can make a browser send text or a form anywhere, but JSON only where it is let.)

    Raises:
        ApiError: 415 naming the header.
    """
    if headers.get("content-type") == _JSON and "content-encoding" not in headers:
        return  # as almost all are
    kind, _, parameters = headers.get("content-type", _JSON).lower().partition(";")
    charset = parameters.partition("charset=")[2].partition(";")[0].strip(' "') or "utf-8"
    if kind.strip() != _JSON or charset not in {"utf-8", "utf8"}:
        raise ApiError(415, f"content-type must be {_JSON}, in UTF-8.", param="content-type", code="unsupported_media")
    if headers.get("content-encoding", "identity").lower() != "identity":
        message = "The body must be sent as it is, without content-encoding."
        raise ApiError(415, message, param="content-encoding", code="unsupported_media")


def headers_of(scope: Scope) -> dict[str, str]:
    """Those that are read here. Names are lower case in ASGI already; of a repeated one the first counts."""
    headers: dict[str, str] = {}
    for name, value in scope["headers"]:
        if name in _READ:
            headers.setdefault(name.decode(), value.decode("latin-1").strip())
    return headers
