"""What is told of a simulation: objectives, figures and intervals, by arithmetic on literal records."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from cluster.types import Outcome, RequestId
from ops.bench.lengths import Lengths
from ops.bench.trace import TraceRequest
from ops.report import ReportRow
from ops.sim.objectives import OBJECTIVES, OwnPrefill, is_good, parse_objectives
from ops.sim.report import fewest, figures, over_seeds, prefixed
from ops.sim.step_time import Prefill, a100, step_ms
from ops.sim.study import Batch, Run, Study, run
from ops.sim.values import RequestRecord, SimResult, default_engine
from ops.sim.workload import parse_mix

MODEL = "llama-3-8b"
INTERACTIVE = OBJECTIVES["interactive"]


def record(
    name: str = "r", *, ttft_s: float = 0.2, tpot_s: float = 0.02, tokens: int = 11, priority_class: str = "interactive"
) -> RequestRecord:
    return RequestRecord(
        RequestId(name),
        priority_class,
        arrived_s=1.0,
        prompt_tokens=100,
        output_tokens=tokens,
        first_token_s=1.0 + ttft_s,
        end_s=1.0 + ttft_s + tpot_s * (tokens - 1),
        tokens=tokens,
        outcome=Outcome.FINISHED,
    )


def study(**changes: object) -> Study:
    whole = Study(
        model=MODEL,
        requests=(TraceRequest(0.0, "code", 900, 20), TraceRequest(0.5, "conversation", 700, 60)),
        mix=parse_mix([]),
        duration_s=10.0,
        engine=default_engine(MODEL),
    )
    return replace(whole, **changes)  # type: ignore[arg-type]


def result(*records: RequestRecord) -> SimResult:
    return SimResult(
        requests=list(records),
        event_log_sha256="",
        events=0,
        invariant_violations=[],
        virtual_s=20.0,
        counted_s=10.0,
        cpu_s=10.0,
        steps=0,
        tokens=33,
        prefill_tokens=405,
        hit_tokens=0,
        preemptions=0,
        recomputed_tokens=5,
        urgent_blocked=0,
        moves={"moved": 7, "refused": 2},
        move_pauses_s=(0.04, 0.02, 0.03),
    )


def values(rows: list[ReportRow]) -> dict[str, float]:
    return {row.name: row.value for row in rows}


def test_a_prompt_alone_takes_its_chunks_one_after_the_other() -> None:
    times = a100().models[MODEL]
    chunks = [Prefill(512), Prefill(512, 512), Prefill(76, 1024)]
    expected_s = sum(step_ms(times, [chunk], ()) for chunk in chunks) / 1000
    assert OwnPrefill(times, 512).seconds(1100) == pytest.approx(expected_s)


@pytest.mark.parametrize(
    ("one", "good"),
    [
        (record(ttft_s=0.7, tpot_s=0.03 - 1e-9), True),  # 500 ms + 2 x 100 ms
        (record(ttft_s=0.701), False),
        (record(tpot_s=0.031), False),
        (record(tokens=1), True),  # has no TPOT
        (replace(record(), outcome=Outcome.REJECTED_QUEUE_FULL), False),
        (replace(record(), first_token_s=None, end_s=None, outcome=None), False),
    ],
)
def test_good_is_what_finished_and_met_both_objectives(one: RequestRecord, good: bool) -> None:
    assert is_good(one, INTERACTIVE, own_prefill_s=0.1) is good


def test_goodput_is_the_good_by_the_duration_and_what_had_no_token_is_counted_apart() -> None:
    refused = replace(record("no"), first_token_s=None, tokens=0, outcome=Outcome.REJECTED_QUEUE_FULL)
    told = values(figures(study(), 2, result(record("a"), record("b"), record("c", tpot_s=0.05), refused)))
    assert told["interactive.goodput_rps"] == pytest.approx(2 / 10)
    assert told["interactive.attainment_pct"] == pytest.approx(50)
    assert told["interactive.unfinished"] == 1
    assert told["interactive.ttft_p99_ms"] == pytest.approx(200)
    assert told["recomputed_token_pct"] == pytest.approx(100 * 5 / (400 + 33))
    assert told["tokens_per_s"] == pytest.approx(33 / 20)
    assert [told[name] for name in ("migrations", "migrations_refused", "migrations_failed")] == [7, 2, 0]
    assert told["migration_pause_p50_ms"] == pytest.approx(30)
    assert "standard.requests" not in told


def test_other_objectives_are_what_is_judged_by_and_a_class_that_is_not_named_keeps_its_own() -> None:
    strict = parse_objectives(["interactive=100:30"])
    assert strict["standard"] == OBJECTIVES["standard"]
    records = [record("a", ttft_s=0.09), record("b", ttft_s=0.2), record("c", ttft_s=0.2, priority_class="standard")]
    told = values(figures(study(objectives=strict), 2, result(*records)))
    # 100 tokens alone take less than 20 ms.
    assert told["interactive.attainment_pct"] == pytest.approx(50)
    assert told["standard.attainment_pct"] == pytest.approx(100)


def test_batch_tokens_are_counted_while_requests_arrive() -> None:
    ended = replace(record("b", priority_class="batch"), end_s=10.0)
    late = replace(ended, request_id=RequestId("late"), end_s=10.1)
    told = values(figures(study(), 2, result(ended, late)))
    assert told["batch.tokens_per_s"] == pytest.approx(11 / 10)


def test_enough_are_the_fewest_with_which_every_class_reaches_the_goal() -> None:
    def size(interactive: float, standard: float) -> list[ReportRow]:
        rows = [("interactive.attainment_pct", interactive), ("standard.attainment_pct", standard)]
        return [ReportRow(name, value, "%") for name, value in rows]

    sizes = {8: size(100, 100), 2: size(99.5, 90), 4: size(99, 99.2), 1: size(10, 99.9)}
    assert fewest(sizes, 99) == 4
    assert fewest(sizes, 90) == 2
    assert fewest(sizes, 99.5) == 8
    assert fewest({1: size(10, 99.9)}, 99) is None


def test_over_seeds_a_figure_is_the_mean_with_its_95_percent_interval() -> None:
    """Of 1, 2, 3: s = 1, t = 4.303 with two degrees of freedom, so 4.303 / sqrt(3)."""
    runs = [
        [ReportRow("x_ms", value, "ms"), ReportRow("once", 1.0, "x")][: 2 if value == 1 else 1] for value in (1, 2, 3)
    ]
    told = values(over_seeds(runs))
    assert told == {"x_ms": 2.0, "x_ms_ci95": pytest.approx(2.484, abs=5e-4)}


def test_of_one_part_rows_keep_their_names_and_of_several_they_are_told_apart() -> None:
    row = ReportRow("x_ms", 1.0, "ms")
    assert prefixed({"forebay": [row]}) == (row,)
    assert [r.name for r in prefixed({"a": [row], "b": [row]})] == ["a.x_ms", "b.x_ms"]


def test_a_load_is_a_part_of_what_saturated_replicas_do_and_that_is_most_of_what_the_bound_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ops.sim.study.SATURATION_WARM_UP_S", 5.0)
    monkeypatch.setattr("ops.sim.study.SATURATION_MEASURED_S", 20.0)
    one = study(load=0.5)
    mean_s = sum(one.work_s(r.prompt_tokens, r.output_tokens) for r in one.requests) / 2
    # What ends within the time has begun before it, so that a little more may end than was done within it.
    assert 0.8 < one.saturated_rps * mean_s < 1.05
    assert one.rate_rps(4) == pytest.approx(0.5 * 4 * one.saturated_rps)


def test_without_a_load_as_much_arrives_as_was_recorded_whatever_the_replicas() -> None:
    assert study(times=3.0).rate_rps(7) == pytest.approx(3 * 2.0)


@pytest.mark.parametrize("policy", ["forebay", "round-robin", "least-load", "llumnix"])
def test_every_policy_serves_whatever_is_not_refused_at_once_and_none_beats_the_bound(policy: str) -> None:
    """Twice what two replicas can do: some must be late, or refused."""
    one = study(times=20.0, duration_s=5.0)
    done = run(one, Run(2, policy, 0))
    told = values(figures(one, 2, done))
    assert len(done.requests) == 200
    served = [r for r in done.requests if r.outcome is not Outcome.REJECTED_WAIT]
    assert all(r.outcome is Outcome.FINISHED and r.tokens == r.output_tokens for r in served)
    assert all(r.end_s == r.arrived_s and not r.tokens for r in done.requests if r not in served)
    assert not done.invariant_violations
    assert 0 < told["goodput_over_bound"] <= 1


def test_batch_work_is_there_until_the_last_arrival_and_is_pushed_out_by_none_of_its_own() -> None:
    lengths = (Lengths(600, 30), Lengths(300, 90))
    engine = default_engine(MODEL).model_copy(update={"slots": 16})
    one = study(batch=Batch(lengths, waiting=4), engine=engine)
    done = run(one, Run(1, "forebay", 0))
    batch = [r for r in done.requests if r.priority_class == "batch"]
    assert all(r.outcome is Outcome.FINISHED for r in done.requests if r not in batch)
    assert sum(r.outcome is None for r in batch) < 16 + 4, "and what is there at the end need not be waited for"
    for now_s in (2.0, 5.0, 9.0):
        assert sum(r.arrived_s <= now_s and (r.end_s or math.inf) > now_s for r in batch) == 16 + 4
    assert max(r.arrived_s for r in batch) < 10.0
