"""What routers and replicas tell the controller comes to the meter of their model, and goes with them."""

from __future__ import annotations

import msgspec

from cluster.clock import SystemClock
from cluster.control.demand import Meter, ModelLoad
from cluster.messages import (
    ClusterStatus,
    DrainOrder,
    Granted,
    Leave,
    ReplicaHere,
    ReplicaStatus,
    Roster,
    RouterDemand,
    ScaleDecision,
    ScaleStatus,
    StatusRequest,
    ToController,
)
from cluster.types import ReplicaId, ReplicaState
from deployments.controller_server import ROLES, ControllerServer
from deployments.transport import Acceptor
from tests.line import until
from tests.unit.links.test_controller_links import CONFIG, ENTRY, SECRET, Peer, Place, heard
from tests.unit.scale_model import engine_load, report, router_demand


async def test_reports_demands_and_ends_of_links_come_to_the_meter_of_the_model_and_orders_to_the_replica() -> None:
    clock = SystemClock()
    meters = {name: Meter(1.0, 1.0, clock.monotonic(), 30.0) for name in ("m", "other")}
    server = ControllerServer(SECRET, clock, meters)
    acceptor = Acceptor(server.identity, ROLES, msgspec.msgpack.Decoder(ToController).decode, server.accept, CONFIG)
    place = Place(await acceptor.listen("127.0.0.1", 0, SECRET), [acceptor])

    async def load() -> ModelLoad:
        return meters["m"].load(clock.monotonic())

    try:
        router, replica = Peer(place, "router"), Peer(place, "replica", name="r1")
        await heard(router, Roster, lambda _: True)
        granted = await heard(replica, Granted)
        entry = msgspec.structs.replace(ENTRY, generation=granted.generation, zone="z")
        replica.link.tell(ReplicaHere(entry=entry, pid=7))
        status = report(entry, engine_load(3), ReplicaState.DRAINING)
        replica.link.tell(ReplicaStatus(status, retiring=True))
        seen, _ = await until(load, lambda load: load.replicas)
        (one,) = seen.replicas
        assert (one.replica_id, one.zone, one.requests, one.retiring) == ("r1", "z", 3, True)
        router.link.tell(router_demand(4, 400.0, 0.0))
        router.link.tell(demand_of("unknown"))
        seen, _ = await until(load, lambda load: load.queued)
        assert (seen.queued, seen.routers) == (4, 1)
        elsewhere = meters["other"].load(clock.monotonic())
        assert (elsewhere.replicas, elsewhere.queued, elsewhere.routers) == ((), 0, 1)

        for order in (DrainOrder(drain=True, retire=True), Leave()):
            server.tell_replica(ReplicaId("r1"), order)
            server.tell_replica(ReplicaId("nobody"), order)
            assert await heard(replica, type(order), lambda _: True) == order

        now = ScaleDecision(1.0, 1, 2, "demand is above what they do", {"demand_per_s": 9.5})
        scale = ScaleStatus("m", now, kept=1, changes=(now,))
        server.scaled(scale)
        assert await heard(router, ScaleStatus, lambda _: True) == scale
        for at_s in (2.0, 3.0):
            now = msgspec.structs.replace(now, at_unix_s=at_s)
            server.scaled(msgspec.structs.replace(scale, now=now))  # nothing that a router shows has changed
        server.scaled(grown := msgspec.structs.replace(scale, kept=2))
        assert await heard(router, ScaleStatus, lambda _: True) == grown
        router.link.ask(StatusRequest(ask_id=1))
        assert (await heard(router, ClusterStatus, lambda _: True)).scale == (grown,)

        told_s = clock.monotonic()

        async def load_as_of_then() -> ModelLoad:
            """Nothing that was told by then is too old."""
            return meters["m"].load(told_s)

        for peer in (replica, router):
            peer.abort()
        await until(load_as_of_then, lambda load: (load.replicas, load.queued) == ((), 0))
    finally:
        for task in place.tasks:
            task.cancel()
        await acceptor.close()


def demand_of(model: str) -> RouterDemand:
    return msgspec.structs.replace(router_demand(9, 900.0, 0.0), model=model)
