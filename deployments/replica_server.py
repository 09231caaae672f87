"""The replica's side of its routers: what they send goes to the engine, what the engine makes goes to them.

Owns: one session per router (its outbox, its link, how long it has been away) and which router each attempt belongs to.
Imports `cluster` and the transport; neither Ray nor an engine. Runs on one event loop; the engine's thread reaches it
through `call_soon_threadsafe` alone, once a step.

Invariants: every live attempt belongs to exactly one session; all of a step's tokens for one router leave in one frame;
a router that is away or slow never delays a step, and its work ends `orphan_after_s` after it was last seen; beside a
suspect (router/suspects.py) no other suspect is begun, and beside one that is tried alone nothing is; an attempt that
moves is of its router until that has released it, and one that comes is once that has granted it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, assert_never

import msgspec

from cluster.config import TransportConfig
from cluster.messages import (
    Abort,
    Add,
    CallOff,
    Goodbye,
    Grant,
    HeldRequest,
    Hello,
    Move,
    MoveNotice,
    MoveStage,
    Release,
    ResendFrom,
    StepFrame,
    ToPeer,
    ToReplica,
)
from cluster.ports import Clock, EnginePort, HeldAttempt, ImportRefusal, StepResult
from cluster.types import (
    EngineLoad,
    Generation,
    Preempted,
    RefusalReason,
    ReplicaId,
    ReplicaReport,
    ReplicaState,
    RouterId,
    TokenDelta,
)
from deployments.held import HeldFeed
from deployments.marked_work import MarkedWork
from deployments.move_source import MoveSource
from deployments.move_target import MoveTarget
from deployments.outbox import AttemptKey, Outbox
from deployments.peer_link import PeerLinks
from deployments.prefix_feed import HeldPrefixes, PrefixFeed
from deployments.router_session import RouterSession
from deployments.transport import Identity, Link, LinkHandler
from router.suspects import Trial, may_join

LOG = logging.getLogger("forebay.replica")

ROLES = frozenset({"router", "replica"})
"""Of those that a replica's listener lets in."""
decode = msgspec.msgpack.Decoder(ToReplica | ToPeer).decode
"""Of what they send it."""


class _SessionLink:
    """LinkHandler of one link of a session; what arrives after the link was replaced is not heard."""

    def __init__(self, session: RouterSession, link: Link, server: ReplicaServer) -> None:
        self._session = session
        self._link = link
        self._server = server

    def message(self, message: ToReplica | ToPeer) -> None:
        if isinstance(message, ToPeer):
            self._link.abort(f"a router does not send {type(message).__name__}")
        elif self._session.link is self._link:
            self._server.message(self._session, message)

    def writable(self) -> None:
        if self._session.link is self._link:
            self._server.flush(self._session)

    def closed(self, reason: str) -> None:
        if self._session.link is self._link:
            self._server.link_closed(self._session, reason)


