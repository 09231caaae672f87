"""The controller in virtual time: production's own decisions, from what replicas report to what routers do."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest

from cluster.control import preempt
from cluster.control.view import ClusterView
from cluster.types import Outcome, RequestId
from ops.sim.faults import Fault, FaultKind
from ops.sim.policies import POLICIES
from ops.sim.values import Arrival, SimConfig, SimResult
from ops.sim.world import simulate
from tests.sim.kit import cluster, engine, work

LINES = list[list[str]]


def _logged(arrivals: list[Arrival], config: SimConfig) -> tuple[SimResult, LINES]:
    log = io.BytesIO()
    result = simulate(arrivals, config, log=log)
    return result, [line.decode().split() for line in log.getvalue().splitlines()]


def _whole(result: SimResult) -> bool:
    return all(r.outcome is Outcome.FINISHED and r.tokens == r.output_tokens for r in result.requests)


# --- a large request that fits nowhere ---


def _scattered() -> tuple[list[Arrival], SimConfig]:
    """Two requests on each of four replicas leave 40 of 96 blocks free, and the large one needs 58."""
    prompts = (200, 400, 300)
    small = [Arrival(0.1 + k / 50, RequestId(f"s{k}"), prompts[k % 3], 250) for k in range(8)]
    return [*small, Arrival(1.0, RequestId("large"), 900, 20)], cluster(4, engine=engine(blocks=96), held_max_s=0.0)


def test_room_for_a_large_request_is_made_by_moving_others() -> None:
    arrivals, config = _scattered()
    with_it, lines = _logged(arrivals, config)
    without, _ = _logged(arrivals, replace(config, control=None))
    assert {line[5] for line in lines if line[1] == "proposed"} >= {"large"}
    assert with_it.moves["moved"] > 0
    assert with_it.moves["moved"] + with_it.moves["ended"] == sum(with_it.moves.values())
    assert _whole(with_it)
    assert with_it.invariant_violations == []
    first_s = [r.requests[-1].first_token_s or 0.0 for r in (with_it, without)]
    assert first_s[0] < 2.0 < 3.0 < first_s[1], "it waits for others to end where none moves"


@pytest.mark.parametrize("mutant", ["nobody leaves", "later"])
def test_another_decision_of_the_controller_gives_another_event_log(
    monkeypatch: pytest.MonkeyPatch, mutant: str
) -> None:
    arrivals, config = _scattered()
    before = simulate(arrivals, config)
    assert simulate(arrivals, config).event_log_sha256 == before.event_log_sha256
    if mutant == "later":
        monkeypatch.setattr(preempt, "UNPLACED_TICKS", preempt.UNPLACED_TICKS + 2)
    else:

        def nobody(view: ClusterView, control: object, now_s: float) -> tuple[()]:
            del view, control, now_s
            return ()

        monkeypatch.setattr(preempt, "decide", nobody)
    assert simulate(arrivals, config).event_log_sha256 != before.event_log_sha256


# --- a replica that comes later than the work ---


def _skewed() -> tuple[list[Arrival], SimConfig]:
    """Replica 1 is away while all arrive. Sixty streams with such contexts on one make its steps half as long again."""
    arrivals = [Arrival(0.1 + k / 50, RequestId(f"r{k}"), 500, 800) for k in range(60)]
    faults = (Fault(0.0, FaultKind.REPLICA_DEATH, 4.0, number=1),)
    large = engine(slots=64, blocks=6000, max_model_len=4096, step_token_budget=256)
    return arrivals, cluster(2, engine=large, faults=faults)


def test_what_runs_goes_to_a_replica_that_has_come_and_all_end_sooner() -> None:
    arrivals, config = _skewed()
    with_it, without = simulate(arrivals, config), simulate(arrivals, replace(config, control=None))
    moved = sum(len(r.replicas) > 1 for r in with_it.requests)
    assert 10 < moved <= 30, "and not more than half of them"
    assert with_it.moves["moved"] == moved
    assert all(len(r.replicas) == 1 for r in without.requests)
    assert _whole(with_it)
    assert with_it.recomputed_tokens == 0
    assert with_it.invariant_violations == []
    means_s = [sum(r.end_s or 0.0 for r in result.requests) / 60 for result in (with_it, without)]
    assert means_s[0] < means_s[1]


def test_a_controller_that_is_away_costs_no_stream_and_its_successor_goes_on() -> None:
    arrivals, config = _skewed()
    away = tuple(Fault(4.0 + 2 * k, FaultKind.CONTROLLER_RESTART, 0.03) for k in range(5))
    result = simulate(arrivals, replace(config, faults=(*config.faults, *away)))
    assert sum(len(r.replicas) > 1 for r in result.requests) > 5
    assert all(len(r.replicas) <= 2 for r in result.requests), "no successor moves what its predecessor has moved"
    assert _whole(result)
    assert result.recomputed_tokens == 0
    assert result.invariant_violations == []


def test_under_steady_even_load_nothing_is_moved() -> None:
    arrivals = [Arrival(0.1 + k / 25, RequestId(f"r{k}"), 150, 60) for k in range(300)]
    result = simulate(arrivals, cluster(4, engine=engine(blocks=800)))
    assert _whole(result)
    assert sum(result.moves.values()) == 0


# --- what it is counted by ---


@pytest.mark.parametrize("seed", range(2))
def test_what_is_computed_again_is_what_preemptions_took_where_nothing_is_cached(seed: int) -> None:
    config = cluster(3, engine=engine(prefix_cache=False))
    result = simulate(work(150, 50, seed), config, POLICIES["least-load"], seed=seed)
    taken = sum(r.recomputed_tokens for r in result.requests)
    assert taken > 1000
    # The token that is made at the end of a chunk, or alone in a step, is counted with the others or not at all.
    assert abs(result.recomputed_tokens - taken) <= result.preemptions


def test_what_has_been_computed_of_prompts_that_are_still_run_at_the_end_is_not_computed_again() -> None:
    arrivals = [Arrival(0.1, RequestId(f"r{k}"), 900, 20) for k in range(4)]
    cut = simulate(arrivals, cluster(1, engine=engine(blocks=800)), until_s=0.5)
    assert 0 < cut.prefill_tokens < 4 * 900
    assert any(r.first_token_s is None for r in cut.requests)
    assert cut.recomputed_tokens == 0
