"""The laws of the wire form: what is taken, what it becomes, and that everything else is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer

from cluster.config import DEFAULT_CLASSES
from cluster.model import ModelFolder
from cluster.types import RequestId
from router.bodies import MAX_BIASES, MAX_CHOICES, ChatBody, CompletionBody
from router.errors import ApiError
from router.fields import NOT_OFFERED, WITHOUT_EFFECT
from router.headers import Asked
from router.openai import Api, Origin, Prepared, RequestParser
from tests.tiny_model import make_tiny_llama

MAX_LEN = 256
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def parser(tiny_model: ModelFolder) -> RequestParser:
    return RequestParser(tiny_model, MAX_LEN, DEFAULT_CLASSES, "standard")


def prepare(parser: RequestParser, api: Api, raw: bytes, objective: str | None = None) -> Prepared:
    return parser.prepare(api, raw, Origin(Asked(objective=objective), "t", RequestId("id"), 5.0, 77))


def chat(parser: RequestParser, objective: str | None = None, **fields: Any) -> Prepared:
    body = {"model": "tiny-llama", "messages": HI} | fields
    return prepare(parser, Api.CHAT, json.dumps(body).encode(), objective)


def completion(parser: RequestParser, objective: str | None = None, **fields: Any) -> Prepared:
    body = {"model": "tiny-llama", "prompt": "hello"} | fields
    return prepare(parser, Api.COMPLETION, json.dumps(body).encode(), objective)


# --- what is taken ---


def test_absent_fields_have_openai_s_defaults(parser: RequestParser) -> None:
    sampling = completion(parser).request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (16, 1.0, 1.0, 0)
    assert (sampling.seed, sampling.stop, sampling.ignore_eos) == (77, (), False)
    chatted = chat(parser).request
    assert chatted.sampling.max_tokens == MAX_LEN - len(chatted.prompt_ids)
    assert (chatted.priority, chatted.priority_class, chatted.arrived_unix_s) == (0, "standard", 5.0)


def test_given_fields_are_honoured(parser: RequestParser) -> None:
    prepared = completion(
        parser, max_tokens=9, temperature=0, top_p=0.5, top_k=-1, seed=-3, stop=["a", "b"], stream=True, ignore_eos=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    sampling = prepared.request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (9, 0.0, 0.5, 0)
    assert (sampling.seed, sampling.stop, sampling.ignore_eos) == (-3, ("a", "b"), True)
    assert (prepared.stream, prepared.include_usage) == (True, True)
    assert not completion(parser, stream=True, stream_options={}).include_usage
    assert not completion(parser, stream=True, stream_options={"include_usage": None}).include_usage
    assert chat(parser, max_completion_tokens=7, max_tokens=7).request.sampling.max_tokens == 7
    assert completion(parser, stop="x").request.sampling.stop == ("x",)


def test_sampling_fields_become_the_engine_s(parser: RequestParser) -> None:
    fields: dict[str, Any] = {
        "min_p": 0.25,
        "presence_penalty": -2,
        "frequency_penalty": 1.5,
        "repetition_penalty": 1.25,
        "min_tokens": 3,
        "max_tokens": 9,
    }
    given = {**fields, "logit_bias": {"1023": -100, "7": 0.5, "100": 100}, "expected_output_tokens": 40}
    for send in (chat, completion):
        request = send(parser, **given).request
        assert {name: getattr(request.sampling, name) for name in fields} == fields
        assert request.sampling.logit_bias == ((7, 0.5), (100, 100.0), (1023, -100.0))
        assert request.stated_output_tokens == 40
    assert completion(parser).request.stated_output_tokens is None


def test_logprobs_count_the_likeliest_tokens_in_each_api_s_own_way(parser: RequestParser) -> None:
    def asked(prepared: Prepared) -> tuple[int | None, int | None]:
        return prepared.request.sampling.logprobs, prepared.request.sampling.prompt_logprobs

    assert asked(chat(parser)) == (None, None)
    assert asked(chat(parser, logprobs=True)) == (0, None)
    assert asked(chat(parser, logprobs=True, top_logprobs=20)) == (20, None)
    assert asked(completion(parser)) == (None, None)
    assert asked(completion(parser, logprobs=0)) == (0, None)
    assert asked(completion(parser, logprobs=5)) == (5, None)
    assert asked(completion(parser, echo=True)) == (None, None)
    assert asked(completion(parser, logprobs=2, echo=True)) == (2, 2)


def test_echo_is_the_prompt_as_it_was_given_or_what_its_tokens_read_as(parser: RequestParser) -> None:
    assert completion(parser).echo is None
    assert completion(parser, echo=True, prompt="Hé llo\n水").echo == "Hé llo\n水"
    ids = list(completion(parser, prompt="Hé llo\n水").request.prompt_ids)
    assert completion(parser, echo=True, prompt=ids).echo == "Hé llo\n水"
    scored = completion(parser, echo=True, max_tokens=0)
    assert scored.request.sampling.max_tokens == 0


def test_choices_are_alike_but_for_id_and_number_and_know_their_group(parser: RequestParser) -> None:
    alone = completion(parser)
    assert alone.requests == (alone.request,)
    assert (alone.request.choice, alone.request.group_id) == (0, "")
    three = completion(parser, n=3, best_of=3, temperature=0).requests
    assert [(r.request_id, r.choice, r.group_id) for r in three] == [
        ("id", 0, "id"),
        ("id-1", 1, "id"),
        ("id-2", 2, "id"),
    ]
    alike = {msgspec.structs.replace(r, request_id=RequestId(""), choice=0, group_id="") for r in three}
    assert len(alike) == 1
    assert len(completion(parser, n=MAX_CHOICES).requests) == MAX_CHOICES


@pytest.mark.parametrize("api", list(Api))
def test_null_is_an_absent_field(parser: RequestParser, api: Api) -> None:
    kind = ChatBody if api is Api.CHAT else CompletionBody
    required = {"model": "tiny-llama", "messages": HI} if api is Api.CHAT else {"model": "tiny-llama", "prompt": "hi"}
    for name in (kind.model_fields.keys() | NOT_OFFERED.keys()) - required.keys():
        assert prepare(parser, api, json.dumps(required | {name: None}).encode()) == prepare(
            parser, api, json.dumps(required).encode()
        ), name


def test_values_that_mean_absent_are_taken(parser: RequestParser) -> None:
    for name, values in NOT_OFFERED.items():
        for value in values:
            assert completion(parser, None, **{name: value}) == completion(parser), name
    neutral: dict[str, Any] = {
        "n": 1,
        "best_of": 1,
        "presence_penalty": 0.0,
        "frequency_penalty": 0,
        "repetition_penalty": 1,
        "min_p": 0,
        "min_tokens": 0,
        "logit_bias": {},
        "echo": False,
    }
    for name, value in neutral.items():
        assert completion(parser, **{name: value}) == completion(parser), name
    assert chat(parser, logprobs=False, top_logprobs=0) == chat(parser)


def test_fields_without_effect_are_taken(parser: RequestParser) -> None:
    harmless: dict[str, Any] = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": True,
        "safety_identifier": "s",
        "prompt_cache_retention": "24h",
        "prompt_cache_options": {"mode": "explicit"},
        "request_id": "mine",
    }
    assert harmless.keys() == set(WITHOUT_EFFECT)
    for send in (chat, completion):
        assert send(parser, **harmless) == send(parser)


def test_prompt_forms_that_mean_the_same_are_the_same(parser: RequestParser) -> None:
    text = completion(parser, prompt="hello there")
    ids = list(text.request.prompt_ids)
    for form in (["hello there"], ids, [ids]):
        assert completion(parser, prompt=form) == text


def test_text_parts_are_lines_and_developer_is_system(parser: RequestParser) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(parser, messages=[{"role": "user", "content": parts}]) == chat(
        parser, messages=[{"role": "user", "content": "a\nb"}]
    )
    assert chat(parser, messages=[{"role": "developer", "content": "x"}, *HI]) == chat(
        parser, messages=[{"role": "system", "content": "x"}, *HI]
    )


def test_earlier_answer_can_be_sent_back_as_the_client_library_dumps_it(parser: RequestParser) -> None:
    dumped: dict[str, Any] = {
        "role": "assistant",
        "content": "yes",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "tool_calls": None,
    }
    plain = {"role": "assistant", "content": "yes"}
    assert chat(parser, messages=[*HI, dumped, *HI]) == chat(parser, messages=[*HI, plain, *HI])


def test_prompt_and_output_fill_the_context_exactly(parser: RequestParser) -> None:
    ids = [5] * (MAX_LEN - 10)
    assert completion(parser, prompt=ids, max_tokens=10).request.sampling.max_tokens == 10
    assert completion(parser, prompt=ids).request.sampling.max_tokens == 10, "the default gives way to the room"
    with pytest.raises(ApiError) as caught:
        completion(parser, prompt=ids, max_tokens=11)
    assert (caught.value.body.param, caught.value.body.code) == ("max_tokens", "context_length_exceeded")


# --- priority ---


@pytest.mark.parametrize(
    ("fields", "objective", "priority", "priority_class"),
    [
        ({}, None, 0, "standard"),
        ({"service_tier": "priority"}, None, 10, "interactive"),
        ({"service_tier": "auto"}, None, 0, "standard"),
        ({"service_tier": "default"}, None, 0, "standard"),
        ({"service_tier": "flex"}, None, -10, "batch"),
        ({}, "interactive", 10, "interactive"),
        ({}, "batch", -10, "batch"),
        ({"priority": -12}, None, 12, "interactive"),
        ({"priority": -10}, None, 10, "interactive"),
        ({"priority": -9}, None, 9, "standard"),
        ({"priority": 0}, None, 0, "standard"),
        ({"priority": 1}, None, -1, "batch"),
        ({"priority": 1000}, None, -1000, "batch"),
        ({"service_tier": "priority", "priority": -30}, "interactive", 30, "interactive"),
    ],
)
def test_priority_on_the_wire_is_converted_once(
    parser: RequestParser, fields: dict[str, Any], objective: str | None, priority: int, priority_class: str
) -> None:
    """vLLM's integer: lower is sooner. Ours: higher is. The class of an integer is the highest that it reaches."""
    request = completion(parser, objective, **fields).request
    assert (request.priority, request.priority_class) == (priority, priority_class)


