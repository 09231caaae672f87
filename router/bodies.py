"""The bodies that clients send, as pydantic models: each field, its form and its bounds.

Owns: the one description of what is taken, from which bodies are validated and `/openapi.json` is made. Data and
validators only; what a body becomes lies in `router/openai.py`.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from router.headers import MAX_SESSION_CHARS

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
_ID, _ID_CHARS = re.compile(r"0|[1-9][0-9]*", re.ASCII), 10


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


# What the validators above take, for the document of the API.
_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
    "additionalProperties": False,
}
_STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXT_PROMPT = {"type": "string", "minLength": 1}
_Content = Annotated[
    str, BeforeValidator(_text), WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]})
]
_Stop = Annotated[
    tuple[str, ...],
    BeforeValidator(_stops),
    WithJsonSchema({"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOPS}]}),
]
_Biases = Annotated[
    tuple[tuple[int, float], ...],
    BeforeValidator(_biases),
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": f"^({_ID.pattern})$", "maxLength": _ID_CHARS},
            "additionalProperties": {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
            "maxProperties": MAX_BIASES,
        }
    ),
]
_Prompt = Annotated[
    str | tuple[int, ...],
    BeforeValidator(_prompt),
    WithJsonSchema(
        {
            "anyOf": [
                _TEXT_PROMPT,
                _IDS,
                {"type": "array", "items": {"anyOf": [_TEXT_PROMPT, _IDS]}, "minItems": 1, "maxItems": 1},
            ]
        }
    ),
]


class _Wire(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class Message(_Wire):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant"] = Field(description="`developer` is `system`.")
    content: _Content = Field(description="Text; several parts are joined with newlines.")
    name: str | None = Field(None, description="Given to the chat template.")


class StreamOptions(_Wire):
    """What a stream has beside text."""

    include_usage: bool | None = Field(None, description="Whether a chunk with the usage comes before the end.")
    include_obfuscation: bool | None = Field(None, description="Without effect.")
    continuous_usage_stats: Literal[False] | None = Field(None, description="Not offered.")


class _Generation(_Wire):
    model: str = Field(description="The name that /v1/models says.")
    max_tokens: int | None = Field(
        None, ge=1, lt=2**31, description="Most output tokens; absent, as many as the context has room for."
    )
    temperature: float = Field(1.0, ge=0, le=2, description="0 takes the likeliest token.")
    top_p: float = Field(1.0, gt=0, le=1, description="The likeliest candidates that make up so much are kept.")
    top_k: int = Field(0, ge=-1, lt=2**31, description="Candidates kept; 0 and -1 keep all.")
    min_p: float = Field(
        0.0, ge=0, le=1, description="Candidates less likely than this times the likeliest are dropped."
    )
    presence_penalty: float = Field(0.0, ge=-2, le=2, description="Taken off the logit of what the output has.")
    frequency_penalty: float = Field(0.0, ge=-2, le=2, description="The same as often as the output has it.")
    repetition_penalty: float = Field(
        1.0,
        ge=MIN_REPETITION_PENALTY,
        le=MAX_REPETITION_PENALTY,
        description="Logits of what prompt or output have are divided by it, negative ones multiplied.",
    )
    logit_bias: _Biases = Field((), description="Token id -> what is added to its logit.")
    min_tokens: int = Field(0, ge=0, lt=2**31, description="Output tokens before which nothing but the length ends it.")
    n: int = Field(1, ge=1, le=MAX_CHOICES, description="Choices, each with chances of its own.")
    best_of: int | None = Field(None, description="Only ever n.")
    expected_output_tokens: int | None = Field(
        None, ge=1, lt=2**31, description="How long the answer is expected to be; orders work, bounds nothing."
    )
    seed: int | None = Field(None, ge=-(2**63), lt=2**63, description="Repeats a drawn text; absent, one is given.")
    stop: _Stop = Field((), description="Text at which the answer ends, itself not sent.")
    stream: bool = Field(False, description="Whether the answer comes as server-sent events.")
    stream_options: StreamOptions | None = Field(None, description="Only with stream.")
    ignore_eos: bool = Field(False, description="Whether the end token ends nothing.")
    priority: int | None = Field(
        None,
        ge=-MAX_PRIORITY,
        le=MAX_PRIORITY,
        description="Lower is sooner, as in vLLM; must agree with service_tier.",
    )
    service_tier: str | None = Field(None, description="Names the priority class.")
    session_id: str | None = Field(
        None,
        max_length=MAX_SESSION_CHARS,
        description="Names the conversation, as vLLM has it, where the header x-session-id does not.",
    )
    prompt_cache_key: str | None = Field(
        None, max_length=MAX_SESSION_CHARS, description="The same as OpenAI has it, where neither says it."
    )
    # Taken and of no effect: `router.fields.WITHOUT_EFFECT` names them.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, object] | None = None
    request_id: str | None = None


class ChatBody(_Generation):
    """Body of POST /v1/chat/completions."""

    messages: list[Message] = Field(
        min_length=1, max_length=MAX_MESSAGES, fail_fast=True, description="The chat so far."
    )
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31, description="Most output tokens; as max_tokens.")
    logprobs: bool = Field(False, description="Whether each token's logprob is reported.")
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS, description="Likeliest tokens beside each; with logprobs.")

    @property
    def likeliest(self) -> int | None:
        """How many likely tokens to report beside each; None reports nothing."""
        return self.top_logprobs if self.logprobs else None


class CompletionBody(_Generation):
    """Body of POST /v1/completions."""

    prompt: _Prompt = Field(description="Text or token ids, of one prompt.")
    max_tokens: int | None = Field(
        None, ge=0, lt=2**31, description=f"Most output tokens; absent, {COMPLETIONS_MAX_TOKENS}; 0 only with echo."
    )
    logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_COMPLETION_LOGPROBS,
        description="Likeliest tokens reported beside each; absent, none and no logprobs.",
    )
    echo: bool = Field(False, description="Whether the answer begins with the prompt.")

    @property
    def likeliest(self) -> int | None:
        """How many likely tokens to report beside each; None reports nothing."""
        return self.logprobs


class TokenizeBody(_Wire):
    """Body of POST /tokenize: a prompt, or the messages of a chat."""

    model: str | None = Field(None, description="The name that /v1/models says.")
    prompt: str | None = Field(None, description="Text, as of a completion.")
    messages: list[Message] | None = Field(
        None, min_length=1, max_length=MAX_MESSAGES, fail_fast=True, description="A chat, as of /v1/chat/completions."
    )
    add_special_tokens: bool | None = Field(
        None, description="Whether the tokenizer adds its markers; absent, to a prompt and not to a chat."
    )
    add_generation_prompt: bool = Field(True, description="Whether a chat's text opens the assistant's answer.")
    return_token_strs: bool = Field(False, description="Whether each token is given as its vocabulary writes it.")


class DetokenizeBody(_Wire):
    """Body of POST /detokenize."""

    model: str | None = Field(None, description="The name that /v1/models says.")
    tokens: list[Annotated[int, Field(ge=0, lt=2**63)]] = Field(fail_fast=True, description="Token ids.")
