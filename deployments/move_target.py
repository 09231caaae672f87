"""Attempts that come to this replica from another.

Owns: what has been begun and is not here yet, whose word it waits for, and when it is dropped. Imports `cluster` and the
transport; what belongs to which router is the server's. Runs on the replica's event loop.

What has come whole is run at once, ahead of its grant: the step that its client waits for does not wait for the way to
the router and back. Until the grant nothing of it is told to anybody, and without one it is as if it had never run.

Invariants: what was begun is opened once, by the router that it was begun for, or ended and its blocks given back within
`move_expiry_s` of the last word about it; nothing is told before it is granted, and all that it made then; each grant is
answered by TAKEN or OFF, but for a repeat; a message is answered in its order.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, assert_never

from cluster.config import TransportConfig
from cluster.messages import (
    Grant,
    MoveAbort,
    MoveAnswer,
    MoveBegin,
    MoveBlocks,
    MoveNotice,
    MoveStage,
    MoveState,
    ToPeer,
    ToReplica,
)
from cluster.ports import EnginePort, ImportRefusal
from cluster.types import EngineState, Preempted, RouterId, TokenDelta
from deployments.move_source import UNANSWERED_MAX
from deployments.outbox import AttemptKey
from deployments.transport import Link

LOG = logging.getLogger("forebay.replica.moves")

_BOOK_MAX = 1024
"""Attempts that may be on their way here; the engine's own bound on what it holds is mostly the lower."""


class Attempts(Protocol):
    """What moves that arrive ask of the server."""

    def tell(self, router_id: RouterId, notice: MoveNotice) -> None: ...

    def refuses(self, key: AttemptKey) -> str:
        """Why an attempt is not to come here; empty where it may."""
        ...

    def may_begin(self, router_id: RouterId, key: AttemptKey) -> bool:
        """Whether one that this router has not granted yet may run here meanwhile."""
        ...

    def arrive(self, router_id: RouterId, grant: Grant) -> str:
        """What the engine says of it is for this router from here on. Returns why it may not come; empty else."""
        ...

    def record(self, made: TokenDelta | Preempted) -> None:
        """What the engine has said of it before it was granted."""
        ...

    def turn_away(self, key: AttemptKey) -> bool:
        """The engine did not take it after all. False where its router has given it up by now."""
        ...

    def settled(self, router_id: RouterId, grant: Grant) -> None:
        """What comes of a grant is in every later load."""
        ...


@dataclass(slots=True)
class _Incoming:
    """One attempt that is not here yet."""

    key: AttemptKey
    router_id: RouterId
    link: Link
    timer: asyncio.TimerHandle
    unanswered: int = 0
    state: EngineState | None = None
    begun: Future[ImportRefusal | None] | None = None
    """Whether the engine takes it, once it has been asked to."""
    made: list[TokenDelta | Preempted] = field(default_factory=list)
    """What the engine has said of it. The wait for the grant bounds it."""
    grant: Grant | None = None


class _PeerHandler:
    """LinkHandler of one link from another replica."""

    def __init__(self, target: MoveTarget, link: Link) -> None:
        self._target = target
        self._link = link

    def message(self, message: ToReplica | ToPeer) -> None:
        if isinstance(message, ToPeer):
            self._target.message(self._link, message)
        else:
            self._link.abort(f"a replica does not send {type(message).__name__}")

    def writable(self) -> None:
        """Answers are few: as many as messages, which wait for them."""

    def closed(self, reason: str) -> None:
        self._target.link_closed(self._link, reason)


