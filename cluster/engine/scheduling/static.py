"""Static batching: a batch starts together and ends together.

Owns: `plan`. Imports cluster.config and cluster.engine.scheduling. The rules:

1. Nobody comes in while anybody runs. When nobody does, a batch is formed: the first in order, up to `slots`, that fit
   the blocks. Each gets blocks for all that it can become, so that nobody is preempted for want of them. A preemptive
   order acts in this moment only.
2. Prompts are padded to the longest of the batch and run in columns under the budget (padded.py). No row draws a token
   before all prompts are through.
3. Then all rows decode together. Rows that have ended stay in the batch until the last has: they are padding. (Should
   the budget shrink below the rows of a batch, because a step did not fit in memory, ended rows leave as need be.)
"""

from __future__ import annotations

from cluster.config import EngineConfig
from cluster.engine.scheduling.admission import Admitted, Terms, admit
from cluster.engine.scheduling.draft import Draft
from cluster.engine.scheduling.order import Order
from cluster.engine.scheduling.padded import padded_step
from cluster.engine.scheduling.plan import StepPlan, View

TERMS = Terms(whole_length=True, prefill_tokens_max=None, siblings_wait=False)


def plan(view: View, config: EngineConfig, order: Order) -> StepPlan:
    """Decide one step. Reads `view` and changes nothing; equal views give equal plans."""
    draft = Draft(view, config, order)
    blocked, overtaken = Admitted() if view.running else admit(draft, TERMS)
    rows = draft.rows()
    rows_total = max(len(rows), view.batch_rows) if view.running else len(rows)
    rows_total = min(rows_total, config.step_token_budget)
    chunks, padding_tokens = padded_step(draft, rows, rows_total)
    return StepPlan(
        preempted=tuple(draft.preempted.values()),
        admitted=tuple(draft.admitted),
        chunks=chunks,
        blocked=blocked,
        overtaken=overtaken,
        padding_tokens=padding_tokens,
    )
