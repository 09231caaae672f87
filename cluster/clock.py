"""The real clock; the simulator and the tests bring their own (`ports.Clock`)."""

from __future__ import annotations

import time


class SystemClock:
    def monotonic(self) -> float:
        return time.monotonic()

    def unix(self) -> float:
        return time.time()
