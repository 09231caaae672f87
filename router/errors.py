"""The one form of every error that a client sees.

Owns: `{"error": {message, type, param, code}}`, the exception that carries it to the response, and the header that says
why a request was dropped. Imports outcomes.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from router.outcomes import Ending

DROPPED_HEADER = "x-llm-d-request-dropped-reason"
RETRY_HEADER = "x-should-retry"
"""What OpenAI's clients go by before they look at the status."""


class ErrorBody(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(msgspec.Struct, frozen=True):
    error: ErrorBody


class ApiError(Exception):
    """A request that is answered with an error: the client's fault below 500, ours from there on."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = ErrorBody(message, _type_of(status), param, code)
        self.headers = dict(headers or {})


def error_json(body: ErrorBody) -> bytes:
    return msgspec.json.encode(ErrorReply(body))


def ending_error(ending: Ending) -> ErrorBody:
    """The error that an ending without success is to a client."""
    return ErrorBody(ending.message, ending.meaning.error_type, None, ending.meaning.code)


def _type_of(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"
