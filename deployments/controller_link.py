"""The link of a router or a replica to the controller, made again whenever it breaks.

Owns: finding the controller (a callable: Ray Serve's answer in production), connecting, and refusing an older one.
Imports `cluster` and the transport; no Ray.

Invariant: the controller's absence or death changes nothing for whoever holds this link, except that it is tried again.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable

import msgspec

from cluster.config import TransportConfig
from cluster.messages import FromController, Message, Welcome
from cluster.types import Generation
from deployments.transport import Identity, Link, RejectedError, TransportError, connect

LOG = logging.getLogger("forebay.controller_link")

_decode = msgspec.msgpack.Decoder(FromController).decode

_FIRST_PAUSE_S = 0.05

Find = Callable[[], Awaitable[tuple[str, int]]]
"""Answers where the controller listens. Raises TimeoutError where nobody knows just now."""


class ControllerLink:
    """`find` returns host and port; `identity` is asked anew for each hello; `on_up` is called before any message."""

    def __init__(
        self,
        find: Find,
        identity: Callable[[Generation | None], Identity],
        on_up: Callable[[], None],
        on_message: Callable[[FromController], None],
        config: TransportConfig,
    ) -> None:
        self._find = find
        self._identity = identity
        self._on_up = on_up
        self._on_message = on_message
        self._config = config
        self._link: Link | None = None
        self._down = asyncio.Event()
        self._seen: Generation | None = None

    def send(self, message: Message) -> bool:
        """False where there is no controller just now, or it reads too slowly to be told more."""
        if self._link is None or self._link.congested:
            return False
        self._link.send(message)
        return True

    # --- LinkHandler ---

    def message(self, message: FromController) -> None:
        self._on_message(message)

    def writable(self) -> None:
        """Reports are dropped while the controller is slow, not held back."""

    def closed(self, reason: str) -> None:
        self._link = None
        self._down.set()
        LOG.info("controller link ended: %s", reason)

    # --- life ---

    async def run(self) -> None:
        """Until cancelled."""
        pause_s = _FIRST_PAUSE_S
        while True:
            self._down.clear()
            try:
                host, port = await self._find()
                identity = self._identity(self._seen)
                await connect(host, port, identity, _decode, self._greeted, self._config)
            except (TransportError, TimeoutError) as error:
                LOG.info("no controller yet: %s", error)
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, self._config.backoff_max_s)
                continue
            pause_s = _FIRST_PAUSE_S
            await self._down.wait()

    def _greeted(self, link: Link, welcome: Welcome) -> ControllerLink:
        generation = welcome.generation
        if self._seen is not None and generation.number < self._seen.number:
            raise RejectedError(f"controller generation {generation.number} is older than {self._seen.number}")
        self._seen = generation
        self._link = link
        self._on_up()
        return self
