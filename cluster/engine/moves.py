"""A live request leaves one engine for another with its keys and values.

Owns: what both engines do in a move (`cluster.ports.MovesPort`), and nothing of who asks for it or how the bytes travel.
Imports cluster and cluster.engine, never a backend. Invariants: a frozen request has told all its tokens, keeps what it
holds, and neither runs nor is preempted; what is exported is never changed by a later step; a request that is imported
runs no token again whose keys and values came.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from cluster.config import EngineConfig
from cluster.engine.book import Book
from cluster.engine.held import worth_weighing
from cluster.engine.intake import Intake
from cluster.engine.kv_memory import KvMemory
from cluster.engine.live import Live
from cluster.engine.scheduling.sequence import Identity
from cluster.ports import NO_KV, Backend, HeldAttempt, ImportRefusal
from cluster.types import EngineState, RequestId, TokenDelta


@dataclass(slots=True)
class _Import:
    kv_format: str
    """NO_KV where no bytes are to come."""
    blocks: int
    """Reserved."""
    received: int = 0
    """Blocks at the beginning that have come."""


class Moves:
    """Both sides of moves, for one engine. Called between steps only."""

    def __init__(self, config: EngineConfig, book: Book, memory: KvMemory, intake: Intake, backend: Backend) -> None:
        self._config = config
        self._book = book
        self._memory = memory
        self._intake = intake
        self._backend = backend
        self._imports: dict[Identity, _Import] = {}

    def __len__(self) -> int:
        """Imports that have begun."""
        return len(self._imports)

    def __contains__(self, identity: Identity) -> bool:
        return identity in self._imports

    @property
    def kv_format(self) -> str:
        return self._backend.kv_format

    def held(self, limit: int) -> tuple[HeldAttempt, ...]:
        """Of those that run or wait, at most so many, the most worth weighing."""
        book, shared = self._book, self._memory.shared_blocks
        return worth_weighing(book.waiting, book.running, limit, lambda state: state.blocks - len(shared(state)))

    # --- source ---

    def exportable_blocks(self, request_id: RequestId, attempt: int) -> int:
        """Blocks at the beginning of a request whose content is final: the full ones, and once it is frozen all that it
        has computed. 0 for one that is not live, and for one whose prompt's scores are still to be told (they do not
        travel: its prompt is run again where they can be)."""
        live = self._book.live.get((request_id, attempt))
        if live is None or live.scores is not None:
            return 0
        full, rest = divmod(live.state.computed, self._config.block_size_tokens)
        return full + (1 if rest and live.state.identity in self._book.frozen else 0)

    def export_blocks(self, request_id: RequestId, attempt: int, first: int, count: int) -> memoryview:
        """A copy of `count` exportable blocks from block `first` on, one after another.

        Raises:
            LookupError: not all of these are exportable (any more).
        """
        if count < 1 or not 0 <= first <= self.exportable_blocks(request_id, attempt) - count:
            raise LookupError(f"blocks {first} … {first + count - 1} of {request_id} are not to be had")
        return self._memory.saved_blocks(self._book.live[request_id, attempt].state, first, count)

    def export_rest(self, request_id: RequestId, attempt: int, first: int) -> memoryview:
        """All exportable blocks from block `first` on; empty if there are none. Asked for together with `freeze`, the
        tail needs no step in between to learn how long it is."""
        count = self.exportable_blocks(request_id, attempt) - first
        return self.export_blocks(request_id, attempt, first, count) if count > 0 else memoryview(b"")

    def freeze(self, request_id: RequestId, attempt: int) -> EngineState | None:
        """Take a request out of scheduling. None if it is not live (it may just have ended); again, the same again."""
        live = self._book.live.get((request_id, attempt))
        if live is None:
            return None
        if live.state.identity not in self._book.frozen:
            self._book.freeze(live)
        return EngineState(
            request=msgspec.structs.replace(live.request, emitted_ids=tuple(live.output)),
            computed_tokens=0 if live.scores is not None else live.state.computed,
            kv_format=self._backend.kv_format,
        )

    def thaw(self, request_id: RequestId, attempt: int) -> bool:
        """The move is off: a frozen request goes on at its place, from where it was. False if it is not frozen."""
        live = self._book.frozen.get((request_id, attempt))
        if live is None:
            return False
        self._book.thaw(live)
        return True

    def release(self, request_id: RequestId, attempt: int) -> bool:
        """The target has it: a frozen request is forgotten without a word. False if it is not frozen."""
        live = self._book.frozen.get((request_id, attempt))
        if live is None:
            return False
        self._book.remove(live)
        self._memory.drop(live)
        return True

    # --- target ---

    def import_begin(self, request_id: RequestId, attempt: int, kv_format: str, blocks: int) -> ImportRefusal | None:
        """Reserve `blocks` blocks for a request that is to come; more are reserved as they come. With NO_KV none are, nor
        do any come."""
        identity = (request_id, attempt)
        if kv_format not in (NO_KV, self._backend.kv_format):
            return ImportRefusal.KV_FORMAT
        if identity in self._book.live or identity in self._book.ended or identity in self._imports:
            return ImportRefusal.KNOWN
        if len(self._book) + len(self._imports) >= self._config.max_held:
            return ImportRefusal.FULL
        reserved = 0 if kv_format == NO_KV else max(1, blocks)
        if not self._memory.pool.can_allocate(reserved):
            return ImportRefusal.NO_ROOM
        if reserved:
            self._memory.pool.allocate(identity, reserved)
        self._imports[identity] = _Import(kv_format, reserved)
        return None

    def import_blocks(self, request_id: RequestId, attempt: int, first: int, data: memoryview) -> ImportRefusal | None:
        """Blocks `first`, `first` + 1, … have come. They may come again, but none may be left out.

        On NO_ROOM what has come before stays; the move can be committed with that, or aborted.
        """
        identity = (request_id, attempt)
        coming = self._imports.get(identity)
        if coming is None:
            return ImportRefusal.UNKNOWN
        count, rest = divmod(data.nbytes, self._backend.kv_block_bytes)
        if rest or not count or not 0 <= first <= coming.received or coming.kv_format == NO_KV:
            return ImportRefusal.MISFIT
        more = first + count - coming.blocks
        if more > 0:
            if not self._memory.pool.can_allocate(more):
                return ImportRefusal.NO_ROOM
            self._memory.pool.allocate(identity, more)
            coming.blocks += more
        self._memory.load(identity, first, data)
        coming.received = max(coming.received, first + count)
        return None

    def import_commit(self, state: EngineState, attempt: int) -> ImportRefusal | None:
        """The request is here: it waits, with its keys and values, and goes on before new work of its priority.

        Positions that `state` says are computed and whose blocks did not come are run again.
        """
        request = state.request
        identity = (request.request_id, attempt)
        coming = self._imports.get(identity)
        if coming is None:
            return ImportRefusal.UNKNOWN
        if coming.kv_format not in (NO_KV, state.kv_format):
            return ImportRefusal.KV_FORMAT
        del self._imports[identity]
        taken = self._intake.take(request, attempt)
        if isinstance(taken, TokenDelta):
            self._give_back(identity, coming)
            self._book.end(taken)
        else:
            self._adopt(taken, state.computed_tokens, coming)
        return None

    def import_abort(self, request_id: RequestId, attempt: int) -> bool:
        """Nothing will come: what was reserved is free again. False if nothing was begun."""
        coming = self._imports.pop((request_id, attempt), None)
        if coming is None:
            return False
        self._give_back((request_id, attempt), coming)
        return True

    def written(self) -> dict[Identity, int]:
        """Positions that are written in the blocks of each import that has any."""
        return {key: i.received * self._config.block_size_tokens for key, i in self._imports.items() if i.blocks}

    def _give_back(self, identity: Identity, coming: _Import) -> None:
        if coming.blocks:
            self._memory.pool.free(identity)

    def _adopt(self, live: Live, computed_tokens: int, coming: _Import) -> None:
        state = live.state
        received_tokens = coming.received * self._config.block_size_tokens
        computed = 0 if live.scores is not None else min(computed_tokens, received_tokens, state.tokens - 1)
        state.blocks = coming.blocks
        state.computed = max(0, computed)
        if not state.computed:
            self._memory.drop(live)
        state.started = True
        self._book.add(live)
