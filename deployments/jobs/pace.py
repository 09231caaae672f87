"""How many requests of a batch are in flight: as many as are accepted.

Owns: that decision, pure, and the gate that keeps to it. Imports nothing of ours. Invariants: the limit stays within its
bounds; it grows only while it is used up; of requests that went out together only the first that is refused halves it; while
a refusal's time runs nothing is sent, and no refusal is without one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from cluster.ports import Clock

_PAUSE_MAX_S = 60.0
"""Router's Retry-After is never longer; what stands before it may say anything."""
_PAUSE_LEAST_S = 0.5
"""Where less is said, and twice that with each wave of refusals in which nothing was accepted: not a busy loop."""
_DOUBLED_MAX = 6


@dataclass(frozen=True, slots=True)
class Pace:
    """AIMD, as TCP has it: doubled with each round up to `fast_to`, beyond it one more with each."""

    limit: float
    """Requests in flight, at most; its whole part counts."""
    limit_max: int
    """At least 1, which is also the least that the limit falls to."""
    fast_to: float = float("inf")
    """Up to here it doubles: half of what it was as refusals began."""
    accepted_since: bool = True
    """Whether anything was, since it was halved last: refusals without do not say again where it is fast."""
    waves: int = 0
    """Halved so often one after another, nothing accepted between."""
    halved_s: float = float("-inf")
    paused_until_s: float = float("-inf")

    def accepted(self, in_flight: int) -> Pace:
        """One was served, of so many that were in flight."""
        if in_flight < int(self.limit):  # what is not used says nothing about more
            return replace(self, accepted_since=True)
        more = 1.0 if self.limit < self.fast_to else 1.0 / self.limit
        return replace(self, limit=min(float(self.limit_max), self.limit + more), accepted_since=True)

    def refused(self, sent_s: float, now_s: float, pause_s: float, chance: float) -> Pace:
        """One that was sent at `sent_s` is not wanted for `pause_s`. `chance`, in [0, 1), spreads jobs that are told too
        little of it."""
        if sent_s <= self.halved_s:  # one of a wave that is known
            return replace(self, paused_until_s=max(self.paused_until_s, now_s + min(pause_s, _PAUSE_MAX_S)))
        waves = 0 if self.accepted_since else self.waves + 1
        if pause_s < _PAUSE_LEAST_S:
            pause_s = _PAUSE_LEAST_S * 2 ** min(waves, _DOUBLED_MAX) * (1.0 + chance)
        half = max(1.0, self.limit / 2)
        return replace(
            self,
            limit=half,
            fast_to=half if self.accepted_since else self.fast_to,
            accepted_since=False,
            waves=waves,
            halved_s=now_s,
            paused_until_s=max(self.paused_until_s, now_s + min(pause_s, _PAUSE_MAX_S)),
        )


class ClosedError(Exception):
    """Nothing more is to be sent."""


class Gate:
    """Who may send now. Those who try again go before new ones."""

    def __init__(self, pace: Pace, clock: Clock) -> None:
        self._pace = pace
        self._clock = clock
        self._again: deque[asyncio.Future[None]] = deque()
        self._new: deque[asyncio.Future[None]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self.in_flight = 0
        self.open_lines = 0
        """Begun and not answered yet: in flight, or between two tries. As many as the limit at most, or as it was."""
        self.closed = asyncio.Event()

    @property
    def limit(self) -> int:
        return int(self._pace.limit)

    async def begin(self) -> None:
        """A new line; `end` is called when it is answered or given up. Raises ClosedError."""
        await self._wait(self._new)

    def end(self) -> None:
        self.open_lines -= 1
        self._wake()

    async def enter(self) -> float:
        """A try of a line that was begun; `leave` is called after it. Returns the time. Raises ClosedError."""
        await self._wait(self._again)
        return self._clock.monotonic()

    def leave(self, judge: Callable[[Pace], Pace]) -> None:
        self._pace = judge(self._pace)
        self.in_flight -= 1
        self._wake()

    def close(self) -> None:
        """Those who wait, and all who come, get ClosedError."""
        self.closed.set()
        for waiter in (*self._again, *self._new):
            if not waiter.done():
                waiter.set_exception(ClosedError())
        self._again.clear()
        self._new.clear()
        if self._timer is not None:
            self._timer.cancel()

    async def _wait(self, line: deque[asyncio.Future[None]]) -> None:
        if self.closed.is_set():
            raise ClosedError
        waiter = asyncio.get_running_loop().create_future()
        line.append(waiter)
        self._wake()
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._give_back(line)
            raise

    def _give_back(self, line: deque[asyncio.Future[None]]) -> None:
        if line is self._again:
            self.in_flight -= 1
        else:
            self.open_lines -= 1
        self._wake()

    def _resume(self) -> None:
        self._timer = None
        self._wake()

    def _wake(self) -> None:
        wait_s = self._pace.paused_until_s - self._clock.monotonic()
        if wait_s > 0:
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(wait_s, self._resume)
            return
        while self.in_flight < self.limit and (waiter := _next(self._again)):
            self.in_flight += 1
            waiter.set_result(None)
        while self.open_lines < self.limit and (waiter := _next(self._new)):
            self.open_lines += 1
            waiter.set_result(None)


def _next(line: deque[asyncio.Future[None]]) -> asyncio.Future[None] | None:
    """The first who still waits."""
    while line:
        waiter = line.popleft()
        if not waiter.done():
            return waiter
    return None