@pytest.mark.parametrize(
    ("fields", "objective", "named"),
    [
        ({"service_tier": "flex"}, "interactive", ("service_tier", "x-llm-d-inference-objective")),
        ({"service_tier": "flex", "priority": -10}, None, ("service_tier", "priority")),
        ({"priority": 50}, "standard", ("x-llm-d-inference-objective", "priority")),
    ],
)
def test_priorities_that_disagree_are_refused_naming_both(
    parser: RequestParser, fields: dict[str, Any], objective: str | None, named: tuple[str, str]
) -> None:
    with pytest.raises(ApiError) as caught:
        completion(parser, objective, **fields)
    assert caught.value.status == 400
    assert all(name in (caught.value.body.param or "") and name in caught.value.body.message for name in named)


def test_reply_names_the_tier_of_the_class_in_force(parser: RequestParser) -> None:
    assert completion(parser, "interactive").service_tier == "priority"
    assert completion(parser, priority=-3).service_tier == "default"


# --- what is refused ---

BOTH: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": 10**300}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": 1.5}, "top_k"),
    ({"top_k": -2}, "top_k"),
    ({"seed": 2**63}, "seed"),
    ({"seed": "x"}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": 10**400}, "max_tokens"),
    ({"max_tokens": MAX_LEN}, "max_tokens"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": "x" * 1025}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stream": "true"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": {"other": 1}}, "stream_options.other"),
    ({"stream": True, "stream_options": []}, "stream_options"),
    ({"ignore_eos": "no"}, "ignore_eos"),
    ({"priority": 1001}, "priority"),
    ({"priority": -1001}, "priority"),
    ({"priority": "high"}, "priority"),
    ({"service_tier": "gold"}, "service_tier"),
    ({"service_tier": 1}, "service_tier"),
    ({"user": 5}, "user"),
    ({"metadata": {"a": 1}}, "metadata.a"),
    ({"n": 0}, "n"),
    ({"n": MAX_CHOICES + 1}, "n"),
    ({"n": 1.0}, "n"),
    ({"n": True}, "n"),
    ({"best_of": 2}, "best_of"),
    ({"best_of": 2, "n": 3}, "best_of"),
    ({"best_of": "2", "n": 2}, "best_of"),
    ({"logit_bias": [[5, 1]]}, "logit_bias"),
    ({"logit_bias": {"1024": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"05": 1}}, "logit_bias"),
    ({"logit_bias": {"5.0": 1}}, "logit_bias"),
    ({"logit_bias": {"٥": 1}}, "logit_bias"),
    ({"logit_bias": {"": 1}}, "logit_bias"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"logit_bias": {"5": 100.5}}, "logit_bias"),
    ({"logit_bias": {"5": -101}}, "logit_bias"),
    ({"logit_bias": {"5": True}}, "logit_bias"),
    ({"logit_bias": {"5": None}}, "logit_bias"),
    ({"logit_bias": {"5": "1"}}, "logit_bias"),
    ({"logit_bias": {str(k): 1 for k in range(MAX_BIASES + 1)}}, "logit_bias"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"presence_penalty": "1"}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"frequency_penalty": True}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": -1}, "repetition_penalty"),
    ({"repetition_penalty": 1e300}, "repetition_penalty"),
    ({"repetition_penalty": 1e-300}, "repetition_penalty"),
    ({"min_p": 1.1}, "min_p"),
    ({"min_p": -0.1}, "min_p"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
    ({"min_tokens": MAX_LEN}, "min_tokens"),
    ({"expected_output_tokens": 0}, "expected_output_tokens"),
    ({"expected_output_tokens": 1.5}, "expected_output_tokens"),
    ({"expected_output_tokens": 2**31}, "expected_output_tokens"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": "yes"}, "logprobs"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ({"guided_json": {}}, "guided_json"),
    ({"guided_grammar": "x"}, "guided_grammar"),
    ({"guided_choice": ["a"]}, "guided_choice"),
    ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"guided_regex": "ab**"}, "guided_regex"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"echo": "yes"}, "echo"),
    ({"suffix": "x"}, "suffix"),
    ({"stop_token_ids": [1]}, "stop_token_ids"),
    ({"skip_special_tokens": False}, "skip_special_tokens"),
    ({"temprature": 1}, "temprature"),
    ({"": 1}, ""),
    ({"unknown": None}, "unknown"),
    ({"model": 5}, "model"),
    ({"model": None}, "model"),
]
CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [5]}, "messages[0]"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [*HI, {"role": "robot", "content": "x"}]}, "messages[1].role"),
    ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "user", "content": "x", "colour": "red"}]}, "messages[0].colour"),
    ({"messages": [{"role": "user", "content": "word " * 2000}]}, "messages"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": MAX_LEN}, "max_completion_tokens"),
    ({"max_completion_tokens": 5, "max_tokens": 6}, "max_tokens, max_completion_tokens"),
    ({"prompt": "x"}, "prompt"),
    ({"echo": True}, "echo"),
    ({"logprobs": 1}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": True}, "top_logprobs"),
    ({"logprobs": False, "top_logprobs": 1}, "top_logprobs"),
]  # fmt: skip
COMPLETION: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": ["a", "b"]}, "prompt"),
    ({"prompt": [[1], [2]]}, "prompt"),
    ({"prompt": [[[1]]]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [1024]}, "prompt"),
    ({"prompt": [2**70]}, "prompt"),
    ({"prompt": [5] * MAX_LEN}, "prompt"),
    ({"logprobs": 6}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": 1.5}, "logprobs"),
    ({"echo": 1}, "echo"),
    ({"echo": False, "max_tokens": 0}, "max_tokens"),
    ({"echo": True, "max_tokens": 0, "prompt": [5] * MAX_LEN}, "prompt"),
    ({"messages": HI}, "messages"),
    ({"max_completion_tokens": 5}, "max_completion_tokens"),
]


@pytest.mark.parametrize(("fields", "param"), BOTH + CHAT, ids=lambda v: str(v)[:50])
def test_bad_chat_is_refused_naming_the_parameter(parser: RequestParser, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(parser, **fields)
    assert (caught.value.status, caught.value.body.param) == (400, param)
    assert caught.value.body.type == "invalid_request_error"


@pytest.mark.parametrize(("fields", "param"), BOTH + COMPLETION, ids=lambda v: str(v)[:50])
def test_bad_completion_is_refused_naming_the_parameter(
    parser: RequestParser, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(ApiError) as caught:
        completion(parser, **fields)
    assert (caught.value.status, caught.value.body.param) == (400, param)


@pytest.mark.parametrize("name", sorted(NOT_OFFERED))
def test_field_that_is_not_offered_is_never_ignored(parser: RequestParser, name: str) -> None:
    with pytest.raises(ApiError) as caught:
        completion(parser, None, **{name: {"some": "thing"}})
    assert caught.value.body.param == name


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"nonsense",
        b"null",
        b"[]",
        b'"text"',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"model": "\xff"}',
        b'{"model": "\\ud800"}',
        b'{"model": "\\udc00\\ud800"}',
        b'{"temperature": NaN}',
        b'{"temperature": Infinity}',
        b'{"temperature": 1e999}',
        b'{"max_tokens": ' + b"9" * 10_000 + b"}",
        b'{"model": "x"} trailing',
        b'{"prompt": "\x00"}',
        b"\xef\xbb\xbf{}",
        b"\x1f\x8b\x08",
    ],
    ids=lambda raw: raw[:20],
)
def test_bytes_that_are_no_json_object_are_refused(parser: RequestParser, raw: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        prepare(parser, Api.COMPLETION, raw)
    assert (caught.value.status, caught.value.body.code) == (400, "invalid_json")


@pytest.mark.parametrize("depth", [3, 10, 400, 900])
def test_deep_values_are_refused_whatever_the_depth(parser: RequestParser, depth: int) -> None:
    nested = b"[" * depth + b"]" * depth
    for field in (b"prompt", b"stop", b"metadata", b"tools", b"x"):
        with pytest.raises(ApiError) as caught:
            prepare(
                parser, Api.COMPLETION, b'{"model": "tiny-llama", "prompt": "a", "' + field + b'": ' + nested + b"}"
            )
        assert caught.value.status == 400


def test_other_model_is_not_found(parser: RequestParser) -> None:
    with pytest.raises(ApiError) as caught:
        completion(parser, model="gpt-4")
    assert (caught.value.status, caught.value.body.param, caught.value.body.code) == (404, "model", "model_not_found")


def test_message_about_a_part_shows_the_form_that_is_taken(parser: RequestParser) -> None:
    with pytest.raises(ApiError) as caught:
        chat(parser, messages=[{"role": "user", "content": [{"type": "image_url"}]}])
    assert '{"type": "text", "text": "…"}' in caught.value.body.message
    assert "{{" not in caught.value.body.message


def test_message_to_the_client_does_not_return_its_own_flood(parser: RequestParser) -> None:
    floods: list[dict[str, Any]] = [{"k" * 10_000: 1}, {"service_tier": "s" * 10_000}, {"model": "m" * 10_000}]
    for fields in floods:
        with pytest.raises(ApiError) as caught:
            completion(parser, **fields)
        assert len(caught.value.body.message) < 300
        assert len(caught.value.body.param or "") <= 64


def test_text_with_a_token_that_the_model_has_no_embedding_of_is_refused(tmp_path: Path) -> None:
    model = make_tiny_llama(tmp_path / "padded")
    tokenizer = Tokenizer.from_file(str(model.tokenizer_path))
    tokenizer.add_special_tokens(["[PAD]"])
    tokenizer.save(str(model.tokenizer_path))
    assert tokenizer.token_to_id("[PAD]") == model.vocab_size
    padded = RequestParser(model, MAX_LEN, DEFAULT_CLASSES, "standard")
    for send, fields, param in (
        (completion, {"prompt": "a [PAD]"}, "prompt"),
        (chat, {"messages": [{"role": "user", "content": "[PAD]"}]}, "messages"),
    ):
        with pytest.raises(ApiError) as refused:
            send(padded, **fields)
        assert (refused.value.status, refused.value.body.param) == (400, param)


def test_model_without_a_chat_template_says_so(tiny_model: ModelFolder) -> None:
    from dataclasses import replace

    parser = RequestParser(replace(tiny_model, chat_template=None), MAX_LEN, DEFAULT_CLASSES, "standard")
    with pytest.raises(ApiError) as caught:
        chat(parser)
    assert (caught.value.status, caught.value.body.param) == (400, "messages")
    assert completion(parser).request.prompt_ids
