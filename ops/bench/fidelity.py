"""Whether the simulator tells what a real replica does: the same trace through both, side by side.

Owns: the rounds, what is taken over from the machine into the simulation, and what the report says. Imports the replay, the
simulator and the fit of step times. A round, each with a replica of its own on a core of its own:

1. The replica measures its engine's steps, in work that has nothing of the trace (fidelity_replica.py); they are fitted in
   the simulator's form, as an A100's were.
2. What is around a step is measured on requests that run alone, and on as many as there are slots: what the host adds to a
   step, in all and for each request, and how long a message takes to the engine and back.
3. The trace is replayed by `bench replay` through a router of our own, and simulated.

Nothing of the third part goes into the prediction. Load = arrivals ÷ what the simulated replica does at most.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from enum import IntEnum
from fractions import Fraction
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from cluster.clock import SystemClock
from cluster.engine.memory import kv_block_bytes
from cluster.messages import ToController
from cluster.model import ModelFolder
from cluster.types import Outcome, RequestId
from deployments.controller_server import ROLES, ControllerServer
from deployments.settings import Instance, Profile, url_of
from deployments.transport import Acceptor
from ops.bench.client import Api
from ops.bench.fidelity_replica import Measured
from ops.bench.lengths import Lengths
from ops.bench.replay import Progress, ReplaySettings, replay
from ops.bench.router_run import START_TIMEOUT_S, Part
from ops.bench.router_wire import Listening
from ops.bench.schedule import PlannedRequest, plan, scale_tokens
from ops.bench.stats import Answer, percentile
from ops.bench.step_fit import Fitted, KvSize, fit
from ops.bench.trace import TraceRequest
from ops.errors import CommandError
from ops.report import Report, ReportRow, machine_context
from ops.sim.objectives import tpot_s, ttft_s
from ops.sim.step_time import Device
from ops.sim.values import Arrival, RequestRecord, SimConfig
from ops.sim.workload import Backlog
from ops.sim.world import simulate

TOLERATED_PCT = 10.0
PERCENTILES = (50, 90)
QUANTITIES = ("ttft", "tpot")
MEASURE_TIMEOUT_S = 300.0
REQUEST_TIMEOUT_S = 120.0
ALONE = 6
ALONE_LENGTHS = Lengths(64, 24)
APART = 1.5
"""Requests that run alone come so many times as far apart as one is expected to take."""
LINK_LEAST_S = 1e-5
SATURATED_REQUESTS = 400
WARM_UP_PART = 4
"""One part of so many of the saturated run is not counted."""

_listening = msgspec.json.Decoder(Listening).decode
_measured = msgspec.json.Decoder(Measured).decode


class _Words(IntEnum):
    """Whose prompts are made of which words."""

    ALONE = 0
    CROWD = 1
    TRACE = 2


Figures = dict[str, float]
"""`ttft_p50_ms` and so on."""


@dataclass(frozen=True)
class FidelitySettings:
    model: ModelFolder
    profile: Profile
    """Of one replica."""
    requests: tuple[TraceRequest, ...]
    """Of the trace, from the first that is sent; as many as there are."""
    trace: str
    token_scale: Fraction
    load: float
    duration_s: float
    rounds: int
    steps: int
    """That are measured in each round."""
    seed: int
    classes: dict[str, str]
    replica: str = "ops.bench.fidelity_replica"
    """The module that is run."""


@dataclass(frozen=True)
class Machine:
    """What is taken over into the simulation."""

    device: Device
    link_delay_s: float
    fitted: Fitted


@dataclass(frozen=True)
class Round:
    machine: Machine
    real: Figures
    predicted: Figures
    late_p99_ms: float
    """How late the client was."""


def compare(settings: FidelitySettings, show: Callable[[str], None]) -> Report:
    """All rounds; `show` is told what goes on.

    Raises:
        CommandError: there is only one core, the trace is too short, or a real request failed.
        WorkerError: a process failed.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise CommandError("bench fidelity: the replica needs a core of its own, and there is only one")
    settings = replace(settings, requests=_fitting(settings))
    rounds: list[Round] = []
    planned: tuple[PlannedRequest, ...] = ()
    with _on_cores(cores[:-1]):
        for number in range(settings.rounds):
            say = partial(_say, show, f"round {number + 1} of {settings.rounds}")
            one, planned = asyncio.run(_round(settings, number, cores[-1], planned, say))
            rounds.append(one)
    return build_report(settings, planned, rounds)


