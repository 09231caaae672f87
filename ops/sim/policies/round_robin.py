"""Round-robin: each replica in turn, whatever it has to do.

Owns: the turn. Imports the router's views. Source: the default of load balancers that count nothing, as NGINX's `upstream`
without a directive and Envoy's ROUND_ROBIN. Invariant: nothing waits in the router while a replica takes work.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from ops.sim.policies.usable import usable
from router.routing import Need, Placement
from router.view import ReplicaView


class RoundRobin:
    """Implements `ops.sim.values.Policy`."""

    name = "round-robin"

    def __init__(self) -> None:
        self._turn = 0

    def place(self, need: Need, views: Sequence[ReplicaView], now_s: float, rng: random.Random) -> Placement | None:
        del now_s, rng
        candidates = usable(need, views)
        if not candidates:
            return None
        view, load = candidates[self._turn % len(candidates)]
        self._turn += 1
        return Placement(view.replica_id, need.blocks(load.block_size_tokens))
