"""Processes that begin with their imports done: each is a fork of one that has imported what all of them run.

Owns: the process that they are forked from, which is Python's fork server, and a forked one in the form of
`subprocess.Popen`. Importing torch and Ray takes seconds of a core, as often as a test starts a part of the line; a fork
takes milliseconds. Invariants: the server does nothing but import, so that no thread, loop or file is there twice; what it
imported is frozen for the collector of garbage; a forked one is a process and a session of its own, with the environment
of whoever starts it.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import IO

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.forks_import"])


class Forked:
    """Runs `main(*arguments)` of a module. As subprocess.Popen with pipes, as far as parts of the line are used."""

    def __init__(self, module: str, arguments: Sequence[str], environment: Mapping[str, str], log: IO[bytes]) -> None:
        theirs_in, ours_in = _context.Pipe(duplex=False)
        ours_out, theirs_out = _context.Pipe(duplex=False)
        has_begun, begun = _context.Pipe(duplex=False)
        theirs_log = Connection(os.dup(log.fileno()), readable=False)
        streams = (theirs_in, theirs_out, theirs_log)
        # A daemon: one that a test leaves behind is ended with the tests.
        self._process = _context.Process(
            target=_run, args=(module, tuple(arguments), dict(environment), streams, begun), daemon=True
        )
        self._process.start()
        for theirs in (*streams, begun):
            theirs.close()
        self.stdin, self.stdout = _raw(ours_in, "wb"), _raw(ours_out, "rb")
        with has_begun:
            has_begun.recv_bytes()
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        self.ended_fd: int = self._process.sentinel
        """Readable once it has ended."""

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self._process.name, timeout)
        return code

    def kill(self) -> None:
        self._process.kill()

    def terminate(self) -> None:
        self._process.terminate()


def _raw(ours: Connection, mode: str) -> IO[bytes]:
    with ours:
        return os.fdopen(os.dup(ours.fileno()), mode, buffering=0)


def _run(
    module: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    streams: Sequence[Connection],
    begun: Connection,
) -> None:
    """In the forked process."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    for fd, stream in enumerate(streams):
        os.dup2(stream.fileno(), fd)
        stream.close()
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    begun.send_bytes(b"begun")
    begun.close()
    importlib.import_module(module).main(*arguments)
