"""A simulated replica: incarnations of a production `ReplicaServer` over an engine in virtual time.

Owns: one incarnation with its links to all routers, and how it begins and ends. Imports the replica's server, the engine
and the routers' ports. Invariant: a router hears of an incarnation through its link alone, later than it happened.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cluster.engine.scheduling.plan import Cost
from cluster.engine.scheduling.sequence import Identity
from cluster.messages import Hello
from cluster.ports import StepResult
from cluster.types import Generation, ReplicaId, ReplicaReport
from deployments.replica_server import ReplicaServer
from deployments.transport import LinkHandler
from ops.sim.backend import END_TOKEN, ModelledBackend, no_text
from ops.sim.clients import LONGEST_OUTPUT, Clients
from ops.sim.engine import SimEngine
from ops.sim.events import VirtualLoop
from ops.sim.links import SimLink, SimPort, Weather, entry_of
from ops.sim.log import EventLog
from ops.sim.steady import SteadyEngine
from ops.sim.step_time import a100
from ops.sim.values import SimConfig
from router.core import RouterCore

NOBODY_LISTENS_S = 0.02
"""From a broken link to the answer that nobody listens there: a router's first try to connect again."""
GIVEN_UP_S = 5.0
"""From the loss of a node to the end of its links, which nobody has said to end."""
COST = Cost(prefill_token_s=60e-6, swap_block_s=1e-3)
"""Of an A100: a token computed again, in long chunks; nothing is swapped."""


@dataclass(frozen=True, slots=True)
class _Linked:
    core: RouterCore
    port: SimPort
    there: SimLink
    """What goes to the replica."""
    back: SimLink
    handler: LinkHandler
    """The replica's, of this link."""


class Incarnation:
    """One life of one replica."""

    def __init__(
        self,
        number: int,
        generation: int,
        config: SimConfig,
        loop: VirtualLoop,
        clients: Clients,
        log: EventLog,
        weather: Weather,
    ) -> None:
        self.number = number
        self.replica_id = ReplicaId(f"replica-{number}")
        self.generation = Generation(generation, f"{number}/{generation}")
        backend = ModelledBackend(a100().models[config.model], LONGEST_OUTPUT, padded=False)
        self.engine = SteadyEngine(config.engine, backend, no_text(), (END_TOKEN,), COST)
        self.runner = SimEngine(
            self.engine,
            backend,
            loop,
            number,
            self._watch,
            fast_forward=config.fast_forward,
            held_max_s=config.held_max_s,
        )
        self.server = ReplicaServer(self.runner, self.replica_id, self.generation, config.transport, loop)
        self.alive = True
        self.recomputed_tokens = 0
        self._config = config
        self._loop = loop
        self._clients = clients
        self._log = log
        self._weather = weather
        self._overtaken: tuple[Identity, float] | None = None
        self._entry = entry_of(self.replica_id, self.generation, config.model)
        self._links: dict[int, _Linked] = {}
        """By router."""
        self.server.start(self._engine_died)

    def _engine_died(self, why: str) -> None:
        raise AssertionError(f"a simulated engine dies with its replica only: {why}")

    # --- links ---

    def link(self, router: int, core: RouterCore, sequence: Iterator[int]) -> None:
        """A router connects, for the first time or again."""
        if not self.alive:
            return
        loop, delay_s = self._loop, self._config.link_delay_s
        router_id = f"router-{router}"
        before = self._links.get(router)
        port = SimPort(self._entry, router_id, core, self._clients, sequence) if before is None else before.port
        back = SimLink(loop, delay_s, port.message, self._weather)
        hello = Hello(1, 1, "router", router_id, b"", b"", "")
        handler = self.server.accept(back, hello)
        there = SimLink(loop, delay_s, handler.message)
        port.up(there)
        self._links[router] = _Linked(core, port, there, back, handler)
        core.link_up(port, None)

    def break_links(self) -> None:
        """All break, and both sides see it."""
        seen_s = self._loop.now_s + self._config.link_delay_s
        for linked in self._links.values():
            linked.there.cut = linked.back.cut = True
            linked.port.down()
            self._loop.at(seen_s, linked.core.link_down, self.replica_id, self.generation)
            if self.alive:
                linked.handler.closed("broken")

    # --- its end ---

    def die(self) -> None:
        """The process is gone: its routers see the links break, and then that nobody listens."""
        self._log.say("died", self.replica_id, self.generation.number)
        self.alive = False
        self.runner.stop()
        self.break_links()
        self._lost_in(self._config.link_delay_s + NOBODY_LISTENS_S)

    def fall_silent(self) -> None:
        """The machine is gone: nobody says anything."""
        self._log.say("silent", self.replica_id, self.generation.number)
        self.alive = False
        self.runner.stop()
        for linked in self._links.values():
            linked.there.cut = linked.back.cut = True
        self._lost_in(GIVEN_UP_S)

    def _lost_in(self, seconds: float) -> None:
        for linked in self._links.values():
            lost_s = self._loop.now_s + seconds
            self._loop.at(lost_s, linked.core.replica_lost, self.replica_id, self.generation, "gone")

    # --- as it runs ---

    def tick(self) -> None:
        """Every report period: what is held, or a report."""
        if self.alive:
            self.runner.tell()
            self._loop.at(self._loop.now_s, self.server.tick)

    def report(self) -> ReplicaReport | None:
        """What the controller hears with each tick."""
        return self.server.report(None) if self.alive else None

    def _watch(self, result: StepResult) -> None:
        """A step has ended in which something was decided."""
        for preempted in result.preempted:
            record = self._clients.records[preempted.request_id]
            record.preemptions += 1
            record.recomputed_tokens += preempted.tokens_to_recompute
            self.recomputed_tokens += preempted.tokens_to_recompute
            self._log.say("preempted", preempted.request_id, preempted.means.value, preempted.for_request_id)
        first = self.engine.stands_behind_lesser()
        if first is None or self._overtaken is None or self._overtaken[0] != first:
            self._overtaken = None if first is None else (first, self._loop.now_s)
        elif self._loop.now_s - self._overtaken[1] > self._config.overtaken_max_s:
            self._clients.violations.append(
                f"{first[0]} waits on {self.replica_id} behind less urgent work since {self._overtaken[1]:.3f} s"
            )
            self._overtaken = None
