"""How a program that is started as a job ends: its exit code, and one line that says why it could not do as asked.

Owns: that translation, for `python -m deployments.up` and those of this folder. Imports the settings' error. Invariant:
what was asked wrongly never ends in a traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import typer

from deployments.settings import UsageError

FAILED_SOME = 1
COULD_NOT = 2
INTERRUPTED = 128
"""And the signal's number, as shells report it."""


def run(program: str, command: Callable[..., Any], arguments: Sequence[str] | None = None) -> int:
    """Run a typer command and return its exit code: what it returns, 0 for None.

    Args:
        program: As it is named in messages.
        arguments: What follows the program's name; None takes it from the process.
    """
    app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})
    app.command()(command)
    given = None if arguments is None else list(arguments)
    try:
        result = app(given, standalone_mode=False, prog_name=f"python -m {program}")
    except UsageError as error:
        return _say(program, str(error))
    except typer.TyperException as error:
        return _say(program, f"{error.format_message()} (--help tells more)")
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED + 2
    return result if isinstance(result, int) else 0


def _say(program: str, message: str) -> int:
    print(f"{program}: {' '.join(message.split())}", file=sys.stderr, flush=True)
    return COULD_NOT
