"""A router's link to one incarnation of one replica, kept up for as long as that incarnation may live.

Owns: connecting, reconnecting, and the word that a replica is lost. Imports `cluster` and the transport; no Ray.

Invariant: `link_up` and `link_down` alternate, and `replica_lost` comes once, last.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import msgspec

from cluster.config import TransportConfig
from cluster.messages import (
    Abort,
    Add,
    CallOff,
    Goodbye,
    Grant,
    Message,
    Move,
    Release,
    ResendFrom,
    RosterEntry,
    ToRouter,
    Welcome,
)
from cluster.ports import ReplicaListener
from cluster.types import Generation, ReplicaId, Request, RequestId
from deployments.transport import Identity, Link, NobodyListensError, RejectedError, TransportError, connect

_decode = msgspec.msgpack.Decoder(ToRouter).decode

_FIRST_PAUSE_S = 0.02


class ReplicaLink:
    """Implements `ports.ReplicaPort` over TCP.

    `sequence` numbers the adds and grants. It is the router's, not the link's: to the replica a later link is the same
    router, and its numbers go on.
    """

    def __init__(
        self,
        entry: RosterEntry,
        identity: Identity,
        listener: ReplicaListener,
        config: TransportConfig,
        sequence: Iterator[int],
    ) -> None:
        self._entry = entry
        self._identity = identity
        self._listener = listener
        self._config = config
        self._link: Link | None = None
        self._down = asyncio.Event()
        self._sequence = sequence
        self._closing = False
        self._reached = False
        self._why = ""
        self.refused = ""
        """Why the replica that answers there is not ours to use, where it or we said so."""

    @property
    def replica_id(self) -> ReplicaId:
        return self._entry.replica_id

    @property
    def generation(self) -> Generation:
        return self._entry.generation

    # --- ports.ReplicaPort ---

    def add(
        self, request: Request, attempt: int, *, shared: bool = False, trial: int = 0, trial_tokens: int = 0
    ) -> int:
        number = next(self._sequence)
        self._send(Add(request, attempt, number, shared, trial, trial_tokens))
        return number

    def abort(self, request_id: RequestId, attempt: int) -> None:
        self._send(Abort(request_id=request_id, attempt=attempt))

    def resend_from(self, request_id: RequestId, attempt: int, index: int) -> None:
        self._send(ResendFrom(request_id=request_id, attempt=attempt, index=index))

    @property
    def entry(self) -> RosterEntry:
        return self._entry

    def move(self, request_id: RequestId, attempt: int, number: int, target: RosterEntry) -> None:
        self._send(Move(request_id, attempt, number, target))

    def call_off(self, request_id: RequestId, attempt: int) -> None:
        self._send(CallOff(request_id, attempt))

    def grant(self, request_id: RequestId, attempt: int, index: int) -> int:
        number = next(self._sequence)
        self._send(Grant(request_id, attempt, index, number))
        return number

    def release(self, request_id: RequestId, attempt: int) -> None:
        self._send(Release(request_id, attempt))

    def _send(self, message: Message) -> None:
        if self._link is not None:
            self._link.send(message)

    # --- LinkHandler ---

    def message(self, message: ToRouter) -> None:
        self._listener.frame(self.replica_id, self.generation, message)

    def writable(self) -> None:
        """A router sends little and never holds back."""

    def closed(self, reason: str) -> None:
        self._link = None
        self._why = reason
        self._down.set()
        if not self._closing:
            self._listener.link_down(self.replica_id, self.generation)

    # --- life ---

    async def run(self) -> None:
        """Keep the link until the replica is lost or `close` is called."""
        try:
            while not self._closing:
                await self._reach()
                await self._down.wait()
        except TransportError as error:
            if isinstance(error, RejectedError):
                self.refused = str(error)
            self._why = f"{self._why}; {error}" if self._why else str(error)
        if self._reached and not self._closing:
            self._listener.replica_lost(self.replica_id, self.generation, self._why)

    async def _reach(self) -> None:
        """Connect, trying again for `reconnect_for_s`. Raises TransportError when this incarnation is not to be had:
        nobody listens there any more, somebody else does, or time is up."""
        deadline = asyncio.get_running_loop().time() + self._config.reconnect_for_s
        pause_s = _FIRST_PAUSE_S
        while True:
            self._down.clear()
            try:
                await connect(self._entry.host, self._entry.port, self._identity, _decode, self._greeted, self._config)
            except (NobodyListensError, RejectedError):
                raise
            except TransportError:
                if asyncio.get_running_loop().time() + pause_s > deadline:
                    raise
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, self._config.backoff_max_s)
            else:
                return

    def _greeted(self, link: Link, welcome: Welcome) -> ReplicaLink:
        if (welcome.sender_id, welcome.generation) != (self.replica_id, self.generation):
            raise RejectedError(f"{welcome.sender_id} of generation {welcome.generation.number} answers there now")
        self._link = link
        # Before the first frame, which may already be in the same read.
        if not self._listener.link_up(self, None):
            self._link = None
            raise RejectedError(f"generation {self.generation.number} is older than the one in use")
        self._reached = True
        return self

    def close(self) -> None:
        """Leave: the replica ends this router's work at once."""
        self._closing = True
        self._send(Goodbye())
        if self._link is not None:
            self._link.close("the router leaves")
        self._down.set()
