"""What every baseline asks first: which replicas may be sent a request at all.

Owns: that filter, and the count of a replica's requests. Imports the router's views. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.types import EngineLoad
from router.routing import Need
from router.view import Condition, ReplicaView


def usable(need: Need, views: Sequence[ReplicaView]) -> list[tuple[ReplicaView, EngineLoad]]:
    """Replicas that take work and could hold all of this request if they were empty."""
    return [
        (view, view.load)
        for view in views
        if view.load is not None
        and view.condition is Condition.ROUTABLE
        and need.blocks_max(view.load.block_size_tokens) <= view.load.blocks_total
    ]


def outstanding(view: ReplicaView, load: EngineLoad) -> int:
    """Requests there that have not ended, with those that the last report does not count yet."""
    return sum(level.requests for level in (*load.running, *load.waiting, *view.unreported))
