"""From bytes to the body that they are: JSON, then fields, each refused by name where it is not as it must be.

Owns: how a body is decoded, which fields are refused, and the messages of both. Imports the models and the tables of
fields. Invariants: whatever the bytes, the result is a body or an ApiError; a field is honoured, without effect, or
refused, and never ignored; one name twice in an object is refused, since two readers might not take the same one.
"""

from __future__ import annotations

import json
import math
import re
from typing import NoReturn, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError

from router.bodies import Message
from router.errors import ApiError
from router.fields import MESSAGE_NOT_OFFERED, NOT_OFFERED, is_neutral

_SHOWN_CHARS = 64
"""Longest piece of a client's own text in a message to it."""
_MARKS = {(b"[", b"{", b","): 2**18, (b":",): 2**16}
"""How many of these characters a body may have beside two for each token of the context."""
MAX_NAMES = 2048
"""Names in one object: none that is taken has as many."""
_HALF_A_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")
"""What may be half of a surrogate pair, and may be a whole one."""

_Body = TypeVar("_Body", bound=BaseModel)


def read(kind: type[_Body], raw: bytes, max_model_len: int) -> _Body:
    """The body of this kind that `raw` is.

    Raises:
        ApiError: 400 naming the parameter.
    """
    fields = _decoded(raw, max_model_len)
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
        fields["messages"] = [_without_absent(m, k) if isinstance(m, dict) else m for k, m in enumerate(messages)]
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _api_error(error) from None


def shown(text: str) -> str:
    """A client's own text, cut, as a message to it may repeat it."""
    return repr(text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 1] + "…")


def _decoded(raw: bytes, max_model_len: int) -> dict[str, object]:
    # Millions of empty lists would be made in a second or two of which no stream gets anything.
    for marks, least in _MARKS.items():
        most = least + 2 * max_model_len
        if len(raw) > most and sum(map(raw.count, marks)) > most:
            raise _no_json(f"it has more than {most} of the characters {b' '.join(marks).decode()}")
    try:
        if _HALF_A_PAIR.search(raw):
            msgspec.json.decode(raw)  # which takes whole pairs only
        value = _json(raw.decode())
    except UnicodeDecodeError as error:
        raise _no_json(f"byte {error.start} is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise _no_json(f"{error.msg} at character {error.pos}") from None
    except msgspec.MsgspecError as error:
        raise _no_json(str(error)) from None
    except ValueError:  # Python's bound on the digits of a number
        raise _no_json("a number has too many digits") from None
    except RecursionError:
        raise _no_json("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ApiError(400, "The body must be a JSON object.", code="invalid_json")
    return value


def _no_json(why: str) -> ApiError:
    return ApiError(400, f"The body is not valid JSON: {why}.", code="invalid_json")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if len(pairs) > MAX_NAMES:
        raise ApiError(400, f"An object in the body has more than {MAX_NAMES} names.", code="invalid_json")
    made = dict(pairs)
    if len(made) < len(pairs):
        seen = set[str]()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        message = f"The parameter {shown(twice)} is given twice."
        raise ApiError(400, message, param=twice[:_SHOWN_CHARS], code="duplicate_parameter")
    return made


def _no_constant(name: str) -> NoReturn:
    raise _no_json(f"{name} is no number")


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise _no_json("a number is out of range")
    return number


_json = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite).decode
"""Made once: `json.loads` makes one for each text."""


def _without_absent(message: dict[str, object], index: int) -> dict[str, object]:
    """A message without what says nothing. Names that nobody knows are refused here: the model would list all of them."""
    kept: dict[str, object] = {}
    for name, value in message.items():
        if name in MESSAGE_NOT_OFFERED:
            if not is_neutral(value, MESSAGE_NOT_OFFERED[name]):
                kept[name] = value
        elif name not in Message.model_fields:
            path = f"messages[{index}].{name}"[:_SHOWN_CHARS]
            raise ApiError(400, f"Unknown parameter: {path!r}.", param=path, code="unknown_parameter")
        elif value is not None:
            kept[name] = value
    return kept


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
