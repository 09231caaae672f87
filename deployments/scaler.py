"""How many replicas of a model there are follows what is asked of it: what cluster/control/scale.py decides is done here.

Owns: the loop, and the two calls of Serve that it takes: how a deployment stands, and how many replicas it is to keep
(Ray's dashboard answers both). Imports the decisions and the controller's server; no Ray.

Invariants: nothing is decided before this controller knows what there is: each replica that runs for Serve reports, or
has had SETTLE_S to. Each pass decides anew from what there is then, so no call is repeated because it failed: the next
pass makes the one that is right by then, after a pause that doubles with each failure up to PAUSE_MAX_S. One call at a
time, none longer than CALL_TIMEOUT_S.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import random
import urllib.error
import urllib.request
from collections import deque
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from cluster.config import Config, ScaleConfig
from cluster.control.demand import Meter, ModelLoad
from cluster.control.scale import (
    Deployed,
    Retire,
    ScaleState,
    SetTarget,
    Step,
    TakeWorkAgain,
    TellToLeave,
    decide,
    next_step,
    set_aside,
)
from cluster.messages import DrainOrder, Leave, ScaleDecision, ScaleStatus
from cluster.ports import Clock
from cluster.types import ReplicaId
from deployments.settings import ServeAccess, UsageError

_log = logging.getLogger("forebay.scaler")

PERIOD_S = 0.25
"""A request that no replica is there for waits so long, at most, before one is started."""
LOOK_S = 10.0
"""Serve is asked so often how it stands while nothing is to be done."""
LOOK_SOON_S = 1.0
"""And so often while something is: what a step does is in the reports by then."""
SETTLE_S = 10.0
CALL_TIMEOUT_S = 5.0
CHANGES_TOLD = 8
TROUBLE_TOLD = 300
"""Characters."""
PAUSE_MAX_S = 30.0


class ServeCallError(Exception):
    """Serve could not be asked or told. The message says what was tried and what came of it."""


class Scaled(Config):
    """A model whose replicas come and go."""

    model: str
    deployment: str
    scale: ScaleConfig


class ServePort(Protocol):
    """What Serve is asked and told of one deployment. Both raise ServeCallError."""

    async def deployed(self, deployment: str) -> Deployed:
        """How it stands."""
        ...

    async def keep(self, deployment: str, replicas: int) -> None:
        """Have so many."""
        ...


class Orders(Protocol):
    """Who tells replicas, and whether it is ours to decide: the controller's server."""

    @property
    def leads(self) -> bool: ...

    def vouched_by(self, running: frozenset[ReplicaId]) -> bool:
        """Serve does what the last one says: it is told nothing while another may lead."""
        ...

    def tell_replica(self, replica_id: ReplicaId, message: DrainOrder | Leave) -> None: ...

    def scaled(self, status: ScaleStatus) -> None:
        """What was decided last, and why: for all to see."""
        ...


class ServeDashboard:
    """Serve through Ray's dashboard: `external_scaler_enabled` must be set for the application."""

    def __init__(self, access: ServeAccess, application: str) -> None:
        self._url = access.url.rstrip("/")
        self._token_path = access.token_path
        self._application = application

    async def deployed(self, deployment: str) -> Deployed:
        answer = await asyncio.to_thread(self._call, "GET", "/api/serve/applications/", None)
        try:
            told = answer["applications"][self._application]["deployments"][deployment]
            states = {ReplicaId(r["replica_id"]): r["state"] for r in told["replicas"]}
            target = int(told["target_num_replicas"])
        except (KeyError, TypeError, ValueError) as error:
            raise ServeCallError(f"Serve says nothing of {deployment} that can be read: {error!r}") from error
        running = frozenset(replica_id for replica_id, state in states.items() if state == "RUNNING")
        return Deployed(target, running, sum(state == "STARTING" for state in states.values()))

    async def keep(self, deployment: str, replicas: int) -> None:
        path = f"/api/v1/applications/{quote(self._application)}/deployments/{quote(deployment)}/scale"
        await asyncio.to_thread(self._call, "POST", path, {"target_num_replicas": replicas})

    def _call(self, method: str, path: str, body: dict[str, int] | None) -> Any:
        """In a thread."""
        what = f"{method} {self._url}{path}"
        try:
            request = urllib.request.Request(  # noqa: S310 - our own http URL
                self._url + path,
                method=method,
                data=None if body is None else json.dumps(body).encode(),
                headers={"Content-Type": "application/json", **_bearer(self._token_path)},
            )
            with urllib.request.urlopen(request, timeout=CALL_TIMEOUT_S) as response:  # noqa: S310
                return json.load(response)
        except urllib.error.HTTPError as error:
            said = error.read(500).decode(errors="replace").strip()
            raise ServeCallError(f"{what} answered {error.code}: {said}") from error
        except (OSError, ValueError) as error:
            raise ServeCallError(f"{what}: {error}") from error


def _bearer(token_path: Path | None) -> dict[str, str]:
    return {} if token_path is None else {"Authorization": f"Bearer {token_path.read_text().strip()}"}


