"""The simulated cluster: its times, its determinism, and that it decides as production does."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from cluster.engine.scheduling import admission
from cluster.engine.scheduling.victims import NoRoom
from cluster.types import Outcome, RequestId
from ops.sim.faults import Fault, FaultKind, MovePoint
from ops.sim.step_time import Prefill, a100, step_ms
from ops.sim.values import Arrival, SimConfig
from ops.sim.world import simulate
from router import fleet
from router.routing import Need, Placement
from router.view import ReplicaView
from tests.sim.kit import cluster, seen, work


def test_times_are_the_sums_of_the_step_times_and_of_the_links() -> None:
    times, delay_s = a100().models["llama-3-8b"], 0.0005
    config = SimConfig(link_delay_s=delay_s, held_max_s=0.0)
    # The second comes while the prompt of the first is run, and joins it with the next step.
    arrivals = [
        Arrival(1.0, RequestId("a"), prompt_tokens=300, output_tokens=4),
        Arrival(1.001, RequestId("b"), prompt_tokens=200, output_tokens=2),
    ]
    steps_ms = [
        step_ms(times, [Prefill(300)], []),
        step_ms(times, [Prefill(200)], [300]),
        step_ms(times, [], [301, 200]),
        step_ms(times, [], [302]),
    ]
    ends_s = [1.0 + delay_s + sum(steps_ms[: k + 1]) / 1000 for k in range(4)]

    a, b = simulate(arrivals, config).requests

    assert steps_ms[0] > 1.0  # or the second would not have come while it ran
    assert a.first_token_s == pytest.approx(ends_s[0] + delay_s, abs=1e-9)
    assert b.first_token_s == pytest.approx(ends_s[1] + delay_s, abs=1e-9)
    assert b.end_s == pytest.approx(ends_s[2] + delay_s, abs=1e-9)
    assert a.end_s == pytest.approx(ends_s[3] + delay_s, abs=1e-9)
    assert (a.tokens, b.tokens) == (4, 2)
    assert a.outcome is b.outcome is Outcome.FINISHED


def test_a_stream_is_told_at_the_same_time_whether_its_middle_is_held_or_not() -> None:
    arrivals = [Arrival(1.0, RequestId("a"), 300, 200), Arrival(1.3, RequestId("b"), 900, 50)]
    held, told = (simulate(arrivals, SimConfig(held_max_s=held_max_s)) for held_max_s in (0.5, 0.0))
    assert [repr(record) for record in held.requests] == [repr(record) for record in told.requests]


def test_equal_seeds_give_equal_event_logs_in_other_processes_and_other_seeds_others() -> None:
    script = (
        "import json\n"
        "from ops.sim.world import simulate\n"
        "from tests.sim.kit import cluster, work\n"
        "run = lambda seed: simulate(work(120, 25, shared=True), cluster(routers=2), seed=seed).event_log_sha256\n"
        "print(json.dumps([run(0), run(0), run(1)]))\n"
    )
    hashes = []
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        ran = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, check=True, timeout=60
        )
        hashes.append(json.loads(ran.stdout))
    assert hashes[0] == hashes[1]
    assert hashes[0][0] == hashes[0][1] != hashes[0][2]


def _worst(
    need: Need, views: Sequence[ReplicaView], rng: random.Random, favour: object = None, *, pushing: bool = False
) -> Placement | None:
    """Another decision: the last replica that has room at all."""
    del rng, favour, pushing
    with_room = [v for v in views if v.load is not None and v.load.blocks_total >= need.blocks_max(16)]
    return Placement(with_room[-1].replica_id, need.blocks(16)) if with_room else None


@pytest.mark.parametrize("mutant", ["victims", "routing"])
def test_another_decision_in_production_code_gives_another_event_log(
    monkeypatch: pytest.MonkeyPatch, mutant: str
) -> None:
    arrivals, config = work(120, 60), cluster(2)
    before = simulate(arrivals, config)
    if mutant == "victims":
        # Nobody is ever pushed out.
        refuse: Callable[..., object] = lambda draft, urgent, source, *, blocks_short, slots_short: (  # noqa: E731
            NoRoom.SLOTS if slots_short > 0 else NoRoom.BLOCKS
        )
        monkeypatch.setattr(admission, "make_room", refuse)
    else:
        monkeypatch.setattr(fleet, "choose", _worst)
    after = simulate(arrivals, config)
    assert before.preemptions > 0
    assert before.event_log_sha256 != after.event_log_sha256


def test_a_policy_takes_the_place_of_the_choice_of_a_replica() -> None:
    class LastReplica:
        name = "last"

        def place(self, need: Need, views: Sequence[ReplicaView], now_s: float, rng: random.Random) -> Placement | None:
            del now_s, rng
            return Placement(views[-1].replica_id, need.blocks(16))

    result = simulate(work(40, 20), cluster(3), LastReplica)
    assert {replica_id for record in result.requests for replica_id in record.replicas} == {"replica-2"}
    assert all(record.outcome is Outcome.FINISHED for record in result.requests)
    assert result.invariant_violations == []


def test_what_ends_can_bring_more_work_and_a_stopped_clock_leaves_work_live() -> None:
    names = iter(range(1_000_000))

    def next_one(now_s: float) -> Arrival:
        return Arrival(now_s, RequestId(f"more-{next(names)}"), 100, 20, "batch")

    result = simulate(
        [next_one(0.5), next_one(0.5)],
        cluster(1),
        until_s=5.0,
        on_end=lambda record, now_s: [next_one(now_s)],
    )
    ended = [record for record in result.requests if record.outcome is Outcome.FINISHED]
    assert len(result.requests) == len(ended) + 2
    assert len(ended) > 10
    assert result.virtual_s <= 5.0


def test_a_client_that_does_not_read_is_ended_alone() -> None:
    config = cluster(1, router=cluster().router.model_copy(update={"max_stream_bytes": 256}), held_max_s=0.0)
    reader, other = work(2, 10)
    arrivals = [replace(reader, output_tokens=100), replace(other, output_tokens=100, reads=False)]
    first, second = simulate(arrivals, config).requests
    assert first.outcome is Outcome.FINISHED
    assert second.outcome is Outcome.SLOW_CLIENT


def test_several_routers_go_by_the_gates_and_leave_no_request_behind() -> None:
    config = cluster(3, routers=3, faults=(Fault(1.0, FaultKind.CONTROLLER_RESTART, 1.0),))
    result = simulate(work(200, 60), config)
    assert {record.outcome for record in result.requests} == {Outcome.FINISHED}
    assert result.invariant_violations == []


def test_what_cannot_be_is_refused_and_says_why() -> None:
    with pytest.raises(ValueError, match="no model 'gpt'"):
        SimConfig(model="gpt")
    with pytest.raises(ValueError, match="link_delay_s must be above 0"):
        SimConfig(link_delay_s=0.0)
    with pytest.raises(ValueError, match="there is no number 4"):
        cluster(3, faults=(Fault(1.0, FaultKind.REPLICA_DEATH, 1.0, number=4),))
    with pytest.raises(ValueError, match="node_drain: there is no number 1"):
        cluster(3, faults=(Fault(1.0, FaultKind.NODE_DRAIN, 1.0, number=1),))
    with pytest.raises(
        ValueError, match="move_source_death: needs the point of a move at which it happens, one of asked"
    ):
        Fault(1.0, FaultKind.MOVE_SOURCE_DEATH, 1.0)
    with pytest.raises(ValueError, match="drain: it does not happen to a move"):
        Fault(1.0, FaultKind.DRAIN, 1.0, point=MovePoint.TAKEN)
    with pytest.raises(ValueError, match="must have one of its own"):
        Arrival(0.0, RequestId("a"), prompt_tokens=2, output_tokens=1, prefix_ids=(1, 2))
    with pytest.raises(ValueError, match="sort the arrivals"):
        simulate([Arrival(2.0, RequestId("a"), 9, 9), Arrival(1.0, RequestId("b"), 9, 9)], cluster(1))
    with pytest.raises(ValueError, match="no priority class 'urgent'"):
        simulate([Arrival(2.0, RequestId("a"), 9, 9, "urgent")], cluster(1))


def test_equal_runs_say_the_same_of_everything() -> None:
    arrivals, config = work(100, 40, shared=True), cluster(3)
    assert seen(simulate(arrivals, config, seed=3)) == seen(simulate(arrivals, config, seed=3))
