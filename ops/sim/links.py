"""The links of a simulated cluster: messages that arrive later, in order, or not at all.

Owns: one direction of a link, the port of a router that is linked so, and the links between replicas over which requests
move. Imports the transport, whose places they take. Invariant: what was sent on a link arrives in order, or with all that
follows it not at all.

Keys and values that move take their time: each replica sends, and takes, one message of them after another, at the speed of
its network (`NETWORK`); all other messages are small, and pass them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cluster.config import TransportConfig
from cluster.messages import Message, MoveBegin, MoveBlocks, MoveStage, MoveState, RosterEntry, StepFrame
from cluster.types import Generation, ReplicaId, Request, RequestId
from deployments.peer_link import PeerLink, PeerLinks
from deployments.replica_link import ReplicaLink
from deployments.transport import Identity, Link, LinkHandler, NobodyListensError, TransportError
from ops.sim.events import VirtualLoop
from ops.sim.faults import MovePoint
from ops.sim.values import SimConfig

TRANSPORT = TransportConfig()
HANDSHAKE_DELAYS = 4
"""Messages one after the other, from the first of a connection to the welcome."""


class MoveWatch:
    """How far each move has come, and what is to happen to the next that comes so far."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._between: dict[RequestId, tuple[ReplicaId, ReplicaId]] = {}
        """Source and target of what was moved last."""
        self._armed: dict[MovePoint, list[Callable[[RequestId, ReplicaId, ReplicaId], object]]] = {}

    def arm(self, point: MovePoint, happens: Callable[[RequestId, ReplicaId, ReplicaId], object]) -> None:
        self._armed.setdefault(point, []).append(happens)

    def asked(self, request_id: RequestId, source: ReplicaId, target: ReplicaId) -> None:
        self._between[request_id] = (source, target)
        self.reached(MovePoint.ASKED, request_id)

    def reached(self, point: MovePoint, request_id: RequestId) -> None:
        if (armed := self._armed.get(point)) and (between := self._between.get(request_id)) is not None:
            self._loop.at(self._loop.now_s, armed.pop(0), request_id, *between)


@dataclass(slots=True)
class Weather:
    """What becomes of the frames of one replica just now."""

    rng: random.Random
    watch: MoveWatch
    lost_share: float = 0.0
    doubled_share: float = 0.0
    delay_s: float = 0.0

    def copies(self, frame: StepFrame) -> int:
        """How often it arrives."""
        if not (self.lost_share or self.doubled_share):
            return 1
        told = frame.refusals or frame.preempted
        bare = not (told or frame.deltas or frame.prefixes or frame.moves)
        return self._copies(may_be_lost=bare, may_be_doubled=not told)

    def copies_of_status(self) -> int:
        """Of what it tells the controller."""
        return self._copies(may_be_lost=True, may_be_doubled=True)

    def _copies(self, *, may_be_lost: bool, may_be_doubled: bool) -> int:
        if self.lost_share and may_be_lost:
            return int(self.rng.random() >= self.lost_share)
        if self.doubled_share and may_be_doubled:
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
            for notice in message.moves:
                if (point := _POINTS.get(notice.stage)) is not None:
                    self._weather.watch.reached(point, notice.request_id)
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


_POINTS = {MoveStage.FROZEN: MovePoint.FROZEN, MoveStage.TAKEN: MovePoint.TAKEN}


def _nothing(said: object) -> None:
    del said


class Watcher(Protocol):
    def sent(self, replica_id: ReplicaId, request: Request, attempt: int) -> None:
        """A router has sent a request there."""
        ...

    def granted(self, replica_id: ReplicaId, request_id: RequestId, attempt: int) -> None:
        """A router goes on with a request there that has moved."""
        ...


class SimPort(ReplicaLink):
    """A router's link to one incarnation, which is made and broken by the world."""

    def __init__(
        self, entry: RosterEntry, router_id: str, listener: Any, watcher: Watcher, moves: MoveWatch, sequence: Any
    ) -> None:
        super().__init__(entry, Identity("router", router_id, b""), listener, TRANSPORT, sequence)
        self._watcher = watcher
        self._moves = moves

    def up(self, link: SimLink) -> None:
        self._link = link

    def down(self) -> None:
        self._link = None

    def add(
        self, request: Request, attempt: int, *, shared: bool = False, trial: int = 0, trial_tokens: int = 0
    ) -> int:
        self._watcher.sent(self.replica_id, request, attempt)
        return super().add(request, attempt, shared=shared, trial=trial, trial_tokens=trial_tokens)

    def move(self, request_id: RequestId, attempt: int, number: int, target: RosterEntry) -> None:
        super().move(request_id, attempt, number, target)
        self._moves.asked(request_id, self.replica_id, target.replica_id)

    def grant(self, request_id: RequestId, attempt: int, index: int) -> int:
        self._watcher.granted(self.replica_id, request_id, attempt)
        number = super().grant(request_id, attempt, index)
        self._moves.reached(MovePoint.GRANTED, request_id)
        return number

    def release(self, request_id: RequestId, attempt: int) -> None:
        super().release(request_id, attempt)
        self._moves.reached(MovePoint.RELEASED, request_id)


