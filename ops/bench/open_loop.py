"""Open-loop load: each request leaves at its own time, whatever became of the earlier ones.

Owns: the pacing. Imports nothing of ours. Invariant: no await here depends on an answer until every request has left,
so a slow server meets the load that was planned and not one that waits for it (no coordinated omission).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

R = TypeVar("R")


async def run_open_loop(
    departures: Iterable[tuple[float, Callable[[], Awaitable[R]]]], now_s: Callable[[], float]
) -> list[R]:
    """Start each call at its time, then wait for all.

    Args:
        departures: (when, call) in order of time, in seconds of `now_s`. It is read one ahead, so that a request is
            prepared while its time has not yet come, and no more than one is held.
        now_s: The clock; it advances with the event loop's.

    Returns:
        The results, in the order of departure. A call must not raise: the others would be cancelled and an
        exception group raised.
    """
    async with asyncio.TaskGroup() as group:
        tasks: list[asyncio.Task[R]] = []
        for at_s, call in departures:
            # Also when late: a turn for the answers, which would otherwise be read, and timed, late.
            await asyncio.sleep(max(0.0, at_s - now_s()))
            tasks.append(group.create_task(_await(call)))
            await asyncio.sleep(0)  # it leaves before the next one is prepared
    return [task.result() for task in tasks]


async def _await(call: Callable[[], Awaitable[R]]) -> R:
    return await call()