class ReplicaServer:
    """Sessions, attempts and reports of one replica. `identity` is what it is to other replicas."""

    def __init__(
        self,
        engine: EnginePort,
        replica_id: ReplicaId,
        generation: Generation,
        config: TransportConfig,
        clock: Clock,
        identity: Identity | None = None,
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
        self._marked = MarkedWork()
        self._adds_sent = 0
        self._adds_unapplied: deque[tuple[int, RouterSession, int]] = deque()
        """(which add of the engine, session, its sequence) of those that no load has counted yet."""
        self._granted: list[tuple[RouterSession, int]] = []
        """(session, its sequence) of grants that the next load counts."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop = asyncio.get_running_loop()
        self._peers = PeerLinks(identity or Identity("replica", replica_id, b"", generation=generation), config)
        self._leaving = MoveSource(engine, self._peers, self, config)
        self._coming = MoveTarget(engine, self, config)
        self._held = HeldFeed(engine, clock, self._movable_of, self._post)

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

    def accept(self, link: Link, hello: Hello) -> LinkHandler:
        """A router has connected, for the first time or again, or a replica from which work comes."""
        return self._coming.accept(link) if hello.role == "replica" else self._accept_router(link, hello)

    def _accept_router(self, link: Link, hello: Hello) -> _SessionLink:
        router_id = RouterId(hello.sender_id)
        session = self._sessions.get(router_id)
        if session is None:
            outbox, prefixes = Outbox(self._config.outbox_max_bytes), PrefixFeed(self._prefixes)
            session = self._sessions[router_id] = RouterSession(router_id, outbox, prefixes)
            self._flush_all()  # the others know that they are not alone before anything of it runs
        if session.orphan_timer is not None:
            session.orphan_timer.cancel()
            session.orphan_timer = None
        session.prefixes.begin()
        old, session.link = session.link, link
        if old is not None:
            old.abort("replaced by a newer link of the same router")
        self._loop.call_soon(self.flush, session)
        return _SessionLink(session, link, self)

    def link_closed(self, session: RouterSession, reason: str) -> None:
        session.link = None
        LOG.info("router %s away: %s", session.router_id, reason)
        session.orphan_timer = self._loop.call_later(self._config.orphan_after_s, self._end_session, session)

    def _end_session(self, session: RouterSession) -> None:
        """End all work of a router that has left or has not come back."""
        for key in session.outbox.live:
            self._end_attempt(session, key)
        self._coming.router_gone(session.router_id)
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
                self._coming.give_up(session.router_id, (request_id, attempt))
                self._end_attempt(session, (request_id, attempt))
            case ResendFrom():
                if not session.outbox.rewind(message.request_id, message.attempt, message.index):
                    session.refuse((message.request_id, message.attempt), RefusalReason.UNKNOWN_ATTEMPT)
                self.flush(session)
            case Goodbye():
                self._end_session(session)
            case Move():
                self._move(session, message)
            case CallOff(request_id=request_id, attempt=attempt):
                if self._owner.get((request_id, attempt)) is session:
                    self._leaving.call_off((request_id, attempt))
            case Grant(request_id=request_id, attempt=attempt):
                if (request_id, attempt) not in self._owner:
                    self._coming.grant(session.router_id, message)
            case Release(request_id=request_id, attempt=attempt):
                self._release(session, (request_id, attempt))
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
        occupied = bool(self._owner) or self._coming.runs
        if refused is None and not may_join(Trial(add.trial), self._marked.strictest_trial(), occupied=occupied):
            refused = RefusalReason.FULL
        if refused is not None:
            self._adds_unapplied.append((self._adds_sent, session, add.sequence))  # counted with those before it
            session.refuse(key, refused)
            self.flush(session)
            return
        self._open(session, key, len(request.emitted_ids))
        self._marked.add(session, add, self._clock.monotonic())
        if add.trial == Trial.ALONE:
            self.flush(session)
            self._loop.call_soon(self._give, session, add)  # when that has left: should it kill, its router knows
        else:
            self._give(session, add)

    def _open(self, session: RouterSession, key: AttemptKey, first_index: int) -> None:
        session.latest_attempt[key[0]] = key[1]
        session.outbox.open(*key, first_index)
        self._owner[key] = session
        self._idle.clear()

    def _give(self, session: RouterSession, add: Add) -> None:
        if (add.request.request_id, add.attempt) in self._owner:
            self._adds_sent += 1
            self._adds_unapplied.append((self._adds_sent, session, add.sequence))
            self._engine.add(add.request, add.attempt)

    def _end_attempt(self, session: RouterSession, key: AttemptKey) -> None:
        session.outbox.forget(*key)
        if self._owner.get(key) is session:
            del self._owner[key]
            self._engine.abort(*key)
            self._released(session, key)

    def _released(self, session: RouterSession, key: AttemptKey) -> None:
        """An attempt is over."""
        self._leaving.ended(key)
        self._marked.over(key)
        if session.latest_attempt.get(key[0]) == key[1]:
            del session.latest_attempt[key[0]]
        if not self._owner:
            self._idle.set()

    # --- from the engine ---

    def _apply(self, result: StepResult) -> None:
        """One turn of the engine: give each router its part, in one frame."""
        self._adds_unapplied.extend((self._adds_sent, *granted) for granted in self._granted)
        self._granted.clear()
        for delta in result.deltas:
            self.record(delta)
        for refusal in result.refusals:
            key = (refusal.request_id, refusal.attempt)
            session = self._owner.pop(key, None)
            if session is not None:
                session.outbox.forget(*key)
                session.refusals.append(refusal)
                self._released(session, key)
        for notice in result.preempted:
            self.record(notice)
        if result.prefixes is not None:
            changed = self._prefixes.apply(result.prefixes)
            for session in self._sessions.values():
                session.prefixes.changed(changed)
        for session in list(self._sessions.values()):
            self.flush(session, result.load)

    def record(self, made: TokenDelta | Preempted) -> None:
        """What the engine has said of an attempt, for its router."""
        key = (made.request_id, made.attempt)
        session = self._owner.get(key)
        if session is None:
            self._coming.made(made)
        elif isinstance(made, Preempted):
            session.preempted.append(made)
            self._marked.preempted(key)
        else:
            session.outbox.record(made)
            self._marked.told(made)
            if made.finish is not None:
                del self._owner[key]
                self._released(session, key)

    # --- moves, see move_source.py and move_target.py ---

    def _move(self, session: RouterSession, move: Move) -> None:
        key = (move.request_id, move.attempt)
        why = ""
        if self._owner.get(key) is not session:
            why = "no such attempt runs here"
        elif move.target.replica_id == self._replica_id:
            why = "it is here already"
        if why:
            self.tell(session.router_id, MoveNotice(*key, MoveStage.OFF, why=why))
        else:
            self._leaving.begin(move, session.router_id)

    def _release(self, session: RouterSession, key: AttemptKey) -> None:
        """It is elsewhere. The engine forgets it without a word where it has kept it for that."""
        if self._owner.get(key) is session and self._leaving.release(key):
            session.outbox.forget(*key)
            del self._owner[key]
            self._released(session, key)
        else:
            self._end_attempt(session, key)

    def tell(self, router_id: RouterId, notice: MoveNotice) -> None:
        if (session := self._sessions.get(router_id)) is not None:
            session.notices.append(notice)
            self.flush(session)

    def give_back(self, key: AttemptKey) -> None:
        """It cannot go on here."""
        if (session := self._owner.get(key)) is not None:
            self._hand_back(session, key)
            self.flush(session)

    def refuses(self, key: AttemptKey) -> str:
        """Why an attempt is not to come here; empty where it may."""
        if self._state is ReplicaState.DRAINING:
            return RefusalReason.DRAINING
        if key in self._owner:
            return ImportRefusal.KNOWN
        return "" if may_join(Trial.NONE, self._marked.strictest_trial(), occupied=False) else ImportRefusal.FULL

    def may_begin(self, router_id: RouterId, key: AttemptKey) -> bool:
        """Whether an attempt that is not granted yet may run here meanwhile."""
        session = self._sessions.get(router_id)
        return session is not None and session.latest_attempt.get(key[0], -1) < key[1] and not self.refuses(key)

    def arrive(self, router_id: RouterId, grant: Grant) -> str:
        """The engine is about to have it, or has it already. Returns why it may not; empty else."""
        session = self._sessions[router_id]
        latest = session.latest_attempt.get(grant.request_id, -1)
        refusal = ""
        if latest >= grant.attempt:
            refusal = "a later attempt is here"
        elif not may_join(Trial.NONE, self._marked.strictest_trial(), occupied=True):
            refusal = ImportRefusal.FULL
        else:
            if latest >= 0:
                self._end_attempt(session, (grant.request_id, latest))
            self._open(session, (grant.request_id, grant.attempt), grant.index)
        return refusal

    def turn_away(self, key: AttemptKey) -> bool:
        """The engine did not take it after all. False where its router has given it up by now."""
        session = self._owner.get(key)
        if session is not None:
            self._end_attempt(session, key)
        return session is not None

    def settled(self, router_id: RouterId, grant: Grant) -> None:
        """What comes of a grant is in every later load."""
        if (session := self._sessions.get(router_id)) is not None:
            self._granted.append((session, grant.sequence))

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
            shared=self._marked.shared_by_others(session, self._clock.monotonic()),
            trial=self._marked.strictest_trial(session),
            others=len(self._sessions) > 1,
            alone=self._marked.alone(session),
        )

    def held(self, load: EngineLoad) -> tuple[HeldRequest, ...] | None:
        """With a report of `load` to the controller: what it may have moved or taken back."""
        return self._held.told(load)

    def weigh(self, for_s: float) -> None:
        """The controller needs to know what is here, whether or not there is room."""
        self._held.weigh(for_s)

    def _movable_of(self, held: HeldAttempt) -> RouterId | None:
        key = (held.request_id, held.attempt)
        session = self._owner.get(key)
        if session is None or key in self._leaving or self._marked.is_tried(key):
            return None
        return session.router_id

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
        preempted, notices = tuple(session.preempted), tuple(session.notices)
        session.preempted.clear()
        session.notices.clear()
        session.sent_s = self._clock.monotonic()
        session.link.send(
            StepFrame(
                report=self.report(session, load),
                deltas=session.outbox.take(),
                refusals=refusals,
                preempted=preempted,
                prefixes=session.prefixes.take(),
                moves=notices,
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
        """End what is left; its routers go on with it elsewhere, from the last token that they have. What is frozen, and
        may run elsewhere at any moment, stays until its move is settled: then there may be more to hand back."""
        self._coming.drop_all("the replica leaves")
        for session in list(self._sessions.values()):
            self.flush(session)  # what has been made need not be made again, where the link takes it
            for key in session.outbox.live:
                if not self._leaving.is_frozen(key):
                    self._hand_back(session, key)
            self.flush(session)

    def _hand_back(self, session: RouterSession, key: AttemptKey) -> None:
        self._end_attempt(session, key)
        session.refuse(key, RefusalReason.DRAINING)

    async def close(self) -> None:
        """End the moves from here, and the links that they used. The engine must not have ended yet."""
        await self._leaving.close()
        await self._peers.close()
