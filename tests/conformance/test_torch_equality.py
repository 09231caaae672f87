"""The torch backend against transformers' own generate: greedy outputs, token for token, in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from cluster.config import DType, EngineConfig
from cluster.engine.torch.backend import TorchBackend
from cluster.model import ModelFolder
from tests.conformance.torch_kit import Comparison, HandDriver, Reference, random_prompts
from tests.tiny_model import make_tiny_llama


@pytest.fixture(scope="module")
def tiny_reference(tiny_model: ModelFolder) -> Reference:
    return Reference(tiny_model.path)


@pytest.fixture(scope="module")
def smollm2_reference(smollm2: ModelFolder) -> Reference:
    return Reference(smollm2.path)


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


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_one_sequence_equals_generate(tiny_model: ModelFolder, attention: str) -> None:
    compare(tiny_model, small(), random_prompts([9], tiny_model.vocab_size), 64, Reference(tiny_model.path, attention))


@pytest.mark.parametrize(("budget", "block_size"), [(16, 4), (21, 16), (64, 1), (400, 32)])
def test_sixteen_sequences_of_mixed_lengths_equal_generate_however_prompts_are_cut(
    tiny_model: ModelFolder, tiny_reference: Reference, budget: int, block_size: int
) -> None:
    lengths = [1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 33, 64, 90, 128, 200]
    config = small(step_token_budget=budget, block_size_tokens=block_size, blocks=4096 // block_size)
    compare(tiny_model, config, random_prompts(lengths, tiny_model.vocab_size), 24, tiny_reference)


def test_rows_of_very_different_context_share_a_step(tiny_model: ModelFolder, tiny_reference: Reference) -> None:
    """So different that they are attended to in several groups (layout.GROUP_TOKENS)."""
    config = small(blocks=2048, max_model_len=2048, step_token_budget=256, block_size_tokens=16)
    compare(tiny_model, config, random_prompts([1500, 3, 700, 40, 1100], tiny_model.vocab_size), 8, tiny_reference)


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
}


@pytest.mark.parametrize("variant", MODELS)
def test_model_variants_equal_generate(tmp_path: Path, variant: str) -> None:
    model = make_tiny_llama(tmp_path / "model", **MODELS[variant])
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


CHATS = [
    "What is the capital of France?",
    "Write a haiku about rain.",
    "Explain what a forebay is in two sentences.",
    "List three prime numbers.",
    "Translate 'good morning' to German.",
    "Why is the sky blue?",
    "Give me a recipe for pancakes.",
    "Summarise: the cat sat on the mat and slept all day.",
    "def fibonacci(n):",
    "What is 17 + 25?",
    "Tell me a joke about computers.",
    "Who wrote Hamlet?",
    "Name the planets of the solar system in order, with one fact about each of them.",
    "How do I sort a list in Python?",
    "Ünïcödé 水 🙂: repeat this text.",
    "Write a long story about a lighthouse keeper. " * 12,
]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("budget", [64, 32])
def test_smollm2_equals_generate_on_sixteen_chats(
    smollm2: ModelFolder, smollm2_reference: Reference, budget: int
) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2.tokenizer_path))
    prompts = [
        tokenizer.encode(f"<|im_start|>user\n{chat}<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False).ids
        for chat in CHATS
    ]
    compare(smollm2, EngineConfig(slots=16, step_token_budget=budget), prompts, 48, smollm2_reference)


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
