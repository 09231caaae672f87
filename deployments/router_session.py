"""One router's work on a replica, and what is still to be told of it.

Owns: what a session holds. What becomes of it is the server's (replica_server.py). Imports `cluster`, the outbox and the
transport. Invariant: what is to be told is bounded, also for a router that does not read.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque

from cluster.messages import MoveNotice
from cluster.types import Preempted, Refusal, RefusalReason, RequestId, RouterId
from deployments.outbox import AttemptKey, Outbox
from deployments.prefix_feed import PrefixFeed
from deployments.transport import Link

_PREEMPTED_KEPT = 4096
"""Notices of preemption held for a router that does not read; they explain, nothing depends on them."""
_NOTICES_KEPT = 4096
"""Notices of moves held for a router that does not read; one that misses one waits no longer than for a lost link."""


class RouterSession:
    """One router's work on this replica; outlives its links by `orphan_after_s`."""

    def __init__(self, router_id: RouterId, outbox: Outbox, prefixes: PrefixFeed) -> None:
        self.router_id = router_id
        self.outbox = outbox
        self.prefixes = prefixes
        self.link: Link | None = None
        self.sent_s = -math.inf
        """When it was sent a frame last, monotonic."""
        self.applied_sequence = 0
        self.latest_attempt: dict[RequestId, int] = {}
        self.refusals: list[Refusal] = []
        self.preempted: deque[Preempted] = deque(maxlen=_PREEMPTED_KEPT)
        self.notices: deque[MoveNotice] = deque(maxlen=_NOTICES_KEPT)
        self.orphan_timer: asyncio.TimerHandle | None = None

    def refuse(self, key: AttemptKey, reason: RefusalReason) -> None:
        self.refusals.append(Refusal(*key, reason))
