"""The torch backend against transformers' own generate: greedy outputs, token for token, in float32."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from cluster.config import DType, EngineConfig
from cluster.engine.torch import loading
from cluster.engine.torch.backend import TorchBackend
from cluster.engine.torch.build import build_engine
from cluster.engine.torch.decoder import Decoder
from cluster.model import ModelFolder
from cluster.types import Request, RequestId, Sampling
from tests.conformance.torch_kit import (
    Comparison,
    Divergence,
    HandDriver,
    Reference,
    divergences,
    random_prompts,
    serve,
)
from tests.tiny_model import make_tiny_gpt2, make_tiny_llama


@pytest.fixture(scope="module")
def tiny_reference(tiny_model: ModelFolder) -> Reference:
    return Reference(tiny_model.path)


@pytest.fixture(scope="module")
def smollm2_reference(smollm2: ModelFolder) -> Reference:
    return Reference(smollm2.path)


OWN, TRANSFORMERS = "our decoder", "transformers' decoder"


@pytest.fixture(params=[OWN, TRANSFORMERS])
def decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which decoder models get: each passes the same tests. Fails where ours would leave the model to transformers."""
    which: str = request.param
    ours = loading.load_lean

    def only_ours(model: ModelFolder, dtype: DType, max_model_len: int) -> Decoder:
        loaded = ours(model, dtype, max_model_len)
        assert loaded is not None, "our decoder does not know this model"
        return loaded

    monkeypatch.setattr(loading, "load_lean", only_ours if which == OWN else lambda *_: None)
    return which


def small(**changes: object) -> EngineConfig:
    values = {"slots": 16, "step_token_budget": 32, "block_size_tokens": 4, "blocks": 1024, "max_model_len": 512}
    return EngineConfig.model_validate({**values, **changes})


