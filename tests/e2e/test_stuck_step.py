"""A step that does not end: what its replica has goes on elsewhere as soon as somebody ends the replica."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from cluster.clock import SystemClock
from cluster.config import HealthConfig
from cluster.engine.runner import EngineRunner
from cluster.model import ModelFolder
from cluster.ports import EnginePort, Row, RowOutput
from tests.e2e.conftest import MODEL, PROFILE, STEP_S
from tests.line import Line, running_line, until
from tests.padded import PaddedBackend, engine_over
from tests.ray.streams import Reader, body

STEP_AGE_LIMIT_S = 0.5
TOKENS = 40


class StuckBackend(PaddedBackend):
    """While `goes_on` is not set its next step waits."""

    def __init__(self, model: ModelFolder) -> None:
        from cluster.engine.torch.backend import TorchBackend

        super().__init__(TorchBackend(model, MODEL.engine), STEP_S)
        self.goes_on = threading.Event()
        self.goes_on.set()

    def run(self, rows: Sequence[Row], padding_tokens: int = 0) -> Sequence[RowOutput]:
        self.goes_on.wait()
        return super().run(rows, padding_tokens)


@pytest.fixture
async def backends(tiny_model: ModelFolder) -> AsyncIterator[list[StuckBackend]]:
    made: list[StuckBackend] = []
    yield made
    for backend in made:
        backend.goes_on.set()


@pytest.fixture
async def stuck_line(tiny_model: ModelFolder, tmp_path: Path, backends: list[StuckBackend]) -> AsyncIterator[Line]:
    """Two replicas, in the order of `backends`."""

    def engine(model: ModelFolder) -> EnginePort:
        backends.append(StuckBackend(model))
        return EngineRunner(engine_over(backends[-1], model, MODEL.engine), SystemClock())

    profile = PROFILE.model_copy(update={"health": HealthConfig(step_age_limit_s=STEP_AGE_LIMIT_S)})
    async with running_line(tiny_model, profile, tmp_path, engine) as running:
        try:
            yield running
        finally:
            for backend in backends:
                backend.goes_on.set()


@pytest.mark.parametrize("drained_before", [False, True])
async def test_a_replica_whose_step_does_not_end_is_not_waited_for_and_its_streams_go_on_whole(
    stuck_line: Line, backends: list[StuckBackend], drained_before: bool
) -> None:
    undisturbed = Reader(stuck_line.client, body(max_tokens=TOKENS))
    await undisturbed.task
    reader = Reader(stuck_line.client, body(max_tokens=TOKENS))
    await reader.begun.wait()
    (busy,) = [n for n, blocks in enumerate(stuck_line.blocks_used()) if blocks]
    replica = stuck_line.replicas[busy]
    draining = asyncio.create_task(replica.drain()) if drained_before else None
    backends[busy].goes_on.clear()

    async def age_s() -> float:
        return replica.engine.progress().step_age_s or 0.0

    await until(age_s, lambda age: age > STEP_AGE_LIMIT_S)
    with pytest.raises(RuntimeError, match="a step has run for"):
        replica.check()
    assert not reader.task.done()
    await asyncio.wait_for(draining or replica.drain(), 5)
    closing = asyncio.create_task(replica.close())  # an engine's thread ends after its step
    await asyncio.wait_for(reader.task, 30)
    assert not closing.done()
    assert (reader.errors, reader.done, reader.text) == ([], True, undisturbed.text)
    backends[busy].goes_on.set()
    await closing
