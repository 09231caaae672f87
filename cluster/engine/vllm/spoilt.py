"""KV blocks that hold what is no number.

Owns: which blocks they are, until somebody else gets them. Imports vLLM's internals as types alone. Invariant: whoever
gets such a block finds it cleared.

A request whose logits are no numbers has written such keys and values. vLLM's attention on CPUs gives what lies behind the
end of a sequence, in its last block, no weight, but multiplies it: zero times NaN is NaN, and the block's next owner would
be spoilt too. vLLM can have blocks cleared before a step, and does so of itself only where a model needs it for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cluster.engine.vllm.internals import KVCacheManager


class SpoiltBlocks:
    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager
        self._ids: set[int] = set()
        for of_one_kind in manager.coordinator.single_type_managers:
            of_one_kind._record_new_block_ids = True

    def note(self, nans: Mapping[str, int] | None, live: Iterable[str]) -> None:
        """After a step: the counts of NaNs by core id. `live`: whose blocks are still known."""
        if nans is None or not any(nans.values()):
            return
        for core_id in live:
            if nans.get(core_id):
                self._ids.update(block.block_id for block in self._manager.get_blocks(core_id).blocks[0])

    def given_away(self) -> list[int] | None:
        """Before a step: those that somebody new has got since the last one, to be cleared; no more spoilt from now on."""
        given = self._ids.intersection(self._manager.take_new_block_ids())
        self._ids -= given
        return sorted(given) or None
