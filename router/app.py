"""The router's HTTP application.

Owns: which path is answered by what, and that everything else is answered with the one form of error. The only file of
the router that imports the web framework. Invariant: no status, header or body depends on an unbounded label.
"""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from cluster.config import RouterConfig
from cluster.messages import ClusterStatus, named
from cluster.model import ModelFolder
from router.completions import Completions, ParserGate
from router.core import RouterCore
from router.errors import ApiError, ErrorBody, error_json
from router.logprobs import Vocabulary
from router.openai import Api, RequestParser

_log = logging.getLogger("forebay.http")


def build_app(
    *,
    core: RouterCore,
    model: ModelFolder,
    max_model_len: int,
    config: RouterConfig,
    registry: CollectorRegistry,
    cluster_status: Callable[[], Awaitable[ClusterStatus | None]],
    rng: random.Random | None = None,
) -> ASGIApp:
    """The application that uvicorn serves. `rng` draws the seeds of requests that have none.

    Raises:
        ChatTemplateError: the model's chat template does not compile.
    """
    parser = RequestParser(model, max_model_len, config.classes, config.default_class)
    gate = ParserGate(parser, rng or random.Random())
    vocabulary = Vocabulary(parser.codec, model.eos_token_ids)
    created_unix_s = int(core.clock.unix())

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        gate.close()

    async def models(_: HttpRequest) -> Response:
        return _json(ModelList(data=(ModelCard(model.name, created_unix_s, max_model_len),)))

    async def one_model(request: HttpRequest) -> Response:
        if request.path_params["name"] != model.name:
            message = "The model does not exist."
            raise ApiError(404, message, param="model", code="model_not_found")
        return _json(ModelCard(model.name, created_unix_s, max_model_len))

    async def health(_: HttpRequest) -> Response:
        return _json(Health("alive"))

    async def ready(_: HttpRequest) -> Response:
        if not core.ready:
            raise ApiError(503, "No replica takes work now.", code="not_ready")
        return _json(Health("ready"))

    async def metrics(_: HttpRequest) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    async def status(_: HttpRequest) -> Response:
        router = RouterPart(model.name, core.ready, named(core.bands()))
        return _json(StatusReply(router, named(await cluster_status())))

    def generate(api: Api) -> Completions:
        return Completions(api, core, gate, config, model.name, vocabulary)

    routes = [
        Route("/v1/chat/completions", generate(Api.CHAT), methods=["POST"]),
        Route("/v1/completions", generate(Api.COMPLETION), methods=["POST"]),
        Route("/v1/models", models, methods=["GET"]),
        Route("/v1/models/{name:path}", one_model, methods=["GET"]),
        Route("/health", health, methods=["GET"]),
        Route("/ready", ready, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
        Route("/status", status, methods=["GET"]),
    ]
    handlers = {HTTPException: _http_error, ApiError: _api_error, Exception: _internal_error}
    app = Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)
    app.router.redirect_slashes = False
    return app


class ModelCard(msgspec.Struct, frozen=True):
    id: str
    created: int
    max_model_len: int
    object: str = "model"
    owned_by: str = "forebay"


class ModelList(msgspec.Struct, frozen=True):
    data: tuple[ModelCard, ...]
    object: str = "list"


class Health(msgspec.Struct, frozen=True):
    status: str


class RouterPart(msgspec.Struct, frozen=True):
    model: str
    ready: bool
    bands: object
    """`BandStatus` of each priority with work, most urgent first."""


class StatusReply(msgspec.Struct, frozen=True):
    router: RouterPart
    cluster: object
    """The controller's `ClusterStatus` with the names of its fields; null where no controller answers."""


def _json(value: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


async def _http_error(request: HttpRequest, error: Exception) -> Response:
    """What the framework refuses by itself: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    if error.status_code == HTTPStatus.NOT_FOUND:
        body = ErrorBody("There is nothing at this path.", "invalid_request_error", None, "unknown_path")
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
    """A bug of ours. The server logs the traceback; the client is told no more than that."""
    _log.error("unexpected %s at %s", type(error).__name__, request.url.path)
    body = ErrorBody("The server made an error.", "server_error", None, "internal_error")
    return Response(error_json(body), 500, media_type="application/json")
