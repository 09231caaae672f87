"""Live moves in virtual time: production's own, over links that take as long as the network would."""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import replace

import pytest

from cluster.config import ControlConfig
from cluster.messages import MoveAbort, MoveBlocks
from cluster.types import Outcome, RequestId
from ops.sim.events import VirtualLoop
from ops.sim.faults import Fault, FaultKind, MovePoint
from ops.sim.links import MoveWatch, PeerConnection, PeerDirection, Wire
from ops.sim.policies.least_load import LeastLoad
from ops.sim.policies.llumnix import Llumnix
from ops.sim.step_time import a100
from ops.sim.values import Arrival, SimConfig, SimResult, default_engine
from ops.sim.world import simulate
from tests.sim.kit import cluster, engine, seen, work

PROMPT_TOKENS, OUTPUT_TOKENS = 400, 120


def _roomy(replicas: int = 3, **settings: object) -> SimConfig:
    """Room for all that runs, wherever it goes."""
    return cluster(replicas, engine=engine(blocks=600, slots=16), **settings)


def _residents(count: int) -> list[Arrival]:
    return [Arrival(0.1 + k / 50, RequestId(f"r{k}"), PROMPT_TOKENS, OUTPUT_TOKENS) for k in range(count)]


def _logged(arrivals: list[Arrival], config: SimConfig, seed: int = 0) -> tuple[SimResult, list[list[str]]]:
    log = io.BytesIO()
    result = simulate(arrivals, config, seed=seed, log=log)
    return result, [line.decode().split() for line in log.getvalue().splitlines()]


# --- what a move costs ---


def test_keys_and_values_take_as_long_as_the_slower_network_and_wait_for_one_another_at_both_ends() -> None:
    loop, came = VirtualLoop(), list[tuple[float, str]]()
    delay_s, slow_s, fast_s = 0.001, 0.010, 0.004
    watch, sender, fast, slow = MoveWatch(loop), Wire(fast_s), Wire(fast_s), Wire(slow_s)

    def direction(taker: Wire, name: str) -> PeerDirection:
        return PeerDirection(
            loop,
            delay_s,
            lambda message: came.append((loop.now_s, name)),
            PeerConnection(loop, delay_s),
            (sender, taker),
            watch,
        )

    to_fast, to_slow = direction(fast, "fast"), direction(slow, "slow")
    to_fast.send(MoveBlocks(RequestId("a"), 1, 0, memoryview(bytes(3))))
    to_slow.send(MoveBlocks(RequestId("b"), 1, 0, memoryview(bytes(2))))
    to_fast.send(MoveAbort(RequestId("a"), 1))
    to_fast.send(MoveBlocks(RequestId("a"), 1, 3, memoryview(bytes(1))))
    while loop.next_s is not None:
        loop.next()

    first_s = 3 * fast_s  # a byte is a block
    second_s = first_s + 2 * slow_s
    third_s = second_s + fast_s
    # What is small waits for nothing but its place on the link.
    assert [name for _, name in came] == ["fast", "fast", "slow", "fast"]
    assert [at_s - delay_s for at_s, _ in came] == pytest.approx([first_s, first_s, second_s, third_s])


def test_a_moved_stream_is_late_by_less_than_two_steps_and_computes_nothing_again() -> None:
    arrivals = [Arrival(0.1, RequestId("a"), 4000, 400)]
    config = SimConfig(replicas=2, engine=default_engine("llama-3-8b"), held_max_s=0.0)
    stays, _ = _logged(arrivals, config)
    moves, lines = _logged(arrivals, replace(config, faults=(Fault(1.5, FaultKind.DRAIN, 30.0, number=_where(stays)),)))
    assert moves.moves["moved"] == 1
    assert moves.recomputed_tokens == 0
    [pause_s] = moves.move_pauses_s
    late_s = (moves.requests[0].end_s or 0.0) - (stays.requests[0].end_s or 0.0)
    times = a100().models["llama-3-8b"]
    longest_step_s = (times.ms[0] + times.ms_per_context_token * 4400 + 1) / 1000
    # While it is sent, the copies made between the source's steps hold them up.
    blocks = 4400 / config.engine.block_size_tokens
    copies_s = blocks * config.engine.block_size_tokens * times.kv_bytes_per_token / a100().copy_bytes_per_s
    assert 0 < late_s < 2 * longest_step_s + copies_s
    assert 0 < pause_s < 2 * longest_step_s + copies_s
    [moved_s] = [float(line[0]) for line in lines if line[1] == "moved"]
    assert moved_s - 1.5 > 4000 * times.kv_bytes_per_token / a100().network_bytes_per_s


def _where(result: SimResult) -> int:
    return int(result.requests[0].replicas[0].removeprefix("replica-"))


