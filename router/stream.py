"""The hand-over of one request's text from the core to the HTTP response that a client reads.

Owns: a bounded buffer with one producer (the core, synchronous) and one consumer (the response, asynchronous), both on
one event loop. Imports outcomes only. Invariants: what is held never exceeds `max_bytes`; one Ending, and it is last.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from router.outcomes import Ending

PART_OVERHEAD_BYTES = 64
"""What holding one part costs beside its text, so that a million empty parts are not free."""


class Pushed(Enum):
    """Whether the buffer took a delta."""

    HELD = "held"
    OVERFLOW = "overflow"


@dataclass(frozen=True, slots=True)
class Batch:
    """All that came since the last take. `tokens` may be above 0 with no text: half a character is held back."""

    text: str
    tokens: int
    ending: Ending | None


class Stream:
    """Text of one request on its way to its client."""

    __slots__ = ("_bytes", "_ending", "_max_bytes", "_on_end", "_parts", "_tokens", "_waiter")

    def __init__(self, max_bytes: int, on_end: Callable[[Ending], None] | None = None) -> None:
        """`max_bytes` bounds the UTF-8 text and the overhead of what the consumer has not taken.

        `on_end` is called once, from within `end`, and must not call back into the core.
        """
        self._max_bytes = max_bytes
        self._on_end = on_end
        self._parts: list[str] = []
        self._tokens = 0
        self._bytes = 0
        self._ending: Ending | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def held_bytes(self) -> int:
        return self._bytes

    @property
    def ending(self) -> Ending | None:
        return self._ending

    def push(self, text: str, tokens: int) -> Pushed:
        """Hand over the text of `tokens` tokens. On OVERFLOW nothing was taken and the producer must end the stream."""
        assert self._ending is None, "nothing follows the ending"
        size = (len(text) if text.isascii() else len(text.encode())) + PART_OVERHEAD_BYTES
        if self._bytes + size > self._max_bytes:
            return Pushed.OVERFLOW
        self._bytes += size
        self._tokens += tokens
        self._parts.append(text)
        self._wake()
        return Pushed.HELD

    def end(self, ending: Ending) -> None:
        """Say how the request ended; what is held is still delivered before it."""
        assert self._ending is None, "a stream ends once"
        self._ending = ending
        self._wake()
        if self._on_end is not None:
            self._on_end(ending)

    async def take(self) -> Batch:
        """Wait for something and take all of it. One consumer only; after a batch with an ending there is no more."""
        if not self._parts and self._ending is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        batch = Batch("".join(self._parts), self._tokens, self._ending)
        self._parts.clear()
        self._tokens = 0
        self._bytes = 0
        return batch

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
