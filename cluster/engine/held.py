"""Which of the requests in an engine are the most worth weighing by whoever may move them.

Owns: that choice, and what is said of each. Imports cluster and what schedulers know of a sequence. Pure. Invariants: no
more than asked for; who waits is never crowded out by who runs, nor the other way round, as long as there are any; blocks
are counted as they would come free, so that none is promised that another request reads.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import nlargest, nsmallest
from math import ceil

from cluster.engine.scheduling.sequence import Line, SequenceState
from cluster.messages import Standing
from cluster.ports import HeldAttempt


def worth_weighing(
    waiting: Line, running: Line, limit: int, own_blocks: Callable[[SequenceState], int]
) -> tuple[HeldAttempt, ...]:
    """At most `limit` attempts: up to half of them are the most urgent of those that wait, the rest the least urgent of
    those that run, of equals those with the most output to come. Where there are fewer of either there are more of the
    other.

    Args:
        own_blocks: Blocks of a sequence that would be free if it left.
    """
    waiters, runners = len(waiting), len(running)
    first = min(waiters, max(limit // 2, limit - runners))
    # Stable: of equal priority they come in the order of the line, which is that in which they would be let in.
    chosen = nsmallest(first, waiting.items, key=lambda state: -state.priority)
    chosen += nlargest(limit - first, running.items, key=lambda state: (-state.priority, remaining_tokens(state)))
    return tuple(_held(state, own_blocks(state)) for state in chosen)


def remaining_tokens(state: SequenceState) -> int:
    """Output that is still expected of it; one that is live makes one more at least."""
    return max(1, ceil(state.predicted_tokens) - state.tokens)


def _held(state: SequenceState, blocks: int) -> HeldAttempt:
    request_id, attempt = state.identity
    if state.running:
        standing = Standing.RUNS
    else:
        standing = Standing.PAUSED if state.blocks or state.host_blocks else Standing.WAITS
    return HeldAttempt(
        request_id=request_id,
        attempt=attempt,
        priority=state.priority,
        standing=standing,
        blocks=blocks,
        tokens=state.computed,
        remaining_tokens=remaining_tokens(state),
        to_compute_tokens=max(0, state.tokens - state.computed),
    )
