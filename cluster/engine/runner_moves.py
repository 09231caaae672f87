"""Moves of an engine that runs in a thread of its own.

Owns: `Moves` as seen from other threads. Imports cluster.engine. Invariant: every future is settled: with the answer,
with what the call raised, or with why it will never be made.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

from cluster.engine.moves import ImportRefusal, Moves
from cluster.engine.scheduling.sequence import Identity
from cluster.types import EngineState, RequestId

T = TypeVar("T")


class Ask(Protocol):
    def __call__(self, identity: Identity, call: Callable[[Moves], T]) -> Future[T]:
        """Have a call made about an attempt, between two steps."""
        ...


class RunnerMoves:
    """The calls of `cluster.engine.moves.Moves`. Each returns at once; it is made between two steps, in order. Calls that
    are made before the step ends share one pause between steps: `freeze` and `export_rest`, or `import_blocks` and
    `import_commit`, need not wait for each other.

    A future fails with `EngineStoppedError` if the engine's thread has ended, and with `EngineBusyError` if too many
    are waiting. What is added to it with `add_done_callback` runs in the engine's thread and must not block.
    """

    def __init__(self, ask: Ask, kv_format: str) -> None:
        self._ask = ask
        self.kv_format = kv_format

    def exportable_blocks(self, request_id: RequestId, attempt: int) -> Future[int]:
        return self._ask((request_id, attempt), lambda moves: moves.exportable_blocks(request_id, attempt))

    def export_blocks(self, request_id: RequestId, attempt: int, first: int, count: int) -> Future[memoryview]:
        return self._ask((request_id, attempt), lambda moves: moves.export_blocks(request_id, attempt, first, count))

    def export_rest(self, request_id: RequestId, attempt: int, first: int) -> Future[memoryview]:
        return self._ask((request_id, attempt), lambda moves: moves.export_rest(request_id, attempt, first))

    def freeze(self, request_id: RequestId, attempt: int) -> Future[EngineState | None]:
        """When it is settled, all that the request has put out before has been told."""
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
        """`data` must not be changed until the future is settled."""
        return self._ask((request_id, attempt), lambda moves: moves.import_blocks(request_id, attempt, first, data))

    def import_commit(self, state: EngineState, attempt: int) -> Future[ImportRefusal | None]:
        return self._ask((state.request.request_id, attempt), lambda moves: moves.import_commit(state, attempt))

    def import_abort(self, request_id: RequestId, attempt: int) -> Future[bool]:
        return self._ask((request_id, attempt), lambda moves: moves.import_abort(request_id, attempt))
