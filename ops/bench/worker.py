"""A worker process, as the benchmark that asks it sees it.

Owns: starting it, asking it, its patience and its end. Imports the messages of peers/lines.py. Invariants: a question is
answered, or raises, within its time; closing leaves no process behind.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from types import TracebackType

import msgspec

from ops.bench.peers.lines import Failed, Measured, Open, Opened, Profile, Profiled, Run

Answer = Opened | Measured | Profiled | Failed


class WorkerError(RuntimeError):
    """The process did not start, died or fell silent. One line says what it last printed."""


class Worker:
    """One process that runs an engine. To be closed, or used as a context."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start it; `environment` is added to this process's own.

        Raises:
            WorkerError: the command cannot be run.
        """
        self.name = name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        try:
            self._process = self._start(command, {**os.environ, **environment})
        except OSError as error:
            self._log.close()
            raise WorkerError(f"{name}: {command[0]} cannot be run: {error.strerror}") from error
        self._decoder: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)

    def _start(self, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        # A session of its own: an interrupt at the terminal is for the benchmark, which then ends its workers.
        return subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            bufsize=0,
            start_new_session=True,
        )

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def ask(self, message: Open | Run | Profile, timeout_s: float) -> Answer:
        """Send one line and wait for its answer.

        Raises:
            WorkerError: it died, said something else, or said nothing for `timeout_s`.
        """
        assert self._process.stdin is not None
        try:
            self._write(msgspec.json.encode(message) + b"\n")
            line = self._read_line(timeout_s)
        except BrokenPipeError:
            line = b""
        if line is None:
            raise WorkerError(f"{self.name}: no answer for {timeout_s:.0f} s{self._last_words()}")
        if not line.endswith(b"\n"):
            self._process.wait()
            raise WorkerError(f"{self.name}: ended with {self._process.returncode}{self._last_words()}")
        try:
            return self._decoder.decode(line)
        except msgspec.MsgspecError as error:
            raise WorkerError(f"{self.name}: {error}") from error

    def close(self) -> None:
        """End the process and its children."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()
        self._log.close()

    def _write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        view = memoryview(data)
        while view:
            view = view[self._process.stdin.write(view) :]

    def _read_line(self, timeout_s: float) -> bytes | None:
        """A line; what came before the end of the stream; or None if the next part of it did not come in time."""
        assert self._process.stdout is not None
        parts = b""
        while not parts.endswith(b"\n"):
            if not select.select([self._process.stdout], [], [], timeout_s)[0]:
                return None
            part = self._process.stdout.read(65536)
            if not part:
                break
            parts += part
        return parts

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return f": {lines[-1].strip()}" if lines else ""
