"""What a replica tells the controller of the attempts that are here.

Owns: when the engine is asked, and which of its answer is told. Imports `cluster`; whose an attempt is, and what else is
open about it, the server says. Runs on the replica's event loop. Invariants: the engine is asked one thing at a time and
at most every `_PERIOD_S`; nothing is told of an attempt that is over, nor of one on a replica that is not short of room,
but while the controller has a request that fits nowhere: then who is to leave is weighed over all replicas.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from concurrent.futures import Future

from cluster.messages import HeldRequest
from cluster.ports import Clock, EnginePort, HeldAttempt
from cluster.types import EngineLoad, RouterId

LOG = logging.getLogger("forebay.replica")

_TOLD = 16
"""Attempts in one report: what waits on a thousand replicas is then as much as a controller looks through in a tick."""
_PERIOD_S = 0.1
"""What is told to wait may run by then: called back all the same, it has part of its prompt computed again. At a quarter of a
second that was 1.5 % of all tokens of 100 full replicas, at a tenth 0.6 %."""

OwnerOf = Callable[[HeldAttempt], RouterId | None]
"""The router of an attempt that may be moved or taken back; None where it is over, moves already, or is on trial."""


class HeldFeed:
    """`post` has a function called with an argument on the event loop, from any thread."""

    def __init__(
        self,
        engine: EnginePort,
        clock: Clock,
        owner_of: OwnerOf,
        post: Callable[[Callable[[Future[tuple[HeldAttempt, ...]]], None], Future[tuple[HeldAttempt, ...]]], None],
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._owner_of = owner_of
        self._post = post
        self._asked_s = -math.inf
        self._asking = False
        self._weighed_until_s = -math.inf
        self._answer: tuple[HeldAttempt, ...] = ()

    def weigh(self, for_s: float) -> None:
        """All is weighed for so long, however much room there is."""
        self._weighed_until_s = self._clock.monotonic() + for_s

    def told(self, load: EngineLoad) -> tuple[HeldRequest, ...] | None:
        """With a report: what the engine said last, as far as it is still so, and have it asked again."""
        now_s = self._clock.monotonic()
        if not (short_of_room(load) or (load.running and now_s < self._weighed_until_s)):
            self._answer = ()
            return None
        if not self._asking and now_s - self._asked_s >= _PERIOD_S:
            self._asked_s, self._asking = now_s, True
            self._engine.held(_TOLD).add_done_callback(lambda asked: self._post(self._answered, asked))
        owned = ((h, self._owner_of(h)) for h in self._answer)
        return tuple(_told(h, router_id) for h, router_id in owned if router_id is not None)

    def _answered(self, asked: Future[tuple[HeldAttempt, ...]]) -> None:
        self._asking = False
        if (error := asked.exception()) is None:
            self._answer = asked.result()
        else:  # it has ended, or too much is asked of it
            LOG.info("the engine does not say what it holds: %s", error)
            self._answer = ()


def short_of_room(load: EngineLoad) -> bool:
    """Whether somebody waits, or less than half of the slots or blocks is free: else nothing here is worth moving for
    its own good."""
    running = sum(level.requests for level in load.running)
    return bool(load.waiting) or 2 * running > load.slots_total or 2 * load.blocks_free < load.blocks_total


def _told(held: HeldAttempt, router_id: RouterId) -> HeldRequest:
    return HeldRequest(
        request_id=held.request_id,
        attempt=held.attempt,
        router_id=router_id,
        priority=held.priority,
        standing=held.standing,
        blocks=held.blocks,
        tokens=held.tokens,
        remaining_tokens=held.remaining_tokens,
        to_compute_tokens=held.to_compute_tokens,
    )
