"""Models that the torch backend would compute wrongly, or cannot read, are refused when they are loaded, in one line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from cluster.config import EngineConfig
from cluster.engine.torch.backend import TorchBackend
from cluster.engine.torch.hf_attention import ShapeProbe, UnsupportedAttentionError, paged_attention
from cluster.model import ModelFolder, ModelFolderError
from tests.tiny_model import make_tiny_gpt2, make_tiny_llama

CONFIG = EngineConfig(slots=4, step_token_budget=16, block_size_tokens=4, blocks=64, max_model_len=256)


def refusal(model: ModelFolder, config: EngineConfig = CONFIG) -> str:
    with pytest.raises(ModelFolderError) as caught:
        TorchBackend(model, config)
    line = str(caught.value)
    assert "\n" not in line
    return line


def saved(model: PreTrainedModel, folder: Path, tiny_model: ModelFolder) -> ModelFolder:
    """Another architecture's folder; the tokenizer does not matter here."""
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(tiny_model.tokenizer_path.read_bytes())
    return ModelFolder.open(folder)


SMALL: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def test_soft_capped_attention_is_refused(tmp_path: Path, tiny_model: ModelFolder) -> None:
    model = Gemma2ForCausalLM(Gemma2Config(**SMALL, num_key_value_heads=1, head_dim=16, intermediate_size=32))
    assert "soft-capped" in refusal(saved(model, tmp_path, tiny_model))


def test_attention_sinks_are_refused(tmp_path: Path, tiny_model: ModelFolder) -> None:
    config = GptOssConfig(
        **SMALL,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=32,
        num_local_experts=2,
        num_experts_per_tok=1,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )
    assert "attention sinks" in refusal(saved(GptOssForCausalLM(config), tmp_path, tiny_model))


def test_alibi_is_refused(tmp_path: Path, tiny_model: ModelFolder) -> None:
    model = BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=2))
    assert "BloomForCausalLM" in refusal(saved(model, tmp_path, tiny_model))


def test_attention_that_cannot_be_replaced_is_refused(tmp_path: Path, tiny_model: ModelFolder) -> None:
    model = FalconForCausalLM(FalconConfig(**SMALL, alibi=False))
    assert "attention cannot be replaced" in refusal(saved(model, tmp_path, tiny_model))


def test_a_window_that_attention_is_not_told_of_is_refused_beyond_its_length(
    tmp_path: Path, tiny_model: ModelFolder
) -> None:
    """PhiMoE puts its window into the mask alone: with plain causal attention its outputs are others."""
    config = PhimoeConfig(**SMALL, num_key_value_heads=1, intermediate_size=32, num_local_experts=2, sliding_window=12)
    model = saved(PhimoeForCausalLM(config), tmp_path, tiny_model)
    assert "a window of 12 and tells its attention None in layer 0: lower max_model_len to 12" in refusal(model)
    TorchBackend(model, CONFIG.model_copy(update={"max_model_len": 12}))


SMALL_OLMOE: dict[str, Any] = {**SMALL, "num_key_value_heads": 1, "intermediate_size": 32, "num_experts": 2}


def test_a_window_that_the_architecture_does_not_have_is_refused(tmp_path: Path, tiny_model: ModelFolder) -> None:
    """OLMoE hands on whatever its settings say, and its mask knows no window: with one its outputs are others."""
    config = OlmoeConfig(**{**SMALL_OLMOE, "sliding_window": 12}, num_experts_per_tok=1, eos_token_id=2)
    model = saved(OlmoeForCausalLM(config), tmp_path, tiny_model)
    assert "a window of None and tells its attention 12 in layer 0" in refusal(model)


def test_a_model_that_cannot_run_one_token_is_refused(tmp_path: Path, tiny_model: ModelFolder) -> None:
    config = OlmoeConfig(**SMALL_OLMOE, num_experts_per_tok=3, eos_token_id=2)
    model = saved(OlmoeForCausalLM(config), tmp_path, tiny_model)
    assert "cannot run one token" in refusal(model)


def test_an_argument_of_attention_that_nobody_here_knows_is_refused() -> None:
    part = torch.zeros((1, 1, 1, 8))
    module = torch.nn.Module()
    module.layer_idx = 0  # type: ignore[assignment]
    plain = {"position_ids": torch.zeros((1, 1)), "use_cache": False, "step": ShapeProbe()}
    paged_attention(module, part, part, part, None, **plain)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedAttentionError, match="new_feature"):
        paged_attention(module, part, part, part, None, **plain, new_feature=1)  # type: ignore[arg-type]


def test_an_encoder_with_a_decoder_is_refused(tmp_path: Path, tiny_model: ModelFolder) -> None:
    config = T5Config(vocab_size=64, d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2)
    assert "encoder" in refusal(saved(T5ForConditionalGeneration(config), tmp_path, tiny_model))


