"""OpenAI's wire form of a request to `cluster.types.Request`: the only place where one becomes the other.

Owns: validation of bodies and of the headers that name a priority, and the rules for both. Imports config, types, the
template and the tokenizer; no web framework. Invariants: whatever the bytes, the result is a request that an engine can
run or an ApiError that names the parameter; a field is honoured, without effect, or refused, and never ignored.

Choices where OpenAI and vLLM leave one: null is an absent field; several text parts of one message are joined with a
newline; `developer` is `system`; a prompt without tokens is refused, streamed or not; `max_tokens` is at least 1, or 0
where only the prompt is to be echoed; `best_of` is only ever `n`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from itertools import pairwise
from typing import Annotated, Literal, TypeVar

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from cluster.config import PriorityClass
from cluster.model import ModelFolder
from cluster.types import Request, RequestId, Sampling
from router.errors import ApiError
from router.fields import MESSAGE_NOT_OFFERED, NOT_OFFERED, is_neutral
from router.priority import class_of
from router.template import ChatTemplate, ChatTemplateError
from router.tokenizer import PromptTokenizer

OBJECTIVE_HEADER = "x-llm-d-inference-objective"
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_CHOICES = 32
"""The largest `n`: as many as an engine runs at once by default."""
MAX_BIASES = 1024
MAX_BIAS = 100.0
MAX_TOP_LOGPROBS = 20
MAX_COMPLETION_LOGPROBS = 5
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
"""Beyond these a logit is no number any more."""
MAX_PRIORITY = 1000
MAX_MESSAGES = 10_000
COMPLETIONS_MAX_TOKENS = 16
"""OpenAI's default for /v1/completions; a chat may fill the context."""
DEFAULT_TENANT = "default"
"""Of requests without an identity; there is no other yet."""
_ID, _ID_CHARS = re.compile(r"0|[1-9][0-9]*", re.ASCII), 10
_SHOWN_CHARS = 64
"""Longest piece of a client's own text in a message to it."""


class Api(StrEnum):
    CHAT = "chat"
    COMPLETION = "completion"


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """A request that can be submitted, and what its reply must look like."""

    request: Request
    """Its first choice."""
    choices: int
    echo: str | None
    """The prompt's text where the answer begins with it."""
    stream: bool
    include_usage: bool
    service_tier: str
    """What the reply's field of this name says: a tier of the class in force, or its name where it has no tier."""

    @property
    def requests(self) -> tuple[Request, ...]:
        """One for each choice, alike but for what names them."""
        first = self.request
        if self.choices == 1:
            return (first,)
        group = first.request_id
        ids = (group, *(RequestId(f"{group}-{choice}") for choice in range(1, self.choices)))
        return tuple(
            msgspec.structs.replace(first, request_id=request_id, choice=choice, group_id=group)
            for choice, request_id in enumerate(ids)
        )


# --- the fields, as pydantic models ---


def _text(value: object) -> str:
    """A string, or a list of text parts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("content", "must be a string or a list of parts of type text")
    texts: list[str] = []
    for part in value:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str) or part.keys() - {"type", "text"}:
            raise PydanticCustomError("content", 'every part must be {"type": "text", "text": "…"}')
        texts.append(text)
    return "\n".join(texts)


def _stops(value: object) -> object:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(s, str) for s in stops):
        raise PydanticCustomError("stop", "must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise PydanticCustomError("stop", "must be at most {n} strings", {"n": MAX_STOPS})
    if not all(0 < len(s) <= MAX_STOP_CHARS for s in stops):
        raise PydanticCustomError("stop", "each string must have 1 to {n} characters", {"n": MAX_STOP_CHARS})
    return tuple(stops)


def _biases(value: object) -> tuple[tuple[int, float], ...]:
    """By token id; ids are strings, as JSON's names are."""
    if not isinstance(value, dict):
        raise PydanticCustomError("logit_bias", "must be an object of token ids and numbers")
    if len(value) > MAX_BIASES:
        raise PydanticCustomError("logit_bias", "must name at most {n} tokens", {"n": MAX_BIASES})
    biases: list[tuple[int, float]] = []
    for name, bias in value.items():
        if not (_ID.fullmatch(name) and len(name) <= _ID_CHARS):
            raise PydanticCustomError("logit_bias", "every name must be a token id in decimal digits")
        if isinstance(bias, bool) or not isinstance(bias, (int, float)) or not -MAX_BIAS <= bias <= MAX_BIAS:
            raise PydanticCustomError("logit_bias", "every value must be a number in -100..100")
        biases.append((int(name), float(bias)))
    return tuple(sorted(biases))


