"""Builds the embedded engine: scheduling core, text stage, torch backend and the thread that runs them.

Owns: their composition and the warm-up. Imports the core and this backend. Invariant: an engine that is returned has run
every kind of step once, so that its first request does not pay for it, and knows what its own steps cost here.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from cluster.config import EngineConfig
from cluster.engine.engine import Engine
from cluster.engine.runner import EngineRunner
from cluster.engine.scheduling.plan import Cost
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
    cost = warm_up(backend, config)
    return Engine(config, backend, TextCodec.from_file(model.tokenizer_path), model.eos_token_ids, cost)


def warm_up(backend: TorchBackend, config: EngineConfig) -> Cost:
    """Run a prefill, a decode, a draw by chance and a swap, and time what preemption weighs against each other.

    They write to blocks that nobody holds yet.
    """
    tokens = min(config.step_token_budget, config.max_model_len - 1)
    blocks = tuple(range(-(-(tokens + 1) // config.block_size_tokens)))
    prefill = Row(token_ids=(0,) * tokens, start=0, block_table=blocks, sample=SampleSpec(temperature=0.0))
    by_chance = SampleSpec(temperature=1.0, top_p=0.9, uniform=0.5)
    backend.run([prefill])
    backend.run([Row(token_ids=(0,), start=tokens, block_table=blocks, sample=by_chance)])
    swap(backend, blocks)
    return Cost(
        prefill_token_s=seconds(lambda: backend.run([prefill])) / tokens,
        swap_block_s=seconds(lambda: swap(backend, blocks)) / len(blocks),
    )


def swap(backend: TorchBackend, blocks: tuple[int, ...]) -> None:
    backend.load_blocks(blocks, backend.save_blocks(blocks))


def seconds(work: Callable[[], object]) -> float:
    """How long `work` takes, the best of three: what else runs on the machine only adds."""
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times)
