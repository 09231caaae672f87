"""`forebay drain`.

Owns: how a drain is asked for and watched on a terminal. What it means for the work there, routers and replicas decide.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Collection
from typing import Annotated, Any
from urllib.parse import quote

import typer

from ops.endpoint import ask
from ops.errors import CommandError
from ops.report import console

_POLL_S = 0.25


def drain(
    name: Annotated[
        str,
        typer.Argument(metavar="REPLICA|HOST", help="A replica's id, or a host for all on it, as in `forebay status`."),
    ],
    undo: Annotated[bool, typer.Option("--undo", help="Let it take work again.")] = False,
    wait: Annotated[bool, typer.Option(help="Return when nothing runs or waits there any more.")] = True,
    timeout_s: Annotated[float, typer.Option(metavar="SECONDS", min=0, help="Wait no longer than this.")] = 600.0,
    url: Annotated[
        str | None, typer.Option(help="The router. [default: FOREBAY_URL, or the newest instance on this machine]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what the router answered.")] = False,
) -> None:
    """Keep new work from a replica, or from a whole host, and let what is there go elsewhere; no stream is cut.

    It stays so until --undo, or until the replica is replaced. Interrupted or out of time, this command only stops watching.
    Where keys are in use, the key must be an operator's.
    """
    address, said = ask(url, f"/drain/{quote(name, safe='')}", "DELETE" if undo else "PUT")
    replica_ids: list[str] = said["replica_ids"]
    if wait and not undo:
        _until_empty(address, replica_ids, timeout_s)
    if as_json:
        json.dump(said, sys.stdout, indent=2)
        print()
        return
    state = "takes work again" if undo else "is empty" if wait else "drains"
    for replica_id in replica_ids:
        console().print(f"{replica_id} {state}.", markup=False, highlight=False)


def _until_empty(address: str, replica_ids: Collection[str], timeout_s: float) -> None:
    """Raises CommandError where work is left after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    out = console(stderr=True)
    with out.status("draining") as shown:
        while left := _left(ask(address, "/status")[1], replica_ids):
            requests = "request is" if left == 1 else "requests are"
            if time.monotonic() > deadline_s:
                raise CommandError(
                    f"{left} {requests} still there after {timeout_s:g} s; the drain goes on", exit_code=1
                )
            shown.update(f"draining: {left} {requests} still there")
            time.sleep(_POLL_S)


def _left(status: dict[str, Any], replica_ids: Collection[str]) -> int:
    """Requests that are on these replicas. One that has not said yet that it drains counts as one."""
    cluster = status["cluster"]
    if cluster is None:
        return 1
    left = 0
    for replica in cluster["replicas"]:
        if replica["entry"]["replica_id"] in replica_ids:
            report = replica["report"]
            if report is None or report["state"] != "draining":
                left += 1
            else:
                left += sum(level["requests"] for part in ("running", "waiting") for level in report["load"][part])
    return left
