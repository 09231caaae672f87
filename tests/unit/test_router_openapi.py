"""The document of the API is true: it is valid, names every route, allows what is taken, and describes what is answered."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import msgspec
import pytest
from openapi_spec_validator import validate
from starlette.routing import Route

from cluster.config import DEFAULT_CLASSES
from cluster.model import ModelFolder
from cluster.types import RequestId
from router.answers import ChatChunk, CompletionChunk
from router.app import Front
from router.auth import OPEN_PATHS
from router.errors import ApiError
from router.headers import Asked, RequestHeaders
from router.openai import Api, Origin, RequestParser
from router.openapi import OPERATIONS, document
from tests.unit.http_kit import CHAT, HI, TEXT, events, plain_client, post, serving
from tests.unit.test_router_openai import BOTH, COMPLETION
from tests.unit.test_router_openai import CHAT as CHAT_ROWS

DOCUMENT = document("1.2.3")
SCHEMAS = DOCUMENT["components"]["schemas"]


def validator(schema: dict[str, Any]) -> jsonschema.Draft202012Validator:
    """Of a schema within the document, whose references it may use."""
    return jsonschema.Draft202012Validator(schema | {"components": DOCUMENT["components"]})


def references(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for item in value.values():
            yield from references(item)
    elif isinstance(value, list):
        for item in value:
            yield from references(item)


# --- the document itself ---


def test_document_is_valid_openapi() -> None:
    validate(DOCUMENT)


def test_every_schema_is_one_and_every_reference_leads_somewhere() -> None:
    for schema in SCHEMAS.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    for reference in set(references(DOCUMENT)):
        target: Any = DOCUMENT
        for step in reference.removeprefix("#/").split("/"):
            target = target[step]
    ids = [operation["operationId"] for path in DOCUMENT["paths"].values() for operation in path.values()]
    assert len(set(ids)) == len(ids)


async def test_document_is_served_and_names_every_route_and_no_other(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model) as world, plain_client(world) as http:
        assert world.app is not None
        assert isinstance(world.app.app, Front)
        routed = set()
        for route in world.app.app.framework.routes:
            assert isinstance(route, Route)
            for method in (route.methods or set()) - {"HEAD"}:
                routed.add((method.lower(), route.path.replace(":path}", "}")))
        said = {(method, path) for path, methods in DOCUMENT["paths"].items() for method in methods}
        assert said == routed
        served = (await http.get("/openapi.json")).json()
        assert served | {"info": None} == DOCUMENT | {"info": None}


def test_a_key_is_asked_for_everywhere_but_on_open_paths() -> None:
    assert DOCUMENT["components"]["securitySchemes"] == {"bearer": {"type": "http", "scheme": "bearer"}}
    assert DOCUMENT["security"] == [{"bearer": []}]
    open_paths = {p for p, methods in DOCUMENT["paths"].items() for o in methods.values() if o.get("security") == []}
    assert open_paths == OPEN_PATHS


def test_headers_that_are_honoured_are_said() -> None:
    honoured = {field.alias for field in RequestHeaders.model_fields.values()} | {"x-request-id"}
    for path in ("/v1/completions", "/v1/chat/completions"):
        said = {p["name"] for p in DOCUMENT["paths"][path]["post"]["parameters"] if p["in"] == "header"}
        assert said == honoured
        assert "text/event-stream" in DOCUMENT["paths"][path]["post"]["responses"]["200"]["content"]


# --- what it says of bodies ---


@pytest.mark.parametrize(("api", "form"), [(Api.CHAT, "ChatBody"), (Api.COMPLETION, "CompletionBody")])
def test_what_the_document_refuses_is_refused_and_what_it_allows_only_for_what_it_cannot_say(
    tiny_model: ModelFolder, api: Api, form: str
) -> None:
    """Over every row of the parser's own table of bad bodies, and the values that mean "absent"."""
    parser = RequestParser(tiny_model, 256, DEFAULT_CLASSES, "standard")
    check = validator({"$ref": f"#/components/schemas/{form}"})
    base = {"model": "tiny-llama"} | ({"messages": HI} if api is Api.CHAT else {"prompt": "hello"})

    def refused(body: dict[str, Any]) -> bool:
        try:
            parser.prepare(api, json.dumps(body).encode(), Origin(Asked(), "t", RequestId("r"), 0.0, 0))
        except ApiError:
            return True
        return False

    beyond_a_schema = 0
    for fields, _ in BOTH + (CHAT_ROWS if api is Api.CHAT else COMPLETION):
        assert refused(base | fields)
        beyond_a_schema += check.is_valid(base | fields)
    assert beyond_a_schema <= 18, "rules between fields, the model's length and vocabulary, and 1.0 for 1"
    assert check.is_valid(base)
    for name, field in SCHEMAS[form]["properties"].items():
        for value in (*field.get("enum", ()), *([] if name in base else [None])):
            assert check.is_valid(base | {name: value}), name
            assert not refused(base | {name: value}), name


