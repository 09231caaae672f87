"""What a plan of one step is made from and what it says.

Owns: `View`, `StepPlan` and the interface of the batching modes. Imports cluster.config and
cluster.engine.scheduling. Invariant: a plan is complete. The engine adds no decision of its own to it, and carrying it
out cannot fail for want of slots, blocks or budget.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec

from cluster.config import EngineConfig
from cluster.engine.scheduling.giving import Shared
from cluster.engine.scheduling.order import Order
from cluster.engine.scheduling.sequence import SequenceState
from cluster.types import PreemptionMeans


class Cost(NamedTuple):
    """What it costs to bring keys and values back; only the ratio matters."""

    prefill_token_s: float
    """To compute one token again."""
    swap_block_s: float
    """To copy one block to host memory and back."""


def nothing_cached(state: SequenceState) -> int:  # noqa: ARG001
    return 0


def shares_nothing(state: SequenceState) -> Shared:  # noqa: ARG001
    return ()


class View(NamedTuple):
    """The engine at the start of a step. Both lines are sorted by key; together they are all live sequences."""

    waiting: Sequence[SequenceState]
    """New, preempted (some of which keep blocks here or in host memory), or brought from another engine."""
    running: Sequence[SequenceState]
    blocks_free: int
    host_blocks_free: int = 0
    cost: Cost = Cost(1.0, 1.0)
    cached_blocks: Callable[[SequenceState], int] = nothing_cached
    """How many blocks at the beginning of a waiting sequence that holds none the prefix cache has now, never all that
    its known tokens fill: at least one token must be run. Those that nobody holds are counted in `blocks_free` too."""
    unheld_blocks: Callable[[SequenceState], int] = nothing_cached
    """How many of these nobody holds: they leave `blocks_free` when it is admitted."""
    batch_rows: int = 0
    """Sequences that the running batch was formed of: the most that ran together since nothing ran."""
    paused: Sequence[SequenceState] | None = None
    """Those of `waiting` that hold blocks, in the same order (`Line.holding`); None where they are to be looked for,
    which takes time in proportion to all that wait."""
    shared: Callable[[SequenceState], Shared] = shares_nothing
    """Those blocks of a running or paused sequence that do not become free when it alone gives up its own."""


class Preemption(NamedTuple):
    """A running victim leaves its slot, or a waiting one loses the blocks that it had kept."""

    victim: SequenceState
    urgent: SequenceState | None
    """For whom; None when the KV pool ran out."""
    means: PreemptionMeans = PreemptionMeans.RECOMPUTE


class Admission(NamedTuple):
    """A waiting sequence gets a slot, and blocks enough for all its tokens and the next one, if there can be one."""

    sequence: SequenceState
    blocks: int
    """Fresh blocks that it takes from the free ones (swapped-out blocks come back into the first of them)."""
    cached: int = 0
    """Blocks at its beginning that it shares from the prefix cache, before the fresh ones. All admissions of a plan take
    theirs before any takes fresh ones, which could be these very blocks."""
    source: SequenceState | None = None
    """A sibling that has computed the common prompt: it shares the sibling's full blocks of the prompt but for the
    last token; if that token is not the first of its block, the first fresh block begins as a copy of the sibling's."""


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """The next `tokens` tokens of a sequence run in this step."""

    sequence: SequenceState
    tokens: int
    blocks: int
    """Blocks to add to its table first."""
    draws: bool
    """These are the last of its known tokens, so the next one is drawn."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Carried out in this order: preempt, admit, run the chunks. `yielded` are decodes that sit this step out."""

    preempted: tuple[Preemption, ...] = ()
    admitted: tuple[Admission, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    yielded: tuple[SequenceState, ...] = ()
    blocked: SequenceState | None = None
    """A waiting sequence kept out only because its victims have been pushed out too often already."""
    overtaken: tuple[SequenceState, ...] = ()
    """Waiting sequences that were too large for the free blocks and were passed; once per sequence that passed."""
    padding_tokens: int = 0
    """Tokens of work that this step does for nobody, because its batch is padded."""


class Planner(Protocol):
    """A batching mode."""

    def __call__(self, view: View, config: EngineConfig, order: Order) -> StepPlan: ...
