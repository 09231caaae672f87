"""The KV pool: which physical block holds which part of which sequence, and which prefixes are still in it.

Owns: the free blocks, the block tables, how many tables each block is in, and the prefix cache; nothing of what is in
the blocks (that is the backend's). Imports nothing of ours. Invariants: every block is free, cached (it holds a prefix
and is in no table) or used (in as many tables as its references say); a block that is cached or in two tables is never
written to; `check_integrity` recomputes all of it from scratch and raises, in production too.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from itertools import chain
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class IntegrityError(RuntimeError):
    """Book-keeping contradicts itself: going on could give one request the tokens of another."""


class BlockPool(Generic[K]):
    """A fixed number of equal blocks, lent to sequences that are named by a key.

    A table is a tuple, so that it goes into a row of a batch without a copy; it grows by replacement, once per block.

    A block whose content is final may be registered under the hash of all tokens up to its end. It stays findable when
    its sequence gives it back, and counts as free: an allocation that finds no plain free block takes the one that was
    given back longest ago; of one sequence's, the later before the earlier, for those are of use to fewer.
    """

    __slots__ = (
        "_by_hash",
        "_cached",
        "_changed",
        "_free",
        "_hashes",
        "_refs",
        "_tables",
        "block_size_tokens",
        "blocks_total",
        "epoch",
    )

    def __init__(self, blocks: int, block_size_tokens: int) -> None:
        self.blocks_total = blocks
        self.block_size_tokens = block_size_tokens
        self.epoch = 0
        """Changes whenever `find` or `unheld` could answer otherwise than before."""
        self._free = list(range(blocks - 1, -1, -1))
        self._refs = [0] * blocks
        self._tables: dict[K, tuple[int, ...]] = {}
        self._by_hash: dict[bytes, int] = {}
        self._hashes: dict[int, bytes] = {}
        """Registered block -> hash."""
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Registered blocks in no table, in the order in which they will be taken."""
        self._changed: dict[bytes, None] = {}
        """Hashes that have come or gone since they were taken."""

    @property
    def blocks_free(self) -> int:
        """In no table, those with prefixes in them included."""
        return len(self._free) + len(self._cached)

    @property
    def blocks_cached(self) -> int:
        """Those of the free that hold a prefix."""
        return len(self._cached)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold so many tokens of one sequence."""
        return -(-tokens // self.block_size_tokens)

    def can_allocate(self, blocks: int) -> bool:
        return blocks <= self.blocks_free

    def allocate(self, key: K, blocks: int) -> None:
        """Append `blocks` fresh blocks to the table of `key`. Ask `can_allocate` first.

        Raises:
            IntegrityError: there are not so many; nothing has been taken.
        """
        if not 0 < blocks <= self.blocks_free:
            raise IntegrityError(f"{blocks} blocks asked for, {self.blocks_free} of {self.blocks_total} free")
        while len(self._free) < blocks:
            self._evict()
        taken = tuple(reversed(self._free[-blocks:]))
        del self._free[-blocks:]
        for block in taken:
            self._refs[block] = 1
        self._tables[key] = self._tables.get(key, ()) + taken

    def share(self, key: K, blocks: Sequence[int]) -> None:
        """Begin the table of `key` with blocks that others hold, or that are cached.

        Raises:
            IntegrityError: `key` has a table already, or a block is neither held nor cached.
        """
        if key in self._tables:
            raise IntegrityError("blocks shared with a sequence that already holds some")
        if not all(self._refs[block] or block in self._cached for block in blocks):
            raise IntegrityError("a free block shared: nothing is known to be in it")
        for block in blocks:
            if not self._refs[block]:
                del self._cached[block]
            self._refs[block] += 1
        self.epoch += 1
        if blocks:
            self._tables[key] = tuple(blocks)

    def free(self, key: K) -> int:
        """Take back the table of `key`. Returns how many of its blocks became free.

        Raises:
            IntegrityError: `key` holds none, so it was freed before or never allocated.
        """
        table = self._tables.pop(key, None)
        if table is None:
            raise IntegrityError("blocks freed of a sequence that holds none")
        freed = 0
        for block in reversed(table):
            self._refs[block] -= 1
            if self._refs[block]:
                continue
            freed += 1
            if block in self._hashes:
                self._cached[block] = None
            else:
                self._free.append(block)
        self.epoch += 1
        return freed

    def table(self, key: K) -> tuple[int, ...]:
        """Physical blocks of `key` in the order of its positions; empty if it holds none."""
        return self._tables.get(key, ())

    def shared(self, key: K) -> list[tuple[int, int]]:
        """(block, number of tables that it is in) of those blocks of `key` that are in others' tables too."""
        refs = self._refs
        return [(block, refs[block]) for block in self.table(key) if refs[block] > 1]

    def may_write(self, block: int) -> bool:
        """Whether its content is one sequence's own: in one table only, and not registered."""
        return self._refs[block] == 1 and block not in self._hashes

    # --- the prefix cache ---

    def register(self, block: int, prefix_hash: bytes) -> None:
        """The content of a used block is final. Ignored where another block is registered under the same hash.

        Raises:
            IntegrityError: the block is free, or registered under another hash.
        """
        self.register_all((block,), (prefix_hash,))

    def register_all(self, blocks: Sequence[int], prefix_hashes: Sequence[bytes]) -> None:
        """The same of several."""
        refs, by_hash, hashes, changed = self._refs, self._by_hash, self._hashes, self._changed
        for block, prefix_hash in zip(blocks, prefix_hashes, strict=True):
            if not refs[block] or hashes.get(block, prefix_hash) != prefix_hash:
                raise IntegrityError("a block registered that is free, or that holds another prefix")
            if prefix_hash not in by_hash:
                by_hash[prefix_hash] = block
                hashes[block] = prefix_hash
                changed[prefix_hash] = None
                self.epoch += 1

    def forget(self, key: K) -> None:
        """What is in the blocks of `key` is not to be trusted: nobody finds it any more. Who shares it keeps it."""
        for block in self.table(key):
            if (prefix_hash := self._hashes.pop(block, None)) is not None:
                self._unregistered(prefix_hash)

    def find(self, prefix_hash: bytes) -> int | None:
        """The block, used or cached, that is registered under this hash."""
        return self._by_hash.get(prefix_hash)

    def is_registered(self, prefix_hash: bytes) -> bool:
        return prefix_hash in self._by_hash

    def unheld(self, blocks: Sequence[int]) -> int:
        """How many of these are in no table."""
        return sum(not self._refs[block] for block in blocks)

    def take_changed(self) -> tuple[bytes, ...]:
        """Hashes for which `find` may answer otherwise than when they were taken last. There are no more of them than have
        been registered since, and blocks."""
        changed = tuple(self._changed)
        self._changed.clear()
        return changed

    def _evict(self) -> None:
        block, _ = self._cached.popitem(last=False)
        self._unregistered(self._hashes.pop(block))
        self._free.append(block)

    def _unregistered(self, prefix_hash: bytes) -> None:
        del self._by_hash[prefix_hash]
        self._changed[prefix_hash] = None
        self.epoch += 1

    # --- the check ---

    def check_integrity(self, tokens_held: Mapping[K, int]) -> None:
        """Recount everything. `tokens_held` says for each sequence that holds blocks how many positions are written.

        Raises:
            IntegrityError: free + cached + used is not the pool; a block is in two states, or in a table twice; its
                references are not its tables; hashes and blocks do not match; a table is shorter than its sequence,
                belongs to nobody, or is missing.
        """
        held = Counter(chain.from_iterable(self._tables.values()))
        places, total, refs = [*self._free, *self._cached, *held], self.blocks_total, self._refs
        if len(places) != total or set(places) != set(range(total)):
            raise IntegrityError(
                f"{len(self._free)} free + {len(self._cached)} cached + {len(held)} used blocks are not "
                f"{self.blocks_total}, or a block is in two places"
            )
        if any(len(set(table)) != len(table) for table in self._tables.values()):
            raise IntegrityError("a block is in one table twice")
        # Those of the blocks that are held, and of no others.
        if [refs[block] for block in held] != [*held.values()] or refs.count(0) != total - len(held):
            raise IntegrityError("a block's references are not the tables that it is in")
        self._check_hashes()
        if self._tables.keys() != tokens_held.keys():
            raise IntegrityError(
                f"{len(self._tables.keys() - tokens_held.keys())} tables belong to nobody, "
                f"{len(tokens_held.keys() - self._tables.keys())} sequences have none"
            )
        for key, tokens in tokens_held.items():
            room = len(self._tables[key]) * self.block_size_tokens
            if tokens > room:
                raise IntegrityError(f"a table has room for {room} tokens and holds {tokens}")

    def _check_hashes(self) -> None:
        by_hash, hashes = self._by_hash, self._hashes
        if len(by_hash) != len(hashes) or [*map(hashes.get, by_hash.values())] != [*by_hash]:
            raise IntegrityError("registered blocks and their hashes do not match")
        if not self._cached.keys() <= hashes.keys() or not hashes.keys().isdisjoint(self._free):
            raise IntegrityError("a cached block is registered nowhere, or a plain free one is")
