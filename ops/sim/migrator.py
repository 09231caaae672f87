"""The cluster scheduler of a policy that migrates: what it polls, and how its migrations become moves.

Owns: when instances are polled, and the form of a proposal. Imports the policy's values and the router. Invariants: a poll
changes nothing; between two replicas one request moves at a time; the router that owns a request moves it, by the code that
drains and production's own controller use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from cluster.messages import Propose
from cluster.types import Generation, ReplicaId
from ops.sim.events import VirtualLoop
from ops.sim.log import EventLog
from ops.sim.replica import Incarnation
from ops.sim.steady import instance_of
from ops.sim.values import Instance, MigratingPolicy, Migration
from router.core import RouterCore
from router.moving import Stage

GENERATION = Generation(1, "migrator")


class Migrator:
    """`policies`: one for each router, which dispatches; the first of them migrates, too."""

    def __init__(
        self,
        policies: Sequence[MigratingPolicy],
        cores: Sequence[RouterCore],
        alive: Callable[[], list[Incarnation]],
        loop: VirtualLoop,
        delay_s: float,
        log: EventLog,
    ) -> None:
        self._policies = policies
        self._cores = cores
        self._alive = alive
        self._loop = loop
        self._delay_s = delay_s
        self._log = log
        self._polled: dict[ReplicaId, Instance] = {}

    def tick(self) -> None:
        """Migrate by what the last poll said, and poll again."""
        alive = {one.replica_id: one for one in self._alive() if one.takes_work}
        known = {replica_id: self._polled[replica_id] for replica_id in alive if replica_id in self._polled}
        for policy in self._policies:
            policy.observe(known)
        for migration in self._policies[0].migrate(self._busy()):
            self._propose(migration, alive[migration.source], alive[migration.target])
        for replica_id, one in alive.items():
            asked = one.runner.read(partial(instance_of, replica_id=replica_id))
            asked.add_done_callback(partial(self._answered, replica_id))
        self._loop.at(self._loop.now_s + self._policies[0].period_s, self.tick)

    def _answered(self, replica_id: ReplicaId, answer: Future[Instance]) -> None:
        if answer.exception() is None:
            self._polled[replica_id] = answer.result()

    def _busy(self) -> set[ReplicaId]:
        under_way = [move for core in self._cores for move in core._moves if move.stage in (Stage.ASKED, Stage.GRANTED)]
        return {replica.replica_id for move in under_way for replica in (move.source, move.target)}

    def _propose(self, migration: Migration, source: Incarnation, target: Incarnation) -> None:
        request_id, attempt = migration.identity
        router = source.router_of(migration.identity)
        if router is None:
            return
        propose = Propose(
            generation=GENERATION,
            request_id=request_id,
            attempt=attempt,
            source=source.replica_id,
            source_generation=source.generation,
            target=target.replica_id,
            target_generation=target.generation,
            for_request_id=None,
            why="to the most free",
        )
        self._log.say("proposed", request_id, source.replica_id, target.replica_id, None)
        self._loop.at(self._loop.now_s + self._delay_s, self._cores[router].propose, propose)
