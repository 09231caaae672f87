"""Our own decoder of the Llama family gives transformers' logits, and takes only models that it knows in full."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from cluster.config import DType
from cluster.engine.torch.cpu.attention import CpuStep
from cluster.engine.torch.decoder import DTYPES, Decoder
from cluster.engine.torch.layout import lay_out
from cluster.engine.torch.loading import load_decoder, load_lean, load_with_transformers
from cluster.engine.torch.paged_cache import PagedCache
from cluster.model import ModelFolder
from cluster.ports import Row, SampleSpec
from tests.tiny_model import make_tiny_llama

MAX_LEN = 256
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILY: dict[str, tuple[type[PreTrainedModel], PreTrainedConfig]] = {
    "llama with all biases": (
        LlamaForCausalLM,
        LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, rope_parameters=PLAIN_ROPE),
    ),
    "llama, tied, wide heads": (
        LlamaForCausalLM,
        LlamaConfig(**SIZES, tie_word_embeddings=True, head_dim=40, rope_parameters=PLAIN_ROPE),
    ),
    "llama 3 positions": (LlamaForCausalLM, LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE)),
    "linear positions": (
        LlamaForCausalLM,
        LlamaConfig(**SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}),
    ),
    "mistral with a window": (
        MistralForCausalLM,
        MistralConfig(**SIZES, sliding_window=9, rope_parameters=PLAIN_ROPE),
    ),
    "qwen2 with a window in its last layer": (
        Qwen2ForCausalLM,
        Qwen2Config(
            **SIZES, use_sliding_window=True, sliding_window=9, max_window_layers=2, rope_parameters=PLAIN_ROPE
        ),
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=16, rope_parameters=PLAIN_ROPE)),
    "qwen3, tied, with biases": (
        Qwen3ForCausalLM,
        Qwen3Config(**SIZES, head_dim=16, attention_bias=True, tie_word_embeddings=True, rope_parameters=PLAIN_ROPE),
    ),
}


def saved(kind: str, folder: Path, tiny_model: ModelFolder) -> tuple[ModelFolder, Any]:
    """With every number random, norms and biases too, so that none can be forgotten unseen."""
    torch.manual_seed(0)
    make, config = FAMILY[kind]
    model: Any = make(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if "norm" in name or "bias" in name else 0.1))
            if "norm" in name:
                parameter.add_(1)
    model.eval()
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(tiny_model.tokenizer_path.read_bytes())
    return ModelFolder.open(folder), model


def logits(decoder: Decoder, rows: list[Row], dtype: torch.dtype) -> torch.Tensor:
    """Of all tokens, row after row; the rows run in two steps, the second of which is a decode."""
    cache = PagedCache(decoder.shapes, 64, 16, dtype, torch.device("cpu"))
    found: list[torch.Tensor] = []
    prefills = [Row(r.token_ids[:-1], 0, r.block_table, None) for r in rows]
    decodes = [Row(r.token_ids[-1:], len(r.token_ids) - 1, r.block_table, None) for r in rows]
    for step in (prefills, decodes):
        layout = lay_out(step, 16, padding_tokens=3)
        at = [layout.token_ids.index(r.token_ids[0]) + i for r in step for i in range(len(r.token_ids))]
        with torch.inference_mode():
            out = decoder.logits(
                torch.tensor(layout.token_ids), torch.tensor(layout.positions), torch.tensor(at), CpuStep(cache, layout)
            )
        found += torch.split(out.float().clone(), [len(r.token_ids) for r in step])
    return torch.cat([torch.cat([found[i], found[len(rows) + i]]) for i in range(len(rows))])


ROWS = [  # token ids that occur once, so that the order of a layout can be read from them
    Row(tuple(range(1, 41)), 0, (1, 2, 3), None),
    Row(tuple(range(41, 43)), 0, (9,), None),
    Row(tuple(range(43, 95)), 0, (4, 8, 5, 7), None),
]


@torch.inference_mode()
def reference(model: Any) -> torch.Tensor:
    return torch.cat([model(torch.tensor([row.token_ids])).logits[0] for row in ROWS])


@pytest.mark.parametrize("kind", FAMILY)
def test_both_decoders_give_the_logits_of_transformers(kind: str, tmp_path: Path, tiny_model: ModelFolder) -> None:
    folder, model = saved(kind, tmp_path, tiny_model)
    expected = reference(model)
    lean = load_lean(folder, DType.FLOAT32, MAX_LEN)
    assert lean is not None
    for decoder in (lean, load_with_transformers(folder, DType.FLOAT32, MAX_LEN)):
        torch.testing.assert_close(logits(decoder, ROWS, torch.float32), expected, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def last_logits(decoder: Decoder, chunks: tuple[int, ...], beside: list[list[Row]], dtype: torch.dtype) -> torch.Tensor:
    """Of the last of a sequence's tokens, run in `chunks`; `beside[i]` are rows of others in the same step."""
    cache = PagedCache(decoder.shapes, 64, 16, dtype, torch.device("cpu"))
    token_ids, table, start = [(7 * i) % 96 for i in range(sum(chunks))], (11, 3, 17, 5, 2), 0
    out = torch.empty(0)
    for chunk, others in zip(chunks, beside, strict=True):
        part = tuple(token_ids[start : start + chunk])
        layout = lay_out([Row(part, start, table, SampleSpec(temperature=0.0)), *others], 16, padding_tokens=0)
        out = decoder.logits(
            torch.tensor(layout.token_ids),
            torch.tensor(layout.positions),
            torch.tensor(layout.kept),
            CpuStep(cache, layout),
        ).clone()
        start += chunk
    return out[0]


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
@pytest.mark.parametrize("kind", FAMILY)
def test_logits_are_the_same_to_the_last_bit_however_a_sequence_is_cut_and_whatever_runs_beside_it(
    kind: str, dtype: DType, tmp_path: Path, tiny_model: ModelFolder
) -> None:
    """So what is preempted, moved or continued elsewhere goes on as if it had been undisturbed, by chance as well."""
    folder, _ = saved(kind, tmp_path, tiny_model)
    lean = load_lean(folder, dtype, MAX_LEN)
    assert lean is not None
    kept = SampleSpec(temperature=0.0)
    decodes = [Row((i,), 0, (20 + i,), kept) for i in range(1, 20)]
    chunk = [Row(tuple(range(30)), 0, (50, 51), kept)]
    ways: dict[str, tuple[tuple[int, ...], list[list[Row]]]] = {
        "whole": ((71,), [[]]),
        "token by token": ((1,) * 71, [[]] * 71),
        "in chunks": ((17, 1, 2, 33, 18), [[], chunk, decodes, [*decodes, *chunk], []]),
        "beside others": ((70, 1), [[], [*decodes, *chunk]]),
        "in a chunk beside others": ((1, 70), [[], [*decodes, *chunk]]),
    }
    found = {way: last_logits(lean, chunks, beside, DTYPES[dtype]) for way, (chunks, beside) in ways.items()}
    assert [way for way, bits in found.items() if not torch.equal(bits, found["whole"])] == []


