"""The life of a process that we own: what its signals mean.

Owns: SIGTERM and SIGINT of a router's or a replica's process that Ray does not run. (Ray's own processes keep their
handlers; Serve awaits a deployment's `__del__` instead.) Imports no Ray.
"""

from __future__ import annotations

import asyncio
import signal
from typing import Protocol


class Drained(Protocol):
    """A router's or a replica's process."""

    async def drain(self) -> None:
        """Finish what has begun, within a stated time."""
        ...

    async def close(self) -> None: ...


async def run_until_told(process: Drained) -> None:
    """Return when `process` is closed: SIGTERM or SIGINT drains it first, the next one closes it at once."""
    loop = asyncio.get_running_loop()
    told, again = asyncio.Event(), asyncio.Event()

    def signalled() -> None:
        (again if told.is_set() else told).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled)
    await told.wait()
    drain, hurry = asyncio.create_task(process.drain()), asyncio.create_task(again.wait())
    await asyncio.wait({drain, hurry}, return_when=asyncio.FIRST_COMPLETED)
    for task in (drain, hurry):
        task.cancel()
    await asyncio.gather(drain, hurry, return_exceptions=True)
    await process.close()
