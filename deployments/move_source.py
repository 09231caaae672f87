"""Attempts that leave this replica for another while they run.

Owns: each move's course on its source, from the router's order to its release. Imports `cluster` and the links between
replicas; what belongs to which router is the server's. Runs on the replica's event loop; what is asked of the engine is
waited for and never given up halfway.

Invariants: before FROZEN is told nothing is at stake, the attempt runs on here; an attempt that is frozen is released,
thawed, aborted or handed back within `move_expiry_s`; each move is told OFF at most once, last, and not where its attempt
has ended or was released.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from concurrent.futures import Future
from enum import Enum, auto
from typing import Protocol, TypeVar

from cluster.config import TransportConfig
from cluster.messages import Move, MoveAbort, MoveBegin, MoveBlocks, MoveNotice, MoveStage, MoveState
from cluster.ports import NO_KV, EnginePort, ImportRefusal
from cluster.types import EngineState, RouterId
from deployments.outbox import AttemptKey
from deployments.peer_link import PeerLink, PeerLinks
from deployments.transport import TransportError

LOG = logging.getLogger("forebay.replica.moves")

T = TypeVar("T")

UNANSWERED_MAX = 3
"""Messages of one move that its target has not answered: as one is loaded there, the next is on its way."""
_FRAME_ROOM_BYTES = 4096
"""Of a frame with blocks, for what is not blocks."""


class Attempts(Protocol):
    """What moves that leave ask of the server."""

    def tell(self, router_id: RouterId, notice: MoveNotice) -> None: ...

    def give_back(self, key: AttemptKey) -> None:
        """It cannot go on here: its router is to go on with it."""
        ...


class _End(Enum):
    OFF = auto()
    """The attempt stays."""
    GONE = auto()
    """The attempt is over, or given up by its router: whoever said so has seen to it that the engine forgets it."""
    RELEASED = auto()


class _OverError(Exception):
    """The move goes no further."""


class _Outgoing:
    """One move."""

    def __init__(self, order: Move, router_id: RouterId) -> None:
        self.key = (order.request_id, order.attempt)
        self.there = (order.request_id, order.number)
        self.router_id = router_id
        self.entry = order.target
        self.link: PeerLink | None = None
        self.begun = False
        """The target has been told of it."""
        self.unanswered = 0
        self.refusal = ""
        """The latest; before the attempt is frozen one is the end."""
        self.kv_travels = True
        self.freezing = False
        """It is frozen, or is about to be."""
        self.waiting = False
        """All is told and sent: it is released, or called off."""
        self.end: _End | None = None
        self.why = ""
        self._changed = asyncio.Event()

    # --- OnPeer ---

    def answered(self, refusal: str) -> None:
        self.unanswered -= 1
        self.refusal = refusal
        self._changed.set()

    def broken(self, reason: str) -> None:
        self.stop(_End.OFF, f"the link to the target broke: {reason}")

    # --- its course ---

    def stop(self, end: _End, why: str = "") -> None:
        """A later end than OFF counts: an attempt that is over needs no thawing."""
        if self.end in (None, _End.OFF):
            self.end, self.why = end, self.why or why
        self._changed.set()

    async def until(self, holds: Callable[[], bool], within_s: float, otherwise: str) -> None:
        """Raises _OverError where it is stopped, or `within_s` passes."""
        try:
            async with asyncio.timeout(within_s):
                while self.end is None and not holds():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise _OverError(f"{otherwise} within {within_s} s") from None
        self.check()

    def check(self) -> None:
        if self.end is not None:
            raise _OverError(self.why)


async def _done(asked: Future[T]) -> T:
    return asked.result() if asked.done() else await asyncio.wrap_future(asked)


class MoveSource:
    """The moves that are under way from here: one an attempt at most, and only of attempts that are here."""

    def __init__(self, engine: EnginePort, peers: PeerLinks, attempts: Attempts, config: TransportConfig) -> None:
        self._engine = engine
        self._peers = peers
        self._attempts = attempts
        self._config = config
        self._moves: dict[AttemptKey, _Outgoing] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._moves)

    def __contains__(self, key: AttemptKey) -> bool:
        return key in self._moves

    # --- what the server is told ---

    def begin(self, order: Move, router_id: RouterId) -> None:
        """Of an attempt that is here; a repeat is ignored."""
        key = (order.request_id, order.attempt)
        if key in self._moves:
            return
        move = self._moves[key] = _Outgoing(order, router_id)
        task = asyncio.create_task(self._run(move), name=f"move of {order.request_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def call_off(self, key: AttemptKey) -> None:
        if (move := self._moves.get(key)) is not None:
            move.stop(_End.OFF, "called off")

    def release(self, key: AttemptKey) -> bool:
        """The target has it. False where it is not frozen, so that it must be ended by an abort."""
        move = self._moves.get(key)
        if move is None or not move.waiting or move.end is not None:
            return False
        move.stop(_End.RELEASED)
        return True

    def ended(self, key: AttemptKey) -> None:
        """The attempt is over."""
        if (move := self._moves.get(key)) is not None:
            move.stop(_End.GONE)

    def is_frozen(self, key: AttemptKey) -> bool:
        """Frozen, or about to be: it may run elsewhere at any moment."""
        move = self._moves.get(key)
        return move is not None and move.freezing

    async def close(self) -> None:
        """The engine is about to stop."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- one move ---

    async def _run(self, move: _Outgoing) -> None:
        try:
            await self._begin(move)
            sent = await self._stream(move)
            await self._stop_and_copy(move, sent)
            move.waiting = True
            await move.until(lambda: False, self._config.move_expiry_s, "its router did not release it")
        except (_OverError, TransportError) as over:
            move.stop(_End.OFF, str(over))
        except Exception as error:
            LOG.warning("a move failed here", exc_info=error)
            move.stop(_End.OFF, f"failed on the source: {type(error).__name__}")
        await self._settle(move)

    async def _settle(self, move: _Outgoing) -> None:
        if move.link is not None:
            if move.begun and move.end is not _End.RELEASED:
                move.link.send(MoveAbort(*move.there))
            move.link.leave(move.there, move.unanswered)
        if move.freezing and move.end is _End.OFF:
            await self._thaw(move)
        if move.end is _End.RELEASED:
            await self._release(move)
        del self._moves[move.key]
        if move.end is _End.OFF:
            LOG.info("the move of %s to %s is off: %s", move.key[0], move.entry.replica_id, move.why)
            self._attempts.tell(move.router_id, MoveNotice(*move.key, MoveStage.OFF, why=move.why))

    async def _thaw(self, move: _Outgoing) -> None:
        try:
            await _done(self._engine.moves.thaw(*move.key))
        except Exception as error:  # the engine has ended, or too much is asked of it
            LOG.warning("a frozen attempt is handed back: it cannot be thawed", exc_info=error)
            if move.end is _End.OFF:
                move.stop(_End.GONE)
                self._attempts.give_back(move.key)

    async def _release(self, move: _Outgoing) -> None:
        try:
            await _done(self._engine.moves.release(*move.key))
        except Exception as error:  # the engine has ended, or too much is asked of it
            LOG.warning("a moved attempt is aborted: it cannot be released", exc_info=error)
            self._engine.abort(*move.key)

    async def _begin(self, move: _Outgoing) -> None:
        """Have the target reserve a place."""
        moves = self._engine.moves
        try:
            async with asyncio.timeout(self._config.move_answer_s):
                link = await self._peers.reach(move.entry)
        except TimeoutError:
            raise _OverError(f"the target was not reached within {self._config.move_answer_s} s") from None
        link.join(move.there, move)
        move.link = link
        move.check()
        blocks = await _done(moves.exportable_blocks(*move.key))
        await self._ask(move, MoveBegin(*move.there, move.router_id, moves.kv_format, blocks))
        if move.refusal == ImportRefusal.KV_FORMAT:
            await self._ask(move, MoveBegin(*move.there, move.router_id, NO_KV, 0))
            move.kv_travels = False
        self._check_taken(move)

    async def _ask(self, move: _Outgoing, begin: MoveBegin) -> None:
        move.begun = True
        self._send(move, begin)
        await self._answers(move, lambda: not move.unanswered)

    async def _stream(self, move: _Outgoing) -> int:
        """Send what is final while the attempt runs on, until nothing is left or it does not become less: what is sent
        later, the attempt stands still for. Returns how many blocks were sent."""
        moves = self._engine.moves
        sent, chunk_blocks, before = 0, 1, math.inf
        while move.kv_travels:
            move.check()
            final = await _done(moves.exportable_blocks(*move.key))
            left = final - sent
            if left <= 0 or left >= before:
                break
            before = left
            while sent < final and move.kv_travels:
                count = min(chunk_blocks, final - sent)
                try:
                    data = await _done(moves.export_blocks(*move.key, sent, count))
                except LookupError:
                    return sent  # it was preempted, and has lost them
                chunk_blocks = self._chunk_blocks(move, data.nbytes // count)
                move.kv_travels = chunk_blocks > 0
                if move.kv_travels:
                    await self._send_blocks(move, sent, data)
                    sent += count
        return sent

    async def _stop_and_copy(self, move: _Outgoing, sent: int) -> None:
        moves = self._engine.moves
        await self._answers(move, lambda: not move.unanswered)
        self._check_taken(move)
        move.freezing = True
        asked, rest_asked = moves.freeze(*move.key), moves.export_rest(*move.key, sent)
        # By the latter: each wait for the engine's thread is one more turn of the loop while the attempt stands still.
        rest, state = await _done(rest_asked), await _done(asked)
        if state is None:
            move.stop(_End.GONE)
        move.check()
        assert state is not None
        assert move.link is not None
        if rest.nbytes and move.kv_travels:
            await self._send_rest(move, state, sent, rest)
        move.link.send(MoveState(move.there[1], state))
        index = len(state.request.emitted_ids)
        self._attempts.tell(move.router_id, MoveNotice(*move.key, MoveStage.FROZEN, index))

    async def _send_rest(self, move: _Outgoing, state: EngineState, sent: int, rest: memoryview) -> None:
        """What the target refuses of it is computed again there."""
        block_tokens = self._engine.progress().load.block_size_tokens
        blocks = -(-state.computed_tokens // block_tokens)
        block_bytes = rest.nbytes // (blocks - sent)
        chunk_blocks = self._chunk_blocks(move, block_bytes)
        while sent < blocks and chunk_blocks:
            chunk, rest = rest[: chunk_blocks * block_bytes], rest[chunk_blocks * block_bytes :]
            await self._send_blocks(move, sent, chunk)
            sent += chunk.nbytes // block_bytes

    def _chunk_blocks(self, move: _Outgoing, block_bytes: int) -> int:
        """Blocks to a message; 0 where one does not fit in a frame, so that none travels and all is computed again."""
        assert move.link is not None
        room_bytes = move.link.max_frame_bytes - _FRAME_ROOM_BYTES
        if block_bytes > room_bytes:
            return 0
        return max(1, min(self._config.move_chunk_bytes, room_bytes) // block_bytes)

    async def _send_blocks(self, move: _Outgoing, first: int, data: memoryview) -> None:
        link = move.link
        assert link is not None
        await self._answers(move, lambda: move.unanswered < (1 if link.congested else UNANSWERED_MAX))
        if not move.freezing:
            self._check_taken(move)
        self._send(move, MoveBlocks(*move.there, first, data))

    def _check_taken(self, move: _Outgoing) -> None:
        if move.refusal:
            raise _OverError(f"the target refused it: {move.refusal}")

    def _send(self, move: _Outgoing, message: MoveBegin | MoveBlocks) -> None:
        assert move.link is not None
        move.unanswered += 1
        move.link.send(message)

    async def _answers(self, move: _Outgoing, holds: Callable[[], bool]) -> None:
        await move.until(holds, self._config.move_answer_s, "the target did not answer")
