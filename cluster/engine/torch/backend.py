"""The embedded backend: one step of a transformers model over a paged KV cache.

Owns: the model, the cache's tensors and the way from rows to drawn tokens. Imports torch and transformers. Invariant:
a row's tokens depend on its own tokens, positions and blocks' contents; not on where the blocks lie, nor (but for
rounding) on the other rows of the step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cluster.config import EngineConfig
from cluster.engine.torch.attention import PagedCache, SdpaStep
from cluster.engine.torch.layout import lay_out
from cluster.engine.torch.loading import DTYPES, load_model, quieten_transformers
from cluster.engine.torch.packing import pack_linears
from cluster.engine.torch.sampling import draw
from cluster.model import ModelFolder, ModelFolderError
from cluster.ports import Row


def prepare_process() -> None:
    """Settings of the process that an engine runs in; to be called by its owner, once, before the engine is made.

    One thread per replica: where replicas share cores, two threads of one are slower than one.
    """
    torch.set_num_threads(1)
    quieten_transformers()


class TorchBackend:
    """Implements `cluster.ports.Backend` on the CPU."""

    def __init__(self, model: ModelFolder, config: EngineConfig) -> None:
        """Load the model and reserve the cache.

        Raises:
            ModelFolderError: the model cannot be loaded or served; one line says why.
        """
        if config.max_model_len > model.max_position_embeddings:
            raise ModelFolderError(
                f"{model.name} was made for {model.max_position_embeddings} tokens: "
                f"lower max_model_len ({config.max_model_len}) to that"
            )
        self.vocab_size = model.vocab_size
        self._device = torch.device("cpu")
        self._dtype = DTYPES[config.dtype]
        self._model, shapes = load_model(model, config.dtype, config.max_model_len)
        pack_linears(self._model)
        self.cache = PagedCache(shapes, config.blocks, config.block_size_tokens, self._dtype, self._device)

    @torch.inference_mode()
    def run(self, rows: Sequence[Row]) -> list[int | None]:
        if not rows:
            return []
        layout = lay_out(rows, self.cache.block_size_tokens)
        sampled = torch.tensor(layout.sampled, dtype=torch.int64, device=self._device)
        output = self._model(
            input_ids=torch.tensor([layout.token_ids], dtype=torch.int64, device=self._device),
            position_ids=torch.tensor([layout.positions], dtype=torch.int64, device=self._device),
            use_cache=False,
            logits_to_keep=sampled,
            step=SdpaStep(self.cache, layout, self._dtype, self._device),
        )
        return draw(output.logits[0], [row.sample for row in rows if row.sample is not None])
