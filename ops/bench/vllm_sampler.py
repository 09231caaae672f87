"""The sampler of the vLLM engine with a clock around it.

Owns: the logits processor that `bench vllm` puts in place of ours in an engine core of its own process. Imports ours.
Invariant: it draws as ours does.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, ClassVar

from cluster.engine.vllm.sampler import DrawProcessor

if TYPE_CHECKING:
    from torch import Tensor


class TimedProcessor(DrawProcessor):
    """For `logits_processors`."""

    cpu_s: ClassVar[float] = 0.0
    """Of this thread in all calls so far, of whichever engine."""

    def update_state(self, batch_update: object) -> None:
        begin_s = time.thread_time()
        super().update_state(batch_update)
        TimedProcessor.cpu_s += time.thread_time() - begin_s

    def apply(self, logits: Tensor) -> Tensor:
        begin_s = time.thread_time()
        changed = super().apply(logits)
        TimedProcessor.cpu_s += time.thread_time() - begin_s
        return changed
