"""The embedded backend: one step of a model over a paged KV cache.

Owns: the model, the cache and the way from rows to drawn tokens. Imports torch. Invariant: a row's tokens depend on its
own tokens, positions and blocks' contents; not on where the blocks lie, nor on the other rows of the step (with
transformers' decoder: but for rounding).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from cluster.config import EngineConfig
from cluster.engine.torch.cpu.attention import CpuStep
from cluster.engine.torch.decoder import DTYPES
from cluster.engine.torch.layout import lay_out
from cluster.engine.torch.loading import load_decoder
from cluster.engine.torch.paged_cache import PagedCache
from cluster.engine.torch.sampling import outputs
from cluster.model import ModelFolder
from cluster.ports import OutOfMemoryError, Row, RowOutput

ALLOCATOR_SAYS = ("not enough memory", "can't allocate memory")
"""torch's allocator of host memory raises a plain RuntimeError with one of these."""


def prepare_process() -> None:
    """Settings of the process that an engine runs in; to be called by its owner, once, before the engine is made.

    One thread per replica: where replicas share cores, two threads of one are slower than one.
    """
    torch.set_num_threads(1)


class TorchBackend:
    """Implements `cluster.ports.Backend` on the CPU."""

    def __init__(self, model: ModelFolder, config: EngineConfig) -> None:
        """Load the model and reserve the cache.

        Raises:
            ModelFolderError: the model cannot be loaded or served; one line says why.
            OutOfMemoryError: the weights or the cache do not fit.
        """
        model.check_context(config.max_model_len)
        self.vocab_size = model.vocab_size
        self._device = torch.device("cpu")
        self._dtype = DTYPES[config.dtype]
        with out_of_memory_by_name():
            self._decoder = load_decoder(model, config.dtype, config.max_model_len)
            self.cache = PagedCache(
                self._decoder.shapes, config.blocks, config.block_size_tokens, self._dtype, self._device
            )
        self.kv_block_bytes = self.cache.block_bytes
        self.kv_format = f"{model.identity[:16]},{self.cache.format}"

    @torch.inference_mode()
    def run(self, rows: Sequence[Row], padding_tokens: int = 0) -> list[RowOutput]:
        if not rows:
            return []
        layout = lay_out(rows, self.cache.block_size_tokens, padding_tokens)
        with out_of_memory_by_name():
            step = CpuStep(self.cache, layout)
            logits = self._decoder.logits(
                self._index(layout.token_ids), self._index(layout.positions), self._index(layout.kept), step
            )
            return outputs(logits, rows)

    def _index(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def copy_block(self, source: int, target: int) -> None:
        self.cache.copy(source, target)

    def save_blocks(self, blocks: Sequence[int]) -> memoryview:
        with out_of_memory_by_name():
            return self.cache.save(blocks)

    def load_blocks(self, blocks: Sequence[int], saved: memoryview) -> None:
        with out_of_memory_by_name():
            self.cache.load(blocks, saved)


@contextmanager
def out_of_memory_by_name() -> Iterator[None]:
    """Raise what torch, its allocator of host memory and Python call running out of memory as OutOfMemoryError."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise OutOfMemoryError(str(error)) from error
    except RuntimeError as error:
        if any(words in str(error) for words in ALLOCATOR_SAYS):
            raise OutOfMemoryError(str(error)) from error
        raise