# --- drains ---


def test_a_replica_that_drains_is_empty_soon_and_nothing_is_computed_again() -> None:
    arrivals, drained = _residents(12), "replica-0"
    config = _roomy(3, faults=(Fault(0.6, FaultKind.DRAIN, 60.0),))
    result, lines = _logged(arrivals, config)
    there = [r for r in result.requests if r.replicas[0] == drained]
    assert len(there) > 2
    assert all(len(r.replicas) == 2 or (r.end_s or 0.0) < 1.0 for r in there)
    assert result.moves == {**dict.fromkeys(result.moves, 0), "moved": sum(len(r.replicas) == 2 for r in there)}
    assert result.recomputed_tokens == 0
    assert all(r.outcome is Outcome.FINISHED and r.tokens == OUTPUT_TOKENS for r in result.requests)
    assert result.invariant_violations == []
    assert not [line for line in lines if float(line[0]) > 0.6 and line[1] == "sent" and line[-1] == drained]


def test_a_node_that_drains_lets_go_of_all_its_replicas() -> None:
    config = _roomy(4, replicas_per_node=2, faults=(Fault(0.6, FaultKind.NODE_DRAIN, 60.0, number=1),))
    result, _ = _logged(_residents(12), config)
    moved = [r for r in result.requests if len(r.replicas) > 1]
    assert {r.replicas[0] for r in moved} == {"replica-2", "replica-3"}
    assert {r.replicas[1] for r in moved} <= {"replica-0", "replica-1"}
    assert result.recomputed_tokens == 0
    assert result.invariant_violations == []


def test_what_moves_is_the_same_event_by_event_whether_steps_are_taken_at_once() -> None:
    faults = (Fault(0.6, FaultKind.DRAIN, 1.0), Fault(1.0, FaultKind.DRAIN, 1.0, number=1))
    arrivals, config = work(100, 40), cluster(3, routers=2, faults=faults)
    at_once, one_by_one = (simulate(arrivals, replace(config, fast_forward=f)) for f in (True, False))
    assert at_once.moves["moved"] > 3
    assert at_once.events < one_by_one.events
    assert seen(at_once) == seen(one_by_one)


# --- what goes wrong on the way ---

ENDINGS = [
    FaultKind.MOVE_SOURCE_DEATH,
    FaultKind.MOVE_TARGET_DEATH,
    FaultKind.MOVE_LINK_BREAK,
    FaultKind.MOVE_SOURCE_UNLINKED,
    FaultKind.MOVE_TARGET_UNLINKED,
]


@pytest.mark.parametrize("point", MovePoint)
@pytest.mark.parametrize("kind", ENDINGS)
def test_whatever_is_lost_at_whatever_point_of_a_move_every_stream_is_whole(kind: FaultKind, point: MovePoint) -> None:
    faults = (Fault(0.6, FaultKind.DRAIN, 3.0), Fault(0.6, kind, 0.7, point=point))
    result, lines = _logged(_residents(10), _roomy(3, faults=faults))
    assert any(line[1:4] == ["fault", kind, point] for line in lines), "it did not happen"
    assert all(r.outcome is Outcome.FINISHED and r.tokens == OUTPUT_TOKENS for r in result.requests)
    assert result.invariant_violations == []


@pytest.mark.parametrize("point", MovePoint)
@pytest.mark.parametrize("kind", [FaultKind.MOVE_CLIENT_LEAVES, FaultKind.MOVE_TARGET_DRAIN, FaultKind.MOVE_TURN_BACK])
def test_whoever_leaves_or_drains_at_whatever_point_of_a_move_every_other_stream_is_whole_and_nothing_is_computed_again(
    kind: FaultKind, point: MovePoint
) -> None:
    faults = (Fault(0.6, FaultKind.DRAIN, 3.0), Fault(0.6, kind, 0.7, point=point))
    result, lines = _logged(_residents(10), _roomy(3, faults=faults))
    assert any(line[1:4] == ["fault", kind, point] for line in lines), "it did not happen"
    left = [r for r in result.requests if r.outcome is Outcome.CANCELLED]
    assert len(left) == (kind is FaultKind.MOVE_CLIENT_LEAVES)
    rest = [r for r in result.requests if r not in left]
    assert all(r.outcome is Outcome.FINISHED and r.tokens == OUTPUT_TOKENS for r in rest)
    assert result.recomputed_tokens == 0
    assert result.invariant_violations == []