def _prompt(value: object) -> str | tuple[int, ...]:
    """A text, or token ids; each also as a list of one prompt."""
    if isinstance(value, list) and value and isinstance(value[0], (str, list)):
        if len(value) > 1:
            raise PydanticCustomError("prompt", "one prompt per request, got {n}", {"n": len(value)})
        value = value[0]
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value or not all(type(v) is int for v in value):
        raise PydanticCustomError("prompt", "must be a non-empty string or a non-empty list of token ids")
    return tuple(value)


class _Wire(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class _Message(_Wire):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_text)]
    name: str | None = None


class _StreamOptions(_Wire):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: Literal[False] | None = None


class _Common(_Wire):
    model: str
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, lt=2**31)
    min_p: float = Field(0.0, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)
    logit_bias: Annotated[tuple[tuple[int, float], ...], BeforeValidator(_biases)] = ()
    min_tokens: int = Field(0, ge=0, lt=2**31)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    best_of: int | None = None
    expected_output_tokens: int | None = Field(None, ge=1, lt=2**31)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Annotated[tuple[str, ...], BeforeValidator(_stops)] = ()
    stream: bool = False
    stream_options: _StreamOptions | None = None
    ignore_eos: bool = False
    priority: int | None = Field(None, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    service_tier: str | None = None
    # Taken and of no effect on the answer.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class ChatBody(_Common):
    """Body of POST /v1/chat/completions."""

    messages: list[_Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS)

    @property
    def likeliest(self) -> int | None:
        """How many likely tokens to report beside each; None reports nothing."""
        return self.top_logprobs if self.logprobs else None


class CompletionBody(_Common):
    """Body of POST /v1/completions."""

    prompt: Annotated[str | tuple[int, ...], BeforeValidator(_prompt)]
    max_tokens: int | None = Field(None, ge=0, lt=2**31)
    logprobs: int | None = Field(None, ge=0, le=MAX_COMPLETION_LOGPROBS)
    echo: bool = False

    @property
    def likeliest(self) -> int | None:
        """How many likely tokens to report beside each; None reports nothing."""
        return self.logprobs


_Body = TypeVar("_Body", ChatBody, CompletionBody)


# --- from bytes to a request ---


class RequestParser:
    """Turns bodies into requests for one model. Holds no state of requests; safe to use from several threads."""

    def __init__(
        self, model: ModelFolder, max_model_len: int, classes: Sequence[PriorityClass], default_class: str
    ) -> None:
        """Read the model's tokenizer and compile its chat template.

        Raises:
            ChatTemplateError: the template does not compile.
        """
        self._model_name = model.name
        self._vocab_size = model.vocab_size
        self._max_model_len = max_model_len
        self._classes = tuple(classes)
        self._default_class = next(c for c in classes if c.name == default_class)
        self._tokenizer = PromptTokenizer(model.tokenizer_path)
        self.codec = self._tokenizer.codec
        self._template = ChatTemplate(model.chat_template, model.special_tokens) if model.chat_template else None

    def prepare(
        self,
        api: Api,
        raw: bytes,
        *,
        objective: str | None,
        request_id: RequestId,
        arrived_unix_s: float,
        random_seed: int,
    ) -> Prepared:
        """Validate a body, render and tokenise its prompt, and build the request.

        `objective` is the value of the objective header; `random_seed` is used where the body has no seed.

        Raises:
            ApiError: 400 naming the parameter, or 404 for another model.
        """
        body = _validated(ChatBody, raw) if api is Api.CHAT else _validated(CompletionBody, raw)
        if body.model != self._model_name:
            message = f"The model {_shown(body.model)} does not exist; this server has {self._model_name!r}."
            raise ApiError(404, message, param="model", code="model_not_found")
        if body.stream_options is not None and not body.stream:
            raise ApiError(400, "stream_options is only allowed when stream is true.", param="stream_options")
        self._check_sampling(body)
        priority, priority_class = self._priority(body, objective)
        asked, asked_param = _max_tokens(body)
        prompt_param, prompt_ids = self._prompt_ids(body)
        max_tokens = self._room(prompt_ids, prompt_param, asked, asked_param, api)
        if body.min_tokens > max_tokens:
            message = f"min_tokens ({body.min_tokens}) is more than the {max_tokens} tokens that there may be."
            raise ApiError(400, message, param="min_tokens")
        echo = self._echo(body, prompt_ids)
        return Prepared(
            request=Request(
                request_id=request_id,
                tenant=DEFAULT_TENANT,
                priority=priority,
                priority_class=priority_class.name,
                arrived_unix_s=arrived_unix_s,
                prompt_ids=prompt_ids,
                sampling=Sampling(
                    max_tokens=max_tokens,
                    seed=random_seed if body.seed is None else body.seed,
                    temperature=body.temperature,
                    top_p=body.top_p,
                    top_k=max(0, body.top_k),
                    min_p=body.min_p,
                    presence_penalty=body.presence_penalty,
                    frequency_penalty=body.frequency_penalty,
                    repetition_penalty=body.repetition_penalty,
                    logit_bias=body.logit_bias,
                    min_tokens=body.min_tokens,
                    stop=body.stop,
                    ignore_eos=body.ignore_eos,
                    logprobs=body.likeliest,
                    prompt_logprobs=None if echo is None else body.likeliest,
                ),
                stated_output_tokens=body.expected_output_tokens,
            ),
            choices=body.n,
            echo=echo,
            stream=body.stream,
            include_usage=body.stream_options is not None and body.stream_options.include_usage is True,
            service_tier=priority_class.service_tiers[0] if priority_class.service_tiers else priority_class.name,
        )

    def _check_sampling(self, body: ChatBody | CompletionBody) -> None:
        """What one field alone does not say."""
        if body.best_of is not None and body.best_of != body.n:
            message = "best_of other than n is not supported by this server."
            raise ApiError(400, message, param="best_of", code="unsupported_parameter")
        if body.logit_bias and body.logit_bias[-1][0] >= self._vocab_size:
            raise ApiError(400, f"Token ids must lie in 0..{self._vocab_size - 1}.", param="logit_bias")
        if isinstance(body, ChatBody):
            if body.top_logprobs and not body.logprobs:
                raise ApiError(400, "top_logprobs is only allowed when logprobs is true.", param="top_logprobs")
        elif body.max_tokens == 0 and not body.echo:
            raise ApiError(400, "max_tokens must be at least 1, or 0 with echo.", param="max_tokens")

    def _echo(self, body: ChatBody | CompletionBody, prompt_ids: tuple[int, ...]) -> str | None:
        if isinstance(body, ChatBody) or not body.echo:
            return None
        return body.prompt if isinstance(body.prompt, str) else self.codec.text(prompt_ids)

    def _prompt_ids(self, body: ChatBody | CompletionBody) -> tuple[str, tuple[int, ...]]:
        """(name of the parameter, token ids)."""
        if isinstance(body, ChatBody):
            ids = self._tokenizer.encode(self._render(body.messages), add_special_tokens=False)
            param = "messages"
        elif isinstance(body.prompt, str):
            ids = self._tokenizer.encode(body.prompt, add_special_tokens=True) if body.prompt else ()
            param = "prompt"
        else:
            ids, param = body.prompt, "prompt"
        if not ids:
            raise ApiError(400, f"{param} must not be empty: it has no tokens.", param=param)
        # Text too: a tokenizer may have added tokens that the model has no embedding of.
        if not (min(ids) >= 0 and max(ids) < self._vocab_size):
            raise ApiError(400, f"Token ids must lie in 0..{self._vocab_size - 1}.", param=param)
        return param, ids

    def _render(self, messages: Sequence[_Message]) -> str:
        if self._template is None:
            raise ApiError(400, "This model has no chat template: use /v1/completions.", param="messages")
        plain: list[dict[str, str]] = []
        for message in messages:
            role = "system" if message.role == "developer" else message.role
            name = {} if message.name is None else {"name": message.name}
            plain.append({"role": role, "content": message.content, **name})
        try:
            return self._template.render(plain)
        except ChatTemplateError as error:
            raise ApiError(400, str(error), param="messages") from error

    def _room(
        self, prompt_ids: tuple[int, ...], prompt_param: str, asked: int | None, asked_param: str, api: Api
    ) -> int:
        """The number of output tokens, which must fit behind the prompt."""
        room = self._max_model_len - len(prompt_ids)
        if room < 1 or (asked is not None and asked > room):
            param = prompt_param if room < 1 else asked_param
            output = str(asked) if asked else "at least 1"
            message = (
                f"This model's maximum context length is {self._max_model_len} tokens; the request asks for "
                f"{len(prompt_ids)} in the prompt and {output} in the output."
            )
            raise ApiError(400, message, param=param, code="context_length_exceeded")
        if asked is not None:
            return asked
        return room if api is Api.CHAT else min(room, COMPLETIONS_MAX_TOKENS)

    def _priority(self, body: ChatBody | CompletionBody, objective: str | None) -> tuple[int, PriorityClass]:
        """The priority in force and its class, from up to three sources that must agree on the class."""
        named: list[tuple[str, PriorityClass]] = []
        if body.service_tier is not None:
            tiers = {tier: c for c in self._classes for tier in c.service_tiers}
            if body.service_tier not in tiers:
                message = f"service_tier must be one of {sorted(tiers)}, not {_shown(body.service_tier)}."
                raise ApiError(400, message, param="service_tier")
            named.append(("service_tier", tiers[body.service_tier]))
        if objective is not None:
            classes = {c.name: c for c in self._classes}
            if objective not in classes:
                message = f"{OBJECTIVE_HEADER} must be one of {sorted(classes)}, not {_shown(objective)}."
                raise ApiError(400, message, param=OBJECTIVE_HEADER)
            named.append((OBJECTIVE_HEADER, classes[objective]))
        if body.priority is not None:
            # On the wire a lower integer is sooner, as in vLLM; everywhere behind this line a higher one is.
            named.append(("priority", class_of(self._classes, -body.priority)))
        for (first, a), (second, b) in pairwise(named):
            if a.name != b.name:
                message = f"{first} names the class {a.name!r} and {second} the class {b.name!r}: they disagree."
                raise ApiError(400, message, param=f"{first}, {second}")
        priority_class = named[0][1] if named else self._default_class
        return (priority_class.priority if body.priority is None else -body.priority), priority_class


def _validated(kind: type[_Body], raw: bytes) -> _Body:
    fields = _decoded(raw)
    known = kind.model_fields.keys()
    for name in list(fields):
        if name in known:
            if fields[name] is None:
                del fields[name]
        elif name in NOT_OFFERED:
            if not is_neutral(fields[name], NOT_OFFERED[name]):
                message = f"{name} is not supported by this server, at least not with this value."
                raise ApiError(400, message, param=name, code="unsupported_parameter")
            del fields[name]
    messages = fields.get("messages")
    if isinstance(messages, list):
        fields["messages"] = [_without_absent(m) if isinstance(m, dict) else m for m in messages]
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _api_error(error) from None


def _decoded(raw: bytes) -> dict[str, object]:
    try:
        value = msgspec.json.decode(raw)
    except msgspec.MsgspecError as error:
        raise ApiError(400, f"The body is not valid JSON: {error}.", code="invalid_json") from None
    except RecursionError:
        raise ApiError(400, "The body is not valid JSON: it is nested too deeply.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, "The body must be a JSON object.", code="invalid_json")
    return value


def _without_absent(message: dict[str, object]) -> dict[str, object]:
    return {
        k: v
        for k, v in message.items()
        if v is not None and not (k in MESSAGE_NOT_OFFERED and is_neutral(v, MESSAGE_NOT_OFFERED[k]))
    }


def _api_error(error: ValidationError) -> ApiError:
    """The first thing that is wrong, with the path to it: `messages[0].role`."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = ""
    for step in first["loc"]:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    path = path[:_SHOWN_CHARS]
    match first["type"]:
        case "extra_forbidden":
            return ApiError(400, f"Unknown parameter: {path!r}.", param=path, code="unknown_parameter")
        case "missing":
            return ApiError(400, f"Missing parameter: {path!r}.", param=path, code="missing_required_parameter")
        case _:
            return ApiError(400, f"Invalid {path!r}: {first['msg']}.", param=path, code="invalid_value")


def _max_tokens(body: ChatBody | CompletionBody) -> tuple[int | None, str]:
    """(tokens asked for, the parameter that asked)."""
    newer = body.max_completion_tokens if isinstance(body, ChatBody) else None
    if newer is None:
        return body.max_tokens, "max_tokens"
    if body.max_tokens is not None and body.max_tokens != newer:
        message = f"max_tokens ({body.max_tokens}) and max_completion_tokens ({newer}) disagree."
        raise ApiError(400, message, param="max_tokens, max_completion_tokens")
    return newer, "max_completion_tokens"


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 1] + "…")
