"""`forebay serve` and `forebay status`.

Owns: how starting, running and stopping look on a terminal, and the table of a running instance. What is started and
ended lies in deployments/local.py.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from enum import StrEnum
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from cluster.config import Auth
from deployments.checks import find_models, preflight
from deployments.local import InterruptedBySignalError, LocalInstance
from deployments.settings import ServedModel, UsageError, load_profile
from ops.endpoint import ask, read_environment, understood
from ops.errors import CommandError
from ops.report import console

_OLD_REPORT_S = 1.0
"""Reports come ten times a second."""
_CHANGES_SHOWN = 3
_SCALE_WORDS = {
    "demand_per_s": "asked {:.0f} tokens/s",
    "of_one_per_s": "one replica does {:.0f} tokens/s",
    "occupied": "{:.1f} replicas occupied",
    "queued": "{:.0f} queued",
    "attained": "{:.0%} of first tokens in time",
}
"""Prompt and output tokens by their weights."""


class DTypeName(StrEnum):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class PhaseProgress:
    """Shows each phase with its time: a spinner on a terminal, plain lines elsewhere, one more for each new detail."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[Callable[[str], None]]:
        """See `deployments.local.Progress`."""
        started = time.monotonic()
        if self._console.is_terminal:
            with self._console.status(name) as status:
                yield lambda detail: status.update(f"{name}: {detail}")
        else:
            self._console.print(f"{name} …")
            yield self._line_for_each_change()
        self._console.print(f"[green]✓[/] {name} [dim]{time.monotonic() - started:.1f} s[/]")

    def _line_for_each_change(self) -> Callable[[str], None]:
        said = ""

        def show(detail: str) -> None:
            nonlocal said
            if detail != said:
                said = detail
                self._console.print(f"  {detail}", highlight=False)

        return show


def serve(
    profile: Annotated[
        str, typer.Option(help="A name under deployments/profiles, or the path of a .yaml file.")
    ] = "local",
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="HTTP port; 0 takes a free one.")] = None,
    replicas: Annotated[int | None, typer.Option(min=1, help="Engines, each in a process of its own.")] = None,
    model: Annotated[
        Path | None, typer.Option(help="A model folder in Hugging Face form.", show_default="SmolLM2-135M-Instruct")
    ] = None,
    dtype: Annotated[
        DTypeName | None, typer.Option(help="float32 keeps exact resume; bfloat16 is faster and smaller.")
    ] = None,
) -> int:
    """Start Forebay on this machine: a Ray cluster of its own, a controller, a router and replicas.

    Ends with the URL and stays in the foreground. Ctrl-C once lets streams finish; twice ends at once.
    """
    started = time.monotonic()
    out = console()
    out.file = sys.stdout  # this stream, also while what libraries print is kept from it
    progress = PhaseProgress(out)
    whole_path = None if model is None else model.expanduser().absolute()
    wanted = {"router.port": port, "replicas": replicas, "model": whole_path, "engine.dtype": dtype}
    try:
        environment = read_environment()
        settings = load_profile(profile, {key: value for key, value in wanted.items() if value is not None})
        models = find_models(settings, environment)
        preflight(settings, models, environment)
    except UsageError as error:
        raise CommandError(str(error)) from error
    with LocalInstance(settings, models, environment) as instance:
        try:
            instance.start(progress)
        except InterruptedBySignalError:
            out.print("Interrupted while starting; ending what was started …")
            return 130
        except UsageError as error:
            raise CommandError(str(error)) from error
        except RuntimeError as error:
            raise CommandError(str(error), exit_code=1) from error
        _announce(out, instance.urls, models, started, keys=settings.router.auth is Auth.KEYS)
        try:
            instance.run()
            instance.finish(progress)
        except InterruptedBySignalError:
            out.print("Ending at once …")
            return 130
        except RuntimeError as error:
            raise CommandError(str(error), exit_code=1) from error
    out.print("Stopped; nothing is left running.")
    return 0


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _announce(out: Console, urls: Sequence[str], models: Sequence[ServedModel], started: float, *, keys: bool) -> None:
    body = json.dumps(
        {
            "model": models[0].name,
            "stream": True,
            "max_tokens": 60,
            "messages": [{"role": "user", "content": "Why is the sky blue?"}],
        }
    )
    ready_s = time.monotonic() - started
    serves = ", ".join(f"{model.name} ({_made_of(model)})" for model in models)
    out.print(
        f"\n[bold]Forebay[/] serves {serves} at [bold]{', '.join(urls)}[/], ready in {ready_s:.1f} s\n",
        soft_wrap=True,
        highlight=False,
    )
    # Neither wrapped nor marked up: a person copies it.
    key = ' -H "authorization: Bearer $FOREBAY_API_KEY"' if keys else ""
    command = f"  curl -N {urls[0]}/v1/chat/completions -H 'content-type: application/json'{key} \\\n    -d '{body}'\n"
    out.print(command, soft_wrap=True, markup=False)
    out.print("Ctrl-C stops it: once, and streams finish first; twice, at once.")


