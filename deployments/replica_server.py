"""The replica's side of its routers: what they send goes to the engine, what the engine makes goes to them.

Owns: one session per router (its outbox, its link, how long it has been away) and which router each attempt belongs to.
Imports `cluster` and the transport; neither Ray nor an engine. Runs on one event loop; the engine's thread reaches it
through `call_soon_threadsafe` alone, once a step.

Invariants: every live attempt belongs to exactly one session; all of a step's tokens for one router leave in one frame;
a router that is away or slow never delays a step, and its work ends `orphan_after_s` after it was last seen; beside a
suspect (router/suspects.py) no other suspect is begun, and beside one that is tried alone nothing is.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, assert_never

from cluster.config import TransportConfig
from cluster.messages import Abort, Add, Goodbye, Hello, ResendFrom, StepFrame, ToReplica
from cluster.ports import Clock, EnginePort, StepResult
from cluster.types import (
    EngineLoad,
    Generation,
    Preempted,
    Refusal,
    RefusalReason,
    ReplicaId,
    ReplicaReport,
    ReplicaState,
    RequestId,
    RouterId,
    SharedWork,
)
from deployments.outbox import AttemptKey, Outbox
from deployments.prefix_feed import HeldPrefixes, PrefixFeed
from deployments.transport import Link
from router.suspects import Trial, may_join

LOG = logging.getLogger("forebay.replica")

_SHARED_TOLD = 64
"""Attempts that minimum shares sent here that a report tells of, the latest."""
_PREEMPTED_KEPT = 4096
"""Notices of preemption held for a router that does not read; they explain, nothing depends on them."""


@dataclass(slots=True)
class _Tried:
    """A suspect that is tried here."""

    session: RouterSession
    trial: Trial
    tokens: int
    """With so many output tokens it is over."""
    sequence: int
    """Of its add."""


@dataclass(slots=True)
class _Shared:
    """An attempt that a minimum share sent here."""

    session: RouterSession
    priority: int
    since_s: float
    """Monotonic."""
    preempted: bool = False


class RouterSession:
    """One router's work on this replica; outlives its links by `orphan_after_s`."""

    def __init__(self, router_id: RouterId, server: ReplicaServer, outbox: Outbox, prefixes: PrefixFeed) -> None:
        self.router_id = router_id
        self.outbox = outbox
        self.prefixes = prefixes
        self.link: Link | None = None
        self.sent_s = -math.inf
        """When it was sent a frame last, monotonic."""
        self.applied_sequence = 0
        self.latest_attempt: dict[RequestId, int] = {}
        self.refusals: list[Refusal] = []
        self.preempted: deque[Preempted] = deque(maxlen=_PREEMPTED_KEPT)
        self.orphan_timer: asyncio.TimerHandle | None = None
        self._server = server

    def refuse(self, key: AttemptKey, reason: RefusalReason) -> None:
        self.refusals.append(Refusal(*key, reason))

    def handler(self, link: Link) -> _SessionLink:
        return _SessionLink(self, link, self._server)


class _SessionLink:
    """LinkHandler of one link of a session; what arrives after the link was replaced is not heard."""

    def __init__(self, session: RouterSession, link: Link, server: ReplicaServer) -> None:
        self._session = session
        self._link = link
        self._server = server

    def message(self, message: ToReplica) -> None:
        if self._session.link is self._link:
            self._server.message(self._session, message)

    def writable(self) -> None:
        if self._session.link is self._link:
            self._server.flush(self._session)

    def closed(self, reason: str) -> None:
        if self._session.link is self._link:
            self._server.link_closed(self._session, reason)


