"""The step-time model holds against what was measured, and moves the right way."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ops.sim.step_time as module
from ops.sim.step_time import Prefill, a100, device_ms, host_ms, step_ms

MODELS = sorted(a100().models)
contexts = st.lists(st.integers(0, 4096), min_size=1, max_size=64)
prefills = st.lists(st.builds(Prefill, st.integers(1, 2048), st.integers(0, 8192)), max_size=4)


def table(name: str) -> Iterator[dict[str, str]]:
    with (Path(module.__file__).parent / "a100" / name).open(encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


@pytest.mark.parametrize("model", MODELS)
def test_decode_steps_that_fit_in_memory_are_as_measured(model: str) -> None:
    """Half as much again as the error stated for points that the fit was not made from; the table has more extreme ones."""
    times = a100().models[model]
    errors = []
    for row in table(f"{model}_decode.csv"):
        batch, context = int(row["batch"]), int(row["context_tokens"])
        if batch * context <= times.kv_capacity_tokens:
            errors.append(abs(device_ms(times, [], [context] * batch) / float(row["step_ms"]) - 1))
    assert len(errors) >= 36
    assert sum(errors) / len(errors) <= 1.5 * times.held_out_mean_absolute_error


@pytest.mark.parametrize("model", MODELS)
def test_prefill_lies_within_a_tenth_of_the_range_of_its_two_sources(model: str) -> None:
    checked = 0
    for row in table(f"{model}_prefill.csv"):
        if not row["vidur_ms"]:
            continue
        sources = float(row["aiconfigurator_ms"]), float(row["vidur_ms"])
        modelled = device_ms(a100().models[model], [Prefill(int(row["tokens"]))], [])
        assert 0.9 * min(sources) <= modelled <= 1.1 * max(sources)
        checked += 1
    assert checked == 7


@pytest.mark.parametrize(
    ("input_tokens", "output_tokens", "batch", "published_tok_s"),
    [(128, 128, 64, 3486), (128, 2048, 32, 1459), (2048, 128, 32, 529), (2048, 2048, 16, 592)],
)
def test_published_throughputs_are_met_within_the_error_stated_for_the_tables(
    input_tokens: int, output_tokens: int, batch: int, published_tok_s: float
) -> None:
    """TensorRT-LLM 0.5, LLaMA-7B, FP16, one A100."""
    times = a100().models["llama-2-7b"]
    total_ms = step_ms(times, [Prefill(input_tokens)] * batch, [])
    total_ms += sum(step_ms(times, [], [input_tokens + k] * batch) for k in range(1, output_tokens))
    assert 1000 * batch * output_tokens / total_ms == pytest.approx(published_tok_s, rel=0.06)


@pytest.mark.parametrize("model", MODELS)
@given(prefills=prefills, contexts=contexts, at=st.integers(0), more=st.integers(1, 4096))
def test_a_longer_context_never_makes_a_step_shorter(
    model: str, prefills: list[Prefill], contexts: list[int], at: int, more: int
) -> None:
    longer = list(contexts)
    longer[at % len(longer)] += more
    times = a100().models[model]
    assert device_ms(times, prefills, longer) > device_ms(times, prefills, contexts)


@pytest.mark.parametrize("model", MODELS)
@given(tokens=st.integers(256, 8192), more=st.integers(1, 8192))
def test_a_longer_prompt_takes_longer(model: str, tokens: int, more: int) -> None:
    times = a100().models[model]
    assert device_ms(times, [Prefill(tokens + more)], []) > device_ms(times, [Prefill(tokens)], [])


@pytest.mark.parametrize("model", MODELS)
@given(contexts=contexts)
def test_one_batch_is_quicker_than_its_requests_one_by_one(model: str, contexts: list[int]) -> None:
    times = a100().models[model]
    together = step_ms(times, [], contexts)
    assert together <= sum(step_ms(times, [], [context]) for context in contexts) + 1e-9


def test_pairs_of_a_prompt_are_the_same_in_one_piece_and_in_chunks() -> None:
    """n^2/2 = m^2/2 + (n-m)^2/2 + m(n-m): what a chunk attends to before itself is counted."""
    times = a100().models["llama-2-7b"]

    def attention_ms(parts: list[Prefill]) -> float:
        bare = sum(device_ms(times, [Prefill(1)] * p.tokens, []) for p in parts)
        reads = times.ms_per_context_token * sum(p.context_tokens for p in parts)
        singles = times.ms_per_prefill_pair / 2 * sum(p.tokens for p in parts)
        return sum(device_ms(times, [p], []) for p in parts) - bare - reads + singles

    assert attention_ms([Prefill(3000)]) == pytest.approx(attention_ms([Prefill(1000), Prefill(2000, 1000)]))


def test_host_overhead_is_126_us_a_step_and_4_us_a_request() -> None:
    assert host_ms(0) == pytest.approx(0.126)
    assert host_ms(100) == pytest.approx(0.526)
    times = a100().models["llama-3-8b"]
    assert step_ms(times, [Prefill(64)], [10, 20]) == pytest.approx(
        device_ms(times, [Prefill(64)], [10, 20]) + 0.126 + 3 * 0.004
    )


def test_nothing_to_run_takes_no_time_on_the_device() -> None:
    assert device_ms(a100().models["llama-2-7b"], [], []) == 0.0
