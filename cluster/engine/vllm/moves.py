"""Moves of a vLLM engine's requests.

Owns: both sides of a move on vLLM: who is frozen, and who is to come. Imports cluster, cluster.engine and the link to the
core. Invariants: no keys and values pass through here; a frozen request has told all its tokens; calls about one request are
answered in the order in which they were asked.

Without a KV connector a frozen request stays in the core, with its blocks, until it is thawed or released. With one it
leaves the core as soon as nothing of it is on its way: a connector is told of a request's blocks when the request ends,
and from then on keeps them for whoever reads them. Thawed, it begins again with what the prefix cache has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import TypeAlias, TypeVar

import msgspec

from cluster.config import EngineConfig
from cluster.engine.inbox import Inbox
from cluster.engine.scheduling.sequence import Identity
from cluster.engine.vllm.core_link import CoreLink, Frozen
from cluster.engine.vllm.version import VLLM_VERSION
from cluster.engine.vllm.wire import decode_handle
from cluster.ports import NO_KV, ImportRefusal
from cluster.types import EngineState, RequestId

T = TypeVar("T")
MovesCall: TypeAlias = Callable[[], Awaitable[object]]


def kv_format_of(config: EngineConfig) -> str:
    """Names what a KV connector's handle means; NO_KV without a connector."""
    connector = (config.vllm.kv_transfer_config if config.vllm is not None else None) or {}
    name = connector.get("kv_connector")
    if name is None:
        return NO_KV
    return f"vllm {VLLM_VERSION} {name} {config.dtype.value} {config.block_size_tokens}"


