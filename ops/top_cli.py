"""`forebay top`.

Owns: the command's options, and how one snapshot is printed. The view and what it shows lie in `ops/top`, imported when it
runs.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ops.endpoint import address_of, read_environment
from ops.errors import CommandError

if TYPE_CHECKING:
    from ops.top.model import Picture

_ONCE_DECISIONS = 20


def top(
    url: Annotated[
        list[str] | None,
        typer.Option(
            help="A router's own address; again for each of several.",
            show_default="FOREBAY_URL, or the newest instance on this machine",
        ),
    ] = None,
    interval_s: Annotated[
        float, typer.Option("--interval", metavar="SECONDS", min=0.2, max=60, help="Ask this often.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one picture and leave.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one picture as JSON and leave.")] = False,
) -> None:
    """Watch a running Forebay: queue, replicas and their KV memory by class, live moves, first tokens, and the newest
    decisions with their why.

    Keys: q quit, p pause, / filter, Enter explain, m next model, ? help. A router that goes away and comes back is waited
    for. Where keys are in use, decisions are shown to an operator's key.
    """
    settings = read_environment()
    urls = [address_of(settings, one) for one in url or (None,)]
    if not (once or as_json):
        if not (sys.stdout.isatty() and sys.stdin.isatty()):
            raise CommandError("the live view needs a terminal; --once or --json print one picture")
        from ops.top.fetch import Routers
        from ops.top.view import Top

        Top(Routers(urls, settings.credentials, time.monotonic), interval_s).run()
        return
    picture = asyncio.run(_look_once(urls, settings.credentials, interval_s))
    if as_json:
        import msgspec

        json.dump(msgspec.to_builtins(picture), sys.stdout, indent=2)
        print()
        return
    from ops.top.draw import snapshot

    out = Console(highlight=False)  # in a pipe as wide as COLUMNS or a terminal behind it says, else 80
    out.print(snapshot(picture, out.width, _ONCE_DECISIONS, coloured=out.is_terminal), soft_wrap=False)


async def _look_once(urls: list[str], credentials: dict[str, str], interval_s: float) -> Picture:
    """Two looks, between which tokens are counted; first tokens are those since the routers started.

    Raises:
        CommandError: no router answers.
    """
    from ops.top.fetch import Routers
    from ops.top.model import Watch

    routers, watch = Routers(urls, credentials, time.monotonic), Watch(window_s=None)
    try:
        found = await routers.look(watch.after)
        picture = watch.take(found, time.time())
        if picture is not None:
            await asyncio.sleep(interval_s)
            found = await routers.look(watch.after)
            picture = watch.take(found, time.time())
    finally:
        await routers.close()
    if picture is None:
        raise CommandError("; ".join(getattr(trouble, "why", "") for trouble in found))
    return picture
