"""`forebay simulate`: a cluster of A100s in virtual time.

Owns: options, their help, the translation into a study, and what is shown. Decides nothing about a simulation.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ops.errors import CommandError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

    from ops.report import Context, Report, ReportRow, Scalar
    from ops.sim.runs import Ran
    from ops.sim.study import Run, Study


MAX_REPLICAS, MAX_ROUTERS, MAX_SIZES = 10_000, 64, 100
DRAWN_GOAL_PCT = 99.0
"""Marked in a chart of sizes where no goal was named."""


def simulate(
    trace: Annotated[
        Path, typer.Option(metavar="FILE", help="Trace: Azure CSV or Mooncake JSON lines, told by content.")
    ],
    replicas: Annotated[
        str, typer.Option(metavar="N,N-N,…", help="Replicas, one GPU each. Several are compared: how many are needed?")
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
        float,
        typer.Option(
            metavar="X", min=0.001, max=100_000, help="Without --load: so many times the traffic of the trace."
        ),
    ] = 1.0,
    policy: Annotated[
        str, typer.Option(metavar="NAME,NAME,…", help="forebay, load-only, round-robin, least-load, llumnix.")
    ] = "forebay",
    duration: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", min=1, max=86_400, help="So long requests arrive; it ends when all have ended."
        ),
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
        int,
        typer.Option(
            metavar="N", min=1, max=100_000, help="Batch requests that wait beside what fills the empty cluster."
        ),
    ] = 64,
    budget: Annotated[
        int,
        typer.Option(metavar="TOKENS", min=256, max=16_384, help="Tokens of an engine's step; there are 256 slots."),
    ] = 512,
    routers: Annotated[int, typer.Option(metavar="N", min=1, max=MAX_ROUTERS, help="Routers.")] = 1,
    faults: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND@AT+FOR:NUMBER,…",
            help="replica_death, node_loss, link_break, reports_lost, reports_late, reports_doubled, controller_restart, "
            "slow_clients, drain or node_drain; seconds, and the number of the replica or node. Of the next move that "
            "comes to POINT in the place of NUMBER: move_source_death, move_target_death, move_link_break, "
            "move_source_unlinked, move_target_unlinked, move_client_leaves, move_target_drain, move_turn_back, "
            "move_controller_restart, move_rush.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="S", help="The same seed gives the same run, to the last event.")] = 0,
    seeds: Annotated[
        int, typer.Option(metavar="N", min=1, max=10, help="Runs with S, S+1, …: means with 95 % intervals.")
    ] = 1,
    slo: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CLASS=TTFT:TPOT,…",
            help="Objectives in ms; twice a request's own prefill is added to the TTFT. Default: "
            "interactive=500:30, standard=2000:100.",
        ),
    ] = None,
    goal: Annotated[
        float | None,
        typer.Option(
            metavar="PERCENT",
            min=0,
            max=100,
            help="Say with how few of --replicas so many of each class's requests meet their objectives.",
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Runs at once, each in a process. Default: one for each core.", show_default=False
        ),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json",
            metavar="FILE",
            help="Also write the result there, after each run. The same command goes on with what it did not finish.",
        ),
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Also draw a chart (PNG).")] = None,
) -> None:
    """Simulate a cluster under a recorded load: latencies, goodput and what the GPUs do, in virtual time.

    Router, queue, placement, engine, scheduler, KV pool and prefix cache are the real ones; a step takes as long as on an
    A100 (bf16). What moves takes the time of a network of 200 Gb/s. load-only is forebay that goes by no prefix cache; the
    policies after it replace the choice of the replica and the controller's proposals, and llumnix moves by its own.

    Goodput = requests that meet both of their objectives (--slo) ÷ duration. Its bound is what no policy could pass (ops/sim/bound.py).

    Exit code: 0, or 1 if what must always hold did not (a line says how to see it again), or 2.

    Example: forebay simulate --trace azure.csv --times 4 --replicas 2-9 --budget 256 --goal 99 --plot sizes.png
    """
    from ops.bench.trace import read_trace
    from ops.report import check_writable, console, write_json
    from ops.sim.objectives import parse_objectives
    from ops.sim.policies import POLICIES
    from ops.sim.saved import begun, settings_sha256, to_save
    from ops.sim.study import GPUS, Batch, Run, Study, parse_faults
    from ops.sim.values import default_engine
    from ops.sim.workload import fitting, fitting_lengths, parse_mix, read_lengths

    check_writable(json_file)
    check_writable(plot, "--plot")
    for option, path in (("--json", json_file), ("--plot", plot)):
        if path is not None and path.resolve() in {given.resolve() for given in (trace, batch) if given is not None}:
            raise CommandError(f"{option}: {path} is what the simulation reads; name another file")
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
    recorded_batch = () if batch is None else read_lengths(batch)
    study = Study(
        model=GPUS[gpu],
        requests=requests,
        mix=mix,
        duration_s=duration,
        engine=engine,
        load=load,
        times=times,
        synchronised=synchronised,
        batch=Batch(fitting_lengths(recorded_batch, engine.max_model_len), batch_waiting) if recorded_batch else None,
        routers=routers,
        objectives=parse_objectives(slo or []),
        faults=parse_faults(faults or []),
    )
    errors = console(stderr=True)
    for fault in study.faults:
        if fault.at_s >= duration:
            raise CommandError(
                f"--faults: {fault.kind}@{fault.at_s:g}: requests arrive for {duration:g} s (--duration)"
            )
    in_batch = 0 if study.batch is None else len(study.batch.lengths)
    if left_out := len(recorded) + len(recorded_batch) - len(requests) - in_batch:
        errors.print(f"{left_out} requests are longer than the model's {engine.max_model_len} tokens and left out")
    runs = [Run(n, name, seed + k) for n in counts for name in policies for k in range(seeds)]
    files = {"gpu": gpu, "trace": trace.name, "batch": None if batch is None else batch.name}
    own = {**files, "left_out": left_out, "seeds": seeds, "seed": seed}
    settings = settings_sha256(study, runs)
    results = {} if json_file is None else begun(json_file, settings)
    if results:
        errors.print(f"{json_file} has {len(results)} of {len(runs)} runs: going on with the others")

    def note() -> None:
        if json_file is not None:
            write_json(_report(study, results, runs, own), json_file, to_save(settings, len(runs), results))

    _run_all(
        study, [one for one in runs if one not in results], results, note, min(jobs or _cores(), len(runs)), errors
    )
    parts = _parts(results, runs)
    out = console()
    _show(_labelled(parts, runs), study, gpu, out)
    if goal is not None:
        for name in policies:
            answer = _answer(goal, {n: rows for (n, policy), rows in parts.items() if policy == name}, gpu)
            out.print(f"{name}: {answer}" if len(policies) > 1 else answer)
    if plot is not None:
        _draw(plot, parts, results, f"{trace.name}, {gpu}", DRAWN_GOAL_PCT if goal is None else goal)
    if broken := [(one, results[one]) for one in runs if results[one].violations]:
        one, ran = broken[0]
        for line in (
            f"{len(broken)} runs broke what must hold; the first: {ran.violations[0]}",
            f"to see it again: {_again(one)}",
        ):
            errors.print(line, style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1)


def _counts(text: str) -> list[int]:
    counts: list[int] = []
    try:
        for part in text.split(","):
            first, dash, last = part.partition("-")
            sizes = range(int(first), int(last) + 1) if dash else range(int(first), int(first) + 1)
            if len(sizes) + len(counts) > MAX_SIZES:
                raise CommandError(f"--replicas: {text!r} are more than {MAX_SIZES} sizes")
            counts += sizes
    except ValueError as error:
        raise CommandError(f"--replicas: {text!r} is no number; write 8, or 4,8,16, or 4-8") from error
    if not counts or min(counts) < 1 or max(counts) > MAX_REPLICAS or len(set(counts)) != len(counts):
        raise CommandError(f"--replicas: {text!r}: each at least 1 and at most {MAX_REPLICAS:,}, and none twice")
    return counts


def _names(text: str, known: Sequence[str]) -> list[str]:
    names = [part.strip() for part in text.split(",")]
    for name in names:
        if name not in known:
            raise CommandError(f"--policy: {name!r} is none of {', '.join(known)}")
    if len(set(names)) != len(names):
        raise CommandError(f"--policy: {text!r} names one twice")
    return names


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _again(one: Run) -> str:
    """The command of that run alone."""
    replaced = {"--replicas", "--policy", "--seed", "--seeds", "--jobs", "--json", "--plot", "--goal"}
    words: list[str] = []
    given = iter(sys.argv[1:])
    for word in given:
        if word in replaced:
            next(given, None)
        elif word.partition("=")[0] not in replaced:
            words.append(word)
    own = ("--replicas", one.replicas, "--policy", one.policy, "--seed", one.seed)
    return shlex.join(["forebay", *words, *map(str, own)])


def _run_all(
    study: Study, runs: Sequence[Run], results: dict[Run, Ran], note: Callable[[], None], jobs: int, errors: Console
) -> None:
    """Add what each run gives to the results, and have it noted."""
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from ops.sim.runs import FailedRunError, run_all

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(
        *columns,
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=errors,
        transient=True,
        disable=not errors.is_terminal,
    ) as bar:
        if study.load is not None or study.batch is not None:
            measuring = bar.add_task("what one replica does at most", total=None)
            study.measure()
            bar.remove_task(measuring)
        tasks: dict[Run, TaskID] = {}

        def show(one: Run, now_s: float) -> None:
            if one not in tasks:
                name = f"{one.policy}, {one.replicas} replicas, seed {one.seed}"
                tasks[one] = bar.add_task(name, total=study.duration_s)
            bar.update(tasks[one], completed=now_s)

        whole = bar.add_task("runs", total=len(results) + len(runs), completed=len(results))
        try:
            with closing(run_all(study, runs, jobs, show)) as ended:
                for one, ran in ended:
                    results[one] = ran
                    note()
                    bar.advance(whole)
                    if one in tasks:
                        bar.remove_task(tasks.pop(one))
        except FailedRunError as error:
            bar.stop()
            errors.print(str(error), style="red", markup=False, soft_wrap=True)
            errors.print(
                f"a run failed; to see it again: {_again(error.failed)}", style="red", markup=False, soft_wrap=True
            )
            raise typer.Exit(1) from error


_Part = tuple[int, str]
"""Replicas and policy."""


def _parts(results: Mapping[Run, Ran], runs: Sequence[Run]) -> dict[_Part, list[ReportRow]]:
    """The figures of each, over the seeds that have been run."""
    from ops.sim.report import over_seeds

    of_seeds: dict[_Part, list[Sequence[ReportRow]]] = {}
    for one in runs:
        if one in results:
            of_seeds.setdefault((one.replicas, one.policy), []).append(results[one].rows)
    return {part: over_seeds(rows) for part, rows in of_seeds.items()}


def _labelled(parts: Mapping[_Part, Sequence[ReportRow]], runs: Sequence[Run]) -> dict[str, Sequence[ReportRow]]:
    """By the name of each part that was asked for; of what has not been run yet there is nothing."""
    sizes, policies = {one.replicas for one in runs}, {one.policy for one in runs}
    labelled: dict[str, Sequence[ReportRow]] = {}
    for one in runs:
        shown = ([one.policy] if len(policies) > 1 else []) + ([f"{one.replicas}"] if len(sizes) > 1 else [])
        labelled[".".join(shown) or one.policy] = parts.get((one.replicas, one.policy), ())
    return labelled


def _report(study: Study, results: Mapping[Run, Ran], runs: Sequence[Run], own: Mapping[str, Scalar]) -> Report:
    from ops.report import Report, machine_context
    from ops.sim.report import prefixed

    hashes = {f"{r.policy}.{r.replicas}.{r.seed}": results[r].event_log_sha256 for r in runs if r in results}
    context = {
        **machine_context(),
        **own,
        "runs": len(runs),
        "runs_done": len(results),
        **_context(study),
        "event_log_sha256": hashes if len(runs) > 1 else next(iter(hashes.values())),
    }
    rows = prefixed(_labelled(_parts(results, runs), runs))
    return Report(shlex.join(["forebay", *sys.argv[1:]]), context, rows)


def _context(study: Study) -> Context:
    from ops.sim.step_time import a100

    services = {request.service for request in study.requests}
    return {
        "duration_s": study.duration_s,
        "step_times": a100().source,
        "host_overhead_ms_per_step": a100().host_overhead_ms_per_step,
        "host_overhead_ms_per_request": a100().host_overhead_ms_per_request,
        "network_bytes_per_s": a100().network_bytes_per_s,
        "copy_bytes_per_s": a100().copy_bytes_per_s,
        "classes": {service: study.mix.classes[service] for service in sorted(services)},
        "shares": dict(study.mix.shares),
        "load": study.load,
        "times": study.times if study.load is None else None,
        "saturated_rps": None if study.load is None else study.saturated_rps,
        "synchronised": study.synchronised,
        "batch_waiting": None if study.batch is None else study.batch.waiting,
        "batch_only_gpus_per_replica": study.batch_only_gpus,
        "routers": study.routers,
        "slots": study.engine.slots,
        "step_token_budget": study.engine.step_token_budget,
        "blocks": study.engine.blocks,
        "objectives_ms": {
            name: f"{1000 * o.ttft_s:g}:{1000 * o.tpot_s:g}" for name, o in sorted(study.objectives.items())
        },
        "faults": [f"{f.kind}@{f.at_s:g}+{f.for_s:g}:{f.point or f.number}" for f in study.faults],
    }


def _show(parts: Mapping[str, Sequence[ReportRow]], study: Study, gpu: str, out: Console) -> None:
    from ops.report import format_number, print_table

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
    judged = ", ".join(
        f"{name} TTFT {objective.ttft_s:g} s + 2 × own prefill, TPOT {objective.tpot_s:g} s"
        for name, objective in study.objectives.items()
    )
    print_table(
        out,
        ("", *tables, "unit"),
        [(name, *(cell(rows, name) for rows in tables.values()), units[name]) for name in names],
        notes=(*notes, f"Objectives: {judged}."),
    )


def _answer(goal_pct: float, sizes: Mapping[int, Sequence[ReportRow]], gpu: str) -> str:
    """How many replicas are enough, in a sentence."""
    from ops.sim.report import fewest

    asked, tried = f"{goal_pct:g} % of each class's requests meet their objectives", ", ".join(map(str, sorted(sizes)))
    enough = fewest(sizes, goal_pct)
    if enough is None:
        return f"Not enough: {asked} with none of {tried} replicas. Ask for more of them."
    fewer = "fewer were not tried" if enough == min(sizes) else f"the fewest of {tried}"
    how_many = "1 replica" if enough == 1 else f"{enough} replicas"
    return f"{how_many} ({gpu}) {'is' if enough == 1 else 'are'} enough, {fewer}: {asked}."


def _draw(
    path: Path,
    parts: Mapping[_Part, Sequence[ReportRow]],
    results: Mapping[Run, Ran],
    title: str,
    goal_pct: float,
) -> None:
    from ops.sim.chart import draw_attainment, draw_waits
    from ops.sim.report import ATTAINMENT

    several = len({name for _, name in parts}) > 1
    if len({n for n, _ in parts}) > 1:
        curves: dict[str, list[tuple[int, float]]] = {}
        for (n, name), rows in parts.items():
            for row in rows:
                priority_class, _, quantity = row.name.partition(".")
                if quantity == ATTAINMENT:
                    label = f"{name}, {priority_class}" if several else priority_class
                    curves.setdefault(label, []).append((n, row.value))
        draw_attainment({label: sorted(points) for label, points in curves.items()}, goal_pct, title, path)
        return
    waits: dict[str, list[float]] = {}
    for one, ran in results.items():
        for priority_class, waits_ms in ran.waits_ms.items():
            waits.setdefault(f"{one.policy}, {priority_class}", []).extend(waits_ms)
    draw_waits(waits, title, path)
