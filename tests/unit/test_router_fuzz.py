"""Whatever the bytes, a body becomes a request that an engine can run, or an error in the one form. Generated bodies."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.config import DEFAULT_CLASSES
from cluster.model import ModelFolder
from cluster.types import RequestId
from router.bodies import ChatBody, CompletionBody, DetokenizeBody, Message, StreamOptions, TokenizeBody
from router.errors import ApiError, ErrorReply, error_json
from router.fields import MESSAGE_NOT_OFFERED, NOT_OFFERED
from router.headers import RequestHeaders, asked_by
from router.openai import Api, Origin, RequestParser
from router.terms import Terms
from router.tokenize import detokenized, tokenized

MAX_LEN = 256
_MODELS = (ChatBody, CompletionBody, TokenizeBody, DetokenizeBody, Message, StreamOptions)
_NAMES = sorted(
    {name for model in _MODELS for name in model.model_fields} | NOT_OFFERED.keys() | MESSAGE_NOT_OFFERED.keys()
)

names = st.one_of(st.sampled_from(_NAMES), st.text(max_size=8))
numbers = st.one_of(
    st.integers(-3, 40),
    st.integers(),
    st.sampled_from([2**31 - 1, 2**31, 2**63, -(2**63) - 1, 10**300]),
    st.floats(allow_nan=False, allow_infinity=False),
)
texts = st.one_of(st.sampled_from(["tiny-llama", "user", "text", "flex", "hi"]), st.text(max_size=40))
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, texts),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(names, inner, max_size=4)),
    max_leaves=12,
)
messages = st.lists(
    st.fixed_dictionaries({"role": texts, "content": st.one_of(texts, values)}, optional={"name": values}), max_size=3
)
plausible = st.one_of(st.none(), st.booleans(), st.integers(0, 5), st.floats(0, 1), st.sampled_from(["flex", "auto"]))
taken = st.sampled_from(sorted(ChatBody.model_fields.keys() | CompletionBody.model_fields.keys()))


def bodies(required: dict[str, st.SearchStrategy[object]]) -> st.SearchStrategy[bytes]:
    """Some are taken, some nearly, and some are no bodies at all."""
    whole = st.fixed_dictionaries({"model": st.just("tiny-llama")} | required)
    part = st.fixed_dictionaries({}, optional={"model": texts} | dict.fromkeys(required, values))
    made = st.one_of(
        st.builds(lambda a, b: b | a, whole, st.dictionaries(taken, plausible, max_size=3)),
        st.builds(lambda a, b: a | b, st.one_of(whole, part), st.dictionaries(names, values, max_size=4)),
    )
    return st.one_of(made.map(lambda body: json.dumps(body).encode()), made.map(_cut), st.binary(max_size=60))


def _cut(body: dict[str, object]) -> bytes:
    raw = json.dumps(body).encode()
    return raw[: len(raw) * 3 // 4]


prompts = st.one_of(st.text(min_size=1, max_size=40), st.lists(st.integers(0, 1023), min_size=1, max_size=9))
chats = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "assistant"]), "content": st.text(max_size=20)}),
    min_size=1,
    max_size=3,
)
raws = {
    Api.CHAT: bodies({"messages": st.one_of(chats, messages)}),
    Api.COMPLETION: bodies({"prompt": prompts}),
}
token_raws = st.one_of(bodies({"prompt": prompts}), bodies({"tokens": st.lists(st.integers(0, 1100), max_size=9)}))


@pytest.fixture(scope="module")
def parser(tiny_model: ModelFolder) -> RequestParser:
    return RequestParser(tiny_model, MAX_LEN, DEFAULT_CLASSES, "standard")


def check_error(error: ApiError) -> None:
    assert 400 <= error.status < 500
    said = msgspec.json.decode(error_json(error.body), type=ErrorReply)
    assert said.error.message
    assert len(error_json(error.body)) < 2000


@pytest.mark.parametrize("api", list(Api))
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_body_becomes_a_request_that_can_run_or_an_error(parser: RequestParser, api: Api, data: st.DataObject) -> None:
    raw = data.draw(raws[api])
    try:
        prepared = parser.prepare(api, raw, Origin(asked_by([]), "t", RequestId("r"), 0.0, 1))
    except ApiError as error:
        check_error(error)
        return
    request = prepared.request
    msgspec.msgpack.encode(request)  # as it goes to a replica
    assert 1 <= len(request.prompt_ids) < MAX_LEN + (request.sampling.max_tokens == 0)
    assert len(request.prompt_ids) + request.sampling.max_tokens <= MAX_LEN
    assert all(0 <= token_id < 1024 for token_id in request.prompt_ids)
    assert request.sampling.min_tokens <= request.sampling.max_tokens
    assert 1 <= len(prepared.requests) == prepared.choices <= 32


@settings(max_examples=100, deadline=None)
@given(raw=token_raws)
def test_tokens_are_counted_or_the_body_refused(parser: RequestParser, raw: bytes) -> None:
    for answer in (tokenized, detokenized):
        try:
            msgspec.json.encode(answer(parser, raw))
        except ApiError as error:
            check_error(error)


@settings(max_examples=150, deadline=None)
@given(
    given_headers=st.lists(
        st.tuples(
            st.sampled_from([str(f.alias).encode() for f in RequestHeaders.model_fields.values()]),
            st.one_of(st.binary(max_size=12), st.integers().map(lambda n: str(n).encode())),
        ),
        max_size=4,
    )
)
def test_headers_become_terms_in_bounds_or_an_error(given_headers: list[tuple[bytes, bytes]]) -> None:
    refused: ApiError | None = None
    terms = Terms()
    try:
        terms = asked_by(given_headers).terms
    except ApiError as error:
        refused = error
    if refused is not None:
        check_error(refused)
        assert (refused.body.param or "").encode() in dict(given_headers)
    for seconds in (terms.ttft_slo_s, terms.timeout_s):
        assert seconds is None or 0.001 <= seconds <= 86_400
