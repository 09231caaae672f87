"""Least load: the replica with the fewest requests that have not ended, over all replicas.

Owns: that choice. Imports the router's views. Source: least-connections balancing, as NGINX's `least_conn` and Envoy's
LEAST_REQUEST over all hosts; the routers of vLLM's production stack and of SGLang offer it for engines. Invariant: nothing
waits in the router while a replica takes work. Ties are drawn.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from ops.sim.policies.usable import outstanding, usable
from router.routing import Need, Placement
from router.view import ReplicaView


class LeastLoad:
    """Implements `ops.sim.values.Policy`."""

    name = "least-load"

    def place(self, need: Need, views: Sequence[ReplicaView], now_s: float, rng: random.Random) -> Placement | None:
        del now_s
        counted = [(outstanding(view, load), view, load) for view, load in usable(need, views)]
        if not counted:
            return None
        least = min(requests for requests, _, _ in counted)
        _, view, load = rng.choice([one for one in counted if one[0] == least])
        return Placement(view.replica_id, need.blocks(load.block_size_tokens))
