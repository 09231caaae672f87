"""`forebay drain`.

Owns: how a drain is asked for and watched on a terminal. What it means for the work there, routers and replicas decide.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.text import Text

from ops.endpoint import ask
from ops.errors import CommandError
from ops.report import console

_POLL_S = 0.25
_GONE_S = 10.0
"""A replica that a controller does not know for so long has ended: to a new one all have come long before."""


def drain(
    name: Annotated[
        str,
        typer.Argument(
            metavar="REPLICA|HOST|NODE",
            help="A replica's id, or a host or Kubernetes node for all on it, as in `forebay status`.",
        ),
    ],
    undo: Annotated[bool, typer.Option("--undo", help="Let it take work again.")] = False,
    wait: Annotated[bool, typer.Option(help="Return when nothing runs or waits there any more.")] = True,
    timeout_s: Annotated[float, typer.Option(metavar="SECONDS", min=0, help="Wait no longer than this.")] = 600.0,
    url: Annotated[
        str | None, typer.Option(help="The router.", show_default="FOREBAY_URL, or the newest instance on this machine")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what the router answered.")] = False,
) -> None:
    """Keep new work from a replica, or from a whole host or Kubernetes node, and let what is there go elsewhere; no stream is cut.

    It stays so until --undo, or until the replica is replaced. Interrupted or out of time, this command only stops watching.
    Where keys are in use, the key must be an operator's.
    """
    if not name:
        raise CommandError("the name is empty; `forebay status` shows replicas and hosts")
    path = f"/drain/{quote(name, safe='')}"
    address, said = ask(url, path, "replica_ids", "DELETE" if undo else "PUT")
    gone: frozenset[str] = frozenset()
    if wait and not undo:
        try:
            said, gone = _until_empty(address, path, said, timeout_s)
        except KeyboardInterrupt:
            raise CommandError("interrupted; the drain goes on (--undo ends it)", exit_code=130) from None
    if as_json:
        json.dump(said, sys.stdout, indent=2)
        print()
        return
    state = "takes work again" if undo else "is empty" if wait else "drains"
    for replica_id in said["replica_ids"]:
        became = "is gone" if replica_id in gone else state
        console().print(f"{replica_id} {became}.", markup=False, highlight=False)


def _until_empty(
    address: str, path: str, said: dict[str, Any], timeout_s: float
) -> tuple[dict[str, Any], frozenset[str]]:
    """(what the router said, those that have ended meanwhile). Raises CommandError where work is left after `timeout_s`.

    Once they are empty it is asked again: a host may have replicas by then that the controller did not know at first.
    """
    now_s, replica_ids = time.monotonic(), set(said["replica_ids"])
    deadline_s, seen_s = now_s + timeout_s, dict.fromkeys(replica_ids, now_s)
    out = console(stderr=True)
    with out.status("draining") as shown:
        while True:
            try:
                cluster, left = ask(address, "/status", "cluster")[1]["cluster"], ""
            except CommandError as error:
                cluster, left = None, str(error)
            now_s = time.monotonic()
            if cluster is None:
                left = left or "the controller does not answer"
                seen_s = dict.fromkeys(replica_ids, now_s)
            else:
                reports = _reports(cluster, replica_ids)
                seen_s |= dict.fromkeys(reports, now_s)
                gone = frozenset(r for r, at_s in seen_s.items() if now_s - at_s > _GONE_S)
                left = _left(reports, [r for r in replica_ids if r not in gone])
                if not left:
                    if gone == replica_ids:
                        return said, gone
                    try:
                        more = set(ask(address, path, "replica_ids", "PUT")[1]["replica_ids"]) - replica_ids
                    except CommandError as error:
                        left, more = str(error), set()
                    if not (left or more):
                        return said, gone
                    replica_ids |= more
                    seen_s |= dict.fromkeys(more, now_s)
                    said = said | {"replica_ids": sorted(replica_ids)}
            if now_s > deadline_s:
                raise CommandError(
                    f"{left or 'more replicas have come'} after {timeout_s:g} s; the drain goes on", exit_code=1
                )
            shown.update(Text(f"draining: {left}"))
            time.sleep(_POLL_S)


def _reports(cluster: Mapping[str, Any], replica_ids: Collection[str]) -> dict[str, Any]:
    """What the controller has heard from each of these replicas; None: nothing yet. Those that it does not know are absent."""
    replicas = {replica["entry"]["replica_id"]: replica["report"] for replica in cluster["replicas"]}
    return {replica_id: replicas[replica_id] for replica_id in replica_ids if replica_id in replicas}


def _left(reports: Mapping[str, Any], replica_ids: Sequence[str]) -> str:
    """What these replicas are not empty for, in words; empty where they are. One that is not heard of is not empty: a new
    controller knows only those that have come to it."""
    requests = 0
    for replica_id in replica_ids:
        report = reports.get(replica_id)
        if report is None:
            return f"nothing is heard from {replica_id}"
        if report["state"] != "draining":
            return f"{replica_id} takes work"
        requests += sum(level["requests"] for part in ("running", "waiting") for level in report["load"][part])
    if not requests:
        return ""
    return f"{requests} {'request is' if requests == 1 else 'requests are'} still there"
