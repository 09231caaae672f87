"""The links of a simulated cluster: messages that arrive later, in order, or not at all.

Owns: one direction of a link, and the port of a router that is linked so. Imports the transport, whose places they take.
Invariant: what was sent on a link arrives in order, or with all that follows it not at all.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from cluster.config import TransportConfig
from cluster.messages import Message, RosterEntry, StepFrame
from cluster.types import Generation, ReplicaId, Request
from deployments.replica_link import ReplicaLink
from deployments.transport import Identity, Link
from ops.sim.events import VirtualLoop

TRANSPORT = TransportConfig()


@dataclass(slots=True)
class Weather:
    """What becomes of the frames of one replica just now."""

    rng: random.Random
    lost_share: float = 0.0
    doubled_share: float = 0.0
    delay_s: float = 0.0

    def copies(self, frame: StepFrame) -> int:
        """How often it arrives."""
        told = frame.refusals or frame.preempted
        if self.lost_share and not (told or frame.deltas or frame.prefixes or frame.moves):
            return int(self.rng.random() >= self.lost_share)
        if self.doubled_share and not told:
            return 1 + (self.rng.random() < self.doubled_share)
        return 1


class SimLink(Link):
    """One direction of a link, which is never congested: whoever takes messages here takes them at once."""

    def __init__(
        self,
        loop: VirtualLoop,
        delay_s: float,
        deliver: Callable[[Any], object],
        weather: Weather | None = None,
    ) -> None:
        super().__init__(_nothing, _nothing)
        self._loop = loop
        self._delay_s = delay_s
        self._deliver = deliver
        self._weather = weather
        self._due_s = 0.0
        """When what was sent last arrives."""
        self.cut = False

    @property
    def congested(self) -> bool:
        return self.cut

    def send(self, message: Message) -> None:
        if self.cut:
            return
        copies, delay_s = 1, self._delay_s
        if self._weather is not None and isinstance(message, StepFrame):
            copies = self._weather.copies(message)
            delay_s += self._weather.delay_s
        due_s = self._loop.now_s + delay_s
        self._due_s = due_s = due_s if due_s > self._due_s else self._due_s
        for _ in range(copies):
            self._loop.at(due_s, self._arrive, message)

    def close(self, reason: str) -> None:
        self.abort(reason)

    def abort(self, reason: str) -> None:
        """What is under way is lost."""
        del reason
        self.cut = True

    def _arrive(self, message: Message) -> None:
        if not self.cut:
            self._deliver(message)


def _nothing(said: object) -> None:
    del said


class Watcher(Protocol):
    def sent(self, replica_id: ReplicaId, request: Request, attempt: int) -> None:
        """A router has sent a request there."""
        ...


class SimPort(ReplicaLink):
    """A router's link to one incarnation, which is made and broken by the world."""

    def __init__(self, entry: RosterEntry, router_id: str, listener: Any, watcher: Watcher, sequence: Any) -> None:
        super().__init__(entry, Identity("router", router_id, b""), listener, TRANSPORT, sequence)
        self._watcher = watcher

    def up(self, link: SimLink) -> None:
        self._link = link

    def down(self) -> None:
        self._link = None

    def add(
        self, request: Request, attempt: int, *, shared: bool = False, trial: int = 0, trial_tokens: int = 0
    ) -> int:
        self._watcher.sent(self.replica_id, request, attempt)
        return super().add(request, attempt, shared=shared, trial=trial, trial_tokens=trial_tokens)


def entry_of(replica_id: ReplicaId, generation: Generation, model: str) -> RosterEntry:
    return RosterEntry(replica_id, generation, "sim", 0, model)