class MoveTarget:
    """All that is on its way here."""

    def __init__(self, engine: EnginePort, attempts: Attempts, config: TransportConfig) -> None:
        self._engine = engine
        self._attempts = attempts
        self._config = config
        self._coming: dict[AttemptKey, _Incoming] = {}
        self._loop = asyncio.get_running_loop()

    def __len__(self) -> int:
        return len(self._coming)

    @property
    def runs(self) -> bool:
        """Whether the engine may run something that is not granted yet."""
        return any(coming.begun is not None for coming in self._coming.values())

    def accept(self, link: Link) -> _PeerHandler:
        return _PeerHandler(self, link)

    # --- from the source ---

    def message(self, link: Link, message: ToPeer) -> None:
        match message:
            case MoveBegin():
                self._begin(link, message)
            case MoveBlocks():
                self._blocks(link, message)
            case MoveState():
                self._state(link, message)
            case MoveAbort(request_id=request_id, attempt=attempt):
                if (coming := self._of(link, (request_id, attempt))) is not None:
                    self._drop(coming, "the source called it off")
            case _:
                assert_never(message)

    def link_closed(self, link: Link, reason: str) -> None:
        """What has come whole still waits for its grant."""
        for coming in list(self._coming.values()):
            if coming.link is link and coming.state is None:
                self._drop(coming, f"the link to the source broke: {reason}")

    def _begin(self, link: Link, begin: MoveBegin) -> None:
        key = (begin.request_id, begin.attempt)
        if (refusal := self._attempts.refuses(key)) or key in self._coming or len(self._coming) >= _BOOK_MAX:
            refusal = refusal or (ImportRefusal.KNOWN if key in self._coming else ImportRefusal.FULL)
            link.send(MoveAnswer(*key, refusal))
            return
        timer = self._loop.call_later(self._config.move_expiry_s, self._expire, key)
        coming = self._coming[key] = _Incoming(key, begin.router_id, link, timer)
        asked = self._engine.moves.import_begin(*key, begin.kv_format, begin.blocks)
        self._answer(coming, asked, begins=True)

    def _blocks(self, link: Link, blocks: MoveBlocks) -> None:
        key = (blocks.request_id, blocks.attempt)
        coming = self._of(link, key)
        if coming is None or coming.state is not None:
            link.send(MoveAnswer(*key, ImportRefusal.UNKNOWN))
        elif coming.unanswered >= UNANSWERED_MAX:
            link.abort(f"more than {UNANSWERED_MAX} messages of a move that are not answered")
        else:
            self._heard(coming)
            self._answer(coming, self._engine.moves.import_blocks(*key, blocks.first, blocks.data))

    def _answer(
        self,
        coming: _Incoming,
        asked: Future[ImportRefusal | None],
        *,
        begins: bool = False,
    ) -> None:
        def settled(refusal: str) -> None:
            coming.unanswered -= 1
            if begins and refusal and self._coming.get(coming.key) is coming:
                self._forget(coming)
            coming.link.send(MoveAnswer(*coming.key, refusal))

        coming.unanswered += 1
        self._when(asked, settled)

    def _state(self, link: Link, message: MoveState) -> None:
        coming = self._of(link, (message.state.request.request_id, message.attempt))
        if coming is None or coming.state is not None:
            return  # it was dropped, or is a repeat
        coming.state = message.state
        self._heard(coming)
        if coming.grant is not None:
            self._open(coming, message.state, coming.grant)
        elif self._attempts.may_begin(coming.router_id, coming.key):
            coming.begun = self._engine.moves.import_commit(message.state, message.attempt)

    def _of(self, link: Link, key: AttemptKey) -> _Incoming | None:
        """What this link brings."""
        coming = self._coming.get(key)
        return coming if coming is not None and coming.link is link else None

    # --- from the engine ---

    def made(self, made: TokenDelta | Preempted) -> None:
        """It has said this of an attempt that is open to no router: not granted yet, or ended while the step ran."""
        if (coming := self._coming.get((made.request_id, made.attempt))) is not None:
            coming.made.append(made)

    # --- from the router ---

    def grant(self, router_id: RouterId, grant: Grant) -> None:
        """Of an attempt that is not here."""
        key = (grant.request_id, grant.attempt)
        coming = self._coming.get(key)
        if coming is None or coming.router_id != router_id:
            why = "it has not come" if coming is None else "it comes for another router"
            self._attempts.settled(router_id, grant)
            self._attempts.tell(router_id, MoveNotice(*key, MoveStage.OFF, why=why))
        elif coming.grant is None:
            coming.grant = grant
            self._wait(coming, self._config.move_answer_s)
            if coming.state is not None:
                self._open(coming, coming.state, grant)

    def give_up(self, router_id: RouterId, key: AttemptKey) -> None:
        """Its router has no more use for it."""
        if (coming := self._coming.get(key)) is not None and coming.router_id == router_id:
            self._drop(coming, "given up")

    def router_gone(self, router_id: RouterId) -> None:
        for coming in list(self._coming.values()):
            self.give_up(router_id, coming.key)

    def drop_all(self, why: str) -> None:
        for coming in list(self._coming.values()):
            self._drop(coming, why)

    # --- its end ---

    def _heard(self, coming: _Incoming) -> None:
        """There was word of it. The wait of a granted one is not drawn out: its router waits too."""
        if coming.grant is None:
            self._wait(coming, self._config.move_expiry_s)

    def _wait(self, coming: _Incoming, within_s: float) -> None:
        coming.timer.cancel()
        coming.timer = self._loop.call_later(within_s, self._expire, coming.key)

    def _expire(self, key: AttemptKey) -> None:
        coming = self._coming[key]
        self._drop(coming, "it has not come in time" if coming.grant else "it was not granted in time")

    def _forget(self, coming: _Incoming) -> None:
        del self._coming[coming.key]
        coming.timer.cancel()

    def _drop(self, coming: _Incoming, why: str) -> None:
        LOG.info("%s does not come here: %s", coming.key[0], why)
        self._forget(coming)
        self._free(coming.key)
        if coming.grant is not None:
            self._attempts.settled(coming.router_id, coming.grant)
            self._attempts.tell(coming.router_id, MoveNotice(*coming.key, MoveStage.OFF, why=why))

    def _free(self, key: AttemptKey) -> None:
        """Give back what is reserved, or end what has begun. Asked again while the engine is asked too much: nobody else
        would."""

        def freed(result: asyncio.Future[bool]) -> None:
            if result.exception() is None:
                if not result.result():
                    self._engine.abort(*key)  # it had been taken by then
            elif self._engine.progress().alive:
                self._loop.call_later(self._config.move_answer_s, self._free, key)

        asyncio.wrap_future(self._engine.moves.import_abort(*key)).add_done_callback(freed)

    def _open(self, coming: _Incoming, state: EngineState, grant: Grant) -> None:
        if grant.index != len(state.request.emitted_ids):
            self._drop(coming, f"it has {len(state.request.emitted_ids)} tokens and was granted from {grant.index} on")
            return
        if refusal := self._attempts.arrive(coming.router_id, grant):
            self._drop(coming, refusal)
            return
        self._forget(coming)
        begun = coming.begun
        if begun is None or (begun.done() and begun.exception() is not None):  # it was asked too much then
            begun = self._engine.moves.import_commit(state, grant.attempt)
        for made in coming.made:
            self._attempts.record(made)
        self._when(begun, partial(self._committed, coming, grant))

    def _committed(self, coming: _Incoming, grant: Grant, refusal: str) -> None:
        self._attempts.settled(coming.router_id, grant)
        if not refusal:
            self._attempts.tell(coming.router_id, MoveNotice(*coming.key, MoveStage.TAKEN))
            return
        self._free(coming.key)
        if self._attempts.turn_away(coming.key):
            self._attempts.tell(coming.router_id, MoveNotice(*coming.key, MoveStage.OFF, why=refusal))

    def _when(self, asked: Future[ImportRefusal | None], then: Callable[[str], None]) -> None:
        """`then` hears why the engine refused; FULL where it was asked too much."""

        def settled(result: asyncio.Future[Any]) -> None:
            then((result.result() or "") if result.exception() is None else ImportRefusal.FULL)

        asyncio.wrap_future(asked).add_done_callback(settled)
