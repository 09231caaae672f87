"""What a replica tells its routers of its prefix cache.

Owns: the sum of all that the engine has told, and what each router is still to be told of it. Imports `cluster`; no
sockets. Invariants: what a router has been told since it was last told `afresh`, with what it is still to be told, is
what the engine holds; a frame carries at most FRAME_BLOCKS of it, so that tokens never wait for it; what a router is
still to be told is at most twice what is held, or twice FRAME_BLOCKS; beyond that it is told all that is held afresh.
"""

from __future__ import annotations

from collections.abc import Collection

from cluster.engine.prefix import numbers_of, told_of
from cluster.types import PrefixChange

FRAME_BLOCKS = 1024
"""8 KiB of a frame; ten frames a second come even from an idle replica."""


class HeldPrefixes:
    """The blocks that the engine holds, by the numbers of their hashes."""

    def __init__(self) -> None:
        self.numbers: set[int] = set()

    def apply(self, change: PrefixChange) -> Collection[int]:
        """Take note of a change. Returns the numbers that it is about."""
        held, gone = numbers_of(change.held), numbers_of(change.gone)
        self.numbers.difference_update(gone)
        self.numbers.update(held)
        return held + gone


class PrefixFeed:
    """What one router is still to be told."""

    def __init__(self, held: HeldPrefixes) -> None:
        self._held = held.numbers
        self._untold: dict[int, None] = {}
        self._afresh = True
        self.begin()

    def begin(self) -> None:
        """It knows nothing: all that is held is told to it, piece by piece."""
        self._untold = dict.fromkeys(self._held)
        self._afresh = True

    def changed(self, numbers: Collection[int]) -> None:
        """These have come or gone."""
        self._untold.update(dict.fromkeys(numbers))
        if len(self._untold) > 2 * max(len(self._held), FRAME_BLOCKS):
            self.begin()

    def take(self) -> PrefixChange | None:
        """The next piece, the newest first: it counts as told from here on. None where there is nothing to tell."""
        untold = self._untold
        if not untold and not self._afresh:
            return None
        if len(untold) <= FRAME_BLOCKS:
            piece = list(reversed(untold))
            untold.clear()
        else:
            piece = [untold.popitem()[0] for _ in range(FRAME_BLOCKS)]
        all_held = self._held
        held = [number for number in piece if number in all_held]
        gone = [number for number in piece if number not in all_held] if len(held) < len(piece) else []
        afresh, self._afresh = self._afresh, False
        return PrefixChange(told_of(held), told_of(gone), afresh)
