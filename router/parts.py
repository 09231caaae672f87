"""What the parts of the core that see to one side of a request's life have in common.

Owns: that bundle. Imports the parts that are there before them. Invariant: all of a core have the same.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import NamedTuple

from cluster.config import RouterConfig
from cluster.types import RequestId
from router.dispatch import Dispatcher
from router.endings import Endings
from router.fleet import Fleet
from router.live import Live
from router.metrics_sink import RouterMetrics


class Parts(NamedTuple):
    config: RouterConfig
    rng: random.Random
    metrics: RouterMetrics
    fleet: Fleet
    dispatcher: Dispatcher
    endings: Endings
    lives: Mapping[RequestId, Live]
    """The core's, to be read."""
