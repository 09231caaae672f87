"""The minimum share: how a less urgent band gets a little of what more urgent work would take whole.

Owns: the credit of each class and whose turn it is by it. Imports the queue's values. Single writer. Invariants: what
is sent out past waiting more urgent work is at most `share` of all service that is sent out, by all routers together
where several have work of the class waiting: each takes its part of what they all send out; credit accrues only while
the class has work waiting, and never exceeds what its next request takes, so nothing can be saved up.

It reorders waiting work only. What it sends out is ahead of what waited at that moment and of nothing else: whatever
arrives later may take its place on the replica like that of any less urgent work (`routing`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from router.queue import Waiting


class MinimumShares:
    """Credits in service, by class."""

    __slots__ = ("_ageing_after_s", "_credits", "_share")

    def __init__(self, share: float, ageing_after_s: float) -> None:
        self._share = share
        self._ageing_after_s = ageing_after_s
        self._credits: dict[str, float] = {}

    def sent(self, service: float, heads: Sequence[Waiting], sharers: Callable[[str], int] = lambda _: 1) -> None:
        """So much service was sent out, of any band, while these were next in each class.

        Args:
            sharers: How many routers a class's share is divided between.
        """
        waiting = {h.priority_class: h for h in heads}
        for gone in self._credits.keys() - waiting.keys():
            del self._credits[gone]
        for name, head in waiting.items():
            gained = self._share * service / sharers(name)
            self._credits[name] = min(self._credits.get(name, 0.0) + gained, float(head.service))

    @property
    def any_saved(self) -> bool:
        """Whether any class has credit."""
        return bool(self._credits)

    def spend(self, waiting: Waiting) -> None:
        """It was sent out, by this or in its ordinary turn: either way its class has had so much."""
        name = waiting.priority_class
        self._credits[name] = max(0.0, self._credits.get(name, 0.0) - waiting.service)

    def due(self, heads: Sequence[Waiting], now_s: float, front: float = -math.inf) -> Waiting | None:
        """Who goes before the most urgent one, if anybody: of those that have waited long enough and whose class can
        pay for them, the one that has waited longest.

        Args:
            heads: The next one of each class, most urgent first.
            front: Priority of the most urgent work that waits on another router.
        """
        if not self._share or not heads:
            return None
        able = [
            head
            for head in heads
            if head.priority < max(front, heads[0].priority)
            and now_s - head.since_s > self._ageing_after_s
            and self._credits.get(head.priority_class, 0.0) >= head.service
        ]
        return min(able, key=lambda head: (head.since_s, head.request_id), default=None)
