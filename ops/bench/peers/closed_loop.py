"""A closed loop over an engine that takes and ends requests singly: as one ends, the next begins.

Owns: when requests begin, what is counted and when the count ends (see lines.py). Imports only lines.py.
Invariant: `concurrency` requests are in flight at every step that is counted, and each that ended is of exact length.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from ops.bench.peers.lines import Measured


class Progress(NamedTuple):
    """What one step, or one part of it, made of one request."""

    number: int
    tokens: int
    ended: bool


class Stepped(Protocol):
    def add(self, number: int, prompt_ids: Sequence[int], output_tokens: int) -> None: ...

    def step(self) -> Iterable[Progress]: ...

    def abandon(self) -> None:
        """End all that is in flight, at once or before the next `step` returns anything of another request."""
        ...


def run_closed_loop(engine: Stepped, requests: Sequence[tuple[Sequence[int], int]], concurrency: int) -> Measured:
    """Run until fewer than `concurrency` would be in flight.

    Raises:
        RuntimeError: a request ended with another number of tokens than it was to have.
        ValueError: there are fewer requests than `concurrency`.
    """
    if len(requests) < concurrency:
        raise ValueError(f"{len(requests)} requests are fewer than the concurrency, {concurrency}")
    made = [0] * len(requests)
    started_s, cpu_started_s = time.perf_counter(), time.process_time()
    for number in range(concurrency):
        engine.add(number, *requests[number])
    begun, ended, steps = concurrency, 0, 0
    while begun - ended == concurrency:
        for progress in engine.step():
            made[progress.number] += progress.tokens
            if progress.ended:
                ended += 1
                if made[progress.number] != requests[progress.number][1]:
                    raise RuntimeError(
                        f"request {progress.number} ended with {made[progress.number]} tokens, "
                        f"not {requests[progress.number][1]}"
                    )
        steps += 1
        while begun < len(requests) and begun - ended < concurrency:
            engine.add(begun, *requests[begun])
            begun += 1
    seconds, cpu_seconds = time.perf_counter() - started_s, time.process_time() - cpu_started_s
    engine.abandon()
    return Measured(sum(made), seconds, cpu_seconds, steps)
