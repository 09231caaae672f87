"""What tests of the torch backend share: transformers' own outputs, the judgement of ours, and two drivers.

`HandDriver` runs a backend without an engine, `serve` an engine without a thread.

The judgement. Where our tokens part from transformers' `generate`, the reference is teacher-forced to ours: its logits
after the prompt and our tokens so far. Parting is excused as rounding only if there the two best candidates (`generate`'s
token and ours) are both less than ROUNDING_GAP below the best; and from there on each of our tokens must again be the
reference's best, or less than ROUNDING_GAP below it. All such places are counted and printed, and there may be at most one
in 1 / ROUNDING_SHARE tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from cluster.config import EngineConfig
from cluster.engine.engine import Engine
from cluster.ports import Backend, Row, SampleSpec, StepResult
from cluster.types import FinishReason, PreemptionMeans, Request, TokenLogprob

ROUNDING_GAP = 1e-3
ROUNDING_SHARE = 1 / 5_000
LOGPROB_GAP = 1e-3
GREEDY = SampleSpec(temperature=0.0)


class Reference:
    """transformers' model of a folder in float32 with its own attention and its own cache."""

    def __init__(self, folder: Path, attention: str = "sdpa") -> None:
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=attention, local_files_only=True
        )
        self._generated: dict[tuple[tuple[int, ...], int, float], list[int]] = {}

    def generate(self, prompt: Sequence[int], tokens: int, repetition_penalty: float = 1.0) -> list[int]:
        """`tokens` greedy tokens after `prompt`, whatever they are."""
        key = (tuple(prompt), tokens, repetition_penalty)
        if key not in self._generated:
            self._generated[key] = self._generate([prompt], tokens, repetition_penalty)[0]
        return self._generated[key]

    def generate_all(self, prompts: Sequence[Sequence[int]], tokens: int) -> None:
        """Have `generate` ready for all of these. Those of one length are generated as a batch: none is padded."""
        by_length: dict[int, list[tuple[int, ...]]] = {}
        for prompt in map(tuple, prompts):
            if (prompt, tokens, 1.0) not in self._generated:
                by_length.setdefault(len(prompt), []).append(prompt)
        for alike in by_length.values():
            for prompt, output in zip(alike, self._generate(alike, tokens), strict=True):
                self._generated[prompt, tokens, 1.0] = output

    def _generate(
        self, prompts: Sequence[Sequence[int]], tokens: int, repetition_penalty: float = 1.0
    ) -> list[list[int]]:
        """`prompts` are all of one length."""
        input_ids = torch.tensor([list(prompt) for prompt in prompts])
        output: torch.Tensor = self.model.generate(  # type: ignore[operator]
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=tokens,
            do_sample=False,
            repetition_penalty=repetition_penalty,
            eos_token_id=None,
            pad_token_id=0,
        )
        generated: list[list[int]] = output[:, input_ids.shape[1] :].tolist()
        return generated

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[tokens, vocabulary] after each token."""
        output = self.model(torch.tensor([list(token_ids)]), use_cache=False)
        logits: torch.Tensor = output.logits[0].float()
        return logits


class Divergence(NamedTuple):
    """A place where our token is not the reference's."""

    place: int
    """Index of the output token."""
    taken: int
    better: int
    gap: float
    """How much better, as a difference of the reference's logits."""

    @property
    def is_rounding(self) -> bool:
        return self.gap < ROUNDING_GAP


def divergences(logits: torch.Tensor, got: Sequence[int], wanted: Sequence[int]) -> list[Divergence]:
    """Where `got` parts from `wanted`, and every place after it where it is not what the reference takes after it.

    `logits`: [len(got), vocabulary], the reference's, each after the prompt and the tokens of `got` before. Where they
    part, the reference's two ways to compute may themselves differ by rounding: there its own token is held to the same
    measure, so the gap is that of the worse of both.
    """
    parted = next((i for i, pair in enumerate(zip(got, wanted, strict=True)) if pair[0] != pair[1]), len(got))
    best = logits.max(dim=-1)
    found = []
    for i in range(parted, len(got)):
        token_ids = (got[i], wanted[i]) if i == parted else (got[i],)
        gap = max(float(best.values[i] - logits[i, token_id]) for token_id in token_ids)
        if i == parted:
            found.append(Divergence(i, got[i], wanted[i], gap))
        elif got[i] != int(best.indices[i]):
            found.append(Divergence(i, got[i], int(best.indices[i]), gap))
    return found


