"""The client's side of an OpenAI-style endpoint.

Owns: all HTTP of the benchmarks: finding the model, calibrating prompts, and one streamed request with the times of
its events. Imports the statistics' `Answer`. Invariant: `Endpoint.send` returns an answer for whatever happens to a
request, and never raises for what the server does; only cancellation passes through.

Each request has a connection of its own, as each user has, so TTFT includes the TCP handshake; a shared pool would
add its own queue, and a kept connection that the server closes in the same moment would count as the server's failure.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import httpx
import msgspec

from ops.bench.stats import Answer, Failure
from ops.bench.stream import AnswerStream, StreamError, decode_chunk, error_message
from ops.endpoint import unauthorized
from ops.errors import CommandError

_SETUP_TIMEOUT_S = 30.0
_DETAIL_CHARS = 200


class Api(StrEnum):
    COMPLETIONS = "completions"
    CHAT = "chat"


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request to send, complete."""

    index: int
    priority_class: str
    service_tier: str
    planned_s: float
    prompt: str
    prompt_tokens: int
    output_tokens: int


class Endpoint:
    """One server, one model. Times it reports are seconds since `start` on the monotonic clock."""

    def __init__(self, url: str, api: Api, timeout_s: float, credentials: Mapping[str, str]) -> None:
        """`url` with or without a trailing /v1. `credentials`: headers that go with every request."""
        self._base = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._api = api
        self._timeout_s = timeout_s
        self._credentials = credentials
        self._tls = httpx.create_ssl_context()
        self._start_s = time.monotonic()
        self.model = ""

    def start(self) -> None:
        """Begin to count time."""
        self._start_s = time.monotonic()

    def now_s(self) -> float:
        return time.monotonic() - self._start_s

    async def find_model(self, wanted: str | None) -> None:
        """Set the model to `wanted`, or to the first that the server offers, and so see that it is there at all.

        Raises:
            CommandError: nobody answers at the address, it asks for another key, or no model can be told.
        """
        try:
            async with self._client(_SETUP_TIMEOUT_S) as client:
                response = await client.get(f"{self._base}/models")
            names = (
                [m.id for m in msgspec.json.decode(response.content, type=_Models).data] if response.is_success else []
            )
        except (httpx.TimeoutException, httpx.TransportError, httpx.InvalidURL) as error:
            raise CommandError(
                f"--url: no answer from {self._base}: {_reason(error)}; is the server running?"
            ) from error
        except msgspec.MsgspecError as error:
            raise CommandError(f"--url: {self._base}/models is no list of models: {error}") from error
        if response.status_code == httpx.codes.UNAUTHORIZED:
            raise unauthorized(self._base, self._credentials)
        if wanted is None and not names:
            raise CommandError(f"--url: {self._base}/models names no model (HTTP {response.status_code}); give --model")
        self.model = wanted or names[0]

    async def count_prompt_tokens(self, prompt: str) -> int:
        """Tokens of a prompt as the server counts them, by asking it for one token.

        Raises:
            CommandError: it does not answer, or does not say.
        """
        body = self._body(prompt, 1, None) | {"stream": False}
        try:
            async with self._client(self._timeout_s) as client:
                response = await client.post(f"{self._base}/{_PATHS[self._api]}", json=body)
            chunk = decode_chunk(response.content)
        except httpx.HTTPError as error:
            raise CommandError(f"--url: {self._base} did not answer a first request: {_reason(error)}") from error
        except msgspec.MsgspecError as error:
            raise CommandError(f"--url: {self._base} answered a first request with no JSON: {error}") from error
        if not response.is_success or chunk.error is not None:
            raise CommandError(
                f"--url: {self._base} refused a first request: HTTP {response.status_code} {error_message(chunk.error)}"
            )
        if chunk.usage is None or chunk.usage.prompt_tokens < 1:
            raise CommandError(f"--url: {self._base} reports no usage, so prompts cannot be measured; give --tokenizer")
        return chunk.usage.prompt_tokens

    async def send(self, ask: Ask) -> Answer:
        """Send one request and read its answer to the end."""
        body = self._body(ask.prompt, ask.output_tokens, ask.service_tier) | {
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        content = msgspec.json.encode(body)
        http = self._client(None)
        stream = AnswerStream()
        status: int | None = None
        failure: Failure | None = None
        detail = ""
        sent_s = self.now_s()
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                http,
                http.stream("POST", f"{self._base}/{_PATHS[self._api]}", content=content, headers=_JSON) as response,
            ):
                status = response.status_code
                if response.is_success:
                    await self._read(response, stream)
                else:
                    failure = Failure.HTTP_STATUS
                    detail = _error_text(await response.aread())
        except TimeoutError:
            failure, detail = Failure.TIMEOUT, f"no end after {self._timeout_s:g} s"
        except StreamError as error:
            failure, detail = error.failure, str(error)
        except httpx.HTTPError as error:
            failure = failure or (Failure.CONNECT if status is None else Failure.TRUNCATED)
            detail = _reason(error)
        counted = stream.usage is not None and stream.usage.completion_tokens > 0
        return Answer(
            index=ask.index,
            priority_class=ask.priority_class,
            planned_s=ask.planned_s,
            sent_s=sent_s,
            first_s=stream.first_s,
            end_s=stream.end_s if failure is None and stream.end_s is not None else self.now_s(),
            prompt_tokens_wanted=ask.prompt_tokens,
            prompt_tokens=stream.usage.prompt_tokens if stream.usage else None,
            output_tokens_wanted=ask.output_tokens,
            output_tokens=stream.usage.completion_tokens if stream.usage and counted else stream.texts,
            counted_by_server=counted,
            failure=failure,
            status=status,
            detail=" ".join(detail.split())[:_DETAIL_CHARS],
        )

    async def _read(self, response: httpx.Response, stream: AnswerStream) -> None:
        async for data in response.aiter_raw():
            stream.feed(data, self.now_s())
        stream.close()

    def _body(self, prompt: str, output_tokens: int, service_tier: str | None) -> dict[str, object]:
        content: dict[str, object] = (
            {"prompt": prompt} if self._api is Api.COMPLETIONS else {"messages": [{"role": "user", "content": prompt}]}
        )
        tier = {} if service_tier is None else {"service_tier": service_tier}
        # ignore_eos is no field of OpenAI's, but of every engine's that is benchmarked: the length is then exact.
        return content | tier | {
            "model": self.model, "max_tokens": output_tokens, "temperature": 0, "ignore_eos": True,
        }  # fmt: skip

    def _client(self, timeout_s: float | None) -> httpx.AsyncClient:
        return httpx.AsyncClient(headers=self._credentials, timeout=timeout_s, verify=self._tls, trust_env=False)


_PATHS: Mapping[Api, str] = {Api.COMPLETIONS: "completions", Api.CHAT: "chat/completions"}
_JSON = {"content-type": "application/json", "accept": "text/event-stream", "accept-encoding": "identity"}


def _error_text(body: bytes) -> str:
    try:
        return error_message(decode_chunk(body).error)
    except msgspec.MsgspecError:
        return body[:_DETAIL_CHARS].decode(errors="replace")


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
