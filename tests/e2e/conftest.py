"""The line that most end-to-end tests share: two replicas of the tiny model, 32 slots each."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from cluster.clock import SystemClock
from cluster.config import EngineConfig, RouterConfig
from cluster.engine.engine import Engine
from cluster.engine.runner import EngineRunner
from cluster.engine.text import TextCodec
from cluster.model import ModelFolder
from cluster.ports import Backend, EnginePort, Row, RowOutput
from deployments.settings import Profile
from tests.line import Line, running_line

STEP_S = 0.06
"""Length of a padded step: long against what HTTP and the event loop take on a busy machine."""

PROFILE = Profile(
    replicas=2,
    engine=EngineConfig(slots=32, step_token_budget=64, blocks=1024, max_model_len=1024),
    router=RouterConfig(),
)


class PaddedBackend:
    """A real backend whose steps take at least STEP_S, so that the schedule and not the machine decides."""

    def __init__(self, inner: Backend) -> None:
        self._inner = inner
        self.vocab_size = inner.vocab_size
        self.kv_block_bytes = inner.kv_block_bytes
        self.kv_format = inner.kv_format
        self.copy_block = inner.copy_block
        self.save_blocks = inner.save_blocks
        self.load_blocks = inner.load_blocks

    def run(self, rows: Sequence[Row], padding_tokens: int = 0) -> Sequence[RowOutput]:
        ends = time.monotonic() + STEP_S
        outputs = self._inner.run(rows, padding_tokens)
        time.sleep(max(0.0, ends - time.monotonic()))
        return outputs


def padded_engine(model: ModelFolder) -> EnginePort:
    from cluster.engine.torch.backend import TorchBackend

    backend = PaddedBackend(TorchBackend(model, PROFILE.engine))
    engine = Engine(PROFILE.engine, backend, TextCodec.from_file(model.tokenizer_path), model.eos_token_ids)
    return EngineRunner(engine, SystemClock())


@pytest.fixture
async def line(tiny_model: ModelFolder, tmp_path: Path) -> AsyncIterator[Line]:
    async with running_line(tiny_model, PROFILE, tmp_path) as running:
        yield running


@pytest.fixture
async def slow_line(tiny_model: ModelFolder, tmp_path: Path) -> AsyncIterator[Line]:
    """The same with padded steps."""
    async with running_line(tiny_model, PROFILE, tmp_path, padded_engine) as running:
        yield running