class Scaler:
    """Of one model."""

    def __init__(
        self, scaled: Scaled, meter: Meter, serve: ServePort, orders: Orders, clock: Clock, rng: random.Random
    ) -> None:
        self._scaled = scaled
        self._meter = meter
        self._serve = serve
        self._orders = orders
        self._clock = clock
        self._rng = rng
        self._started_s = clock.monotonic()
        self._state: ScaleState | None = None
        """None before what there is is known."""
        self._under_way = True
        """A step is yet to be taken, or to be seen."""
        self._looked_s = -math.inf
        self._failures = 0
        self._kept: int | None = None
        """As Serve said last."""
        self._changes: deque[ScaleDecision] = deque(maxlen=CHANGES_TOLD)
        """The latest first."""
        self._told: ScaleDecision | None = None

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            pause_s = await self.turn()
            await asyncio.sleep(pause_s)

    async def turn(self) -> float:
        """Decide, and do the next step, if any. Returns the pause until it is to be called again."""
        if not self._orders.leads:
            self._state, self._started_s = None, self._clock.monotonic()
            self._meter.load(self._started_s)  # or all until it leads would be one long sample
            return PERIOD_S
        try:
            await self._turn()
        except ServeCallError as error:
            self._failures += 1
            pause_s = min(PAUSE_MAX_S, PERIOD_S * 2.0**self._failures) * self._rng.uniform(0.5, 1.0)
            _log.warning("%s: cannot scale now, tried again in %.1f s: %s", self._scaled.model, pause_s, error)
            if self._told is not None:
                self._tell(self._told, str(error))
            return pause_s
        return PERIOD_S

    async def _turn(self) -> None:
        now_s = self._clock.monotonic()
        load = self._meter.load(now_s)
        if self._state is None:
            if load.routers and now_s - self._looked_s >= LOOK_SOON_S:
                self._state = self._found(load, await self._look(now_s), now_s)
            return
        verdict = decide(load, self._scaled.scale, now_s, self._state)
        was, wanted = self._state.wanted, verdict.state.wanted
        changed = wanted != was
        self._state = verdict.state
        decision = ScaleDecision(self._clock.unix(), was, wanted, verdict.why, verdict.numbers)
        if changed:
            _log.info("%s: %s: %s", self._scaled.model, verdict.why, verdict.numbers)
            self._changes.appendleft(decision)
        self._tell(decision)
        if not changed and now_s - self._looked_s < (LOOK_SOON_S if self._under_way else LOOK_S):
            return
        self._under_way = True  # also where Serve does not answer
        serve, most = await self._look(now_s), self._scaled.scale.max
        load = self._meter.load(self._clock.monotonic())
        step = next_step(load, wanted, serve, most)
        if step is not None:
            if self._orders.vouched_by(serve.running):
                await self._do(step)
        else:
            due = min(wanted + set_aside(load, serve), most)
            self._under_way = serve.target != due or any(r.retiring for r in load.replicas)

    def _found(self, load: ModelLoad, serve: Deployed, now_s: float) -> ScaleState | None:
        """What a controller before this one left: so many are to take work as do, or are about to. None: not known yet."""
        here = {r.replica_id for r in load.replicas}
        if not serve.running <= here and now_s - self._started_s < SETTLE_S:
            return None
        retiring = sum(r.retiring for r in load.replicas if r.replica_id in serve.running)
        return ScaleState(max(0, serve.target - set_aside(load, serve) - retiring), now_s)

    async def _look(self, now_s: float) -> Deployed:
        deployed = await self._serve.deployed(self._scaled.deployment)
        self._looked_s, self._failures, self._kept = now_s, 0, deployed.target
        return deployed

    def _tell(self, decision: ScaleDecision, trouble: str = "") -> None:
        self._told = decision
        self._orders.scaled(
            ScaleStatus(self._scaled.model, decision, self._kept, trouble[:TROUBLE_TOLD], tuple(self._changes))
        )

    async def _do(self, step: Step) -> None:
        _log.info("%s: %s", self._scaled.model, step)
        match step:
            case SetTarget(replicas):
                await self._serve.keep(self._scaled.deployment, replicas)
            case Retire(replica_id):
                self._orders.tell_replica(replica_id, DrainOrder(drain=True, retire=True))
            case TakeWorkAgain(replica_id):
                self._orders.tell_replica(replica_id, DrainOrder(drain=False, retire=True))
            case TellToLeave(replica_id):
                self._orders.tell_replica(replica_id, Leave())


def scalers(
    scaled: list[Scaled],
    meters: dict[str, Meter],
    access: ServeAccess | None,
    application: str,
    orders: Orders,
    clock: Clock,
) -> list[Scaler]:
    """One for each model. Raises UsageError where Serve cannot be reached."""
    if scaled and access is None:
        raise UsageError("a model has scale, and it is not said where Ray's dashboard is: set the instance's serve")
    if access is None:
        return []
    serve = ServeDashboard(access, application)
    return [Scaler(s, meters[s.model], serve, orders, clock, random.Random()) for s in scaled]
