"""Engines whose steps take a stated time, so that the schedule and not the machine decides."""

from __future__ import annotations

import time
from collections.abc import Sequence

from cluster.config import EngineConfig
from cluster.engine.engine import Engine
from cluster.engine.text import TextCodec
from cluster.model import ModelFolder
from cluster.ports import Backend, Row, RowOutput


class PaddedBackend:
    """A real backend whose steps take at least `step_s`, and `row_s` more for each row of the batch."""

    def __init__(self, inner: Backend, step_s: float, row_s: float = 0.0) -> None:
        self._inner = inner
        self._step_s = step_s
        self._row_s = row_s
        self.vocab_size = inner.vocab_size
        self.kv_block_bytes = inner.kv_block_bytes
        self.kv_format = inner.kv_format
        self.copy_block = inner.copy_block
        self.save_blocks = inner.save_blocks
        self.load_blocks = inner.load_blocks

    def run(self, rows: Sequence[Row], padding_tokens: int = 0) -> Sequence[RowOutput]:
        ends = time.monotonic() + self._step_s + self._row_s * len(rows)
        outputs = self._inner.run(rows, padding_tokens)
        time.sleep(max(0.0, ends - time.monotonic()))
        return outputs


def engine_over(backend: Backend, model: ModelFolder, config: EngineConfig) -> Engine:
    """The engine that runs `model` on `backend`."""
    return Engine(config, backend, TextCodec.from_file(model.tokenizer_path), model.eos_token_ids)
