"""Who holds the Lease: the controller that leads, as soon as the API server lets it write so.

Owns: when the Lease is read and written, and whether it is held; cluster/control/lease.py decides what is done with it, and
says what it is for. Invariants: it is held only for as long as the last write says, counted from before that write was
begun; a write names the version that was read, so that two do not overwrite each other; a call that comes to nothing is made
again after a pause that doubles, with jitter, and never sooner.
"""

from __future__ import annotations

import asyncio
import logging
import random

from cluster.config import KubernetesConfig
from cluster.control.lease import LeaseSeen, Step, next_step
from cluster.ports import Clock
from cluster.types import Generation
from deployments.kube.api import KubeApi, KubeError
from deployments.kube.calls import CONFLICT, Calls, pause_after
from deployments.kube.objects import given_back, holder_of, lease_body, seen_lease

_log = logging.getLogger("forebay.kubernetes")


class LeaseWriter:
    """Of one controller. Single writer."""

    def __init__(self, config: KubernetesConfig, calls: Calls, who: str, clock: Clock, rng: random.Random) -> None:
        self._config = config
        self._calls = calls
        self._who = who
        self._clock = clock
        self._rng = rng
        self._seen: LeaseSeen | None = None
        self._version = ""
        """Of the Lease, as it was read last."""
        self._own: tuple[Generation, str] | None = None
        """As which this controller leads, and what it calls itself then."""
        self._held_until_s = 0.0
        self._due_s = 0.0
        self._failures = 0
        self.trouble = ""

    @property
    def holds(self) -> bool:
        """This controller leads, has written so, and that has not run out."""
        return self._own is not None and self._clock.monotonic() < self._held_until_s

    @property
    def holder(self) -> str:
        """As the Lease was read last, or written since."""
        if self._own is not None and self.holds:
            return self._own[1]
        return "" if self._seen is None else self._seen.holder

    async def turn(self, leads: Generation | None) -> None:
        """Look at the Lease and do what is due, if it is."""
        now_s = self._clock.monotonic()
        if (None if self._own is None else self._own[0]) != leads:
            self._own = None if leads is None else (leads, holder_of(self._who, leads))
            self._held_until_s = self._due_s = 0.0
            self.trouble = ""
        if self._own is None or now_s < self._due_s:
            return
        try:
            step = await self._renew(*self._own, now_s)
        except KubeError as error:
            pause_s = pause_after(self._failures, self._config, self._rng)
            self._failures += 1
            self.trouble = str(error)
            self._due_s = self._clock.monotonic() + pause_s
            if error.status != CONFLICT:
                _log.warning("the Lease is not written, tried again in %.1f s: %s", pause_s, error)
            return
        self._failures, self.trouble = 0, ""
        third_s = self._config.lease_s / 3
        self._due_s = now_s + third_s * self._rng.uniform(0.8, 1.0)
        if step is Step.LEAVE:
            self._held_until_s = 0.0
        else:
            self._held_until_s = now_s + self._config.lease_s

    async def _renew(self, leads: Generation, holder: str, now_s: float) -> Step:
        lease = await self._calls.make(KubeApi.read_lease)
        if lease is None:
            self._seen, self._version = None, ""
        else:
            self._seen = seen_lease(lease, self._seen, self._version, now_s)
            self._version = str(lease["metadata"].get("resourceVersion"))
        step = next_step(self._seen, holder, leads, now_s)
        if step is Step.LEAVE:
            assert self._seen is not None
            _log.info("the Lease stays with %s, who leads as a later one: nothing is written", self._seen.holder)
        else:
            body = lease_body(self._config, lease, holder, leads, self._clock.unix())
            await self._calls.make(lambda api: api.write_lease(body))
        return step

    async def give_back(self) -> None:
        """Give the Lease back where it is held, if that can be done at once; the next that leads need not wait for it to run
        out."""
        if self.holds and self._own is not None:
            holder = self._own[1]
            try:
                async with asyncio.timeout(self._config.call_timeout_s):
                    await self._calls.make(lambda api: self._empty(api, holder))
            except (KubeError, TimeoutError) as error:
                _log.info("the Lease is not given back and runs out: %s", error)
        self._own = None

    def _empty(self, api: KubeApi, holder: str) -> None:
        lease = api.read_lease()
        if lease is not None and (lease.get("spec") or {}).get("holderIdentity") == holder:
            api.write_lease(given_back(lease, self._clock.unix()))
