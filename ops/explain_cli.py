"""`forebay explain`.

Owns: how the decisions about one request look on a terminal. What was decided, and with which numbers, the router says.
"""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ops.endpoint import ask, understood
from ops.report import console, format_number


def explain(
    request_id: Annotated[
        str,
        typer.Argument(metavar="REQUEST_ID", help="The `id` of an answer; of choice k of several, with -k behind it."),
    ],
    url: Annotated[
        str | None, typer.Option(help="The router.", show_default="FOREBAY_URL, or the newest instance on this machine")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what the router answered.")] = False,
) -> None:
    """Show what was decided about a request and why: queued, placed, preempted, moved, refused, with the numbers used.

    A router remembers its latest requests. With keys, only the tenant's own are shown; to an operator's key, all.
    """
    address, said = ask(url, f"/v1/requests/{quote(request_id, safe='')}/explain", "decisions")
    if as_json:
        json.dump(said, sys.stdout, indent=2)
        print()
        return
    with understood(address):
        console().print(explained(said))


def explained(said: dict[str, Any]) -> Group:
    """What a router answered about a request, as it is shown. Raises LookupError or TypeError where it is another
    version's."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="cyan", no_wrap=True)
    facts.add_column()
    for name, value in _facts(said):
        facts.add_row(name, Text(value))
    table = Table("ms", "decision", "replica", "why", "numbers", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.columns[0].justify = "right"
    for decision in said["decisions"]:
        numbers = "  ".join(f"{name}={format_number(value)}" for name, value in decision.get("numbers", {}).items())
        cells = (decision["event"], decision.get("replica", ""), decision.get("why", ""), numbers)
        table.add_row(f"{decision['at_ms']:,}", *map(Text, cells))
    parts: list[RenderableType] = [facts, table]
    if left_out := said.get("decisions_left_out", 0):
        parts.append(Text(f"{left_out:,} decisions in the middle were left out.", style="dim"))
    return Group(*parts)


def _facts(said: dict[str, Any]) -> list[tuple[str, str]]:
    """What the request is and what became of it, in lines."""
    state = said["state"]
    if said.get("outcome"):
        state += f": {said['outcome']}" + (f" ({said['finish']})" if said.get("finish") else "")
    elif said.get("replica"):
        state += f" on {said['replica']}"
    waited, first = (_milliseconds(said.get(name)) for name in ("queue_wait_ms", "ttft_ms"))
    cached = f" ({said['cached_tokens']:,} cached)" if said.get("cached_tokens") else ""
    facts = [
        ("request", said["request_id"]),
        ("tenant", said["tenant"]),
        ("class", f"{said['priority_class']} (priority {said['priority']})"),
        ("state", state),
        ("tokens", f"{said['prompt_tokens']:,} in the prompt{cached}, {said['output_tokens']:,} out"),
        ("attempts", f"{said['attempts']}, preempted {said.get('preemptions', 0)} times"),
        ("times", f"age {_milliseconds(said['age_ms'])}, in the queue {waited}, first token after {first}"),
    ]
    if said.get("error"):
        facts.append(("error", said["error"]))
    return facts


def _milliseconds(value: int | None) -> str:
    return "-" if value is None else f"{value:,} ms"
