"""Who comes in, the same for every batching mode.

Owns: `admit`. Imports cluster.engine.scheduling. The rules:

1. In order. Waiting sequences are looked at first in order first, and each gets a slot and blocks. What it has already
   is not given again: a paused one gets the blocks that it lacks, a swapped one gets as many as it had and more, one
   whose beginning is in the prefix cache shares that, and one of several choices shares the prompt of the sibling that
   computed it. Nothing is held back for urgent work: who lacks a slot or blocks may push others out (victims.py).
2. The first that cannot come in ends admission, except as follows. Nor does anybody come in behind a sequence that was
   preempted in this very step: it keeps its place.
3. A sibling of one that is to compute the common prompt first is passed over until that has happened. It blocks nobody
   and is overtaken by nobody: it could only do the same work twice.
4. Too large. One that a slot is there for but not the blocks, and for which nobody can make room, may be passed by
   others of its own urgency (neither may push out the other) that fit with all that they are expected to become: by at
   most `max_overtakes` of them since it was last admitted, and one that has started only by others that have. At most
   LOOK_AHEAD sequences behind the first such are looked at. After that it is passed by nobody, and all blocks that
   become free gather for it: it comes in at the latest when all that run then, and all that goes before it by the order,
   have ended, for the pool holds any one request.
5. Spared. Where one is kept out only because those that hold the blocks may not be recomputed once more for it, those
   that wait behind it and keep blocks go on instead, in order, so that they end and their blocks become free.

Why there is always progress. Let nobody run, and let W be the first in order that waits and that no sibling is ahead
of. All who hold blocks then wait, and so stand behind W or are W itself. If none of them is spared, W can have the
whole pool but for what it holds, and comes in. If some are, the first in order of those that keep blocks goes on by
rule 5: as it holds blocks itself, nobody behind it is spared from it, and it comes in. (Blocks of requests that are on
their way to or from another engine are in no view. Only while these leave too few may nobody be able to run.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, assert_never

from cluster.engine.scheduling.draft import Draft, Fit
from cluster.engine.scheduling.sequence import SequenceState
from cluster.engine.scheduling.victims import NoRoom, Room, make_room
from cluster.types import PreemptionMeans

LOOK_AHEAD = 32


class Terms(NamedTuple):
    """How a batching mode lets sequences in."""

    whole_length: bool
    """With blocks for all that it can become, so that it never asks for more. Else with blocks for its known tokens and
    the next, and, where it may push nobody out, only if half a block for each running one stays free: they will soon
    want it, and would preempt it or each other. (At one and a half times the pool's demand this takes away 40 % of all
    preemptions and costs 1 % more steps.)"""
    prefill_tokens_max: int | None
    """Where the prompts ahead of it are by themselves as long as this, a sequence could run no token yet: it is not yet
    admitted, nor anybody preempted for it."""
    siblings_wait: bool
    """Rule 3. Where it does not hold, a sibling that comes in too early computes the prompt for itself."""


class Admitted(NamedTuple):
    """What is to be said beside the draft's own `admitted` and `preempted`."""

    blocked: SequenceState | None = None
    overtaken: tuple[SequenceState, ...] = ()


def admit(draft: Draft, terms: Terms) -> Admitted:
    """Decide who comes in, and who makes room for them."""
    passed: list[SequenceState] = []
    overtaken: list[SequenceState] = []
    blocked: SequenceState | None = None
    prompts = _PromptsAhead(draft)
    looked_at = 0
    for state in draft.view.waiting:
        if draft.first_out is not None and state.key >= draft.first_out:
            break
        if terms.prefill_tokens_max is not None and prompts.are_ahead_of(state, terms.prefill_tokens_max):
            break
        if terms.siblings_wait and _waits_for_sibling(draft, state):
            continue
        if passed:
            looked_at += 1
            if looked_at > LOOK_AHEAD or not _may_pass(draft, state, passed):
                break
        outcome = _try(draft, state, terms, passes=bool(passed))
        match outcome:
            case Fit():
                prompts.tokens += state.tokens - outcome.start
                overtaken.extend(passed)
            case NoRoom.SLOTS:
                break
            case NoRoom.BLOCKS:
                passed.append(state)
            case NoRoom.SPARED:
                blocked = blocked or state
                passed.append(state)
            case _:
                assert_never(outcome)
        if any(s.overtaken + overtaken.count(s) >= draft.config.max_overtakes for s in passed):
            break
    if blocked is not None:
        _go_on(draft, blocked, terms)
    return Admitted(blocked, tuple(overtaken))


def _may_pass(draft: Draft, state: SequenceState, passed: Sequence[SequenceState]) -> bool:
    """By rule 4. The first of the passed may push out whomever another of them may."""
    return not draft.order.may_preempt(passed[0], state) and (state.started or not any(s.started for s in passed))


def _go_on(draft: Draft, blocked: SequenceState, terms: Terms) -> None:
    """Rule 5."""
    for state in tuple(draft.paused):
        before_victims = draft.first_out is None or state.key < draft.first_out
        if blocked.key < state.key and before_victims and _try(draft, state, terms) is NoRoom.SLOTS:
            return  # nor is there one for anybody behind it


