"""The laws of `bench batching`: what it counts is what happened, and its best, its bound and its ratios are arithmetic."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.ports import Row, SampleSpec
from ops.bench.batching import Plan, Sweep, best_of, embedded_rows, modelled_rows, settings_tried, sweep
from ops.bench.batching_a100 import MODEL, run_modelled
from ops.bench.batching_bound import Bound, StepSamples, bound
from ops.bench.batching_chart import draw
from ops.bench.batching_loop import Extent, Measured, Mode, Setting
from ops.bench.lengths import shuffled_lengths
from ops.cli import run
from ops.errors import CommandError
from ops.sim.backend import ModelledBackend, prompt_for
from ops.sim.step_time import Prefill, a100, device_ms, host_ms, step_ms

TIMES = a100().models[MODEL]
GREEDY = SampleSpec(temperature=0.0)
PNG = b"\x89PNG\r\n\x1a\n"


def ignore(ended: int) -> None:
    del ended


def row(tokens: int, start: int, last_token: int = 5, *, draws: bool = True) -> Row:
    return Row((1,) * (tokens - 1) + (last_token,), start, (0,), GREEDY if draws else None)


def measured(
    mode: Mode, slots: int, tok_s: float, *, mean_ms: float = 10.0, p50: float = 10.0, p99: float = 20.0
) -> Measured:
    return Measured(
        setting=Setting(mode, slots, 1024),
        tok_s=tok_s,
        mean_ms_per_token=mean_ms,
        p50_ms_per_token=p50,
        p99_ms_per_token=p99,
        slot_utilisation=0.5,
        kv_efficiency=0.5,
        padding_share=0.0,
        prefill_tokens=100,
        decode_tokens=90,
        output_tokens=100,
        preemptions=0,
        steps=10,
        duration_s=1.0,
    )


# --- the modelled backend ---


def test_an_answer_is_as_long_as_its_prompt_says() -> None:
    backend = ModelledBackend(TIMES, longest_output=9, padded=False)
    tokens = list(prompt_for(4, 3))
    assert len(tokens) == 4
    drawn: list[int | None] = []
    while drawn[-1:] != [0]:
        start = 0 if not drawn else len(tokens) - 1
        output = backend.run([Row(tuple(tokens[start:]), start, (0,), GREEDY)])[0]
        assert output.token_id is not None
        drawn.append(output.token_id)
        tokens.append(output.token_id)
    assert len(drawn) == 3


def test_time_passes_in_run_alone_and_as_the_step_model_says() -> None:
    backend = ModelledBackend(TIMES, longest_output=9, padded=False)
    backend.run([row(1, 100), row(1, 2000), row(64, 32, draws=False)])
    assert backend.now_ms == pytest.approx(step_ms(TIMES, [Prefill(64, 32)], [100, 2000]))
    backend.copy_block(0, 1)
    backend.load_blocks([1], backend.save_blocks([0]))
    assert backend.now_ms == pytest.approx(step_ms(TIMES, [Prefill(64, 32)], [100, 2000]))


def test_padded_decodes_all_reach_back_as_far_as_the_longest_and_empty_slots_with_them() -> None:
    backend = ModelledBackend(TIMES, longest_output=9, padded=True)
    backend.run([row(1, 100), row(1, 2000)], padding_tokens=6)
    assert backend.now_ms == pytest.approx(device_ms(TIMES, [], [2000] * 8) + host_ms(2))


def test_padded_prompts_are_a_rectangle() -> None:
    """A prompt of 100 beside one of 300, padded with 200: twice 300 tokens (the base knows only their sum)."""
    backend = ModelledBackend(TIMES, longest_output=9, padded=True)
    backend.run([row(100, 0), row(300, 0)], padding_tokens=200)
    assert backend.now_ms == pytest.approx(
        device_ms(TIMES, [Prefill(100), Prefill(300), Prefill(200)], []) + host_ms(2)
    )
    rectangle_ms = device_ms(TIMES, [Prefill(300)] * 2, []) + host_ms(2)
    assert backend.now_ms == pytest.approx(rectangle_ms, rel=0.01)


# --- the loop ---


def test_a_batch_of_one_takes_the_sum_of_its_steps() -> None:
    """No user waits for another, so time and latency follow from the lengths alone."""
    budget = 2048
    extent = Extent(warm_up=2, measured=5)
    result = run_modelled(Setting(Mode.NONE, 1, budget), extent, 3, ignore)
    total_ms = 0.0
    per_token: list[float] = []
    jobs = shuffled_lengths(3)[2:7]
    for prompt, output in jobs:
        chunks = [(start, min(budget, prompt - start)) for start in range(0, prompt, budget)]
        ms = sum(step_ms(TIMES, [Prefill(n, start)], []) for start, n in chunks)
        ms += sum(step_ms(TIMES, [], [prompt + k]) for k in range(output - 1))
        total_ms += ms
        per_token.append(ms / output)
    outputs = sum(output for _, output in jobs)
    assert result.output_tokens == outputs
    assert result.prefill_tokens == sum(prompt for prompt, _ in jobs)
    assert result.decode_tokens == outputs - 5
    assert result.tok_s == pytest.approx(1000 * outputs / total_ms)
    assert result.mean_ms_per_token == pytest.approx(total_ms / outputs)
    assert result.p50_ms_per_token == pytest.approx(sorted(per_token)[2])
    assert result.slot_utilisation == pytest.approx(1.0)
    assert result.padding_share == 0.0


@pytest.mark.parametrize("mode", [Mode.STATIC, Mode.DYNAMIC, Mode.CONTINUOUS])
def test_slots_users_and_throughput_obey_littles_law(mode: Mode) -> None:
    """In a closed loop users = throughput x latency; the mean latency per token is weighted by tokens."""
    result = run_modelled(Setting(mode, 8, 1024), Extent(warm_up=16, measured=160), 0, ignore)
    assert result.tok_s * result.mean_ms_per_token / 1000 == pytest.approx(8, rel=0.05)
    assert 0 < result.kv_efficiency <= 1
    assert 0 < result.slot_utilisation <= 1


def test_a_run_repeats_exactly() -> None:
    setting, extent = Setting(Mode.CONTINUOUS, 16, 512), Extent(warm_up=8, measured=16)
    assert run_modelled(setting, extent, 1, ignore) == run_modelled(setting, extent, 1, ignore)
    assert run_modelled(setting, extent, 1, ignore) != run_modelled(setting, extent, 2, ignore)


def test_continuous_batching_wastes_neither_slots_nor_tokens_and_static_does() -> None:
    extent = Extent(warm_up=16, measured=64)
    continuous = run_modelled(Setting(Mode.CONTINUOUS, 8, 1024), extent, 0, ignore)
    static = run_modelled(Setting(Mode.STATIC, 8, 1024), extent, 0, ignore)
    assert continuous.padding_share == 0.0
    assert static.padding_share > 0.1
    assert continuous.slot_utilisation > 0.9 > static.slot_utilisation
    assert continuous.kv_efficiency > static.kv_efficiency


# --- the bound ---


def test_bound_takes_the_best_batch_and_the_faster_of_apart_and_together() -> None:
    """100 outputs of 90 decodes and 200 prompt tokens. Apart: batch 1 90 x 10 + 200 x 1 = 1,100 ms, batch 10
    9 x 20 + 200 = 380 ms. Together: 90 x 11 = 990 ms, 9 x 40 = 360 ms."""
    samples = StepSamples(
        decode_ms={1: [10.0, 9.0, 50.0], 10: [20.0]},
        prefill_ms={10: [10.0], 5: [10.0]},
        mixed_ms={1: [11.0], 10: [40.0]},
    )
    assert bound(samples, 200, 90, 100) == Bound(1000 * 100 / 360, 10, True)
    samples.mixed_ms[10] = [80.0]
    assert bound(samples, 200, 90, 100) == Bound(1000 * 100 / 380, 10, False)


@given(
    times=st.dictionaries(st.integers(1, 64), st.floats(1, 100), min_size=1),
    slower=st.floats(1.0, 3.0),
)
def test_bound_never_rises_when_a_step_is_slower(times: dict[int, float], slower: float) -> None:
    def of(factor: float) -> float:
        samples = StepSamples(
            decode_ms={b: [t * factor] for b, t in times.items()},
            prefill_ms={32: [32.0 * factor]},
            mixed_ms={b: [2 * t * factor] for b, t in times.items()},
        )
        return bound(samples, 100, 90, 100).tok_s

    assert of(slower) == pytest.approx(of(1.0) / slower)


# --- the sweep and the report ---


def test_best_is_the_fewest_slots_within_a_hundredth_of_the_fastest() -> None:
    points = [measured(Mode.CONTINUOUS, slots, tok_s) for slots, tok_s in ((32, 900.0), (64, 991.0), (96, 1000.0))]
    assert best_of(points) is points[1]
    assert best_of(points[:1]) is points[0]


def test_every_mode_is_tried_at_its_sizes_and_other_budgets_at_the_best_only() -> None:
    plan = Plan(
        static=(8, 32),
        dynamic=(8, 32),
        continuous=(16, 32),
        budgets=(512, 2048),
        padded_budget=4096,
        batches=2,
        least=10,
    )
    tried: list[Setting] = []

    def run(setting: Setting, extent: Extent, show: object) -> Measured:
        del show
        assert extent.measured % setting.slots == extent.warm_up % setting.slots == 0
        assert extent.measured >= 10
        tried.append(setting)
        return measured(setting.mode, setting.slots, float(setting.slots))

    result = sweep(plan, run, lambda _setting, _requests: ignore)
    assert tried == [
        Setting(Mode.NONE, 1, 4096),
        Setting(Mode.STATIC, 8, 4096),
        Setting(Mode.STATIC, 32, 4096),
        Setting(Mode.DYNAMIC, 8, 4096),
        Setting(Mode.DYNAMIC, 32, 4096),
        Setting(Mode.CONTINUOUS, 16, 512),
        Setting(Mode.CONTINUOUS, 32, 512),
        Setting(Mode.CONTINUOUS, 32, 2048),
    ]
    assert len(tried) == settings_tried(plan)
    assert [p.setting.name for p in result.shown()] == [
        "none", "static8", "static32", "dynamic8", "dynamic32", "continuous32",
    ]  # fmt: skip


TRIED = Sweep(
    (
        measured(Mode.NONE, 1, 100.0),
        measured(Mode.STATIC, 8, 200.0),
        measured(Mode.STATIC, 32, 300.0),
        measured(Mode.DYNAMIC, 8, 250.0),
        measured(Mode.DYNAMIC, 32, 400.0),
        measured(Mode.CONTINUOUS, 32, 800.0),
        measured(Mode.CONTINUOUS, 64, 1200.0),
    )
)


def test_ratios_are_of_continuous_at_its_best() -> None:
    values = {row.name: row.value for row in modelled_rows(TRIED, [measured(Mode.STATIC, 8, 240.0)])}
    assert values["a100.continuous_over_none"] == 12.0
    assert values["a100.continuous_over_static8"] == 6.0
    assert values["a100.continuous_over_static32"] == 4.0
    assert values["a100.continuous_over_best_other"] == 3.0
    assert values["a100.continuous_over_static8_unpadded_contexts"] == 5.0
    values = {row.name: row.value for row in embedded_rows(TRIED, Bound(1250.0, 64, True))}
    assert values["continuous_over_bound"] == pytest.approx(0.96)
    assert values["continuous_over_best_other"] == 3.0


def test_chart_is_a_picture_of_every_machine(tmp_path: Path) -> None:
    path = tmp_path / "chart.png"
    draw([("one", TRIED), ("another", TRIED)], path)
    assert path.read_bytes().startswith(PNG)


def test_chart_that_cannot_be_written_is_said_by_name(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="--chart"):
        draw([("one", TRIED)], tmp_path / "missing" / "chart.png")


# --- the command ---


@pytest.mark.parametrize("arguments", [["--only", "other"], ["--dtype", "int8"], ["--chart", "/no/such/folder/c.png"]])
def test_options_that_make_no_sense_are_refused_before_anything_runs(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "batching", *arguments]) == 2
    assert arguments[0] in capsys.readouterr().err


@pytest.mark.slow
def test_continuous_batching_on_the_modelled_a100_is_as_much_faster_as_promised(tmp_path: Path) -> None:
    """Eight times no batching, four times static 8, two and a half times static 32; and the chart is drawn."""
    json_file, chart = tmp_path / "batching.json", tmp_path / "batching.png"
    arguments = ["--only", "modelled", "--quick", "--json", str(json_file), "--chart", str(chart)]
    assert run(["bench", "batching", *arguments]) == 0
    rows = {row["name"]: row["value"] for row in json.loads(json_file.read_bytes())["rows"]}
    assert rows["a100.continuous_over_none"] >= 8
    assert rows["a100.continuous_over_static8"] >= 4
    assert rows["a100.continuous_over_static32"] >= 2.5
    assert chart.read_bytes().startswith(PNG)
