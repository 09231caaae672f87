"""What a request's headers ask for.

Owns: their names, forms and bounds, and what they become. Imports the router's terms. Invariants: a header that is
honoured is taken in one form only; where it is given twice with two values it is refused, and so is any value out of
bounds, always by the header's name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema
from pydantic_core import PydanticCustomError

from cluster.config import PriorityClass
from router.errors import ApiError
from router.keys import Identity
from router.terms import Terms

OBJECTIVE_HEADER = "x-llm-d-inference-objective"
TTFT_SLO_HEADER = "x-llm-d-slo-ttft-ms"
TIMEOUT_HEADER = "x-forebay-timeout-ms"
SESSION_HEADER = "x-session-id"
CLASS_HEADER = "x-forebay-priority-class"
"""Of answers: the class in force."""
MAX_MS = 24 * 3600 * 1000
"""A day; what is wanted later than that is not wanted within a time."""
MAX_SESSION_CHARS = 255
_DIGITS = re.compile(r"[0-9]{1,10}", re.ASCII)


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What the headers of one request ask for."""

    objective: str | None = None
    highest_class: PriorityClass | None = None
    """The most urgent class that whoever asks may use; none may use all."""
    terms: Terms = Terms()

    def by(self, identity: Identity) -> Asked:
        """The same, asked by somebody."""
        if identity.highest_class is self.highest_class and identity.queue_share == self.terms.queue_share:
            return self
        terms = replace(self.terms, queue_share=identity.queue_share)
        return msgspec.structs.replace(self, highest_class=identity.highest_class, terms=terms)


def _milliseconds(value: str) -> int:
    number = int(value) if _DIGITS.fullmatch(value) else 0
    if not 1 <= number <= MAX_MS:
        raise PydanticCustomError("milliseconds", "must be whole milliseconds in 1..{n}", {"n": MAX_MS})
    return number


def _session(value: str) -> str:
    if not (1 <= len(value) <= MAX_SESSION_CHARS and all("!" <= c <= "~" for c in value)):
        message = "must be 1 to {n} printable ASCII characters without spaces"
        raise PydanticCustomError("session", message, {"n": MAX_SESSION_CHARS})
    return value


_Milliseconds = Annotated[
    int, BeforeValidator(_milliseconds), WithJsonSchema({"type": "integer", "minimum": 1, "maximum": MAX_MS})
]
_Session = Annotated[
    str,
    BeforeValidator(_session),
    WithJsonSchema({"type": "string", "pattern": f"^[!-~]{{1,{MAX_SESSION_CHARS}}}$"}),
]


class RequestHeaders(BaseModel):
    """Headers that the endpoints which generate text act on."""

    model_config = ConfigDict(frozen=True, validate_by_alias=True)

    objective: str | None = Field(
        None,
        alias=OBJECTIVE_HEADER,
        description="Name of the priority class; must agree with service_tier and priority.",
    )
    ttft_slo_ms: _Milliseconds | None = Field(
        None,
        alias=TTFT_SLO_HEADER,
        description="The first token is wanted within so many milliseconds of arrival; what cannot be met is refused.",
    )
    timeout_ms: _Milliseconds | None = Field(
        None, alias=TIMEOUT_HEADER, description="The request is ended at this age, whatever it has by then."
    )
    session: _Session = Field(
        "",
        alias=SESSION_HEADER,
        description="Names a conversation, whose requests are best served where the earlier ones were.",
    )


_NAMES = frozenset(str(field.alias).encode() for field in RequestHeaders.model_fields.values())


def asked_by(headers: Iterable[tuple[bytes, bytes]]) -> Asked:
    """What ASGI's headers ask for.

    Raises:
        ApiError: 400 naming the header.
    """
    given: dict[str, str] = {}
    for raw_name, value in headers:
        if raw_name in _NAMES:
            name, text = raw_name.decode(), value.decode("latin-1").strip()
            if given.setdefault(name, text) != text:
                raise ApiError(400, f"{name} is given twice, with two values.", param=name, code="invalid_value")
    if not given:
        return _NOTHING
    try:
        taken = RequestHeaders.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        name = str(first["loc"][0])
        raise ApiError(400, f"Invalid {name!r}: {first['msg']}.", param=name, code="invalid_value") from None
    terms = Terms(ttft_slo_s=_seconds(taken.ttft_slo_ms), timeout_s=_seconds(taken.timeout_ms), session=taken.session)
    return Asked(objective=taken.objective, terms=terms)


def _seconds(milliseconds: int | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


_NOTHING = Asked()
