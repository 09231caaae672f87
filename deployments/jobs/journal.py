"""The output of a batch job, which is its journal too: a line that stands there whole is answered, for ever.

Owns: the output and the file of failed lines, their lock, what is read of them, and that a line is on the disk before it
counts. Imports the lines' forms. Invariants: one job at a time has these files; only whole lines are ever read or added to
(a torn last one is cut off, and its line done again); a file that is not such a job's is left as it is; after a write that
failed nothing more is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import msgspec
import numpy as np
import numpy.typing as npt

from deployments.jobs.lines import FORM_BYTES, Answered, may_begin_answer, read_answer
from deployments.jobs.survey import Names, names_of
from deployments.settings import UsageError

_BACK_BYTES = 1 << 20


class JournalError(Exception):
    """The output cannot be written. The message says why."""


class AnswerFile:
    """One file of answers, held by this process alone until it is closed. `read` comes before the first `append`.

    Raises:
        UsageError: it cannot be opened, or another job has it.
    """

    def __init__(self, path: Path, option: str) -> None:
        self.path = path
        check_regular(path, option)
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise UsageError(f"{option}: {path} cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
        """Its whole lines; a torn one after them is cut off in the end.

        Raises:
            UsageError: one is no answer of a batch, or what stands after them does not begin like one.
        """
        size, whole, number = os.fstat(self._fd).st_size, self._whole_bytes(), 0
        with self.path.open("rb") as file:
            while file.tell() < whole:
                number += 1
                try:
                    answer = read_answer(file.readline())
                    _ = answer.name
                except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                    raise self._foreign(number) from error
                yield answer
        if whole == size:
            return
        if not may_begin_answer(os.pread(self._fd, FORM_BYTES, whole)):
            raise self._foreign(number + 1)
        os.ftruncate(self._fd, whole)
        os.fsync(self._fd)

    def append(self, lines: bytes) -> None:
        """Whole lines; returns when they are on the disk. Raises OSError."""
        rest = memoryview(lines)
        while rest:
            rest = rest[os.write(self._fd, rest) :]
        os.fsync(self._fd)

    def _whole_bytes(self) -> int:
        """Up to the end of the last whole line."""
        end = os.fstat(self._fd).st_size
        while end > 0:
            begin = max(0, end - _BACK_BYTES)
            found = os.pread(self._fd, end - begin, begin).rfind(b"\n")
            if found >= 0:
                return begin + found + 1
            end = begin
        return 0

    def _foreign(self, number: int) -> UsageError:
        return UsageError(
            f"{self.path}: line {number} is no answer of a batch job; name another file, or move this away"
        )


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
        """[m], the names of all answers, and how many of them failed; to be called once, before anything is added. An answer
        in the file of failed lines does not count where the output has one to the same line: a run without that file gave it.

        Raises:
            UsageError: a line is no answer.
        """
        names, failed = _names_and_failed(self._output)
        if self._errors is not self._output:
            more, more_failed = _names_and_failed(self._errors)
            counts = ~np.isin(more, names)
            names = np.concatenate((names, more[counts]))
            failed = np.concatenate((failed, more_failed[counts]))
        return names, int(np.count_nonzero(failed))

    def answer(self, name: bytes) -> Answered:
        """The first of that name, which `read` has told."""
        return next(answer for file in self._files for answer in file.read() if answer.name == name)

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


def check_regular(path: Path, option: str) -> None:
    """Raises UsageError where something else than a file is there: a pipe is waited for as it is opened, and a device may do
    anything. What is not there, or may not be looked at, is told by who opens it."""
    with contextlib.suppress(OSError):
        if not stat.S_ISREG(path.stat().st_mode):
            raise UsageError(f"{option}: {path} is no regular file; name one")


def _names_and_failed(file: AnswerFile) -> tuple[Names, npt.NDArray[np.bool_]]:
    """[m] and [m], of its answers."""
    names, failed = bytearray(), bytearray()
    for answer in file.read():
        names += answer.name
        failed.append(answer.failed)
    return names_of(names), np.frombuffer(failed, dtype=np.bool_)


def _sync_folder(folder: Path) -> None:
    """A file that was just made is found again after a crash."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
