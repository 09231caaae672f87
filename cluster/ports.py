"""The interfaces between what decides and what touches the world.

Owns: the Protocols that adapters implement, so that production (sockets, Ray, the real clock), the simulator and the
tests can each supply theirs. Adapters translate and never decide.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import msgspec

from cluster.messages import RosterEntry, Standing, StepFrame
from cluster.tally import Snapshot
from cluster.types import (
    EngineLoad,
    EngineState,
    Generation,
    Preempted,
    PrefixChange,
    Refusal,
    ReplicaId,
    ReplicaReport,
    Request,
    RequestId,
    TokenDelta,
    TokenLogprob,
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
    prefixes: PrefixChange | None = None
    """None where nothing changed. All that an engine has ever told together is what its prefix cache holds."""


class EngineProgress(Value, frozen=True):
    """The engine as seen from outside its thread. Reading it never waits for a step."""

    load: EngineLoad
    alive: bool
    """False once the engine's thread has ended, for whatever reason."""
    step_age_s: float | None
    """Age of the step that runs now; None between steps and when idle."""
    failure: str = ""
    """Why it ended, when it was not asked to."""
    foretold: tuple[tuple[str, Snapshot], ...] = ()
    """By class, the output tokens of requests that ended by themselves over what was predicted when they were taken."""


NO_KV = ""
"""The `kv_format` of a move in which no keys and values travel."""


class ImportRefusal(StrEnum):
    """Why an engine does not take a request, or its keys and values."""

    FULL = "full"
    """Its bound on held requests is reached."""
    NO_ROOM = "no_room"
    """It has not so many free blocks."""
    KV_FORMAT = "kv_format"
    """Keys and values of the source mean nothing here."""
    KNOWN = "known"
    """This attempt is here already."""
    UNKNOWN = "unknown"
    """Nothing was begun for this attempt, or it was aborted since."""
    MISFIT = "misfit"
    """Blocks that are not whole, that leave a gap before them, or that were not to come."""


class MovesPort(Protocol):
    """Both sides of moves of live requests between engines, whichever these are. Nothing here expires by itself: whoever
    began a move ends it.

    The source's side, while the request still runs: `exportable_blocks`, `export_blocks` as often as new blocks are full;
    then `freeze`, `export_rest`, and `release` once the target has it (or `thaw`). The target's: `import_begin`,
    `import_blocks`, `import_commit` (or `import_abort`).

    Every request can be moved to every engine. Its keys and values travel with it in one of three ways:

    - As bytes, between engines of equal `kv_format`.
    - By a KV connector of the engines' own, between engines of equal `kv_format` too. Then there is nothing to export.
      `freeze` hands the request over to the source's connector, whose note is in `EngineState.kv_handle` and goes to the
      target with `import_commit`. The blocks behind it stay the source's until the target's connector has read them or
      the connector's own lease on them is over, whatever becomes of the request in the meantime: so the source frees
      them after the target has them, but it is the connector that sees to it, not `release`. If the lease ends first, or
      reading fails, the target computes them again.
    - Not at all. `import_begin` refuses another engine's `kv_format` as KV_FORMAT; begun again with NO_KV, it takes the
      request from any engine, reserves its place alone, and computes everything again that its prefix cache does not
      have. An engine whose own `kv_format` is NO_KV knows no other way.

    Each call returns at once; it is made between two steps, in order. Calls that are made before the step ends share one
    pause between steps: `freeze` and `export_rest`, or `import_blocks` and `import_commit`, need not wait for each other.
    A future fails with `EngineStoppedError` if the engine's thread has ended, and with `EngineBusyError` if too many are
    waiting (cluster/engine/inbox.py). What is added to it with `add_done_callback` runs in the engine's thread and must
    not block.
    """

    @property
    def kv_format(self) -> str:
        """Its keys and values can be read where this is equal; NO_KV where nothing but requests ever leaves it."""
        ...

    # --- source ---

    def exportable_blocks(self, request_id: RequestId, attempt: int) -> Future[int]:
        """Blocks at the beginning of a request whose content is final and can be exported."""
        ...

    def export_blocks(self, request_id: RequestId, attempt: int, first: int, count: int) -> Future[memoryview]:
        """A copy of `count` exportable blocks from block `first` on. LookupError where these are not (any more)."""
        ...

    def export_rest(self, request_id: RequestId, attempt: int, first: int) -> Future[memoryview]:
        """All exportable blocks from block `first` on; empty if there are none."""
        ...

    def freeze(self, request_id: RequestId, attempt: int) -> Future[EngineState | None]:
        """Take a request out of scheduling: it neither runs nor is preempted. When this is settled, all that it has put
        out has been told. None if it is not live (it may just have ended); again, the same again."""
        ...

    def thaw(self, request_id: RequestId, attempt: int) -> Future[bool]:
        """The move is off: a frozen request goes on at its place. False if it is not frozen."""
        ...

    def release(self, request_id: RequestId, attempt: int) -> Future[bool]:
        """The target has it: a frozen request is forgotten without a word. False if it is not frozen."""
        ...

    # --- target ---

    def import_begin(
        self, request_id: RequestId, attempt: int, kv_format: str, blocks: int
    ) -> Future[ImportRefusal | None]:
        """Reserve a place, and `blocks` blocks where bytes are to come, for a request that is to come."""
        ...

    def import_blocks(
        self, request_id: RequestId, attempt: int, first: int, data: memoryview
    ) -> Future[ImportRefusal | None]:
        """Blocks `first`, `first` + 1, … have come. `data` must not be changed until this is settled."""
        ...

    def import_commit(self, state: EngineState, attempt: int) -> Future[ImportRefusal | None]:
        """The request is here: it waits, and goes on before new work of its priority. What of its keys and values did not
        come is computed again."""
        ...

    def import_abort(self, request_id: RequestId, attempt: int) -> Future[bool]:
        """Nothing will come: what was reserved is free again. False if nothing was begun."""
        ...


