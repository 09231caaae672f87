"""The hand-over of one request's text from the core to the HTTP response that a client reads.

Owns: a bounded buffer with one producer (the core, synchronous) and one consumer (the response, asynchronous), both on
one event loop; and the same for the choices of one client's request, read as one. Imports outcomes and the journal's
values. Invariants: what is held for a client never exceeds its buffer's `max_bytes` (beside the logprobs of the prompt,
which come once and are as many as the prompt is long); one Ending a stream, and it is last; text leaves in the order in
which it was pushed, also where the producer writes it directly: only while the consumer waits for more, and so has
written all that it took.

Between two tokens of a stream come those of hundreds of others, so that each object on a token's way is a miss of the
processor's caches: they cost more than what is done there, and there are few of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum

import msgspec

from cluster.types import Outcome, TokenLogprob
from router.journal import Scores
from router.outcomes import Ending

PART_OVERHEAD_BYTES = 64
"""What holding one part costs beside its text, so that a million empty parts are not free."""
LOGPROB_BYTES = 96
"""What one token's logprob holds: the object, its number and its token's id."""
TOP_BYTES = 112
"""What each likely token beside it holds: a pair of an id and a number."""


class Pushed(Enum):
    """Whether the buffer took a delta."""

    HELD = "held"
    """Or written already."""
    OVERFLOW = "overflow"


class Batch(msgspec.Struct, frozen=True):
    """All that came since the last take. `tokens` may be above 0 with no text: half a character is held back."""

    text: str
    tokens: int
    ending: Ending | None
    scores: tuple[Scores, ...] = ()


class Buffer:
    """What the streams to one client have in common: the bound on what they hold, and who waits for them."""

    __slots__ = ("_waiter", "held_bytes", "max_bytes")

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes` bounds the UTF-8 text, the logprobs and the overhead of what the consumer has not taken."""
        self.max_bytes = max_bytes
        self.held_bytes = 0
        self._waiter: asyncio.Future[None] | None = None

    def ring(self) -> None:
        """Wake who waits."""
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():  # a consumer that was cancelled leaves it so
                waiter.set_result(None)

    def rung(self) -> asyncio.Future[None]:
        """Done at the next ring. One waits at a time."""
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter


class Stream:
    """Text of one request on its way to its client."""

    __slots__ = ("_buffer", "_bytes", "_ending", "_on_end", "_parts", "_scores", "_tokens", "write")

    def __init__(self, buffer: Buffer, on_end: Callable[[Ending], None] | None = None) -> None:
        """`on_end` is called once, from within `end`, and must not call back into the core."""
        self.write: Callable[[str], bool] | None = None
        """The direct way of text to the client; there only while the consumer waits. False: nothing was written."""
        self._buffer = buffer
        self._on_end = on_end
        self._parts: list[str] = []
        self._scores: list[Scores] = []
        self._tokens = 0
        self._bytes = 0
        self._ending: Ending | None = None

    @property
    def ending(self) -> Ending | None:
        return self._ending

    @property
    def waits(self) -> bool:
        """Whether there is something to take."""
        return bool(self._parts) or self._ending is not None

    def push(self, text: str, tokens: int, scores: Scores | None = None, *, last: bool = False) -> Pushed:
        """Hand over the text of `tokens` tokens; `last`: the ending follows at once, and both leave together. On OVERFLOW
        nothing was taken and the producer must end the stream."""
        if self.write is not None:
            if scores is None and not last and self.write(text):
                return Pushed.HELD
            self.write = None  # what is held now goes first
        assert self._ending is None, "nothing follows the ending"
        size = (len(text) if text.isascii() else len(text.encode())) + PART_OVERHEAD_BYTES
        if scores is not None:
            size += sum(map(_logprob_bytes, scores.logprobs))
        buffer = self._buffer
        if buffer.held_bytes + size > buffer.max_bytes:
            return Pushed.OVERFLOW
        buffer.held_bytes += size
        self._bytes += size
        self._tokens += tokens
        self._parts.append(text)
        if scores is not None:
            self._scores.append(scores)
        buffer.ring()
        return Pushed.HELD

    def end(self, ending: Ending) -> None:
        """Say how the request ended; what is held is still delivered before it."""
        assert self._ending is None, "a stream ends once"
        self._ending = ending
        self.write = None
        self._buffer.ring()
        if self._on_end is not None:
            self._on_end(ending)

    async def take(self) -> Batch:
        """Wait for something and take all of it. One consumer only; after a batch with an ending there is no more."""
        while not self.waits:
            await self._buffer.rung()
        return self.drain()

    def drain(self) -> Batch:
        """Take all that there is now."""
        parts = self._parts
        text = parts[0] if len(parts) == 1 else "".join(parts)
        scores: tuple[Scores, ...] = ()
        if self._scores:
            scores = tuple(self._scores)
            self._scores.clear()
        batch = Batch(text, self._tokens, self._ending, scores)
        parts.clear()
        self._tokens = 0
        self._buffer.held_bytes -= self._bytes
        self._bytes = 0
        return batch


class Choices:
    """The streams of one client's request, one for each choice, to one consumer.

    They stand and fall together: with the first that ends badly the answer is over.
    """

    def __init__(self, count: int, max_bytes: int, on_over: Callable[[], None]) -> None:
        """`max_bytes` bounds what all hold together. `on_over` is called once, when all have ended or one has ended
        badly; from within the core, which it must not call back."""
        self._buffer = Buffer(max_bytes)
        self._on_over = on_over
        self._write: Callable[[str], bool] | None = None
        self._running = count
        self.streams = tuple(Stream(self._buffer, self._ended) for _ in range(count))
        self._unread = list(range(count))
        """Choices whose ending has not been taken."""
        self.failure: Ending | None = None
        """The first ending that was no success."""

    @property
    def over(self) -> bool:
        """Whether everything has been taken."""
        return not self._unread

    def write_directly(self, write: Callable[[str], bool]) -> None:
        """From now on text of the one choice that comes while the consumer waits goes to `write`, and is held where that
        returns False. Not to be called before all that was taken has been written."""
        assert len(self.streams) == 1, "`write` is not told whose text it is"
        self._write = write

    async def take(self) -> list[tuple[int, Batch]]:
        """Wait for something, and take all that each choice has, by its number."""
        batches: list[tuple[int, Batch]] = []
        while not batches:
            for choice in self._unread:  # no comprehension: this runs for every token, and for one choice mostly
                stream = self.streams[choice]
                if stream.waits:
                    batches.append((choice, stream.drain()))
            if not batches:
                self.streams[0].write = self._write
                try:
                    await self._buffer.rung()
                finally:
                    self.streams[0].write = None
        if self._running < len(self._unread):
            ended = {k for k, batch in batches if batch.ending is not None}
            self._unread = [k for k in self._unread if k not in ended]
        return batches

    def _ended(self, ending: Ending) -> None:
        was_over = self.failure is not None
        self._running -= 1
        if self.failure is None and ending.outcome is not Outcome.FINISHED:
            self.failure = ending
        if not was_over and (self.failure is not None or not self._running):
            self._on_over()


def _logprob_bytes(logprob: TokenLogprob) -> int:
    return LOGPROB_BYTES + TOP_BYTES * len(logprob.top)
