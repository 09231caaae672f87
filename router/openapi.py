"""The document of the HTTP API, OpenAPI 3.1, served at /openapi.json.

Owns: which operation takes and answers what; the forms themselves come from the models that validate bodies and headers
and from the values that answers are encoded of. Imports those; no web framework. Invariant: a body that the document
allows is refused only for what the document cannot say (rules between fields, the model's length and vocabulary).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import msgspec
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from router.answers import (
    ChatChunk,
    ChatCompletion,
    Completion,
    CompletionChunk,
    Drained,
    Health,
    ModelCard,
    ModelList,
    Ready,
    StatusReply,
)
from router.auth import OPEN_PATHS
from router.bodies import ChatBody, CompletionBody, DetokenizeBody, Message, TokenizeBody
from router.errors import DROPPED_HEADER, RETRY_HEADER, ErrorReply
from router.exchange import REQUEST_ID_HEADER, REQUEST_ID_MAX_BYTES
from router.explain import Explanation
from router.fields import MESSAGE_NOT_OFFERED, NOT_OFFERED
from router.headers import CLASS_HEADER, RequestHeaders
from router.outcomes import MEANINGS
from router.recent import DecisionsQuery, RecentDecisions
from router.tokenize import Detokenized, Tokenized

_NULL = {"type": "null"}
_REF = "#/components/schemas/{}"
_JSON = "application/json"
_TAKES_NO_BODY = (401, 405, 431, 500)
_TAKES_A_BODY = (*_TAKES_NO_BODY, 400, 404, 408, 413, 415, 429)
_BROKEN_OFF = 499
"""An ending that nobody is there to read."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path."""

    method: str
    path: str
    summary: str
    answer: type[msgspec.Struct] | str
    """What a success is encoded of, or the media type of one that is no JSON."""
    body: type[BaseModel] | None = None
    chunk: type[msgspec.Struct] | None = None
    """What each event of a stream holds, where the answer may be one."""
    errors: tuple[int, ...] = _TAKES_NO_BODY
    query: type[BaseModel] | None = None


_GENERATION_ERRORS = tuple(
    sorted({*_TAKES_A_BODY, 403, *(m.status for m in MEANINGS.values())} - {HTTPStatus.OK.value, _BROKEN_OFF})
)

OPERATIONS = (
    Operation(
        "post", "/v1/chat/completions", "Answer a chat.", ChatCompletion, ChatBody, ChatChunk, _GENERATION_ERRORS
    ),
    Operation(
        "post", "/v1/completions", "Continue a text.", Completion, CompletionBody, CompletionChunk, _GENERATION_ERRORS
    ),
    Operation("post", "/tokenize", "The tokens of a prompt.", Tokenized, TokenizeBody, errors=_TAKES_A_BODY),
    Operation("post", "/detokenize", "The text of tokens.", Detokenized, DetokenizeBody, errors=_TAKES_A_BODY),
    Operation("get", "/v1/models", "The models that are served.", ModelList),
    Operation("get", "/v1/models/{name}", "One model.", ModelCard, errors=(*_TAKES_NO_BODY, 404)),
    Operation(
        "get",
        "/v1/requests/{request_id}/explain",
        "What was decided about a request, and with which numbers.",
        Explanation,
        errors=(*_TAKES_NO_BODY, 404),
    ),
    Operation(
        "get",
        "/v1/decisions",
        "What was decided last, about everybody's requests.",
        RecentDecisions,
        errors=(*_TAKES_NO_BODY, 400, 403),
        query=DecisionsQuery,
    ),
    Operation("get", "/health", "Whether this process is alive.", Health),
    Operation(
        "get", "/ready", "Whether a replica takes work, and of which models.", Ready, errors=(*_TAKES_NO_BODY, 503)
    ),
    Operation("get", "/status", "Bands of the queue, replicas and the controller.", StatusReply),
    *(
        Operation(method, "/drain/{name}", what, Drained, errors=(*_TAKES_NO_BODY, 403, 404, 503))
        for method, what in (
            ("put", "Keep new work from a replica, or from all of a host or node, and let what is there go elsewhere."),
            ("delete", "Let them take work again."),
        )
    ),
    Operation("get", "/metrics", "Prometheus metrics.", "text/plain"),
    Operation("get", "/openapi.json", "This document.", _JSON),
)


