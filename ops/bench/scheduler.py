"""What deciding costs: the time of a plan with a long line waiting, and the memory of those who wait.

Owns: the measurement of the real planner on views as an engine makes them, and of the real engine's `add`. Imports the
engine and the report. Invariant: every plan of a scene is made from the same view, and is the plan that the scene is
about (`Scene.about` is checked before it is timed). Look-ups in the prefix cache are not in it: the engine remembers
them from step to step.
"""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from cluster.config import EngineConfig
from cluster.engine.engine import Engine
from cluster.engine.scheduling.choose import order_for, planner_for
from cluster.engine.scheduling.plan import Cost, StepPlan, View
from cluster.engine.scheduling.sequence import SequenceState
from cluster.model import ModelFolder
from cluster.types import Request, RequestId, Sampling
from ops.errors import CommandError
from ops.report import Report, ReportRow, machine_context

COST = Cost(prefill_token_s=0.001, swap_block_s=0.0005)


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    running: int = 256
    waiting: int = 10_000
    rounds: int = 500
    """Plans of each scene."""
    streams: int = 32
    """Batch of the step that a plan's time is compared with."""
    tokens: int = 40
    """Of each stream; steps are timed while all streams run."""


@dataclass(frozen=True, slots=True)
class Scene:
    view: View
    about: Callable[[StepPlan], bool]
    """Whether a plan is of the kind that the scene is to show."""


