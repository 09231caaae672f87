"""What a prefix is called: the chain of hashes over the blocks of a sequence.

Owns: the hash, the hashes of one sequence, and how much of a hash is told to others. Imports cluster.types. Invariant: two
blocks have the same hash only if the same tenant's sequences agree in all tokens up to the block's end, so that another
tenant's prefix is never found (and the time that a lookup takes says nothing of what others have asked).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b
from sys import byteorder

from cluster.types import TOLD_BYTES, PrefixChange

HASH_BYTES = 16
KEPT_WHILE_WAITING = 128
"""Hashes that a waiting sequence keeps, 2 KiB; a longer prefix is hashed again from there when it is asked for."""

_NOTHING = blake2b(digest_size=HASH_BYTES)
"""Copied for each block, which takes three quarters of the time of making one."""

Tokens = Callable[[int, int], Sequence[int]]
"""(start, end) -> the sequence's token ids of these positions."""


@lru_cache(maxsize=1024)
def root(tenant: str) -> bytes:
    """The parent of a tenant's first blocks."""
    return blake2b(tenant.encode(errors="surrogatepass"), digest_size=HASH_BYTES, person=b"prefix root").digest()


def extend(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The hash of a block: BLAKE2b, 16 bytes, over its parent's hash and its token ids."""
    return _chained(parent, _packed(token_ids))


def _packed(token_ids: Sequence[int]) -> bytes:
    return array("i", token_ids).tobytes()


def _chained(parent: bytes, packed_ids: bytes) -> bytes:
    digest = _NOTHING.copy()
    digest.update(parent + packed_ids)
    return digest.digest()


def change_of(changed: Collection[bytes], is_held: Callable[[bytes], bool]) -> PrefixChange | None:
    """What to tell of these hashes, each of which has come or gone since it was told last; None of none."""
    if not changed:
        return None
    held = [prefix_hash for prefix_hash in changed if is_held(prefix_hash)]
    gone = [prefix_hash for prefix_hash in changed if not is_held(prefix_hash)] if len(held) < len(changed) else ()
    return PrefixChange(_told(held), _told(gone))


def _told(hashes: Iterable[bytes]) -> bytes:
    return b"".join([prefix_hash[:TOLD_BYTES] for prefix_hash in hashes])


def numbers_of(told: bytes) -> array[int]:
    """The hashes of a `PrefixChange` as numbers of this machine's."""
    return array("Q", told)


def told_of(numbers: Collection[int]) -> bytes:
    """What `numbers_of` takes apart."""
    return array("Q", numbers).tobytes()


def number_of(prefix_hash: bytes) -> int:
    """One hash as `numbers_of` gives it."""
    return int.from_bytes(prefix_hash[:TOLD_BYTES], byteorder)


class PrefixHashes:
    """The hashes of one sequence's full blocks, made when they are asked for and packed into one buffer."""

    __slots__ = ("_block_size", "_packed", "_tenant", "memo")

    def __init__(self, tenant: str, block_size_tokens: int) -> None:
        self._tenant = tenant
        self._block_size = block_size_tokens
        self._packed = bytearray()
        self.memo: tuple[int, int, int, int] | None = None
        """For whoever looks the sequence up: (pool epoch, most blocks asked for, found, unheld of these)."""

    def of(self, index: int, tokens: Tokens) -> bytes:
        """The hash of block `index`, of which all tokens must be known; it and those before it are kept."""
        self._keep(index + 1, tokens)
        return self._at(index)

    def between(self, first: int, end: int, tokens: Tokens) -> list[bytes]:
        """Those of blocks `first` … `end` - 1, in the same way."""
        made, wanted = self._keep(end, tokens), end - first
        if wanted <= len(made):
            return made[len(made) - wanted :]
        packed = self._packed
        return [bytes(packed[i : i + HASH_BYTES]) for i in range(first * HASH_BYTES, end * HASH_BYTES, HASH_BYTES)]

    def found(self, limit: int, tokens: Tokens, find: Callable[[bytes], int | None]) -> list[int]:
        """Blocks that `find` knows for the beginning of the sequence, `limit` at most."""
        blocks: list[int] = []
        kept = len(self._packed) // HASH_BYTES
        parent = self._at(-1)
        for index in range(limit):
            if index < kept:
                parent = self._at(index)
            else:
                parent = self._extend(parent, index, tokens)
                if index < KEPT_WHILE_WAITING:
                    self._packed += parent
                    kept += 1
            block = find(parent)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def trim(self) -> None:
        """The sequence waits: keep no more than a waiting one may."""
        del self._packed[KEPT_WHILE_WAITING * HASH_BYTES :]
        self.memo = None

    def _keep(self, blocks: int, tokens: Tokens) -> list[bytes]:
        """Have the hashes of so many blocks at least. Returns those that had to be made for it."""
        kept = len(self._packed) // HASH_BYTES
        made: list[bytes] = []
        if blocks <= kept:
            return made
        size, parent = self._block_size, self._at(kept - 1)
        packed_ids = _packed(tokens(kept * size, blocks * size))
        block_bytes = len(packed_ids) // (blocks - kept)
        for start in range(0, len(packed_ids), block_bytes):
            parent = _chained(parent, packed_ids[start : start + block_bytes])
            made.append(parent)
        self._packed += b"".join(made)
        return made

    def _extend(self, parent: bytes, index: int, tokens: Tokens) -> bytes:
        start = index * self._block_size
        return extend(parent, tokens(start, start + self._block_size))

    def _at(self, index: int) -> bytes:
        if index < 0:
            return root(self._tenant)
        return bytes(self._packed[index * HASH_BYTES : (index + 1) * HASH_BYTES])
