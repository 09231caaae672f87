"""What the core tells the adapter of itself.

Owns: what is counted, and what has happened since the last note. Imports the ledger and the wire, never vllm: what it is
told are numbers. Invariant: what happened is in exactly one note.
"""

from __future__ import annotations

import math

from cluster.engine.vllm.ledger import Ledger, Tracked
from cluster.engine.vllm.wire import StepNote, encode
from cluster.types import EngineLoad, Preempted, PreemptionMeans, PrefixChange, RequestId

QUIET_MAX_S = 0.1
"""A core that has work says so at least this often while it can run none of it."""


class Telling:
    """The counters only rise."""

    def __init__(
        self, ledger: Ledger, *, slots_total: int, blocks_total: int, block_size_tokens: int, step_tokens: int
    ) -> None:
        self.adds = self.steps = self.tokens = self.urgent_blocked = self.prefill_tokens = self.prefix_hit_tokens = 0
        self._preemptions = 0
        self._ledger = ledger
        self._slots_total = slots_total
        self._blocks_total = blocks_total
        self._block_size_tokens = block_size_tokens
        self._step_tokens = step_tokens
        self._said_s = -math.inf
        self._said_blocks_free = blocks_total
        self._preempted: list[Preempted] = []
        self._frozen: list[tuple[str, bytes]] = []

    def preempted(
        self,
        victim: Tracked,
        for_request_id: RequestId | None,
        *,
        blocks_freed: int,
        tokens_to_recompute: int,
        means: PreemptionMeans,
    ) -> None:
        request_id, attempt = victim.state.identity
        self._preempted.append(Preempted(request_id, attempt, for_request_id, blocks_freed, tokens_to_recompute, means))
        self._preemptions += 1

    def is_due(self, pool_blocks_free: int, now_s: float) -> bool:
        """Whether a turn without a step is to be told: something happened, or nothing was said for long while there is
        work, so that the adapter would take the core for stuck."""
        happened = self._preempted or self._frozen or pool_blocks_free != self._said_blocks_free
        return bool(happened) or (len(self._ledger) > 0 and now_s - self._said_s >= QUIET_MAX_S)

    def frozen(self, core_id: str, kv_handle: bytes) -> None:
        """Nothing of it is on its way any more."""
        self._frozen.append((core_id, kv_handle))

    def note(
        self, pool_blocks_free: int, blocks_cached: int, now_s: float, prefixes: PrefixChange | None = None
    ) -> bytes:
        """What is and what happened since the last one, as a `StepNote`."""
        self._said_s, self._said_blocks_free = now_s, pool_blocks_free
        preempted, self._preempted = tuple(self._preempted), []
        frozen, self._frozen = tuple(self._frozen), []
        load = self._load(pool_blocks_free, blocks_cached)
        foretold = self._ledger.take_foretold()
        return encode(StepNote(load=load, preempted=preempted, frozen=frozen, foretold=foretold, prefixes=prefixes))

    def _load(self, pool_blocks_free: int, blocks_cached: int) -> EngineLoad:
        ledger = self._ledger
        return EngineLoad(
            slots_total=self._slots_total,
            blocks_total=self._blocks_total,
            blocks_free=max(0, pool_blocks_free - ledger.promised_blocks()),
            block_size_tokens=self._block_size_tokens,
            running=ledger.running.loads(),
            waiting=ledger.waiting.loads(),
            adds_total=self.adds,
            steps_total=self.steps,
            tokens_total=self.tokens,
            preemptions_total=self._preemptions,
            urgent_blocked_total=self.urgent_blocked,
            blocks_cached=blocks_cached,
            prefix_hit_tokens_total=self.prefix_hit_tokens,
            prefill_tokens_total=self.prefill_tokens,
            step_tokens=self._step_tokens,
        )
