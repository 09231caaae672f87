"""A cluster in virtual time: production's routers, replicas and gates, and what a step costs on an A100.

Owns: the composition, the run and its end. Imports production's code and the parts of ops/sim. Invariants: a simulation is
a function of its arrivals, configuration, policy and seed; each subsystem draws from a generator of its own, so that what
is drawn in one changes nothing in another; what must hold (ops/sim/checks.py) is checked while it runs.

Simulated is the code that decides: admission, queue, fairness, placement, journal, fencing and losses of the routers,
sessions, outboxes and reports of the replicas, engines with scheduler, KV pool and prefix cache, and the gates. Not
simulated are HTTP, tokenisers, sockets and the time that the routers' own work takes: a message takes `link_delay_s`.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import BinaryIO

from prometheus_client import CollectorRegistry

from cluster.types import ReplicaId, ReplicaReport
from ops.sim.checks import check_empty, check_replicas, check_routers
from ops.sim.clients import Clients
from ops.sim.controller import SimController
from ops.sim.events import VirtualLoop
from ops.sim.faults import Fault, FaultKind
from ops.sim.links import Weather
from ops.sim.log import EventLog
from ops.sim.replica import Incarnation
from ops.sim.values import Arrival, Policy, RequestRecord, SimConfig, SimResult
from router.core import RouterCore
from router.fleet import Fleet
from router.metrics_sink import RouterMetrics
from router.routing import NO_FAVOUR, Need, Placement

TICK_S = 0.1
"""Routers tick so often."""
CHECKED_AT_ONCE = 4
"""Replicas whose books are checked in one full check, in turns; at the end all are."""
VIOLATIONS_MAX = 100

OnEnd = Callable[[RequestRecord, float], Iterable[Arrival]]


def simulate(
    arrivals: Iterable[Arrival],
    config: SimConfig,
    policy: Callable[[], Policy] | None = None,
    seed: int = 0,
    *,
    until_s: float | None = None,
    progress: Callable[[float], None] | None = None,
    log: BinaryIO | None = None,
    on_end: OnEnd | None = None,
) -> SimResult:
    """Run until all requests have ended, or until `until_s`.

    Args:
        arrivals: In order; taken one by one as time goes on.
        policy: Makes what chooses replicas for one router; None leaves that to production's own code.
        progress: Told the virtual time, about ten times a virtual second.
        log: Takes the event log.
        on_end: Told each request that has ended, and when; what it returns arrives, too.

    Raises:
        ValueError: an arrival cannot be.
    """
    world = World(config, policy, seed, log, on_end)
    began_s = time.process_time()
    with world.loop.running():
        world.begin()
        world.run(arrivals, until_s, progress)
    return world.result(time.process_time() - began_s)


class World:
    """One simulated cluster."""

    def __init__(
        self,
        config: SimConfig,
        policy: Callable[[], Policy] | None,
        seed: int,
        log: BinaryIO | None,
        on_end: OnEnd | None,
    ) -> None:
        self.loop = VirtualLoop()
        self._config = config
        self._seed = seed
        self._on_end = on_end
        self._log = EventLog(self.loop, log)
        self._clients = Clients(config.router, config.engine.max_model_len, self.loop, self._log, self._ended)
        self._cores = [self._core(k, policy) for k in range(config.routers)]
        self._sequences = [[itertools.count(1) for _ in range(config.replicas)] for _ in self._cores]
        self._weather = [Weather(self._rng(f"weather/{k}")) for k in range(config.replicas)]
        self._routing, self._reading = self._rng("arrivals"), self._rng("clients")
        self._replicas: dict[int, Incarnation] = {}
        self._reports: dict[ReplicaId, ReplicaReport] = {}
        self._gone: list[Incarnation] = []
        self._controller = SimController(
            self._cores, config.model, lambda: list(self._reports.values()), self.loop, config.link_delay_s
        )
        self._slow_share = 0.0
        self._violations: list[str] = []
        self._turns = 0
        self._ended_s = 0.0
        """When a request ended last."""
        self._arriving = True

    def _rng(self, name: str) -> random.Random:
        return random.Random(f"{self._seed}/{name}")

    def _core(self, number: int, policy: Callable[[], Policy] | None) -> RouterCore:
        rng, metrics = self._rng(f"router/{number}"), RouterMetrics(CollectorRegistry())
        core = RouterCore(self._config.router, self.loop, rng, metrics)
        if policy is not None:
            # The one place where a baseline differs from production.
            vars(core._fleet)["place"] = partial(_place, core._fleet, policy())
        return core

    # --- the beginning ---

    def begin(self) -> None:
        """Replicas and routers are there, and meet."""
        loop, phases = self.loop, self._rng("phases")
        for number in range(self._config.replicas):
            self._come_up(number, 1)
            loop.at(phases.random() * self._config.transport.report_period_s, self._report, number)
        for core in self._cores:
            loop.at(phases.random() * TICK_S, self._tick, core)
        if len(self._cores) > 1:
            self._controller.start()
            loop.at(0.0, self._controller.ask)
        for fault in self._config.faults:
            loop.at(fault.at_s, self._go_wrong, fault)

    def _come_up(self, number: int, generation: int) -> None:
        self._log.say("up", number, generation)
        one = self._replicas[number] = Incarnation(
            number, generation, self._config, self.loop, self._clients, self._log, self._weather[number]
        )
        for router, core in enumerate(self._cores):
            one.link(router, core, self._sequences[router][number])

    # --- the run ---

    def run(self, arrivals: Iterable[Arrival], until_s: float | None, progress: Callable[[float], None] | None) -> None:
        self._next_arrival(iter(arrivals))
        loop, check_every = self.loop, self._config.check_every
        patience_s = max((f.over_s for f in self._config.faults), default=0.0)
        shown_s, next_check = 0.0, check_every
        while self._arriving or self._clients.live:
            if until_s is not None and (loop.next_s or 0.0) > until_s:
                return
            loop.next()
            if loop.events >= next_check:
                next_check += check_every
                self._check(CHECKED_AT_ONCE)
            if progress is not None and loop.now_s >= shown_s:
                progress(loop.now_s)
                shown_s = loop.now_s + 0.1
            if not self._arriving and loop.now_s > max(patience_s, self._ended_s) + self._config.unended_max_s:
                self._violations.append(f"{len(self._clients.live)} requests do not end: {min(self._clients.live)} …")
                return
        # What is still under way, an abort or a last word, arrives.
        over_s = loop.now_s + 2 * self._config.transport.report_period_s
        while loop.next_s is not None and loop.next_s <= over_s:
            loop.next()
        self._violations.extend(check_empty(self._alive()))

    def _next_arrival(self, arrivals: Iterator[Arrival]) -> None:
        arrival = next(arrivals, None)
        if arrival is None:
            self._arriving = False
            self._ended_s = max(self._ended_s, self.loop.now_s)
        else:
            self._at(arrival, arrivals)

    def _at(self, arrival: Arrival, then: Iterator[Arrival] | None) -> None:
        if arrival.at_s < self.loop.now_s:
            raise ValueError(
                f"{arrival.request_id} arrives at {arrival.at_s} s, before what is past: sort the arrivals"
            )
        self.loop.at(arrival.at_s, self._arrive, arrival, then)

    def _arrive(self, arrival: Arrival, then: Iterator[Arrival] | None) -> None:
        if then is not None:
            self._next_arrival(then)
        router = self._routing.randrange(len(self._cores)) if arrival.router is None else arrival.router
        reads = arrival.reads and not (self._slow_share and self._reading.random() < self._slow_share)
        member = self._clients.arrive(arrival, router, reads=reads)
        self._cores[router].submit((member,))

    def _ended(self, record: RequestRecord) -> None:
        self._ended_s = self.loop.now_s
        if self._on_end is not None:
            for arrival in self._on_end(record, self.loop.now_s):
                self._at(arrival, None)

    def _tick(self, core: RouterCore) -> None:
        core.tick(gauges=False)
        self.loop.at(self.loop.now_s + TICK_S, self._tick, core)

    def _report(self, number: int) -> None:
        """Every report period, of whoever is alive there."""
        one = self._replicas[number]
        one.tick()
        if len(self._cores) > 1 and (report := one.report()) is not None:
            self._reports[one.replica_id] = report
        self.loop.at(self.loop.now_s + self._config.transport.report_period_s, self._report, number)

    # --- faults ---

    def _go_wrong(self, fault: Fault) -> None:
        self._log.say("fault", fault.kind.value, fault.number)
        loop, weather, over_s = self.loop, self._weather[min(fault.number, len(self._weather) - 1)], fault.over_s
        match fault.kind:
            case FaultKind.REPLICA_DEATH:
                self._end(fault.number, Incarnation.die, over_s)
            case FaultKind.NODE_LOSS:
                size = self._config.replicas_per_node
                for number in range(fault.number * size, min((fault.number + 1) * size, self._config.replicas)):
                    self._end(number, Incarnation.fall_silent, over_s)
            case FaultKind.LINK_BREAK:
                one = self._replicas[fault.number]
                if one.alive:
                    one.break_links()
                    loop.at(over_s, self._link_again, one)
            case FaultKind.REPORTS_LOST:
                weather.lost_share = fault.share
                loop.at(over_s, setattr, weather, "lost_share", 0.0)
            case FaultKind.REPORTS_LATE:
                weather.delay_s = fault.delay_s
                loop.at(over_s, setattr, weather, "delay_s", 0.0)
            case FaultKind.REPORTS_DOUBLED:
                weather.doubled_share = fault.share
                loop.at(over_s, setattr, weather, "doubled_share", 0.0)
            case FaultKind.CONTROLLER_RESTART:
                self._controller.stop()
                loop.at(over_s, self._controller.start)
            case FaultKind.SLOW_CLIENTS:
                self._slow_share = fault.share
                loop.at(over_s, setattr, self, "_slow_share", 0.0)

    def _end(self, number: int, ends: Callable[[Incarnation], None], back_s: float) -> None:
        one = self._replicas[number]
        if one.alive:
            ends(one)
            self._gone.append(one)
            self._reports.pop(one.replica_id, None)
            self.loop.at(back_s, self._come_up, number, one.generation.number + 1)

    def _link_again(self, one: Incarnation) -> None:
        for router, core in enumerate(self._cores):
            one.link(router, core, self._sequences[router][one.number])

    # --- checks and the end ---

    def _alive(self) -> list[Incarnation]:
        return [one for one in self._replicas.values() if one.alive]

    def _check(self, most: int) -> None:
        alive = self._alive()
        first = self._turns % max(1, len(alive))
        self._turns += most
        turn = (alive[first:] + alive[:first])[:most]
        found = itertools.chain(check_routers(self._cores, self._clients.live), check_replicas(turn))
        self._violations.extend(f"{self.loop.now_s:.6f} s: {what}" for what in found)
        del self._violations[VIOLATIONS_MAX:]

    def result(self, cpu_s: float) -> SimResult:
        self._check(len(self._replicas))
        lives = [*self._replicas.values(), *self._gone]
        loads = [one.runner.progress().load for one in lives]
        return SimResult(
            requests=list(self._clients.records.values()),
            event_log_sha256=self._log.sha256,
            events=self.loop.events,
            invariant_violations=[*self._clients.violations, *self._violations][:VIOLATIONS_MAX],
            virtual_s=self.loop.now_s,
            cpu_s=cpu_s,
            steps=sum(load.steps_total for load in loads),
            tokens=sum(load.tokens_total for load in loads),
            prefill_tokens=sum(load.prefill_tokens_total for load in loads),
            hit_tokens=sum(load.prefix_hit_tokens_total for load in loads),
            preemptions=sum(load.preemptions_total for load in loads),
            recomputed_tokens=sum(one.recomputed_tokens for one in lives),
            urgent_blocked=sum(load.urgent_blocked_total for load in loads),
        )


def _place(
    fleet: Fleet,
    policy: Policy,
    need: Need,
    now_s: float,
    rng: random.Random,
    favour: Mapping[ReplicaId, float] = NO_FAVOUR,
) -> Placement | None:
    """`Fleet.place` by another policy."""
    del favour
    return policy.place(need, fleet.views(now_s), now_s, rng)
