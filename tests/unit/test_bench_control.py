"""The laws of `bench control`: every figure is of what its name says, at the pace at which a cluster reports."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ops.bench.control import SCENES, Bench, ControlSettings, build_report, time_scenes

SMALL = ControlSettings(replicas=40, ticks=30)


def test_report_has_both_percentiles_of_every_scene_and_of_what_is_heard() -> None:
    shown: list[int] = []
    ticks, heard = time_scenes(SMALL, lambda: shown.append(1))
    assert {name: len(times) for name, times in ticks.items()} == dict.fromkeys(SCENES, SMALL.ticks)
    assert len(shown) == len(SCENES)
    assert len(heard) == len(SCENES) * SMALL.ticks * SMALL.replicas // 2  # ten a second of each, at twenty ticks
    report = build_report({"even": [1.0, 2.0, 9.0]}, [4.0, 5.0, 6.0], SMALL)
    assert (report.value("tick_p50_ms_even"), report.value("replica_p50_us")) == (2.0, 5.0)
    assert report.value("tick_p99_ms_even") == pytest.approx(8.86)
    assert report.value("replica_p99_us") == pytest.approx(5.98)


@pytest.mark.parametrize("name", SCENES)
def test_a_scene_that_is_not_what_it_is_about_is_an_error_and_no_figure(name: str) -> None:
    scene = SCENES[name]
    with pytest.raises(RuntimeError, match="not what the scene is about"):
        Bench(replace(scene, proposes=not scene.proposes), SMALL).run(SMALL.ticks)
