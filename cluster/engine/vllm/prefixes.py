"""What vLLM's prefix cache holds, by our names.

Owns: our hash of each block that vLLM finds by its own, and which have come and gone. Imports cluster.engine and vLLM's
internals. Invariant: all that was ever told together is what vLLM finds, for requests whose block before was found too.

How. vLLM keeps a map from its hashes to blocks, through which every block comes and goes; a map of ours stands in its place
and notes what changes. Ours are made when vLLM registers blocks of a request: from the name of the block before, or the
tenant's root, and the tokens. A block is found from the moment on at which a step that fills it is scheduled; whoever finds
it runs in that step or later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from cluster.engine.prefix import change_of, extend, root
from cluster.engine.vllm.internals import BlockHashToBlockMap
from cluster.types import PrefixChange

if TYPE_CHECKING:
    from cluster.engine.vllm.internals import BlockPool, CoreRequest, KVCacheBlock


class _WatchedMap(BlockHashToBlockMap):
    """`held` are blocks, not hashes: two may hold the same."""

    def __init__(self) -> None:
        super().__init__()
        self.changed: dict[bytes, None] = {}
        self.held = 0

    def insert(self, key: bytes, block: KVCacheBlock) -> None:
        super().insert(key, block)
        self.changed[key] = None
        self.held += 1

    def pop(self, key: bytes, block_id: int) -> KVCacheBlock | None:
        popped = super().pop(key, block_id)
        if popped is not None:
            self.changed[key] = None
            self.held -= 1
        return popped


class CorePrefixes:
    def __init__(self, pool: BlockPool, tenant_of: Callable[[str], str]) -> None:
        """`tenant_of`: by core id, of whoever may get blocks."""
        self._tenant_of = tenant_of
        self._map = pool.cached_block_hash_to_block = _WatchedMap()
        self._names: dict[bytes, bytes] = {}
        """vLLM's hash -> ours, of all that it finds and of what is still to be told as gone."""
        self._register = pool.cache_full_blocks
        pool.cache_full_blocks = self._cache_full_blocks

    @property
    def blocks(self) -> int:
        """Blocks that hold a prefix, used ones too."""
        return self._map.held

    def take_change(self) -> PrefixChange | None:
        """What has come and gone since this was asked last."""
        changed = self._map.changed
        if not changed:
            return None
        finds = self._map.get_one_block
        held = {name: finds(key) is not None for key in changed if (name := self._names.get(key)) is not None}
        for key in changed:
            if finds(key) is None:
                self._names.pop(key, None)
        changed.clear()
        return change_of(held, held.__getitem__)

    def _cache_full_blocks(
        self,
        request: CoreRequest,
        blocks: Sequence[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: list[bool] | None = None,
    ) -> None:
        """In the place of vLLM's, which registers blocks `num_cached_blocks` to `num_full_blocks` - 1."""
        self._register(request, blocks, num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id, block_mask)
        if num_cached_blocks == 0:
            name: bytes | None = root(self._tenant_of(request.request_id))
        else:
            name = self._name_of(blocks[num_cached_blocks - 1])
        for index in range(num_cached_blocks, num_full_blocks):
            key = blocks[index].block_hash
            if name is None or key is None:
                return
            name = extend(name, request.all_token_ids[index * block_size : (index + 1) * block_size])
            self._names[key] = name

    def _name_of(self, block: KVCacheBlock) -> bytes | None:
        return None if block.block_hash is None else self._names.get(block.block_hash)