class ReplicaServer:
    """Sessions, attempts and reports of one replica."""

    def __init__(
        self,
        engine: EnginePort,
        replica_id: ReplicaId,
        generation: Generation,
        config: TransportConfig,
        clock: Clock,
    ) -> None:
        self._engine = engine
        self._replica_id = replica_id
        self._generation = generation
        self._config = config
        self._clock = clock
        self._state = ReplicaState.READY
        self._sessions: dict[RouterId, RouterSession] = {}
        self._owner: dict[AttemptKey, RouterSession] = {}
        self._prefixes = HeldPrefixes()
        self._shared: dict[AttemptKey, _Shared] = {}
        """What a minimum share sent here."""
        self._tried: dict[AttemptKey, _Tried] = {}
        self._adds_sent = 0
        self._adds_unapplied: deque[tuple[int, RouterSession, int]] = deque()
        """(which add of the engine, session, its sequence) of those that no load has counted yet."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop = asyncio.get_running_loop()

    @property
    def routers(self) -> int:
        """Those that are linked, or have been a moment ago."""
        return len(self._sessions)

    def start(self, on_engine_death: Callable[[str], None]) -> None:
        """Start the engine. `on_engine_death` is called on the event loop."""
        self._engine.start(
            lambda result: self._post(self._apply, result),
            lambda why: self._post(on_engine_death, why),
        )

    def _post(self, function: Callable[[Any], None], argument: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, argument)

    # --- links ---

    def accept(self, link: Link, hello: Hello) -> _SessionLink:
        """A router has connected, for the first time or again."""
        router_id = RouterId(hello.sender_id)
        session = self._sessions.get(router_id)
        if session is None:
            outbox, prefixes = Outbox(self._config.outbox_max_bytes), PrefixFeed(self._prefixes)
            session = self._sessions[router_id] = RouterSession(router_id, self, outbox, prefixes)
            self._flush_all()  # the others know that they are not alone before anything of it runs
        if session.orphan_timer is not None:
            session.orphan_timer.cancel()
            session.orphan_timer = None
        session.prefixes.begin()
        old, session.link = session.link, link
        if old is not None:
            old.abort("replaced by a newer link of the same router")
        self._loop.call_soon(self.flush, session)
        return session.handler(link)

    def link_closed(self, session: RouterSession, reason: str) -> None:
        session.link = None
        LOG.info("router %s away: %s", session.router_id, reason)
        session.orphan_timer = self._loop.call_later(self._config.orphan_after_s, self._end_session, session)

    def _end_session(self, session: RouterSession) -> None:
        """End all work of a router that has left or has not come back."""
        for key in session.outbox.live:
            self._end_attempt(session, key)
        if self._sessions.get(session.router_id) is session:
            del self._sessions[session.router_id]
        if session.orphan_timer is not None:
            session.orphan_timer.cancel()
        if session.link is not None:
            link, session.link = session.link, None
            link.close("the router has left")

    # --- from routers ---

    def message(self, session: RouterSession, message: ToReplica) -> None:
        match message:
            case Add():
                self._add(session, message)
            case Abort(request_id=request_id, attempt=attempt):
                self._end_attempt(session, (request_id, attempt))
            case ResendFrom():
                if not session.outbox.rewind(message.request_id, message.attempt, message.index):
                    session.refuse((message.request_id, message.attempt), RefusalReason.UNKNOWN_ATTEMPT)
                self.flush(session)
            case Goodbye():
                self._end_session(session)
            case _:
                assert_never(message)

    def _add(self, session: RouterSession, add: Add) -> None:
        request, attempt = add.request, add.attempt
        key = (request.request_id, attempt)
        latest = session.latest_attempt.get(request.request_id, -1)
        if attempt <= latest or key in session.outbox:
            return  # a repeat, or an attempt that a later one has replaced
        if latest >= 0:
            self._end_attempt(session, (request.request_id, latest))
        refused = RefusalReason.DRAINING if self._state is ReplicaState.DRAINING else None
        # Each router sees to that for its own; what another sends at the same moment only the replica knows.
        if refused is None and not may_join(Trial(add.trial), self._strictest_trial(), occupied=bool(self._owner)):
            refused = RefusalReason.FULL
        if refused is not None:
            self._adds_unapplied.append((self._adds_sent, session, add.sequence))  # counted with those before it
            session.refuse(key, refused)
            self.flush(session)
            return
        session.latest_attempt[request.request_id] = attempt
        session.outbox.open(request.request_id, attempt, len(request.emitted_ids))
        self._owner[key] = session
        if add.shared:
            self._shared[key] = _Shared(session, request.priority, self._clock.monotonic())
        self._idle.clear()
        if add.trial:
            self._tried[key] = _Tried(session, Trial(add.trial), add.trial_tokens, add.sequence)
        if add.trial == Trial.ALONE:
            self.flush(session)
            self._loop.call_soon(self._give, session, add)  # when that has left: should it kill, its router knows
        else:
            self._give(session, add)

    def _give(self, session: RouterSession, add: Add) -> None:
        if (add.request.request_id, add.attempt) in self._owner:
            self._adds_sent += 1
            self._adds_unapplied.append((self._adds_sent, session, add.sequence))
            self._engine.add(add.request, add.attempt)

    def _strictest_trial(self, but: RouterSession | None = None) -> Trial:
        return max((t.trial for t in self._tried.values() if t.session is not but), default=Trial.NONE)

    def _end_attempt(self, session: RouterSession, key: AttemptKey) -> None:
        session.outbox.forget(*key)
        if self._owner.pop(key, None) is not None:
            self._engine.abort(*key)
        self._released(session, key)

    def _released(self, session: RouterSession, key: AttemptKey) -> None:
        """An attempt is over."""
        self._shared.pop(key, None)
        self._tried.pop(key, None)
        if session.latest_attempt.get(key[0]) == key[1]:
            del session.latest_attempt[key[0]]
        if not self._owner:
            self._idle.set()

    # --- from the engine ---

    def _apply(self, result: StepResult) -> None:
        """One turn of the engine: give each router its part, in one frame."""
        for delta in result.deltas:
            key = (delta.request_id, delta.attempt)
            session = self._owner.get(key)
            if session is None:
                continue  # aborted while the step ran
            session.outbox.record(delta)
            if key in self._shared:
                self._shared[key].preempted = False
            if self._tried and (tried := self._tried.get(key)) and delta.index + len(delta.token_ids) >= tried.tokens:
                del self._tried[key]
            if delta.finish is not None:
                del self._owner[key]
                self._released(session, key)
        for refusal in result.refusals:
            key = (refusal.request_id, refusal.attempt)
            session = self._owner.pop(key, None)
            if session is not None:
                session.outbox.forget(*key)
                session.refusals.append(refusal)
                self._released(session, key)
        for notice in result.preempted:
            session = self._owner.get((notice.request_id, notice.attempt))
            if session is not None:
                session.preempted.append(notice)
                if (shared := self._shared.get((notice.request_id, notice.attempt))) is not None:
                    shared.preempted = True
        if result.prefixes is not None:
            changed = self._prefixes.apply(result.prefixes)
            for session in self._sessions.values():
                session.prefixes.changed(changed)
        for session in list(self._sessions.values()):
            self.flush(session, result.load)

    # --- to routers ---

    def report(self, session: RouterSession | None, load: EngineLoad | None = None) -> ReplicaReport:
        """The present state, as `session` needs it; `load` is the engine's newest unless one is given."""
        progress = self._engine.progress()
        load = load or progress.load
        self._count_applied(load)
        return ReplicaReport(
            replica_id=self._replica_id,
            generation=self._generation,
            state=self._state,
            observed_unix_s=self._clock.unix(),
            load=load,
            step_age_s=progress.step_age_s,
            applied_sequence=session.applied_sequence if session is not None else 0,
            shared=self._shared_by_others(session) if self._shared else (),
            trial=self._strictest_trial(session) if self._tried else Trial.NONE,
            others=len(self._sessions) > 1,
            alone=next(
                (t.sequence for t in self._tried.values() if t.session is session and t.trial is Trial.ALONE), 0
            ),
        )

    def _shared_by_others(self, session: RouterSession | None) -> tuple[SharedWork, ...]:
        now_s = self._clock.monotonic()
        others = [s for s in self._shared.values() if s.session is not session and not s.preempted]
        return tuple(SharedWork(s.priority, now_s - s.since_s) for s in others[-_SHARED_TOLD:])

    def _count_applied(self, load: EngineLoad) -> None:
        """Note which adds `load` counts; the engine takes them in the order in which they were sent to it."""
        while self._adds_unapplied and self._adds_unapplied[0][0] <= load.adds_total:
            _, owner, sequence = self._adds_unapplied.popleft()
            owner.applied_sequence = max(owner.applied_sequence, sequence)

    def flush(self, session: RouterSession, load: EngineLoad | None = None) -> None:
        """Send what this router has coming, with a report; or keep it, bounded, while it cannot take more."""
        if session.link is None or session.link.congested:
            for key in session.outbox.overflowing():
                self._end_attempt(session, key)
                session.refuse(key, RefusalReason.OVERFLOW)
            return
        refusals, session.refusals = tuple(session.refusals), []
        preempted = tuple(session.preempted)
        session.preempted.clear()
        session.sent_s = self._clock.monotonic()
        session.link.send(
            StepFrame(
                report=self.report(session, load),
                deltas=session.outbox.take(),
                refusals=refusals,
                preempted=preempted,
                prefixes=session.prefixes.take(),
            )
        )

    def tick(self) -> None:
        """Every `report_period_s`: a report, whatever the engine does, to every router that has not just been sent one."""
        recent_s = self._clock.monotonic() - self._config.report_period_s / 2
        for session in list(self._sessions.values()):
            if session.sent_s <= recent_s:
                self.flush(session)

    def _flush_all(self) -> None:
        for session in list(self._sessions.values()):
            self.flush(session)

    # --- the end ---

    def take_work(self, takes: bool) -> None:
        """Whether it takes new work, from now on."""
        self._state = ReplicaState.READY if takes else ReplicaState.DRAINING
        self._flush_all()

    async def drain(self) -> None:
        """Take nothing new; return when all work has ended and left for its router."""
        self.take_work(False)
        await self._idle.wait()
        self._flush_all()

    def hand_back(self) -> None:
        """End what is left; its routers go on with it elsewhere, from the last token that they have."""
        for session in list(self._sessions.values()):
            self.flush(session)  # what has been made need not be made again, where the link takes it
            for key in session.outbox.live:
                self._end_attempt(session, key)
                session.refuse(key, RefusalReason.DRAINING)
            self.flush(session)
