"""vLLM's engine core behind our adapter, under the laws of every engine: one engine for each order, one after the other."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator

import pytest

from cluster.clock import SystemClock
from cluster.config import EngineConfig, EngineKind, Order, VllmConfig, WithinClass
from cluster.engine.vllm.build import build_vllm_engine
from cluster.model import ModelFolder
from tests.conformance.port_kit import CONFIG, Driver, Law, Reference, Shared
from tests.conformance.port_laws import ENDINGS, laws_of
from tests.conformance.transformers_model import TransformersModel

ORDERS = [(order, WithinClass.FCFS) for order in Order] + [(Order.PRIORITY, WithinClass.SJF)]
CONFIGS = [
    CONFIG.model_copy(
        update={
            "kind": EngineKind.VLLM,
            "vllm": VllmConfig(eager=True),
            "order": order,
            "within_class": within,
        }
    )
    for order, within in ORDERS
]


@pytest.fixture(scope="module")
def reference(tiny_model: ModelFolder) -> Reference:
    return Reference(TransformersModel(tiny_model))


def driver(model: ModelFolder, settings: EngineConfig, reference: Reference) -> Driver:
    engine = build_vllm_engine(model, settings, SystemClock())

    def kill() -> None:
        for pid in engine.core_pids():
            os.kill(pid, signal.SIGKILL)

    return Driver(engine, settings, reference, kill=kill)


def name_of(config: EngineConfig) -> str:
    return f"{config.order.value}{'-sjf' if config.within_class is WithinClass.SJF else ''}"


@pytest.fixture(scope="module")
def shared(tiny_model: ModelFolder, reference: Reference) -> Iterator[Shared]:
    engine = Shared(lambda config: driver(tiny_model, config, reference))
    yield engine
    engine.close()


@pytest.mark.parametrize(
    ("config", "law"),
    [
        pytest.param(config, law, id=f"{name_of(config)}-{law.name}")
        for config, ending in zip(CONFIGS, itertools.cycle(ENDINGS), strict=False)  # an engine has one end
        for law in (*laws_of(config), ending)
    ],
)
def test_on_vllm(shared: Shared, config: EngineConfig, law: Law) -> None:
    shared.hold(config, law)
