"""How a request ended, and what each ending means to the outside.

Owns: the one table from `Outcome` to HTTP status, OpenAI error type and code, drop reason and log level. Imports
`cluster.types` only. Invariant: every outcome has a row, checked at import.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import msgspec

from cluster.types import FinishReason, Outcome


@dataclass(frozen=True, slots=True)
class Meaning:
    """One row. `status` is the HTTP status while no byte of the answer has left; afterwards only the body tells."""

    status: int
    error_type: str
    code: str
    message: str
    log_level: int
    dropped_reason: str | None = None
    """Value of `x-llm-d-request-dropped-reason`, in llm-d's vocabulary; None where llm-d has no such case."""
    again: bool = True
    """Whether the same request may be sent again. OpenAI's clients send again by themselves what ended with a 408, 429 or
    500 and above, unless they are told not to."""


MEANINGS: dict[Outcome, Meaning] = {
    Outcome.FINISHED: Meaning(200, "", "", "", logging.INFO),
    Outcome.CANCELLED: Meaning(
        499, "invalid_request_error", "cancelled", "The client closed the connection.", logging.INFO
    ),
    Outcome.REJECTED_QUEUE_FULL: Meaning(
        429,
        "rate_limit_error",
        "queue_full",
        "The queue of this priority class is full; try again later.",
        logging.WARNING,
        "rejected-saturated",
    ),
    Outcome.REJECTED_WAIT: Meaning(
        429,
        "rate_limit_error",
        "wait_too_long",
        "This priority class has more work than it can begin within its longest wait; try again later.",
        logging.WARNING,
        "rejected-saturated",
    ),
    Outcome.REJECTED_DEADLINE: Meaning(
        429,
        "rate_limit_error",
        "deadline_unreachable",
        "The request cannot be served within the times that it asks for; allow more time or try again later.",
        logging.WARNING,
        "rejected-saturated",
    ),
    Outcome.REJECTED_NO_REPLICA: Meaning(
        503,
        "server_error",
        "no_replica",
        "No replica of this model is available; try again later.",
        logging.WARNING,
        "rejected-no-endpoints",
    ),
    Outcome.REJECTED_DRAINING: Meaning(
        503,
        "server_error",
        "draining",
        "This router is shutting down; try again.",
        logging.WARNING,
        "rejected-shutting-down",
    ),
    Outcome.SHUT_DOWN: Meaning(
        503,
        "server_error",
        "shut_down",
        "This router has shut down before the request had finished; try again.",
        logging.WARNING,
        "evicted",
    ),
    Outcome.REJECTED_TOO_LARGE: Meaning(
        400,
        "invalid_request_error",
        "request_too_large",
        "The prompt and max_tokens together need more memory than any replica has.",
        logging.INFO,
    ),
    Outcome.EXPIRED_IN_QUEUE: Meaning(
        504,
        "server_error",
        "expired_in_queue",
        "The request waited longer for a replica than its class, or it by itself, allows; try again later.",
        logging.WARNING,
        "rejected-ttl-expired",
    ),
    Outcome.TIMED_OUT: Meaning(
        504,
        "server_error",
        "timed_out",
        "The time limit of the request passed before it had finished.",
        logging.WARNING,
        "evicted",
    ),
    Outcome.REPLICA_LOST: Meaning(
        500,
        "server_error",
        "replica_lost",
        "The replicas that ran this request were lost one after another.",
        logging.ERROR,
        "rejected-internal",
    ),
    Outcome.QUARANTINED: Meaning(
        500,
        "server_error",
        "quarantined",
        "Each engine that ran this request died; it is not tried again. Do not send it again as it is.",
        logging.ERROR,
        "rejected-internal",
        again=False,
    ),
    Outcome.ENGINE_ERROR: Meaning(
        500,
        "server_error",
        "engine_error",
        "The engine could not go on with this request.",
        logging.ERROR,
        "rejected-internal",
    ),
    Outcome.SLOW_CLIENT: Meaning(
        408,
        "invalid_request_error",
        "slow_client",
        "The client read its stream too slowly.",
        logging.WARNING,
        "evicted",
    ),
}
if missing := set(Outcome) - set(MEANINGS):
    raise RuntimeError(f"outcomes without a meaning: {sorted(missing)}")


class Ending(msgspec.Struct, frozen=True, gc=False):
    """The last thing that a stream says: how the request ended, and its usage in tokens."""

    outcome: Outcome
    prompt_tokens: int
    completion_tokens: int
    finish: FinishReason | None = None
    """STOP or LENGTH where `outcome` is FINISHED; None otherwise."""
    error: str = ""
    """What happened, fit for the client; empty takes the table's message."""
    retry_after_s: int | None = None
    cached_tokens: int = 0
    """Of the prompt, those that the attempt that gave the first token did not compute."""
    failed_on_several: bool = False
    """Engines of several replicas have ended it with an error: the next would too."""

    @property
    def meaning(self) -> Meaning:
        return MEANINGS[self.outcome]

    @property
    def again(self) -> bool:
        """Whether the same request may be sent again, as for `Meaning`."""
        return self.meaning.again and not self.failed_on_several

    @property
    def message(self) -> str:
        return self.error or self.meaning.message
