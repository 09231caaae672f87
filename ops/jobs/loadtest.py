"""`forebay bench replay` as a job, against the Forebay of the cluster that it runs in.

    ray job submit --working-dir . -- python -m ops.jobs.loadtest --trace azure.csv --token-scale 1/16 --limit 200

Owns: that the router is found, and that the result, which a job has nowhere to leave, is in its log. It is another name of
`forebay bench replay`, with its options. Imports the command line. Invariant: the last line of the output is the report in JSON,
or there is none because nothing was measured.
"""

from __future__ import annotations

import inspect
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from deployments.jobs.command import COULD_NOT
from deployments.jobs.endpoint import find_urls
from deployments.settings import UsageError
from ops import cli
from ops.bench.cli import replay
from ops.endpoint import read_environment
from ops.errors import CommandError

_NAME = "ops.jobs.loadtest"
_PROGRAM = f"python -m {_NAME}"


def _command() -> Any:
    """`replay` by this name, with the address that is found where none is given."""
    app = typer.Typer(add_completion=False, rich_markup_mode="markdown", context_settings=cli.HELP_OPTIONS)
    app.command(help=inspect.cleandoc(replay.__doc__ or "").replace("forebay bench replay", _PROGRAM))(replay)
    command = typer.main.get_command(app)
    (url,) = (option for option in command.params if option.name == "url")
    url.required = False
    url.show_default = "FOREBAY_URL, or a router of the Ray cluster of this job"  # type: ignore[attr-defined]  # an option's
    return command


def run(arguments: Sequence[str]) -> int:
    """The exit code of `forebay bench replay` with these options."""
    given = list(arguments)
    with tempfile.TemporaryDirectory(prefix="forebay-loadtest-") as folder:
        report = Path(_value(given, "--json") or Path(folder, "report.json"))
        try:
            more = [] if _value(given, "--json") else ["--json", str(report)]
            if _value(given, "--url") is None and not {"-h", "--help"} & set(given):
                # One is enough: a load test of several routers names what stands before them.
                more += ["--url", find_urls(None, read_environment())[0][0]]
        except (UsageError, CommandError) as error:
            print(f"{_NAME}: {error}", file=sys.stderr)
            return COULD_NOT
        code = cli.run([*given, *more], command=_command(), program=_PROGRAM)
        if report.is_file() and code != COULD_NOT:
            print(json.dumps(json.loads(report.read_bytes())), flush=True)
    return code


def _value(arguments: Sequence[str], option: str) -> str | None:
    """Of an option as a shell gives it: in the next word, or behind `=`."""
    for place, word in enumerate(arguments):
        if word == option:
            return arguments[place + 1] if place + 1 < len(arguments) else None
        if word.startswith(f"{option}="):
            return word.removeprefix(f"{option}=")
    return None


def main() -> None:
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
