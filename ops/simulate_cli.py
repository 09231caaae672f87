"""`forebay simulate`: a cluster of A100s in virtual time.

Owns: options, their help, the translation into a study, and what is shown. Decides nothing about a simulation.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ops.errors import CommandError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

    from ops.report import Context, ReportRow
    from ops.sim.study import Run, Study
    from ops.sim.values import SimResult


def simulate(
    trace: Annotated[
        Path, typer.Option(metavar="FILE", help="Trace: Azure CSV or Mooncake JSON lines, told by content.")
    ],
    replicas: Annotated[
        str, typer.Option(metavar="N,N,…", help="Replicas, one GPU each. Several are compared: how many are needed?")
    ] = "4",
    gpu: Annotated[str, typer.Option(metavar="NAME", help="a100-llama3-8b or a100-llama2-7b.")] = "a100-llama3-8b",
    load: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            min=0.01,
            max=10,
            help="How much arrives, in parts of what the replicas do at most under FCFS, which is measured first.",
        ),
    ] = None,
    times: Annotated[
        float, typer.Option(metavar="X", min=0.001, help="Without --load: so many times the traffic of the trace.")
    ] = 1.0,
    policy: Annotated[
        str, typer.Option(metavar="NAME,NAME,…", help="forebay, round-robin, least-load, llumnix.")
    ] = "forebay",
    duration: Annotated[
        float, typer.Option(metavar="SECONDS", min=1, help="So long requests arrive; it ends when all have ended.")
    ] = 60.0,
    classes: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SERVICE=CLASS:SHARE,…",
            help="Class of each service of the trace, and which part of all requests it is to be. "
            "Default: code=interactive, conversation=standard, mooncake=standard, as recorded.",
        ),
    ] = None,
    synchronised: Annotated[
        bool, typer.Option("--synchronised", help="All copies of the trace burst together.")
    ] = False,
    batch: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="CSV of lengths: batch work of these is always there beside the trace."),
    ] = None,
    batch_waiting: Annotated[
        int, typer.Option(metavar="N", min=1, help="Batch requests that wait beside what fills the empty cluster.")
    ] = 64,
    budget: Annotated[
        int, typer.Option(metavar="TOKENS", min=256, help="Tokens of an engine's step; there are 256 slots.")
    ] = 512,
    routers: Annotated[int, typer.Option(min=1, help="Routers.")] = 1,
    faults: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND@AT+FOR:NUMBER,…",
            help="replica_death, node_loss, link_break, reports_lost, reports_late, reports_doubled, controller_restart, "
            "slow_clients, drain or node_drain; seconds, and the number of the replica or node. Of the next move that "
            "comes to POINT in the place of NUMBER: move_source_death, move_target_death, move_link_break, "
            "move_source_unlinked, move_target_unlinked.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="S", help="The same seed gives the same run, to the last event.")] = 0,
    seeds: Annotated[
        int, typer.Option(metavar="N", min=1, max=10, help="Runs with S, S+1, …: means with 95 % intervals.")
    ] = 1,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the result there.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Also draw a chart (PNG).")] = None,
) -> None:
    """Simulate a cluster under a recorded load: latencies, goodput and what the GPUs do, in virtual time.

    Router, queue, placement, engine, scheduler, KV pool and prefix cache are the real ones; a step takes as long as on an
    A100 (bf16). What moves takes the time of a network of 200 Gb/s. The policies other than forebay replace the choice of
    the replica and the controller's proposals; llumnix moves requests by its own.

    Objectives: interactive TTFT 500 ms + 2 × own prefill, TPOT 30 ms; standard 2 s + 2 × own prefill, 100 ms.
    Goodput = requests that meet both ÷ duration. Its bound is what no policy could pass (ops/sim/bound.py).

    Exit code: 0, or 1 if what must always hold did not (a line says how to see it again), or 2.

    Example: forebay simulate --trace azure.csv --replicas 4,8,16 --times 4 --plot sizes.png
    """
    from ops.bench.trace import read_trace
    from ops.report import Report, check_writable, console, machine_context, write_json
    from ops.sim.policies import POLICIES
    from ops.sim.report import figures, over_seeds, prefixed
    from ops.sim.study import GPUS, Batch, Run, Study, parse_faults
    from ops.sim.values import default_engine
    from ops.sim.workload import fitting, parse_mix, read_lengths

    check_writable(json_file)
    if plot is not None and not plot.parent.is_dir():
        raise CommandError(f"--plot: the folder {plot.parent} does not exist")
    counts, policies = _counts(replicas), _names(policy, list(POLICIES))
    if gpu not in GPUS:
        raise CommandError(f"--gpu: {gpu!r} is none of {', '.join(GPUS)}")
    if load is not None and len(counts) > 1:
        raise CommandError("--load: it grows with the replicas; to compare their numbers name the traffic with --times")
    if load is not None and times != 1.0:
        raise CommandError("--times: with --load the traffic follows from it; leave one of them out")
    mix, recorded = parse_mix(classes or []), read_trace(trace).requests
    engine = default_engine(GPUS[gpu]).model_copy(update={"max_model_len": 16_384, "step_token_budget": budget})
    requests = fitting(recorded, engine.max_model_len)
    study = Study(
        model=GPUS[gpu],
        requests=requests,
        mix=mix,
        duration_s=duration,
        engine=engine,
        load=load,
        times=times,
        synchronised=synchronised,
        batch=None if batch is None else Batch(read_lengths(batch), batch_waiting),
        routers=routers,
        faults=parse_faults(faults or []),
    )
    errors = console(stderr=True)
    if len(requests) < len(recorded):
        left_out = len(recorded) - len(requests)
        errors.print(f"{left_out} requests are longer than the model's {engine.max_model_len} tokens and left out")
    runs = [Run(n, name, seed + k) for n in counts for name in policies for k in range(seeds)]
    results = _run_all(study, runs, errors)
    parts: dict[tuple[int, str], list[ReportRow]] = {}
    for n in counts:
        for name in policies:
            of_seeds = [figures(study, n, results[run]) for run in runs if (run.replicas, run.policy) == (n, name)]
            parts[n, name] = over_seeds(of_seeds)
    own = {"left_out": len(recorded) - len(requests), "seeds": seeds, "seed": seed, "duration_s": duration}
    context = {**machine_context(), **own, **_context(study, gpu, trace, batch, results)}
    labelled = {_label(part, counts, policies): rows for part, rows in parts.items()}
    report = Report(shlex.join(["forebay", *sys.argv[1:]]), context, prefixed(labelled))
    _show(labelled, study, gpu, console())
    if plot is not None:
        _draw(plot, parts, results, counts, policies, f"{trace.name}, {gpu}")
    if json_file is not None:
        write_json(report, json_file)
    if broken := [(run, result) for run, result in results.items() if result.invariant_violations]:
        run, result = broken[0]
        errors.print(
            f"{len(broken)} runs broke what must hold; the first: {result.invariant_violations[0]}", style="red"
        )
        again = f"--replicas {run.replicas} --policy {run.policy} --seed {run.seed} --seeds 1"
        errors.print(f"to see it again: the same command with {again}", style="red")
        raise typer.Exit(1)


def _counts(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise CommandError(f"--replicas: {text!r} is no number; write 8, or 4,8,16") from error
    if min(counts) < 1 or len(set(counts)) != len(counts):
        raise CommandError(f"--replicas: {text!r}: each at least 1, and none twice")
    return counts


def _names(text: str, known: Sequence[str]) -> list[str]:
    names = [part.strip() for part in text.split(",")]
    for name in names:
        if name not in known:
            raise CommandError(f"--policy: {name!r} is none of {', '.join(known)}")
    if len(set(names)) != len(names):
        raise CommandError(f"--policy: {text!r} names one twice")
    return names


def _label(part: tuple[int, str], counts: Sequence[int], policies: Sequence[str]) -> str:
    n, name = part
    shown = ([name] if len(policies) > 1 else []) + ([f"{n}"] if len(counts) > 1 else [])
    return ".".join(shown) or name


def _run_all(study: Study, runs: Sequence[Run], errors: Console) -> dict[Run, SimResult]:
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from ops.sim.study import run

    results: dict[Run, SimResult] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(
        *columns,
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=errors,
        transient=True,
        disable=not errors.is_terminal,
    ) as bar:
        if study.load is not None:
            measuring = bar.add_task("what one replica does at most", total=None)
            _ = study.saturated_rps
            bar.remove_task(measuring)
        for one in runs:
            task = bar.add_task(f"{one.policy}, {one.replicas} replicas, seed {one.seed}", total=study.duration_s)
            results[one] = run(study, one, partial(_show_time, bar, task))
            bar.remove_task(task)
    return results


def _show_time(bar: Progress, task: TaskID, now_s: float) -> None:
    bar.update(task, completed=now_s)


def _context(study: Study, gpu: str, trace: Path, batch: Path | None, results: Mapping[Run, SimResult]) -> Context:
    from ops.sim.step_time import a100

    hashes = {f"{r.policy}.{r.replicas}.{r.seed}": result.event_log_sha256 for r, result in results.items()}
    services = {request.service for request in study.requests}
    return {
        "gpu": gpu,
        "step_times": a100().source,
        "host_overhead_ms_per_step": a100().host_overhead_ms_per_step,
        "host_overhead_ms_per_request": a100().host_overhead_ms_per_request,
        "network_bytes_per_s": a100().network_bytes_per_s,
        "copy_bytes_per_s": a100().copy_bytes_per_s,
        "trace": trace.name,
        "classes": {service: study.mix.classes[service] for service in sorted(services)},
        "shares": dict(study.mix.shares),
        "load": study.load,
        "times": study.times if study.load is None else None,
        "saturated_rps": None if study.load is None else study.saturated_rps,
        "synchronised": study.synchronised,
        "batch": None if batch is None else batch.name,
        "batch_waiting": None if study.batch is None else study.batch.waiting,
        "routers": study.routers,
        "slots": study.engine.slots,
        "step_token_budget": study.engine.step_token_budget,
        "blocks": study.engine.blocks,
        "faults": [f"{f.kind}@{f.at_s:g}+{f.for_s:g}:{f.point or f.number}" for f in study.faults],
        "event_log_sha256": hashes if len(hashes) > 1 else next(iter(hashes.values())),
    }


def _show(parts: Mapping[str, Sequence[ReportRow]], study: Study, gpu: str, out: Console) -> None:
    from ops.report import format_number, print_table
    from ops.sim.objectives import OBJECTIVES

    tables = {label: {row.name: row for row in rows} for label, rows in parts.items()}
    names = list(dict.fromkeys(name for rows in tables.values() for name in rows if not name.endswith("_ci95")))

    def cell(rows: Mapping[str, ReportRow], name: str) -> str:
        if name not in rows:
            return "-"
        spread = rows.get(f"{name}_ci95")
        return format_number(rows[name].value) + (f" ± {format_number(spread.value)}" if spread is not None else "")

    units = {name: next(rows[name].unit for rows in tables.values() if name in rows) for name in names}
    notes = [f"One {gpu} a replica, modelled. Arrivals of {study.duration_s:g} s, served to their ends."]
    if study.load is not None:
        notes.append(f"Load {study.load:g} of {format_number(study.saturated_rps)} requests/s a replica, under FCFS.")
    judged = ", ".join(f"{n} TTFT {o.ttft_s:g} s + 2 × own prefill, TPOT {o.tpot_s:g} s" for n, o in OBJECTIVES.items())
    print_table(
        out,
        ("", *tables, "unit"),
        [(name, *(cell(rows, name) for rows in tables.values()), units[name]) for name in names],
        notes=(*notes, f"Objectives: {judged}."),
    )


def _draw(
    path: Path,
    parts: Mapping[tuple[int, str], Sequence[ReportRow]],
    results: Mapping[Run, SimResult],
    counts: Sequence[int],
    policies: Sequence[str],
    title: str,
) -> None:
    from ops.sim.chart import draw_attainment, draw_waits
    from ops.sim.objectives import OBJECTIVES, ttft_s

    if len(counts) > 1:
        curves: dict[str, list[tuple[int, float]]] = {}
        for (n, name), rows in parts.items():
            for row in rows:
                priority_class, _, quantity = row.name.partition(".")
                if quantity == "attainment_pct":
                    label = priority_class if len(policies) == 1 else f"{name}, {priority_class}"
                    curves.setdefault(label, []).append((n, row.value))
        draw_attainment({label: sorted(points) for label, points in curves.items()}, title, path)
        return
    waits: dict[str, list[float]] = {}
    for run, result in results.items():
        for record in result.requests:
            first_s = ttft_s(record)
            if first_s is not None and record.priority_class in OBJECTIVES:
                waits.setdefault(f"{run.policy}, {record.priority_class}", []).append(1000 * first_s)
    draw_waits(waits, title, path)
