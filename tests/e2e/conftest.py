"""The line that most end-to-end tests share: two replicas of the tiny model, 32 slots each."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cluster.clock import SystemClock
from cluster.config import EngineConfig, RouterConfig
from cluster.engine.runner import EngineRunner
from cluster.model import ModelFolder
from cluster.ports import EnginePort
from deployments.settings import ModelConfig, Profile
from tests.line import Line, running_line
from tests.padded import PaddedBackend, engine_over

STEP_S = 0.06
"""Length of a padded step: long against what HTTP and the event loop take on a busy machine."""

MODEL = ModelConfig(replicas=2, engine=EngineConfig(slots=32, step_token_budget=64, blocks=1024, max_model_len=1024))
PROFILE = Profile(models=(MODEL,), router=RouterConfig())


def padded_engine(model: ModelFolder) -> EnginePort:
    from cluster.engine.torch.backend import TorchBackend

    backend = PaddedBackend(TorchBackend(model, MODEL.engine), STEP_S)
    return EngineRunner(engine_over(backend, model, MODEL.engine), SystemClock())


@pytest.fixture
async def line(tiny_model: ModelFolder, tmp_path: Path) -> AsyncIterator[Line]:
    async with running_line(tiny_model, PROFILE, tmp_path) as running:
        yield running


@pytest.fixture
async def slow_line(tiny_model: ModelFolder, tmp_path: Path) -> AsyncIterator[Line]:
    """The same with padded steps."""
    async with running_line(tiny_model, PROFILE, tmp_path, padded_engine) as running:
        yield running
