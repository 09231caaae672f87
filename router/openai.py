"""OpenAI's wire form of a request to `cluster.types.Request`: the only place where one becomes the other.

Owns: what a body and the headers of one request become, and the rules between fields. Imports config, types, the bodies'
models and prompts; no web framework. Invariant: the result is a request that an engine can run, or an ApiError that
names the parameter.

Choices where OpenAI and vLLM leave one: null is an absent field; several text parts of one message are joined with a
newline; `developer` is `system`; a prompt without tokens is refused, streamed or not; `max_tokens` is at least 1, or 0
where only the prompt is to be echoed; `best_of` is only ever `n`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from itertools import pairwise

import msgspec

from cluster.config import PriorityClass
from cluster.model import ModelFolder
from cluster.types import Request, RequestId, Sampling
from router.auth import check_class
from router.bodies import COMPLETIONS_MAX_TOKENS, ChatBody, CompletionBody
from router.errors import ApiError
from router.headers import OBJECTIVE_HEADER, Asked
from router.priority import class_of
from router.prompts import Prompts
from router.reading import read, shown
from router.terms import Terms


class Api(StrEnum):
    CHAT = "chat"
    COMPLETION = "completion"


class Origin(msgspec.Struct, frozen=True):
    """What makes a request beside its body."""

    asked: Asked
    """By its headers."""
    tenant: str
    request_id: RequestId
    arrived_unix_s: float
    random_seed: int
    """Used where the body has no seed."""


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """A request that can be submitted, and what its reply must look like."""

    model: str
    """The name that its answer says."""
    request: Request
    """Its first choice."""
    choices: int
    echo: str | None
    """The prompt's text where the answer begins with it."""
    stream: bool
    include_usage: bool
    service_tier: str
    """What the reply's field of this name says: a tier of the class in force, or its name where it has no tier."""
    terms: Terms

    @property
    def most_tokens(self) -> int:
        """What it may use, the prompt once."""
        return len(self.request.prompt_ids) + self.choices * self.request.sampling.max_tokens

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


