"""The replica of `bench fidelity` with steps of a stated length, so that the schedule and not the machine decides."""

from __future__ import annotations

import sys

from ops.bench import fidelity_replica
from tests.padded import PaddedBackend

STEP_S = 0.05
ROW_S = 0.004

if __name__ == "__main__":
    fidelity_replica.main(sys.argv[1:], lambda backend: PaddedBackend(backend, STEP_S, ROW_S))