def _fitting(settings: FidelitySettings) -> tuple[TraceRequest, ...]:
    """Those that the engine has room for.

    Raises:
        CommandError: it has room for none.
    """
    longest, scale = settings.profile.models[0].engine.max_model_len, settings.token_scale
    kept = tuple(
        r
        for r in settings.requests
        if scale_tokens(r.prompt_tokens, scale) + scale_tokens(r.output_tokens, scale) <= longest
    )
    if not kept:
        raise CommandError(f"--token-scale: no request has at most {longest} tokens, which is the engine's longest")
    return kept


def _say(show: Callable[[str], None], prefix: str, what: str) -> None:
    show(f"{prefix}: {what}")


@contextmanager
def _on_cores(cores: Sequence[int]) -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


async def _round(
    settings: FidelitySettings,
    number: int,
    core: int,
    planned: tuple[PlannedRequest, ...],
    say: Callable[[str], None],
) -> tuple[Round, tuple[PlannedRequest, ...]]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        instance = _instance(settings, Path(folder))
        instance_path = Path(folder) / "instance.json"
        instance_path.write_text(instance.model_dump_json())
        server = ControllerServer(instance.secret(), SystemClock(), control=settings.profile.control)
        decode = msgspec.msgpack.Decoder(ToController).decode
        acceptor = Acceptor(server.identity, ROLES, decode, server.accept, settings.profile.transport)
        _, controller_port = await acceptor.listen("127.0.0.1", 0, instance.secret())
        try:
            say("measuring steps")
            start = partial(_start, stack, str(instance_path), str(controller_port))
            arguments = (str(core), str(settings.steps), str(settings.seed + number))
            replica = start("replica", settings.replica, *arguments)
            router = start("router", "ops.bench.router_ours")
            samples = (await asyncio.to_thread(replica.hear, _measured, MEASURE_TIMEOUT_S)).samples
            (port,) = (await asyncio.to_thread(router.hear, _listening, START_TIMEOUT_S)).ports
            url = url_of("127.0.0.1", port)
            await asyncio.to_thread(router.until_up, f"{url}/ready")
            say("measuring what is around them")
            machine = await _machine(settings, fit(samples, _kv(settings)), url)
            # Not on this loop: the controller is on it.
            planned = planned or await asyncio.to_thread(plan_at, settings, machine)
            say(f"replaying {len(planned)} requests in {planned[-1].send_at_s:.0f} s")
            answers = await _replayed(settings, planned, url, _Words.TRACE)
        finally:
            await acceptor.close()
    late_p99_ms = percentile([answer.lateness_ms for answer in answers], 99) or 0.0
    predicted = of_records(predict(settings, machine, planned))
    return Round(machine, of_answers(answers), predicted, late_p99_ms), planned


def _instance(settings: FidelitySettings, folder: Path) -> Instance:
    secret_path = folder / "secret"
    secret_path.touch(mode=0o600)
    secret_path.write_text(secrets.token_hex(32))
    return Instance(profile=settings.profile, model_folders=(settings.model.path,), secret_path=secret_path)


def _start(stack: ExitStack, instance_path: str, controller_port: str, name: str, module: str, *arguments: str) -> Part:
    command = (sys.executable, "-m", module, instance_path, controller_port, *arguments)
    part = Part(name, command)
    stack.callback(part.close)
    return part


def _kv(settings: FidelitySettings) -> KvSize:
    engine = settings.profile.models[0].engine
    bytes_per_token = kv_block_bytes(settings.model, engine) // engine.block_size_tokens
    return KvSize(bytes_per_token, engine.blocks * engine.block_size_tokens)


# --- the real line ---


async def _replayed(
    settings: FidelitySettings, planned: Sequence[PlannedRequest], url: str, words: int
) -> tuple[Answer, ...]:
    """`words`: another number, other prompts. None may begin as one that was sent before: the replica has it cached.

    Raises:
        CommandError: a request failed.
    """
    asked = ReplaySettings(
        url=url,
        api=Api.COMPLETIONS,
        model=None,
        tokenizer=settings.model.path,
        trace=Path(settings.trace),
        trace_format="",
        skip=0,
        time_scale=Fraction(1),
        token_scale=settings.token_scale,
        classes={},
        slos={},
        seed=len(_Words) * settings.seed + words,
        timeout_s=REQUEST_TIMEOUT_S,
    )
    result = await replay(planned, asked, Progress(_nobody), {})
    failed = [answer for answer in result.answers if answer.failure is not None]
    if failed:
        raise CommandError(f"{len(failed)} of {len(planned)} requests failed, the first with {failed[0].failure_label}")
    return result.answers


def _nobody(progress: Progress) -> None:
    del progress


