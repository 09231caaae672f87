"""Who makes room for one that comes in.

Owns: the choice of victims, and of what becomes of their blocks. Imports cluster.types and cluster.engine.scheduling.
Invariant: nobody is chosen unless all that are chosen make enough room, and none of them is there for nothing.

Where only a slot is short, the last in order of those that may be preempted is paused: it keeps its blocks. Where
blocks are short, they are taken from those that wait behind and kept some, last first, and only if these are not enough
from running ones that may be preempted, last first. What was computed is swapped out or dropped, whichever is cheaper.

For urgent work one sequence is recomputed at most `max_recomputes` times. After that it can be swapped out, while there
is room in host memory, or paused; otherwise it is spared. As with growth, this does not bind where the pool has merely
run out, so that whoever is first in order has its blocks: where the one that comes in kept blocks too and lacks a few, or
stands ahead of the one that waits without being more urgent.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, auto
from typing import NamedTuple

from cluster.engine.scheduling.draft import Draft, means_of_taking
from cluster.engine.scheduling.giving import Giving
from cluster.engine.scheduling.plan import Preemption
from cluster.engine.scheduling.sequence import SequenceState
from cluster.types import PreemptionMeans


class NoRoom(Enum):
    SLOTS = auto()
    """All slots are taken by work that may not be preempted."""
    BLOCKS = auto()
    """All that could lose their blocks would not make room."""
    SPARED = auto()
    """They would, had some not been recomputed too often already."""


class Room(NamedTuple):
    """These make room."""

    victims: tuple[Preemption, ...]


def make_room(
    draft: Draft, state: SequenceState, keep: SequenceState | None, *, blocks_short: int, slots_short: int
) -> Room | NoRoom:
    """Choose who makes room for `state`; `keep` does not lose its blocks for it.

    Args:
        blocks_short: Blocks that victims must give; 0 or less if none.
        slots_short: Running sequences that must leave; 0 or less if none.
    """
    taken = _take_blocks(draft, state, keep, blocks_short) if blocks_short > 0 else []
    if isinstance(taken, NoRoom):
        return taken
    chosen = {p.victim for p in taken}
    slots_short -= sum(victim in chosen for victim in draft.running)
    for victim in reversed(draft.running):
        if slots_short <= 0 or not draft.order.may_preempt(state, victim):
            break
        if victim not in chosen:
            taken.append(Preemption(victim, state, PreemptionMeans.PAUSE))
            slots_short -= 1
    return Room(tuple(taken)) if slots_short <= 0 else NoRoom.SLOTS


def _take_blocks(
    draft: Draft, state: SequenceState, keep: SequenceState | None, short: int
) -> list[Preemption] | NoRoom:
    order, cost = draft.order, draft.view.cost
    chosen: list[Preemption] = []
    spared: list[SequenceState] = []
    giving, host_blocks_free, freed = draft.giving.copy(), draft.host_blocks_free, 0
    for victim, waits in _holders_behind(draft, state):
        if freed >= short:
            break
        if victim is keep or draft.is_source(victim):
            continue
        for_urgent = order.may_preempt(state, victim) and not (waits and state.blocks)
        may_recompute = not for_urgent or victim.pushed_out < draft.config.max_recomputes
        means = means_of_taking(victim, cost, host_blocks_free, may_recompute=may_recompute)
        if means is None:
            spared.append(victim)
            continue
        chosen.append(Preemption(victim, state if for_urgent else None, means))
        freed += draft.gain(victim, giving)
        giving.give(victim)
        if means is PreemptionMeans.SWAP:
            host_blocks_free -= victim.blocks
    if freed >= short:
        return _needed(draft, chosen, giving, freed - short)
    for victim in spared:
        freed += draft.gain(victim, giving)
        giving.give(victim)
    return NoRoom.SPARED if freed >= short else NoRoom.BLOCKS


def _holders_behind(draft: Draft, state: SequenceState) -> Iterator[tuple[SequenceState, bool]]:
    """Who may lose blocks to `state`, in the order in which they do, and whether they wait."""
    for victim in reversed(draft.paused):
        if victim.key <= state.key:
            break
        yield victim, True
    for victim in reversed(draft.running):
        if not draft.order.may_preempt(state, victim):
            break
        yield victim, False


def _needed(draft: Draft, chosen: list[Preemption], giving: Giving, too_many: int) -> list[Preemption]:
    """Leave out, the last chosen first, those without whom there are enough blocks; `too_many` are free beyond need.
    All of them have given in `giving`."""
    needed = chosen[-1:]
    for candidate in chosen[-2::-1]:
        giving.take_back(candidate.victim)
        gain = draft.gain(candidate.victim, giving)
        if gain <= too_many:
            too_many -= gain
        else:
            giving.give(candidate.victim)
            needed.append(candidate)
    return needed[::-1]