class VllmMoves:
    """`cluster.ports.MovesPort`."""

    def __init__(self, link: CoreLink, inbox: Inbox[MovesCall], kv_format: str) -> None:
        self._link = link
        self._inbox = inbox
        self._kv_format = kv_format
        self._imports: dict[Identity, str] = {}
        """Those that are to come, with the `kv_format` that they began with."""
        self._turns: dict[Identity, asyncio.Future[None]] = {}
        """Done when the call about an attempt that was asked last has been made; none where none is under way."""

    @property
    def kv_format(self) -> str:
        return self._kv_format

    # --- source ---

    def exportable_blocks(self, request_id: RequestId, attempt: int) -> Future[int]:
        """0: no bytes leave it here."""
        return self._inbox.ask((request_id, attempt), _no_blocks)

    def export_blocks(self, request_id: RequestId, attempt: int, first: int, count: int) -> Future[memoryview]:
        async def export_blocks() -> memoryview:
            raise LookupError(f"blocks {first} … {first + count - 1} of {request_id} are not to be had")

        return self._inbox.ask((request_id, attempt), export_blocks)

    def export_rest(self, request_id: RequestId, attempt: int, first: int) -> Future[memoryview]:  # noqa: ARG002
        return self._inbox.ask((request_id, attempt), _no_bytes)

    def freeze(self, request_id: RequestId, attempt: int) -> Future[EngineState | None]:
        return self._ask_in_turn((request_id, attempt), self._freeze)

    def thaw(self, request_id: RequestId, attempt: int) -> Future[bool]:
        return self._ask_in_turn((request_id, attempt), self._thaw)

    def release(self, request_id: RequestId, attempt: int) -> Future[bool]:
        return self._ask_in_turn((request_id, attempt), self._release)

    # --- target ---

    def import_begin(
        self,
        request_id: RequestId,
        attempt: int,
        kv_format: str,
        blocks: int,  # noqa: ARG002
    ) -> Future[ImportRefusal | None]:
        """A place is reserved, and no blocks: none can be written to from here."""
        return self._inbox.ask((request_id, attempt), lambda: self._import_begin((request_id, attempt), kv_format))

    def import_blocks(
        self,
        request_id: RequestId,
        attempt: int,
        first: int,  # noqa: ARG002
        data: memoryview,  # noqa: ARG002
    ) -> Future[ImportRefusal | None]:
        return self._inbox.ask((request_id, attempt), lambda: self._import_blocks((request_id, attempt)))

    def import_commit(self, state: EngineState, attempt: int) -> Future[ImportRefusal | None]:
        return self._inbox.ask((state.request.request_id, attempt), lambda: self._import_commit(state, attempt))

    def import_abort(self, request_id: RequestId, attempt: int) -> Future[bool]:
        return self._inbox.ask((request_id, attempt), lambda: self._import_abort((request_id, attempt)))

    # --- in the adapter's thread ---

    def drop_import(self, identity: Identity) -> bool:
        """Nothing will come. False if nothing was begun."""
        if self._imports.pop(identity, None) is None:
            return False
        self._inbox.forget((identity,))
        return True

    def _ask_in_turn(self, identity: Identity, call: Callable[[Identity], Awaitable[T]]) -> Future[T]:
        """These may wait for a step; the next about the same attempt waits for it too."""
        return self._inbox.ask(identity, lambda: self._in_turn(identity, call))

    async def _in_turn(self, identity: Identity, call: Callable[[Identity], Awaitable[T]]) -> T:
        before = self._turns.get(identity)
        made = self._turns[identity] = asyncio.get_running_loop().create_future()
        try:
            if before is not None:
                await asyncio.wait((before,))
            return await call(identity)
        finally:
            made.set_result(None)
            if self._turns[identity] is made:
                del self._turns[identity]

    async def _freeze(self, identity: Identity) -> EngineState | None:
        live = self._link.live(identity)
        if live is None:
            return None
        frozen = self._link.frozen.get(identity)
        if frozen is None:
            frozen = await self._link.freeze(identity)
        if not await self._is_still(identity, frozen):
            return None
        return EngineState(
            request=msgspec.structs.replace(live.request, emitted_ids=tuple(live.output)),
            computed_tokens=0,
            kv_format=self._kv_format,
            kv_handle=frozen.settled.result(),
        )

    async def _thaw(self, identity: Identity) -> bool:
        frozen = self._link.frozen.get(identity)
        if frozen is None or not await self._is_still(identity, frozen):
            return False
        del self._link.frozen[identity]
        if self._kv_format == NO_KV:
            await self._link.call("thaw", identity)
        else:
            await self._link.bring_back(identity)
        return True

    async def _release(self, identity: Identity) -> bool:
        frozen = self._link.frozen.get(identity)
        if frozen is None or not await self._is_still(identity, frozen):
            return False
        await self._link.release(identity, in_core=self._kv_format == NO_KV)
        return True

    async def _is_still(self, identity: Identity, frozen: Frozen) -> bool:
        """Whether it is frozen when nothing of it is on its way any more."""
        await asyncio.wait((frozen.settled,))
        return self._link.frozen.get(identity) is frozen

    async def _import_begin(self, identity: Identity, kv_format: str) -> ImportRefusal | None:
        if kv_format not in (NO_KV, self._kv_format):
            return ImportRefusal.KV_FORMAT
        refusal = self._inbox.reserve(identity)
        if refusal is None:
            self._imports[identity] = kv_format
        return refusal

    async def _import_blocks(self, identity: Identity) -> ImportRefusal:
        return ImportRefusal.MISFIT if identity in self._imports else ImportRefusal.UNKNOWN

    async def _import_commit(self, state: EngineState, attempt: int) -> ImportRefusal | None:
        identity = (state.request.request_id, attempt)
        kv_format = self._imports.get(identity)
        if kv_format is None:
            return ImportRefusal.UNKNOWN
        if kv_format not in (NO_KV, state.kv_format):
            return ImportRefusal.KV_FORMAT
        try:
            params = decode_handle(state.kv_handle) if kv_format != NO_KV else None
        except msgspec.MsgspecError:
            return ImportRefusal.MISFIT
        del self._imports[identity]
        await self._link.bring(state.request, attempt, params)
        return None

    async def _import_abort(self, identity: Identity) -> bool:
        return self.drop_import(identity)


async def _no_blocks() -> int:
    return 0


async def _no_bytes() -> memoryview:
    return memoryview(b"")
