"""What tests/forks.py has its server import. Nothing else may happen here."""

from __future__ import annotations

import gc

from cluster.engine.torch import backend, build  # noqa: F401
from tests import load, process_parts  # noqa: F401

gc.collect()
gc.freeze()
