"""What is known beforehand, and several steps at once: the same engine as production's, the same cluster, to the last block."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

import pytest

from cluster.config import Order
from cluster.engine.engine import Engine
from cluster.engine.scheduling.plan import Cost
from cluster.types import Request, RequestId, Sampling, TokenDelta
from ops.sim.backend import END_TOKEN, ModelledBackend, no_text, prompt_for
from ops.sim.faults import Fault, FaultKind
from ops.sim.steady import SteadyEngine
from ops.sim.step_time import a100
from ops.sim.world import simulate
from tests.sim.kit import cluster, engine, seen, work

COST = Cost(60e-6, 1e-3)


def _backend() -> ModelledBackend:
    return ModelledBackend(a100().models["llama-3-8b"], 1000, padded=False)


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


def _state(one: Engine) -> object:
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


class _Heard:
    """Tokens by request, which come in order and once."""

    def __init__(self) -> None:
        self.ids: dict[str, tuple[int, ...]] = {}
        self.ended: dict[str, object] = {}

    def take(self, deltas: Iterable[TokenDelta]) -> None:
        for delta in deltas:
            before = self.ids.get(delta.request_id, ())
            assert delta.index == len(before)
            assert len(delta.pieces) == len(delta.token_ids)
            self.ids[delta.request_id] = before + delta.token_ids
            if delta.finish is not None:
                self.ended[delta.request_id] = (delta.finish, delta.cached_tokens if len(before) == 0 else None)


@pytest.mark.parametrize("order", [Order.PRIORITY, Order.FCFS])
@pytest.mark.parametrize("seed", range(6))
def test_an_engine_that_knows_tokens_beforehand_is_after_each_step_as_productions(seed: int, order: Order) -> None:
    rng = random.Random(seed)
    config = engine(order=order, blocks=90, slots=6)
    backend, steady_backend = _backend(), _backend()
    one_by_one = Engine(config, backend, no_text(), (END_TOKEN,), COST)
    at_once = SteadyEngine(config, steady_backend, no_text(), (END_TOKEN,), COST)
    singles, several = _Heard(), _Heard()
    names: list[RequestId] = []
    taken = 0
    for number in range(400):
        if rng.random() < 0.15:
            request = _request(rng, number)
            names.append(request.request_id)
            one_by_one.add(request, 1)
            at_once.add(request, 1)
        elif names and rng.random() < 0.02:
            name = rng.choice(names)
            several.take(d for d in (at_once.untold_of((name, 1)),) if d is not None)
            assert one_by_one.abort(name, 1) == at_once.abort(name, 1)
            names.remove(name)
        steps = at_once.steady_steps(rng.choice((1, 3, 64)))
        if steps:
            sequences, contexts = at_once.steady_contexts()
        for k in range(steps or 1):
            began_ms = backend.now_ms
            result = one_by_one.step()
            assert not steps or not result.preempted
            if steps:
                took_ms = steady_backend.decode_ms(sequences, contexts + k * sequences)
                assert backend.now_ms - began_ms == pytest.approx(took_ms, rel=1e-9)
            singles.take(d for d in result.deltas if d.request_id in names)
        if steps:
            at_once.run_steady(steps)
            assert at_once.result().load == result.load
        else:
            began_ms = steady_backend.now_ms
            stepped = at_once.step()
            assert stepped.preempted == result.preempted
            assert stepped.prefixes == result.prefixes
            assert steady_backend.now_ms - began_ms == pytest.approx(backend.take_ms(), rel=1e-9)
            if rng.random() < 0.2:  # before the step has ended: all but its own tokens
                several.take(d for d in at_once.untold(step_runs=True) if d.request_id in names)
            ends = (at_once.whole(d) if d.finish is not None else d for d in stepped.deltas)
            several.take(d for d in ends if d.request_id in names)
        backend.take_ms()
        taken += steps
        assert _state(one_by_one) == _state(at_once)
        at_once.check_integrity()
        if rng.random() < 0.1:
            several.take(at_once.untold())
            assert several.ids == singles.ids
        assert several.ended == singles.ended
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
