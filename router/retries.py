"""Whether a request is tried once more that its engine has ended with an error.

Owns: that decision, and the budget that it is made within. Imports cluster's config alone. Pure but for the budget's one
number; time is an argument. Single writer. Invariant: of one core, retries in any stretch of time are at most `retry_share`
of the requests that were let in during it, and `retry_burst` more.

Going on after a loss, a drain, a move or a preemption is no retry (`losses`): there nothing was wrong with the request. An
error may be its replica's fault, and then another can serve it; or its own, and then it ends with the same error, having cost
twice. Engines do not say which. What they find wrong with a request before they run it a router has refused already, so such
an error is that of a replica that serves something else. The budget bounds what is spent on those that cannot be helped, and
keeps retries from adding to the load of replicas that all fail.

The bucket is filled by requests and not by time, as gRPC's retry throttling is by successes (gRFC A6): what time fills would
allow a router that serves nothing as many retries as one that serves all.
"""

from __future__ import annotations

from enum import StrEnum

from cluster.config import RouterConfig


class Retry(StrEnum):
    """What was decided of a request that its engine has ended with an error."""

    RETRIED = "retried"
    FAILED_AGAIN = "failed_again"
    """It has been tried as often as may be."""
    BUDGET_SPENT = "budget_spent"
    SUSPECT = "suspect"
    """It may have killed an engine."""
    TOO_LATE = "too_late"
    """A time of its own has passed, by which it was to have begun or ended."""
    OFF = "off"
    """`retry_share` is 0, or `retry_attempts` 1."""


class RetryBudget:
    """A bucket, full at first, to which each request adds `retry_share` of a retry."""

    __slots__ = ("_cost", "_full", "_saved")

    def __init__(self, config: RouterConfig) -> None:
        # Counted in requests, so that so many whole ones buy a retry exactly.
        self._cost = 1 / config.retry_share if config.retry_share else 0.0
        self._full = self._saved = self._cost * config.retry_burst

    @property
    def left(self) -> float:
        """Retries that it has."""
        return self._saved / self._cost if self._cost else 0.0

    def let_in(self, requests: int) -> None:
        """So many have been admitted."""
        self._saved = min(self._full, self._saved + requests)

    def spend(self) -> None:
        """One is tried again: `left` was 1 at least."""
        self._saved -= self._cost


def decide(config: RouterConfig, *, left: float, attempts: int, suspect: bool, until_s: float, now_s: float) -> Retry:
    """Whether it is tried once more.

    Args:
        left: Of the budget.
        attempts: Of the request, those that ended with an error, with this one.
        until_s: By when it is to have begun, if it has not, or ended; monotonic, as `now_s`.
    """
    if not config.retry_share or config.retry_attempts == 1:
        return Retry.OFF
    if attempts >= config.retry_attempts:
        return Retry.FAILED_AGAIN
    if suspect:
        return Retry.SUSPECT
    if now_s >= until_s:
        return Retry.TOO_LATE
    return Retry.RETRIED if left >= 1 else Retry.BUDGET_SPENT
