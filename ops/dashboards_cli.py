"""`forebay dashboards list` and `push`.

Owns: how the dashboards look on a terminal, and where the token comes from. What Grafana is asked lies in
ops/dashboards/grafana.py. Invariants: a token is taken from the environment or a file, never from the command line; builders
and clients are imported when a command runs.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer
from rich.console import Console
from rich.text import Text

from ops.endpoint import read_environment
from ops.errors import CommandError
from ops.report import console, print_table

if TYPE_CHECKING:
    from ops.dashboards.grafana import Pushed

_COLOURS = {"created": "green", "updated": "yellow", "unchanged": "dim", "refused": "red"}

app = typer.Typer(
    help="Show the Grafana dashboards, and bring them to a Grafana.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _dashboards() -> None:
    """Show the Grafana dashboards, and bring them to a Grafana.

    The chart brings the same ones with `monitoring.dashboards.enabled`.
    """


AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print it for machines.")]


@app.command("list")
def list_dashboards(as_json: AsJson = False) -> None:
    """Show which dashboards there are. Asks no Grafana."""
    from ops.dashboards.render import DASHBOARDS, document

    rows = [
        {
            "uid": one["uid"],
            "panels": sum(panel["type"] != "row" for panel in one["panels"]),
            "title": one["title"],
            "description": one["description"],
        }
        for one in map(document, DASHBOARDS)
    ]
    if as_json:
        _print_json(rows)
        return
    header = ("title", "uid", "panels")
    print_table(console(), header, [[str(row[name]) for name in header] for row in rows])


@app.command()
def push(
    grafana: Annotated[str, typer.Option(metavar="URL", help="Its first page, as https://grafana.example.com.")],
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Holds a service account's token. Default: FOREBAY_GRAFANA_TOKEN.", dir_okay=False
        ),
    ] = None,
    folder: Annotated[
        str, typer.Option(metavar="TITLE", help="The folder they lie in; made where missing.")
    ] = "Forebay",
    datasource: Annotated[
        str | None, typer.Option(metavar="NAME", help="The data source of Prometheus that they begin with.")
    ] = None,
    runbooks: Annotated[
        str | None, typer.Option(metavar="URL", help="Where the folder of runbooks can be read, for their links.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write nothing, and say what would become of each.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Bring the dashboards to a Grafana. Run again it changes nothing; what was changed there by hand is put right.

    Only these dashboards and their folder are written: no alert, contact point or data source. One that is provisioned from
    files there, or saved by somebody meanwhile, is left as it is, and the exit code is 1.
    """
    from ops.dashboards.grafana import Grafana, State, fitted, uid_of_folder
    from ops.dashboards.grafana import push as bring
    from ops.dashboards.render import DASHBOARDS, document

    if not uid_of_folder(folder):
        raise CommandError(f"--folder: {folder!r} has no letter or digit")
    message = f"forebay {importlib.metadata.version('forebay')}"
    with closing(Grafana(grafana, _token(token_file))) as there, console(stderr=True).status("asking Grafana"):
        version = there.version()
        source = None if datasource is None else there.datasource(datasource)
        documents = [fitted(document(one), source, runbooks) for one in DASHBOARDS]
        done = bring(there, documents, folder, message=message, dry=dry_run)
    if as_json:
        told = [{"uid": one.uid, "title": one.title, "state": one.state.value, "why": one.why} for one in done]
        _print_json(
            {"grafana": there.url, "version": version, "folder": folder, "dry_run": dry_run, "dashboards": told}
        )
    else:
        _show(console(), done)
    if any(one.state is State.REFUSED for one in done):
        raise typer.Exit(1)


def _show(out: Console, done: Sequence[Pushed]) -> None:
    states = [Text(one.state.value, style=_COLOURS[one.state.value]) for one in done]
    rows = [(one.title, one.uid, state) for one, state in zip(done, states, strict=True)]
    print_table(out, ("title", "uid", "state"), rows)
    for one in done:
        if one.why:
            out.print(f"{one.uid}: {one.why}", style="red", markup=False)


def _token(file: Path | None) -> str | None:
    """Raises CommandError where the file holds none. The token is in no message."""
    if file is None:
        given = read_environment().grafana_token
        where, token = "FOREBAY_GRAFANA_TOKEN", None if given is None else given.get_secret_value().strip()
        if token is None:
            return None
    else:
        where = f"--token-file: {file}"
        try:
            token = file.read_text("utf-8").strip()
        except OSError as error:
            raise CommandError(f"{where} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError:
            token = ""
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise CommandError(f"{where} holds no token: one line of letters, digits and signs")
    return token


def _print_json(value: object) -> None:
    json.dump(value, sys.stdout, indent=2)
    print()
