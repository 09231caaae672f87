"""Whether a request had its first token in time, as its class promises it (`first_token_slo_s`).

Owns: that one rule. Pure. Imports types only. Invariant: each request with an outcome is judged at most once, with its first
token or, where it had none, at its end.
"""

from __future__ import annotations

from cluster.types import Outcome

_CLIENTS_DOING = frozenset(
    {
        Outcome.CANCELLED,
        Outcome.SLOW_CLIENT,
        Outcome.REJECTED_DEADLINE,
        Outcome.EXPIRED_IN_QUEUE,
        Outcome.TIMED_OUT,
    }
)
"""It ended before anybody was late: its client left, or it came with times of its own. Where its class ended it for waiting
too long, the promise is over too, or was longer than what a request may wait."""
_NOT_TO_BE_SERVED = frozenset({Outcome.REJECTED_TOO_LARGE})
"""However much capacity there is."""


def in_time(waited_s: float, slo_s: float) -> bool:
    """Whether a first token that came so long after its request kept the promise."""
    return waited_s <= slo_s


def without_token(outcome: Outcome, waited_s: float, slo_s: float) -> bool | None:
    """The same of a request that ended without a token; None: it says nothing about the promise.

    One that finished had no token to wait for. What was refused or lost was not served in time, however soon that was said.
    """
    if outcome is Outcome.FINISHED or outcome in _NOT_TO_BE_SERVED:
        return None
    if outcome in _CLIENTS_DOING and in_time(waited_s, slo_s):
        return None
    return False
