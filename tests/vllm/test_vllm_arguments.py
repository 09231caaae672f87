"""A configuration that vLLM does not take is refused before its core starts, in one line that names what to change."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.clock import SystemClock
from cluster.config import EngineConfig, EngineKind, VllmConfig
from cluster.engine.vllm.build import build_vllm_engine
from cluster.model import ModelFolder


def connector(**config: Any) -> dict[str, Any]:
    return {"vllm": VllmConfig(eager=True, kv_transfer_config=config)}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"max_model_len": 8000}, r"max_model_len \(8000\) is greater than .*max_position_embeddings=4096"),
        (connector(kv_connector="Nonsense", kv_role="kv_both"), "Unsupported connector type: Nonsense"),
        (connector(kv_connector="ExampleConnector"), "Please specify kv_role"),
        (connector(kv_connector="ExampleConnector", kv_role="both"), r"kv_role: Input should be 'kv_producer'"),
        (connector(role="kv_both"), r"kv_transfer_config\.role: Unexpected keyword argument"),
    ],
    ids=["longer than the model", "no such connector", "no role", "no such role", "no such field"],
)
def test_what_vllm_does_not_take_is_said_in_one_line(
    tiny_model: ModelFolder, fields: dict[str, Any], says: str
) -> None:
    config = EngineConfig(kind=EngineKind.VLLM, **fields)
    with pytest.raises(RuntimeError, match=says) as refusal:
        build_vllm_engine(tiny_model, config, SystemClock())
    assert len(str(refusal.value).splitlines()) == 1
