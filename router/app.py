"""The router's HTTP application.

Owns: which path is answered by what, and that everything else is answered with the one form of error. The only file of
the router that imports the web framework. Invariant: no status, header or body depends on an unbounded label.
"""

from __future__ import annotations

import importlib.metadata
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from cluster.config import Auth, RouterConfig
from cluster.messages import ClusterStatus, named
from cluster.types import ReplicaId, RequestId
from router.answers import Drained, Health, ModelList, Ready, RouterPart, StatusReply
from router.asgi import Receive, Scope, Send
from router.auth import Guard, Identify, identity_of
from router.completions import Completions
from router.errors import ApiError, ErrorBody, error_json
from router.exchange import App, HeaderLimits, internal_error
from router.exposition import page
from router.fields import path_not_offered
from router.limits import Limiter
from router.metrics_sink import DoorMetrics
from router.openai import Api
from router.openapi import document
from router.parsing import ParserGate
from router.pools import Pools
from router.recent import DecisionsQuery
from router.tokenize import Answer, TokenEndpoint, detokenized, tokenized

Drain = Callable[[str, bool], Awaitable[tuple[ReplicaId, ...] | None]]
"""Have work kept from the replicas of this name or host, or no longer; which these are, or None where nobody can say."""


class Front:
    """Everything behind the guard. What generates text is reached past the framework, whose layers cost more than they
    give it: each stands between the exchange and all that it reads and sends."""

    def __init__(self, framework: Starlette, generating: Mapping[str, App]) -> None:
        """`generating`: by path, answering POST; the framework routes them too, to refuse other methods."""
        self.framework = framework
        self._generating = generating
        self._limited = HeaderLimits(self._dispatch)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        return self._limited(scope, receive, send)

    def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        posts = scope["type"] == "http" and scope["method"] == "POST"
        endpoint = self._generating.get(scope["path"]) if posts else None
        return (endpoint or self.framework)(scope, receive, send)


