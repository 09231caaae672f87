"""The interfaces between what decides and what touches the world.

Owns: the Protocols that adapters implement, so that production (sockets, Ray, the real clock), the simulator and the
tests can each supply theirs. Adapters translate and never decide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from cluster.messages import StepFrame
from cluster.types import (
    EngineLoad,
    Generation,
    Preempted,
    Refusal,
    ReplicaId,
    ReplicaReport,
    Request,
    RequestId,
    TokenDelta,
    Value,
)


class Clock(Protocol):
    def monotonic(self) -> float:
        """Seconds from an arbitrary start; never goes back. For ages and timeouts."""
        ...

    def unix(self) -> float:
        """Seconds since 1970. For stamps that other machines read."""
        ...


# --- engine: what a replica drives, whichever engine it is ---


class StepResult(Value, frozen=True):
    """What one turn of the engine's loop produced. `deltas` are of this step only, in no particular order."""

    load: EngineLoad
    deltas: tuple[TokenDelta, ...] = ()
    preempted: tuple[Preempted, ...] = ()
    refusals: tuple[Refusal, ...] = ()


class EngineProgress(Value, frozen=True):
    """The engine as seen from outside its thread. Reading it never waits for a step."""

    load: EngineLoad
    alive: bool
    """False once the engine's thread has ended, for whatever reason."""
    step_age_s: float | None
    """Age of the step that runs now; None between steps and when idle."""
    failure: str = ""
    """Why it ended, when it was not asked to."""


class EnginePort(Protocol):
    """An engine that runs by itself. Calls return at once, from any thread; their effect shows in results.

    Every change of load, also one without a step (an abort that leaves it idle), is followed by a result.
    """

    def start(self, on_result: Callable[[StepResult], None], on_death: Callable[[str], None]) -> None:
        """Begin. Both callbacks are called in the engine's own thread and must not block."""
        ...

    def add(self, request: Request, attempt: int) -> None:
        """Take a request. A refusal comes back in a result."""
        ...

    def abort(self, request_id: RequestId, attempt: int) -> None:
        """End an attempt: its blocks are free before the next step is planned. Unknown attempts are ignored."""
        ...

    def progress(self) -> EngineProgress: ...

    def stop(self) -> None:
        """End the engine's thread after the step that runs; returns when it has ended."""
        ...


# --- router: its side of a replica ---


class ReplicaPort(Protocol):
    """A router's link to one incarnation of one replica. Calls never block and never raise for a broken link: what is
    sent while the link is down is answered by `replica_lost`, or settled by `resend_from` when it is up again."""

    @property
    def replica_id(self) -> ReplicaId: ...

    @property
    def generation(self) -> Generation: ...

    def add(self, request: Request, attempt: int) -> int:
        """Send a request. Returns its sequence number; reports with `applied_sequence` >= it count it."""
        ...

    def abort(self, request_id: RequestId, attempt: int) -> None: ...

    def resend_from(self, request_id: RequestId, attempt: int, choice: int, index: int) -> None: ...


class ReplicaListener(Protocol):
    """What the router's core is told by its links, always on its own event loop."""

    def link_up(self, port: ReplicaPort, report: ReplicaReport | None) -> None:
        """A replica can be reached, for the first time or again after a break (same generation)."""
        ...

    def link_down(self, replica_id: ReplicaId, generation: Generation) -> None:
        """The link broke; it is being re-established. Nothing new is sent there."""
        ...

    def replica_lost(self, replica_id: ReplicaId, generation: Generation, why: str) -> None:
        """This incarnation is gone for good; its attempts are over."""
        ...

    def frame(self, replica_id: ReplicaId, generation: Generation, frame: StepFrame) -> None: ...


# --- engine backend: what computes ---


class SampleSpec(Value, frozen=True):
    """How the next token after a row is drawn. `uniform` in [0, 1) is inverted over the filtered distribution."""

    temperature: float
    top_p: float
    top_k: int
    uniform: float


class Row(Value, frozen=True):
    """One sequence's part of one step: `token_ids` are run at positions start, start + 1, …

    `block_table` names the physical blocks of positions 0 … start + len(token_ids) - 1, in order. The keys and values
    of positions below `start` are already in them.
    """

    token_ids: tuple[int, ...]
    start: int
    block_table: tuple[int, ...]
    sample: SampleSpec | None
    """None where more of the prompt is still to come and no token is drawn."""


class Backend(Protocol):
    """Computes one step over a paged KV cache that it allocated. Knows nothing of requests, order or priority."""

    @property
    def vocab_size(self) -> int:
        """Token ids that can be run are 0 … vocab_size - 1."""
        ...

    def run(self, rows: Sequence[Row]) -> Sequence[int | None]:
        """Run all rows as one batch, write their keys and values to the cache, and draw.

        Returns the drawn token id of each row with a `sample`, in the order of the rows; None where nothing can be
        drawn, because the row's logits are not numbers.
        """
        ...
