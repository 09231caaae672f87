"""What tests of moves with vLLM share.

`PlainBackend` makes an embedded engine of transformers' model, which is too slow for anything else and needs nothing that
vLLM's environment has not: what it keeps in its blocks are token ids, and each next token is drawn from a forward pass over
all that it reads back.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM

from cluster.clock import SystemClock
from cluster.config import EngineConfig, EngineKind, VllmConfig
from cluster.engine.engine import Engine
from cluster.engine.runner import EngineRunner
from cluster.engine.text import TextCodec
from cluster.engine.torch.sampling import draw
from cluster.model import ModelFolder
from cluster.ports import Row, RowOutput
from cluster.types import Request
from tests.conformance.engine_kit import undisturbed
from tests.conformance.transformers_model import TransformersModel
from tests.move_laws import MAX_HELD

TOKEN = struct.Struct("<i")
CONFIG = EngineConfig(
    kind=EngineKind.VLLM,
    slots=4,
    step_token_budget=256,
    block_size_tokens=32,
    blocks=48,
    max_model_len=512,
    max_held=MAX_HELD,
    vllm=VllmConfig(eager=True),
)
TOKENS = 300
"""Long enough to be cut."""


class PlainBackend:
    kv_format = "token ids"

    def __init__(self, model: ModelFolder, config: EngineConfig) -> None:
        self.vocab_size = model.vocab_size
        self.kv_block_bytes = config.block_size_tokens * TOKEN.size
        self._size = config.block_size_tokens
        self._store = [[0] * self._size for _ in range(config.blocks)]
        self._model = AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32)

    @torch.inference_mode()
    def run(self, rows: Sequence[Row], padding_tokens: int = 0) -> list[RowOutput]:
        for row in rows:
            for position, token_id in enumerate(row.token_ids, start=row.start):
                self._store[row.block_table[position // self._size]][position % self._size] = token_id
        return [self._drawn(row) for row in rows]

    def _drawn(self, row: Row) -> RowOutput:
        if row.sample is None:
            return RowOutput()
        ids = [token_id for block in row.block_table for token_id in self._store[block]]
        logits = self._model(torch.tensor([ids[: row.start + len(row.token_ids)]])).logits[0, -1:]
        return RowOutput(draw(logits, [row.sample])[0])

    def copy_block(self, source: int, target: int) -> None:
        self._store[target] = list(self._store[source])

    def save_blocks(self, blocks: Sequence[int]) -> memoryview:
        return memoryview(b"".join(TOKEN.pack(token_id) for block in blocks for token_id in self._store[block]))

    def load_blocks(self, blocks: Sequence[int], saved: memoryview) -> None:
        ids = [token_id for (token_id,) in TOKEN.iter_unpack(saved)]
        for k, block in enumerate(blocks):
            self._store[block] = ids[k * self._size : (k + 1) * self._size]


def plain_engine(model: ModelFolder, config: EngineConfig) -> EngineRunner:
    codec = TextCodec.from_file(model.tokenizer_path)
    return EngineRunner(Engine(config, PlainBackend(model, config), codec, model.eos_token_ids), SystemClock())


class Outputs:
    """What requests put out alone, by transformers; remembered. None where two candidates are closer than rounding."""

    def __init__(self, model: ModelFolder) -> None:
        self._model = TransformersModel(model)
        self._known: dict[tuple[object, ...], list[int] | None] = {}

    def __call__(self, r: Request) -> list[int] | None:
        key = (r.prompt_ids, r.sampling)
        if key not in self._known:
            output = undisturbed(r, max_model_len=512, model=self._model)
            self._known[key] = None if output.undecided else output.token_ids
        return self._known[key]
