"""What must hold at every moment of a simulation.

Owns: the checks. Imports the router's core and the engines, whose redundant facts it compares. Each returns what is wrong,
in words. What can be seen as it happens (a request that ends twice, urgent work that waits behind lesser) is looked at
where it happens: ops/sim/clients.py and ops/sim/replica.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from cluster.engine.kv_cache import IntegrityError
from cluster.types import RequestId
from ops.sim.replica import Incarnation
from router.core import RouterCore


def check_routers(cores: Sequence[RouterCore], live: Mapping[RequestId, int]) -> Iterator[str]:
    """Each request that has not ended is in one router, and there in one place: queued, set aside, or open on one replica,
    with its reservation; and there is no reservation beside."""
    seen: dict[RequestId, int] = {}
    for number, core in enumerate(cores):
        reserved = {request_id: r.replica_id for r in core._fleet for request_id in r.reservations}
        open_at = {i: one.replica_id for i, one in core._live.items() if one.replica_id is not None}
        if reserved != open_at:
            yield f"router {number}: reservations are not the work in flight: {sorted(reserved.items() ^ open_at.items())[:3]}"
        own, queued = core._live.keys(), core._dispatcher.queue._members.keys()
        for request_id in sorted(queued & open_at.keys()):
            yield f"{request_id} is in 2 places of router {number}"
        for request_id in sorted(own - queued - open_at.keys()):
            if core._live[request_id].suspicion is None:
                yield f"{request_id} is in 0 places of router {number}"
        if dead := queued - own:
            yield f"{min(dead)} is queued in router {number} and not live there"
        for request_id in sorted(own & seen.keys()):
            yield f"{request_id} is in two routers"
        seen |= dict.fromkeys(own, number)
    if lost := live.keys() - seen.keys():
        yield f"{min(lost)} has not ended and is nowhere"
    if undead := seen.keys() - live.keys():
        yield f"{min(undead)} has ended and is live in router {seen[min(undead)]}"


def check_replicas(incarnations: Iterable[Incarnation]) -> Iterator[str]:
    """Blocks are conserved, books agree, and no engine lies still while there is something to do."""
    for one in incarnations:
        try:
            one.engine.check_integrity()
        except IntegrityError as error:
            yield f"{one.replica_id}: {error}"
        if one.runner.idles:
            yield f"{one.replica_id}: there is work, and no step runs"


def check_empty(incarnations: Iterable[Incarnation]) -> Iterator[str]:
    """Where all requests have ended, no engine holds anything."""
    for one in incarnations:
        if not one.engine.empty:
            yield f"{one.replica_id}: all requests have ended, and it still holds some"
