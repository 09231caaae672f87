"""A replica that is needed no more: it is emptied without a cut stream, leaves when told, and an operator comes first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cluster.clock import SystemClock
from cluster.engine.runner import EngineRunner
from cluster.messages import DrainOrder, Leave
from cluster.model import ModelFolder
from cluster.ports import EnginePort
from cluster.types import ReplicaId, ReplicaState
from deployments.replica_process import ReplicaProcess
from deployments.settings import Instance, Profile
from tests.line import Line, running_line, until
from tests.padded import PaddedBackend, engine_over
from tests.ray.streams import Reader, body

STEP_S = 0.03
THIRD = ReplicaId("third")
PROFILE = Profile.model_validate(
    {
        "engine": {"slots": 8, "step_token_budget": 64, "blocks": 1024, "max_model_len": 1024},
        "health": {"hand_back_after_s": 0.3},
    }
)


class Left:
    """The third replica, and whether it has been told to leave."""

    def __init__(self) -> None:
        self.process: ReplicaProcess | None = None
        self.told = asyncio.Event()
        self.with_requests: int | None = None

    def __call__(self) -> None:
        self.with_requests = self.requests()
        self.told.set()

    def requests(self) -> int:
        assert self.process is not None
        load = self.process.engine.progress().load
        return sum(level.requests for level in (*load.running, *load.waiting))

    def refuses(self) -> bool:
        assert self.process is not None
        return self.process.server.report(None).state is ReplicaState.DRAINING


@asynccontextmanager
async def with_third(model: ModelFolder, folder: Path) -> AsyncIterator[tuple[Line, Left]]:
    """A line of two replicas and a third."""

    def load(opened: ModelFolder) -> EnginePort:
        from cluster.engine.torch.backend import TorchBackend

        config = PROFILE.models[0].engine
        backend = PaddedBackend(TorchBackend(opened, config), STEP_S)
        return EngineRunner(engine_over(backend, opened, config), SystemClock())

    async with running_line(model, PROFILE, folder, load) as line:
        left = Left()
        instance = Instance(profile=PROFILE, model_folders=(model.path,), secret_path=folder / "secret")
        third = left.process = ReplicaProcess(instance, model, THIRD, line.find, load, pytest.fail, left)
        try:
            await third.start("127.0.0.1")
            await until(line.ready_replicas, (3.0).__eq__)
            yield line, left
        finally:
            await third.close()


async def test_one_that_retires_is_emptied_and_leaves_only_when_it_is_empty_and_told(
    tiny_model: ModelFolder, tmp_path: Path
) -> None:
    async with with_third(tiny_model, tmp_path) as (line, left):
        undisturbed = Reader(line.client, body(max_tokens=40))
        await undisturbed.task
        readers = [Reader(line.client, body(max_tokens=40)) for _ in range(9)]
        await asyncio.gather(*(reader.begun.wait() for reader in readers))
        assert left.requests() > 0
        line.controller.tell_replica(THIRD, Leave())
        line.controller.tell_replica(THIRD, DrainOrder(drain=True, retire=True))

        async def told_to_leave() -> bool:
            """As the controller does it, but that it does not look first."""
            line.controller.tell_replica(THIRD, Leave())
            return left.told.is_set()

        await until(told_to_leave, bool, within_s=20)
        assert left.with_requests == 0
        await asyncio.gather(*(reader.task for reader in readers))
        assert [(r.errors, r.done, r.text == undisturbed.text) for r in readers] == [([], True, True)] * 9
        assert await line.ready_replicas() == 2.0
        line.controller.tell_replica(THIRD, DrainOrder(drain=False, retire=True))
        await line.client.delete(f"/drain/{THIRD}")
        await line.client.put("/drain/replica-0")
        await until(line.ready_replicas, (1.0).__eq__)
        assert left.refuses(), "once it is to leave it takes nothing any more"


async def test_one_that_retires_takes_work_again_when_told(tiny_model: ModelFolder, tmp_path: Path) -> None:
    async with with_third(tiny_model, tmp_path) as (line, left):
        line.controller.tell_replica(THIRD, DrainOrder(drain=True, retire=True))
        await until(line.ready_replicas, (2.0).__eq__)
        line.controller.tell_replica(THIRD, DrainOrder(drain=False, retire=True))
        await until(line.ready_replicas, (3.0).__eq__)
        line.controller.tell_replica(THIRD, Leave())
        await line.client.put(f"/drain/{THIRD}")
        await until(line.ready_replicas, (2.0).__eq__)
        assert not left.told.is_set(), "it had been taken back"


async def test_what_an_operator_drains_neither_retires_nor_takes_work_again_by_itself(
    tiny_model: ModelFolder, tmp_path: Path
) -> None:
    async with with_third(tiny_model, tmp_path) as (line, left):
        assert (await line.client.put(f"/drain/{THIRD}")).json()["replica_ids"] == [THIRD]
        await until(line.ready_replicas, (2.0).__eq__)
        for message in (
            DrainOrder(drain=True, retire=True),
            Leave(),
            DrainOrder(drain=False, retire=True),
            Leave(),
        ):
            line.controller.tell_replica(THIRD, message)
        await line.client.put("/drain/replica-0")
        await until(line.ready_replicas, (1.0).__eq__)
        await line.client.delete(f"/drain/{THIRD}")
        await until(line.ready_replicas, (2.0).__eq__)
        assert not left.told.is_set(), "all that it was told has been heard by now: one link keeps the order"


async def test_one_that_retires_is_the_operators_from_the_moment_that_he_drains_it(
    tiny_model: ModelFolder, tmp_path: Path
) -> None:
    async with with_third(tiny_model, tmp_path) as (line, left):
        line.controller.tell_replica(THIRD, DrainOrder(drain=True, retire=True))
        await until(line.ready_replicas, (2.0).__eq__)
        await line.client.put(f"/drain/{THIRD}")
        line.controller.tell_replica(THIRD, Leave())
        await line.client.delete(f"/drain/{THIRD}")
        await until(line.ready_replicas, (3.0).__eq__)
        assert not left.told.is_set()
