"""A replica's links to the replicas that its work moves to.

Owns: making them when they are needed, sharing each among the moves between two replicas, and ending those that nothing
uses. Imports `cluster` and the transport. Invariant: whatever moves over a link is told each answer to it, and once that
the link is broken.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import msgspec

from cluster.config import TransportConfig
from cluster.messages import FromPeer, Message, RosterEntry, Welcome
from deployments.outbox import AttemptKey
from deployments.transport import Identity, Link, RejectedError, TransportError, connect

_decode = msgspec.msgpack.Decoder(FromPeer).decode

_KEPT_S = 30.0
"""A link that nothing moves over."""


class OnPeer(Protocol):
    """What moves over a link."""

    def answered(self, refusal: str) -> None: ...

    def broken(self, reason: str) -> None: ...


class PeerLink:
    """One of them, open or ended."""

    def __init__(self, link: Link, max_frame_bytes: int, on_ended: Callable[[], None]) -> None:
        self.max_frame_bytes = max_frame_bytes
        """That the other side takes."""
        self._link = link
        self._on_ended = on_ended
        self._users: dict[AttemptKey, OnPeer] = {}
        self._unheard: dict[AttemptKey, int] = {}
        """Answers to come that are for nobody any more."""
        self._loop = asyncio.get_running_loop()
        self._open = True
        self._idle = self._loop.call_later(_KEPT_S, self._end_idle)

    @property
    def congested(self) -> bool:
        return self._link.congested

    def send(self, message: Message) -> None:
        self._link.send(message)

    def join(self, key: AttemptKey, user: OnPeer) -> None:
        """`user` hears what is said of the attempt `key` there. Raises TransportError where the link has ended, or has
        a user of that name."""
        if not self._open:
            raise TransportError("the link has ended")
        if key in self._users:
            raise TransportError("that attempt is on its way there already")
        self._idle.cancel()
        self._users[key] = user

    def leave(self, key: AttemptKey, unanswered: int) -> None:
        """`unanswered`: so many answers are still to come, and must not be taken for those of its next move."""
        self._users.pop(key, None)
        if unanswered:
            self._unheard[key] = self._unheard.get(key, 0) + unanswered
        if self._open and not self._users:
            self._idle = self._loop.call_later(_KEPT_S, self._end_idle)

    def _end_idle(self) -> None:
        # From now on, not once it has closed: what is to move meanwhile makes another.
        self._open = False
        self._on_ended()
        self._link.close("nothing moves over it")

    # --- LinkHandler ---

    def message(self, message: FromPeer) -> None:
        key = (message.request_id, message.attempt)
        if unheard := self._unheard.pop(key, 0):
            if unheard > 1:
                self._unheard[key] = unheard - 1
        elif (user := self._users.get(key)) is not None:
            user.answered(message.refusal)

    def writable(self) -> None:
        """What is sent is held back by its answers."""

    def closed(self, reason: str) -> None:
        self._open = False
        self._idle.cancel()
        self._on_ended()
        users, self._users = self._users, {}
        for user in users.values():
            user.broken(reason)

    def close(self, reason: str) -> None:
        self._link.abort(reason)


class PeerLinks:
    """At most one to each replica."""

    def __init__(self, identity: Identity, config: TransportConfig) -> None:
        self._identity = identity
        self._config = config
        self._made: dict[RosterEntry, PeerLink] = {}
        self._making: dict[RosterEntry, asyncio.Task[PeerLink]] = {}

    async def reach(self, entry: RosterEntry) -> PeerLink:
        """Raises TransportError where that incarnation of the replica cannot be reached, or does not let us in."""
        if (made := self._made.get(entry)) is not None:
            return made
        making = self._making.get(entry)
        if making is None:
            making = self._making[entry] = asyncio.create_task(self._connect(entry), name=f"peer {entry.replica_id}")
            making.add_done_callback(lambda task: self._is_made(entry, task))
        return await asyncio.shield(making)

    def _is_made(self, entry: RosterEntry, task: asyncio.Task[PeerLink]) -> None:
        del self._making[entry]
        if not task.cancelled():
            task.exception()  # those that wait for it are told; there may be none

    async def _connect(self, entry: RosterEntry) -> PeerLink:
        def greeted(link: Link, welcome: Welcome) -> PeerLink:
            if (welcome.sender_id, welcome.generation) != (entry.replica_id, entry.generation):
                raise RejectedError(f"{welcome.sender_id} of generation {welcome.generation.number} answers there now")
            made = PeerLink(link, welcome.max_frame_bytes, lambda: self._ended(entry, made))
            self._made[entry] = made
            return made

        await connect(entry.host, entry.port, self._identity, _decode, greeted, self._config)
        if (made := self._made.get(entry)) is None:
            raise TransportError("the link has ended")
        return made

    def _ended(self, entry: RosterEntry, link: PeerLink) -> None:
        if self._made.get(entry) is link:
            del self._made[entry]

    async def close(self) -> None:
        making = list(self._making.values())
        for task in making:
            task.cancel()
        await asyncio.gather(*making, return_exceptions=True)
        for link in list(self._made.values()):
            link.close("the replica leaves")
