"""What is compared with production's placement: one file for each baseline, with its source.

Each takes the place of `router.fleet.Fleet.place`, and of the controller that moves requests: the router's queue and its
bounds, the replica's scheduler and its preemption are the same for all. Only Llumnix moves a request that has been placed.
As published, none knows what requests are to meet, and none refuses one that will miss it: that part of admission is
Forebay's. (Where it refuses for them too, p99 TTFT is that of those who were let in.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ops.sim.policies.least_load import LeastLoad
from ops.sim.policies.llumnix import Llumnix
from ops.sim.policies.round_robin import RoundRobin
from ops.sim.values import Policy

FOREBAY = "forebay"
LOAD_ONLY = "load-only"
"""Forebay that asks no replica what it holds: its prefix caches find what comes there by chance."""
POLICIES: Mapping[str, Callable[[], Policy] | None] = {
    FOREBAY: None,
    LOAD_ONLY: None,
    "round-robin": RoundRobin,
    "least-load": LeastLoad,
    "llumnix": Llumnix,
}
"""By name; None is production's own code."""
