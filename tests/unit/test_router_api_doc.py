"""What router/API.md says of the API is what the code does."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from deployments.http_protocol import HEAD_TIMEOUT_S
from deployments.http_server import KEEP_ALIVE_S
from router.auth import OPEN_PATHS
from router.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from router.exchange import MAX_HEADER_BYTES, MAX_HEADERS, REQUEST_ID_CHARS, REQUEST_ID_HEADER, REQUEST_ID_MAX_BYTES
from router.fields import MESSAGE_NOT_OFFERED, NOT_OFFERED, PATHS_NOT_OFFERED, WITHOUT_EFFECT
from router.headers import MAX_MS, MAX_SESSION_CHARS, RequestHeaders
from router.openapi import OPERATIONS, document
from router.prompts import TEXT_BYTES_PER_TOKEN
from router.reading import MAX_NAMES
from router.tokenize import LEAST_COUNTED_TOKENS

PAGE = (Path(__file__).parents[2] / "router" / "API.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))


def rows(text: str) -> dict[str, list[str]]:
    """A section's table: the name in its first column -> the other cells."""
    cells = [[c.strip() for c in line.strip("|").split(" | ")] for line in text.splitlines() if line.startswith("| `")]
    names = [row[0].strip("` ") for row in cells]
    assert len(set(names)) == len(names)
    return {name: row[1:] for name, row in zip(names, cells, strict=True)}


def told(model: type[BaseModel], name: str) -> str:
    """What the page must say of a field: its description and its default."""
    said = document("0")["components"]["schemas"][model.__name__]["properties"][name]
    default = f"Default {json.dumps(said['default'])}." if "default" in said else ""
    return f"{said['description'].rstrip('.')}. {default}".strip()


def test_every_operation_is_named() -> None:
    named = re.findall(r"^\| `(GET|POST|PUT|DELETE) (\S+)` \|", PAGE, re.MULTILINE)
    assert set(named) == {(o.method.upper(), o.path) for o in OPERATIONS}
    assert all(f"`{path}`" in PAGE for path in OPEN_PATHS)


@pytest.mark.parametrize("model", [ChatBody, CompletionBody])
def test_every_field_is_named_with_what_it_means(model: type[BaseModel]) -> None:
    alone = {ChatBody: "Fields of chats alone", CompletionBody: "Fields of completions alone"}[model]
    both, own = rows(SECTIONS["Fields of chats and completions"]), rows(SECTIONS[alone])
    assert both.keys() | own.keys() == model.model_fields.keys() - set(WITHOUT_EFFECT)
    assert not both.keys() & own.keys()
    assert {name: cells[-1].strip() for name, cells in (both | own).items()} == {
        name: told(model, name) for name in both | own
    }


@pytest.mark.parametrize("model", [TokenizeBody, DetokenizeBody])
def test_every_field_of_the_token_endpoints_is_named(model: type[BaseModel]) -> None:
    said = rows(SECTIONS[f"Fields of /{model.__name__.removesuffix('Body').lower()}"])
    assert {name: cells[-1].strip() for name, cells in said.items()} == {
        name: told(model, name) for name in model.model_fields
    }


@pytest.mark.parametrize(
    ("title", "table"),
    [("Fields that are refused", NOT_OFFERED), ("Fields of messages that are refused", MESSAGE_NOT_OFFERED)],
)
def test_what_is_refused_is_named_with_the_values_that_are_not(
    title: str, table: dict[str, tuple[object, ...]]
) -> None:
    said = {name: re.findall(r"`([^`]+)`", cell) for name, (cell,) in rows(SECTIONS[title]).items()}
    assert said == {name: [json.dumps(value) for value in values] for name, values in table.items()}


def test_what_has_no_effect_is_listed() -> None:
    listed = re.findall(r"`([^`]+)`", SECTIONS["Fields without effect"].partition(";")[0])
    assert listed == list(WITHOUT_EFFECT)


def test_paths_that_are_not_offered_are_listed() -> None:
    assert {p: cell for p, (cell,) in rows(SECTIONS["Paths that are not offered"]).items()} == PATHS_NOT_OFFERED


def test_headers_and_bounds_are_as_stated() -> None:
    said = rows(SECTIONS["Headers"])
    assert said.keys() == {field.alias for field in RequestHeaders.model_fields.values()} | {REQUEST_ID_HEADER}
    assert all(f"1 to {MAX_MS}" in said[name][0] for name in ("x-llm-d-slo-ttft-ms", "x-forebay-timeout-ms"))
    assert f"1 to {MAX_SESSION_CHARS} " in said["x-session-id"][0]
    assert f"at most {REQUEST_ID_MAX_BYTES} bytes" in said[REQUEST_ID_HEADER][0]
    assert f"cut to {REQUEST_ID_CHARS} " in said[REQUEST_ID_HEADER][1]
    bounds = SECTIONS["Bounds"]
    assert f"{MAX_HEADERS} headers, {MAX_HEADER_BYTES} bytes, within {HEAD_TIMEOUT_S:g} s" in bounds
    assert f"{TEXT_BYTES_PER_TOKEN} bytes of UTF-8 for each token" in bounds
    assert f"at least {LEAST_COUNTED_TOKENS} tokens" in bounds
    assert f"names in one object of a body | {MAX_NAMES} |" in bounds
    assert f"| {KEEP_ALIVE_S} s |" in bounds