def of_answers(answers: Sequence[Answer]) -> Figures:
    return _figures([a.ttft_ms for a in answers], [t for a in answers if (t := a.tpot_ms) is not None])


# --- what is taken over ---


async def _machine(settings: FidelitySettings, fitted: Fitted, url: str) -> Machine:
    """What is around a step, from requests that run alone and from as many as there are slots at once."""
    bare = Machine(_device(settings, fitted, 0.0, 0.0), LINK_LEAST_S, fitted)
    slots = settings.profile.models[0].engine.slots

    async def simulated(machine: Machine, planned: Sequence[PlannedRequest]) -> list[RequestRecord]:
        return await asyncio.to_thread(predict, settings, machine, planned)

    (first,) = await simulated(bare, [_like(0, 0.0)])
    assert first.end_s is not None
    apart_s = APART * first.end_s + 0.1
    alone = [_like(k, apart_s * k) for k in range(ALONE)]
    crowd = [_like(k, 0.0) for k in range(slots)]
    real_alone = of_answers(await _replayed(settings, alone, url, _Words.ALONE))
    real_crowd = of_answers(await _replayed(settings, crowd, url, _Words.CROWD))
    bare_alone, bare_crowd = [of_records(await simulated(bare, them)) for them in (alone, crowd)]
    step_ms = max(0.0, real_alone["tpot_p50_ms"] - bare_alone["tpot_p50_ms"])
    request_ms = max(0.0, real_crowd["tpot_p50_ms"] - bare_crowd["tpot_p50_ms"] - step_ms) / slots
    device = _device(settings, fitted, step_ms, request_ms)
    hosted = of_records(await simulated(Machine(device, LINK_LEAST_S, fitted), alone))
    there_and_back_s = (real_alone["ttft_p50_ms"] - hosted["ttft_p50_ms"]) / 1000
    return Machine(device, max(LINK_LEAST_S, there_and_back_s / 2), fitted)


def _like(index: int, send_at_s: float) -> PlannedRequest:
    return PlannedRequest(index, send_at_s, "standard", *ALONE_LENGTHS)


def _device(settings: FidelitySettings, fitted: Fitted, step_ms: float, request_ms: float) -> Device:
    return Device(
        device="one core of this machine",
        dtype=settings.profile.models[0].engine.dtype,
        source="measured by the replica before it serves",
        form="see ops/sim/step_time.py",
        host_overhead_ms_per_step=step_ms,
        host_overhead_ms_per_request=request_ms,
        host_overhead_source="requests that run alone, and as many as there are slots",
        network_bytes_per_s=1e9,
        network_source="nothing is moved",
        copy_bytes_per_s=1e9,
        copy_source="nothing is swapped",
        models={settings.model.name: fitted.times},
    )


# --- the simulation ---


def _sim_config(settings: FidelitySettings, machine: Machine) -> SimConfig:
    return SimConfig(
        device=machine.device,
        model=settings.model.name,
        engine=settings.profile.models[0].engine,
        router=settings.profile.router,
        link_delay_s=machine.link_delay_s,
    )


def predict(settings: FidelitySettings, machine: Machine, planned: Sequence[PlannedRequest]) -> list[RequestRecord]:
    arrivals = [
        Arrival(
            one.send_at_s,
            RequestId(f"{one.index:07}"),
            one.prompt_tokens,
            one.output_tokens,
            one.priority_class,
            max_tokens=one.output_tokens,
        )
        for one in planned
    ]
    records = simulate(arrivals, _sim_config(settings, machine)).requests
    if unfinished := sum(record.outcome is not Outcome.FINISHED for record in records):
        raise CommandError(f"{unfinished} of {len(planned)} simulated requests did not finish: lower --load")
    return records


def of_records(records: Sequence[RequestRecord]) -> Figures:
    firsts, each = (ttft_s(r) for r in records), (tpot_s(r) for r in records)
    return _figures([1000 * s for s in firsts if s is not None], [1000 * s for s in each if s is not None])


def _figures(ttft_ms: Sequence[float], tpot_ms: Sequence[float]) -> Figures:
    return {
        f"{quantity}_p{p}_ms": value
        for quantity, values in zip(QUANTITIES, (ttft_ms, tpot_ms), strict=True)
        for p in PERCENTILES
        if (value := percentile(values, p)) is not None
    }


