"""The requests that engines are compared on: real lengths, scaled down, with prompts that share nothing.

Owns: the list and how it is scaled. Imports the lengths only. Invariant: the same numbers give the same list on every
machine, so that every engine is given the same work.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from ops.bench.lengths import shuffled_lengths

PROMPT_DIVISOR = 16
OUTPUT_DIVISOR = 4


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One request: its prompt, and how many tokens are to be made of it, exactly."""

    prompt_ids: tuple[int, ...]
    output_tokens: int


def work_items(count: int, vocab_size: int, max_model_len: int, seed: int) -> list[WorkItem]:
    """The first `count` conversations of the shuffled sample that fit into `max_model_len`, prompts of random tokens.

    The first k of a longer list are the list of k.

    Raises:
        ValueError: the sample has fewer that fit.
    """
    draw = random.Random(seed)
    items: list[WorkItem] = []
    for lengths in shuffled_lengths(seed):
        scaled = lengths.divided(PROMPT_DIVISOR, OUTPUT_DIVISOR)
        if sum(scaled) <= max_model_len:
            prompt_ids = tuple(draw.randrange(vocab_size) for _ in range(scaled.prompt_tokens))
            items.append(WorkItem(prompt_ids, scaled.output_tokens))
        if len(items) == count:
            return items
    raise ValueError(f"count: the sample has {len(items)} requests of at most {max_model_len} tokens, not {count}")
