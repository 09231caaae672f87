"""Virtual time: what happens next, and when.

Owns: the heap of events and the clock that they move. Imports nothing of ours. Invariants: time never goes back; of events
at one moment the ends of steps come first, by replica, and the others in the order in which they were asked for; so that
the order of everything is a function of what was asked, and not of when it was asked.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple, cast

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_LAST = 1 << 60
"""The place of what is no step's end among events of one moment."""


class VirtualLoop:
    """Implements `ports.Clock`, and as much of an event loop as production's servers ask for: callbacks, timers and tasks."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.events = 0
        """That have happened."""
        self.failures: list[str] = []
        """What went wrong in a task or callback that nobody waits for."""
        self._heap: list[tuple[float, int, int, Callable[..., object], tuple[Any, ...]]] = []
        self._sequence = 0

    # --- ports.Clock ---

    def monotonic(self) -> float:
        return self.now_s

    def unix(self) -> float:
        return self.now_s

    # --- events ---

    def at(self, when_s: float, happens: Callable[[*Ts], object], *args: *Ts, place: int = _LAST) -> None:
        """Have something happen then. `place`: among the events of that moment, the lowest first."""
        self._sequence += 1
        heapq.heappush(self._heap, (when_s, place, self._sequence, happens, args))

    def next(self) -> None:
        """Let the next thing happen.

        Raises:
            IndexError: there is nothing.
        """
        self.now_s, _, _, happens, args = heapq.heappop(self._heap)
        self.events += 1
        happens(*args)

    @property
    def next_s(self) -> float | None:
        """When the next thing happens."""
        return self._heap[0][0] if self._heap else None

    @contextmanager
    def running(self) -> Iterator[None]:
        """What asks asyncio for the running loop gets this one. No circles of garbage are looked for: there are millions of
        objects that stay, and of 70 replicas a hundred in a virtual second are in such circles."""
        collects, outer = gc.isenabled(), asyncio._get_running_loop()
        asyncio._set_running_loop(cast(asyncio.AbstractEventLoop, self))
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()
            asyncio._set_running_loop(outer)

    # --- asyncio.AbstractEventLoop, as much of it as is asked for ---

    def time(self) -> float:
        return self.now_s

    def is_closed(self) -> bool:
        return False

    def get_debug(self) -> bool:
        return False

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        return self.call_at(self.now_s, callback, *args, context=context)

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> None:
        """Nobody calls it off, so there is no handle: each step of an engine is told by it."""
        del context
        self.at(self.now_s, callback, *args)

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.now_s + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        del context
        handle = asyncio.TimerHandle(when, callback, args, cast(asyncio.AbstractEventLoop, self))
        self.at(when, _run, handle, callback, args)
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=cast(asyncio.AbstractEventLoop, self))

    def create_task(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        return asyncio.Task(coroutine, loop=cast(asyncio.AbstractEventLoop, self))

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if (error := context.get("exception")) is not None:  # not of a task that the end of the run has left behind
            self.failures.append(f"{context['message']}: {error!r}")

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It is passed over when its time comes."""


def _run(handle: asyncio.Handle, callback: Callable[..., object], args: tuple[Any, ...]) -> None:
    if not handle.cancelled():
        callback(*args)
