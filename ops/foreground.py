"""Run a command as the terminal's foreground job: `python -m ops.foreground COMMAND [ARGUMENT …]`.

Owns: the process group of a command that make starts. A terminal sends Ctrl-C to its whole foreground group; make in
that group would report an interrupt, and fail, although the command stopped cleanly, and die at the second Ctrl-C
before the command has ended. In a foreground group of its own the command alone is told. Imports nothing of ours.

Invariant: the command replaces this process, so signals to its pid and its exit status are its own; without a
terminal nothing is changed.
"""

from __future__ import annotations

import os
import signal
import sys


def take_terminal(fd: int = 0) -> bool:
    """Make this process a process group of its own, in the foreground of the terminal `fd`.

    Returns False, having changed nothing, where `fd` is no terminal, or this process is in its background already.
    """
    if not os.isatty(fd) or os.tcgetpgrp(fd) != os.getpgrp():
        return False
    if os.getpid() == os.getpgrp():
        return True
    os.setpgid(0, 0)
    # From here until tcsetpgrp the group is in the background, where that very call would stop it.
    before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    try:
        os.tcsetpgrp(fd, os.getpgrp())
    finally:
        signal.signal(signal.SIGTTOU, before)
    # Ctrl-Z would stop this group alone; make would not notice, and the shell not come back.
    signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    return True


def main() -> None:
    command = sys.argv[1:]
    if not command:
        sys.exit("usage: python -m ops.foreground COMMAND [ARGUMENT ...]")
    take_terminal()
    try:
        os.execvp(command[0], command)  # noqa: S606 - replacing this process is the purpose
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main()