def build_app(
    *,
    pools: Pools,
    config: RouterConfig,
    registry: CollectorRegistry,
    cluster_status: Callable[[], Awaitable[ClusterStatus | None]],
    drain: Drain,
    identify: Identify | None = None,
    rng: random.Random | None = None,
) -> Guard:
    """The application that uvicorn serves. `registry` is shown at /metrics. `identify` looks keys up, where `config.auth`
    asks for them. `rng` draws the seeds of requests that have none.

    Raises:
        ValueError: keys are asked for and nothing looks them up, or the other way about.
    """
    if (config.auth is Auth.KEYS) != (identify is not None):
        raise ValueError(f"auth is {config.auth}, and identify is {identify}")
    rng = rng or random.Random()
    gate = ParserGate(rng)
    limiter = Limiter(rng)
    door = DoorMetrics(registry)
    classes = {c.name: c.priority for c in sorted(config.classes, key=lambda c: -c.priority)}
    openapi = msgspec.json.encode(document(importlib.metadata.version("forebay")))

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        gate.close()

    async def models(_: HttpRequest) -> Response:
        return _json(ModelList(data=tuple(card for pool in pools for card in pool.cards.values())))

    async def one_model(request: HttpRequest) -> Response:
        name = request.path_params["name"]
        return _json(pools[name].cards[name])

    async def explain(request: HttpRequest) -> Response:
        request_id, identity = RequestId(request.path_params["request_id"]), identity_of(request.scope)
        explanation = pools.explain(request_id, None if identity.operator else identity.tenant)
        if explanation is None:
            message = (
                "No request of yours with this id is live or remembered by this router; "
                "where there are several, ask the one that answered it."
            )
            raise ApiError(404, message, param="request_id", code="request_not_found")
        return _json(explanation)

    async def decisions(request: HttpRequest) -> Response:
        if not identity_of(request.scope).operator:
            message = (
                "This key may not see the decisions about everybody's requests; "
                "make one that may with `forebay keys create --operator`."
            )
            raise ApiError(403, message, code="not_an_operator")
        query = DecisionsQuery.of(request.query_params.multi_items())
        return _json(pools.recent(query.after, query.limit))

    async def health(_: HttpRequest) -> Response:
        return _json(Health("alive"))

    async def ready(_: HttpRequest) -> Response:
        if not pools.ready:
            raise ApiError(503, "No replica takes work now.", code="not_ready")
        return _json(Ready({pool.name: pool.core.ready for pool in pools}))

    async def api_document(_: HttpRequest) -> Response:
        return Response(openapi, media_type="application/json")

    async def metrics(_: HttpRequest) -> Response:
        return Response(await page(registry), media_type=CONTENT_TYPE_LATEST)

    async def status(_: HttpRequest) -> Response:
        router = RouterPart(pools.ready, classes, named(tuple(pool.status for pool in pools)))
        return _json(StatusReply(router, named(await cluster_status())))

    async def drained(request: HttpRequest) -> Response:
        if not identity_of(request.scope).operator:
            message = "This key may not drain replicas; make one that may with `forebay keys create --operator`."
            raise ApiError(403, message, code="not_an_operator")
        name, begin = request.path_params["name"], request.method == "PUT"
        replica_ids = await drain(name, begin)
        if replica_ids is None:
            raise ApiError(503, "The controller does not answer; try again in a few seconds.", code="no_controller")
        if not replica_ids:
            message = "No replica has this id or runs on this host; `forebay status` shows them."
            raise ApiError(404, message, param="name", code="replica_not_found")
        return _json(Drained(begin, replica_ids))

    def generate(api: Api) -> Completions:
        return Completions(api, pools, gate, limiter, config, rng, door.turned_away)

    def tokens(answer: Answer) -> TokenEndpoint:
        return TokenEndpoint(answer, pools, gate, limiter, config, door.turned_away)

    generating: Mapping[str, App] = {
        "/v1/chat/completions": generate(Api.CHAT),
        "/v1/completions": generate(Api.COMPLETION),
    }
    routes = [
        *(Route(path, endpoint, methods=["POST"]) for path, endpoint in generating.items()),
        Route("/tokenize", tokens(tokenized), methods=["POST"]),
        Route("/detokenize", tokens(detokenized), methods=["POST"]),
        Route("/v1/models", models, methods=["GET"]),
        Route("/v1/models/{name:path}", one_model, methods=["GET"]),
        Route("/v1/requests/{request_id}/explain", explain, methods=["GET"]),
        Route("/v1/decisions", decisions, methods=["GET"]),
        Route("/openapi.json", api_document, methods=["GET"]),
        Route("/health", health, methods=["GET"]),
        Route("/ready", ready, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
        Route("/status", status, methods=["GET"]),
        Route("/drain/{name}", drained, methods=["PUT", "DELETE"]),
    ]
    handlers = {HTTPException: _http_error, ApiError: _api_error, Exception: _internal_error}
    framework = Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)
    framework.router.redirect_slashes = False
    return Guard(Front(framework, generating), identify, open_metrics=config.open_metrics, turned_away=door.turned_away)


def _json(value: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


async def _http_error(request: HttpRequest, error: Exception) -> Response:
    """What the framework refuses by itself: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    if error.status_code == HTTPStatus.NOT_FOUND:
        missing = path_not_offered(request.url.path)
        if missing is None:
            body = ErrorBody("There is nothing at this path.", "invalid_request_error", None, "unknown_path")
        else:
            body = ErrorBody(f"This server does not offer {missing}.", "invalid_request_error", None, "not_offered")
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        if request.method == "OPTIONS":
            return Response(status_code=204, headers=error.headers)
        body = ErrorBody("This path does not take this method.", "invalid_request_error", None, "method_not_allowed")
    else:
        body = ErrorBody(error.detail, "invalid_request_error", None, None)
    return Response(error_json(body), error.status_code, error.headers, "application/json")


async def _api_error(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return Response(error_json(error.body), error.status, error.headers, "application/json")


async def _internal_error(request: HttpRequest, error: Exception) -> Response:
    del error
    return await _api_error(request, internal_error(request.scope))
