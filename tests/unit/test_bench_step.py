"""The laws of `bench step`: it ends whatever the engine does, and gives no figure that it did not measure."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from cluster.config import EngineConfig
from cluster.model import ModelFolder
from cluster.ports import EngineProgress, HeldAttempt, MovesPort, StepResult
from cluster.types import EngineLoad, Request, RequestId
from ops.bench.step import StepSettings, TimedEngine, build_report, measure
from ops.errors import CommandError

LOAD = EngineLoad(slots_total=2, blocks_total=8, blocks_free=8, block_size_tokens=16)


class DyingEngine:
    """An EnginePort that dies when it is given work."""

    moves: MovesPort

    def __init__(self) -> None:
        self._on_death: Callable[[str], None] | None = None

    def start(self, on_result: Callable[[StepResult], None], on_death: Callable[[str], None]) -> None:
        del on_result
        self._on_death = on_death

    def add(self, request: Request, attempt: int) -> None:
        del request, attempt
        assert self._on_death is not None
        self._on_death("out of memory")

    def abort(self, request_id: RequestId, attempt: int) -> None: ...

    def held(self, limit: int) -> Future[tuple[HeldAttempt, ...]]:
        raise NotImplementedError

    def progress(self) -> EngineProgress:
        return EngineProgress(load=LOAD, alive=True, step_age_s=None)

    def stop(self) -> None: ...


async def test_engine_that_dies_ends_the_measurement() -> None:
    """In its first round of either kind: the first is streamed, by a router in a process of its own."""
    engine = TimedEngine(DyingEngine(), streams=2)
    async with asyncio.timeout(30):
        with pytest.raises(RuntimeError, match="out of memory"):
            await measure(engine, StepSettings(streams=2, tokens=4, rounds=1), lambda: None)


def test_report_of_no_step_is_refused_naming_the_option(tiny_model: ModelFolder) -> None:
    settings = StepSettings(streams=64, tokens=2, rounds=1)
    with pytest.raises(CommandError, match="--tokens"):
        build_report({"alone": [1.0], "streamed": []}, settings, tiny_model, EngineConfig())
