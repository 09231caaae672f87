"""`forebay bench …`: the benchmarks' command line.

Owns: options, their help and the translation into settings. Decides nothing about a measurement.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Measure a running server, or a part of one.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _bench() -> None:
    """Measure a running server, or a part of one. Every benchmark prints a table; --json FILE keeps it for machines."""


@app.command()
def replay(
    trace: Annotated[
        Path, typer.Option(metavar="FILE", help="Trace: Azure CSV or Mooncake JSON lines, told by content.")
    ],
    url: Annotated[str, typer.Option(metavar="URL", help="The server, as http://127.0.0.1:8000.")],
    time_scale: Annotated[
        str, typer.Option(metavar="X", help="Multiplies the gaps between arrivals: 2 is twice as slow.")
    ] = "1",
    token_scale: Annotated[
        str, typer.Option(metavar="Y", help="Multiplies the lengths of prompts and answers: 0.0625 or 1/16.")
    ] = "1",  # noqa: S107 - a number of tokens
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="Only the first N requests.")] = None,
    skip: Annotated[int, typer.Option(min=0, metavar="N", help="Leave out N requests before those.")] = 0,
    classes: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SERVICE=CLASS,…",
            help="Priority class of each service of the trace: interactive, standard or batch. "
            "Default: code=interactive, conversation=standard, mooncake=standard.",
        ),
    ] = None,
    slo: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CLASS=BOUNDS",
            help="Objectives of a class, from ttft_ms, tpot_ms and e2e_ms; may be repeated. Default: "
            "interactive=ttft_ms:500, tpot_ms:100; standard=ttft_ms:2000, tpot_ms:200; batch=e2e_ms:600000.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="S", help="Chooses the words of the prompts.")] = 0,
    timeout: Annotated[
        float, typer.Option(min=0.001, metavar="SECONDS", help="A request without an end by then has failed.")
    ] = 600.0,
    api: Annotated[str, typer.Option(metavar="completions|chat", help="Endpoint to use.")] = "completions",
    model: Annotated[str | None, typer.Option(metavar="NAME", help="Default: the first the server offers.")] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Model folder or tokenizer.json to measure prompts with. Default: ask the server, with two requests.",
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the result there.")
    ] = None,
) -> None:
    """Replay a real trace against an OpenAI-style server, as recorded.

    Arrivals never wait for answers (open loop). Each request has a connection of its own.
    Prompts are real words to the traced length, answers exactly as long as traced; prefixes that Mooncake shares are
    shared. The class goes with a request as service_tier: interactive is priority, standard default, batch flex.

    TTFT: from sending to the first event with text.
    TPOT = (end − first token) ÷ (tokens − 1).
    End-to-end: from sending to the end.
    Goodput = requests that meet all their SLOs ÷ duration, which lasts until the last answer ended.
    Percentiles interpolate linearly; they and tokens/s leave failed requests out.

    Trace formats: Azure LLM inference 2023 (Microsoft, CC-BY-4.0), CSV: arrival_s,service,prompt_tokens,output_tokens.
    Mooncake (kvcache-ai, Apache-2.0), JSON lines: timestamp, input_length, output_length, hash_ids.
    Neither has priorities: name the mapping with every result.

    Exit code: 0, or 1 if any request failed, or 2 if the replay could not begin.

    Example: forebay bench replay --trace azure.csv --url http://127.0.0.1:8000 --token-scale 1/16 --limit 200
    """
    import uvloop
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from ops.bench import replay as replaying
    from ops.bench.client import Api
    from ops.bench.schedule import SERVICE_TIERS, parse_classes, parse_scale, plan
    from ops.bench.stats import parse_slos
    from ops.bench.trace import read_trace
    from ops.errors import CommandError
    from ops.report import check_writable, console, print_table, write_json

    if api not in list(Api):
        raise CommandError(f"--api: {api!r} is none of {', '.join(Api)}")
    if not url.startswith(("http://", "https://")):
        raise CommandError(f"--url: {url!r} must begin with http:// or https://")
    check_writable(json_file)
    time_factor = parse_scale(time_scale, "--time-scale")
    token_factor = parse_scale(token_scale, "--token-scale")
    slos = parse_slos(slo or [], SERVICE_TIERS)
    class_of = parse_classes(classes or [])
    recorded = read_trace(trace, None if limit is None else skip + limit)
    requests = recorded.requests[skip:]
    if not requests:
        raise CommandError(f"--skip: {trace} has only {len(recorded.requests)} requests")
    services = {request.service for request in requests}
    planned = plan(requests, class_of, time_factor, token_factor)
    settings = replaying.ReplaySettings(
        url=url,
        api=Api(api),
        model=model,
        tokenizer=tokenizer,
        trace=trace,
        trace_format=recorded.format,
        skip=skip,
        time_scale=time_factor,
        token_scale=token_factor,
        classes={service: name for service, name in class_of.items() if service in services},
        slos=slos,
        seed=seed,
        timeout_s=timeout,
    )

    errors = console(stderr=True)
    arrivals_s = planned[-1].send_at_s
    errors.print(f"{len(planned)} requests, the last after {arrivals_s:.0f} s", style="dim")
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[counts]}"),
        TimeElapsedColumn(),
        console=errors,
        transient=True,
        disable=not errors.is_terminal,
    ) as bar:
        task = bar.add_task("learning tokens per word", total=len(planned), counts="")

        def show(progress: replaying.Progress) -> None:
            bar.update(
                task,
                description="replaying",
                completed=progress.ended,
                counts=f"{progress.sent - progress.ended} in flight, {progress.failed} failed",
            )

        result = uvloop.run(replaying.replay(planned, settings, replaying.Progress(show)))

    report, summaries = replaying.build_report(result, shlex.join(["forebay", *sys.argv[1:]]))
    header, rows = replaying.table_cells(summaries)
    print_table(console(), header, rows, notes=replaying.notes(report, result))
    for line in replaying.warnings(report, result):
        errors.print(f"warning: {line}", style="yellow", markup=False)
    if json_file is not None:
        write_json(report, json_file)
    if report.value("all.errors"):
        raise typer.Exit(1)


@app.command()
def step(
    model: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="A model folder. Default: SmolLM2-135M-Instruct.")
    ] = None,
    dtype: Annotated[str, typer.Option(metavar="float32|bfloat16")] = "float32",
    streams: Annotated[int, typer.Option(min=1, help="Streams at once; as many slots.")] = 64,
    tokens: Annotated[
        int, typer.Option(min=2, help="Tokens of each stream; steps are timed while all streams run.")
    ] = 40,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each kind.")] = 4,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the result there.")
    ] = None,
) -> None:
    """Measure what streaming costs the engine: step times with streams over a link against none.

    Rounds alternate in one process, so the ratio holds where the machine's speed does not. Needs no running server.
    """
    import asyncio

    from rich.progress import Progress
    from uvloop import new_event_loop

    from cluster.clock import SystemClock
    from cluster.config import DType, EngineConfig
    from cluster.engine.torch.build import build_embedded_engine, prepare_process
    from cluster.model import ModelFolder, ModelFolderError
    from cluster.smollm2 import ensure_smollm2
    from deployments.settings import Environment
    from ops.bench.step import StepSettings, TimedEngine, build_report, measure
    from ops.errors import CommandError
    from ops.report import check_writable, console, print_rows, write_json

    check_writable(json_file)
    if dtype not in list(DType):
        raise CommandError(f"--dtype: {dtype!r} is none of {', '.join(DType)}")
    settings = StepSettings(streams, tokens, rounds)
    config = EngineConfig(slots=streams, step_token_budget=streams, dtype=DType(dtype), max_model_len=1024)
    prepare_process()
    try:
        folder = ModelFolder.open(model or ensure_smollm2(Environment().models_dir))
        engine = TimedEngine(build_embedded_engine(folder, config, SystemClock()), streams)
    except ModelFolderError as error:
        raise CommandError(str(error)) from error
    errors = console(stderr=True)
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task("rounds", total=2 * rounds)
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            times = runner.run(measure(engine, settings, lambda: bar.advance(task)))
    report = build_report(times, settings, folder, config)
    print_rows(console(), report)
    if json_file is not None:
        write_json(report, json_file)