def scenes(config: EngineConfig, settings: SchedulerSettings) -> dict[str, Scene]:
    """What a saturated engine of `settings.running` slots meets, by name.

    slots_taken: all slots decode, one in a block's length needs a block; nobody can come in.
    blocks_short: a slot is free and too few blocks for anybody near the front of the line.
    urgent: the first that waits is more urgent than all that run. It has a prompt of half the budget.
    prefilling: half of what runs has its prompt to run yet.
    """
    take = settings.running

    def scene(
        about: Callable[[StepPlan], bool],
        *,
        running: int = take,
        blocks_free: int,
        urgent: bool = False,
        prompts: int = 0,
    ) -> Scene:
        order = order_for(config)
        size = config.block_size_tokens
        run = [_running(n, size, prompt=n < prompts) for n in range(running)]
        wait = [_waiting(running + n, 40 * size) for n in range(settings.waiting)]
        if urgent:
            wait[0] = _waiting(running, config.step_token_budget // 2, priority=1, arrived=-1e6)
            wait[0].predicted_tokens = wait[0].tokens + 1.0
        for state in [*run, *wait]:
            state.key = order.key(state)
        view = View(
            sorted(wait, key=lambda s: s.key),
            sorted(run, key=lambda s: s.key),
            blocks_free,
            host_blocks_free=config.host_blocks,
            cost=COST,
            batch_rows=running,
            paused=(),
        )
        return Scene(view, about)

    return {
        "slots_taken": scene(lambda p: not p.admitted and bool(p.chunks), blocks_free=take),
        "blocks_short": scene(lambda p: not p.admitted, running=take - 1, blocks_free=take // 4),
        "urgent": scene(lambda _: True, blocks_free=100 + take, urgent=True),
        "prefilling": scene(lambda p: not p.admitted, blocks_free=take, prompts=take // 2),
    }


def _running(number: int, size: int, *, prompt: bool) -> SequenceState:
    tokens = 6 * size + 1 + number % size
    state = _state(number, tokens, priority=0, arrived=float(number), output=4 * size)
    state.started = state.running = True
    state.computed = size if prompt else tokens - 1
    state.blocks = -(-(tokens + 1) // size) if prompt else -(-(tokens - 1) // size)
    return state


def _waiting(number: int, tokens: int, *, priority: int = 0, arrived: float | None = None) -> SequenceState:
    return _state(number, tokens, priority, float(number) if arrived is None else arrived, output=tokens)


def _state(number: int, tokens: int, priority: int, arrived: float, output: int) -> SequenceState:
    return SequenceState((RequestId(f"r{number}"), 0), priority, arrived, tokens=tokens, limit_tokens=tokens + output)


def time_plans(config: EngineConfig, settings: SchedulerSettings, show: Callable[[], None]) -> dict[str, list[float]]:
    """Milliseconds of each plan, by scene; the scenes take turns. `show` is called after each round."""
    planner, order = planner_for(config.mode), order_for(config)
    met = scenes(config, settings)
    for name, scene in met.items():
        if not scene.about(planner(scene.view, config, order)):
            raise RuntimeError(f"the scene {name} does not show what it is to show")
    times: dict[str, list[float]] = {name: [] for name in met}
    for _ in range(settings.rounds):
        for name, scene in met.items():
            begin_s = time.perf_counter()
            planner(scene.view, config, order)
            times[name].append((time.perf_counter() - begin_s) * 1000)
        show()
    return times


def waiting_request_bytes(engine: Engine, requests: int, prompt_tokens: int = 100) -> float:
    """Memory that one waiting request takes beyond the ids of its prompt, by adding so many to an engine without work.

    The request itself is counted; its prompt's tuple is made before. The engine is empty again afterwards.
    """
    prompts = [tuple((7 * n + i) % 1000 for i in range(prompt_tokens)) for n in range(requests)]
    engine.add(_request("first", prompts[0], 1), 0)  # whatever is made with the first alone
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number, prompt in enumerate(prompts):
            if engine.add(_request(f"waiting-{number}", prompt, 100), 0) is not None:
                raise RuntimeError(f"the engine holds no {requests + 1} requests")
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    engine.abort(RequestId("first"), 0)
    for number in range(requests):
        engine.abort(RequestId(f"waiting-{number}"), 0)
    engine.step()
    return (after - before) / requests


def time_steps(engine: Engine, settings: SchedulerSettings, show: Callable[[], None]) -> list[float]:
    """Milliseconds of each step in which all streams decode. `show` is called after each step."""
    for number in range(settings.streams):
        engine.add(_request(f"stream-{number}", (100 + number, 5), settings.tokens), 0)
    times: list[float] = []
    while engine.has_work:
        begin_s = time.perf_counter()
        result = engine.step()
        if len(result.deltas) == settings.streams and not any(d.finish for d in result.deltas):
            times.append((time.perf_counter() - begin_s) * 1000)
        show()
    return times[1:]  # the first also ran prompts


def _request(name: str, prompt: tuple[int, ...], max_tokens: int) -> Request:
    return Request(
        request_id=RequestId(name),
        tenant="bench",
        priority=0,
        priority_class="standard",
        arrived_unix_s=0.0,
        prompt_ids=prompt,
        sampling=Sampling(max_tokens=max_tokens, seed=1, temperature=0.0, ignore_eos=True),
    )


def build_report(
    plan_ms: Mapping[str, Sequence[float]],
    batch_plan_ms: Mapping[str, Sequence[float]],
    step_ms: Sequence[float],
    request_bytes: float,
    settings: SchedulerSettings,
    model: ModelFolder,
    config: EngineConfig,
) -> Report:
    """Percentiles over all scenes, and of each; and the plan's share of a step.

    Args:
        plan_ms: With `settings.running` running and `settings.waiting` waiting.
        batch_plan_ms: With as many running as `step_ms` has streams.

    Raises:
        CommandError: in no step did every stream run, so nothing was measured.
    """
    if not step_ms:
        raise CommandError(
            f"--tokens: {settings.tokens} are too few: in no step did all {settings.streams} streams decode"
        )
    everything = [ms for times in plan_ms.values() for ms in times]
    batch_ms = median(batch_plan_ms["slots_taken"])
    rows = [
        ReportRow("plan_ms_10k_waiting", median(everything), "ms"),
        ReportRow("plan_p99_ms_10k_waiting", float(np.percentile(everything, 99)), "ms"),
        *(ReportRow(f"{name}.plan_p50_ms", median(times), "ms") for name, times in plan_ms.items()),
        ReportRow("waiting_request_bytes", request_bytes, "bytes"),
        ReportRow("plan_share_pct_b32", 100 * batch_ms / median(step_ms), "%"),
        ReportRow("b32.plan_ms", batch_ms, "ms"),
        ReportRow("b32.step_ms", median(step_ms), "ms"),
    ]
    context = machine_context(("torch",)) | {
        "model": model.name,
        "dtype": str(config.dtype),
        "mode": str(config.mode),
        "order": str(config.order),
        "running": settings.running,
        "waiting": settings.waiting,
        "plans": len(everything),
        "streams": settings.streams,
        "steps": len(step_ms),
    }
    return Report("bench scheduler", context, tuple(rows))
