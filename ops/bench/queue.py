"""What the router's order costs: a request's way into and out of a long queue, and the choice among many replicas.

Owns: the measurement of the real queue with its tenants and of the real fleet. Imports the router and the report.
Invariants: a queue is as long after a measured turn as before it; every placement is of the kind that its scene is about
(checked as it is made). Times are of the thread's own CPU, so that a busy machine does not count; the garbage
collector runs as it does in the router.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from cluster.config import RouterConfig
from cluster.types import (
    EngineLoad,
    Generation,
    PriorityLoad,
    ReplicaId,
    ReplicaReport,
    ReplicaState,
    Request,
    RequestId,
)
from ops.bench.no_moves import NoMoves
from ops.report import Report, ReportRow, machine_context
from router.bands import FairShares
from router.fleet import Fleet, New
from router.queue import BandQueue, Waiting
from router.routing import Need, Placement
from router.view import Reservation

BLOCK_SIZE_TOKENS = 16
STEP_TOKENS = 512
PROMPT_LEFT_TOKENS = 20
"""Of each that runs, in the mean."""
NOW_S = 0.0
ROUND = 500


@dataclass(frozen=True, slots=True)
class QueueSettings:
    tenants: int = 1000
    lengths: tuple[int, ...] = (1_000, 100_000, 1_000_000)
    """Requests that wait; the ratio is of the last to the first."""
    turns: int = 20_000
    """A request comes and one leaves; per length, in whole rounds."""
    replicas: int = 1000
    scanned_replicas: int = 64
    """The most of which each is looked at."""
    picks: int = 10_000
    """Placements per scene."""
    seed: int = 1


# --- the queue ---


class Line:
    """A queue in which so many requests wait, and go on waiting."""

    def __init__(self, waiting: int, settings: QueueSettings) -> None:
        self._waiting = waiting
        self._tenants = settings.tenants
        self._rng = random.Random(settings.seed)
        shares = FairShares(RouterConfig())
        self._queue = BandQueue(shares.band)
        self._band = shares.band(0)
        self._number = 0
        for _ in range(waiting):
            self._queue.push(self._next())

    def turn_us(self) -> float:
        """Time of one turn: a request comes, the next is found, taken out and charged for."""
        queue, arrival, charge = self._queue, self._next(), float(self._rng.randint(1, 2000))
        begin_ns = time.thread_time_ns()
        queue.push(arrival)
        head = queue.peek()
        assert head is not None
        queue.remove(head.request_id)
        self._band.begin(head.tenant, charge)
        took_us = (time.thread_time_ns() - begin_ns) / 1000
        self._band.keep(head.tenant, charge)
        self._band.end(head.tenant, 0.0)
        if len(queue) != self._waiting:
            raise RuntimeError(f"{len(queue)} wait, not {self._waiting}")
        return took_us

    def _next(self) -> Waiting:
        """Of every tenant one, then of any."""
        number = self._number
        self._number += 1
        return _waiting(number, number if number < self._tenants else self._rng.randrange(self._tenants))


def time_turns(settings: QueueSettings, show: Callable[[], None]) -> dict[int, list[float]]:
    """µs of each turn, by requests waiting. The lengths take turns of `ROUND` each, so that whatever slows the machine
    slows all of them. `show` is called after each of those."""
    lines = {waiting: Line(waiting, settings) for waiting in settings.lengths}
    times: dict[int, list[float]] = {waiting: [] for waiting in lines}
    gc.collect()
    for _ in range(settings.turns // ROUND):
        for waiting, line in lines.items():
            times[waiting] += [line.turn_us() for _ in range(ROUND)]
        show()
    return times


def _waiting(number: int, tenant: int) -> Waiting:
    return Waiting(
        request_id=RequestId(f"chatcmpl-{number:024}"),
        priority=0,
        priority_class="standard",
        arrived_unix_s=float(number),
        size_bytes=4096,
        tenant=f"tenant-{tenant:04}",
        service=1000,
    )


# --- the fleet ---


class _Port(NoMoves):
    """A `ports.ReplicaPort` that nothing is sent over."""

    def __init__(self, number: int) -> None:
        self.replica_id = ReplicaId(f"replica-{number:04}")
        self.generation = Generation(1, "bench")

    def add(
        self, request: Request, attempt: int, *, shared: bool = False, trial: int = 0, trial_tokens: int = 0
    ) -> int:
        raise NotImplementedError("nothing is sent")

    def abort(self, request_id: RequestId, attempt: int) -> None:
        raise NotImplementedError("nothing is sent")

    def resend_from(self, request_id: RequestId, attempt: int, index: int) -> None:
        raise NotImplementedError("nothing is sent")


SLOTS, BLOCKS = 32, 4096
NEED = Need(0, 1024, 2048)


@dataclass(frozen=True, slots=True)
class Scene:
    """`need` is placed again and again; `running` draws how much runs on a replica, so that `about` holds."""

    need: Need
    running: Callable[[random.Random], int]
    about: Callable[[Placement | None], bool]
    blocks_each: Callable[[random.Random], int] = lambda _: NEED.blocks(BLOCK_SIZE_TOKENS)
    """Of those that run."""

    def report(self, replica_id: ReplicaId, rng: random.Random) -> ReplicaReport:
        return _report(replica_id, self.running(rng), self.blocks_each(rng))


SCENES: Mapping[str, Scene] = {
    # Three quarters of all slots are taken: there is room in most replicas.
    "pick": Scene(NEED, lambda rng: min(SLOTS - 1, rng.randint(16, 32)), lambda p: p is not None and p.free),
    # Less urgent work fills every slot.
    "urgent_pick": Scene(Need(10, 1024, 2048), lambda _: SLOTS, lambda p: p is not None and p.victims == 1),
    # Work as urgent fills every slot, and the same request is tried whenever a replica has changed.
    "blocked_pick": Scene(NEED, lambda _: SLOTS, lambda p: p is None),
    # Half of all slots are free; less urgent work fills every block.
    "full_pick": Scene(
        Need(10, 1024, 2048), lambda _: 16, lambda p: p is not None and p.victims == 1, lambda _: BLOCKS // 16
    ),
    # Half of all slots are free; work as urgent fills the blocks of nine replicas in ten.
    "tight_pick": Scene(
        NEED, lambda _: 16, lambda p: p is not None and p.free, lambda rng: BLOCKS // (16 if rng.random() < 0.9 else 64)
    ),
}


def time_all_picks(settings: QueueSettings, show: Callable[[], None]) -> dict[str, list[float]]:
    """µs of each placement, by scene and number of replicas. `show` is called after each scene."""
    times: dict[str, list[float]] = {}
    for name, scene in SCENES.items():
        times[f"{name}_{settings.replicas}"] = time_picks(scene, settings.replicas, settings)
        show()
    times[f"pick_{settings.scanned_replicas}"] = time_picks(SCENES["pick"], settings.scanned_replicas, settings)
    show()
    return times


def time_picks(scene: Scene, replicas: int, settings: QueueSettings) -> list[float]:
    """µs of each placement, after one replica's report has come."""
    rng = random.Random(settings.seed)
    fleet = Fleet(RouterConfig())
    for number in range(replicas):
        linked = fleet.linked(_Port(number), NOW_S)
        assert isinstance(linked, New)
        linked.replica.observe(scene.report(linked.replica.replica_id, rng), NOW_S)
    members = list(fleet)
    fleet.place(scene.need, NOW_S, rng)
    times = []
    gc.collect()
    for number in range(settings.picks):
        changed = rng.choice(members)
        changed.observe(scene.report(changed.replica_id, rng), NOW_S)
        begin_ns = time.thread_time_ns()
        placement = fleet.place(scene.need, NOW_S, rng)
        times.append((time.thread_time_ns() - begin_ns) / 1000)
        if not scene.about(placement):
            raise RuntimeError(f"not what the scene is about: {placement}")
        if placement is not None:
            name = RequestId(f"{number}")
            reservation = Reservation(1, number + 1, scene.need.priority, placement.blocks)
            fleet[placement.replica_id].reserve(name, reservation)
            fleet[placement.replica_id].release(name)
    return times


