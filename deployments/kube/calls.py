"""Calls of the API server beside the watch, in a thread of their own.

Owns: that thread, and the pauses after failures. Invariant: one call at a time, each bounded (api.py), so that nothing piles up.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from cluster.config import KubernetesConfig
from deployments.kube.api import KubeApi, KubeError

T = TypeVar("T")

CONFLICT = 409
_PAUSE_S = 0.5
"""After the first call that came to nothing."""


def pause_after(failures: int, config: KubernetesConfig, rng: random.Random) -> float:
    """After so many before it that came to nothing: twice as long as the last time, up to an end, with jitter."""
    return min(config.backoff_max_s, _PAUSE_S * 2.0 ** min(failures, 32)) * rng.uniform(0.5, 1.0)


class Calls:
    def __init__(self, api: KubeApi) -> None:
        self._api = api
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kubernetes calls")

    async def make(self, call: Callable[[KubeApi], T]) -> T:
        """One after the other. Raises KubeError."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._made, call)

    def _made(self, call: Callable[[KubeApi], T]) -> T:
        try:
            return call(self._api)
        except KubeError:
            self._api.close()  # whatever became of the connection, and of what access was found
            raise

    def close(self) -> None:
        """A call that is under way ends by itself."""
        self._thread.submit(self._api.close)
        self._thread.shutdown(wait=False)
