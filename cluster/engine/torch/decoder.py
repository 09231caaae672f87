"""What the backend asks of a model: the logits of some of a step's tokens.

Owns: the interface that the decoders implement, transformers' and our own. Imports torch. Invariant: a decoder keeps
nothing between steps; what is remembered of a sequence is in the cache that the step's attention owns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from cluster.config import DType
from cluster.engine.torch.attention import AttentionStep
from cluster.engine.torch.paged_cache import LayerShape

DTYPES = {DType.FLOAT32: torch.float32, DType.BFLOAT16: torch.bfloat16}


class Decoder(Protocol):
    @property
    def shapes(self) -> Sequence[LayerShape]:
        """What each layer keeps per token."""
        ...

    def logits(self, token_ids: Tensor, positions: Tensor, kept: Tensor, step: AttentionStep) -> Tensor:
        """Run packed tokens of many sequences.

        Args:
            token_ids, positions: [tokens], int64.
            kept: [kept], int64: which tokens' logits are asked for, as indices into `token_ids`.
            step: attention, called once per layer, in the order of the layers.

        Returns:
            [kept, vocabulary].
        """
        ...
