"""What the controller's decisions cost: a tick over a thousand replicas, and the hearing of one report.

Owns: the measurement of the real `Control`. Imports it and the report. Invariants: between two ticks every replica has
reported as often as it would; every scene makes the proposals that it is about, or none (checked as it is made). Times are
of the thread's own CPU, so that a busy machine does not count; the garbage collector runs as it does in the controller.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

import numpy as np

from cluster.config import ControlConfig
from cluster.control.loop import Control
from cluster.messages import HeldRequest, RosterEntry, Standing, Unplaced
from cluster.types import (
    EngineLoad,
    Generation,
    PriorityLoad,
    ReplicaId,
    ReplicaReport,
    ReplicaState,
    RequestId,
    RouterId,
)
from ops.report import Report, ReportRow, machine_context

MODEL = "bench"
REPORT_S = 0.1
SLOTS, BLOCKS, BLOCK_SIZE_TOKENS = 64, 4096, 16
TOLD = 16
"""Requests that a replica tells of one by one."""
ROUTERS = 4
WARM_S = 1.5
"""Then the steps of every replica are known, and what waits has waited long enough."""


@dataclass(frozen=True, slots=True)
class ControlSettings:
    replicas: int = 1000
    ticks: int = 400
    """Of each scene."""
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Load:
    """What is on a replica."""

    running: int
    waiting: int = 0
    paused: int = 0
    priority: int = 0
    blocks: int = 50
    """Of each request that runs."""
    step_s: float = 0.02


@dataclass(frozen=True, slots=True)
class Scene:
    """Half of the replicas are `one`, half `other`; a share of those that tell of their requests has new ones with each
    report, so that rests do not end it."""

    one: Load
    other: Load
    proposes: bool
    demand_blocks: int = 0
    """Of a request in each router that has no place; 0: there is none."""


SCENES: Mapping[str, Scene] = {
    # Equally full: there is nothing to do.
    "even": Scene(Load(running=40), Load(running=40), False),
    # Long requests run on one half, and the other is nearly empty.
    "skewed": Scene(Load(running=60, step_s=0.05), Load(running=4, step_s=0.02), True),
    # Work waits on one half, while the other has a few slots.
    "waiting": Scene(Load(running=64, waiting=8, paused=8), Load(running=62), True),
    # It waits everywhere, and as urgent work waits wherever there is room.
    "overloaded": Scene(Load(running=63, waiting=8, blocks=60), Load(running=50, waiting=8, blocks=60), False),
    # Requests wait that no replica can take in: less urgent ones must leave.
    "preempting": Scene(Load(running=64, blocks=64), Load(running=62, blocks=66), True, 700),
    # And such that none can take in, whoever leaves.
    "in_vain": Scene(Load(running=64, blocks=64, priority=20), Load(running=64, blocks=64, priority=20), False, 700),
}


class Bench:
    """One scene."""

    def __init__(self, scene: Scene, settings: ControlSettings) -> None:
        self._scene = scene
        self._rng = random.Random(settings.seed)
        self._config = ControlConfig()
        self._control = Control(self._config)
        self._loads = [scene.one if number % 2 else scene.other for number in range(settings.replicas)]
        self._entries = [_entry(number) for number in range(settings.replicas)]
        self._held = [self._draw(number) for number in range(settings.replicas)]
        self._now_s = 0.0
        self._next = 0
        self.replica_us: list[float] = []
        self.proposals = 0

    def run(self, ticks: int) -> list[float]:
        """ms of each tick."""
        while self._now_s < WARM_S:
            self._hear()
            self._control.tick(self._now_s)
        self.replica_us.clear()
        gc.collect()
        times = []
        for _ in range(ticks):
            self._hear()
            begin_ns = time.thread_time_ns()
            proposals = self._control.tick(self._now_s)
            times.append((time.thread_time_ns() - begin_ns) / 1e6)
            self.proposals += len(proposals)
        if (self.proposals > 0) is not self._scene.proposes:
            raise RuntimeError(f"not what the scene is about: {self.proposals} proposals")
        return times

    def _hear(self) -> None:
        """All that comes in one tick's time."""
        self._now_s += self._config.tick_s
        for router in range(ROUTERS if self._scene.demand_blocks else 0):
            name = RouterId(f"router-{router}")
            told = Unplaced(
                MODEL, RequestId(f"{name}-{int(self._now_s)}"), 10, self._scene.demand_blocks - 10 * router, 0.5
            )
            self._control.unplaced(name, told, self._now_s)
        for _ in range(int(len(self._entries) * self._config.tick_s / REPORT_S)):
            number, self._next = self._next, (self._next + 1) % len(self._entries)
            if self._rng.random() < 0.1:
                self._held[number] = self._draw(number)
            entry, report, held = self._entries[number], self._report(number), self._held[number]
            begin_ns = time.thread_time_ns()
            self._control.replica(entry, report, held, self._now_s)
            self.replica_us.append((time.thread_time_ns() - begin_ns) / 1e3)

    def _draw(self, number: int) -> tuple[HeldRequest, ...] | None:
        load = self._loads[number]
        if 2 * load.running < SLOTS:
            return None
        first = self._rng.randrange(10**9)
        standings = [Standing.WAITS] * load.waiting + [Standing.PAUSED] * load.paused
        standings = standings[: TOLD // 2] + [Standing.RUNS] * (TOLD - min(len(standings), TOLD // 2))
        return tuple(self._one(RequestId(f"{first + n}"), standing, load) for n, standing in enumerate(standings))

    def _one(self, request_id: RequestId, standing: Standing, load: Load) -> HeldRequest:
        blocks = 0 if standing is Standing.WAITS else self._rng.randint(load.blocks // 2, load.blocks)
        return HeldRequest(
            request_id=request_id,
            attempt=1,
            router_id=RouterId("router-0"),
            priority=load.priority,
            standing=standing,
            blocks=blocks,
            tokens=blocks * BLOCK_SIZE_TOKENS,
            remaining_tokens=self._rng.randint(1, 400),
            to_compute_tokens=load.blocks * BLOCK_SIZE_TOKENS if standing is Standing.WAITS else 1,
        )

    def _report(self, number: int) -> ReplicaReport:
        load = self._loads[number]
        kept = load.paused * load.blocks
        engine = EngineLoad(
            slots_total=SLOTS,
            blocks_total=BLOCKS,
            blocks_free=max(0, BLOCKS - load.running * load.blocks - kept),
            block_size_tokens=BLOCK_SIZE_TOKENS,
            running=(PriorityLoad(load.priority, load.running, load.running * load.blocks),),
            waiting=(PriorityLoad(load.priority, load.waiting + load.paused, kept),) if load.waiting else (),
            steps_total=int(self._now_s / load.step_s),
        )
        return ReplicaReport(
            replica_id=self._entries[number].replica_id,
            generation=self._entries[number].generation,
            state=ReplicaState.READY,
            observed_unix_s=self._now_s,
            load=engine,
            step_age_s=None,
        )


def time_scenes(settings: ControlSettings, show: Callable[[], None]) -> tuple[dict[str, list[float]], list[float]]:
    """ms of each tick by scene, and µs of each report that was heard. `show` is called after each scene."""
    ticks: dict[str, list[float]] = {}
    heard: list[float] = []
    for name, scene in SCENES.items():
        bench = Bench(scene, settings)
        ticks[name] = bench.run(settings.ticks)
        heard += bench.replica_us
        show()
    return ticks, heard


def build_report(tick_ms: Mapping[str, list[float]], replica_us: list[float], settings: ControlSettings) -> Report:
    """Percentiles of each scene's ticks, and of what one report costs over all of them."""
    rows = []
    for name, times in tick_ms.items():
        rows += [
            ReportRow(f"tick_p50_ms_{name}", median(times), "ms"),
            ReportRow(f"tick_p99_ms_{name}", float(np.percentile(times, 99)), "ms"),
        ]
    rows += [
        ReportRow("replica_p50_us", median(replica_us), "µs"),
        ReportRow("replica_p99_us", float(np.percentile(replica_us, 99)), "µs"),
    ]
    context = machine_context() | {
        "replicas": settings.replicas,
        "ticks": settings.ticks,
        "seed": settings.seed,
        "clock": "CPU time of the thread",
    }
    return Report("bench control", context, tuple(rows))


def _entry(number: int) -> RosterEntry:
    name = ReplicaId(f"replica-{number:04}")
    return RosterEntry(name, Generation(1, "bench"), f"host-{number // 8}", 1, MODEL, f"zone-{number // 256}")