def compare(
    model: ModelFolder, config: EngineConfig, prompts: list[list[int]], tokens: int, reference: Reference
) -> None:
    outputs = HandDriver(TorchBackend(model, config), config).generate(prompts, tokens)
    comparison = Comparison()
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        comparison.check(f"prompt {i}", reference, prompt, output, tokens)
    comparison.settle()


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_one_sequence_equals_generate(tiny_model: ModelFolder, attention: str) -> None:
    compare(tiny_model, small(), random_prompts([9], tiny_model.vocab_size), 64, Reference(tiny_model.path, attention))


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize(("budget", "block_size"), [(16, 4), (21, 16), (64, 1), (400, 32)])
def test_sixteen_sequences_of_mixed_lengths_equal_generate_however_prompts_are_cut(
    tiny_model: ModelFolder, tiny_reference: Reference, budget: int, block_size: int
) -> None:
    lengths = [1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 33, 64, 90, 128, 200]
    config = small(step_token_budget=budget, block_size_tokens=block_size, blocks=4096 // block_size)
    compare(tiny_model, config, random_prompts(lengths, tiny_model.vocab_size), 24, tiny_reference)


@pytest.mark.usefixtures("decoder")
def test_rows_of_very_different_context_share_a_step(tiny_model: ModelFolder, tiny_reference: Reference) -> None:
    """So different that they are attended to in several groups (layout.GROUP_TOKENS)."""
    config = small(blocks=2048, max_model_len=2048, step_token_budget=256, block_size_tokens=16)
    compare(tiny_model, config, random_prompts([1500, 3, 700, 40, 1100], tiny_model.vocab_size), 8, tiny_reference)


def test_a_token_counts_as_rounded_only_where_the_reference_has_both_within_the_gap_of_its_best() -> None:
    """The judgement itself, on logits written down: four places, four tokens."""
    clear, close = [0.0, 9.0, 1.0, 2.0], [0.0, 1.0, 5.0, 5.0005]
    logits = torch.tensor([clear, close, clear, close])
    assert divergences(logits, [1, 3, 1, 3], [1, 3, 1, 3]) == []
    parted = divergences(logits, [1, 2, 1, 2], [1, 3, 1, 0])
    assert [(d.place, d.taken, d.better, d.is_rounding) for d in parted] == [(1, 2, 3, True), (3, 2, 3, True)]
    assert [d.gap for d in parted] == pytest.approx([0.0005, 0.0005], abs=1e-6)
    # Parting where it is clear, and going wrong after an excused parting.
    assert divergences(logits, [3, 3, 1, 3], [1, 3, 1, 3]) == [Divergence(0, 3, 1, 7.0)]
    assert [d.is_rounding for d in divergences(logits, [1, 2, 0, 3], [1, 3, 1, 3])] == [True, False]
    # Ours is the best of the teacher-forced logits, but what `generate` took is far from it: no rounding either.
    assert [d.is_rounding for d in divergences(logits, [1, 3, 1, 3], [1, 1, 1, 3])] == [False]


MODELS: dict[str, dict[str, Any]] = {
    "multi-query attention": {"num_key_value_heads": 1},
    "no shared KV heads": {"num_key_value_heads": 8},
    "tied embeddings": {"tie_word_embeddings": True},
    "head_dim not hidden / heads": {"head_dim": 64},
    "linear rope scaling": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "Mistral with a window": {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 12},
    "Mistral without a window": {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "sliding_window": None,
    },
    "Qwen2 with biases, and a window in some layers": {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "use_sliding_window": True,
        "sliding_window": 10,
        "max_window_layers": 2,
    },
    "Qwen3 with norms of queries and keys": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
}


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize("variant", MODELS)
def test_model_variants_equal_generate(tmp_path: Path, variant: str) -> None:
    model = make_tiny_llama(tmp_path / "model", **MODELS[variant])
    compare(model, small(), random_prompts([3, 11, 40, 70], model.vocab_size), 24, Reference(model.path, "eager"))


def test_gpt2_equals_generate(tmp_path: Path) -> None:
    model = make_tiny_gpt2(tmp_path)
    compare(model, small(), random_prompts([3, 11, 40, 70], model.vocab_size), 24, Reference(model.path, "eager"))


def test_a_window_does_change_what_is_computed(tmp_path: Path) -> None:
    """Guards the window tests: with a model that ignored its window they would hold as well."""
    mistral: dict[str, Any] = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    prompts = random_prompts([40], 1024)
    with_window, without = (
        HandDriver(
            TorchBackend(make_tiny_llama(tmp_path / str(window), sliding_window=window, **mistral), small()), small()
        ).generate(prompts, 16)
        for window in (12, None)
    )
    assert with_window != without


def test_bfloat16_follows_transformers_up_to_its_rounding(tiny_model: ModelFolder, tiny_reference: Reference) -> None:
    """Teacher-forced, so that one close call does not decide about all that follows."""
    config = small(dtype=DType.BFLOAT16)
    prompts = random_prompts([5, 20, 60], tiny_model.vocab_size)
    outputs = HandDriver(TorchBackend(tiny_model, config), config).generate(prompts, 32)
    gaps = []
    for prompt, output in zip(prompts, outputs, strict=True):
        logits = tiny_reference.logits([*prompt, *output[:-1]])[len(prompt) - 1 :]
        gaps += [float(row.max() - row[token_id]) for row, token_id in zip(logits, output, strict=True)]
    # Logits have a standard deviation of 4 and bfloat16 8 bits: after four layers errors stay well below one deviation.
    assert max(gaps) < 1.0
    assert sum(gap == 0.0 for gap in gaps) > 0.9 * len(gaps)


# --- the whole engine: 64 prompts of mixed lengths, one at a time and sixteen at a time ---

ARCHITECTURES: dict[str, Callable[[Path], ModelFolder]] = {
    "Llama": make_tiny_llama,
    "Qwen3": lambda folder: make_tiny_llama(folder, **MODELS["Qwen3 with norms of queries and keys"]),
    "Mistral with a window": lambda folder: make_tiny_llama(folder, **MODELS["Mistral with a window"]),
    "GPT-2": make_tiny_gpt2,
}
MIXED_LENGTHS = [1 + (i * i * 7) % 211 for i in range(64)]
"""64 lengths from 1 to 211, in no order."""


def greedy(prompts: list[list[int]], tokens: int) -> list[Request]:
    return [
        Request(
            request_id=RequestId(f"prompt-{i:02}"),
            tenant="t",
            priority=0,
            priority_class="any",
            arrived_unix_s=0.0,
            prompt_ids=tuple(prompt),
            sampling=Sampling(max_tokens=tokens, seed=0, temperature=0.0, ignore_eos=True),
        )
        for i, prompt in enumerate(prompts)
    ]


def compare_engine(
    model: ModelFolder, config: EngineConfig, prompts: list[list[int]], tokens: int, reference: Reference
) -> None:
    requests = greedy(prompts, tokens)
    reference.generate_all(prompts, tokens)
    told = serve(build_engine(model, config), {0: requests})
    comparison = Comparison()
    for r in requests:
        comparison.check(r.request_id, reference, r.prompt_ids, told[r.request_id].token_ids, tokens)
    comparison.settle()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_64_prompts_equal_generate_one_at_a_time_and_sixteen_at_a_time(
    tmp_path: Path, architecture: str, decoder: str
) -> None:
    if architecture == "GPT-2" and decoder == OWN:
        pytest.skip("ours is for the Llama family")
    model = ARCHITECTURES[architecture](tmp_path / "model")
    reference = Reference(model.path)
    prompts = random_prompts(MIXED_LENGTHS, model.vocab_size, seed=9)
    for slots in (1, 16):
        compare_engine(model, small(slots=slots), prompts, 32, reference)


def chats() -> list[str]:
    """64 of them, from a few words to some hundred tokens, in several languages and scripts."""
    asked = [
        "What is the capital of {}?",
        "Write a haiku about {}.",
        "Explain {} in two sentences.",
        "List three facts about {}, then say which of them surprises most people and why that is so.",
        "Translate '{}' to German, French and Spanish.",
        "Ünïcödé 水 🙂: repeat this text, then say something about {}.",
        "def about(topic='{}'):",
        "Summarise this: " + "The keeper of the lighthouse wrote about {} in his journal every night. " * 12,
    ]
    topics = ["Norway", "rain", "a forebay", "prime numbers", "good morning", "bees", "the sky", "old maps"]
    return [question.replace("{}", topic) for question in asked for topic in topics]


def chat_ids(model: ModelFolder) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(model.tokenizer_path))
    return [
        tokenizer.encode(f"<|im_start|>user\n{chat}<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False).ids
        for chat in chats()
    ]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_smollm2_on_64_chats_equals_generate_one_at_a_time_and_sixteen_at_a_time(
    smollm2: ModelFolder, smollm2_reference: Reference
) -> None:
    prompts = chat_ids(smollm2)
    assert len(prompts) == 64
    for slots in (1, 16):
        compare_engine(smollm2, EngineConfig(slots=slots), prompts, 24, smollm2_reference)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("decoder")
def test_smollm2_without_an_engine_equals_generate(smollm2: ModelFolder, smollm2_reference: Reference) -> None:
    """Prompts cut elsewhere than the engine cuts them, and decodes beside prefill."""
    compare(smollm2, EngineConfig(slots=16, step_token_budget=32), chat_ids(smollm2)[::5], 32, smollm2_reference)


@pytest.mark.slow
def test_converted_smollm2_answers_in_english_and_stops(smollm2: ModelFolder) -> None:
    """The conversion kept weights, tokenizer, template and end token together: any of them wrong gives no such answer."""
    from transformers import AutoTokenizer

    assert smollm2.eos_token_ids == (2,)
    tokenizer = AutoTokenizer.from_pretrained(smollm2.path, local_files_only=True)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], tokenize=False, add_generation_prompt=True
    )
    prompt = Tokenizer.from_file(str(smollm2.tokenizer_path)).encode(text, add_special_tokens=False).ids
    config = EngineConfig()
    output = HandDriver(TorchBackend(smollm2, config), config).generate([prompt], 32)[0]
    assert 2 in output, "no end of sequence within 32 tokens"
    assert "Paris" in tokenizer.decode(output[: output.index(2)])
    settings = json.loads((smollm2.path / "config.json").read_bytes())
    assert settings["rope_parameters"]["rope_theta"] == 100_000
    assert settings["tie_word_embeddings"] is True
