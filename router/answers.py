"""What endpoints answer, as values: whole answers, and the chunks of a stream.

Owns: their fields, from which answers are encoded and `/openapi.json` is made. Imports logprobs' wire forms.
Chunks are written without these (`router/replies.py` says how); a test reads every chunk as one of them.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from router.logprobs import ChatLogprobs, TextLogprobs

Finish = Literal["stop", "length"]


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Of the prompt, what no choice had to compute: it was found in the prefix cache of the replica that gave the first
    token."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """The prompt is counted once, the output of every choice."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class ChatMessage(msgspec.Struct, frozen=True):
    role: Literal["assistant"]
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish


class ChatCompletion(msgspec.Struct, frozen=True):
    """A whole answer to a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    service_tier: str
    choices: tuple[ChatChoice, ...]
    usage: Usage


class TextChoice(msgspec.Struct, frozen=True):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Finish


class Completion(msgspec.Struct, frozen=True):
    """A whole answer to a prompt."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    service_tier: str
    choices: tuple[TextChoice, ...]
    usage: Usage


class ChatDelta(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The role with the first chunk of a choice, text after it, nothing with the last."""

    role: Literal["assistant"] | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType = msgspec.UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None


class ChatChunk(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One event of a chat's stream. Only where the usage was asked for is `usage` there: null, but in the last chunk, which
    has no choice."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    service_tier: str
    choices: tuple[ChatChunkChoice, ...]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


class TextChunkChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Finish | None


class CompletionChunk(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The same of a completion's stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    service_tier: str
    choices: tuple[TextChunkChoice, ...]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


class ModelCard(msgspec.Struct, frozen=True):
    """A model that is served."""

    id: str
    created: int
    max_model_len: int
    root: str
    parent: None = None
    object: Literal["model"] = "model"
    owned_by: str = "forebay"


class ModelList(msgspec.Struct, frozen=True):
    data: tuple[ModelCard, ...]
    object: Literal["list"] = "list"


class Health(msgspec.Struct, frozen=True):
    status: Literal["alive"]


class Ready(msgspec.Struct, frozen=True):
    """Whether work is taken, and of which models."""

    models: dict[str, bool]
    status: Literal["ready"] = "ready"


class RouterPart(msgspec.Struct, frozen=True):
    """What a router says of itself."""

    ready: bool
    classes: dict[str, int]
    """The priority of each class, most urgent first."""
    models: Any
    """`ModelStatus` of each: whether its work is taken, a `BandStatus` of each priority with work, most urgent first, and
    the moves under way."""


class Drained(msgspec.Struct, frozen=True):
    """Which replicas were told to drain, or to take work again."""

    draining: bool
    replica_ids: tuple[str, ...]


class StatusReply(msgspec.Struct, frozen=True):
    """What `forebay status` shows."""

    router: RouterPart
    cluster: Any
    """The controller's `ClusterStatus` with the names of its fields; null where no controller answers."""
