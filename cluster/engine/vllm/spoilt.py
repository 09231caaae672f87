"""KV blocks that hold what is no number.

Owns: which blocks they are, until somebody else gets them. Imports vLLM's internals as types alone. Invariants: whoever
gets such a block finds it cleared; none is found as anybody's prefix.

A request whose logits are no numbers has written such keys and values. vLLM's attention on CPUs gives what lies behind the
end of a sequence, in its last block, no weight, but multiplies it: zero times NaN is NaN, and the block's next owner would
be spoilt too. vLLM can have blocks cleared before a step, and does so of itself only where a model needs it for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cluster.engine.vllm.internals import CoreRequest, KVCacheManager


class SpoiltBlocks:
    def __init__(self, manager: KVCacheManager, block_size_tokens: int) -> None:
        self._manager = manager
        self._block_size = block_size_tokens
        self._ids: set[int] = set()
        """To be cleared."""
        self._noted: set[int] = set()
        """By the step that has just ended."""
        for of_one_kind in manager.coordinator.single_type_managers:
            of_one_kind._record_new_block_ids = True

    def note(self, nans: Mapping[str, int] | None, live: Iterable[str]) -> None:
        """When a step has ended, before anybody ends with it: the counts of NaNs by core id. `live`: whose blocks are still
        known."""
        if nans is None or not any(nans.values()):
            return
        for core_id in live:
            if nans.get(core_id):
                self._noted.update(block.block_id for block in self._manager.get_blocks(core_id).blocks[0])
        self._ids |= self._noted

    def evict(self) -> None:
        """When all that the step computed has been registered: what was noted of it is to be nobody's prefix."""
        if self._noted:
            self._manager.evict_blocks(self._noted)
            self._noted = set()

    def leave(self, request: CoreRequest) -> None:
        """A request is about to lose its blocks, perhaps in the midst of a step: what that still writes nobody will look at,
        so it counts as spoilt."""
        if request.num_in_flight_tokens:
            first = max(0, request.num_computed_tokens - request.num_in_flight_tokens) // self._block_size
            held = self._manager.get_blocks(request.request_id).blocks[0]
            self._ids.update(block.block_id for block in held[first:])

    def given_away(self) -> list[int] | None:
        """Before a step: those that somebody new has got since the last one, to be cleared; no more spoilt from now on."""
        given = self._ids.intersection(self._manager.take_new_block_ids())
        self._ids -= given
        return sorted(given) or None
