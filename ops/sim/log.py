"""What happened in a simulation, in one hash.

Owns: the form of a line. Imports nothing of ours. Invariant: a line says what happened and when, and nothing of how it
was computed: not how many steps were taken at once, nor any name that differs from one process to the next.
"""

from __future__ import annotations

import hashlib
from typing import BinaryIO

from ops.sim.events import VirtualLoop


class EventLog:
    """Lines of text; each goes into the hash and, where there is one, to a file."""

    def __init__(self, loop: VirtualLoop, file: BinaryIO | None = None) -> None:
        self._loop = loop
        self._hash = hashlib.sha256()
        self._file = file

    def say(self, *words: object) -> None:
        line = f"{self._loop.now_s!r} {' '.join(map(str, words))}\n".encode()
        self._hash.update(line)
        if self._file is not None:
            self._file.write(line)

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()
