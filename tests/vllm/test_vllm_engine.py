"""What the vLLM engine has beyond the laws of every engine (test_vllm_conformance.py): parking."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster.clock import SystemClock
from cluster.config import EngineConfig, EngineKind, VllmConfig
from cluster.engine.vllm.build import build_vllm_engine
from cluster.model import ModelFolder
from cluster.types import FinishReason
from tests.vllm.vllm_kit import Listener, Reference, request

CONFIG = EngineConfig(
    kind=EngineKind.VLLM,
    slots=4,
    step_token_budget=64,
    block_size_tokens=32,
    blocks=24,
    max_model_len=512,
    vllm=VllmConfig(eager=True),
)


@pytest.fixture(scope="module")
def reference(tiny_model: ModelFolder) -> Reference:
    return Reference(tiny_model)


@pytest.fixture(scope="module")
def shared_engine(tiny_model: ModelFolder) -> Iterator[Listener]:
    listener = Listener(build_vllm_engine(tiny_model, CONFIG, SystemClock()))
    listener.start()
    yield listener
    listener.engine.stop()


@pytest.fixture
def engine(shared_engine: Listener) -> Iterator[Listener]:
    """Idle before and after, with every block free, and alive."""
    shared_engine.outputs.clear()
    shared_engine.preempted.clear()
    yield shared_engine
    load = shared_engine.until_idle()
    assert load.blocks_free == load.blocks_total == CONFIG.blocks
    assert shared_engine.places() == {}
    assert shared_engine.engine.progress().alive


def test_a_parked_request_stands_still_until_it_is_unparked(engine: Listener, reference: Reference) -> None:
    parked, other = request("parked", max_tokens=40), request("other", max_tokens=20)
    engine.add(parked)
    engine.until_tokens(5, parked)
    assert engine.engine.park(parked.request_id, 0).result(30)
    assert engine.places() == {parked.request_id: "parked"}
    engine.run(other)
    made = len(engine.outputs[parked.request_id].token_ids)
    assert made < 40
    assert engine.until_idle().blocks_free == CONFIG.blocks
    assert engine.engine.unpark(parked.request_id, 0).result(30)
    engine.until_ended(parked)
    assert engine.outputs[parked.request_id].token_ids == reference.output_ids(parked)


def test_a_parked_request_can_be_aborted(engine: Listener) -> None:
    parked = request("parked", max_tokens=300)
    engine.add(parked)
    engine.until_tokens(2, parked)
    assert engine.engine.park(parked.request_id, 0).result(30)
    engine.engine.abort(parked.request_id, 0)
    engine.until_ended(parked)
    assert engine.outputs[parked.request_id].finish is FinishReason.ABORT
