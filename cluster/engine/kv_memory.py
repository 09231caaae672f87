"""Where the keys and values of one engine's requests are, and the copies between these places.

Owns: the block pool, what is swapped out to host memory, and every call that moves blocks. Imports cluster and
cluster.engine, never a backend. Invariants: a request's keys and values are in its blocks, or in host memory, or nowhere
(then `computed` is 0); `blocks`, `host_blocks` and `computed` of its state say so; nothing is written to a block that
another request or the prefix cache counts on; where the backend fails to copy, they are nowhere.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from cluster.config import EngineConfig
from cluster.engine.kv_cache import BlockPool, IntegrityError
from cluster.engine.live import Live
from cluster.engine.prefix import change_of
from cluster.engine.scheduling.plan import Admission
from cluster.engine.scheduling.sequence import Identity, SequenceState
from cluster.ports import Backend
from cluster.types import PrefixChange

log = logging.getLogger(__name__)


class KvMemory:
    """The pool, host memory, and the backend that holds the bytes."""

    def __init__(self, config: EngineConfig, backend: Backend) -> None:
        self.pool: BlockPool[Identity] = BlockPool(config.blocks, config.block_size_tokens)
        self.hit_tokens_total = 0
        """Tokens that were found in the prefix cache, or shared by a sibling, instead of being computed."""
        self._block_size = config.block_size_tokens
        self._keeps_prefixes = config.prefix_cache
        self._host_blocks_total = config.host_blocks
        self._host_blocks_used = 0
        self._saved: dict[Identity, memoryview] = {}
        self._backend = backend

    # --- what a plan asks ---

    @property
    def host_blocks_free(self) -> int:
        return self._host_blocks_total - self._host_blocks_used

    def cached_blocks(self, live: Live) -> int:
        """Blocks that the prefix cache has for the beginning of a request that holds none."""
        return self._look_up(live)[0]

    def unheld_blocks(self, live: Live) -> int:
        """How many of these nobody holds."""
        return self._look_up(live)[1]

    def shared_blocks(self, state: SequenceState) -> list[tuple[int, int]]:
        """Those of its blocks that others hold too, each with the number of all its holders."""
        return self.pool.shared(state.identity)

    def _look_up(self, live: Live) -> tuple[int, int]:
        limit = self._limit(live)
        memo = live.hashes.memo
        if memo is None or memo[:2] != (self.pool.epoch, limit):
            found = live.hashes.found(limit, live.tokens, self.pool.find)
            live.hashes.memo = memo = (self.pool.epoch, limit, len(found), self.pool.unheld(found))
        return memo[2:]

    def _limit(self, live: Live) -> int:
        """Blocks that may be looked up: one token is always run, and all of a prompt that is to be scored."""
        return (live.state.tokens - 1) // self._block_size if self._keeps_prefixes and not live.must_score else 0

    # --- carrying out a plan ---

    def share(self, live: Live, admission: Admission) -> None:
        """First half of an admission: hold what it shares. Done for all admissions of a plan before the second half, in
        which fresh blocks may displace cached ones.

        Raises:
            IntegrityError: what the plan saw is not there.
        """
        state, source = live.state, admission.source
        if source is None and not admission.cached:
            return
        if state.blocks or state.host_blocks:
            raise IntegrityError("a request that has keys and values is to begin with another's")
        if source is not None:
            shared = (state.prompt_tokens - 1) // self._block_size
            if not source.blocks or source.computed < state.prompt_tokens - 1:
                raise IntegrityError("a prompt is to be shared that has not been computed")
            blocks = self.pool.table(source.identity)[:shared]
        else:
            blocks = tuple(live.hashes.found(admission.cached, live.tokens, self.pool.find))
            if len(blocks) < admission.cached or admission.cached > self._limit(live):
                raise IntegrityError("a prefix is to be shared that is not cached")
        self.pool.share(state.identity, blocks)
        state.blocks = len(blocks)
        state.computed = len(blocks) * self._block_size

    def fill(self, live: Live, admission: Admission) -> bool:
        """Second half: its fresh blocks, and what must be copied into them. False where the backend fails to copy: then
        it has nothing any more, and is to compute all of it."""
        state, source = live.state, admission.source
        shares = source is not None or admission.cached > 0
        if shares:
            live.registered = state.computed // self._block_size
        self.grow(state, admission.blocks)
        try:
            if state.host_blocks:
                self._swap_in(state)
            if source is not None and state.computed < state.prompt_tokens - 1:
                self._copy_last(source, state)
        except Exception as error:
            log.error("keys and values could not be copied; they are computed again", exc_info=error)
            self.drop(live)
            return False
        if live.cached_tokens is None:
            live.cached_tokens = min(state.computed, state.prompt_tokens) if shares else 0
        if shares:
            self.hit_tokens_total += state.computed
        return True

    def grow(self, state: SequenceState, blocks: int) -> None:
        """Give it more blocks; 0 gives none."""
        if blocks:
            self.pool.allocate(state.identity, blocks)
            state.blocks += blocks

    def swap_out(self, live: Live) -> int:
        """Copy what is computed to host memory and give the blocks back. Returns how many became free. Where the backend
        fails to copy, what is computed is dropped.

        Raises:
            IntegrityError: host memory has no room for it, or it holds no blocks.
        """
        state = live.state
        blocks = self.pool.blocks_for(state.computed)
        if blocks > self.host_blocks_free:
            raise IntegrityError(f"{blocks} blocks to be swapped out, room for {self.host_blocks_free}")
        if blocks:
            try:
                saved = self._backend.save_blocks(self.pool.table(state.identity)[:blocks])
            except Exception as error:
                log.error("keys and values could not be swapped out; they are dropped", exc_info=error)
                return self.drop(live)
            self._saved[state.identity] = saved
            self._host_blocks_used += blocks
        freed = self.pool.free(state.identity)
        state.blocks, state.host_blocks, live.registered = 0, blocks, 0
        return freed

    def drop(self, live: Live) -> int:
        """Give back all that it holds, here and in host memory. Returns how many blocks became free."""
        state = live.state
        freed = self.pool.free(state.identity) if state.blocks else 0
        if state.host_blocks:
            del self._saved[state.identity]
            self._host_blocks_used -= state.host_blocks
        state.blocks = state.host_blocks = state.computed = live.registered = 0
        return freed

    def table(self, state: SequenceState, end: int) -> tuple[int, ...]:
        """The blocks of positions 0 … end - 1, those from `computed` on to be written to.

        Raises:
            IntegrityError: it has not so many, or one that would be written to is not its own.
        """
        table = self.pool.table(state.identity)[: self.pool.blocks_for(end)]
        if len(table) * self._block_size < end:
            raise IntegrityError("a row goes beyond its sequence's blocks")
        if not all(map(self.pool.may_write, table[state.computed // self._block_size :])):
            raise IntegrityError("a row would write to a block that others read")
        return table

    def forget(self, live: Live) -> None:
        """What it has computed is not to be trusted: it is found as nobody's prefix."""
        self.pool.forget(live.state.identity)

    def register(self, live: Live) -> None:
        """Its blocks that have become full can be found from now on."""
        full = live.state.computed // self._block_size
        if full <= live.registered or not self._keeps_prefixes:
            return
        blocks = self.pool.table(live.state.identity)[live.registered : full]
        self.pool.register_all(blocks, live.hashes.between(live.registered, full, live.tokens))
        live.registered = full

    def take_prefix_change(self) -> PrefixChange | None:
        """What the prefix cache has got and lost since this was asked last."""
        return change_of(self.pool.take_changed(), self.pool.is_registered)

    def _swap_in(self, state: SequenceState) -> None:
        table = self.pool.table(state.identity)[: state.host_blocks]
        self._backend.load_blocks(table, self._saved[state.identity])
        del self._saved[state.identity]
        self._host_blocks_used -= state.host_blocks
        state.host_blocks = 0

    def _copy_last(self, source: SequenceState, state: SequenceState) -> None:
        """The block of the prompt that it shares only a part of, and will write to."""
        index = state.computed // self._block_size
        self._backend.copy_block(self.pool.table(source.identity)[index], self.pool.table(state.identity)[index])
        state.computed = state.prompt_tokens - 1

    # --- to and from another engine ---

    def saved_blocks(self, state: SequenceState, first: int, count: int) -> memoryview:
        """The bytes of its blocks first … first + count - 1, wherever they are."""
        if state.host_blocks:
            size = self._backend.kv_block_bytes
            return self._saved[state.identity][first * size : (first + count) * size]
        return self._backend.save_blocks(self.pool.table(state.identity)[first : first + count])

    def load(self, identity: Identity, first: int, data: memoryview) -> None:
        """Write blocks that came from elsewhere to blocks that `identity` holds."""
        count = data.nbytes // self._backend.kv_block_bytes
        self._backend.load_blocks(self.pool.table(identity)[first : first + count], data)

    # --- the check ---

    def check_integrity(self, states: Iterable[SequenceState], reserved: Mapping[Identity, int]) -> None:
        """`states` are all live ones; `reserved` says for each other holder of blocks how many positions are written.

        Raises:
            IntegrityError: blocks or host memory are not what the states say.
        """
        states = list(states)
        self.pool.check_integrity({**{s.identity: s.computed for s in states if s.blocks}, **reserved})
        if self._host_blocks_used != sum(s.host_blocks for s in states) or self.host_blocks_free < 0:
            raise IntegrityError("host memory used is not what was swapped out, or too much")
        if self._saved.keys() != {s.identity for s in states if s.host_blocks}:
            raise IntegrityError("something in host memory belongs to nobody, or is missing")
        for state in states:
            if state.blocks != len(self.pool.table(state.identity)):
                raise IntegrityError("a sequence's number of blocks is not that of its table")
            if state.host_blocks:
                self._check_saved(state)
            if state.computed and not (state.blocks or state.host_blocks):
                raise IntegrityError("a sequence has computed positions and no blocks")

    def _check_saved(self, state: SequenceState) -> None:
        if state.blocks or state.host_blocks != self.pool.blocks_for(state.computed):
            raise IntegrityError("a swapped-out sequence holds blocks, or not those that it has computed")
        if self._saved[state.identity].nbytes != state.host_blocks * self._backend.kv_block_bytes:
            raise IntegrityError("a swapped-out sequence's bytes are not those of its blocks")
