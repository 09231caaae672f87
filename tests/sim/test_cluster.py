"""Twenty A100s for a minute, with all that can go wrong, and nothing that must hold broken."""

from __future__ import annotations

import random

import pytest

from cluster.types import Outcome, RequestId
from ops.sim.faults import Fault, FaultKind, MovePoint
from ops.sim.values import Arrival, SimConfig, default_engine
from ops.sim.world import simulate

REPLICAS, SECONDS = 20, 60.0
RATE_RPS = 3.0 * REPLICAS
"""Nearly half of what they do: there is room for what fails, and for what moves."""
KINDS = (("interactive", 10, 1500, 30), ("standard", 70, 900, 150), ("batch", 20, 3000, 200))
"""Class, part in a hundred, mean prompt and mean output, as in the recorded traces."""


def _arrivals(seed: int) -> list[Arrival]:
    rng, at_s, arrivals = random.Random(seed), 0.0, list[Arrival]()
    while (at_s := at_s + rng.expovariate(RATE_RPS)) < SECONDS:
        name, _, prompt, output = rng.choices(KINDS, [share for _, share, _, _ in KINDS])[0]
        prompt_tokens = min(6000, 1 + int(rng.expovariate(1 / prompt)))
        output_tokens = min(1000, 1 + int(rng.expovariate(1 / output)))
        arrivals.append(Arrival(at_s, RequestId(f"r{len(arrivals)}"), prompt_tokens, output_tokens, name))
    return arrivals


FAULTS = (
    Fault(8.0, FaultKind.REPLICA_DEATH, 4.0, number=3),
    Fault(12.0, FaultKind.CONTROLLER_RESTART, 2.0),
    Fault(15.0, FaultKind.DRAIN, 10.0, number=7),
    Fault(15.0, FaultKind.MOVE_TARGET_DEATH, 3.0, point=MovePoint.GRANTED),
    Fault(20.0, FaultKind.LINK_BREAK, 0.5, number=11),
    Fault(25.0, FaultKind.NODE_LOSS, 5.0, number=2),
    Fault(34.0, FaultKind.NODE_DRAIN, 6.0, number=0),
    Fault(34.0, FaultKind.MOVE_LINK_BREAK, 0.0, point=MovePoint.COPIED),
    Fault(34.0, FaultKind.MOVE_SOURCE_UNLINKED, 0.3, point=MovePoint.FROZEN),
    Fault(45.0, FaultKind.REPORTS_LATE, 3.0, number=9, delay_s=0.4),
)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_twenty_replicas_for_a_minute_break_nothing_that_must_hold_whatever_fails() -> None:
    config = SimConfig(
        replicas=REPLICAS, routers=2, replicas_per_node=4, engine=default_engine("llama-3-8b"), faults=FAULTS
    )
    result = simulate(_arrivals(0), config)
    assert result.invariant_violations == []
    assert {r.outcome for r in result.requests} == {Outcome.FINISHED}
    assert all(r.tokens == r.output_tokens for r in result.requests)
    assert result.moves["moved"] > 20
    assert max(r.preemptions for r in result.requests) <= 3