@pytest.mark.parametrize("kind", FAMILY)
def test_bfloat16_is_no_further_from_float32_than_transformers_own(
    kind: str, tmp_path: Path, tiny_model: ModelFolder
) -> None:
    folder, model = saved(kind, tmp_path, tiny_model)
    expected = reference(model)
    theirs = (reference(model.to(torch.bfloat16)).float() - expected).square().mean().sqrt()
    lean = load_lean(folder, DType.BFLOAT16, MAX_LEN)
    assert lean is not None
    ours = (logits(lean, ROWS, torch.bfloat16) - expected).square().mean().sqrt()
    assert 0 < ours < 1.1 * theirs


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "gemma"},
        {"hidden_act": "gelu"},
        {"pretraining_tp": 2},
        {"a_setting_of_tomorrow": 1},
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "unheard_of": 1}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
        {"rms_norm_eps": None},
        {"rope_theta": None},
        {"sliding_window": 12},
        {"quantization_config": {"quant_method": "gptq"}},
        {"model_type": "mistral"},  # whose window, where none is named, is 4,096
        {"model_type": "qwen2", "attention_bias": True},
        {"layer_types": ["linear_attention"] * 4},
        {"rope_parameters": PLAIN_ROPE, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_theta": 0},
        {"rms_norm_eps": "1e-5"},
        {"rms_norm_eps": math.inf},
        {"num_hidden_layers": 4.0},
        {"num_hidden_layers": 10**12},
        {"num_key_value_heads": 0},
        {"head_dim": 0},
        {"attention_bias": "false"},
        {"model_type": "mistral", "sliding_window": 0},
        {"model_type": "mistral", "sliding_window": 8.5},
        {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 2},  # a window of 4,096
        {"model_type": "qwen2", "layer_types": ["sliding_attention"] * 4},  # without one
    ],
    ids=str,
)
def test_settings_that_are_not_known_in_full_are_left_to_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = make_tiny_llama(tmp_path)
    assert load_lean(model, DType.FLOAT32, MAX_LEN) is not None
    settings = json.loads((tmp_path / "config.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(settings | changes))
    assert load_lean(ModelFolder.open(tmp_path), DType.FLOAT32, MAX_LEN) is None


def test_weights_in_parts_are_read_as_one_and_a_tensor_in_two_of_them_is_left_to_transformers(tmp_path: Path) -> None:
    whole, parts = make_tiny_llama(tmp_path / "whole"), make_tiny_llama(tmp_path / "parts")
    weights: dict[str, Any] = load_file(parts.path / "model.safetensors")
    (parts.path / "model.safetensors").unlink()
    names = sorted(weights)
    files = {f"model-0000{n + 1}-of-00002.safetensors": names[n::2] for n in range(2)}
    for file, inside in files.items():
        save_file({name: weights[name] for name in inside}, parts.path / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, inside in files.items() for name in inside}}
    (parts.path / "model.safetensors.index.json").write_text(json.dumps(index))
    decoders = [load_lean(ModelFolder.open(folder.path), DType.FLOAT32, MAX_LEN) for folder in (whole, parts)]
    assert decoders[0] is not None
    assert decoders[1] is not None
    first, second = (logits(decoder, ROWS, torch.float32) for decoder in decoders if decoder is not None)
    assert torch.equal(first, second)
    stale = {name: weights[name] for name in files["model-00001-of-00002.safetensors"]} | {names[1]: weights[names[1]]}
    save_file(stale, parts.path / "model-00001-of-00002.safetensors", metadata={"format": "pt"})
    assert load_lean(ModelFolder.open(parts.path), DType.FLOAT32, MAX_LEN) is None


@pytest.mark.parametrize("change", ["missing", "too many", "shape", "integers", "cut off"])
def test_weights_that_do_not_fit_are_left_to_transformers(tmp_path: Path, change: str) -> None:
    model = make_tiny_llama(tmp_path)
    file = tmp_path / "model.safetensors"
    weights: dict[str, Any] = load_file(file)
    match change:
        case "missing":
            del weights["model.layers.3.mlp.down_proj.weight"]
        case "too many":
            weights["model.layers.3.mlp.down_proj.bias"] = np.zeros(256, np.float32)
        case "shape":
            weights["model.norm.weight"] = np.ones(255, np.float32)
        case "integers":
            weights["model.norm.weight"] = np.ones(256, np.int8)
    save_file(weights, file, metadata={"format": "pt"})
    if change == "cut off":
        file.write_bytes(file.read_bytes()[:-1000])
    assert load_lean(model, DType.FLOAT32, MAX_LEN) is None


def test_token_ids_and_positions_outside_of_the_model_are_refused(tiny_model: ModelFolder) -> None:
    decoder = load_decoder(tiny_model, DType.FLOAT32, 8)
    for token_ids, start in (((tiny_model.vocab_size,), 0), ((-1,), 0), ((1,), 8)):
        with pytest.raises(IndexError):
            logits(decoder, [Row((*token_ids, 1), start, (0,), None)], torch.float32) if start == 0 else decoder.logits(
                torch.tensor(token_ids),
                torch.tensor([start]),
                torch.tensor([0]),
                None,  # type: ignore[arg-type]
            )


def test_logits_of_tokens_that_the_step_does_not_have_are_refused(tiny_model: ModelFolder) -> None:
    decoder = load_decoder(tiny_model, DType.FLOAT32, 8)
    for kept in (1, -1):
        with pytest.raises(IndexError, match="kept"):
            decoder.logits(torch.tensor([1]), torch.tensor([0]), torch.tensor([kept]), None)  # type: ignore[arg-type]


def test_a_model_of_the_family_is_loaded_without_importing_transformers(tiny_model: ModelFolder) -> None:
    code = (
        "import sys; from pathlib import Path; from cluster.config import EngineConfig; "
        "from cluster.engine.torch.backend import TorchBackend; from cluster.model import ModelFolder; "
        f"TorchBackend(ModelFolder.open(Path({str(tiny_model.path)!r})), EngineConfig(blocks=300)); "
        "sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