def saturated_rps(settings: FidelitySettings, machine: Machine) -> float:
    """Requests of the trace that the simulated replica ends in a second, with more waiting than it can take."""
    scaled = plan(settings.requests, settings.classes, Fraction(1), settings.token_scale)
    lengths = [Lengths(one.prompt_tokens, one.output_tokens) for one in scaled]
    backlog = Backlog(lengths, 2 * settings.profile.models[0].engine.slots, settings.seed, "standard")
    ends_s: list[float] = []

    def follow(record: RequestRecord, now_s: float) -> Sequence[Arrival]:
        ends_s.append(now_s)
        return tuple(backlog.follow(record, now_s)) if len(ends_s) < SATURATED_REQUESTS else ()

    simulate(backlog.first(), _sim_config(settings, machine), on_end=follow)
    first = SATURATED_REQUESTS // WARM_UP_PART
    return (SATURATED_REQUESTS - first) / (ends_s[SATURATED_REQUESTS - 1] - ends_s[first - 1])


def plan_at(settings: FidelitySettings, machine: Machine) -> tuple[PlannedRequest, ...]:
    """As much of the trace as fills the duration at the load.

    Raises:
        CommandError: the trace has not so much.
    """
    rate_rps = settings.load * saturated_rps(settings, machine)
    wanted = max(2, round(rate_rps * settings.duration_s))
    requests = settings.requests[:wanted]
    recorded_s = requests[-1].arrival_s - requests[0].arrival_s
    if len(requests) < wanted or recorded_s <= 0:
        raise CommandError(f"--trace: {len(requests)} requests, and {wanted} are needed: shorten --duration")
    time_scale = Fraction((wanted - 1) / rate_rps / recorded_s).limit_denominator(10**6)
    return plan(requests, settings.classes, time_scale, settings.token_scale)


# --- the report ---


def build_report(settings: FidelitySettings, planned: Sequence[PlannedRequest], rounds: Sequence[Round]) -> Report:
    """Each figure's median over the rounds, real and predicted, and by how much they differ."""
    rows: list[ReportRow] = []
    errors_pct: list[float] = []
    for name in rounds[0].real:
        real, predicted = median(r.real[name] for r in rounds), median(r.predicted[name] for r in rounds)
        errors_pct.append(100 * (predicted / real - 1))
        rows += [
            ReportRow(f"real.{name}", real, "ms"),
            ReportRow(f"predicted.{name}", predicted, "ms"),
            ReportRow(_error_row(name), errors_pct[-1], "%"),
        ]
    machines = [r.machine for r in rounds]
    rows += [
        ReportRow("worst_error_pct", max(map(abs, errors_pct)), "%"),
        ReportRow("requests", len(planned), "requests"),
        ReportRow(
            "step_fit_error_pct", 100 * median(m.fitted.times.held_out_mean_absolute_error for m in machines), "%"
        ),
        ReportRow("steps_disturbed_pct", 100 * median(m.fitted.disturbed / m.fitted.steps for m in machines), "%"),
        ReportRow("host.step_ms", median(m.device.host_overhead_ms_per_step for m in machines), "ms"),
        ReportRow("host.request_ms", median(m.device.host_overhead_ms_per_request for m in machines), "ms"),
        ReportRow("link_ms", 1000 * median(m.link_delay_s for m in machines), "ms"),
        ReportRow("client_late_p99_ms", max(r.late_p99_ms for r in rounds), "ms"),
    ]
    engine = settings.profile.models[0].engine
    context: dict[str, Any] = {
        **machine_context(("torch",)),
        "model": settings.model.name,
        "dtype": str(engine.dtype),
        "slots": engine.slots,
        "step_token_budget": engine.step_token_budget,
        "trace": settings.trace,
        "token_scale": float(settings.token_scale),
        "load": settings.load,
        "duration_s": settings.duration_s,
        "rounds": settings.rounds,
        "seed": settings.seed,
        "each_round": {f"{i + 1}.real": r.real for i, r in enumerate(rounds)}
        | {f"{i + 1}.predicted": r.predicted for i, r in enumerate(rounds)},
    }
    return Report("bench fidelity", context, tuple(rows))


def _error_row(name: str) -> str:
    return f"error.{name.removesuffix('_ms')}_pct"


def table_cells(report: Report) -> tuple[list[str], list[list[str]]]:
    """A row for each figure: real, predicted, and the difference."""
    names = [row.name.removeprefix("real.") for row in report.rows if row.name.startswith("real.")]
    rows = [
        [
            name.removesuffix("_ms").replace("_", " ").upper().replace(" P", " p") + " ms",
            f"{report.value(f'real.{name}'):.1f}",
            f"{report.value(f'predicted.{name}'):.1f}",
            f"{report.value(_error_row(name)):+.1f} %",
        ]
        for name in names
    ]
    return ["", "real", "predicted", "difference"], rows