# --- what it says of answers ---


def answer_form(path: str, method: str, status: int) -> dict[str, Any]:
    response = DOCUMENT["paths"][path][method]["responses"][str(status)]
    if "$ref" in response:
        response = DOCUMENT["components"]["responses"][response["$ref"].rsplit("/", 1)[1]]
    form: dict[str, Any] = response["content"]["application/json"]["schema"]
    return form


async def test_answers_are_as_the_document_says(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model) as world, plain_client(world) as http:

        async def check(answer: httpx.Response, path: str, method: str, status: int) -> None:
            assert answer.status_code == status, answer.text
            validator(answer_form(path, method, status)).validate(answer.json())

        for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
            scored = {"logprobs": True, "top_logprobs": 2} if "chat" in path else {"logprobs": 2, "echo": True}
            await check(await http.post(path, json=body), path, "post", 200)
            await check(await http.post(path, json=body | scored | {"n": 2}), path, "post", 200)
            await check(await http.post(path, json=body | {"model": "x"}), path, "post", 404)
            await check(await http.post(path, json=body | {"n": 0}), path, "post", 400)
            await check(await http.get(path), path, "post", 405)
        await check(await http.post("/tokenize", json={"prompt": "hello"}), "/tokenize", "post", 200)
        await check(
            await http.post("/tokenize", json={"messages": HI, "return_token_strs": True}), "/tokenize", "post", 200
        )
        await check(await http.post("/detokenize", json={"tokens": [5, 6]}), "/detokenize", "post", 200)
        for path in ("/v1/models", "/health", "/ready", "/status"):
            await check(await http.get(path), path, "get", 200)
        await check(await http.get("/v1/models/tiny-llama"), "/v1/models/{name}", "get", 200)
        await check(await http.get("/v1/models/other"), "/v1/models/{name}", "get", 404)
        explained = "/v1/requests/{request_id}/explain"
        request_id = (await http.post("/v1/completions", json=TEXT)).json()["id"]
        await check(await http.get(explained.format(request_id=request_id)), explained, "get", 200)
        await check(await http.get(explained.format(request_id="cmpl-0")), explained, "get", 404)


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "chunk"),
    [("/v1/chat/completions", CHAT, ChatChunk), ("/v1/completions", TEXT, CompletionChunk)],
)
async def test_every_event_of_a_stream_is_a_chunk_as_the_document_says(
    tiny_model: ModelFolder, path: str, body: dict[str, Any], chunk: type[msgspec.Struct], usage: bool
) -> None:
    scored = {"logprobs": True, "top_logprobs": 2} if "chat" in path else {"logprobs": 2, "echo": True}
    fields = {"stream": True, "n": 2, "stream_options": {"include_usage": usage}}
    check = validator({"$ref": f"#/components/schemas/{chunk.__name__}"})
    async with serving(tiny_model) as world:
        for asked in (fields, fields | scored):
            got = await events(await post(world, path, body | asked))
            assert got[-1] == "[DONE]"
            for event in got[:-1]:
                msgspec.json.decode(event, type=chunk)  # which refuses unknown fields
                check.validate(json.loads(event))


def test_every_operation_says_what_it_is() -> None:
    assert all(operation.summary.endswith(".") for operation in OPERATIONS)
