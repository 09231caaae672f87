"""A plan in the making.

Owns: `Draft`, the count of what a plan has left to give while it is made, and how blocks are taken from a victim.
Imports cluster.config, cluster.types and cluster.engine.scheduling. Invariant: what the draft calls free can be taken
when the plan is carried out; where blocks are shared it may count too few as free, never too many.
"""

from __future__ import annotations

from bisect import insort
from operator import attrgetter
from typing import NamedTuple

from cluster.config import EngineConfig
from cluster.engine.scheduling.giving import Giving
from cluster.engine.scheduling.order import Order
from cluster.engine.scheduling.plan import Admission, Cost, Preemption, View
from cluster.engine.scheduling.sequence import SequenceState, SortKey
from cluster.types import PreemptionMeans

by_key = attrgetter("key")


class Fit(NamedTuple):
    """What a waiting sequence takes when it comes in."""

    fresh: int
    """Blocks that nobody else will hold."""
    cached: int
    """Blocks of the prefix cache."""
    unheld: int
    """Those of the cached that nobody held when the step began."""
    source: SequenceState | None
    start: int
    """The first position that it has to run."""


class Draft:
    """What is left while a plan is made, and what has been decided. Each method keeps both in step."""

    __slots__ = (
        "_borrowed",
        "_paused",
        "_sources",
        "_starts",
        "admitted",
        "blocks_free",
        "config",
        "first_out",
        "giving",
        "gone",
        "grown",
        "host_blocks_free",
        "order",
        "preempted",
        "running",
        "view",
    )

    def __init__(self, view: View, config: EngineConfig, order: Order) -> None:
        self.view = view
        self.config = config
        self.order = order
        self.running = list(view.running)
        """Those that run already and go on, in order."""
        self.blocks_free = view.blocks_free
        self.host_blocks_free = view.host_blocks_free
        self.admitted: list[Admission] = []
        self.preempted: dict[SequenceState, Preemption] = {}
        self.first_out: SortKey | None = None
        """Key of the first in order of the preempted."""
        self.gone: list[SequenceState] = []
        """The preempted that lose their blocks."""
        self.giving = Giving(view.shared)
        """What they give."""
        self.grown: set[SequenceState] = set()
        """Running ones that get one more block."""
        self._paused: list[SequenceState] | None = None
        self._sources: set[SequenceState] = set()
        self._starts: dict[SequenceState, int] = {}
        self._borrowed = 0
        """Cached blocks given to admitted ones while others held them."""

    @property
    def paused(self) -> list[SequenceState]:
        """Those that wait and keep blocks, in order. Looked for only when somebody is short of blocks."""
        if self._paused is None:
            known = self.view.paused
            self._paused = [s for s in self.view.waiting if s.blocks] if known is None else list(known)
        return self._paused

    @property
    def slots_taken(self) -> int:
        return len(self.running) + len(self.admitted)

    def is_admitted(self, state: SequenceState) -> bool:
        return state in self._starts

    def is_source(self, state: SequenceState) -> bool:
        """Whether an admitted one shares its blocks, so that it must not lose them."""
        return state in self._sources

    def remaining(self, state: SequenceState) -> int:
        """Known tokens of one that runs after the plan which are still to be run: 1 of a decode."""
        return state.tokens - self._starts.get(state, state.computed)

    def rows(self) -> list[SequenceState]:
        """All that run after the plan, in order."""
        if not self.admitted:
            return self.running
        return sorted([*self.running, *(a.sequence for a in self.admitted)], key=by_key)

    # --- blocks ---

    def wanted(self, fit: Fit) -> int:
        """Blocks that leave the free ones when it comes in.

        A cached block that somebody held may have become free with a victim. Which did is not asked: once anybody has
        lost blocks in this step, all of the cached are counted.
        """
        return fit.fresh + (fit.cached if self.gone else fit.unheld)

    def short_if_taken(self, fit: Fit) -> int:
        """Blocks that victims must give before it can come in, if there are to be victims."""
        borrowed = 0 if self.gone else self._borrowed
        return fit.fresh + fit.cached + borrowed - self.blocks_free

    def gain(self, victim: SequenceState, giving: Giving) -> int:
        """Blocks that become free when it loses its own after those of `giving` have: one that this plan gives it
        included."""
        return giving.gain(victim) + (victim in self.grown)

    # --- decisions ---

    def grow(self, state: SequenceState) -> None:
        self.grown.add(state)
        self.blocks_free -= 1

    def take_blocks(self, victim: SequenceState, urgent: SequenceState | None, means: PreemptionMeans) -> None:
        """A running or paused sequence loses its slot and its blocks."""
        if not self.gone:
            self.blocks_free -= self._borrowed
        self.blocks_free += self.gain(victim, self.giving)
        self.giving.give(victim)
        self.gone.append(victim)
        self.grown.discard(victim)
        if means is PreemptionMeans.SWAP:
            self.host_blocks_free -= victim.blocks
        (self.running if victim in self.running else self.paused).remove(victim)
        self._preempt(Preemption(victim, urgent, means))

    def pause(self, victim: SequenceState, urgent: SequenceState) -> None:
        """A running sequence loses its slot and keeps its blocks, but for one that this plan gave it."""
        if victim in self.grown:
            self.grown.remove(victim)
            self.blocks_free += 1
        self.running.remove(victim)
        insort(self.paused, victim, key=by_key)
        self._preempt(Preemption(victim, urgent, PreemptionMeans.PAUSE))

    def admit(self, state: SequenceState, fit: Fit) -> None:
        self.blocks_free -= self.wanted(fit)
        if not self.gone:
            self._borrowed += fit.cached - fit.unheld
        if fit.source is not None:
            self._sources.add(fit.source)
        if state.blocks:
            self.paused.remove(state)
        self._starts[state] = fit.start
        self.admitted.append(Admission(state, fit.fresh, fit.cached, fit.source))

    def _preempt(self, preemption: Preemption) -> None:
        self.preempted[preemption.victim] = preemption
        if self.first_out is None or preemption.victim.key < self.first_out:
            self.first_out = preemption.victim.key


def means_of_taking(
    victim: SequenceState, cost: Cost, host_blocks_free: int, *, may_recompute: bool
) -> PreemptionMeans | None:
    """The cheaper of swapping out what has been computed and computing it again; None where neither may be."""
    can_swap = 0 < victim.blocks <= host_blocks_free and victim.computed > 0
    if can_swap and may_recompute:
        can_swap = victim.blocks * cost.swap_block_s <= victim.computed * cost.prefill_token_s
    if can_swap:
        return PreemptionMeans.SWAP
    return PreemptionMeans.RECOMPUTE if may_recompute else None
