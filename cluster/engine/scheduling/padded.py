"""One step of a padded batch: a rectangle of rows and columns, of which the shorter rows fill only a part.

Owns: `padded_step`. Imports cluster.engine.scheduling. Invariant: rows x columns is within the step's budget, and what
of it is no row's own is counted as padding.
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.engine.scheduling.draft import Draft
from cluster.engine.scheduling.plan import Chunk
from cluster.engine.scheduling.sequence import SequenceState


def padded_step(draft: Draft, rows: Sequence[SequenceState], rows_total: int) -> tuple[tuple[Chunk, ...], int]:
    """The chunks of one step of a batch of `rows_total` rows, of which `rows` have something to run; and the padding.

    The rows are as wide as the longest and padded on the left, so that all end together and draw their next tokens in
    the same step. What is wider than the budget allows is run in columns, from the left. There is at least one column:
    slots, hence rows, do not exceed the budget.
    """
    longest = max((draft.remaining(row) for row in rows), default=0)
    columns = min(longest, draft.config.step_token_budget // max(1, rows_total))
    to_come = longest - columns
    chunks: list[Chunk] = []
    for row in rows:
        tokens = draft.remaining(row) - to_come
        if tokens > 0:
            chunks.append(Chunk(row, tokens, 0, not to_come))
    return tuple(chunks), rows_total * columns - sum(c.tokens for c in chunks)
