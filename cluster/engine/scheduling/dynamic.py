"""Dynamic batching: who waits joins when another leaves, or makes another leave.

Owns: `plan`. Imports cluster.config and cluster.engine.scheduling. The rules:

1. The first in order come in while there are slots and blocks, or where the order lets them push out others. Each gets
   blocks for all that it can become, so that nobody is preempted for want of them.
2. While prompts are to be run, a step runs nothing else: those that have joined, padded to the longest of them, in
   columns under the budget (padded.py). Decodes stand still for as long as that takes.
3. Otherwise all decode together. Decodes that stood still run once before anybody joins again: otherwise a stream of
   requests that end with their first token would keep them standing for ever. (Nobody draws before all prompts are
   through, so that no more than `slots` can join while decodes stand still.)
"""

from __future__ import annotations

from cluster.config import EngineConfig
from cluster.engine.scheduling.admission import Admitted, Terms, admit
from cluster.engine.scheduling.draft import Draft
from cluster.engine.scheduling.order import Order
from cluster.engine.scheduling.padded import padded_step
from cluster.engine.scheduling.plan import StepPlan, View

TERMS = Terms(whole_length=True, prefill_tokens_max=None, siblings_wait=True)


def plan(view: View, config: EngineConfig, order: Order) -> StepPlan:
    """Decide one step. Reads `view` and changes nothing; equal views give equal plans."""
    draft = Draft(view, config, order)
    blocked, overtaken = Admitted() if _owed_to_decodes(view) else admit(draft, TERMS)
    rows = draft.rows()
    joining = [row for row in rows if draft.remaining(row) > 1]
    batch = joining or rows
    chunks, padding_tokens = padded_step(draft, batch, len(batch))
    return StepPlan(
        preempted=tuple(draft.preempted.values()),
        admitted=tuple(draft.admitted),
        chunks=chunks,
        yielded=tuple(row for row in rows if draft.remaining(row) == 1) if joining else (),
        blocked=blocked,
        overtaken=overtaken,
        padding_tokens=padding_tokens,
    )


def _owed_to_decodes(view: View) -> bool:
    """Whether this step is theirs by rule 3: prompts are through, and some stood still for them."""
    return any(s.yields for s in view.running) and all(s.tokens - s.computed == 1 for s in view.running)