@dataclass
class Comparison:
    """Outputs held against the reference."""

    tokens: int = 0
    rounding: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def check(self, name: str, reference: Reference, prompt: Sequence[int], got: Sequence[int], tokens: int) -> None:
        """Hold `got` against `tokens` tokens that the reference generates after `prompt`."""
        wanted = reference.generate(prompt, tokens)
        self.tokens += tokens
        if list(got) == wanted:
            return
        if len(got) != tokens:
            self.wrong.append(f"{name}: {len(got)} tokens instead of {tokens}")
            return
        logits = reference.logits([*prompt, *got[:-1]])[len(prompt) - 1 :]
        for d in divergences(logits, got, wanted):
            said = f"{name}, token {d.place}: {d.taken} instead of {d.better}, gap {d.gap:.2e}"
            (self.rounding if d.is_rounding else self.wrong).append(said)

    def settle(self) -> None:
        """Print what was excused, and fail if anything was wrong or too much was excused."""
        print(f"\n{self.tokens} tokens compared, {len(self.rounding)} diverged by rounding")
        for line in self.rounding:
            print("  " + line)
        assert self.tokens, "nothing was compared"
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
            outputs = self._backend.run(list(rows.values()))
            for (i, row), output in zip(rows.items(), outputs, strict=True):
                computed[i] += len(row.token_ids)
                assert (output.token_id is None) == (row.sample is None)
                if output.token_id is not None:
                    sequences[i].append(output.token_id)
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


# --- an engine, stepped by hand ---


@dataclass
class Told:
    """All that an engine said of one attempt."""

    token_ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    """Of the text, one per token."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: FinishReason | None = None
    error: str = ""
    means: list[PreemptionMeans] = field(default_factory=list)
    """How it was preempted, each time."""

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def serve(
    engine: Engine,
    arrivals: Mapping[int, Sequence[Request]],
    *,
    attempt: int = 1,
    told: dict[str, Told] | None = None,
    steps: int | None = None,
    first: Mapping[str, int] | None = None,
) -> dict[str, Told]:
    """Step until all is done, or `steps` times, adding requests before the steps that they are given for.

    Checks that no token is lost or doubled, and the engine's books after every step. `told` is what was said before,
    `first` the index of the first token of requests that come here otherwise than as arrivals.
    """
    told = {} if told is None else told
    first = {**(first or {}), **{str(r.request_id): len(r.emitted_ids) for new in arrivals.values() for r in new}}
    step = 0
    while (steps is None and (engine.has_work or any(at >= step for at in arrivals))) or (steps and step < steps):
        for new in arrivals.get(step, ()):
            assert engine.add(new, attempt) is None
        step += 1
        note(engine.step(), told, first)
        engine.check_integrity()
    if not engine.has_work:
        assert engine.pool.blocks_free == engine.pool.blocks_total
    return told


def note(result: StepResult, told: dict[str, Told], first: Mapping[str, int]) -> None:
    for preempted in result.preempted:
        told.setdefault(preempted.request_id, Told()).means.append(preempted.means)
    for delta in result.deltas:
        so_far = told.setdefault(delta.request_id, Told())
        assert so_far.finish is None, "something came after the end"
        assert delta.index == first.get(delta.request_id, 0) + len(so_far.token_ids), "tokens lost or doubled"
        so_far.token_ids += delta.token_ids
        so_far.pieces += delta.pieces
        so_far.logprobs += delta.logprobs
        so_far.prompt_logprobs += delta.prompt_logprobs
        so_far.finish, so_far.error = delta.finish, delta.error


def assert_continues(told: Told, wanted: Told, cut: int = 0) -> None:
    """`told` is what `wanted` says from output token `cut` on: the same tokens and texts, and logprobs within
    LOGPROB_GAP."""
    assert told.token_ids == wanted.token_ids[cut:]
    assert told.pieces == wanted.pieces[cut:]
    assert (told.finish, told.error) == (wanted.finish, wanted.error)
    assert len(told.logprobs) == len(wanted.logprobs[cut:])
    for ours, theirs in zip(told.logprobs, wanted.logprobs[cut:], strict=True):
        assert abs(ours.logprob - theirs.logprob) < LOGPROB_GAP
        # By rank, since two that are close may change places, and by token, since they must not have moved far.
        assert all(abs(a - b) < LOGPROB_GAP for (_, a), (_, b) in zip(ours.top, theirs.top, strict=True))
        known = dict(theirs.top)
        assert all(abs(a - known[token_id]) < LOGPROB_GAP for token_id, a in ours.top if token_id in known)


def random_prompts(lengths: Sequence[int], vocab_size: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]
