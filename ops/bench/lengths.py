"""Real lengths of prompts and answers, as data of our own.

Owns: the sample of the Azure LLM inference trace of 2023 (Microsoft, CC-BY-4.0): every sixth request of the conversation
service, in the order of arrival. Imports nothing of ours. Invariant: the same seed gives the same lengths, on every
machine.
"""

from __future__ import annotations

import csv
import random
from functools import cache
from pathlib import Path
from typing import NamedTuple

SOURCE = "Azure LLM inference trace 2023, conversation service, every sixth request (Microsoft, CC-BY-4.0)"
_FILE = Path(__file__).parent / "data" / "azure_conversation_lengths.csv"


class Lengths(NamedTuple):
    """One request. Both are at least 1."""

    prompt_tokens: int
    output_tokens: int

    def divided(self, prompt_divisor: int, output_divisor: int) -> Lengths:
        """Scaled down for a smaller machine, rounded, never below 1."""
        return Lengths(
            max(1, round(self.prompt_tokens / prompt_divisor)), max(1, round(self.output_tokens / output_divisor))
        )


@cache
def conversation_lengths() -> tuple[Lengths, ...]:
    """All 3,228 of the sample, in the order of their arrival."""
    with _FILE.open(encoding="utf-8", newline="") as file:
        return tuple(Lengths(int(row["prompt_tokens"]), int(row["output_tokens"])) for row in csv.DictReader(file))


def shuffled_lengths(seed: int) -> list[Lengths]:
    """The sample in random order: what a steady mix of the whole hour looks like."""
    lengths = list(conversation_lengths())
    random.Random(seed).shuffle(lengths)
    return lengths
