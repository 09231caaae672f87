"""The laws of `bench queue`: every figure is of what its name says, and the queue is as long after as before."""

from __future__ import annotations

import random

import pytest

from cluster.types import ReplicaId
from ops.bench.queue import (
    BLOCKS,
    ROUND,
    SCENES,
    SLOTS,
    Line,
    QueueSettings,
    build_report,
    time_all_picks,
    time_picks,
    time_turns,
)

SMALL = QueueSettings(tenants=20, lengths=(100, 1000), turns=ROUND, replicas=80, scanned_replicas=8, picks=60)


def test_line_holds_requests_of_every_tenant_and_is_as_long_after_any_number_of_turns() -> None:
    line = Line(100, SMALL)
    waits = {tenant for _, tenant in line._queue._tenants}
    assert (len(line._queue), len(waits)) == (100, 20)
    for _ in range(300):
        assert line.turn_us() > 0
    assert len(line._queue) == 100


def test_report_has_a_row_for_every_length_and_scene_and_the_ratio_is_of_medians() -> None:
    shown = []
    turns, picks = time_turns(SMALL, lambda: shown.append(1)), time_all_picks(SMALL, lambda: shown.append(1))
    assert {waiting: len(times) for waiting, times in turns.items()} == {100: ROUND, 1000: ROUND}
    assert {name: len(times) for name, times in picks.items()} == dict.fromkeys(
        ["pick_80", "urgent_pick_80", "blocked_pick_80", "full_pick_80", "tight_pick_80", "pick_8"], SMALL.picks
    )
    assert len(shown) == 1 + len(SCENES) + 1
    report = build_report({100: [1.0, 2.0, 9.0], 1000: [3.0, 3.0, 4.0]}, picks, SMALL)
    assert (report.value("p50_us_100"), report.value("p50_us_1k")) == (2.0, 3.0)
    assert report.value("ratio_1k_over_100") == 1.5
    assert report.value("p99_us_1k") == pytest.approx(3.98)
    for name in ("pick_p99_us_80", "pick_p99_us_8", "urgent_pick_p50_us_80", "blocked_pick_p99_us_80"):
        assert report.value(name) > 0


def test_names_of_the_default_rows_are_those_that_targets_are_stated_for() -> None:
    defaults = QueueSettings()
    report = build_report({waiting: [1.0] for waiting in defaults.lengths}, {"pick_1000": [1.0]}, defaults)
    for name in ("p99_us_100k", "ratio_1m_over_1k", "pick_p99_us_1000"):
        assert report.value(name) == 1.0


def test_scene_that_is_not_what_it_is_about_is_an_error_and_no_figure() -> None:
    scene = SCENES["blocked_pick"]
    free = type(scene)(scene.need, lambda _: 0, scene.about)
    with pytest.raises(RuntimeError, match="not what the scene is about"):
        time_picks(free, 10, SMALL)


@pytest.mark.parametrize("name", SCENES)
def test_scene_never_draws_more_than_a_replica_has(name: str) -> None:
    rng = random.Random(0)
    loads = [SCENES[name].report(ReplicaId("r"), rng).load for _ in range(500)]
    assert all(0 <= level.requests <= SLOTS for load in loads for level in load.running)
    assert all(level.blocks + load.blocks_free == BLOCKS for load in loads for level in load.running)
    assert min(load.blocks_free for load in loads) >= 0
