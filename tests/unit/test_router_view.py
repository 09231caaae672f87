"""What a router counts on one replica beyond its last report."""

from __future__ import annotations

import random

import pytest

from cluster.types import EngineLoad, PriorityLoad, ReplicaId, ReplicaReport, ReplicaState, RequestId
from router.view import Replica, Reservation
from tests.unit.fake_replica import Bench, FakeReplica


@pytest.mark.parametrize("seed", range(20))
def test_what_is_unreported_is_the_sum_of_all_that_was_sent_after_what_the_last_report_counts(seed: int) -> None:
    rng = random.Random(seed)
    port = FakeReplica(Bench().core, ReplicaId("a"))
    replica = Replica(port, 0.0, {})
    here: dict[RequestId, Reservation] = {}
    """All that is reserved, by a list of the test's own."""
    expected: dict[RequestId, Reservation] = {}
    applied, sequence = 0, 0
    for number in range(400):
        act = rng.choice(("reserve", "reserve", "expect", "release", "unexpect", "grow", "park", "observe"))
        request_id = RequestId(f"{number}")
        if act in ("reserve", "expect"):
            sequence += 1
            late = sequence if act == "reserve" else 10**9
            one = Reservation(0, late, rng.choice((-10, 0, 10)), rng.randrange(50), prompt_tokens=rng.randrange(900))
            if act == "reserve":
                replica.reserve(request_id, one)
                here[request_id] = one
            else:
                replica.expect(request_id, one)
                expected[request_id] = one
        elif act == "observe":
            applied = rng.randint(applied, sequence)
            load = EngineLoad(slots_total=4, blocks_total=100, blocks_free=100, block_size_tokens=16)
            replica.observe(
                ReplicaReport(
                    replica_id=port.replica_id,
                    generation=port.generation,
                    state=ReplicaState.READY,
                    observed_unix_s=0.0,
                    load=load,
                    step_age_s=None,
                    applied_sequence=applied,
                ),
                float(number),
            )
        elif act == "unexpect" and expected:
            gone = rng.choice(sorted(expected))
            replica.expect_no_more(gone)
            del expected[gone]
        elif act in ("release", "grow", "park") and here:
            chosen = rng.choice(sorted(here))
            if act == "release":
                replica.release(chosen)
                del here[chosen]
            elif act == "grow":
                replica.grow(chosen, here[chosen].blocks + rng.randrange(9))
            else:
                replica.park(chosen, rng.random() < 0.5)
        wanted: dict[int, list[int]] = {}
        for one in [*(r for r in here.values() if r.sequence > applied), *expected.values()]:
            sums = wanted.setdefault(one.priority, [0, 0, 0])
            sums[0] += 1
            sums[1] += one.blocks
            sums[2] += one.prompt_tokens
        assert replica.unreported() == tuple(PriorityLoad(p, *wanted[p]) for p in sorted(wanted))