# --- between replicas ---


@dataclass(slots=True)
class Wire:
    """A replica's part of the network, for keys and values."""

    s_per_block: float
    sends_until_s: float = 0.0
    takes_until_s: float = 0.0


class PeerConnection:
    """A connection between two replicas; each side's end is told once that it has ended."""

    def __init__(self, loop: VirtualLoop, delay_s: float, sides: Sequence[Peer] = ()) -> None:
        self._loop = loop
        self._delay_s = delay_s
        self._sides = sides
        for side in sides:
            side.connections[self] = None
        self._handlers: list[LinkHandler] = []
        self._directions: list[SimLink] = []

    def join(self, direction: SimLink, handler: LinkHandler) -> None:
        """`handler` takes what comes in the one direction, and `direction` is the other one."""
        self._directions.append(direction)
        self._handlers.append(handler)

    def cut(self) -> None:
        """Without a word."""
        for direction in self._directions:
            direction.cut = True

    def end(self, reason: str) -> None:
        self.cut()
        for side in self._sides:
            side.connections.pop(self, None)
        handlers, self._handlers = self._handlers, []
        for handler in handlers:
            self._loop.at(self._loop.now_s + self._delay_s, handler.closed, reason)


class PeerDirection(SimLink):
    """One direction of it."""

    def __init__(
        self,
        loop: VirtualLoop,
        delay_s: float,
        deliver: Callable[[Any], object],
        connection: PeerConnection,
        wires: tuple[Wire, Wire],
        watch: MoveWatch,
    ) -> None:
        """`wires`: of the replica that sends, and of the one that takes."""
        super().__init__(loop, delay_s, deliver)
        self._connection = connection
        self._wires = wires
        self._watch = watch

    def send(self, message: Message) -> None:
        if self.cut:
            return
        sent_s = self._loop.now_s
        if isinstance(message, MoveBlocks):
            sender, taker = self._wires
            sent_s = max(sent_s, sender.sends_until_s, taker.takes_until_s)
            sent_s += message.data.nbytes * max(sender.s_per_block, taker.s_per_block)
            sender.sends_until_s = taker.takes_until_s = sent_s
        self._due_s = max(self._due_s, sent_s + self._delay_s)
        self._loop.at(self._due_s, self._arrive, message)

    def abort(self, reason: str) -> None:
        self._connection.end(reason)

    def _arrive(self, message: Message) -> None:
        super()._arrive(message)
        match message:
            case MoveBegin(request_id=request_id):
                self._watch.reached(MovePoint.BEGUN, request_id)
            case MoveBlocks(request_id=request_id):
                self._watch.reached(MovePoint.COPIED, request_id)
            case MoveState(state=state):
                self._watch.reached(MovePoint.STATED, state.request.request_id)


class Peer(Protocol):
    """A replica as another one reaches it."""

    alive: bool
    connections: dict[PeerConnection, None]
    wire: Wire

    def accept(self, link: Link) -> LinkHandler:
        """What takes the messages of another replica."""
        ...


class SimPeers(PeerLinks):
    """A replica's links to others."""

    def __init__(
        self,
        own: Peer,
        config: TransportConfig,
        loop: VirtualLoop,
        delay_s: float,
        watch: MoveWatch,
        find: Callable[[RosterEntry], Peer | None],
    ) -> None:
        """`find`: None where nobody listens; one that is not alive says nothing."""
        super().__init__(Identity("replica", "", b""), config)
        self._own = own
        self._virtual = loop
        self._delay_s = delay_s
        self._watch = watch
        self._find = find

    async def _connect(self, entry: RosterEntry) -> PeerLink:
        loop, delay_s, own = self._virtual, self._delay_s, self._own
        await asyncio.sleep(HANDSHAKE_DELAYS * delay_s)
        target = self._find(entry)
        if target is None:
            raise NobodyListensError(f"nobody listens at {entry.replica_id}")
        if not target.alive:
            await asyncio.sleep(TRANSPORT.handshake_timeout_s)
            raise TransportError(f"no welcome from {entry.replica_id}")
        connection = PeerConnection(loop, delay_s, (own, target))

        def direction(deliver: Callable[[Any], object], sender: Peer, taker: Peer) -> PeerDirection:
            return PeerDirection(loop, delay_s, deliver, connection, (sender.wire, taker.wire), self._watch)

        def told(message: Message) -> None:
            handler.message(message)

        there = direction(told, own, target)
        made = PeerLink(there, TRANSPORT.max_frame_bytes, lambda: self._ended(entry, made))
        back = direction(made.message, target, own)
        handler = target.accept(back)
        connection.join(there, made)
        connection.join(back, handler)
        self._made[entry] = made
        return made


def entry_of(number: int, generation: Generation, config: SimConfig) -> RosterEntry:
    node = number // config.replicas_per_node
    return RosterEntry(ReplicaId(f"replica-{number}"), generation, f"node-{node}", number, config.model)
