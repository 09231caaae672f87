"""Builds the embedded engine: scheduling core, text stage, torch backend and the thread that runs them.

Owns: their composition and the warm-up. Imports the core and this backend. Invariant: an engine that is returned has run
every kind of step once, so that its first request does not pay for it.
"""

from __future__ import annotations

from cluster.config import EngineConfig
from cluster.engine.engine import Engine
from cluster.engine.runner import EngineRunner
from cluster.engine.text import TextCodec
from cluster.engine.torch.backend import TorchBackend, prepare_process
from cluster.model import ModelFolder
from cluster.ports import Clock, EnginePort, Row, SampleSpec

__all__ = ["build_embedded_engine", "build_engine", "prepare_process"]


def build_embedded_engine(model: ModelFolder, config: EngineConfig, clock: Clock) -> EnginePort:
    """An engine that is warm and waits for `start`. The process should have been prepared (`prepare_process`).

    Raises:
        ModelFolderError: the model cannot be loaded or served; one line says why.
    """
    return EngineRunner(build_engine(model, config), clock)


def build_engine(model: ModelFolder, config: EngineConfig) -> Engine:
    """The same without its thread, to be stepped by hand. Raises ModelFolderError."""
    backend = TorchBackend(model, config)
    warm_up(backend, config)
    return Engine(config, backend, TextCodec.from_file(model.tokenizer_path), model.eos_token_ids)


def warm_up(backend: TorchBackend, config: EngineConfig) -> None:
    """Run a prefill, a decode and a draw by chance. They write to blocks that nobody holds yet."""
    tokens = min(config.step_token_budget, config.max_model_len - 1)
    blocks = tuple(range(-(-(tokens + 1) // config.block_size_tokens)))
    greedy = SampleSpec(temperature=0.0, top_p=1.0, top_k=0, uniform=0.0)
    by_chance = SampleSpec(temperature=1.0, top_p=0.9, top_k=0, uniform=0.5)
    backend.run([Row(token_ids=(0,) * tokens, start=0, block_table=blocks, sample=greedy)])
    backend.run([Row(token_ids=(0,), start=tokens, block_table=blocks, sample=by_chance)])
