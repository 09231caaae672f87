"""A KV connector that takes its time, with a folder between the engines: blocks are written and read some steps after they
were asked for, and are the source's until they are written.

What it needs to know of vLLM's layout it has from ExampleConnector: the first dimension of a layer's cache is the block.
A handle whose folder says so fails to load, and one whose file is not there yet waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # type: ignore[import-not-found, unused-ignore]
    KVConnectorBase_V1,
    KVConnectorMetadata,
)
from vllm.v1.request import RequestStatus  # type: ignore[import-not-found, unused-ignore]

STEPS_LATER = 3
"""Turns of the engine that a transfer takes."""
BROKEN = "broken"
"""Part of a file's name whose reading fails."""


@dataclass
class Transfer:
    request_id: str
    block_ids: list[int]
    path: str
    first_block: int = 0
    turns_left: int = STEPS_LATER


@dataclass
class Orders(KVConnectorMetadata):  # type: ignore[misc, unused-ignore]
    sends: list[Transfer] = field(default_factory=list)
    receives: list[Transfer] = field(default_factory=list)


class LaterConnector(KVConnectorBase_V1):  # type: ignore[misc, unused-ignore]
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._block_size = vllm_config.cache_config.block_size
        self._folder = self._kv_transfer_config.get_from_extra_config("folder", "")
        self._orders = Orders()
        self._caches: dict[str, torch.Tensor] = {}
        self._under_way = Orders()
        self._failed_blocks: set[int] = set()

    # --- the scheduler's side ---

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        params = request.kv_transfer_params or {}
        if not params.get("path"):
            return 0, False
        # All, as NIXL does, though the source has not computed the last.
        tokens = request.num_prompt_tokens - num_computed_tokens
        return (tokens, True) if tokens > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        params = request.kv_transfer_params or {}
        if num_external_tokens:
            block_ids = blocks.get_block_ids()[0]
            first = (request.num_prompt_tokens - 1 - num_external_tokens) // self._block_size
            self._orders.receives.append(
                Transfer(request.request_id, block_ids[first:], params.pop("path"), first_block=first)
            )

    def build_connector_meta(self, scheduler_output: Any) -> Orders:
        orders, self._orders = self._orders, Orders()
        return orders

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_decode") or request.status is not RequestStatus.FINISHED_LENGTH_CAPPED:
            return False, None
        path = f"{self._folder}/{request.request_id.replace('#', '-')}"
        self._orders.sends.append(Transfer(request.request_id, block_ids, path))
        return True, {"path": path}

    # --- the worker's side ---

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        orders = self._get_connector_metadata()
        self._under_way.sends.extend(orders.sends)
        self._under_way.receives.extend(orders.receives)

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        sent = {t.request_id for t in self._due(self._under_way.sends) if self._write(t)}
        received = {t.request_id for t in self._due(self._under_way.receives) if self._read(t)}
        for transfers, done in ((self._under_way.sends, sent), (self._under_way.receives, received)):
            transfers[:] = [t for t in transfers if t.request_id not in done]
        return sent, received

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    @staticmethod
    def _due(transfers: list[Transfer]) -> list[Transfer]:
        for transfer in transfers:
            transfer.turns_left -= 1
        return [t for t in transfers if t.turns_left <= 0]

    def _write(self, transfer: Transfer) -> bool:
        blocks = {name: cache[transfer.block_ids].clone() for name, cache in self._caches.items()}
        part = Path(f"{transfer.path}.part")
        torch.save(blocks, part)
        part.rename(transfer.path)
        return True

    def _read(self, transfer: Transfer) -> bool:
        if BROKEN in transfer.path:
            self._failed_blocks.update(transfer.block_ids)
            return True
        if not Path(transfer.path).exists():
            return False
        blocks = torch.load(transfer.path)
        for name, cache in self._caches.items():
            came = blocks[name][transfer.first_block :]
            assert len(came) == len(transfer.block_ids), "the target asks for other blocks than the source has"
            cache[transfer.block_ids] = came
        return True
