"""What a plan of one step is made from and what it says.

Owns: `View`, `StepPlan` and the interface of the batching modes. Imports cluster.config and
cluster.engine.scheduling. Invariant: a plan is complete. The engine adds no decision of its own to it, and carrying it
out cannot fail for want of slots, blocks or budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from cluster.config import EngineConfig
from cluster.engine.scheduling.order import Order
from cluster.engine.scheduling.sequence import SequenceState


class View(NamedTuple):
    """The engine at the start of a step. Both lines are sorted by key."""

    waiting: Sequence[SequenceState]
    running: Sequence[SequenceState]
    blocks_free: int


class Preemption(NamedTuple):
    victim: SequenceState
    urgent: SequenceState | None
    """For whom; None when the KV pool ran out."""


class Admission(NamedTuple):
    sequence: SequenceState
    blocks: int
    """For all its tokens and the next one."""


class Chunk(NamedTuple):
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


class Planner(Protocol):
    """A batching mode."""

    def __call__(self, view: View, config: EngineConfig, order: Order) -> StepPlan: ...
