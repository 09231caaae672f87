"""The two endpoints between text and token ids, in vLLM's form, as raw ASGI.

Owns: what they answer. Imports the parser, its gate and the limits of keys; no web framework. Invariant: they are bounded
as prompts of completions are, and what they say of a prompt is what its completion is given.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import partial

import msgspec

from cluster.config import RouterConfig
from router.asgi import Receive, Scope, Send
from router.auth import identity_of
from router.bodies import DetokenizeBody, TokenizeBody
from router.errors import ApiError
from router.exchange import REQUEST_ID_HEADER, Reply, check_media, headers_of, read_body
from router.limits import Limiter
from router.openai import RequestParser
from router.parsing import ParserGate
from router.pools import Pools
from router.reading import read

LEAST_COUNTED_TOKENS = 8192
"""Texts are counted up to what so many tokens may say, however short the model's context is."""


class Tokenized(msgspec.Struct, frozen=True):
    """Answer of POST /tokenize."""

    count: int
    max_model_len: int
    tokens: tuple[int, ...]
    token_strs: list[str] | None


class Detokenized(msgspec.Struct, frozen=True):
    """Answer of POST /detokenize."""

    prompt: str


def tokenized(parser: RequestParser, raw: bytes) -> Tokenized:
    """Raises ApiError naming the parameter."""
    prompts = parser.prompts
    body = read(TokenizeBody, raw, prompts.max_model_len)
    _check_model(parser, body)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "One of prompt and messages must be given.", param="prompt, messages")
    special = body.messages is None if body.add_special_tokens is None else body.add_special_tokens
    if body.messages is None:
        text, param = body.prompt or "", "prompt"
    else:
        text, param = prompts.render(body.messages, add_generation_prompt=body.add_generation_prompt), "messages"
    bound = max(prompts.max_model_len, LEAST_COUNTED_TOKENS)
    ids = prompts.encode(text, param, add_special_tokens=special, max_tokens=bound)
    strs = prompts.token_strs(ids) if body.return_token_strs else None
    return Tokenized(len(ids), prompts.max_model_len, ids, strs)


def detokenized(parser: RequestParser, raw: bytes) -> Detokenized:
    """Raises ApiError naming the parameter."""
    prompts = parser.prompts
    body = read(DetokenizeBody, raw, prompts.max_model_len)
    _check_model(parser, body)
    if body.tokens:
        prompts.check(body.tokens, "tokens")
    return Detokenized(prompts.decode(body.tokens))


def _check_model(parser: RequestParser, body: TokenizeBody | DetokenizeBody) -> None:
    if body.model is not None:
        parser.check_model(body.model)


Answer = Callable[[RequestParser, bytes], Tokenized | Detokenized]


class TokenEndpoint:
    """Answers POST on one of the two endpoints."""

    def __init__(
        self,
        answer: Answer,
        pools: Pools,
        gate: ParserGate,
        limiter: Limiter,
        config: RouterConfig,
        turned_away: Callable[[ApiError], None] = lambda _: None,
    ) -> None:
        """`turned_away` is told of each error that a request is answered with."""
        self._turned_away = turned_away
        self._answer = answer
        self._pools = pools
        self._gate = gate
        self._limiter = limiter
        self._config = config
        self._clock = pools.clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply, identity = Reply(send, f"tok-{secrets.token_hex(16)}"), identity_of(scope)
        try:
            headers = headers_of(scope)
            reply.echo_request_id(headers.get(REQUEST_ID_HEADER))
            check_media(headers)
            lease = self._limiter.begin(identity.key_id, identity.limits, self._clock.monotonic())
        except ApiError as error:
            self._turned_away(error)
            await reply.error(error)
            return
        try:
            raw = await read_body(scope, receive, self._config.max_body_bytes, self._config.body_timeout_s)
            if raw is not None:
                await reply.json(200, await self._gate.run(len(raw), partial(self._encoded, raw)))
        except ApiError as error:
            self._turned_away(error)
            await reply.error(error)
        finally:
            lease.end(self._clock.monotonic())

    def _encoded(self, raw: bytes) -> bytes:
        return msgspec.json.encode(self._answer(self._pools.of(raw).parser, raw))
