"""Which replica's prefix cache holds which blocks, as the replicas tell it.

Owns: that knowledge, and the chain of hashes of one prompt. Imports cluster and nothing of ours beside. Single writer.
Invariants: of an incarnation it is what that one has told since it last began afresh, and nothing once it is dropped;
a tenant's chain finds no other tenant's blocks, for its root is the tenant's (cluster/engine/prefix.py); what is
remembered is bounded. What is known lags behind the engine by a frame, and two hashes that agree in 8 bytes are one
here: either costs a placement that is not the best one, and never an answer.

How. The replicas that tell have a bit each, and each block's hash is remembered with the bits of those that hold it. Of
all replicas at once the leading blocks of a prompt are then found in one walk down its chain: the holders of a block are
those of the one before that hold it too. A walk of 100 blocks is some 15 us however many replicas there are, and it ends
where nobody holds more.

Replicas of one pool have blocks of one size. One with blocks of another size than the first that told is not followed.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from cluster.engine.prefix import extend, number_of, numbers_of, root
from cluster.types import Generation, PrefixChange, ReplicaId, Request

CHAIN_BLOCKS = 1024
"""Of a longer prompt only so many are looked up: hashing them takes about a millisecond, once."""
FAVOURED = 4
"""Of more than `scan` holders, so many are named, of those that hold most."""


class Chain:
    """The hashes of a prompt's full blocks, made when they are asked for. The block that its last token is in is none: that
    token is always computed."""

    __slots__ = ("_numbers", "_parent", "_prompt_ids", "block_size_tokens", "blocks", "memo", "place")

    def __init__(self, request: Request, block_size_tokens: int) -> None:
        self.block_size_tokens = block_size_tokens
        self.blocks = min((len(request.prompt_ids) - 1) // block_size_tokens, CHAIN_BLOCKS)
        self.place = zlib.crc32(request.request_id.encode())
        """By this, requests of one prompt name different ones of many holders, and the same request the same."""
        self.memo: tuple[int, Mapping[ReplicaId, int]] | None = None
        """For whoever looks it up: the version of what is known, and what was found."""
        self._prompt_ids = request.prompt_ids
        self._numbers: list[int] = []
        self._parent = root(request.tenant)

    def number(self, index: int) -> int:
        """Of block `index`; asked for in order."""
        if index == len(self._numbers):
            start = index * self.block_size_tokens
            self._parent = extend(self._parent, self._prompt_ids[start : start + self.block_size_tokens])
            self._numbers.append(number_of(self._parent))
        return self._numbers[index]


@dataclass(slots=True)
class _Holder:
    """One incarnation that tells."""

    replica_id: ReplicaId
    generation: Generation
    bit: int
    numbers: set[int] = field(default_factory=set)
    """Of the blocks that it holds and that are remembered."""


class Prefixes:
    """What the replicas of one pool hold."""

    def __init__(self, entries_max: int, scan: int) -> None:
        """
        Args:
            entries_max: Blocks that are remembered, counted once for each holder. What is told beyond that is not.
            scan: Up to so many holders, all are named.
        """
        self._entries_max = entries_max
        self._scan = scan
        self._entries = 0
        self._block_size_tokens: int | None = None
        self._holders: dict[ReplicaId, _Holder] = {}
        self._by_bit: list[ReplicaId | None] = []
        self._free_bits: list[int] = []
        self._all = 0
        """The bits of all holders."""
        self._where: dict[int, int] = {}
        """Number of a block's hash -> bits of its holders; never 0."""
        self._version = 0

    def __len__(self) -> int:
        """Blocks that are remembered, once for each holder."""
        return self._entries

    # --- what the replicas tell ---

    def tell(self, replica_id: ReplicaId, generation: Generation, block_size_tokens: int, change: PrefixChange) -> None:
        """An incarnation has told of its prefix cache; one that has never begun afresh is not heard."""
        holder = self._holders.get(replica_id)
        if change.afresh:
            if holder is not None:
                self._drop(holder)
            holder = self._add(replica_id, generation, block_size_tokens)
        if holder is None or holder.generation != generation:
            return
        self._version += 1
        where, bit, mine = self._where, holder.bit, holder.numbers
        for number in numbers_of(change.gone):
            if number in mine:
                mine.remove(number)
                self._forget(number, bit)
        room = self._entries_max - self._entries
        for number in numbers_of(change.held):
            if number not in mine and room > 0:
                mine.add(number)
                where[number] = where.get(number, 0) | bit
                room -= 1
        self._entries = self._entries_max - room

    def drop(self, replica_id: ReplicaId, generation: Generation) -> None:
        """This incarnation is gone, with all that it held."""
        holder = self._holders.get(replica_id)
        if holder is not None and holder.generation == generation:
            self._drop(holder)

    def follows(self, replica_id: ReplicaId, generation: Generation) -> bool:
        """Whether it is known what this incarnation holds, be it nothing."""
        holder = self._holders.get(replica_id)
        return holder is not None and holder.generation == generation

    # --- what a prompt finds ---

    def chain(self, request: Request) -> Chain | None:
        """Of a request's prompt, to be looked up; None while nobody holds anything."""
        size = self._block_size_tokens
        return None if size is None or not self._where else Chain(request, size)

    def found(self, chain: Chain) -> Mapping[ReplicaId, int]:
        """How many of the chain's leading blocks each replica holds, those with most first; of more than `scan` that hold
        any, a few of those that hold most."""
        if chain.memo is None or chain.memo[0] != self._version:
            chain.memo = self._version, self._find(chain)
        return chain.memo[1]

    def held(self, chain: Chain, replica_id: ReplicaId) -> int:
        """How many of the chain's leading blocks this one replica holds."""
        holder = self._holders.get(replica_id)
        if holder is None or chain.block_size_tokens != self._block_size_tokens:
            return 0
        for index in range(chain.blocks):
            if chain.number(index) not in holder.numbers:
                return index
        return chain.blocks

    # --- inner workings ---

    def _find(self, chain: Chain) -> dict[ReplicaId, int]:
        if chain.block_size_tokens != self._block_size_tokens:
            return {}
        where, bits = self._where, self._all
        levels: list[tuple[int, int]] = []
        """(blocks, bits of those that hold no more)"""
        for index in range(chain.blocks):
            holding = bits & where.get(chain.number(index), 0)
            if holding != bits:
                if index:
                    levels.append((index, bits ^ holding))
                bits = holding
                if not bits:
                    break
        else:
            if chain.blocks:
                levels.append((chain.blocks, bits))
        found: dict[ReplicaId, int] = {}
        many = sum(holders.bit_count() for _, holders in levels) > self._scan
        for blocks, holders in reversed(levels):
            for bit in _bits_from(holders, chain.place % len(self._by_bit)):
                replica_id = self._by_bit[bit]
                assert replica_id is not None
                found[replica_id] = blocks
                if many and len(found) >= FAVOURED:
                    return found
        return found

    def _add(self, replica_id: ReplicaId, generation: Generation, block_size_tokens: int) -> _Holder | None:
        if self._holders and block_size_tokens != self._block_size_tokens:
            return None
        self._block_size_tokens = block_size_tokens
        if self._free_bits:
            place = self._free_bits.pop()
            self._by_bit[place] = replica_id
        else:
            place = len(self._by_bit)
            self._by_bit.append(replica_id)
        holder = self._holders[replica_id] = _Holder(replica_id, generation, 1 << place)
        self._all |= holder.bit
        return holder

    def _drop(self, holder: _Holder) -> None:
        self._version += 1
        for number in holder.numbers:
            self._forget(number, holder.bit)
        self._all ^= holder.bit
        place = holder.bit.bit_length() - 1
        self._by_bit[place] = None
        self._free_bits.append(place)
        del self._holders[holder.replica_id]
        if not self._holders:
            self._block_size_tokens = None

    def _forget(self, number: int, bit: int) -> None:
        left = self._where[number] ^ bit
        if left:
            self._where[number] = left
        else:
            del self._where[number]
        self._entries -= 1


def _bits_from(bits: int, first: int) -> Iterator[int]:
    """The places of the bits that are set, from `first` on and around."""
    later = bits >> first << first
    for part in (later, bits ^ later):
        left = part
        while left:
            lowest = left & -left
            yield lowest.bit_length() - 1
            left ^= lowest
