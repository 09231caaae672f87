"""Dynamic batching: who waits joins when another leaves, or makes another leave.

Owns: `plan`. Imports cluster.config and cluster.engine.scheduling. The rules:

1. The first in order come in while there are slots and blocks, or where the order lets them push out others. Each gets
   blocks for all that it can become, so that nobody is preempted for want of them.
2. While prompts are to be run, a step runs nothing else: those that have joined, padded to the longest of them, in
   columns under the budget (padded.py). Decodes stand still for as long as that takes.
3. Otherwise all decode together.
"""

from __future__ import annotations

from cluster.config import EngineConfig
from cluster.engine.scheduling.admission import Terms, admit
from cluster.engine.scheduling.draft import Draft
from cluster.engine.scheduling.order import Order
from cluster.engine.scheduling.padded import padded_step
from cluster.engine.scheduling.plan import StepPlan, View

TERMS = Terms(whole_length=True, prefill_tokens_max=None, siblings_wait=True)


def plan(view: View, config: EngineConfig, order: Order) -> StepPlan:
    """Decide one step. Reads `view` and changes nothing; equal views give equal plans."""
    draft = Draft(view, config, order)
    blocked, overtaken = admit(draft, TERMS)
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
