"""Nothing that routers and a controller keep grows with the requests that have ended.

Every container that can be reached from them is counted, so that one that is added later is counted too.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest

from cluster import lengths
from cluster.config import PriorityClass, RouterConfig, WithinTenant
from cluster.types import Generation, RefusalReason, Request
from router import fairness
from tests.unit.fleet_kit import TICK_S, FleetBench, Port

CONFIG = RouterConfig(
    classes=(
        PriorityClass(name="interactive", priority=10, max_queued_requests=64),
        PriorityClass(name="standard", priority=0, max_queued_requests=64),
        PriorityClass(name="batch", priority=-10, max_queued_requests=64, longest_wait_s=1.0),
    ),
    within_tenant=WithinTenant.SJF,
    affinity_entries=64,
    prefix_entries=64,
    explained_requests=64,
    silent_after_s=1e6,
    fenced_after_s=2e6,
)
ROUND = 5000
OURS = ("router.", "cluster.")
MUTABLE = (dict, list, set, deque)


def parts(thing: Any) -> Iterator[Any]:
    if isinstance(thing, dict):
        yield from thing.keys()
        yield from thing.values()
    elif isinstance(thing, list | tuple | set | frozenset | deque):
        yield from thing
    elif type(thing).__module__.startswith(OURS):
        yield from vars(thing).values() if hasattr(thing, "__dict__") else ()
        for kind in type(thing).__mro__:
            slots = getattr(kind, "__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                yield getattr(thing, name, None)


def entries(*roots: Any) -> dict[str, int]:
    """Entries of all containers that are reached, by the kind of object that has them."""
    counts: dict[str, int] = {}
    seen: set[int] = set()
    keep: list[Any] = []
    stack: list[tuple[str, Any]] = [("", root) for root in roots]
    while stack:
        owner, thing = stack.pop()
        if id(thing) in seen or isinstance(thing, str | bytes | int | float):
            continue
        seen.add(id(thing))
        keep.append(thing)
        if isinstance(thing, MUTABLE):
            counts[owner] = counts.get(owner, 0) + len(thing)
        name = owner if isinstance(thing, (*MUTABLE, tuple, frozenset)) else type(thing).__qualname__
        stack.extend((name, part) for part in parts(thing))
    return counts


class World:
    """Two routers and what befalls their requests: they finish, are preempted, refused, left by their clients, expire,
    lose their engine and are tried for it."""

    def __init__(self) -> None:
        self.rng = random.Random(7)
        self.fleet = FleetBench(routers=2, config=CONFIG)
        for _ in range(3):
            self.fleet.replica(slots=8)

    def step(self) -> None:
        rng, fleet = self.rng, self.fleet
        for _ in range(200 if rng.random() < 0.01 else rng.choice((0, 1, 2, 6))):
            router = rng.randrange(2)
            name = rng.choice(("interactive", "standard", "batch"))
            tenant = f"tenant-{fleet.number}" if rng.random() < 0.5 else f"t{rng.randrange(4)}"
            request = fleet.submit(router, name, tokens=rng.randint(1, 4), tenant=tenant)
            if rng.random() < 0.1:
                fleet.cores[router].cancel(request.request_id)
        for shared in fleet.replicas:
            shared.engine.refuse_with = RefusalReason.FULL if rng.random() < 0.05 else None
        if rng.random() < 0.005:
            self.kill(rng.choice(fleet.replicas))
        fleet.advance(2 * TICK_S)

    def kill(self, shared: Any) -> None:
        engine = shared.engine
        before, engine.generation = engine.generation, Generation(engine.generation.number + 1, "g")
        engine.held.clear()
        engine.done.clear()
        for number, core in enumerate(self.fleet.cores):
            core.replica_lost(engine.replica_id, before, "killed by the test")
            core.link_up(Port(shared, number), engine.report())

    def serve(self, requests: int) -> dict[str, int]:
        """So many requests, until all have ended; returns what is kept then."""
        until = self.fleet.number + requests
        while self.fleet.number < until:
            self.step()
        for _ in range(2000):
            self.fleet.advance(0.1)
            if not any(core._live for core in self.fleet.cores):
                break
        self.fleet.advance(6.0)
        assert not any(core._live for core in self.fleet.cores)
        return entries(*self.fleet.cores, self.fleet.controller)


@pytest.mark.timeout(240)
def test_what_routers_and_controller_keep_does_not_grow_with_the_requests_that_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every second request is of a tenant of its own: what is remembered of tenants has bounds, small ones here."""
    monkeypatch.setattr(fairness, "MAX_IDLE", 16)
    monkeypatch.setattr(lengths, "MAX_KEYS", 16)
    world = World()
    first = world.serve(ROUND)
    second = world.serve(3 * ROUND)
    ends = {str(m["outcome"]) for m in _ends(world)}
    assert {"finished", "cancelled", "rejected_queue_full"} <= ends
    grown = {name: (first.get(name, 0), count) for name, count in second.items() if count > first.get(name, 0) + 64}
    assert not grown


def _ends(world: World) -> Iterator[dict[str, str]]:
    for registry in world.fleet.registries:
        for family in registry.collect():
            if family.name == "forebay_requests":
                yield from (sample.labels for sample in family.samples if sample.value and "outcome" in sample.labels)


def test_the_count_sees_what_a_router_keeps_of_a_live_request() -> None:
    world = World()
    before = sum(entries(*world.fleet.cores).values())
    requests: list[Request] = [world.fleet.submit(0, tokens=50) for _ in range(20)]
    assert sum(entries(*world.fleet.cores).values()) >= before + len(requests)
