"""A backend whose arithmetic betrays every error of book-keeping.

It is a real paged store: tokens are written to blocks through the block table, and the next token is a hash of all
tokens of the sequence *read back through the block table*. A wrong position, a block that two sequences share, a
missing recompute or a token run twice changes what is read, hence the output.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from cluster.ports import Row, SampleSpec

EMPTY = -1


def next_token(token_ids: Sequence[int], sample: SampleSpec, vocab_size: int) -> int:
    """The token after `token_ids`: a hash of them all, shifted by the uniform number if one is to be drawn."""
    digest = hashlib.blake2b(b"".join(t.to_bytes(4, "little", signed=True) for t in token_ids), digest_size=8).digest()
    shift = int(sample.uniform * vocab_size) if sample.temperature > 0 else 0
    return (int.from_bytes(digest, "little") + shift) % vocab_size


class ArithmeticBackend:
    def __init__(self, blocks: int, block_size_tokens: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.block_size_tokens = block_size_tokens
        self.store = [[EMPTY] * block_size_tokens for _ in range(blocks)]
        self.batches: list[tuple[Row, ...]] = []

    def run(self, rows: Sequence[Row]) -> list[int]:
        self.batches.append(tuple(rows))
        written: set[tuple[int, int]] = set()
        for row in rows:
            end = row.start + len(row.token_ids)
            if len(row.block_table) != -(-end // self.block_size_tokens):
                raise ValueError(f"{len(row.block_table)} blocks named for {end} positions")
            for position, token_id in enumerate(row.token_ids, start=row.start):
                block, offset = self._slot(row, position)
                if (block, offset) in written:
                    raise ValueError("two rows write to one place")
                written.add((block, offset))
                self.store[block][offset] = token_id
        return [next_token(self._read(row), row.sample, self.vocab_size) for row in rows if row.sample is not None]

    def move_blocks(self, moved: Mapping[int, int]) -> None:
        """Carry the content of block `old` to block `moved[old]`, all at once; `moved` is a permutation."""
        store = list(self.store)
        for old, new in moved.items():
            store[new] = self.store[old]
        self.store = store

    def _slot(self, row: Row, position: int) -> tuple[int, int]:
        return row.block_table[position // self.block_size_tokens], position % self.block_size_tokens

    def _read(self, row: Row) -> list[int]:
        tokens = []
        for position in range(row.start + len(row.token_ids)):
            block, offset = self._slot(row, position)
            tokens.append(self.store[block][offset])
        return tokens
