"""Where the bodies of requests are parsed and tokenised: small ones at once, others in a few threads.

Owns: the threads, and the bound on what waits for them. Imports no parser. Invariant: what waits never exceeds
`PARSER_MAX_BYTES`; beyond it a request is sent away.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from router.errors import ApiError

INLINE_BODY_BYTES = 4096
"""Bodies up to this are parsed and tokenised on the event loop: about 2 ms; longer ones go to a thread."""
PARSER_THREADS = 2
PARSER_MAX_BYTES = 64 * 2**20

_T = TypeVar("_T")


class ParserGate:
    """Runs what a body asks for, where it suits."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._pool = ThreadPoolExecutor(PARSER_THREADS, thread_name_prefix="parser")
        self._held_bytes = 0

    async def run(self, body_bytes: int, work: Callable[[], _T]) -> _T:
        """What `work` returns.

        Raises:
            ApiError: 429 where too much waits for a thread.
        """
        if body_bytes <= INLINE_BODY_BYTES:
            return work()
        if self._held_bytes + body_bytes > PARSER_MAX_BYTES:
            message = "Too many long prompts are waiting to be read; try again later."
            retry_after = str(self._rng.randint(1, 3))
            raise ApiError(429, message, code="queue_full", headers={"retry-after": retry_after})
        self._held_bytes += body_bytes
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self._held_bytes -= body_bytes

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
