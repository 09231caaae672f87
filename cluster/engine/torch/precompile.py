"""Compiles the CPU kernels before anybody waits for them: `python -m cluster.engine.torch.precompile`.

Owns: a model of the smallest size, whose warm-up calls every kernel with every type that a real one calls it with. Imports
torch and safetensors. Invariant: nothing is left behind but the compiled kernels in their cache.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from cluster.config import DType, EngineConfig
from cluster.engine.torch.backend import TorchBackend, prepare_process
from cluster.engine.torch.build import warm_up
from cluster.engine.torch.decoder import DTYPES
from cluster.engine.torch.llama import read_spec, tensor_shapes
from cluster.model import ModelFolder

SETTINGS = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
}


def write_model(folder: Path, tied: bool) -> ModelFolder:
    """A folder in Hugging Face form with zeros for weights."""
    (folder / "config.json").write_text(json.dumps({**SETTINGS, "tie_word_embeddings": tied}))
    (folder / "tokenizer.json").write_text("{}")
    save_file({}, folder / "model.safetensors")
    spec = read_spec(ModelFolder.open(folder))
    assert spec is not None, "a plain Llama is known"
    save_file({name: torch.zeros(shape) for name, shape in tensor_shapes(spec).items()}, folder / "model.safetensors")
    return ModelFolder.open(folder)


def precompile(dtype: DType) -> None:
    """Compile what engines of one dtype call, or find it compiled already."""
    for tied in (True, False):
        with tempfile.TemporaryDirectory() as folder:
            config = EngineConfig(dtype=dtype, blocks=8, max_model_len=64, step_token_budget=32)
            warm_up(TorchBackend(write_model(Path(folder), tied), config), config)


def main() -> None:
    prepare_process()
    for dtype in DTYPES:
        if sys.stdout.isatty():
            print(f"      {dtype}", flush=True)
        precompile(dtype)


if __name__ == "__main__":
    main()
