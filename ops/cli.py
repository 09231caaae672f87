"""`forebay`, the one command.

Owns: the tree of commands, how errors look and the exit codes: 0 done, 1 done with failures that were counted and
shown, 2 could not be done as asked (one line says why), 130 interrupted. What a command does lies in its own module,
imported when it runs, so that help is instant.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from ops.alerts_cli import alerts
from ops.bench.cli import app as bench_app
from ops.dashboards_cli import app as dashboards_app
from ops.drain_cli import drain
from ops.errors import CommandError
from ops.explain_cli import explain
from ops.keys_cli import app as keys_app
from ops.serve_cli import serve, status
from ops.simulate_cli import simulate
from ops.top_cli import top

_INTERRUPTED = 130
"""128 + SIGINT, as shells report it."""
HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}
"""Of every command."""

app = typer.Typer(
    name="forebay",
    help="Serve language models so that urgent work is never slowed by the work that fills the machines.",
    epilog="Begin with: forebay serve. Each command explains itself with --help.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    add_completion=False,
    context_settings=HELP_OPTIONS,
)
app.command()(serve)
app.command()(status)
app.command()(top)
app.command()(explain)
app.command()(drain)
app.command()(simulate)
app.command()(alerts)
app.add_typer(keys_app, name="keys")
app.add_typer(bench_app, name="bench")
app.add_typer(dashboards_app, name="dashboards")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"forebay {importlib.metadata.version('forebay')}")
        raise typer.Exit


@app.callback()
def _forebay(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


def run(arguments: Sequence[str] | None = None, *, command: Callable[..., Any] = app, program: str = "forebay") -> int:
    """Run one command line and return its exit code. Errors are one line on standard error.

    Args:
        arguments: What follows the program's name; None takes it from the process.
        command: A typer application, or the command of one.
        program: As people call it; its last word begins what it says of errors.
    """
    name = program.rpartition(" ")[2]
    try:
        result = command(arguments if arguments is None else list(arguments), standalone_mode=False, prog_name=program)
    except CommandError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return error.exit_code
    except typer.TyperException as error:
        message = " ".join(error.format_message().split())
        if message:  # empty where no command was named: the help was printed already
            print(f"{name}: {message} (--help tells more)", file=sys.stderr)
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        result = _INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe went away, as `| head` does
        sys.stderr.close()
        return 1
    if result == _INTERRUPTED:  # typer turns the interrupt of a command into this result
        print(f"{name}: interrupted", file=sys.stderr)
    return result if isinstance(result, int) else 0


def main() -> None:
    sys.exit(run())


if __name__ == "__main__":
    main()
