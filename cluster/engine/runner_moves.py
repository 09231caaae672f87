"""Moves of an engine that runs in a thread of its own.

Owns: `Moves` as seen from other threads. Imports cluster.engine. Invariant: what was asked is made between two steps, in
order.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

from cluster.engine.moves import Moves
from cluster.engine.scheduling.sequence import Identity
from cluster.ports import ImportRefusal
from cluster.types import EngineState, RequestId

T = TypeVar("T")


class Ask(Protocol):
    def __call__(self, identity: Identity, call: Callable[[Moves], T], /) -> Future[T]:
        """Have a call made about an attempt, between two steps."""
        ...


class RunnerMoves:
    """`cluster.ports.MovesPort`."""

    def __init__(self, ask: Ask, kv_format: str) -> None:
        self._ask = ask
        self._kv_format = kv_format

    @property
    def kv_format(self) -> str:
        return self._kv_format

    def exportable_blocks(self, request_id: RequestId, attempt: int) -> Future[int]:
        return self._ask((request_id, attempt), lambda moves: moves.exportable_blocks(request_id, attempt))

    def export_blocks(self, request_id: RequestId, attempt: int, first: int, count: int) -> Future[memoryview]:
        return self._ask((request_id, attempt), lambda moves: moves.export_blocks(request_id, attempt, first, count))

    def export_rest(self, request_id: RequestId, attempt: int, first: int) -> Future[memoryview]:
        return self._ask((request_id, attempt), lambda moves: moves.export_rest(request_id, attempt, first))

    def freeze(self, request_id: RequestId, attempt: int) -> Future[EngineState | None]:
        return self._ask((request_id, attempt), lambda moves: moves.freeze(request_id, attempt))

    def thaw(self, request_id: RequestId, attempt: int) -> Future[bool]:
        return self._ask((request_id, attempt), lambda moves: moves.thaw(request_id, attempt))

    def release(self, request_id: RequestId, attempt: int) -> Future[bool]:
        return self._ask((request_id, attempt), lambda moves: moves.release(request_id, attempt))

    def import_begin(
        self, request_id: RequestId, attempt: int, kv_format: str, blocks: int
    ) -> Future[ImportRefusal | None]:
        return self._ask(
            (request_id, attempt), lambda moves: moves.import_begin(request_id, attempt, kv_format, blocks)
        )

    def import_blocks(
        self, request_id: RequestId, attempt: int, first: int, data: memoryview
    ) -> Future[ImportRefusal | None]:
        return self._ask((request_id, attempt), lambda moves: moves.import_blocks(request_id, attempt, first, data))

    def import_commit(self, state: EngineState, attempt: int) -> Future[ImportRefusal | None]:
        return self._ask((state.request.request_id, attempt), lambda moves: moves.import_commit(state, attempt))

    def import_abort(self, request_id: RequestId, attempt: int) -> Future[bool]:
        return self._ask((request_id, attempt), lambda moves: moves.import_abort(request_id, attempt))