def _made_of(model: ServedModel) -> str:
    config = model.config
    scale = "" if config.scale is None else f" (with the load {config.scale.min} to {config.scale.max})"
    return f"{counted(config.replicas, 'replica')}{scale}, engine {config.engine.kind}, {config.engine.dtype}"


def status(
    url: Annotated[
        str | None, typer.Option(help="The router.", show_default="FOREBAY_URL, or the newest instance on this machine")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what the router answered.")] = False,
) -> None:
    """Show a running Forebay: queue by model and priority, replicas with their load, and the controller."""
    address, state = ask(url, "/status", "cluster")
    if as_json:
        json.dump(state, sys.stdout, indent=2)
        print()
        return
    with understood(address):
        _show(console(), address, state)


def _show(out: Console, address: str, state: dict[str, Any]) -> None:
    cluster = state["cluster"]
    out.print(f"[bold]Router[/] {address}: {_ready(state['router'])}")
    bands = Table("model", "class", "priority", "queued", "running", box=None, pad_edge=False)
    for column in bands.columns[2:]:
        column.justify = "right"
    for model in state["router"]["models"]:
        if model["ready"] != state["router"]["ready"]:
            out.print(f"  {model['model']}: {_ready(model)}", highlight=False)
        for replica in model["unroutable"]:
            why = replica["why"].replace("_", " ")
            out.print(f"  {model['model']}: nothing new is sent to {replica['replica_id']}: {why}", highlight=False)
        for band in model["bands"]:
            figures = (str(band[name]) for name in ("priority", "queued_requests", "running_requests"))
            bands.add_row(Text(model["model"]), band["priority_class"], *figures)
    if bands.row_count:
        out.print(bands)
    else:
        out.print("  no request in the queue or running")
    if cluster is None:
        out.print("[bold]Controller[/] [yellow]does not answer; routers and replicas go on without it[/]")
        return
    generation = cluster["controller_generation"]["number"]
    standby = "one stands by" if any(router["standbys"] for router in cluster["routers"]) else "none stands by"
    out.print(
        f"\n[bold]Controller[/] pid {cluster['controller_pid']} leads, up {cluster['uptime_s']:.0f} s, generation {generation}; "
        f"{standby}; {counted(len(cluster['replicas']), 'replica')}, {counted(len(cluster['routers']), 'router')}",
        highlight=False,
    )
    for router in cluster["routers"]:
        out.print(f"  router {router['url'] or '(stands by)'}, pid {router['pid']}", highlight=False)
    if (kubernetes := cluster["kubernetes"]) is not None:
        _show_kubernetes(out, kubernetes)
    for scale in cluster["scale"]:
        _show_scale(out, scale)
    for model, replicas in groupby(sorted(cluster["replicas"], key=_model_of), key=_model_of):
        out.print(f"\n[bold]Replicas[/] of {escape(model)}", highlight=False)
        out.print(_replica_table(list(replicas)))


def _show_kubernetes(out: Console, kubernetes: dict[str, Any]) -> None:
    nodes, heard_s = kubernetes["nodes"], kubernetes["heard_s"]
    known = (
        "[yellow]no node is known yet[/]"
        if nodes is None
        else f"{counted(nodes, 'node')}, last heard {heard_s:.0f} s ago"
    )
    lease = (
        "holds the Lease" if kubernetes["holds_lease"] else f"the Lease is {kubernetes['lease_holder'] or 'nobody'}'s"
    )
    out.print(f"\n[bold]Kubernetes[/] {known}; {escape(lease)}", highlight=False)
    for node in kubernetes["going"]:
        out.print(f"  {escape(node['node'])} is about to go: {escape(node['why'])}", highlight=False)
    if kubernetes["trouble"]:
        out.print(f"  [yellow]{escape(kubernetes['trouble'])}[/]", highlight=False)


def _show_scale(out: Console, scale: dict[str, Any]) -> None:
    now = scale["now"]
    kept = "" if scale["kept"] is None else f", Serve keeps {scale['kept']}"
    out.print(
        f"\n[bold]Scale[/] of {escape(scale['model'])}: {counted(now['wanted'], 'replica')} wanted{kept}; {now['why']}",
        highlight=False,
    )
    out.print(f"  {_figures(now['numbers'])}", highlight=False)
    if scale["trouble"]:
        out.print(f"  [yellow]Serve did not answer:[/] {escape(scale['trouble'])}", highlight=False)
    for change in scale["changes"][:_CHANGES_SHOWN]:
        at = datetime.fromtimestamp(change["at_unix_s"]).strftime("%H:%M:%S")
        out.print(f"  {at} {change['was']} → {change['wanted']}: {change['why']}", highlight=False)


def _figures(numbers: dict[str, float]) -> str:
    """Those that a reader looks for, in words; what is not measured is left out."""
    told = [(name, words) for name, words in _SCALE_WORDS.items() if name in numbers]
    return ", ".join(words.format(numbers[name]) for name, words in told)


def _model_of(replica: dict[str, Any]) -> str:
    return str(replica["entry"]["model"])


def _ready(part: dict[str, Any]) -> str:
    return "ready" if part["ready"] else "[red]not ready[/]"


def _state(replica: dict[str, Any]) -> str:
    """And who has it drain."""
    by = ", ".join(replica["drained_by"])
    return f"{replica['report']['state']} ({by})" if by else str(replica["report"]["state"])


def _replica_table(replicas: list[dict[str, Any]]) -> Table:
    """No wider than a terminal of 80 columns, for most hosts; what names a replica is folded rather than cut."""
    table = Table(box=None, pad_edge=False)
    for name in ("replica", "host", "pid"):
        table.add_column(name, overflow="fold")
    table.add_column("state")
    for name in ("running", "waiting", "KV", "cached", "preempted"):
        table.add_column(name, justify="right", no_wrap=True)
    for replica in replicas:
        report = replica["report"]
        entry = replica["entry"]
        cells = (Text(entry["replica_id"]), Text(entry["host"]), str(replica["pid"]))
        if report is None:
            table.add_row(*cells, "[yellow]no report[/]")
            continue
        load = report["load"]
        used = 1 - load["blocks_free"] / load["blocks_total"]
        count = Counter({part: sum(p["requests"] for p in load[part]) for part in ("running", "waiting")})
        age_s = replica["report_age_s"]
        table.add_row(
            *cells,
            _state(replica) if age_s < _OLD_REPORT_S else f"[yellow]silent {age_s:.0f} s[/]",
            f"{count['running']}/{load['slots_total']}",
            str(count["waiting"]),
            f"{used:.0%}",
            f"{load['blocks_cached'] / load['blocks_total']:.0%}",
            str(load["preemptions_total"]),
        )
    return table
