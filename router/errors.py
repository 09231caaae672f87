"""The one form of every error that a client sees.

Owns: `{"error": {message, type, param, code}}`, the exception that carries it to the response, which of them there are before
a request is submitted, and the header that says why a request was dropped. Imports outcomes.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from router.outcomes import Ending

DROPPED_HEADER = "x-llm-d-request-dropped-reason"
RETRY_HEADER = "x-should-retry"
"""What OpenAI's clients go by before they look at the status."""
AT_THE_DOOR = (
    (400, "context_length_exceeded"),
    (400, "duplicate_parameter"),
    (400, "invalid_json"),
    (400, "invalid_request_error"),
    (400, "invalid_value"),
    (400, "missing_required_parameter"),
    (400, "request_too_large"),
    (400, "unknown_parameter"),
    (400, "unsupported_parameter"),
    (401, "invalid_api_key"),
    (403, "class_not_allowed"),
    (404, "model_not_found"),
    (408, "body_timeout"),
    (413, "body_too_large"),
    (415, "unsupported_media"),
    (429, "queue_full"),
    (429, "rate_limit_exceeded"),
)
"""Status and word (`ApiError.word`) of each error that a request for tokens may be answered with before it is submitted: as many
series. A test finds one that is not here."""


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

    @property
    def word(self) -> str:
        """What it is counted by: the code, or the type of an error without one."""
        return self.body.code or self.body.type


def error_json(body: ErrorBody) -> bytes:
    return msgspec.json.encode(ErrorReply(body))


def ending_error(ending: Ending) -> ErrorBody:
    """The error that an ending without success is to a client."""
    return ErrorBody(ending.message, ending.meaning.error_type, None, ending.meaning.code)


def _type_of(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"