class HeldAttempt(Value, frozen=True):
    """A live attempt as the engine's own books have it, between two steps."""

    request_id: RequestId
    attempt: int
    priority: int
    standing: Standing
    """One whose blocks are in host memory is paused, too."""
    blocks: int
    """That would be free if it left."""
    tokens: int
    """Whose keys and values it has, in blocks or in host memory."""
    remaining_tokens: int
    """Output that is still expected of it, one at least."""
    to_compute_tokens: int
    """Of its prompt and its output so far, those whose keys and values it has not."""


class EnginePort(Protocol):
    """An engine that runs by itself. Calls return at once, from any thread; their effect shows in results.

    Every change of load, also one without a step (an abort that leaves it idle), is followed by a result.
    """

    @property
    def moves(self) -> MovesPort: ...

    def held(self, limit: int) -> Future[tuple[HeldAttempt, ...]]:
        """Of those that run or wait here, the most worth weighing (cluster/engine/held.py); none that is frozen, arrives
        or has ended. Asked and answered as the calls of `MovesPort` are."""
        ...

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

    def add(
        self, request: Request, attempt: int, *, shared: bool = False, trial: int = 0, trial_tokens: int = 0
    ) -> int:
        """Send a request. Returns its sequence number; reports with `applied_sequence` >= it count it.

        Args:
            shared: A minimum share sends it out, past more urgent work.
            trial: A suspect, and what else may be there: `cluster.messages.Add`; until it has `trial_tokens`.
        """
        ...

    def abort(self, request_id: RequestId, attempt: int) -> None: ...

    def resend_from(self, request_id: RequestId, attempt: int, index: int) -> None: ...

    # One move, in order: `move` to the source, which answers FROZEN; `grant` to the target, which answers TAKEN;
    # `release` to the source. Either answers OFF where it is not to be.

    @property
    def entry(self) -> RosterEntry:
        """Where others reach it."""
        ...

    def move(self, request_id: RequestId, attempt: int, number: int, target: RosterEntry) -> None:
        """Have an attempt moved from here, to be attempt `number` there."""
        ...

    def call_off(self, request_id: RequestId, attempt: int) -> None: ...

    def grant(self, request_id: RequestId, attempt: int, index: int) -> int:
        """The attempt that arrives there is the one that counts, from token `index` on. Returns its sequence number, as
        `add` does."""
        ...

    def release(self, request_id: RequestId, attempt: int) -> None: ...


