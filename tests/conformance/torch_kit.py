"""What tests of the torch backend share: transformers' own outputs, and a driver that runs a backend without an engine.

A divergence from transformers is excused as rounding only where the reference itself, teacher-forced to the same prefix,
sees its best candidate less than ROUNDING_GAP above the one that was taken. Such cases are counted and printed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from cluster.config import EngineConfig
from cluster.ports import Backend, Row, SampleSpec

ROUNDING_GAP = 1e-3
ROUNDING_SHARE = 1 / 5_000
GREEDY = SampleSpec(temperature=0.0, top_p=1.0, top_k=0, uniform=0.0)


class Reference:
    """transformers' model of a folder in float32 with its own attention and its own cache."""

    def __init__(self, folder: Path, attention: str = "sdpa") -> None:
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=attention, local_files_only=True
        )
        self._generated: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def generate(self, prompt: Sequence[int], tokens: int) -> list[int]:
        """`tokens` greedy tokens after `prompt`, whatever they are."""
        key = (tuple(prompt), tokens)
        if key not in self._generated:
            self._generated[key] = self._generate(prompt, tokens)
        return self._generated[key]

    def _generate(self, prompt: Sequence[int], tokens: int) -> list[int]:
        output = self.model.generate(  # type: ignore[operator]
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones((1, len(prompt)), dtype=torch.int64),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return [int(i) for i in output[0, len(prompt) :]]

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[tokens, vocabulary] after each token."""
        output = self.model(torch.tensor([list(token_ids)]), use_cache=False)
        logits: torch.Tensor = output.logits[0].float()
        return logits


@dataclass
class Comparison:
    """Outputs held against the reference."""

    tokens: int = 0
    rounding: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def check(self, name: str, reference: Reference, prompt: Sequence[int], got: Sequence[int], tokens: int) -> None:
        """Compare with `generate`; where they part, follow `got` to its end with the reference teacher-forced to it."""
        want = reference.generate(prompt, tokens)
        self.tokens += tokens
        if list(got) == want:
            return
        if len(got) != tokens:
            self.wrong.append(f"{name}: {len(got)} tokens instead of {tokens}")
            return
        logits = reference.logits([*prompt, *got[:-1]])[len(prompt) - 1 :]
        best = logits.max(dim=-1)
        for i, token_id in enumerate(got):
            gap = float(best.values[i] - logits[i, token_id])
            if token_id == int(best.indices[i]):
                continue
            said = f"{name}, token {i}: {token_id} taken, {int(best.indices[i])} is better by {gap:.2e}"
            (self.rounding if gap < ROUNDING_GAP else self.wrong).append(said)

    def settle(self) -> None:
        """Print what was excused, and fail if anything was wrong or too much was excused."""
        print(f"\n{self.tokens} tokens compared, {len(self.rounding)} diverged by rounding")
        for line in self.rounding:
            print("  " + line)
        assert not self.wrong, self.wrong
        assert len(self.rounding) <= max(1.0, self.tokens * ROUNDING_SHARE), self.rounding


Tables = dict[int, list[int]]


class HandDriver:
    """Continuous batching in its plainest form: all sequences at once, blocks from a shuffled list, never freed.

    Each step decodes every sequence whose prompt is through and spends what is left of the budget on prompts in order.
    """

    def __init__(self, backend: Backend, config: EngineConfig, seed: int = 0) -> None:
        self._backend = backend
        self._config = config
        self.free = list(range(config.blocks))
        random.Random(seed).shuffle(self.free)
        self.tables: Tables = {}

    def generate(
        self, prompts: Sequence[Sequence[int]], tokens: int, before_step: Callable[[int], None] = lambda _: None
    ) -> list[list[int]]:
        sequences = [list(prompt) for prompt in prompts]
        computed = [0] * len(prompts)
        ends = [len(prompt) + tokens for prompt in prompts]
        self.tables = {i: [] for i in range(len(prompts))}
        step = 0
        while live := [i for i in range(len(prompts)) if len(sequences[i]) < ends[i]]:
            before_step(step)
            step += 1
            rows: dict[int, Row] = {}
            budget = self._config.step_token_budget
            for i in sorted(live, key=lambda i: (len(sequences[i]) - computed[i] > 1, i)):
                count = min(budget, len(sequences[i]) - computed[i])
                if count:
                    rows[i] = self._row(i, sequences[i], computed[i], count)
                    budget -= count
            drawn = iter(self._backend.run(list(rows.values())))
            for i, row in rows.items():
                computed[i] += len(row.token_ids)
                if row.sample is not None:
                    token_id = next(drawn)
                    assert token_id is not None
                    sequences[i].append(token_id)
        return [sequence[len(prompt) :] for sequence, prompt in zip(sequences, prompts, strict=True)]

    def _row(self, i: int, sequence: list[int], computed: int, count: int) -> Row:
        end = computed + count
        while len(self.tables[i]) * self._config.block_size_tokens < end:
            self.tables[i].append(self.free.pop())
        return Row(
            token_ids=tuple(sequence[computed:end]),
            start=computed,
            block_table=tuple(self.tables[i]),
            sample=GREEDY if end == len(sequence) else None,
        )


def random_prompts(lengths: Sequence[int], vocab_size: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]
