"""What a replica tells each router of the others' work: what minimum shares sent here, and which suspects are tried.

Owns: the marks of attempts that are here. Imports `cluster`, the sessions, and the routers' rule of trials. Invariant: an
attempt has a mark from its Add until it is over, or its trial is.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.messages import Add
from cluster.types import SharedWork, TokenDelta
from deployments.outbox import AttemptKey
from deployments.router_session import RouterSession
from router.suspects import Trial

_SHARED_TOLD = 64
"""Attempts that minimum shares sent here that a report tells of, the latest."""


@dataclass(slots=True)
class _Tried:
    """A suspect that is tried here."""

    session: RouterSession
    trial: Trial
    tokens: int
    """With so many output tokens it is over."""
    sequence: int
    """Of its add."""


@dataclass(slots=True)
class _Shared:
    """An attempt that a minimum share sent here."""

    session: RouterSession
    priority: int
    since_s: float
    """Monotonic."""
    preempted: bool = False


class MarkedWork:
    """Of all routers. `session` is the one that is told: its own work it knows."""

    def __init__(self) -> None:
        self._shared: dict[AttemptKey, _Shared] = {}
        self._tried: dict[AttemptKey, _Tried] = {}

    def add(self, session: RouterSession, add: Add, now_s: float) -> None:
        key = (add.request.request_id, add.attempt)
        if add.shared:
            self._shared[key] = _Shared(session, add.request.priority, now_s)
        if add.trial:
            self._tried[key] = _Tried(session, Trial(add.trial), add.trial_tokens, add.sequence)

    def told(self, delta: TokenDelta) -> None:
        """It runs, and has tokens."""
        key = (delta.request_id, delta.attempt)
        if key in self._shared:
            self._shared[key].preempted = False
        if self._tried and (tried := self._tried.get(key)) and delta.index + len(delta.token_ids) >= tried.tokens:
            del self._tried[key]

    def preempted(self, key: AttemptKey) -> None:
        if (shared := self._shared.get(key)) is not None:
            shared.preempted = True

    def over(self, key: AttemptKey) -> None:
        self._shared.pop(key, None)
        self._tried.pop(key, None)

    def is_tried(self, key: AttemptKey) -> bool:
        return key in self._tried

    def strictest_trial(self, session: RouterSession | None = None) -> Trial:
        """Of those of others than `session`."""
        if not self._tried:  # as almost always, and asked with every report
            return Trial.NONE
        return max((t.trial for t in self._tried.values() if t.session is not session), default=Trial.NONE)

    def alone(self, session: RouterSession | None) -> int:
        """The sequence of the session's own suspect that has the replica to itself; 0: none has."""
        if not self._tried:
            return 0
        mine = (t.sequence for t in self._tried.values() if t.session is session and t.trial is Trial.ALONE)
        return next(mine, 0)

    def shared_by_others(self, session: RouterSession | None, now_s: float) -> tuple[SharedWork, ...]:
        if not self._shared:
            return ()
        others = [s for s in self._shared.values() if s.session is not session and not s.preempted]
        return tuple(SharedWork(s.priority, now_s - s.since_s) for s in others[-_SHARED_TOLD:])
