"""Continuous batching: who runs is decided anew for every step; prompts are run in chunks; nothing is padded.

Owns: `plan`, and which decodes yield. Imports cluster.config and cluster.engine.scheduling. The rules, in the order in which they apply:

1. Growth. Running sequences, most urgent first, are given the block that their next token needs. Where none is free,
   those that wait behind and kept blocks lose them, last in order first, and after them the last in order of the
   running, which may be the one that asks. A victim thus always stands behind everybody who has been given anything in
   this step. The first in order of all that run or hold blocks is never a victim: if it asks when all others have lost
   theirs, all blocks but its own are free, and the pool holds any one request.
2. Admission (admission.py), with blocks for all known tokens and one more, so that prefill never runs out half-way.
3. Budget. A sequence with one token to run, a decode, costs one; what is left goes to prefill, in order. Slots do not
   outnumber the budget's tokens, so that decodes always fit, but they may leave prefill as little as one token per
   step. Prefill is therefore owed a share of the budget, for which decodes yield:
   - all of it, against decodes that are strictly less urgent than the prefill;
   - an eighth, against decodes that are equally urgent, so that it does not starve;
   - nothing but what is left over (never less than a token) against more urgent decodes.
   Those last in order yield first, and none in two steps in a row.

What follows. No decode is ever stalled for more than one step, however long the prompt that comes in.

Let every slot be taken by less urgent decodes, none of which yielded in the step before, when a request with P prompt
tokens arrives, and let B be the budget. The next plan preempts one victim and admits it: D <= B - 1 decodes are left. In
the first step as many yield as the prompt needs, if need be all, and it gets min(P, B) tokens; in the second those that
did not yield may, and so on in turns. Any two steps together give it B + (B - D) >= B + 1 tokens if it needs them, since
all of two steps' 2B tokens are its own but one for each decode: half of the budget and more. With P = q (B + 1) + r,
0 <= r <= B, its first token comes at the latest with step 2q + 1 after its arrival, or 2q if r = 0. A prompt within the
budget is through in a single step. (If all had just yielded to another urgent prompt, it is one step later.)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from cluster.config import EngineConfig
from cluster.engine.scheduling.admission import Terms, admit
from cluster.engine.scheduling.draft import Draft, means_of_taking
from cluster.engine.scheduling.order import Order
from cluster.engine.scheduling.plan import Chunk, StepPlan, View
from cluster.engine.scheduling.sequence import SequenceState


def equal_share(budget: int) -> int:
    """Tokens of a step that prefill may have where decodes of its own urgency stand against it."""
    return max(1, budget // 8)


def plan(view: View, config: EngineConfig, order: Order) -> StepPlan:
    """Decide one step. Reads `view` and changes nothing; equal views give equal plans."""
    draft = Draft(view, config, order)
    _grow(draft)
    terms = Terms(whole_length=False, prefill_tokens_max=config.step_token_budget, siblings_wait=True)
    blocked, overtaken = admit(draft, terms)
    chunks, yielded = _share_budget(draft)
    return StepPlan(
        preempted=tuple(draft.preempted.values()),
        admitted=tuple(draft.admitted),
        chunks=tuple(chunks),
        yielded=tuple(yielded),
        blocked=blocked,
        overtaken=overtaken,
    )


def _grow(draft: Draft) -> None:
    """Rule 1."""
    block_size = draft.config.block_size_tokens
    for state in draft.running:  # victims leave at the end, at or after the one that is looked at
        if state.tokens <= state.blocks * block_size:
            continue
        while draft.blocks_free <= 0:
            victim = _last_holder(draft, state)
            means = means_of_taking(victim, draft.view.cost, draft.host_blocks_free, may_recompute=True)
            assert means is not None
            draft.take_blocks(victim, None, means)
            if victim is state:
                break
        else:
            draft.grow(state)


def _last_holder(draft: Draft, state: SequenceState) -> SequenceState:
    if draft.paused and draft.paused[-1].key > state.key:
        return draft.paused[-1]
    return draft.running[-1]


def _share_budget(draft: Draft) -> tuple[list[Chunk], list[SequenceState]]:
    """Rule 3. Returns the chunks that run, decodes first, and the decodes that yield."""
    budget = draft.config.step_token_budget
    decodes: list[SequenceState] = []
    prefills: list[SequenceState] = []
    for state in draft.rows():
        remaining = state.tokens - state.computed if state.running else draft.remaining(state)
        (decodes if remaining == 1 else prefills).append(state)
    yielders: Collection[SequenceState] = ()
    left = budget - len(decodes)
    if prefills:
        able = [d for d in decodes if not d.yields]
        yielders = yielding(draft.order, budget, left, able, [(p, draft.remaining(p)) for p in prefills])
        left += len(yielders)
    grown = draft.grown
    if yielders:
        chunks = [Chunk(s, 1, 1 if s in grown else 0, True) for s in decodes if s not in yielders]
    elif grown:
        chunks = [Chunk(s, 1, 1 if s in grown else 0, True) for s in decodes]
    else:
        chunks = [Chunk(s, 1, 0, True) for s in decodes]
    for state in prefills:
        remaining = draft.remaining(state)
        tokens = min(remaining, left)
        if not tokens:
            break
        chunks.append(Chunk(state, tokens, 0, tokens == remaining))
        left -= tokens
    return chunks, [s for s in decodes if s in yielders] if yielders else []


def yielding(
    order: Order,
    budget: int,
    left: int,
    able: Sequence[SequenceState],
    prefills: Iterable[tuple[SequenceState, int]],
) -> set[SequenceState]:
    """The decodes that sit a step out, so that prefill gets the share that it is owed.

    Args:
        left: Tokens of the budget that are left if no decode yields.
        able: Decodes that may yield, in order: they did not in the step before.
        prefills: Each with the tokens that are left of it, in order.
    """
    share = equal_share(budget)
    still_able = list(able)
    yielders: set[SequenceState] = set()
    wanted = 0
    for prefill, remaining in prefills:
        wanted += remaining
        while left < wanted and still_able:
            last = still_able[-1]  # if it does not yield to this prefill, nobody ahead of it does
            less_urgent = order.may_preempt(prefill, last)
            if not less_urgent and (left >= share or order.may_preempt(last, prefill)):
                break
            yielders.add(still_able.pop())
            left += 1
    return yielders
