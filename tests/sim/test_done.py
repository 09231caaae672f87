"""What has been done by a moment: each token once, whether its request has ended or not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.types import Outcome, RequestId
from ops.bench.lengths import Lengths
from ops.sim.bound import LeastTimes
from ops.sim.report import figures
from ops.sim.step_time import Prefill, a100, step_ms
from ops.sim.study import Batch, Run, run
from ops.sim.values import Arrival, Done, SimConfig
from ops.sim.world import simulate
from tests.sim.kit import cluster, work
from tests.unit.test_sim_report import MODEL, study, values

TIMES = a100().models[MODEL]


def test_of_a_request_that_runs_so_much_is_done_as_its_steps_have_had_time_for() -> None:
    """A prompt of 700 in chunks of 512 and 188, then a token a step."""
    config = SimConfig()
    arrival = Arrival(1.0, RequestId("a"), prompt_tokens=700, output_tokens=200)
    chunks_ms = [step_ms(TIMES, [Prefill(512)], []), step_ms(TIMES, [Prefill(188, 512)], [])]
    begins_s = 1.0 + config.link_delay_s
    first_s = begins_s + sum(chunks_ms) / 1000

    def done(at_s: float) -> Done | None:
        return simulate([arrival], config, counted_at_s=at_s).requests[0].done

    assert done(0.5) is None
    # A step counts when it has begun, but for those that only decode: these when they are over.
    assert done(begins_s + chunks_ms[0] / 2000) == Done(0, 512, 0)
    assert done(first_s - chunks_ms[1] / 2000) == Done(0, 700, 1)
    tenth_s = first_s + sum(step_ms(TIMES, [], [700 + k]) for k in range(9)) / 1000
    assert done(tenth_s + 1e-6) == Done(0, 700, 10)
    assert done(60.0) == Done(0, 700, 200)


def test_what_is_done_never_becomes_less_and_is_all_at_the_end_whatever_was_computed_again() -> None:
    arrivals, config, moments = work(120, 60, shared=True), cluster(2), (1.0, 2.0, 3.0)
    seen = [simulate(arrivals, config, counted_at_s=at_s) for at_s in moments]
    last = simulate(arrivals, config)
    assert last.preemptions > 10
    assert last.recomputed_tokens > 0
    for number, record in enumerate(last.requests):
        outputs = [0 if (done := r.requests[number].done) is None else done.output_tokens for r in seen]
        assert [*outputs, record.tokens] == sorted((*outputs, record.tokens))
        finished = record.outcome is Outcome.FINISHED  # or it was refused
        assert record.done == (
            Done(record.cached_tokens, record.prompt_tokens, record.output_tokens) if finished else Done(0, 0, 0)
        )
    assert all(0.0 <= r.counted_s - at_s < 1e-9 for r, at_s in zip(seen, moments, strict=True))


def test_work_counts_for_its_part_of_full_steps() -> None:
    """Four chunks of the budget; a chunk and its row take what the host adds to a row beside."""
    budget = 256
    least = LeastTimes(TIMES, budget, 4096)
    alone_ms = sum(step_ms(TIMES, [Prefill(budget, start)], []) for start in range(0, 1024, budget))
    rows_ms = 4 * a100().host_overhead_ms_per_request
    assert least.chunks_s(0, 1024) == pytest.approx((alone_ms - rows_ms) / 1000, rel=2e-3)
    assert least.chunks_s(0, 512) + least.chunks_s(512, 1024) == pytest.approx(least.chunks_s(0, 1024))
    one = study(engine=study().engine.model_copy(update={"step_token_budget": budget}))
    assert one.done_s(Done(512, 1024, 0)) == pytest.approx(least.chunks_s(512, 1024))
    decodes_s = one.done_s(Done(0, 1024, 30)) - one.done_s(Done(0, 1024, 10))
    # In a step of the budget's tokens, with 255 others like it.
    each_ms = [step_ms(TIMES, [], [1024 + k] * budget) / budget for k in range(9, 29)]
    assert decodes_s == pytest.approx(sum(each_ms) / 1000, rel=2e-3)
    assert one.done_s(Done(0, 0, 0)) == 0.0


def test_batch_work_alone_fills_its_replica_and_so_does_work_beside_it() -> None:
    lengths = (Lengths(600, 30), Lengths(300, 90))
    engine = study().engine.model_copy(update={"step_token_budget": 256})
    one = study(engine=engine, batch=Batch(lengths, waiting=64), duration_s=6.0)
    assert one.batch_only_gpus is not None
    assert 0.97 < one.batch_only_gpus <= 1.001
    told = values(figures(one, 2, run(one, Run(2, "forebay", 0))))
    assert 0.97 < told["work_over_batch_only"] < 1.02
    by_class = sum(told[f"{name}.gpus_of_work"] for name in ("interactive", "standard", "batch"))
    assert told["gpus_of_work"] == pytest.approx(by_class)


def test_work_is_what_was_done_by_the_moment_that_is_counted_at() -> None:
    one = study()
    done = run(one, Run(1, "forebay", 0))
    half = [
        replace(record, done=Done(0, 100, 5)) if k else replace(record, done=None)
        for k, record in enumerate(done.requests)
    ]
    told = values(figures(one, 1, replace(done, requests=half, counted_s=4.0)))
    assert told["gpus_of_work"] == pytest.approx((len(half) - 1) * one.done_s(Done(0, 100, 5)) / 4)
    assert "work_over_batch_only" not in told


def test_what_a_request_finds_of_its_own_was_computed_for_nobody_else() -> None:
    """No two prompts begin alike; what is pushed out in the middle of its prompt finds that again."""
    result = simulate(work(150, 60), cluster(2))
    assert result.hit_tokens > 0
    assert {record.cached_tokens for record in result.requests} == {0}
