"""The KV pool: which physical block holds which part of which sequence.

Owns: the free list and the block tables, and nothing of what is in the blocks (that is the backend's). Imports nothing
of ours. Invariant: every block is free or in exactly one table, once; `check_integrity` recomputes it from scratch and
raises, in production too.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class IntegrityError(RuntimeError):
    """Book-keeping contradicts itself: going on could give one request the tokens of another."""


class BlockPool(Generic[K]):
    """A fixed number of equal blocks, lent to sequences that are named by a key.

    A table is a tuple, so that it goes into a row of a batch without a copy; it grows by replacement, once per block.
    """

    __slots__ = ("_free", "_tables", "block_size_tokens", "blocks_total")

    def __init__(self, blocks: int, block_size_tokens: int) -> None:
        self.blocks_total = blocks
        self.block_size_tokens = block_size_tokens
        self._free = list(range(blocks - 1, -1, -1))
        self._tables: dict[K, tuple[int, ...]] = {}

    @property
    def blocks_free(self) -> int:
        return len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold so many tokens of one sequence."""
        return -(-tokens // self.block_size_tokens)

    def can_allocate(self, blocks: int) -> bool:
        return blocks <= len(self._free)

    def allocate(self, key: K, blocks: int) -> None:
        """Append `blocks` blocks to the table of `key`. Ask `can_allocate` first.

        Raises:
            IntegrityError: there are not so many; nothing has been taken.
        """
        if not 0 < blocks <= len(self._free):
            raise IntegrityError(f"{blocks} blocks asked for, {len(self._free)} of {self.blocks_total} free")
        taken = tuple(reversed(self._free[-blocks:]))
        del self._free[-blocks:]
        self._tables[key] = self._tables.get(key, ()) + taken

    def free(self, key: K) -> int:
        """Take back all blocks of `key`. Returns how many there were.

        Raises:
            IntegrityError: `key` holds none, so it was freed before or never allocated.
        """
        table = self._tables.pop(key, None)
        if table is None:
            raise IntegrityError("blocks freed of a sequence that holds none")
        self._free.extend(reversed(table))
        return len(table)

    def table(self, key: K) -> tuple[int, ...]:
        """Physical blocks of `key` in the order of its positions; empty if it holds none."""
        return self._tables.get(key, ())

    def check_integrity(self, tokens_held: Mapping[K, int]) -> None:
        """Recount everything. `tokens_held` says for each sequence that holds blocks how many positions are written.

        Raises:
            IntegrityError: free + used is not the pool; a block is in two places; a table is shorter than its
                sequence; a table belongs to nobody, or a sequence has no table.
        """
        used = [block for table in self._tables.values() for block in table]
        if len(self._free) + len(used) != self.blocks_total:
            raise IntegrityError(f"{len(self._free)} free + {len(used)} used blocks are not {self.blocks_total}")
        if set(used).union(self._free) != set(range(self.blocks_total)):
            raise IntegrityError("a block is in two places, or in none")
        if self._tables.keys() != tokens_held.keys():
            raise IntegrityError(
                f"{len(self._tables.keys() - tokens_held.keys())} tables belong to nobody, "
                f"{len(tokens_held.keys() - self._tables.keys())} sequences have none"
            )
        for key, tokens in tokens_held.items():
            room = len(self._tables[key]) * self.block_size_tokens
            if tokens > room:
                raise IntegrityError(f"a table has room for {room} tokens and holds {tokens}")
