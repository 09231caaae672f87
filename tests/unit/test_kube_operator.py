"""What a controller's part in Kubernetes says and counts while the pool is not seen whole, or does not do as it is told.

The API server is a gate that answers itself. Against a real one: tests/kubernetes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from cluster.clock import SystemClock
from cluster.config import KubernetesConfig
from cluster.control import nodes
from cluster.control.happenings import WAITING, ReplicaSeen, ScaleSeen
from cluster.messages import DrainOrder
from cluster.types import DrainedBy, Generation, ReplicaId
from deployments.kube import operator
from deployments.kube.operator import Operator
from tests.kubernetes.conftest import kubeconfig_of
from tests.kubernetes.gate import Answer, Asked, Gate, answered
from tests.line import until

NODE = frozenset({DrainedBy.NODE})
A, B = ReplicaId("a"), ReplicaId("b")
FIRST, SECOND = Generation(1, "aaaaaaaaaaaa"), Generation(2, "bbbbbbbbbbbb")
LOST_S = 0.4
"""Here a replica is lost so soon."""


@dataclass
class Pool:
    """Replicas by what drains them, each on a node of its name; those that are linked. It counts how often it is looked at."""

    drained: dict[ReplicaId, frozenset[DrainedBy]]
    linked: set[ReplicaId] = field(default_factory=set)
    generation: Generation | None = FIRST
    obeys: bool = True
    looks: int = 0
    told: list[tuple[ReplicaId, bool]] = field(default_factory=list)

    def replicas(self) -> dict[ReplicaId, ReplicaSeen]:
        self.looks += 1
        return {r: ReplicaSeen(Generation(1, "r"), "m", r, None, self.drained[r]) for r in self.linked}

    def scales(self) -> dict[str, ScaleSeen]:
        return {}

    def tell_replica(self, replica_id: ReplicaId, message: DrainOrder) -> None:
        self.told.append((replica_id, message.drain))
        if self.obeys:
            self.drained[replica_id] = NODE if message.drain else frozenset()

    async def looked(self, more: int) -> None:
        """Once it has been looked at so often again."""
        before = self.looks

        async def looks() -> bool:
            return self.looks >= before + more

        await until(looks, bool)


def node(name: str, **spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "resourceVersion": "1"}, "spec": spec, "status": {}}


def cluster(asked: Asked) -> Answer:
    """Two nodes, the first of which is cordoned, and nothing else."""
    if asked.lists_nodes:
        items = [node(A, unschedulable=True), node(B)]
        return answered(200, {"kind": "NodeList", "metadata": {"resourceVersion": "1"}, "items": items})
    return answered(503, {})


@pytest.fixture
async def gate() -> AsyncIterator[Gate]:
    made = Gate("http://127.0.0.1:9")  # which is never asked
    made.answer = cluster
    await made.start()
    try:
        yield made
    finally:
        await made.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured in seconds, in hundredths."""
    monkeypatch.setattr(operator, "_TICK_S", 0.01)
    monkeypatch.setattr(nodes, "REPEAT_S", 0.02)
    monkeypatch.setattr(nodes, "SETTLE_S", 0.05)
    monkeypatch.setattr(nodes, "LOST_AFTER_S", LOST_S)


@contextlib.asynccontextmanager
async def running(pool: Pool, gate: Gate, folder: Path) -> AsyncIterator[Operator]:
    """Once it has listed the nodes."""
    config = KubernetesConfig(kubeconfig=kubeconfig_of(gate.url, folder), namespace="n", backoff_max_s=0.5)
    made = Operator(config, pool, SystemClock(), random.Random(1))
    task = asyncio.create_task(made.run())

    async def listed() -> bool:
        return made.status().nodes == 2

    try:
        await until(listed, bool)
        yield made
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def until_told(pool: Pool, *told: tuple[ReplicaId, bool]) -> None:
    async def last() -> list[tuple[ReplicaId, bool]]:
        return pool.told

    await until(last, list(told).__eq__)


@pytest.mark.usefixtures("quick")
async def test_a_link_that_breaks_for_a_moment_brings_no_work_back_to_a_node_that_goes(
    gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "LOST_AFTER_S", 60.0)
    pool = Pool({A: frozenset(), B: frozenset()}, {A, B})
    async with running(pool, gate, tmp_path):
        await until_told(pool, (A, True))
        for _ in range(3):
            pool.linked.remove(B)
            await pool.looked(3)
            pool.linked.add(B)
            await pool.looked(3)
        assert pool.told == [(A, True)]


@pytest.mark.usefixtures("quick")
async def test_once_the_other_is_lost_who_drains_takes_work_again(gate: Gate, tmp_path: Path) -> None:
    pool = Pool({A: frozenset(), B: frozenset()}, {A, B})
    async with running(pool, gate, tmp_path):
        await until_told(pool, (A, True))
        pool.linked.remove(B)
        await until_told(pool, (A, True), (A, False))


@pytest.mark.usefixtures("quick")
async def test_a_controller_that_begins_anew_brings_no_work_back_whoever_links_first(
    gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "LOST_AFTER_S", 60.0)
    pool = Pool({A: NODE, B: frozenset()}, {A})
    async with running(pool, gate, tmp_path):
        await pool.looked(20)
        pool.linked.add(B)
        await pool.looked(5)
        pool.linked.remove(B)
        pool.generation = SECOND
        await pool.looked(20)
        assert pool.told == []


@pytest.mark.usefixtures("quick")
async def test_who_does_not_do_as_it_is_told_is_told_again_and_again_and_that_is_logged_once(
    gate: Gate, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "forebay.kubernetes")
    pool = Pool({A: frozenset(), B: frozenset()}, {A, B}, obeys=False)

    async def often() -> bool:
        return len(pool.told) >= 5

    async with running(pool, gate, tmp_path):
        await until(often, bool)
        assert set(pool.told) == {(A, True)}
        assert caplog.text.count("a drains, for node a goes") == 1


@pytest.mark.usefixtures("quick")
async def test_no_count_ever_goes_back_whenever_another_thread_reads_it(gate: Gate, tmp_path: Path) -> None:
    """At each line of what the controller does when it leads anew, which is where a thread may read."""
    many = {ReplicaId(f"r{number}"): frozenset[DrainedBy]() for number in range(2 * WAITING)}
    pool = Pool(many, set(many))
    read: list[int] = []
    async with running(pool, gate, tmp_path) as made:

        def at_each_line(frame: FrameType, event: str, what: object) -> Any:
            del event, what
            if frame.f_code.co_filename != operator.__file__ or frame.f_code.co_name == "figures":
                return None
            read.append(made.figures().events_dropped)
            return at_each_line

        await pool.looked(3)
        pool.drained = dict.fromkeys(many, frozenset({DrainedBy.OPERATOR}))  # more happens than is kept
        await pool.looked(3)
        dropped = made.figures().events_dropped
        assert dropped >= WAITING
        before = sys.gettrace()
        sys.settrace(at_each_line)
        try:
            pool.generation = SECOND
            await pool.looked(3)
        finally:
            sys.settrace(before)
    assert len(read) > 10
    assert read == sorted(read)
    assert read[0] == dropped
