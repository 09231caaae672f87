"""Draws inside vLLM's sampler: the same as elsewhere, and rows from which nothing can be drawn."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.clock import SystemClock
from cluster.config import EngineConfig, EngineKind, VllmConfig
from cluster.engine.chance import uniform
from cluster.engine.draws import Draws
from cluster.engine.torch.sampling import draw
from cluster.engine.vllm.build import build_vllm_engine
from cluster.engine.vllm.internals import SamplingParams
from cluster.engine.vllm.sampler import DrawProcessor
from cluster.engine.vllm.translate import core_request
from cluster.model import ModelFolder
from cluster.types import FinishReason, Request
from tests.vllm.vllm_kit import Listener, Reference, request

POISON = 900
"""The token whose embedding is no numbers."""
CHANCE: dict[str, object] = {"temperature": 0.9, "top_p": 0.95, "top_k": 60}
CONFIG = EngineConfig(
    kind=EngineKind.VLLM,
    slots=4,
    step_token_budget=64,
    block_size_tokens=32,
    blocks=24,
    max_model_len=512,
    vllm=VllmConfig(eager=True),
)


# --- the processor alone ---


def processor_of(*requests: Request) -> DrawProcessor:
    """With a batch of these, in the order in which they stand."""
    from vllm.v1.sample.logits_processor import (  # type: ignore[import-not-found, unused-ignore]
        BatchUpdateBuilder,
    )

    builder = BatchUpdateBuilder()
    for place, r in enumerate(requests):
        params: SamplingParams = core_request(r, 0, (2,)).sampling_params  # type: ignore[attr-defined]
        builder.added.append((place, params, [*r.prompt_ids, *r.emitted_ids], []))
    processor = DrawProcessor(None, torch.device("cpu"), False)
    processor.update_state(builder.get_and_reset(len(requests)))
    return processor


def greedy_choice(logits: torch.Tensor) -> list[int]:
    """vLLM's, on a CPU."""
    ids: list[int] = torch.ops._C.greedy_argmax(logits).tolist()
    return ids


def flags(processor: DrawProcessor, logits: torch.Tensor) -> list[int]:
    from vllm.v1.worker import gpu_model_runner  # type: ignore[import-not-found, unused-ignore]

    counts: list[int] = gpu_model_runner.count_nans_per_row(logits).tolist()
    return counts


def kinds() -> dict[str, dict[str, Any]]:
    return {
        "greedy": {},
        "chance": {"temperature": 0.8},
        "nucleus": dict(CHANCE),
        "penalised": {"frequency_penalty": 1.5, "repetition_penalty": 1.4},
        "biased": {"temperature": 1.1, "logit_bias": ((3, 9.0), (3, 2.0), (8, -4.0))},
        "both": {**CHANCE, "presence_penalty": 0.7, "min_p": 0.02},
        "minimum": {"min_tokens": 5, "ignore_eos": False},
    }


@pytest.mark.parametrize("left_out", [(), ("greedy",)], ids=["with a greedy row", "all drawn here"])
def test_vllm_takes_the_token_that_the_embedded_engine_draws_of_the_same_logits(left_out: tuple[str, ...]) -> None:
    requests = [
        request(f"row {name}", prompt=(5, 6, 7, 3), emitted=(9, 9, 3), seed=77, choice=1, **changes)
        for name, changes in kinds().items()
        if name not in left_out
    ]
    logits = torch.randn((len(requests), 49_152), generator=torch.Generator().manual_seed(3)) * 4
    specs = []
    for r in requests:
        draws = Draws(r.sampling, r.choice, r.prompt_ids, () if r.sampling.ignore_eos else (2,))
        for token_id in r.emitted_ids:
            draws.took(token_id)
        specs.append(draws.spec())
        assert specs[-1].uniform == (uniform(77, 1, 3) if r.sampling.temperature > 0 else 0.0)
    expected = draw(logits, specs)
    processor = processor_of(*requests)
    assert greedy_choice(processor.apply(logits.clone())) == expected
    assert flags(processor, logits) == [0] * len(requests)


