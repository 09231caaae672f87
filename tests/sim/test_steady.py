"""Several steps at once: the same engine, the same cluster, to the last block."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from cluster.config import EngineConfig, Order
from cluster.engine.scheduling.plan import Cost
from cluster.types import Request, RequestId, Sampling, TokenDelta
from ops.sim.backend import END_TOKEN, ModelledBackend, no_text, prompt_for
from ops.sim.faults import Fault, FaultKind
from ops.sim.steady import SteadyEngine
from ops.sim.step_time import a100
from ops.sim.world import simulate
from tests.sim.kit import cluster, engine, seen, work


def _engine(config: EngineConfig) -> SteadyEngine:
    backend = ModelledBackend(a100().models["llama-3-8b"], 1000, padded=False)
    return SteadyEngine(config, backend, no_text(), (END_TOKEN,), Cost(60e-6, 1e-3))


def _request(rng: random.Random, number: int) -> Request:
    prompt_ids = (*(rng.randrange(1, 4) for _ in range(rng.randrange(0, 300))), *prompt_for(20, rng.randrange(1, 90)))
    return Request(
        request_id=RequestId(f"{number:04}"),
        tenant="t",
        priority=rng.choice((-10, 0, 10)),
        priority_class="standard",
        arrived_unix_s=float(number),
        prompt_ids=prompt_ids,
        sampling=Sampling(max_tokens=rng.choice((30, 200)), seed=0, temperature=0.0),
    )


def _state(one: SteadyEngine) -> object:
    """Everything that a later step could depend on."""
    lives = [
        (
            {name: getattr(live.state, name) for name in type(live.state).__slots__ if name != "leader"},
            live.output,
            live.registered,
            one.pool.table(live.state.identity) if live.state.blocks else (),
        )
        for live in one._book.live.values()
    ]
    pool = one.pool
    order = [[s.identity for s in line.items] for line in (one._book.waiting, one._book.running)]
    return lives, order, one.load(), pool._free, pool._by_hash, list(pool._cached), one._batch_rows


def _by_attempt(deltas: list[TokenDelta]) -> dict[str, tuple[int, ...]]:
    ids: dict[str, tuple[int, ...]] = {}
    for delta in deltas:
        ids[delta.request_id] = ids.get(delta.request_id, ()) + delta.token_ids
    return ids


@pytest.mark.parametrize("order", [Order.PRIORITY, Order.FCFS])
@pytest.mark.parametrize("seed", range(6))
def test_steady_steps_at_once_leave_an_engine_as_one_by_one(seed: int, order: Order) -> None:
    rng = random.Random(seed)
    config = engine(order=order, blocks=90, slots=6)
    one_by_one, at_once = _engine(config), _engine(config)
    taken = 0
    for number in range(400):
        if rng.random() < 0.15:
            request = _request(rng, number)
            one_by_one.add(request, 1)
            at_once.add(request, 1)
        steps = at_once.steady_steps(rng.choice((1, 3, 64)))
        assert steps == 0 or one_by_one.steady_steps(1) == 1
        singles: list[TokenDelta] = []
        for k in range(steps or 1):
            # Steady is steady, however many steps were taken at once before.
            assert not steps or one_by_one.steady_steps(64) >= min(1, steps - k)
            result = one_by_one.step()
            assert not steps or not result.preempted
            singles.extend(result.deltas)
        several = at_once.run_steady(steps) if steps else list(at_once.step().deltas)
        taken += steps
        assert _by_attempt(singles) == _by_attempt(several)
        assert _state(one_by_one) == _state(at_once)
        at_once.check_integrity()
    assert taken > 100


@pytest.mark.parametrize("seed", range(3))
def test_a_cluster_is_the_same_event_by_event_whether_steps_are_taken_at_once(seed: int) -> None:
    """First tokens, ends, preemptions, replicas and the hash of all events; under too much work, with faults."""
    faults = (
        Fault(1.0, FaultKind.REPLICA_DEATH, 1.0, number=1),
        Fault(1.5, FaultKind.REPORTS_LATE, 0.5, number=2, delay_s=0.03),
        Fault(2.0, FaultKind.LINK_BREAK, 0.3, number=0),
    )
    arrivals, config = work(150, 50, seed, shared=True), cluster(3, routers=2, faults=faults)
    at_once = simulate(arrivals, config, seed=seed)
    one_by_one = simulate(arrivals, replace(config, fast_forward=False), seed=seed)
    assert at_once.preemptions > 0
    assert at_once.events < one_by_one.events
    assert seen(at_once) == seen(one_by_one)


def test_a_request_that_ends_by_its_limit_ends_there_whether_steps_are_taken_at_once() -> None:
    arrivals = [replace(a, max_tokens=7 + k % 5) for k, a in enumerate(work(40, 20))]
    at_once, one_by_one = (simulate(arrivals, replace(cluster(2), fast_forward=f)) for f in (True, False))
    assert seen(at_once) == seen(one_by_one)
    assert all(r.tokens <= 11 for r in at_once.requests)
