"""`forebay keys create`, `list` and `revoke`.

Owns: how keys look on a terminal. What is written lies in router/keys.py. Invariant: a key is printed once, by the
command that makes it.
"""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec
import typer
from rich.text import Text

from deployments.keys import key_file
from deployments.settings import Profile, UsageError, load_profile
from ops.errors import CommandError
from ops.report import console, format_number, print_table
from router.keys import KeyFile, KeyRecord, KeysError
from router.limits import Limits

app = typer.Typer(
    help="Make, show and revoke the keys of an endpoint.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _keys() -> None:
    """Make, show and revoke the keys of an endpoint. A running router follows the file; it serves holders of a key where
    its profile says `router.auth: keys`."""


ProfileOption: TypeAlias = Annotated[
    str, typer.Option(help="The profile whose router.keys_file is meant, and whose classes there are.")
]
FileOption: TypeAlias = Annotated[
    Path | None, typer.Option(metavar="FILE", help="The file of keys. Default: the profile's.", dir_okay=False)
]


@app.command()
def create(
    tenant: Annotated[str, typer.Option(metavar="NAME", help="Whose key it is; a tenant may have several.")],
    highest_class: Annotated[
        str | None, typer.Option(metavar="CLASS", help="The most urgent class that it may use. Default: all.")
    ] = None,
    requests_per_s: Annotated[float | None, typer.Option(metavar="N", help="Requests a second.")] = None,
    tokens_per_min: Annotated[
        int | None, typer.Option(metavar="N", help="Tokens a minute, prompt and max_tokens together.")
    ] = None,
    max_streams: Annotated[int | None, typer.Option(metavar="N", help="Requests answered at once.")] = None,
    queue_share: Annotated[
        float, typer.Option(metavar="SHARE", help="Part of a class's queue that its tenant may fill, up to 1.")
    ] = 1.0,
    operator: Annotated[
        bool,
        typer.Option("--operator", help="It may drain replicas, and see the decisions about everybody's requests."),
    ] = False,
    note: Annotated[str, typer.Option(metavar="TEXT", help="What it is for, as `forebay keys list` shows it.")] = "",
    profile: ProfileOption = "local",
    file: FileOption = None,
) -> None:
    """Make a key. It is printed on standard output and shown this once: only a hash of it is kept.

    Each router counts requests, tokens and streams by itself.
    """
    settings = _profile(profile)
    classes = [c.name for c in settings.router.classes]
    if highest_class is not None and highest_class not in classes:
        raise CommandError(f"--highest-class: {highest_class!r} is not one of {', '.join(classes)}")
    keys = _file(settings, file)
    try:
        record, key = keys.create(
            tenant,
            highest_class=highest_class,
            limits=Limits(requests_per_s, tokens_per_min, max_streams),
            queue_share=queue_share,
            operator=operator,
            note=note,
        )
    except KeysError as error:
        raise CommandError(str(error)) from error
    print(key, flush=True)
    said = f"Key {record.id} of {record.tenant}, kept as a hash in {keys.path}: it is not shown again."
    console(stderr=True).print(said, soft_wrap=True, markup=False)


@app.command("list")
def list_keys(
    as_json: Annotated[bool, typer.Option("--json", help="Print it for machines.")] = False,
    profile: ProfileOption = "local",
    file: FileOption = None,
) -> None:
    """Show all keys, those lately revoked too, oldest first."""
    try:
        records = _file(_profile(profile), file).records()
    except KeysError as error:
        raise CommandError(str(error)) from error
    if as_json:
        json.dump([_public(record) for record in records], sys.stdout, indent=2)
        print()
        return
    header = (
        "id",
        "tenant",
        "highest class",
        "requests/s",
        "tokens/min",
        "streams",
        "queue",
        "operator",
        "created",
        "revoked",
        "note",
    )
    print_table(console(), header, [_row(record) for record in records])


@app.command()
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="As `forebay keys list` shows it.")],
    profile: ProfileOption = "local",
    file: FileOption = None,
) -> None:
    """Revoke a key: within seconds no router that reads the file takes it any more. What runs by then runs on."""
    try:
        record = _file(_profile(profile), file).revoke(key_id)
    except KeysError as error:
        raise CommandError(str(error)) from error
    assert record.revoked_unix_s is not None
    console().print(f"Key {record.id} of {record.tenant} is revoked since {_day(record.revoked_unix_s)}.", markup=False)


def _profile(name: str) -> Profile:
    try:
        return load_profile(name, {})
    except UsageError as error:
        raise CommandError(str(error)) from error


def _file(settings: Profile, file: Path | None) -> KeyFile:
    return key_file(settings.router) if file is None else KeyFile(file)


def _public(record: KeyRecord) -> dict[str, object]:
    fields = {name: getattr(record, name) for name in record.__struct_fields__ if name not in {"hmac_sha256", "limits"}}
    return fields | msgspec.structs.asdict(record.limits)


def _row(record: KeyRecord) -> tuple[str | Text, ...]:
    limits = record.limits
    return (
        record.id,
        record.tenant,
        record.highest_class or "all",
        format_number(limits.requests_per_s),
        format_number(limits.tokens_per_min),
        format_number(limits.max_streams),
        f"{record.queue_share:.0%}",
        "yes" if record.operator else "-",
        _day(record.created_unix_s),
        "-" if record.revoked_unix_s is None else _day(record.revoked_unix_s),
        Text(record.note),
    )


def _day(unix_s: int) -> str:
    return f"{datetime.fromtimestamp(unix_s, UTC):%Y-%m-%d %H:%M} UTC"