@pytest.mark.parametrize("spoilt", [math.nan, math.inf])
def test_rows_without_a_token_are_told_and_no_other_and_vllm_gets_some_token_for_them(spoilt: float) -> None:
    requests = [request(f"row {name}", **changes) for name, changes in kinds().items() for _ in range(2)]
    logits = torch.randn((len(requests), 1024), generator=torch.Generator().manual_seed(3))
    clean = greedy_choice(processor_of(*requests).apply(logits.clone()))
    bad = logits.clone()
    bad[::2, 17] = spoilt
    processor = processor_of(*requests)
    chosen = greedy_choice(processor.apply(bad))
    assert flags(processor, bad) == [1, 0] * (len(requests) // 2)
    assert chosen[1::2] == clean[1::2]
    assert all(0 <= token_id < 1024 for token_id in chosen)


# --- the engine ---


@pytest.fixture(scope="module")
def poisoned(tiny_model: ModelFolder, tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """The tiny model, but that whoever has POISON in a prompt gets logits that are no numbers."""
    folder = Path(shutil.copytree(tiny_model.path, tmp_path_factory.mktemp("models") / "poisoned"))
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = math.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return ModelFolder.open(folder, name="poisoned")


@pytest.fixture(scope="module")
def shared_engine(poisoned: ModelFolder) -> Iterator[Listener]:
    listener = Listener(build_vllm_engine(poisoned, CONFIG, SystemClock()))
    listener.start()
    yield listener
    listener.engine.stop()


@pytest.fixture
def engine(shared_engine: Listener) -> Iterator[Listener]:
    shared_engine.outputs.clear()
    yield shared_engine
    load = shared_engine.until_idle()
    assert load.blocks_free == load.blocks_total
    assert shared_engine.places() == {}
    assert shared_engine.engine.progress().alive


def harmless(label: str, **changes: Any) -> Request:
    """A request whose prompt the poison is not in."""
    r = request(label, **changes)
    return r if POISON not in r.prompt_ids else harmless(f"{label}.", **changes)


@pytest.mark.parametrize("name", kinds())
def test_a_request_whose_logits_are_no_numbers_ends_with_an_error_alone(
    engine: Listener, tiny_model: ModelFolder, name: str
) -> None:
    reference = Reference(tiny_model)
    neighbours = [harmless("greedy"), harmless("seeded", seed=4, **CHANCE), harmless("long prompt", prompt=150)]
    bad = request("bad", prompt=(5, 6, POISON, 7, 8), **kinds()[name])
    engine.add(neighbours[0], bad, *neighbours[1:])
    engine.until_ended(bad, *neighbours)
    ended = engine.outputs[bad.request_id]
    assert (ended.finish, ended.token_ids, ended.text) == (FinishReason.ERROR, [], "")
    assert "no numbers" in ended.error
    for r in neighbours:
        assert engine.outputs[r.request_id].finish is FinishReason.LENGTH
        made = engine.outputs[r.request_id].token_ids
        expected = reference.output_ids(r)
        # One that itself draws the poison is spoilt from there on.
        assert POISON not in expected, "choose another label"
        assert made == expected


def test_a_request_that_draws_its_own_poison_has_all_its_tokens_up_to_it(engine: Listener) -> None:
    bad = request("draws it", logit_bias=((POISON, 1e6),))
    (ended,) = engine.run(bad)
    assert (ended.finish, ended.token_ids) == (FinishReason.ERROR, [POISON])
    assert "no numbers" in ended.error


def test_a_prompt_of_no_numbers_has_no_scores(engine: Listener) -> None:
    scored = request("scored", prompt=(5, 6, POISON, 7, 8), max_tokens=0, prompt_logprobs=1)
    (ended,) = engine.run(scored)
    assert ended.finish is FinishReason.ERROR
    assert "no numbers" in ended.error
    assert not ended.prompt_logprobs


def test_blocks_that_held_no_numbers_do_no_harm_to_who_gets_them_next(
    engine: Listener, tiny_model: ModelFolder
) -> None:
    """Four poisoned prompts write to 20 of the 24 blocks; 40 other requests then go through all of these."""
    engine.run(*(request(f"bad {n}", prompt=(*range(10 + n, 160 + n), POISON)) for n in range(4)))
    reference = Reference(tiny_model)
    after = [harmless(f"after {n}", prompt=20 + n, max_tokens=6) for n in range(40)]
    for r, got in zip(after, engine.run(*after), strict=True):
        assert got.token_ids == reference.output_ids(r)
