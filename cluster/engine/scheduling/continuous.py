"""Continuous batching: who runs is decided anew for every step; prompts are run in chunks; nothing is padded.

Owns: `plan`. Imports cluster.config and cluster.engine.scheduling. The rules, in the order in which they apply:

1. Growth. Running sequences, most urgent first, are given the block that their next token needs. Where none is free,
   the last in order is preempted, which may be the one that asks. A victim thus always stands behind everybody who has
   been given anything in this step, and the first in order is never a victim: there is always progress.
2. Admission. Waiting sequences, in order, each with blocks for all its tokens and one more, so that prefill never runs
   out half-way. Nothing is held back for urgent work: where a slot or blocks are missing, strictly less urgent running
   sequences are preempted, last in order first, as few as will do, and none unless they make enough room. One that has
   been pushed out `max_recomputes` times is spared. A sequence that may push nobody out comes in only if half a block
   for each running one stays free: they will soon want it, and would preempt it or each other. (At one and a half times
   the pool's demand this takes away 40 % of all preemptions and costs 1 % more steps.)
   The first that cannot be admitted ends admission: nobody of the same or a lower urgency slips past it. Nor does
   anybody behind a sequence that was preempted in this very step: it keeps its place. Where the prompts ahead of it are
   by themselves as long as the budget, a sequence could run no token yet: it is not yet admitted, nor anybody preempted
   for it.
3. Budget. Each decode costs one token; what is left goes to prefill, in order. Slots do not outnumber the budget's
   tokens, so that decodes always fit, but they may leave prefill as little as one token per step. Prefill is therefore
   owed a share of the budget, for which decodes yield:
   - three quarters, against decodes that are strictly less urgent than the prefill;
   - an eighth, against decodes that are equally urgent, so that it does not starve;
   - nothing but what is left over (never less than a token) against more urgent decodes.
   Decodes yield those first that have yielded least in a row, then last in order, and none more than three steps in a
   row.

Why this is enough. Let every slot be taken by less urgent decodes when a request with P prompt tokens arrives. The next
plan preempts one victim and admits it. There are fewer decodes than the budget's B tokens; a quarter of B of them run
per step, longest waiting first, so each runs at least in every fourth step, nobody reaches the bound on yielding, and
the prompt gets floor(3B/4) tokens per step. The first token comes with the ceil(P / floor(3B/4))-th step after
arrival, while no decode is ever stalled for longer than three steps, however long the prompt.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto
from operator import attrgetter

from cluster.config import EngineConfig
from cluster.engine.scheduling.order import Order
from cluster.engine.scheduling.plan import Admission, Chunk, Preemption, StepPlan, View
from cluster.engine.scheduling.sequence import SequenceState

MAX_YIELDS_IN_A_ROW = 3

_by_key = attrgetter("key")


def urgent_share(budget: int) -> int:
    """Tokens of a step that prefill may have where only less urgent decodes stand against it."""
    return budget * 3 // 4


def equal_share(budget: int) -> int:
    """Tokens of a step that prefill may have where decodes of its own urgency stand against it."""
    return max(1, budget // 8)


def plan(view: View, config: EngineConfig, order: Order) -> StepPlan:
    """Decide one step. Reads `view` and changes nothing; equal views give equal plans."""
    running = list(view.running)
    grown, preempted, blocks_free = _grow(running, view.blocks_free, config.block_size_tokens)
    admitted, blocked = _admit(view, running, grown, preempted, blocks_free, config, order)
    chunks, yielded = _share_budget(running, grown, admitted, config.step_token_budget, order)
    return StepPlan(tuple(preempted), tuple(admitted), tuple(chunks), tuple(yielded), blocked)


def _grow(
    running: list[SequenceState], blocks_free: int, block_size: int
) -> tuple[set[SequenceState], list[Preemption], int]:
    """Rule 1. Takes victims out of `running`; returns who gets a block, who was preempted, and the blocks left."""
    grown: set[SequenceState] = set()
    preempted: list[Preemption] = []
    for state in running:  # victims leave at the end, at or after the one that is looked at
        if state.tokens <= state.blocks * block_size:
            continue
        while not blocks_free:
            victim = running.pop()
            preempted.append(Preemption(victim, None))
            blocks_free += victim.blocks
            if victim is state:
                break
        else:
            grown.add(state)
            blocks_free -= 1
    return grown, preempted, blocks_free


def _admit(
    view: View,
    running: list[SequenceState],
    grown: set[SequenceState],
    preempted: list[Preemption],
    blocks_free: int,
    config: EngineConfig,
    order: Order,
) -> tuple[list[Admission], SequenceState | None]:
    """Rule 2. Moves victims from `running` to `preempted`; returns who comes in, and who was kept out
    only because victims are spared."""
    admitted: list[Admission] = []
    prefilling = [s for s in running if s.tokens - s.computed > 1]
    passed = prefill_ahead_tokens = 0
    for state in view.waiting:
        if any(p.victim.key < state.key for p in preempted):
            break
        while passed < len(prefilling) and prefilling[passed].key < state.key:
            prefill_ahead_tokens += prefilling[passed].tokens - prefilling[passed].computed
            passed += 1
        if prefill_ahead_tokens >= config.step_token_budget:
            break
        need = -(-(state.tokens + 1) // config.block_size_tokens)
        slots_short = len(running) + len(admitted) + 1 - config.slots
        pushes = bool(running) and order.may_preempt(state, running[-1])
        headroom = 0 if pushes else (len(running) + len(admitted)) // 2
        if slots_short > 0 or need + headroom > blocks_free:
            if not pushes:
                return admitted, None
            victims = _victims(state, running, grown, slots_short, need - blocks_free, config.max_recomputes, order)
            if isinstance(victims, NoVictims):
                return admitted, state if victims is NoVictims.SPARED else None
            for victim in victims:
                running.remove(victim)
                blocks_free += _gives(victim, grown)
                preempted.append(Preemption(victim, state))
        admitted.append(Admission(state, need))
        blocks_free -= need
        prefill_ahead_tokens += state.tokens
    return admitted, None


class NoVictims(Enum):
    NOT_ENOUGH = auto()
    """All that may be preempted would not make room."""
    SPARED = auto()
    """It would, had some not been pushed out too often already."""


def _victims(
    urgent: SequenceState,
    running: list[SequenceState],
    grown: set[SequenceState],
    slots_short: int,
    blocks_short: int,
    max_pushed_out: int,
    order: Order,
) -> list[SequenceState] | NoVictims:
    """The last in order that together make room for `urgent`, without those that turn out not to be needed."""
    chosen: list[SequenceState] = []
    freed = spared = spared_blocks = 0
    for victim in reversed(running):
        if not order.may_preempt(urgent, victim):
            break
        if victim.pushed_out >= max_pushed_out:
            spared += 1
            spared_blocks += _gives(victim, grown)
            continue
        chosen.append(victim)
        freed += _gives(victim, grown)
        if len(chosen) >= slots_short and freed >= blocks_short:
            break
    if len(chosen) < slots_short or freed < blocks_short:
        would_do = len(chosen) + spared >= slots_short and freed + spared_blocks >= blocks_short
        return NoVictims.SPARED if would_do else NoVictims.NOT_ENOUGH
    for victim in chosen[-2::-1]:
        if len(chosen) > max(1, slots_short) and freed - _gives(victim, grown) >= blocks_short:
            chosen.remove(victim)
            freed -= _gives(victim, grown)
    return chosen


def _gives(victim: SequenceState, grown: set[SequenceState]) -> int:
    """Blocks that become free: those that it holds, and the one that this plan had already given it."""
    return victim.blocks + (victim in grown)


def _share_budget(
    running: list[SequenceState],
    grown: set[SequenceState],
    admitted: list[Admission],
    budget: int,
    order: Order,
) -> tuple[list[Chunk], list[SequenceState]]:
    """Rule 3. Returns the chunks that run, decodes first, and the decodes that yield."""
    decodes: list[SequenceState] = []
    prefills: list[SequenceState] = []
    for state in running:
        (decodes if state.tokens - state.computed == 1 else prefills).append(state)
    if admitted:
        prefills.extend(a.sequence for a in admitted)
        prefills.sort(key=_by_key)
    yielding = _yielding(decodes, prefills, budget, order) if prefills else set()
    chunks = [Chunk(s, 1, 1 if s in grown else 0, True) for s in decodes if s not in yielding]
    left = budget - len(chunks)
    for state in prefills:
        remaining = state.tokens - state.computed
        tokens = min(remaining, left)
        if not tokens:
            break
        chunks.append(Chunk(state, tokens, 0, tokens == remaining))
        left -= tokens
    return chunks, [s for s in decodes if s in yielding]


def _yielding(
    decodes: list[SequenceState], prefills: list[SequenceState], budget: int, order: Order
) -> set[SequenceState]:
    """The decodes that sit this step out, so that prefill gets the share that it is owed."""
    spare = budget - len(decodes)
    wanted = 0
    yielding: set[SequenceState] = set()

    def ask(tokens: int, candidates: Iterable[SequenceState]) -> None:
        able = [d for d in candidates if d.yields < MAX_YIELDS_IN_A_ROW and d not in yielding]
        able.reverse()
        able.sort(key=lambda d: d.yields)
        yielding.update(able[:tokens])

    for prefill in prefills:
        wanted += prefill.tokens - prefill.computed
        short = min(wanted, urgent_share(budget)) - spare - len(yielding)
        if short > 0:
            ask(short, (d for d in decodes if order.may_preempt(prefill, d)))
        short = min(wanted, equal_share(budget)) - spare - len(yielding)
        if short > 0:
            ask(short, (d for d in decodes if not order.may_preempt(d, prefill)))
        if wanted >= urgent_share(budget):
            break
    return yielding
