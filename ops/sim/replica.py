"""A simulated replica: incarnations of a production `ReplicaServer` over an engine in virtual time.

Owns: one incarnation with its links to all routers, and how it begins and ends. Imports the replica's server, the engine
and the routers' ports. Invariant: a router hears of an incarnation through its link alone, later than it happened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cluster.engine.scheduling.plan import Cost
from cluster.engine.scheduling.sequence import Identity
from cluster.messages import HeldRequest, Hello, RosterEntry
from cluster.ports import StepResult
from cluster.types import Generation, ReplicaId, ReplicaReport
from deployments.move_source import MoveSource
from deployments.replica_server import ReplicaServer
from deployments.transport import Link, LinkHandler
from ops.sim.backend import END_TOKEN, ModelledBackend, no_text
from ops.sim.clients import LONGEST_OUTPUT, Clients
from ops.sim.engine import SimEngine
from ops.sim.events import VirtualLoop
from ops.sim.links import Peer, PeerConnection, SimLink, SimPeers, SimPort, Weather, Wire, entry_of
from ops.sim.log import EventLog
from ops.sim.steady import SteadyEngine
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
    """One life of one replica. Implements `links.Peer`."""

    def __init__(
        self,
        number: int,
        generation: int,
        config: SimConfig,
        loop: VirtualLoop,
        clients: Clients,
        log: EventLog,
        weather: Weather,
        find: Callable[[RosterEntry], Peer | None],
    ) -> None:
        """`find`: who listens there."""
        self.number = number
        self.replica_id = ReplicaId(f"replica-{number}")
        self.generation = Generation(generation, f"{number}/{generation}")
        gpu = config.device
        times = gpu.models[config.model]
        block_bytes = times.kv_bytes_per_token * config.engine.block_size_tokens
        copy_block_ms = 1000 * block_bytes / gpu.copy_bytes_per_s
        backend = ModelledBackend(times, LONGEST_OUTPUT, padded=False, copy_block_ms=copy_block_ms, host_ms=gpu.host_ms)
        self.wire = Wire(s_per_block=block_bytes / gpu.network_bytes_per_s)
        self.connections: dict[PeerConnection, None] = {}
        self.engine = SteadyEngine(config.engine, backend, no_text(), (END_TOKEN,), COST, known=config.fast_forward)
        self.runner = SimEngine(
            self.engine,
            backend,
            loop,
            number,
            self._watch,
            fast_forward=config.fast_forward,
            held_max_s=config.held_max_s,
        )
        self.alive = self.takes_work = True
        # A block is one byte here.
        chunk_blocks = max(1, config.transport.move_chunk_bytes // block_bytes)
        transport = config.transport.model_copy(update={"move_chunk_bytes": chunk_blocks})
        self.server = ReplicaServer(self.runner, self.replica_id, self.generation, transport, loop)
        # The one place where a replica differs from production's: how it reaches others.
        peers = SimPeers(self, transport, loop, config.link_delay_s, weather.watch, find)
        self.server._peers = peers
        self.server._leaving = MoveSource(self.runner, peers, self.server, transport)
        self._config = config
        self._loop = loop
        self._clients = clients
        self._log = log
        self._weather = weather
        self._overtaken: tuple[Identity, float] | None = None
        self.entry = entry_of(number, self.generation, config)
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
        watch = self._weather.watch
        port = SimPort(self.entry, router_id, core, self._clients, watch, sequence) if before is None else before.port
        back = SimLink(loop, delay_s, port.message, self._weather)
        handler = self.server.accept(back, _hello("router", router_id))
        there = SimLink(loop, delay_s, handler.message)
        port.up(there)
        self._links[router] = _Linked(core, port, there, back, handler)
        core.link_up(port, None)

    def accept(self, link: Link) -> LinkHandler:
        return self.server.accept(link, _hello("replica", ""))

    def take_work(self, takes: bool) -> None:
        """Drain, or do so no more."""
        if self.alive:
            self.takes_work = takes
            self.server.take_work(takes)

    def router_of(self, identity: Identity) -> int | None:
        """Whose an attempt is that is here."""
        session = self.server._owner.get(identity)
        return None if session is None else int(session.router_id.removeprefix("router-"))

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
        for connection in list(self.connections):
            connection.end("it has gone")
        self._lost_in(self._config.link_delay_s + NOBODY_LISTENS_S)

    def fall_silent(self) -> None:
        """The machine is gone: nobody says anything."""
        self._log.say("silent", self.replica_id, self.generation.number)
        self.alive = False
        self.runner.stop()
        for linked in self._links.values():
            linked.there.cut = linked.back.cut = True
        for connection in list(self.connections):
            connection.cut()
            self._loop.at(self._loop.now_s + GIVEN_UP_S, connection.end, "it was given up")
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

    def report(self) -> tuple[ReplicaReport, tuple[HeldRequest, ...] | None]:
        """What the controller hears with each tick."""
        report = self.server.report(None, self.runner.latest_load())
        return report, self.server.held(report.load)

    def _watch(self, result: StepResult) -> None:
        """A step has ended in which something was decided."""
        for preempted in result.preempted:
            record = self._clients.records[preempted.request_id]
            record.preemptions += 1
            record.recomputed_tokens += preempted.tokens_to_recompute
            self._log.say("preempted", preempted.request_id, preempted.means.value, preempted.for_request_id)
        first = self.engine.stands_behind_lesser()
        if first is None or self._overtaken is None or self._overtaken[0] != first:
            self._overtaken = None if first is None else (first, self._loop.now_s)
        elif self._loop.now_s - self._overtaken[1] > self._config.overtaken_max_s:
            self._clients.violations.append(
                f"{first[0]} waits on {self.replica_id} behind less urgent work since {self._overtaken[1]:.3f} s"
            )
            self._overtaken = None


def _hello(role: str, sender_id: str) -> Hello:
    return Hello(1, 1, role, sender_id, b"", b"", "")
