"""A backend whose arithmetic betrays every error of book-keeping.

It is a real paged store: tokens are written to blocks through the block table, and the next token is a hash of all
tokens of the sequence *read back through the block table*. A wrong position, a block that two sequences write to, a
stale prefix, a swap that mixes blocks up, a missing recompute or a token run twice changes what is read, hence the
output. A position holds the hash of all tokens up to its own, as a key or a value depends on all tokens before it: a
block that is right only by itself does not pass.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence

from cluster.ports import Row, RowOutput, SampleSpec
from cluster.types import TokenLogprob

EMPTY = bytes(8)
POSITION_BYTES = 8


def extended(state: bytes, token_id: int) -> bytes:
    """What a position holds: a hash of what the one before it holds and of its own token."""
    return hashlib.blake2b(state + struct.pack("<i", token_id), digest_size=POSITION_BYTES).digest()


def digest(states: Iterable[bytes]) -> bytes:
    """What the next token is drawn from: a hash of what all positions before it hold."""
    return hashlib.blake2b(b"".join(states), digest_size=POSITION_BYTES).digest()


def logprob(state: bytes, token_id: int, vocab_size: int, top: int) -> TokenLogprob:
    """A made-up score of a token after `state`; `top` more of tokens that follow from it."""
    first = int.from_bytes(state, "little")
    ids = [(first + k) % vocab_size for k in range(top)]
    return TokenLogprob(_score(state, token_id), tuple((i, _score(state, i)) for i in ids))


def _score(state: bytes, token_id: int) -> float:
    return -int.from_bytes(extended(state, token_id)[:2], "little") / 1000


def draw(state: bytes, sample: SampleSpec, vocab_size: int) -> RowOutput:
    """The token after `state`: all that is in the specification shifts it, so that anything left out is seen."""
    number = int.from_bytes(state, "little")
    if sample.temperature > 0:
        number += int(sample.uniform * vocab_size) + round(1000 * sample.min_p)
    number += sum(token_id * round(value) for token_id, value in sample.bias)
    if (p := sample.penalties) is not None:
        number += round(10 * (p.presence + p.frequency + p.repetition))
        number += sum((k + 1) * n for k, n in p.output_counts.items()) + 3 * sum(p.prompt_ids)
    while number % vocab_size in sample.banned:
        number += 1
    token_id = number % vocab_size
    told = None if sample.logprobs is None else logprob(state, token_id, vocab_size, sample.logprobs)
    return RowOutput(token_id, told)


class ArithmeticBackend:
    kv_format = "arithmetic"

    def __init__(self, blocks: int, block_size_tokens: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.block_size_tokens = block_size_tokens
        self.kv_block_bytes = block_size_tokens * POSITION_BYTES
        self.store = [[EMPTY] * block_size_tokens for _ in range(blocks)]
        self.batches: list[tuple[Row, ...]] = []
        self.padding_tokens = 0
        self.copies: list[tuple[int, int]] = []

    def run(self, rows: Sequence[Row], padding_tokens: int = 0) -> list[RowOutput]:
        self.batches.append(tuple(rows))
        self.padding_tokens += padding_tokens
        written: set[tuple[int, int]] = set()
        read: set[int] = set()
        for row in rows:
            end = row.start + len(row.token_ids)
            if len(row.block_table) != -(-end // self.block_size_tokens):
                raise ValueError(f"{len(row.block_table)} blocks named for {end} positions")
            read.update(row.block_table[: row.start // self.block_size_tokens])
            state = self._at(row, row.start - 1)
            for position, token_id in enumerate(row.token_ids, start=row.start):
                place = self._slot(row, position)
                if place in written:
                    raise ValueError("two rows write to one place")
                written.add(place)
                state = extended(state, token_id)
                self.store[place[0]][place[1]] = state
        if read & {block for block, _ in written}:
            raise ValueError("a row writes to a full block that another reads")
        return [self._output(row) for row in rows]

    def copy_block(self, source: int, target: int) -> None:
        self.copies.append((source, target))
        self.store[target] = list(self.store[source])

    def save_blocks(self, blocks: Sequence[int]) -> memoryview:
        return memoryview(b"".join(b"".join(self.store[block]) for block in blocks))

    def load_blocks(self, blocks: Sequence[int], saved: memoryview) -> None:
        if saved.nbytes != len(blocks) * self.kv_block_bytes:
            raise ValueError(f"{saved.nbytes} bytes for {len(blocks)} blocks")
        for k, block in enumerate(blocks):
            start = k * self.kv_block_bytes
            data = bytes(saved[start : start + self.kv_block_bytes])
            self.store[block] = [data[i : i + POSITION_BYTES] for i in range(0, len(data), POSITION_BYTES)]

    def move_blocks(self, moved: Mapping[int, int]) -> None:
        """Carry the content of block `old` to block `moved[old]`, all at once; `moved` is a permutation."""
        store = list(self.store)
        for old, new in moved.items():
            store[new] = self.store[old]
        self.store = store

    def _slot(self, row: Row, position: int) -> tuple[int, int]:
        return row.block_table[position // self.block_size_tokens], position % self.block_size_tokens

    def _at(self, row: Row, position: int) -> bytes:
        """What the position holds; nothing before the first."""
        if position < 0:
            return b""
        block, offset = self._slot(row, position)
        return self.store[block][offset]

    def _output(self, row: Row) -> RowOutput:
        scores: tuple[TokenLogprob, ...] = ()
        if row.score is not None:
            scores = tuple(
                logprob(self._at(row, row.start + k), target, self.vocab_size, row.score.top)
                for k, target in enumerate(row.score.targets)
            )
        if row.sample is None:
            return RowOutput(scores=scores)
        drawn = draw(self._digest(row), row.sample, self.vocab_size)
        return RowOutput(drawn.token_id, drawn.logprob, scores)

    def _digest(self, row: Row) -> bytes:
        """Of the sequence, each position read through the block table."""
        return digest(self._at(row, position) for position in range(row.start + len(row.token_ids)))
