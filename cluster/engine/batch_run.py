"""Running a batch on a backend that may fail.

Owns: what is tried again when a step fails, and what is given up. Imports cluster.ports. Invariants: a row is given up
only for a failure of its own, when it was run alone; the number of runs in a step is bounded; rows are repeated only
because the backend promises that a repeated row gives the same again.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.ports import Backend, OutOfMemoryError, Row, RowOutput

log = logging.getLogger(__name__)

REPEATS_MAX = 64
"""Runs that one step may spend on finding the rows that fail. One of 32 is found with ten, each of 32 with 62."""
ALONE_MAX = 3
"""Rows that fail alone while none has succeeded: then it is hardly the rows, and the rest is left for another step."""


@dataclass(slots=True)
class Ran:
    """What became of each row, by its index. A row that is nowhere was not run: it is to be repeated as it is."""

    outputs: dict[int, RowOutput] = field(default_factory=dict)
    failed: dict[int, Exception] = field(default_factory=dict)
    """They fail when they are run alone."""
    shed: list[int] = field(default_factory=list)
    """Left out because the batch did not fit in memory with them; in that order."""
    error: Exception | None = None
    """What the backend raised last."""


def run_batch(backend: Backend, rows: Sequence[Row], last_first: Sequence[int], padding_tokens: int = 0) -> Ran:
    """Run `rows` as one batch if that can be done, else whatever of it can.

    Out of memory: the rows are shed in the order `last_first`, one at a time, until the rest fits; the last one that is
    left fails. Any other failure: the batch is halved and its halves run apart, down to single rows.
    """
    ran = Ran()
    kept = list(range(len(rows)))
    shedding = iter(last_first)
    while True:
        try:
            ran.outputs.update(zip(kept, _run(backend, [rows[i] for i in kept], padding_tokens), strict=True))
        except OutOfMemoryError as error:
            ran.error = error
            if len(kept) == 1:
                ran.failed[kept[0]] = error
                return ran
            shed = next(shedding)
            log.warning("a batch of %d rows did not fit in memory", len(kept))
            kept.remove(shed)
            ran.shed.append(shed)
        except Exception as error:
            log.error("the backend failed on a batch of %d rows", len(kept), exc_info=error)
            ran.error = error
            _run_apart(backend, rows, kept, error, ran)
            return ran
        else:
            return ran


def _run_apart(backend: Backend, rows: Sequence[Row], suspects: list[int], error: Exception, ran: Ran) -> None:
    """`suspects` have failed together. Larger parts are tried before smaller ones, so that good rows are found early."""
    if len(suspects) == 1:
        ran.failed[suspects[0]] = error
        return
    parts = deque(_halves(suspects))
    for _ in range(REPEATS_MAX):
        if not parts or (not ran.outputs and len(ran.failed) >= ALONE_MAX):
            return
        part = parts.popleft()
        try:
            ran.outputs.update(zip(part, _run(backend, [rows[i] for i in part], 0), strict=True))
        except Exception as failure:
            ran.error = failure
            if len(part) == 1:
                log.warning("a row fails alone", exc_info=failure)
                ran.failed[part[0]] = failure
            else:
                parts.extend(_halves(part))


def _halves(part: list[int]) -> list[list[int]]:
    middle = len(part) // 2
    return [part[:middle], part[middle:]]


def _run(backend: Backend, rows: Sequence[Row], padding_tokens: int) -> Sequence[RowOutput]:
    """
    Raises:
        RuntimeError: the backend's answer does not fit the rows.
    """
    outputs = backend.run(rows, padding_tokens)
    if len(outputs) != len(rows):
        raise RuntimeError(f"the backend gave {len(outputs)} outputs for {len(rows)} rows")
    for row, output in zip(rows, outputs, strict=True):
        if row.score is not None and len(output.scores) != len(row.score.targets):
            raise RuntimeError(f"the backend scored {len(output.scores)} of {len(row.score.targets)} tokens")
        sample = row.sample
        if (
            sample is not None
            and sample.logprobs is not None
            and output.logprob is None
            and output.token_id is not None
        ):
            raise RuntimeError("the backend gave no logprob where one was asked for")
    return outputs