def document(version: str) -> dict[str, Any]:
    """The whole document."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Forebay",
            "version": version,
            "description": "An OpenAI-style API. null is an absent field; an unknown field is refused by name.",
        },
        "paths": _paths(),
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
            "responses": {str(status): _error(status) for status in sorted({s for o in OPERATIONS for s in o.errors})},
        },
        "security": [{"bearer": []}],
    }


def _paths() -> dict[str, Any]:
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation)
    return paths


def _operation(operation: Operation) -> dict[str, Any]:
    name = "_".join(operation.path.replace("{", "").replace("}", "").replace(".", "/").strip("/").split("/"))
    said: dict[str, Any] = {
        "operationId": f"{operation.method}_{name}",
        "summary": operation.summary,
        "parameters": list(_parameters(operation)),
        "responses": {"200": _success(operation)}
        | {str(status): {"$ref": f"#/components/responses/{status}"} for status in sorted(operation.errors)},
    }
    if operation.path in OPEN_PATHS:
        said["security"] = []
    if operation.body is not None:
        content = {_JSON: {"schema": _ref(operation.body)}}
        said["requestBody"] = {"required": True, "content": content}
    return said


def _parameters(operation: Operation) -> Iterable[dict[str, Any]]:
    for part in operation.path.split("/"):
        if part.startswith("{"):
            yield {"name": part[1:-1], "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    if operation.query is not None:
        for name, schema in operation.query.model_json_schema()["properties"].items():
            present = next((s for s in schema.get("anyOf", ()) if s != _NULL), _plain(schema, "description"))
            yield {"name": name, "in": "query", "description": schema["description"], "schema": present}
    if operation.body is not None:
        described = {"type": "string", "maxLength": REQUEST_ID_MAX_BYTES}
        yield {
            "name": REQUEST_ID_HEADER,
            "in": "header",
            "description": "Returned in the answer's header of this name, cut to what is printable.",
            "schema": described,
        }
    if operation.chunk is not None:
        for name, schema in RequestHeaders.model_json_schema()["properties"].items():
            present = next((s for s in schema.get("anyOf", ()) if s != _NULL), _plain(schema, "default", "description"))
            yield {"name": name, "in": "header", "description": schema["description"], "schema": present}


def _success(operation: Operation) -> dict[str, Any]:
    if isinstance(operation.answer, str):
        schema = {"type": "object"} if operation.answer == _JSON else {"type": "string"}
        return {"description": "Success.", "content": {operation.answer: {"schema": schema}}}
    said: dict[str, Any] = {"description": "Success.", "content": {_JSON: {"schema": _ref(operation.answer)}}}
    if operation.chunk is not None:
        said["content"]["text/event-stream"] = {"schema": _events(operation.chunk)}
        said["headers"] = _headers({CLASS_HEADER: "The priority class in force."})
    if operation.body is not None:
        id_header = {REQUEST_ID_HEADER: "The client's own id, or the one that it was given."}
        said["headers"] = said.get("headers", {}) | _headers(id_header)
    return said


def _events(chunk: type[msgspec.Struct]) -> dict[str, Any]:
    return {
        "type": "string",
        "description": "Events `data: …`. Each is a chunk; the last is `[DONE]`, or an error where the stream broke.",
        "contentMediaType": "text/event-stream",
        "contentSchema": {"oneOf": [_ref(chunk), _ref(ErrorReply), {"const": "[DONE]"}]},
    }


def _error(status: int) -> dict[str, Any]:
    said: dict[str, Any] = {
        "description": f"{HTTPStatus(status).phrase}.",
        "content": {_JSON: {"schema": _ref(ErrorReply)}},
    }
    match status:
        case 401:
            said["headers"] = _headers({"WWW-Authenticate": "Bearer."})
        case 405:
            said["headers"] = _headers({"Allow": "The methods that the path takes."})
        case 500:
            said["headers"] = _headers({RETRY_HEADER: "false where the same request must not be sent again."})
        case 429 | 503 | 504:
            said["headers"] = _headers(
                {"Retry-After": "Whole seconds after which to try again.", DROPPED_HEADER: "Why it was dropped."}
            )
    return said


def _headers(described: Mapping[str, str]) -> dict[str, Any]:
    return {name: {"description": what, "schema": {"type": "string"}} for name, what in described.items()}


def _ref(kind: type) -> dict[str, str]:
    return {"$ref": _REF.format(kind.__name__)}


def _schemas() -> dict[str, Any]:
    bodies = [operation.body for operation in OPERATIONS if operation.body is not None]
    _, taken = models_json_schema([(body, "validation") for body in bodies], ref_template=_REF.format("{model}"))
    schemas: dict[str, Any] = {name: _body(schema) for name, schema in taken["$defs"].items()}
    for body in bodies:
        _add_neutral(schemas[body.__name__], NOT_OFFERED)
    _add_neutral(schemas[Message.__name__], MESSAGE_NOT_OFFERED)
    answers = [o.answer for o in OPERATIONS if not isinstance(o.answer, str)]
    chunks = [operation.chunk for operation in OPERATIONS if operation.chunk is not None]
    _, answered = msgspec.json.schema_components([*answers, *chunks, ErrorReply], ref_template=_REF.format("{name}"))
    assert not schemas.keys() & answered.keys(), "one name for two forms"
    return schemas | answered


def _body(schema: dict[str, Any]) -> dict[str, Any]:
    """A body's form, in which null is an absent field."""
    required = schema.get("required", [])
    properties = {
        name: _plain(field) if name in required else _nullable(_plain(field))
        for name, field in schema["properties"].items()
    }
    return _plain(schema) | {"properties": properties}


def _plain(schema: Mapping[str, Any], *without: str) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key not in ("title", *without)}


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    described = {key: schema.pop(key) for key in ("description", "default") if key in schema}
    if described.get("default") in (None, []):  # which is what null says
        described.pop("default", None)
    options = schema["anyOf"] if schema.keys() == {"anyOf"} else [schema]
    return {"anyOf": options if _NULL in options else [*options, _NULL]} | described


def _add_neutral(schema: dict[str, Any], table: Mapping[str, tuple[object, ...]]) -> None:
    """Add the fields that are taken only with a value that says nothing."""
    properties = schema["properties"]
    for name, values in table.items():
        properties.setdefault(name, {"enum": [*values, None], "description": "Not offered."})