class _PromptsAhead:
    """Prompt tokens that are to be run before a sequence's first. To be asked in order."""

    __slots__ = ("_draft", "_next", "_prefilling", "tokens")

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._prefilling: list[SequenceState] | None = None
        self._next = 0
        self.tokens = 0
        """So far: of those that run and were passed, and of those that came in."""

    def are_ahead_of(self, state: SequenceState, tokens_max: int) -> bool:
        """Whether they are so many that it would run nothing. A decode always runs."""
        if state.tokens - state.computed == 1:
            return False
        if self._prefilling is None:
            self._prefilling = [s for s in self._draft.running if s.tokens - s.computed > 1]
        while self._next < len(self._prefilling) and self._prefilling[self._next].key < state.key:
            ahead = self._prefilling[self._next]
            self.tokens += ahead.tokens - ahead.computed
            self._next += 1
        return self.tokens >= tokens_max


def _has_prompt(draft: Draft, leader: SequenceState, state: SequenceState) -> bool:
    """Whether `leader` has computed all positions of the prompt that `state` shares, which is all but the last."""
    return leader.blocks > 0 and leader.computed >= state.prompt_tokens - 1 and leader not in draft.gone


def _waits_for_sibling(draft: Draft, state: SequenceState) -> bool:
    leader = state.leader
    if leader is None or state.blocks or state.host_blocks or state.prompt_tokens <= 1:
        return False
    return not _has_prompt(draft, leader, state)


def _try(draft: Draft, state: SequenceState, terms: Terms, *, passes: bool = False) -> Fit | NoRoom:
    """Let it in if there is room or can be made; else change nothing.

    Where a sibling's blocks leave no room for it, it does without them, and may take them.
    """
    slots_short = draft.slots_taken + 1 - draft.config.slots
    pushes = bool(draft.running) and draft.order.may_preempt(state, draft.running[-1])
    if slots_short > 0 and not pushes:
        return NoRoom.SLOTS
    stay_free = 0 if pushes else _must_stay_free(draft, state, terms, passes)
    fit = _fit_beside_sibling(draft, state, terms)
    room = _room(draft, state, fit, slots_short, stay_free) if fit is not None else NoRoom.BLOCKS
    if fit is None or isinstance(room, NoRoom):
        fit = _fit(draft, state, terms)
        room = _room(draft, state, fit, slots_short, stay_free)
    if isinstance(room, NoRoom):
        return room
    for victim, urgent, means in room.victims:
        if means is PreemptionMeans.PAUSE:
            draft.pause(victim, state)
        else:
            draft.take_blocks(victim, urgent, means)
    draft.admit(state, fit)
    return fit


def _must_stay_free(draft: Draft, state: SequenceState, terms: Terms, passes: bool) -> int:
    """Blocks that must be left when it has come in.

    One that passes another leaves twice the headroom, and all that it is itself expected to ask for yet. (Else the growth
    of those that it passed pushes it out. At one and a half times the pool's demand there were 40 % more preemptions, of
    one request up to ten; so there are no more than if nobody passed, and fewer steps than then.)
    """
    if terms.whole_length:
        return 0
    if not passes:
        return draft.slots_taken // 2
    return draft.slots_taken + _blocks_for(draft, math.ceil(state.predicted_tokens)) - _need(draft, state, terms)


def _room(draft: Draft, state: SequenceState, fit: Fit, slots_short: int, stay_free: int) -> Room | NoRoom:
    wanted = draft.wanted(fit)
    stay_free = stay_free if wanted else 0
    blocks_short = wanted + stay_free - draft.blocks_free
    if blocks_short > 0:
        blocks_short = draft.short_if_taken(fit) + stay_free
    if blocks_short <= 0 and slots_short <= 0:
        return Room(())
    return make_room(draft, state, fit.source, blocks_short=blocks_short, slots_short=slots_short)


def _blocks_for(draft: Draft, tokens: int) -> int:
    return -(-tokens // draft.config.block_size_tokens)


def _need(draft: Draft, state: SequenceState, terms: Terms) -> int:
    """Blocks that it has when it has come in."""
    return _blocks_for(draft, state.limit_tokens if terms.whole_length else min(state.tokens + 1, state.limit_tokens))


def _fit_beside_sibling(draft: Draft, state: SequenceState, terms: Terms) -> Fit | None:
    """With the prompt of the sibling that has computed it; None where there is none."""
    leader = state.leader
    if leader is None or state.blocks or state.host_blocks or state.prompt_tokens <= 1:
        return None
    if not _has_prompt(draft, leader, state):
        return None
    start = state.prompt_tokens - 1
    return Fit(_need(draft, state, terms) - start // draft.config.block_size_tokens, 0, 0, leader, start)


def _fit(draft: Draft, state: SequenceState, terms: Terms) -> Fit:
    need = _need(draft, state, terms)
    if state.blocks:
        return Fit(max(0, need - state.blocks), 0, 0, None, state.computed)
    if state.host_blocks:
        return Fit(max(need, state.host_blocks), 0, 0, None, state.computed)
    view, size = draft.view, draft.config.block_size_tokens
    cached = view.cached_blocks(state)
    return Fit(need - cached, cached, view.unheld_blocks(state) if cached else 0, None, cached * size)
