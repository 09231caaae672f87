"""A closed loop around one engine at saturation: as many users as slots, each with one request at a time.

Owns: the loop, its clock-free bookkeeping and what one setting gave (`Measured`). Imports the engine and its ports; the
clock is an argument, so the same loop runs in virtual and in real time. Invariants: a user sends the next request when
the last one has ended, before the next step is planned; what is measured lies between the end of one request and the end
of a later one that is a multiple of the slots away, which for static batching are the ends of whole batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from cluster.engine.engine import Engine
from cluster.ports import Backend, Row, RowOutput, StepResult
from cluster.types import PreemptionMeans, Request, RequestId


class Mode(StrEnum):
    """The rows of the table. `none` is a batch of one."""

    NONE = "none"
    STATIC = "static"
    DYNAMIC = "dynamic"
    CONTINUOUS = "continuous"


@dataclass(frozen=True, slots=True)
class Setting:
    """One mode at one batch size."""

    mode: Mode
    slots: int
    step_token_budget: int
    """Tokens of one step; what padding adds comes on top."""

    @property
    def name(self) -> str:
        return self.mode if self.mode is Mode.NONE else f"{self.mode}{self.slots}"


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is run, in requests that end. A multiple of the slots where whole batches matter."""

    warm_up: int
    measured: int


@dataclass(frozen=True, slots=True)
class Measured:
    """What one setting gave. Latency is from sending to the end; times are as the clock of the run has them."""

    setting: Setting
    tok_s: float
    """Output tokens per second."""
    mean_ms_per_token: float
    """Sum of the latencies ÷ sum of the output tokens."""
    p50_ms_per_token: float
    """Of each request's latency ÷ its output tokens."""
    p99_ms_per_token: float
    slot_utilisation: float
    """Share of the slots' time in which a request of theirs was run."""
    kv_efficiency: float
    """Positions written ÷ positions reserved, over time."""
    padding_share: float
    """Share of the tokens run that belonged to nobody."""
    prefill_tokens: int
    decode_tokens: int
    """Tokens run; with those of the prompts' ends they are the output's."""
    output_tokens: int
    preemptions: int
    steps: int
    duration_s: float

    @property
    def latency_spread(self) -> float:
        return self.p99_ms_per_token / self.p50_ms_per_token


