"""A command in the foreground of a real (pseudo) terminal: who is told of Ctrl-C, and what the exit code is."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# The command: says that it is ready, and ends cleanly, with 0, when it is interrupted. The signal is waited for, not
# handled: one that comes between the last bytecode and a blocking call would be handled only after that call.
COMMAND = textwrap.dedent(
    """
    import signal
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    print("READY", flush=True)
    print("CLEAN" if signal.sigtimedwait({signal.SIGINT}, 20) else "NOT TOLD", flush=True)
    """
)

# Stands for make: runs the command as its child in its own group, and says how it ended and whether it was told too.
PARENT = textwrap.dedent(
    """
    import signal, subprocess, sys
    told = []
    signal.signal(signal.SIGINT, lambda *_: told.append(1))
    code = subprocess.call([sys.executable, "-m", "ops.foreground", sys.executable, "-c", sys.argv[1]])
    print(f"PARENT code={code} told={len(told)}", flush=True)
    """
)


def read_until(fd: int, text: bytes, seconds: float = 30.0) -> bytes:
    got = b""
    deadline = time.monotonic() + seconds
    while text not in got:
        if not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise AssertionError(f"{text!r} did not come within {seconds} s: {got!r}")
        try:
            chunk = os.read(fd, 4096)
        except OSError as error:  # the terminal's last process has gone
            raise AssertionError(f"{text!r} did not come before the end: {got!r}") from error
        got += chunk
    return got


def test_ctrl_c_reaches_the_command_alone_and_its_exit_code_counts() -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execv(sys.executable, [sys.executable, "-c", PARENT, COMMAND])
    try:
        read_until(terminal, b"READY")
        os.write(terminal, b"\x03")
        said = read_until(terminal, b"told=")
        said += read_until(terminal, b"\n") if not said.endswith(b"\n") else b""
        assert b"CLEAN" in said
        assert b"PARENT code=0 told=0" in said
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        pid = 0
    finally:
        os.close(terminal)
        if pid:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ops.foreground", *arguments],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("code", [0, 2, 7])
def test_without_a_terminal_the_command_runs_unchanged_with_its_own_exit_code(code: int) -> None:
    script = "import os, sys; print(os.getpgrp() != os.getpid()); sys.exit(int(sys.argv[1]))"
    result = run(sys.executable, "-c", script, str(code))
    assert (result.returncode, result.stdout, result.stderr) == (code, "True\n", "")


def test_signal_to_its_pid_reaches_the_command() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "ops.foreground", sys.executable, "-c", COMMAND],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "READY\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=30)[0] == "CLEAN\n"
    assert process.returncode == 0


def test_command_that_does_not_exist_is_one_line() -> None:
    result = run("/no/such/command")
    assert (result.returncode, result.stderr) == (127, "/no/such/command: No such file or directory\n")
