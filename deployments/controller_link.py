"""The links of a router or a replica to the controllers, each made again whenever it breaks.

Owns: finding a controller (a callable: Ray Serve's answer in production), connecting, which of them is listened to and
which is told what; cluster/control/leader.py decides who leads. Imports `cluster` and the transport; no Ray.

Invariants: the absence or death of any controller changes nothing for whoever holds these links, except that it is tried
again; nothing is done that comes from a controller with a successor, nor from one that does not lead; all of them hear
the same, so that each can lead at once.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from cluster.config import TransportConfig
from cluster.control.leader import SILENT_S, Follower
from cluster.messages import Follows, FromController, Leads, Message, Welcome
from cluster.ports import Clock
from cluster.types import Generation
from deployments.transport import Identity, Link, TransportError, connect

LOG = logging.getLogger("forebay.controller_link")

_decode = msgspec.msgpack.Decoder(FromController).decode

_FIRST_PAUSE_S = 0.05
_LISTEN_EVERY_S = 0.1
_SAY_AGAIN_S = SILENT_S / 2
"""That nobody is heard is said so often."""
_LATE_S = 0.5
"""Whoever listens so much later than it meant to has stood still: what has come meanwhile is yet to be read."""

Find = Callable[[], Awaitable[tuple[str, int]]]
"""Answers where a controller listens. Raises TimeoutError where nobody knows just now."""


class ControllerLinks:
    """To one controller, or to one that leads and one that stands by."""

    def __init__(
        self,
        finds: Sequence[Find],
        identity: Callable[[], Identity],
        first_words: Callable[[], tuple[Message, ...]],
        on_message: Callable[[FromController], None],
        clock: Clock,
        config: TransportConfig,
    ) -> None:
        """
        Args:
            finds: One for each controller, the same ones in the same order for all routers and replicas.
            identity: Asked anew for each hello.
            first_words: Asked anew for each link, on which they are said before anything else.
            on_message: Hears the controller that leads.
        """
        self._identity = identity
        self._first_words = first_words
        self._on_message = on_message
        self._clock = clock
        self._config = config
        self._follower = Follower()
        self._links = [_ControllerLink(self, place, find) for place, find in enumerate(finds)]
        self._said = Follows(None, heard=False)
        self._said_s = -math.inf
        self.refused = 0
        """Messages of controllers that have a successor, which were not heeded."""
        self._refused_beside: Generation | None = None

    @property
    def generation(self) -> int:
        """Number of the latest controller that was met; 0 before the first."""
        newest = self._follower.newest
        return 0 if newest is None else newest.number

    @property
    def linked(self) -> int:
        """Controllers that there is a link to."""
        return sum(link.link is not None for link in self._links)

    @property
    def leader_linked(self) -> bool:
        return self._follower.leader is not None

    def tell(self, message: Message) -> bool:
        """All controllers. False where there is none just now that leads, or it reads too slowly to be told more."""
        told = [link.send(message) for link in self._links]
        leader = self._follower.leader
        return leader is not None and told[leader]

    def ask(self, message: Message) -> bool:
        """The one that leads. False as `tell` says."""
        leader = self._follower.leader
        return leader is not None and self._links[leader].send(message)

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            for link in self._links:
                group.create_task(link.run(), name="controller link")
            group.create_task(self._listen(), name="listen to the controller")

    async def _listen(self) -> None:
        """Notice that the one that leads is silent."""
        while True:
            asleep_s = self._clock.monotonic()
            await asyncio.sleep(_LISTEN_EVERY_S)
            now_s = self._clock.monotonic()
            if now_s - asleep_s > _LATE_S:
                self._follower.stood_still(now_s)
            self._say()

    def _say(self) -> None:
        now_s = self._clock.monotonic()
        word = self._follower.word(now_s)
        # Who has no generation yet has nothing else to say, and a word counts only while its sender is heard.
        again = not word.heard and now_s - self._said_s >= _SAY_AGAIN_S
        if word != self._said or again:
            self._said, self._said_s = word, now_s
            for link in self._links:
                link.say(word)

    # --- of each link ---

    def connect(self, host: str, port: int, made: Callable[[Link, Welcome], _ControllerLink]) -> Awaitable[Link]:
        return connect(host, port, self._identity(), _decode, made, self._config)

    @property
    def pause_max_s(self) -> float:
        return self._config.backoff_max_s

    def up(self, link: _ControllerLink) -> None:
        for message in (self._said, *self._first_words()):
            link.say(message)

    def heard(self, place: int, message: FromController) -> None:
        if isinstance(message, Leads):
            self._follower.met(place, message.generation, self._clock.monotonic())
            self._say()
        elif self._follower.leader == place:
            self._on_message(message)
        else:
            self.refused += 1
            if self._refused_beside != self._follower.newest:  # said once
                self._refused_beside = self._follower.newest
                LOG.warning("a controller that has a successor is not heeded: %s", type(message).__name__)

    def down(self, place: int, reason: str) -> None:
        LOG.info("controller link ended: %s", reason)
        self._follower.lost(place)
        self._say()


class _ControllerLink:
    """LinkHandler of the link to one controller."""

    def __init__(self, links: ControllerLinks, place: int, find: Find) -> None:
        self._links = links
        self._place = place
        self._find = find
        self._down = asyncio.Event()
        self.link: Link | None = None

    def send(self, message: Message) -> bool:
        if self.link is None or self.link.congested:
            return False
        self.link.send(message)
        return True

    def say(self, message: Message) -> None:
        """However slowly it reads: small, and rarely said."""
        if self.link is not None:
            self.link.send(message)

    # --- LinkHandler ---

    def message(self, message: FromController) -> None:
        self._links.heard(self._place, message)

    def writable(self) -> None:
        """Reports are dropped while the controller is slow, not held back."""

    def closed(self, reason: str) -> None:
        self.link = None
        self._down.set()
        self._links.down(self._place, reason)

    async def run(self) -> None:
        """Until cancelled."""
        pause_s = _FIRST_PAUSE_S
        while True:
            self._down.clear()
            try:
                host, port = await self._find()
                await self._links.connect(host, port, self._made)
            except (TransportError, TimeoutError) as error:
                LOG.info("no controller yet: %s", error)
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, self._links.pause_max_s)
                continue
            pause_s = _FIRST_PAUSE_S
            await self._down.wait()

    def _made(self, link: Link, welcome: Welcome) -> _ControllerLink:
        del welcome  # whether it leads it says itself
        self.link = link
        self._links.up(self)
        return self