class RequestParser:
    """Turns bodies into requests for one model. Holds no state of requests; safe to use from several threads."""

    def __init__(
        self,
        model: ModelFolder,
        max_model_len: int,
        classes: Sequence[PriorityClass],
        default_class: str,
        aliases: Sequence[str] = (),
    ) -> None:
        """Read the model's tokenizer and compile its chat template.

        Raises:
            ChatTemplateError: the template does not compile.
        """
        self._names = (model.name, *aliases)
        self._vocab_size = model.vocab_size
        self._max_model_len = max_model_len
        self._classes = tuple(classes)
        self._default_class = next(c for c in classes if c.name == default_class)
        self.prompts = Prompts(model, max_model_len)

    def prepare(self, api: Api, raw: bytes, origin: Origin) -> Prepared:
        """Validate a body, render and tokenise its prompt, and build the request.

        Raises:
            ApiError: 400 naming the parameter, 403 for a class that `origin` may not use, or 404 for another model.
        """
        length = self._max_model_len
        body = read(ChatBody, raw, length) if api is Api.CHAT else read(CompletionBody, raw, length)
        self.check_model(body.model)
        if body.stream_options is not None and not body.stream:
            raise ApiError(400, "stream_options is only allowed when stream is true.", param="stream_options")
        self._check_sampling(body)
        priority, priority_class = self._priority(body, origin.asked)
        asked_tokens, asked_param = _max_tokens(body)
        prompt_param, prompt_ids = self._prompt_ids(body)
        max_tokens = self._room(prompt_ids, prompt_param, asked_tokens, asked_param, api)
        if body.min_tokens > max_tokens:
            message = f"min_tokens ({body.min_tokens}) is more than the {max_tokens} tokens that there may be."
            raise ApiError(400, message, param="min_tokens")
        echo = self._echo(body, prompt_ids)
        return Prepared(
            model=self._names[0],
            request=Request(
                request_id=origin.request_id,
                tenant=origin.tenant,
                priority=priority,
                priority_class=priority_class.name,
                arrived_unix_s=origin.arrived_unix_s,
                prompt_ids=prompt_ids,
                sampling=Sampling(
                    max_tokens=max_tokens,
                    seed=origin.random_seed if body.seed is None else body.seed,
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
            terms=_with_session(origin.asked.terms, body.session_id or body.prompt_cache_key),
        )

    def check_model(self, name: str) -> None:
        """Raises ApiError where this server does not have the model."""
        if name not in self._names:
            raise unknown_model(name, self._names)

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
        return body.prompt if isinstance(body.prompt, str) else self.prompts.codec.text(prompt_ids)

    def _prompt_ids(self, body: ChatBody | CompletionBody) -> tuple[str, tuple[int, ...]]:
        """(name of the parameter, token ids)."""
        if isinstance(body, ChatBody):
            param = "messages"
            ids = self.prompts.encode(self.prompts.render(body.messages), param, add_special_tokens=False)
        elif isinstance(body.prompt, str):
            param = "prompt"
            ids = self.prompts.encode(body.prompt, param, add_special_tokens=True) if body.prompt else ()
        else:
            ids, param = body.prompt, "prompt"
        if not ids:
            raise ApiError(400, f"{param} must not be empty: it has no tokens.", param=param)
        self.prompts.check(ids, param)
        return param, ids

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

    def _priority(self, body: ChatBody | CompletionBody, asked: Asked) -> tuple[int, PriorityClass]:
        """The priority in force and its class, from up to three sources that must agree on the class.

        Who names none gets the default class, or the highest that they may use where that is lower.
        """
        objective = asked.objective
        named: list[tuple[str, PriorityClass]] = []
        if body.service_tier is not None:
            tiers = {tier: c for c in self._classes for tier in c.service_tiers}
            if body.service_tier not in tiers:
                message = f"service_tier must be one of {sorted(tiers)}, not {shown(body.service_tier)}."
                raise ApiError(400, message, param="service_tier")
            named.append(("service_tier", tiers[body.service_tier]))
        if objective is not None:
            classes = {c.name: c for c in self._classes}
            if objective not in classes:
                message = f"{OBJECTIVE_HEADER} must be one of {sorted(classes)}, not {shown(objective)}."
                raise ApiError(400, message, param=OBJECTIVE_HEADER)
            named.append((OBJECTIVE_HEADER, classes[objective]))
        if body.priority is not None:
            # On the wire a lower integer is sooner, as in vLLM; everywhere behind this line a higher one is.
            named.append(("priority", class_of(self._classes, -body.priority)))
        for (first, a), (second, b) in pairwise(named):
            if a.name != b.name:
                message = f"{first} names the class {a.name!r} and {second} the class {b.name!r}: they disagree."
                raise ApiError(400, message, param=f"{first}, {second}")
        if named:
            param, priority_class = named[0]
            check_class(priority_class, param, asked.highest_class, self._classes)
        else:
            may_use = (self._default_class, asked.highest_class or self._default_class)
            priority_class = min(may_use, key=lambda c: c.priority)
        return (priority_class.priority if body.priority is None else -body.priority), priority_class


def unknown_model(name: str, there: Sequence[str]) -> ApiError:
    message = f"The model {shown(name)} does not exist; this server has {', '.join(map(repr, there))}."
    return ApiError(404, message, param="model", code="model_not_found")


def _max_tokens(body: ChatBody | CompletionBody) -> tuple[int | None, str]:
    """(tokens asked for, the parameter that asked)."""
    newer = body.max_completion_tokens if isinstance(body, ChatBody) else None
    if newer is None:
        return body.max_tokens, "max_tokens"
    if body.max_tokens is not None and body.max_tokens != newer:
        message = f"max_tokens ({body.max_tokens}) and max_completion_tokens ({newer}) disagree."
        raise ApiError(400, message, param="max_tokens, max_completion_tokens")
    return newer, "max_completion_tokens"


def _with_session(terms: Terms, named: str | None) -> Terms:
    """The header goes before what the body names."""
    return terms if terms.session or not named else replace(terms, session=named)
