"""A replica drains as long as anybody wants it to: a node that goes, an operator and scale do not undo each other's word."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cluster.config import EngineConfig
from cluster.messages import DrainOrder, Leave
from cluster.metrics import TICK_DECISIONS
from cluster.model import ModelFolder
from cluster.types import DrainedBy, ReplicaId
from deployments.settings import ModelConfig, Profile
from tests.line import Line, running_line, until

MODEL = ModelConfig(replicas=2, engine=EngineConfig(slots=4, blocks=64, max_model_len=256))
ONE = ReplicaId("replica-0")
NODE, OPERATOR, SCALE = DrainedBy.NODE, DrainedBy.OPERATOR, DrainedBy.SCALE
GOES, STAYS = DrainOrder(drain=True, node=True), DrainOrder(drain=False, node=True)


@pytest.fixture
async def line(tiny_model: ModelFolder, tmp_path: Path) -> AsyncIterator[Line]:
    async with running_line(tiny_model, Profile(models=(MODEL,)), tmp_path) as running:
        yield running


async def until_drained_by(line: Line, *by: DrainedBy) -> None:
    """As the controller hears it; and the router sends work there only where nobody wants it to drain."""

    async def drained_by() -> frozenset[DrainedBy]:
        return line.controller.replicas()[ONE].drained_by

    await until(drained_by, frozenset(by).__eq__)
    await until(line.ready_replicas, (1.0 if by else 2.0).__eq__)


async def test_an_uncordon_does_not_undo_an_operators_drain_nor_the_other_way_about(line: Line) -> None:
    line.controller.tell_replica(ONE, GOES)
    await until_drained_by(line, NODE)
    await line.client.put(f"/drain/{ONE}")
    await until_drained_by(line, NODE, OPERATOR)
    line.controller.tell_replica(ONE, STAYS)
    await until_drained_by(line, OPERATOR)
    line.controller.tell_replica(ONE, GOES)
    await until_drained_by(line, NODE, OPERATOR)
    await line.client.delete(f"/drain/{ONE}")
    await until_drained_by(line, NODE)
    line.controller.tell_replica(ONE, STAYS)
    await until_drained_by(line)


async def test_what_is_said_again_and_again_is_decided_once_and_heard_each_time(line: Line) -> None:
    def decided(decision: str) -> float | None:
        return line.controller.registry.get_sample_value(f"{TICK_DECISIONS.name}_total", {"kind": decision})

    for _ in range(3):
        line.controller.tell_replica(ONE, GOES)
    await until_drained_by(line, NODE)
    assert (decided("drain"), decided("take_work")) == (1, 0)
    for _ in range(3):
        line.controller.tell_replica(ONE, STAYS)
    await until_drained_by(line)
    assert (decided("drain"), decided("take_work")) == (1, 1)
    line.controller.tell_replica(ONE, DrainOrder(drain=True, retire=True))
    await until_drained_by(line, SCALE)
    line.controller.tell_replica(ONE, GOES)
    await until_drained_by(line, NODE, SCALE)
    assert (decided("drain"), decided("take_work")) == (3, 1), "each reason of its own"


async def test_one_that_retires_goes_on_retiring_on_a_node_that_goes_and_one_that_a_node_drains_does_not_retire(
    line: Line,
) -> None:
    line.controller.tell_replica(ONE, DrainOrder(drain=True, retire=True))
    line.controller.tell_replica(ONE, GOES)
    await until_drained_by(line, NODE, SCALE)
    line.controller.tell_replica(ONE, DrainOrder(drain=False, retire=True))
    await until_drained_by(line, NODE)
    line.controller.tell_replica(ONE, DrainOrder(drain=True, retire=True))
    line.controller.tell_replica(ONE, Leave())
    line.controller.tell_replica(ONE, GOES)
    line.controller.tell_replica(ONE, STAYS)
    await until_drained_by(line)
