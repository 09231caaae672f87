"""The batching modes on the embedded engine, in real time, and the times of its single steps.

Owns: what is run there (conversation lengths ÷ 16 and ÷ 4) and how a step is timed. Imports the engine and its torch
backend. Invariant: runs and single steps are of one backend, loaded once, in one process.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import mean

from cluster.config import BatchingMode, DType, EngineConfig, Order
from cluster.engine.engine import Engine
from cluster.engine.text import TextCodec
from cluster.engine.torch.backend import TorchBackend
from cluster.engine.torch.build import warm_up
from cluster.model import ModelFolder
from cluster.ports import Backend, Row, SampleSpec
from cluster.types import Request, RequestId, Sampling
from ops.bench.batching_bound import StepSamples
from ops.bench.batching_loop import Extent, Measured, MeteredBackend, Mode, Setting, saturate
from ops.bench.lengths import Lengths, shuffled_lengths

PROMPT_DIVISOR = 16
OUTPUT_DIVISOR = 4
MAX_MODEL_LEN = 2048
BLOCK_SIZE_TOKENS = 16
BLOCKS = 1024
PREFILL_CHUNKS = (64, 128, 256)
"""Tokens of a step in which prompts alone are run, for the bound."""


def now_ms() -> float:
    return time.perf_counter() * 1000


def scaled_lengths(seed: int) -> list[Lengths]:
    return [one.divided(PROMPT_DIVISOR, OUTPUT_DIVISOR) for one in shuffled_lengths(seed)]


def engine_config(setting: Setting, dtype: DType) -> EngineConfig:
    return EngineConfig(
        mode=BatchingMode.CONTINUOUS if setting.mode is Mode.NONE else BatchingMode(setting.mode),
        order=Order.FCFS,
        slots=setting.slots,
        step_token_budget=setting.step_token_budget,
        block_size_tokens=BLOCK_SIZE_TOKENS,
        blocks=BLOCKS,
        max_model_len=MAX_MODEL_LEN,
        max_held=2 * setting.slots,
        host_blocks=0,
        dtype=dtype,
    )


class EmbeddedMachine:
    """The model, loaded once for all settings."""

    def __init__(self, model: ModelFolder, dtype: DType, largest: Setting) -> None:
        """Load and warm up; `largest` has the most slots that will be asked for.

        Raises:
            ModelFolderError: the model cannot be loaded or served; one line says why.
        """
        config = engine_config(largest, dtype)
        self.dtype = dtype
        self.backend = TorchBackend(model, config)
        self._cost = warm_up(self.backend, config)
        self._codec = TextCodec.from_file(model.tokenizer_path)
        self._eos = model.eos_token_ids

    def run(self, setting: Setting, extent: Extent, seed: int, show: Callable[[int], None]) -> Measured:
        """Run one setting in an engine of its own."""
        meter = MeteredBackend(self.backend)
        engine = Engine(engine_config(setting, self.dtype), meter, self._codec, self._eos, self._cost)
        requests = _requests(seed, self.backend.vocab_size)
        return saturate(engine, meter, requests, setting, extent, now_ms, show)


def _requests(seed: int, vocab_size: int) -> Iterator[Request]:
    """Greedy, of exact length, prompts of random tokens, so that nothing is shared."""
    draw = random.Random(seed)
    for number, one in enumerate(itertools.cycle(scaled_lengths(seed))):
        yield Request(
            request_id=RequestId(f"{number:08}"),
            tenant="bench",
            priority=0,
            priority_class="standard",
            arrived_unix_s=now_ms() / 1000,
            prompt_ids=tuple(draw.randrange(vocab_size) for _ in range(one.prompt_tokens)),
            sampling=Sampling(max_tokens=one.output_tokens, seed=0, temperature=0.0, ignore_eos=True),
        )


# --- the step times that the bound is made of ---


def measure_steps(backend: Backend, batches: Sequence[int], samples: StepSamples, seed: int) -> None:
    """Measure each kind of step once more and add it to `samples`. The cache is written to: no engine may be using it."""
    lengths = scaled_lengths(seed)
    prompt_tokens = round(mean(one.prompt_tokens for one in lengths))
    decodes = sum(one.output_tokens - 1 for one in lengths)  # a first token comes with the end of its prompt
    # Seen from a decode: long answers have more of them, at longer contexts.
    contexts = sum((one.output_tokens - 1) * (one.prompt_tokens + one.output_tokens / 2) for one in lengths)
    context_tokens = round(contexts / decodes)
    prompt_per_decode = sum(one.prompt_tokens for one in lengths) / decodes
    draw = random.Random(seed)
    rows = _RowMaker(draw, backend.vocab_size)
    for batch in batches:
        decoding = rows.decodes(batch, context_tokens)
        samples.decode_ms.setdefault(batch, []).append(_timed_ms(backend, decoding))
        beside = rows.prompts(max(1, round(batch * prompt_per_decode)), prompt_tokens)
        samples.mixed_ms.setdefault(batch, []).append(_timed_ms(backend, decoding + beside))
        rows.clear()
    for tokens in PREFILL_CHUNKS:
        samples.prefill_ms.setdefault(tokens, []).append(_timed_ms(backend, rows.prompts(tokens, prompt_tokens)))
        rows.clear()


class _RowMaker:
    """Rows over blocks that no two share."""

    def __init__(self, draw: random.Random, vocab_size: int) -> None:
        self._draw = draw
        self._vocab_size = vocab_size
        self._next_block = 0

    def clear(self) -> None:
        """Begin again with the first block."""
        self._next_block = 0

    def decodes(self, batch: int, context_tokens: int) -> list[Row]:
        return [self._row(1, context_tokens) for _ in range(batch)]

    def prompts(self, tokens: int, prompt_tokens: int) -> list[Row]:
        """`tokens` of them in all, in prompts of up to `prompt_tokens`."""
        whole, rest = divmod(tokens, prompt_tokens)
        return [self._row(n, 0) for n in [prompt_tokens] * whole + [rest] * bool(rest)]

    def _row(self, tokens: int, start: int) -> Row:
        blocks = -(-(start + tokens) // BLOCK_SIZE_TOKENS)
        first, self._next_block = self._next_block, self._next_block + blocks
        return Row(
            token_ids=tuple(self._draw.randrange(self._vocab_size) for _ in range(tokens)),
            start=start,
            block_table=tuple(range(first, first + blocks)),
            sample=SampleSpec(temperature=0.0),
        )


def _timed_ms(backend: Backend, rows: Sequence[Row]) -> float:
    begin_ms = now_ms()
    backend.run(rows)
    return now_ms() - begin_ms