class MeteredBackend:
    """A backend around another that counts what the engine asks of it."""

    def __init__(self, inner: Backend) -> None:
        self._inner = inner
        self.rows = 0
        """Since `begin_step`, as is the next."""
        self.rectangle_tokens = 0
        """Positions that the step's batch spans when every row is as long as the longest."""
        self.tokens_total = 0
        """Tokens run, without padding."""
        self.decode_tokens_total = 0
        """Of those, the ones that were a sequence's only one in their step."""
        self.padding_tokens_total = 0

    def begin_step(self) -> None:
        self.rows = self.rectangle_tokens = 0

    @property
    def vocab_size(self) -> int:
        return self._inner.vocab_size

    @property
    def kv_block_bytes(self) -> int:
        return self._inner.kv_block_bytes

    @property
    def kv_format(self) -> str:
        return self._inner.kv_format

    def run(self, rows: Sequence[Row], padding_tokens: int = 0) -> Sequence[RowOutput]:
        outputs = self._inner.run(rows, padding_tokens)
        tokens = sum(len(row.token_ids) for row in rows)
        width = max(len(row.token_ids) for row in rows)
        longest = max(row.start + len(row.token_ids) for row in rows)
        self.rows += len(rows)
        self.rectangle_tokens += longest * -(-(tokens + padding_tokens) // width)
        self.tokens_total += tokens
        self.decode_tokens_total += sum(len(row.token_ids) == 1 for row in rows)
        self.padding_tokens_total += padding_tokens
        return outputs

    def copy_block(self, source: int, target: int) -> None:
        self._inner.copy_block(source, target)

    def save_blocks(self, blocks: Sequence[int]) -> memoryview:
        return self._inner.save_blocks(blocks)

    def load_blocks(self, blocks: Sequence[int], saved: memoryview) -> None:
        self._inner.load_blocks(blocks, saved)


@dataclass(slots=True)
class _Sent:
    at_ms: float
    prompt_tokens: int
    output_tokens: int = 0


class _Totals:
    """Sums over the part of the run that is measured."""

    def __init__(self, meter: MeteredBackend, now_ms: float) -> None:
        self.began_ms = now_ms
        self.run_before = meter.tokens_total
        self.decodes_before = meter.decode_tokens_total
        self.padding_before = meter.padding_tokens_total
        self.output_tokens = self.steps = self.preemptions = 0
        self.busy_slot_ms = self.written_ms = self.reserved_ms = 0.0
        self.latency_ms: list[float] = []
        self.latency_tokens: list[int] = []


def saturate(
    engine: Engine,
    meter: MeteredBackend,
    requests: Iterator[Request],
    setting: Setting,
    extent: Extent,
    now_ms: Callable[[], float],
    show: Callable[[int], None],
    *,
    rectangular: bool = False,
) -> Measured:
    """Run `extent` and leave the rest where it is.

    Args:
        engine: New, over `meter`, with `setting` in its config. Blocks are not kept for later and nothing is swapped.
        requests: As many as are needed, each with an id of its own; stamped as they are sent.
        now_ms: The clock of the backend.
        show: Called with the number of requests that have ended.
        rectangular: The backend lays a batch out as one rectangle, so its memory is reserved as one.

    Raises:
        RuntimeError: a request ended other than by its end token or its length.
    """
    sent: dict[RequestId, _Sent] = {}
    ended = released_tokens = 0
    totals: _Totals | None = None

    def send() -> None:
        request = next(requests)
        sent[request.request_id] = _Sent(now_ms(), len(request.prompt_ids))
        refusal = engine.add(request, 0)
        if refusal is not None:
            raise RuntimeError(f"the engine refused a request: {refusal.reason}")

    for _ in range(setting.slots):
        send()
    while ended < extent.warm_up + extent.measured:
        if totals is None and ended >= extent.warm_up:
            totals = _Totals(meter, now_ms())
        before_ms = now_ms()
        meter.begin_step()
        result = engine.step()
        after_ms = now_ms()
        output_tokens, done = _account(result, sent)
        for request_id in done:
            gone = sent.pop(request_id)
            released_tokens += gone.prompt_tokens + gone.output_tokens - 1
            ended += 1
            if totals is not None:
                totals.latency_ms.append(after_ms - gone.at_ms)
                totals.latency_tokens.append(gone.output_tokens)
            send()
        released_tokens += sum(p.tokens_to_recompute for p in result.preempted if p.means is PreemptionMeans.RECOMPUTE)
        if totals is not None:
            step_ms = after_ms - before_ms
            load = result.load
            held_tokens = (load.blocks_total - load.blocks_free) * load.block_size_tokens
            totals.steps += 1
            totals.preemptions += len(result.preempted)
            totals.output_tokens += output_tokens
            totals.busy_slot_ms += meter.rows * step_ms
            totals.written_ms += (meter.tokens_total - released_tokens) * step_ms
            totals.reserved_ms += max(held_tokens, meter.rectangle_tokens if rectangular else 0) * step_ms
        show(ended)
    assert totals is not None
    return _measured(totals, meter, setting, now_ms())


def _account(result: StepResult, sent: dict[RequestId, _Sent]) -> tuple[int, list[RequestId]]:
    """Count the step's tokens to their requests; returns how many there are and who has ended."""
    output_tokens = 0
    done: list[RequestId] = []
    for delta in result.deltas:
        if delta.error:
            raise RuntimeError(f"a request failed: {delta.error}")
        output_tokens += len(delta.token_ids)
        sent[delta.request_id].output_tokens += len(delta.token_ids)
        if delta.finish is not None:
            done.append(delta.request_id)
    return output_tokens, done


def _measured(totals: _Totals, meter: MeteredBackend, setting: Setting, now_ms: float) -> Measured:
    duration_ms = now_ms - totals.began_ms
    run_tokens = meter.tokens_total - totals.run_before
    decode_tokens = meter.decode_tokens_total - totals.decodes_before
    padding_tokens = meter.padding_tokens_total - totals.padding_before
    per_token = np.divide(totals.latency_ms, totals.latency_tokens)
    return Measured(
        setting=setting,
        tok_s=1000 * totals.output_tokens / duration_ms,
        mean_ms_per_token=sum(totals.latency_ms) / sum(totals.latency_tokens),
        p50_ms_per_token=float(np.percentile(per_token, 50)),
        p99_ms_per_token=float(np.percentile(per_token, 99)),
        slot_utilisation=totals.busy_slot_ms / (setting.slots * duration_ms),
        kv_efficiency=totals.written_ms / totals.reserved_ms,
        padding_share=padding_tokens / (run_tokens + padding_tokens),
        prefill_tokens=run_tokens - decode_tokens,
        decode_tokens=decode_tokens,
        output_tokens=totals.output_tokens,
        preemptions=totals.preemptions,
        steps=totals.steps,
        duration_s=duration_ms / 1000,
    )