@pytest.mark.parametrize("point", MovePoint)
@pytest.mark.parametrize("kind", [FaultKind.MOVE_CONTROLLER_RESTART, FaultKind.MOVE_RUSH])
def test_whether_its_controller_dies_or_it_is_preempted_at_whatever_point_of_a_move_every_stream_is_whole(
    kind: FaultKind, point: MovePoint
) -> None:
    """The controller evens out what runs, as one of two replicas is away until all runs on the other."""
    lesser = [replace(one, priority_class="batch", output_tokens=400) for one in _residents(12)]
    faults = (Fault(0.02, FaultKind.REPLICA_DEATH, 0.5), Fault(0.6, kind, 0.7, point=point))
    config = _roomy(2, faults=faults, control=ControlConfig(move_value_s=0.001, move_pause_s=0.001, move_block_s=0.0))
    result, lines = _logged(lesser, config)
    assert any(line[1:4] == ["fault", kind, point] for line in lines), "it did not happen"
    assert (result.preemptions > 0) is (kind is FaultKind.MOVE_RUSH)
    assert all(r.outcome is Outcome.FINISHED and r.tokens == r.output_tokens for r in result.requests)
    if kind is FaultKind.MOVE_CONTROLLER_RESTART:
        assert result.recomputed_tokens == 0
    assert result.invariant_violations == []


def test_whatever_ends_by_itself_while_it_is_asked_for_begun_or_copied_ends_as_it_would_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Streams of all lengths, so that some end at each of these points; from the freeze on none can before it has moved."""
    came: dict[RequestId, list[tuple[float, MovePoint]]] = {}
    reached = MoveWatch.reached

    def noted(watch: MoveWatch, point: MovePoint, request_id: RequestId) -> None:
        came.setdefault(request_id, []).append((watch._loop.now_s, point))
        reached(watch, point, request_id)

    monkeypatch.setattr(MoveWatch, "reached", noted)
    ended_at = Counter[MovePoint]()
    for tenth in range(8):
        came.clear()
        arrivals = [Arrival(0.1 + k / 100, RequestId(f"r{k}"), 100, 15 + k) for k in range(45)]
        result, _ = _logged(arrivals, _roomy(3, faults=(Fault(0.55 + tenth / 10, FaultKind.DRAIN, 3.0),)))
        assert all(r.outcome is Outcome.FINISHED and r.tokens == r.output_tokens for r in result.requests)
        assert (result.recomputed_tokens, result.invariant_violations) == (0, [])
        for r in result.requests:
            points = [point for at_s, point in came.get(r.request_id, ()) if at_s <= (r.end_s or 0.0)]
            ended_at.update(points[-1:])
        assert result.moves["moved"] + result.moves["ended"] == sum(result.moves.values())
    assert ended_at.keys() >= {MovePoint.BEGUN, MovePoint.COPIED}
    assert not ended_at.keys() & {MovePoint.STATED, MovePoint.FROZEN, MovePoint.GRANTED}


@pytest.mark.parametrize("point", [MovePoint.BEGUN, MovePoint.COPIED])
def test_a_link_that_breaks_before_the_request_stands_still_costs_no_token(point: MovePoint) -> None:
    faults = (Fault(0.6, FaultKind.DRAIN, 60.0), Fault(0.6, FaultKind.MOVE_LINK_BREAK, 0.0, point=point))
    result = simulate(_residents(10), _roomy(3, faults=faults))
    assert result.moves["refused"] > 0
    assert result.recomputed_tokens == 0
    assert result.invariant_violations == []


# --- a policy that migrates ---


def test_llumnix_moves_from_the_replica_whose_blocks_run_out_to_the_one_that_has_come() -> None:
    """Twelve grow on one of 300 blocks: from 264 used on, fewer than three are left for each."""
    arrivals = [Arrival(0.1 + k / 50, RequestId(f"r{k}"), 100, 400) for k in range(12)]
    away = Fault(0.0, FaultKind.REPLICA_DEATH, 1.0, number=1)
    config = cluster(2, engine=engine(blocks=300, slots=16), faults=(away,))
    log = io.BytesIO()
    result = simulate(arrivals, config, Llumnix, log=log)
    proposed = [line.split() for line in log.getvalue().decode().splitlines() if " proposed " in line]
    # More than 264 blocks are 22 each, so 236 tokens beside the prompt's 100 at least, a step each.
    assert float(proposed[0][0]) > 0.1 + 236 * a100().models["llama-3-8b"].ms[0] / 1000
    assert {(line[3], line[4]) for line in proposed} == {("replica-0", "replica-1")}
    assert result.moves["moved"] == sum(len(r.replicas) == 2 for r in result.requests) > 0
    assert result.preemptions == 0
    assert result.recomputed_tokens == 0
    assert all(r.outcome is Outcome.FINISHED and r.tokens == r.output_tokens for r in result.requests)
    assert result.invariant_violations == []
    assert simulate(arrivals, config, LeastLoad).preemptions > 0, "where nobody moves they run out"