class ReplicaListener(Protocol):
    """What the router's core is told by its links, always on its own event loop."""

    def link_up(self, port: ReplicaPort, report: ReplicaReport | None) -> bool:
        """A replica can be reached, for the first time or again after a break (same generation).

        Returns:
            False where a later incarnation of it is in use: this one is not listened to, and there is to be no link.
        """
        ...

    def link_down(self, replica_id: ReplicaId, generation: Generation) -> None:
        """The link broke; it is being re-established. Nothing new is sent there."""
        ...

    def replica_lost(self, replica_id: ReplicaId, generation: Generation, why: str) -> None:
        """This incarnation is gone for good; its attempts are over."""
        ...

    def frame(self, replica_id: ReplicaId, generation: Generation, frame: StepFrame) -> None: ...


# --- engine backend: what computes ---


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties of `cluster.types.Sampling`, and what they count. Not to be changed by the backend."""

    presence: float
    frequency: float
    repetition: float
    output_counts: Mapping[int, int]
    """Token id -> times that it is in the output so far."""
    prompt_ids: Collection[int]
    """Tokens of the prompt, in any order, for the repetition penalty."""


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """How the next token after a row is drawn. `uniform` in [0, 1) is inverted over the filtered distribution.

    The logits are changed in this order: bias, banned, repetition, frequency and presence penalty; then temperature,
    top_k, top_p, min_p.
    """

    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    uniform: float = 0.0
    min_p: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()
    banned: tuple[int, ...] = ()
    """Token ids that must not be drawn now."""
    penalties: Penalties | None = None
    logprobs: int | None = None
    """Report the drawn token's logprob and so many of the likeliest; None reports nothing."""


@dataclass(frozen=True, slots=True)
class ScoreSpec:
    """Report how likely given tokens are: `targets[k]` after `token_ids[k]` of the row, with `top` of the likeliest."""

    targets: tuple[int, ...]
    """At most as many as the row has tokens."""
    top: int


class Row(msgspec.Struct, frozen=True, gc=False):
    """One sequence's part of one step: `token_ids` are run at positions start, start + 1, …

    `block_table` names the physical blocks of positions 0 … start + len(token_ids) - 1, in order. The keys and values
    of positions below `start` are already in them. Rows may share blocks that none of them writes to.
    """

    token_ids: tuple[int, ...]
    start: int
    block_table: tuple[int, ...]
    sample: SampleSpec | None
    """None where more of the prompt is still to come and no token is drawn."""
    score: ScoreSpec | None = None


class RowOutput(msgspec.Struct, frozen=True, gc=False):
    """What a step computed for one row."""

    token_id: int | None = None
    """The drawn token; None where none was asked for, or where none can be drawn because the logits are no numbers."""
    logprob: TokenLogprob | None = None
    scores: tuple[TokenLogprob, ...] = ()


class OutOfMemoryError(RuntimeError):
    """A step did not fit in the device's memory. Nothing was drawn; fewer rows may fit."""


class Backend(Protocol):
    """Computes one step over a paged KV cache that it allocated. Knows nothing of requests, order or priority."""

    @property
    def vocab_size(self) -> int:
        """Token ids that can be run are 0 … vocab_size - 1."""
        ...

    @property
    def kv_block_bytes(self) -> int:
        """Bytes of one block's keys and values, all layers."""
        ...

    @property
    def kv_format(self) -> str:
        """Names model shape, dtype and block layout: saved blocks can be loaded where this is equal."""
        ...

    def run(self, rows: Sequence[Row], padding_tokens: int = 0) -> Sequence[RowOutput]:
        """Run all rows as one batch, write their keys and values to the cache, and draw.

        Running a row again gives the same again, so part of a batch that failed can be repeated.
        `padding_tokens` more tokens are computed and belong to nobody: the work that a padded batch wastes.

        Returns one output per row, in the order of the rows.

        Raises:
            OutOfMemoryError: the step did not fit.
        """
        ...

    def copy_block(self, source: int, target: int) -> None:
        """Copy the keys and values of one block to another."""
        ...

    def save_blocks(self, blocks: Sequence[int]) -> memoryview:
        """A copy of these blocks in host memory: len(blocks) x kv_block_bytes bytes, block after block."""
        ...

    def load_blocks(self, blocks: Sequence[int], saved: memoryview) -> None:
        """Write what `save_blocks` gave, here or on another engine of the same `kv_format`, to these blocks."""
        ...
