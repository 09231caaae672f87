"""A cluster in virtual time: production's routers, replicas and controller, and what a step costs on an A100.

Owns: the composition, the run and its end. Imports production's code and the parts of ops/sim. Invariants: a simulation is
a function of its arrivals, configuration, policy and seed; each subsystem draws from a generator of its own, so that what
is drawn in one changes nothing in another; what must hold (ops/sim/checks.py) is checked while it runs.

Simulated is the code that decides: admission, queue, fairness, placement, journal, fencing and losses of the routers,
live moves, sessions, outboxes and reports of the replicas, engines with scheduler, KV pool and prefix cache, and the
controller's gates and proposals. Not simulated are HTTP, tokenisers, sockets and the time that the routers' and the
controller's own work takes: a message takes `link_delay_s`, and keys and values that move what their bytes take.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import BinaryIO, assert_never

from prometheus_client import CollectorRegistry

from cluster import metrics as names
from cluster.messages import RosterEntry
from cluster.types import ReplicaId, RequestId
from ops.sim.checks import check_empty, check_replicas, check_routers
from ops.sim.clients import Clients
from ops.sim.controller import SimController
from ops.sim.done import note_done
from ops.sim.events import VirtualLoop
from ops.sim.faults import Fault, FaultKind
from ops.sim.links import MoveWatch, Weather
from ops.sim.log import EventLog
from ops.sim.migrator import Migrator
from ops.sim.replica import GIVEN_UP_S, Incarnation
from ops.sim.values import Arrival, MigratingPolicy, Policy, RequestRecord, SimConfig, SimResult
from router.core import RouterCore
from router.fleet import Fleet
from router.metrics_sink import RouterMetrics
from router.moving import MoveOutcome
from router.routing import NO_FAVOUR, Need, Placement

TICK_S = 0.1
"""Routers tick so often."""
LOOK_S = 0.1
"""It is looked so often how far it has come, and whether anything still ends."""
RUSH_TOKENS = 100
"""Prompt and output of each request of a rush."""
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
    not_awaited: str | None = None,
    counted_at_s: float | None = None,
) -> SimResult:
    """Run until all requests have ended, or until `until_s`.

    Args:
        arrivals: In order; taken one by one as time goes on.
        policy: Makes what chooses replicas for one router and, if it migrates, moves what they have, for there is no
            controller that does; None leaves both to production's own code.
        progress: Told the virtual time, about ten times a virtual second.
        log: Takes the event log.
        on_end: Told each request that has ended, and when; what it returns arrives, too.
        not_awaited: A class whose requests need not have ended.
        counted_at_s: When it is counted what has been done of each request; None, or if it has ended before: at the end.

    Raises:
        ValueError: an arrival cannot be.
    """
    world = World(config, policy, seed, log, on_end, not_awaited)
    began_s = time.process_time()
    with world.loop.running():
        world.begin(counted_at_s)
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
        not_awaited: str | None,
    ) -> None:
        self.loop = VirtualLoop()
        self._config = config
        self._seed = seed
        self._on_end = on_end
        self._log = EventLog(self.loop, log)
        self._clients = Clients(
            config.router, config.engine.max_model_len, self.loop, self._log, self._ended, not_awaited
        )
        self._registries = [CollectorRegistry() for _ in range(config.routers)]
        self._policies = [] if policy is None else [policy() for _ in range(config.routers)]
        self._pauses_s: list[float] = []
        self._cores = [self._core(k) for k in range(config.routers)]
        self._sequences = [[itertools.count(1) for _ in range(config.replicas)] for _ in self._cores]
        self._watch = MoveWatch(self.loop)
        self._weather = [Weather(self._rng(f"weather/{k}"), self._watch) for k in range(config.replicas)]
        self._routing, self._reading = self._rng("arrivals"), self._rng("clients")
        self._replicas: dict[int, Incarnation] = {}
        self._gone: list[Incarnation] = []
        self._silent: list[Incarnation] = []
        """Of those that are gone, those whose node was lost."""
        control = config.control if policy is None else None
        self._controller = SimController(
            self._cores, config.model, control, self.loop, config.link_delay_s, self._log, self._weigh
        )
        self._slow_share = 0.0
        self._violations: list[str] = []
        self._counted_s: float | None = None
        self._turns = 0
        self._ended_s = 0.0
        """When a request ended last."""
        self._arriving = True

    def _weigh(self, for_s: float) -> None:
        for one in self._replicas.values():
            one.server.weigh(for_s)

    def _rng(self, name: str) -> random.Random:
        return random.Random(f"{self._seed}/{name}")

    def _core(self, number: int) -> RouterCore:
        rng, metrics = self._rng(f"router/{number}"), RouterMetrics(self._registries[number])
        config = self._config.router
        if self._policies:  # how often its requests move is its own affair
            config = config.model_copy(update={"request_rest_s": 0.0})
        vars(metrics)["move_paused"] = self._pauses_s.append
        core = RouterCore(config, self.loop, rng, metrics)
        if self._policies:
            # Where a baseline differs from production: here, and in what it has moved.
            vars(core._fleet)["place"] = partial(_place, core._fleet, self._policies[number])
        return core

    # --- the beginning ---

    def begin(self, counted_at_s: float | None = None) -> None:
        """Replicas and routers are there, and meet."""
        loop, phases = self.loop, self._rng("phases")
        for number in range(self._config.replicas):
            self._come_up(number, 1)
            loop.at(phases.random() * self._config.transport.report_period_s, self._report, number)
        for core in self._cores:
            loop.at(phases.random() * TICK_S, self._tick, core)
        if self._controller.needed:
            loop.at(0.0, self._controller.begin)
        if migrating := [policy for policy in self._policies if isinstance(policy, MigratingPolicy)]:
            delay_s = self._config.link_delay_s
            loop.at(0.0, Migrator(migrating, self._cores, self._alive, loop, delay_s, self._log).tick)
        for fault in self._config.faults:
            loop.at(fault.at_s, self._go_wrong, fault)
        if counted_at_s is not None:
            loop.at(counted_at_s, self._count)

    def _come_up(self, number: int, generation: int) -> None:
        self._log.say("up", number, generation)
        weather = self._weather[number]
        one = self._replicas[number] = Incarnation(
            number, generation, self._config, self.loop, self._clients, self._log, weather, self._listens
        )
        for router, core in enumerate(self._cores):
            one.link(router, core, self._sequences[router][number])

    def _listens(self, entry: RosterEntry) -> Incarnation | None:
        """Who is where an incarnation was; of a node that is lost nobody knows that nobody is."""
        one = self._replicas[entry.port]
        is_it = one.generation == entry.generation
        return one if is_it and (one.alive or one in self._silent) else None

    # --- the run ---

    def run(self, arrivals: Iterable[Arrival], until_s: float | None, progress: Callable[[float], None] | None) -> None:
        self._next_arrival(iter(arrivals))
        loop, check_every = self.loop, self._config.check_every
        patience_s = max((f.over_s for f in self._config.faults), default=0.0)
        look_s, next_check = 0.0, check_every
        while self._arriving or self._clients.awaited:
            if until_s is not None and (loop.next_s or 0.0) > until_s:
                return
            loop.next()
            if loop.events >= next_check:
                next_check += check_every
                self._check(CHECKED_AT_ONCE)
            if loop.now_s < look_s:
                continue
            look_s = loop.now_s + LOOK_S
            if progress is not None:
                progress(loop.now_s)
            if not self._arriving and loop.now_s > max(patience_s, self._ended_s) + self._config.unended_max_s:
                self._violations.append(f"{len(self._clients.live)} requests do not end: {min(self._clients.live)} …")
                return
        if self._clients.live:
            return
        # What is still under way, an abort or a last word, arrives; and a copy that nobody wants is dropped.
        transport = self._config.transport
        self._go_on_until(loop.now_s + 2 * transport.report_period_s)
        if any(check_empty(self._alive())):
            self._go_on_until(loop.now_s + transport.move_expiry_s + transport.move_answer_s)
        self._violations.extend(check_empty(self._alive()))

    def _go_on_until(self, over_s: float) -> None:
        while self.loop.next_s is not None and self.loop.next_s <= over_s:
            self.loop.next()

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
        core.tick()
        self.loop.at(self.loop.now_s + TICK_S, self._tick, core)

    def _report(self, number: int) -> None:
        """Every report period, of whoever is alive there."""
        one = self._replicas[number]
        one.tick()
        if one.alive and self._controller.needed:
            self._controller.status(one.entry, *one.report(), self._weather[number])
        self.loop.at(self.loop.now_s + self._config.transport.report_period_s, self._report, number)

    # --- faults ---

    def _go_wrong(self, fault: Fault) -> None:
        if fault.point is None:
            self._log.say("fault", fault.kind.value, fault.number)
        loop, weather, over_s = self.loop, self._weather[min(fault.number, len(self._weather) - 1)], fault.over_s
        match fault.kind:
            case FaultKind.REPLICA_DEATH:
                self._end(fault.number, Incarnation.die, over_s)
            case FaultKind.NODE_LOSS:
                for number in self._on_node(fault.number):
                    self._silent.append(self._replicas[number])
                    self._end(number, Incarnation.fall_silent, over_s)
            case FaultKind.LINK_BREAK:
                self._unlink(self._replicas[fault.number], over_s)
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
            case FaultKind.DRAIN:
                self._drain([self._replicas[fault.number]], over_s)
            case FaultKind.NODE_DRAIN:
                self._drain([self._replicas[number] for number in self._on_node(fault.number)], over_s)
            case (
                FaultKind.MOVE_SOURCE_DEATH
                | FaultKind.MOVE_TARGET_DEATH
                | FaultKind.MOVE_LINK_BREAK
                | FaultKind.MOVE_SOURCE_UNLINKED
                | FaultKind.MOVE_TARGET_UNLINKED
                | FaultKind.MOVE_CLIENT_LEAVES
                | FaultKind.MOVE_TARGET_DRAIN
                | FaultKind.MOVE_TURN_BACK
                | FaultKind.MOVE_CONTROLLER_RESTART
                | FaultKind.MOVE_RUSH
            ):
                assert fault.point is not None
                self._watch.arm(fault.point, partial(self._move_goes_wrong, fault))
            case _:
                assert_never(fault.kind)

    def _move_goes_wrong(self, fault: Fault, request_id: RequestId, source_id: ReplicaId, target_id: ReplicaId) -> None:
        source, target = self._named(source_id), self._named(target_id)
        self._log.say("fault", fault.kind.value, fault.point, source_id, target_id)
        back_s = self.loop.now_s + fault.for_s
        match fault.kind:
            case FaultKind.MOVE_SOURCE_DEATH:
                self._end(source.number, Incarnation.die, back_s)
            case FaultKind.MOVE_TARGET_DEATH:
                self._end(target.number, Incarnation.die, back_s)
            case FaultKind.MOVE_LINK_BREAK:
                for connection in [one for one in source.connections if one in target.connections]:
                    connection.end("broken")
            case FaultKind.MOVE_SOURCE_UNLINKED:
                self._unlink(source, back_s)
            case FaultKind.MOVE_TARGET_UNLINKED:
                self._unlink(target, back_s)
            case FaultKind.MOVE_CLIENT_LEAVES:
                for core in self._cores:
                    core.cancel(request_id)  # one has it
            case FaultKind.MOVE_TARGET_DRAIN:
                self._drain([target], back_s)
            case FaultKind.MOVE_TURN_BACK:
                source.take_work(True)
                self._drain([target], back_s)
            case FaultKind.MOVE_CONTROLLER_RESTART:
                self._controller.stop()
                self.loop.at(back_s, self._controller.start)
            case FaultKind.MOVE_RUSH:
                now_s, tokens = self.loop.now_s, RUSH_TOKENS
                for number in range(2 * self._config.engine.slots):
                    self._arrive(Arrival(now_s, RequestId(f"rush-{number}"), tokens, tokens, "interactive"), None)
            case _:
                raise AssertionError(f"{fault.kind} does not happen to a move")

    def _named(self, replica_id: ReplicaId) -> Incarnation:
        return next(one for one in self._replicas.values() if one.replica_id == replica_id)

    def _on_node(self, node: int) -> range:
        size = self._config.replicas_per_node
        return range(node * size, min((node + 1) * size, self._config.replicas))

    def _drain(self, replicas: Sequence[Incarnation], over_s: float) -> None:
        for one in replicas:
            one.take_work(False)
            self.loop.at(over_s, one.take_work, True)

    def _unlink(self, one: Incarnation, back_s: float) -> None:
        if one.alive:
            one.break_links()
            self.loop.at(back_s, self._link_again, one)

    def _end(self, number: int, ends: Callable[[Incarnation], None], back_s: float) -> None:
        one = self._replicas[number]
        if one.alive:
            ends(one)
            self._gone.append(one)
            self._controller.gone(
                one.entry, GIVEN_UP_S if ends is Incarnation.fall_silent else self._config.link_delay_s
            )
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

    def _count(self) -> float:
        self._counted_s = self.loop.now_s
        note_done(self._clients.records, self._cores, self._alive())
        return self._counted_s

    def result(self, cpu_s: float) -> SimResult:
        self._check(len(self._replicas))
        counted_s = self._count() if self._counted_s is None else self._counted_s
        lives = [*self._replicas.values(), *self._gone]
        loads = [one.runner.progress().load for one in lives]
        alive = self._alive()
        for one in alive:
            one.runner.catch_up()
        # Of one that is gone without the step in which it went, whether that was taken when it began or would be at its end.
        counted = [one.engine.load() if one in alive else one.runner.latest_load() for one in lives]
        prefill_tokens = sum(load.prefill_tokens_total for load in counted)
        begun = [r for r in self._clients.records.values() if r.first_token_s is not None]
        once = sum(r.prompt_tokens - r.cached_tokens for r in begun)
        once += sum(one.engine.unanswered_tokens for one in alive)
        return SimResult(
            requests=list(self._clients.records.values()),
            event_log_sha256=self._log.sha256,
            events=self.loop.events,
            invariant_violations=[*self._clients.violations, *self._violations, *self.loop.failures][:VIOLATIONS_MAX],
            virtual_s=self.loop.now_s,
            counted_s=counted_s,
            cpu_s=cpu_s,
            steps=sum(load.steps_total for load in loads),
            tokens=sum(load.tokens_total for load in loads),
            prefill_tokens=prefill_tokens,
            hit_tokens=sum(load.prefix_hit_tokens_total for load in loads),
            preemptions=sum(load.preemptions_total for load in loads),
            recomputed_tokens=max(0, prefill_tokens - once),
            urgent_blocked=sum(load.urgent_blocked_total for load in loads),
            moves={outcome.value: self._moved(outcome) for outcome in MoveOutcome},
            move_pauses_s=tuple(self._pauses_s),
        )

    def _moved(self, outcome: MoveOutcome) -> int:
        name, labels = f"{names.MOVES.name}_total", {"outcome": outcome.value}
        return sum(int(registry.get_sample_value(name, labels) or 0) for registry in self._registries)


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
