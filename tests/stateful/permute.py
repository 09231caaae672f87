"""Moves the live blocks of an engine to other places while it runs: only a cache that is really paged survives it."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Mapping

from cluster.engine.engine import Engine


def permute_blocks(engine: Engine, move_blocks: Callable[[Mapping[int, int]], None], rng: random.Random) -> int:
    """Shuffle all physical blocks, free and cached ones too, in the tables and in the backend's memory.

    `move_blocks(moved)` must carry the content of each block `old` to block `moved[old]`, as one permutation; for a
    tensor whose first axis is the block: `new = cache.clone(); new[list(moved.values())] = cache[list(moved)]`.

    Returns how many blocks of live requests are elsewhere now.
    """
    pool = engine.pool
    places = list(range(pool.blocks_total))
    rng.shuffle(places)
    moved = dict(enumerate(places))
    live = [block for table in pool._tables.values() for block in table]
    pool._tables = {key: tuple(moved[b] for b in table) for key, table in pool._tables.items()}
    pool._free = [moved[b] for b in pool._free]
    pool._cached = OrderedDict((moved[b], None) for b in pool._cached)
    pool._hashes = {moved[b]: prefix_hash for b, prefix_hash in pool._hashes.items()}
    pool._by_hash = {prefix_hash: moved[b] for prefix_hash, b in pool._by_hash.items()}
    refs = list(pool._refs)
    for old, new in moved.items():
        pool._refs[new] = refs[old]
    move_blocks(moved)
    return sum(moved[b] != b for b in live)
