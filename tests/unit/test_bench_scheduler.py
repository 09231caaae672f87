"""The laws of `bench scheduler`: the scenes are what they say, and no figure is given that was not measured."""

from __future__ import annotations

import pytest

from cluster.config import BatchingMode, EngineConfig, Order
from cluster.engine.scheduling.choose import order_for, planner_for
from cluster.engine.torch.build import build_engine
from cluster.model import ModelFolder
from cluster.types import PreemptionMeans
from ops.bench.scheduler import (
    SchedulerSettings,
    build_report,
    scenes,
    time_plans,
    time_steps,
    waiting_request_bytes,
)
from ops.errors import CommandError

SMALL = SchedulerSettings(running=16, waiting=200, rounds=2, streams=3, tokens=6)


@pytest.mark.parametrize("mode", BatchingMode)
@pytest.mark.parametrize("order", Order)
def test_scenes_are_lines_in_order_of_the_stated_length_and_each_can_be_planned(
    mode: BatchingMode, order: Order
) -> None:
    config = EngineConfig(mode=mode, order=order, slots=16, step_token_budget=32)
    for scene in scenes(config, SMALL).values():
        view = scene.view
        assert len(view.waiting) == 200
        assert len(view.running) in (15, 16)
        for line in (view.waiting, view.running):
            keys = [s.key for s in line]
            assert keys == sorted(keys)
        assert scene.about(planner_for(mode)(view, config, order_for(config)))
    assert all(len(times) == SMALL.rounds for times in time_plans(config, SMALL, lambda: None).values())


def test_the_urgent_scene_pauses_one_and_runs_the_urgent_prompt_at_once() -> None:
    config = EngineConfig(slots=16, step_token_budget=32)
    view = scenes(config, SMALL)["urgent"].view
    plan = planner_for(config.mode)(view, config, order_for(config))
    assert [p.means for p in plan.preempted] == [PreemptionMeans.PAUSE]
    (admission,) = plan.admitted
    assert next(c for c in plan.chunks if c.sequence is admission.sequence).draws


def test_a_report_has_every_row_and_a_waiting_request_takes_at_most_four_kilobytes(tiny_model: ModelFolder) -> None:
    config = EngineConfig(slots=3, step_token_budget=32, max_held=300, max_model_len=256, blocks=64)
    engine = build_engine(tiny_model, config)
    request_bytes = waiting_request_bytes(engine, 250)
    assert not engine.has_work
    step_ms = time_steps(engine, SMALL, lambda: None)
    plans = time_plans(config.model_copy(update={"slots": 16}), SMALL, lambda: None)
    report = build_report(plans, plans, step_ms, request_bytes, SMALL, tiny_model, config)
    assert 100 < report.value("waiting_request_bytes") <= 4096
    share = report.value("b32.plan_ms") / report.value("b32.step_ms")
    assert report.value("plan_share_pct_b32") == pytest.approx(100 * share)
    assert report.value("plan_p99_ms_10k_waiting") >= report.value("plan_ms_10k_waiting") > 0
    with pytest.raises(CommandError, match="--tokens"):
        build_report(plans, plans, [], request_bytes, SMALL, tiny_model, config)
