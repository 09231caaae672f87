"""What headers ask for: taken in one form, within bounds, and refused by their own name otherwise."""

from __future__ import annotations

import asyncio

import pytest

from cluster.config import DEFAULT_CLASSES
from cluster.model import ModelFolder
from cluster.types import Outcome, RequestId
from router.errors import ApiError
from router.headers import MAX_MS, MAX_SESSION_CHARS, Asked, asked_by
from router.openai import Api, Origin, RequestParser
from router.terms import Terms
from tests.unit.http_kit import TEXT, plain_client, serving
from tests.unit.test_router_openai import completion


def asked(**headers: str) -> Asked:
    return asked_by([(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()])


def test_no_header_asks_for_nothing() -> None:
    assert asked() == asked(host="x", user_agent="y") == Asked(objective=None, terms=Terms())


def test_headers_become_terms_in_seconds() -> None:
    got = asked(
        x_llm_d_inference_objective="batch",
        x_llm_d_slo_ttft_ms="250",
        x_forebay_timeout_ms=" 90000 ",
        x_session_id="conversation-9f8e",
    )
    assert got == Asked(objective="batch", terms=Terms(ttft_slo_s=0.25, timeout_s=90.0, session="conversation-9f8e"))


@pytest.mark.parametrize("name", ["x-llm-d-slo-ttft-ms", "x-forebay-timeout-ms"])
def test_milliseconds_are_whole_and_within_a_day(name: str) -> None:
    def take(value: str) -> Terms:
        return asked_by([(name.encode(), value.encode())]).terms

    for value in ("1", str(MAX_MS), "007"):
        terms = take(value)
        assert int(value) / 1000 in (terms.ttft_slo_s, terms.timeout_s)
    for value in ("0", "00", "-1", "+1", "1.0", "1e3", "1_000", "0x10", "1 000", "", "soon", str(MAX_MS + 1), "9" * 99):
        with pytest.raises(ApiError) as refused:
            take(value)
        assert (refused.value.status, refused.value.body.param) == (400, name)
        assert str(MAX_MS) in refused.value.body.message, "it says what to change"


def test_session_names_are_bounded_and_printable() -> None:
    assert asked(x_session_id="s" * MAX_SESSION_CHARS).terms.session == "s" * MAX_SESSION_CHARS
    for value in ("", "s" * (MAX_SESSION_CHARS + 1), "a b", "a\tb", "水"):
        with pytest.raises(ApiError) as refused:
            asked(x_session_id=value)
        assert (refused.value.status, refused.value.body.param) == (400, "x-session-id")


def test_header_given_twice_counts_only_where_both_say_the_same() -> None:
    twice = [(b"x-session-id", b"a"), (b"x-session-id", b"a")]
    assert asked_by(twice).terms.session == "a"
    with pytest.raises(ApiError) as refused:
        asked_by([(b"x-llm-d-inference-objective", b"batch"), (b"x-llm-d-inference-objective", b"interactive")])
    assert (refused.value.status, refused.value.body.param) == (400, "x-llm-d-inference-objective")


def test_body_names_the_session_where_the_header_does_not(tiny_model: ModelFolder) -> None:
    parser = RequestParser(tiny_model, 256, DEFAULT_CLASSES, "standard")
    assert completion(parser).terms.session == ""
    assert completion(parser, prompt_cache_key="k").terms.session == "k"
    assert completion(parser, prompt_cache_key="k", session_id="s").terms.session == "s"
    named = Asked(terms=Terms(session="h"))
    body = b'{"model":"tiny-llama","prompt":"x","session_id":"s"}'
    prepared = parser.prepare(Api.COMPLETION, body, Origin(named, "t", RequestId("r"), 0.0, 0))
    assert prepared.terms.session == "h"
    with pytest.raises(ApiError) as refused:
        completion(parser, prompt_cache_key="k" * (MAX_SESSION_CHARS + 1))
    assert refused.value.body.param == "prompt_cache_key"


async def test_request_ends_at_the_age_that_its_header_states(tiny_model: ModelFolder) -> None:
    async with serving(tiny_model, auto=False) as world, plain_client(world) as http:
        headers = {"x-forebay-timeout-ms": "50"}
        asking = asyncio.create_task(http.post("/v1/completions", json=TEXT, headers=headers))
        await world.until(lambda: world.replica.held)
        patient = asyncio.create_task(http.post("/v1/completions", json=TEXT))
        await world.until(lambda: len(world.replica.held) == 2)
        await asyncio.sleep(0.06)
        world.core.tick()
        answer = await asking
        assert (answer.status_code, answer.json().keys()) == (504, {"error"})
        assert world.ended(Outcome.TIMED_OUT) == 1
        assert len(world.replica.held) == 1, "what was made of it is given up"
        for _ in range(5):
            world.replica.turn()
        assert (await patient).status_code == 200
