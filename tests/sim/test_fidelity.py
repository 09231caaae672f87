"""The simulator tells what a real replica does: the fit of its steps, and the same trace through both."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import msgspec
import pytest

from deployments.settings import Profile
from ops.bench.fidelity import FidelitySettings, Machine, Round, build_report, compare, plan_at, table_cells
from ops.bench.step_fit import Fitted, KvSize, StepSample, fit, predicted_ms
from ops.bench.trace import TraceRequest
from ops.errors import CommandError
from ops.sim.step_time import Device, Prefill, StepTimes, a100, mixed_ms
from tests.sim.padded_replica import ROW_S, STEP_S
from tests.tiny_model import make_tiny_llama

KV = KvSize(bytes_per_token=8, capacity_tokens=4096)


TRUTH = StepTimes(
    held_out_mean_absolute_error=0.0,
    weights_bytes=0,
    kv_bytes_per_token=KV.bytes_per_token,
    kv_capacity_tokens=KV.capacity_tokens,
    tokens=(1, 2, 4, 8, 16, 32, 64, 232),
    ms=(20.0, 21.0, 22.5, 27.0, 33.0, 50.0, 90.0, 300.0),
    ms_per_context_token=1e-3,
    ms_per_prefill_pair=2e-4,
    ms_per_decode=0.25,
)


def _steps(times: StepTimes, count: int, noise: float = 0.0) -> list[StepSample]:
    rng = random.Random(1)
    samples = []
    for _ in range(count):
        prefills = tuple((rng.randint(2, 100), rng.randint(0, 400)) for _ in range(rng.randint(0, 2)))
        sequences = rng.randint(0 if prefills else 1, 32)
        contexts = sum(rng.randint(1, 500) for _ in range(sequences))
        ms = mixed_ms(times, [Prefill(*one) for one in prefills], sequences, contexts)
        samples.append(StepSample(prefills, sequences, contexts, ms * (1 + rng.uniform(-noise, noise))))
    return samples


def test_the_fit_of_steps_that_follow_the_form_is_the_form_they_follow() -> None:
    others = _steps(TRUTH, 900)[600:]
    fitted = fit(_steps(TRUTH, 600), KV)
    assert fitted.disturbed == 0
    assert fitted.times.held_out_mean_absolute_error < 1e-2
    for one in others:
        assert predicted_ms(fitted.times, one) == pytest.approx(one.ms, rel=0.02)


def test_a_fit_leaves_out_steps_that_something_else_has_disturbed() -> None:
    steps = _steps(TRUTH, 600, noise=0.01)
    spoilt = [
        StepSample(s.prefills, s.sequences, s.context_tokens, 5 * s.ms) if i % 20 == 0 else s
        for i, s in enumerate(steps)
    ]
    fitted = fit(spoilt, KV)
    assert 30 <= fitted.disturbed <= 40
    assert sum(abs(predicted_ms(fitted.times, one) / one.ms - 1) for one in steps) / len(steps) < 0.05


def test_a_fit_of_steps_that_scatter_is_as_long_as_they_are_in_all() -> None:
    steps = _steps(TRUTH, 1200, noise=0.3)
    fitted = fit(steps, KV)
    assert sum(predicted_ms(fitted.times, one) for one in steps) == pytest.approx(sum(s.ms for s in steps), rel=0.01)


@pytest.mark.parametrize("samples", [[], [StepSample((), 1, 10, 5.0)] * 500])
def test_a_fit_of_nothing_or_of_one_kind_of_step_is_refused(samples: Sequence[StepSample]) -> None:
    with pytest.raises(ValueError, match="too few to fit"):
        fit(samples, KV)


def _settings(folder: Path, **changed: object) -> FidelitySettings:
    model = make_tiny_llama(folder / "tiny-llama")
    engine = {"slots": 8, "step_token_budget": 64, "max_model_len": 512, "host_blocks": 0}
    rng = random.Random(3)
    at_s, requests = 0.0, []
    for _ in range(400):
        at_s += rng.expovariate(1.0)
        requests.append(
            TraceRequest(at_s, rng.choice(("code", "conversation")), rng.randint(8, 150), rng.randint(2, 24))
        )
    settings = FidelitySettings(
        model=model,
        profile=Profile.model_validate({"replicas": 1, "engine": engine, "router": {"port": 0}}),
        requests=tuple(requests),
        trace="made up",
        token_scale=Fraction(1),
        load=0.6,
        duration_s=12.0,
        rounds=1,
        steps=200,
        seed=0,
        classes={"code": "interactive", "conversation": "standard"},
        replica="tests.sim.padded_replica",
    )
    return replace(settings, **changed)  # type: ignore[arg-type]


def test_the_load_is_a_part_of_what_the_simulated_replica_does_at_most(tmp_path: Path) -> None:
    """Twice the load is twice the requests in the same time; and a trace that is too short is refused."""
    settings = _settings(tmp_path)
    machine = Machine(_device_for(settings), 0.0005, Fitted(a100().models["llama-3-8b"], 1, 0))
    half, whole = (plan_at(replace(settings, load=load, duration_s=4.0), machine) for load in (0.3, 0.6))
    assert len(whole) == pytest.approx(2 * len(half), abs=2)
    for planned in (half, whole):
        assert planned[-1].send_at_s == pytest.approx(4.0, rel=0.1)
    with pytest.raises(CommandError, match="shorten --duration"):
        plan_at(replace(settings, duration_s=1e6), machine)


def _device_for(settings: FidelitySettings) -> Device:
    return msgspec.structs.replace(a100(), models={settings.model.name: a100().models["llama-3-8b"]})


def test_the_report_compares_medians_over_the_rounds(tmp_path: Path) -> None:
    settings = _settings(tmp_path)
    machine = Machine(a100(), 0.001, Fitted(a100().models["llama-3-8b"], 200, 4))
    rounds = [
        Round(machine, {"ttft_p50_ms": real, "tpot_p90_ms": 20.0}, {"ttft_p50_ms": told, "tpot_p90_ms": 21.0}, 1.0)
        for real, told in ((100.0, 95.0), (110.0, 90.0), (900.0, 96.0))
    ]
    report = build_report(settings, (), rounds)
    assert report.value("real.ttft_p50_ms") == 110.0
    assert report.value("predicted.ttft_p50_ms") == 95.0
    assert report.value("error.ttft_p50_pct") == pytest.approx(100 * (95 / 110 - 1))
    assert report.value("worst_error_pct") == pytest.approx(100 * (1 - 95 / 110))
    assert report.value("steps_disturbed_pct") == pytest.approx(2.0)
    header, cells = table_cells(report)
    assert cells[1] == ["TPOT p90 ms", "20.0", "21.0", "+5.0 %"]
    assert len(header) == len(cells[0])


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="the replica needs a core of its own")
def test_a_real_replica_with_steps_of_a_stated_length_does_what_is_predicted_within_a_factor_of_two(
    tmp_path: Path,
) -> None:
    """A real replica, router and sockets. Its steps sleep, so that a busy machine disturbs them less than their times
    differ; how near it comes on a quiet one is what `forebay bench fidelity` measures."""
    report = compare(_settings(tmp_path), lambda what: None)
    assert report.value("real.tpot_p50_ms") > 1000 * (STEP_S + ROW_S)
    assert report.value("worst_error_pct") < 100.0, report.rows