def _report(replica_id: ReplicaId, running: int, each: int) -> ReplicaReport:
    load = EngineLoad(
        slots_total=SLOTS,
        blocks_total=BLOCKS,
        blocks_free=BLOCKS - running * each,
        block_size_tokens=BLOCK_SIZE_TOKENS,
        running=(PriorityLoad(0, running, running * each, running * PROMPT_LEFT_TOKENS),),
        step_tokens=STEP_TOKENS,
    )
    return ReplicaReport(
        replica_id=replica_id,
        generation=Generation(1, "bench"),
        state=ReplicaState.READY,
        observed_unix_s=0.0,
        load=load,
        step_age_s=None,
    )


# --- all of it ---


def build_report(
    turn_us: Mapping[int, Sequence[float]], pick_us: Mapping[str, Sequence[float]], settings: QueueSettings
) -> Report:
    """Percentiles of each.

    Args:
        turn_us: By requests waiting, one for each of `settings.lengths`.
        pick_us: By the name of the scene and the number of replicas, as pick_1000.
    """
    shortest, longest = settings.lengths[0], settings.lengths[-1]
    ratio = median(turn_us[longest]) / median(turn_us[shortest])
    rows = []
    for waiting, times in turn_us.items():
        rows += [
            ReportRow(f"p50_us_{_short(waiting)}", median(times), "µs"),
            ReportRow(f"p99_us_{_short(waiting)}", float(np.percentile(times, 99)), "µs"),
        ]
    rows.append(ReportRow(f"ratio_{_short(longest)}_over_{_short(shortest)}", ratio, "×"))
    for name, times in pick_us.items():
        scene, replicas = name.rsplit("_", 1)
        rows += [
            ReportRow(f"{scene}_p50_us_{replicas}", median(times), "µs"),
            ReportRow(f"{scene}_p99_us_{replicas}", float(np.percentile(times, 99)), "µs"),
        ]
    context = machine_context() | {
        "tenants": settings.tenants,
        "turns": settings.turns,
        "picks": settings.picks,
        "seed": settings.seed,
        "clock": "CPU time of the thread",
    }
    return Report("bench queue", context, tuple(rows))


def _short(count: int) -> str:
    for unit, name in ((1_000_000, "m"), (1_000, "k")):
        if count >= unit and count % unit == 0:
            return f"{count // unit}{name}"
    return str(count)
