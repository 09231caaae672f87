"""What the command line says when it cannot do what it was asked.

Owns: the one exception that every command raises for unusable input or an environment that does not allow it;
`ops.cli.main` turns it into one line on standard error and the exit code. Imports nothing of ours.
"""

from __future__ import annotations


class CommandError(Exception):
    """The command cannot run as asked. The message is one line that a person can act on."""

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(" ".join(message.split()))
        self.exit_code = exit_code
