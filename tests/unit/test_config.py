"""Configuration explains itself, and what cannot work is refused where it is read."""

from __future__ import annotations

import inspect
import math

import msgspec
import pytest
from pydantic import ValidationError

from cluster import config
from cluster.config import Config, EngineConfig, PriorityClass, RouterConfig, TransportConfig
from cluster.types import PriorityLoad

MODELS = [m for _, m in inspect.getmembers(config, inspect.isclass) if issubclass(m, Config) and m is not Config]


@pytest.mark.parametrize("model", MODELS)
def test_every_field_says_what_it_is_for(model: type[Config]) -> None:
    assert [name for name, field in model.model_fields.items() if not field.description] == []


@pytest.mark.parametrize(
    ("model", "values", "said"),
    [
        (EngineConfig, {"slots": 65, "step_token_budget": 64}, "must not exceed step_token_budget"),
        (EngineConfig, {"blocks": 127, "block_size_tokens": 16, "max_model_len": 2048}, "must hold one request"),
        (EngineConfig, {"max_model_len": 1}, "max_model_len"),  # no room for a prompt and an output
        (EngineConfig, {"slot": 1}, "slot"),
        (EngineConfig, {"kind": "vlm"}, "'embedded' or 'vllm'"),
        (EngineConfig, {"vllm": {"eager": True}}, "vllm: kind 'embedded'"),
        (EngineConfig, {"kind": "vllm", "mode": "static"}, "mode 'static': vLLM batches continuously only"),
        (EngineConfig, {"kind": "vllm", "mode": "dynamic"}, "mode 'dynamic': vLLM batches continuously only"),
        (EngineConfig, {"kind": "vllm", "vllm": {"gpu_memory_utilization": 1.5}}, "gpu_memory_utilization"),
        (EngineConfig, {"kind": "vllm", "blocks": 63, "max_model_len": 2048}, "must hold one request"),
        (RouterConfig, {"default_class": "gold"}, "default_class 'gold'"),
        (RouterConfig, {"classes": [{"name": n, "priority": 0} for n in ("a", "b")], "default_class": "a"}, "differ"),
        (RouterConfig, {"classes": [{"name": "a", "priority": p} for p in (0, 1)], "default_class": "a"}, "differ"),
        (PriorityClass, {"name": "a", "priority": 2**53 + 1}, "less than or equal to 9007199254740992"),
        (PriorityClass, {"name": "a", "priority": -(2**53) - 1}, "greater than or equal to -9007199254740992"),
        (TransportConfig, {"max_frame_bytes": 2**20, "outbox_max_bytes": 2**20}, "at least 4 x outbox_max_bytes"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(model: type[Config], values: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        model.model_validate(values)


@pytest.mark.parametrize("model", MODELS)
def test_every_number_is_a_finite_one(model: type[Config]) -> None:
    for name, field in model.model_fields.items():
        if "float" in str(field.annotation):
            for endless in (math.inf, math.nan):
                with pytest.raises(ValidationError) as refused:
                    model.model_validate({name: endless})
                assert (name,) in [error["loc"] for error in refused.value.errors()]


@pytest.mark.parametrize("priority", [-(2**53), 2**53])
def test_the_priority_of_any_class_can_be_told_from_process_to_process(priority: int) -> None:
    told = PriorityLoad(PriorityClass(name="a", priority=priority).priority, 1, 1)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=PriorityLoad) == told


def test_where_blocks_follow_from_the_gpu_their_number_says_nothing() -> None:
    fields = {"kind": "vllm", "blocks": 1, "vllm": {"gpu_memory_utilization": 0.9}}
    assert EngineConfig.model_validate(fields).blocks == 1


@pytest.mark.parametrize(("fields", "tokens"), [({}, 16), ({"kind": "vllm"}, 32), ({"block_size_tokens": 8}, 8)])
def test_the_default_block_is_one_that_the_engine_has(fields: dict[str, object], tokens: int) -> None:
    assert EngineConfig.model_validate(fields).block_size_tokens == tokens


def test_a_configuration_comes_back_from_json_as_it_went() -> None:
    for fields in ({}, {"kind": "vllm"}, {"kind": "vllm", "vllm": {"kv_transfer_config": {"kv_role": "kv_both"}}}):
        config = EngineConfig.model_validate(fields)
        assert EngineConfig.model_validate(config.model_dump(mode="json")) == config
