"""The output of a batch job, which is its journal too: a line that stands there whole is answered, for ever.

Owns: the output and the file of failed lines, their lock, what is read of them, and that a line is on the disk before it
counts. Imports the lines' forms. Invariants: one job at a time has these files; only whole lines are ever read or added to
(a torn last one is cut off, and its line done again); after a write that failed nothing more is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import msgspec

from deployments.jobs.lines import Answered, read_answer
from deployments.jobs.survey import Names, names_of
from deployments.settings import UsageError

_BACK_BYTES = 1 << 20


class JournalError(Exception):
    """The output cannot be written. The message says why."""


class AnswerFile:
    """One file of answers, held by this process alone until it is closed.

    Raises:
        UsageError: it cannot be opened, or another job has it.
    """

    def __init__(self, path: Path, option: str) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise UsageError(f"{option}: {path} cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._cut_torn_line()
            _sync_folder(path.parent)
        except BlockingIOError as error:
            os.close(self._fd)
            raise UsageError(f"{option}: another job writes {path}; wait until it has ended, or stop it") from error
        except OSError as error:
            os.close(self._fd)
            raise UsageError(f"{option}: {path} cannot be written: {error.strerror}") from error

    def close(self) -> None:
        """Gives up the lock too."""
        os.close(self._fd)

    def read(self) -> Iterator[Answered]:
        """Its lines. Raises UsageError where one is no answer of a batch."""
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    answer = read_answer(line)
                    _ = answer.name
                except (msgspec.MsgspecError, ValueError) as error:
                    raise UsageError(
                        f"{self.path}: line {number} is no answer of a batch job; name another file, or move this away"
                    ) from error
                yield answer

    def append(self, lines: bytes) -> None:
        """Whole lines; returns when they are on the disk. Raises OSError."""
        rest = memoryview(lines)
        while rest:
            rest = rest[os.write(self._fd, rest) :]
        os.fsync(self._fd)

    def _cut_torn_line(self) -> None:
        size = os.fstat(self._fd).st_size
        end = size
        while end > 0:
            begin = max(0, end - _BACK_BYTES)
            found = os.pread(self._fd, end - begin, begin).rfind(b"\n")
            if found >= 0:
                end = begin + found + 1
                break
            end = begin
        if end != size:
            os.ftruncate(self._fd, end)
            os.fsync(self._fd)


class Journal:
    """The output, and beside it, if there is one, the file of failed lines. A context manager; closing gives up the locks."""

    def __init__(self, output: Path, errors: Path | None) -> None:
        """Raises UsageError as `AnswerFile` does."""
        self._stack = contextlib.ExitStack()
        self._output = self._open(output, "--output")
        try:
            self._errors = self._output if errors is None else self._open(errors, "--errors")
        except UsageError:
            self._stack.close()
            raise
        self._files = list(dict.fromkeys((self._output, self._errors)))
        self._waiting: list[tuple[AnswerFile, bytes, asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None
        self._broken: str | None = None

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _open(self, path: Path, option: str) -> AnswerFile:
        file = AnswerFile(path, option)
        self._stack.callback(file.close)
        return file

    def read(self) -> tuple[Names, int]:
        """[m], the names of all answers, and how many of them failed. Raises UsageError where a line is none."""
        names, failed = bytearray(), 0
        for answer in self._all():
            names += answer.name
            failed += answer.failed
        return names_of(names), failed

    def answer(self, place: int) -> Answered:
        """One of them, as `read` counts them, from 0."""
        return next(answer for number, answer in enumerate(self._all()) if number == place)

    def _all(self) -> Iterator[Answered]:
        for file in self._files:
            yield from file.read()

    async def add(self, line: bytes, *, failed: bool) -> None:
        """Returns when the line is on the disk. Lines that come while others are written go together: one wait for the
        disk serves all of them.

        Raises:
            JournalError: it cannot be written, or one before could not.
        """
        if self._broken is not None:
            raise JournalError(self._broken)
        written = asyncio.get_running_loop().create_future()
        self._waiting.append((self._errors if failed else self._output, line, written))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_all(), name="journal")
        # Who is no longer waited for is written all the same, and nobody else's line with it given up.
        await asyncio.shield(written)

    async def flushed(self) -> None:
        """Until nothing is being written."""
        while self._writing is not None:
            await asyncio.wait([self._writing])

    async def _write_all(self) -> None:
        try:
            while group := self._waiting:
                self._waiting = []
                await self._write(group)
        finally:
            self._writing = None

    async def _write(self, group: list[tuple[AnswerFile, bytes, asyncio.Future[None]]]) -> None:
        for file in self._files:
            of_file = [(line, written) for to, line, written in group if to is file]
            if not of_file:
                continue
            try:
                if self._broken is None:
                    await asyncio.to_thread(file.append, b"".join(line for line, _ in of_file))
            except OSError as error:
                self._broken = (
                    f"{file.path} cannot be written: {error.strerror}; what is in it stays, submit again to go on"
                )
            for _, written in of_file:
                if self._broken is None:
                    written.set_result(None)
                else:
                    written.set_exception(JournalError(self._broken))
                    written.exception()  # who was cancelled meanwhile does not ask


def _sync_folder(folder: Path) -> None:
    """A file that was just made is found again after a crash."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