def test_a_model_without_attention_is_refused(tmp_path: Path, tiny_model: ModelFolder) -> None:
    config = MambaConfig(vocab_size=64, hidden_size=32, state_size=4, num_hidden_layers=2)
    assert "layers of linear_attention" in refusal(saved(MambaForCausalLM(config), tmp_path, tiny_model))


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_rotary_positions_that_depend_on_other_sequences_are_refused_beyond_their_plain_range(
    tmp_path: Path, rope_type: str
) -> None:
    scaling = {"rope_type": rope_type, "factor": 2.0, "original_max_position_embeddings": 128}
    if rope_type == "longrope":
        scaling |= {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
    model = make_tiny_llama(tmp_path / "model", rope_scaling=scaling, max_position_embeddings=128)
    short = CONFIG.model_copy(update={"max_model_len": 128})
    TorchBackend(model, short)
    longer = make_tiny_llama(tmp_path / "longer", rope_scaling=scaling, max_position_embeddings=256)
    assert "rotary positions that change beyond 128 tokens" in refusal(longer)


def test_a_length_that_the_model_was_not_made_for_is_refused(tmp_path: Path) -> None:
    model = make_tiny_llama(tmp_path, max_position_embeddings=128)
    assert "lower max_model_len (256)" in refusal(model)


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    model = make_tiny_llama(tmp_path, quantization_config={"quant_method": "gptq", "bits": 4})
    assert "quantised weights" in refusal(model)


def test_code_in_the_folder_is_never_run(tmp_path: Path) -> None:
    model = make_tiny_llama(
        tmp_path,
        model_type="made_up",
        auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
    )
    (tmp_path / "evil.py").write_text("raise SystemExit('this was run')\n")
    assert "cannot be loaded" in refusal(model)


def test_a_missing_tensor_is_refused_rather_than_made_up(tmp_path: Path) -> None:
    model = make_tiny_llama(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.2.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert "model.layers.2.mlp.up_proj.weight" in refusal(model)


def test_a_tensor_without_a_place_is_refused(tmp_path: Path) -> None:
    model = make_tiny_llama(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.0.self_attn.sinks"] = np.zeros(8, np.float32)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert "model.layers.0.self_attn.sinks" in refusal(model)


def test_a_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    model = make_tiny_llama(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"intermediate_size": 700}))
    assert "_proj.weight" in refusal(ModelFolder.open(model.path))


def test_weights_that_are_cut_off_are_refused(tmp_path: Path) -> None:
    model = make_tiny_llama(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    assert "cannot be loaded" in refusal(model)


ODD: list[Any] = [0, -1, 2**31, 2**63, 10**30, 1.5, True, "8", [], {}, math.inf, math.nan]
SIZES = [
    "num_key_value_heads",
    "num_attention_heads",
    "hidden_size",
    "head_dim",
    "intermediate_size",
    "num_hidden_layers",
    "vocab_size",
]


@pytest.mark.parametrize("size", SIZES)
def test_sizes_that_are_none_or_do_not_fit_the_weights_are_refused(tmp_path: Path, size: str) -> None:
    """In one line, and before memory is taken for them."""
    make_tiny_llama(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_bytes())
    for odd in ODD:
        (tmp_path / "config.json").write_text(json.dumps(settings | {size: odd}))
        with pytest.raises(ModelFolderError) as caught:
            TorchBackend(ModelFolder.open(tmp_path), CONFIG)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("setting", ["rope_scaling", "rope_parameters", "layer_types", "hidden_act", "model_type"])
def test_settings_of_another_type_are_refused(tmp_path: Path, setting: str) -> None:
    make_tiny_llama(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_bytes())
    for odd in (-1, 1.5, "x", ["x"]):
        (tmp_path / "config.json").write_text(json.dumps(settings | {setting: odd}))
        with pytest.raises(ModelFolderError) as caught:
            TorchBackend(ModelFolder.open(tmp_path), CONFIG)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_that_sees_nothing_is_refused(tmp_path: Path, window: int) -> None:
    model = make_tiny_llama(tmp_path, model_type="mistral", sliding_window=window)
    assert f"a window of {window} in layer 0" in refusal(model)


def test_a_model_that_looks_into_its_linear_layers_is_refused(
    tmp_path: Path, tiny_model: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are packed; a weight is nowhere in them."""
    forward = GPT2LMHeadModel.forward
    monkeypatch.setattr(
        GPT2LMHeadModel,
        "forward",
        lambda self, input_ids=None, position_ids=None, logits_to_keep=0, **rest: (
            self.lm_head.weight
            and forward(self, input_ids, position_ids=position_ids, logits_to_keep=logits_to_keep, **rest)
        ),
    )
    assert "cannot run one token" in refusal(make_tiny_gpt2(tmp_path))


def test_refusals_leave_no_thread_setting_behind() -> None:
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
