"""A random-weight Llama of about 3.4 million parameters, in Hugging Face form, made in under a second without torch.

Owns: the model that most tests run. Imports numpy, safetensors and tokenizers only. The folder depends on the seed and
the overrides alone, byte for byte, so two processes that make it have the same model identity.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from cluster.model import ModelFolder

VOCAB_SIZE = 1024
START, END, TEXT_END = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LOGIT_SCALE = 4.0
"""Standard deviation of the logits: the two best of 1,024 then lie about 1 apart, and draws at temperature 1 vary."""


def make_tiny_llama(folder: Path, *, seed: int = 0, **overrides: Any) -> ModelFolder:
    """Write the model to `folder` (made if absent) and open it. `overrides` replace fields of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    end_id = tokenizer.get_vocab(with_added_tokens=True)[END]
    config = _config(end_id) | overrides
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"eos_token_id": end_id, "pad_token_id": end_id})
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END,
            "pad_token": END,
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
            "model_max_length": config["max_position_embeddings"],
        },
    )
    save_file(_weights(config, seed), folder / "model.safetensors", metadata={"format": "pt"})
    return ModelFolder.open(folder, name="tiny-llama")


def _config(end_id: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": None,
        "eos_token_id": end_id,
        "pad_token_id": end_id,
        "dtype": "float32",
        "head_dim": 32,
        "hidden_act": "silu",
        "hidden_size": 256,
        "intermediate_size": 688,
        "max_position_embeddings": 4096,
        "mlp_bias": False,
        "num_attention_heads": 8,
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": VOCAB_SIZE,
    }


def _weights(config: dict[str, Any], seed: int) -> dict[str, NDArray[np.float32]]:
    """Rows of unit gain, so that every layer matters to the logits and greedy outputs do not fall into one token."""
    rng = np.random.default_rng(seed)

    def linear(out_features: int, in_features: int, gain: float = 1.0) -> NDArray[np.float32]:
        std = np.float32(gain / np.sqrt(in_features))
        return rng.standard_normal((out_features, in_features), dtype=np.float32) * std

    hidden, inner = int(config["hidden_size"]), int(config["intermediate_size"])
    queries = int(config["num_attention_heads"]) * int(config["head_dim"])
    keys = int(config["num_key_value_heads"]) * int(config["head_dim"])
    weights = {"model.embed_tokens.weight": linear(int(config["vocab_size"]), hidden, np.sqrt(hidden))}
    for layer in range(int(config["num_hidden_layers"])):
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.input_layernorm.weight": np.ones(hidden, np.float32),
            f"{prefix}.self_attn.q_proj.weight": linear(queries, hidden, 1.5),
            f"{prefix}.self_attn.k_proj.weight": linear(keys, hidden, 1.5),
            f"{prefix}.self_attn.v_proj.weight": linear(keys, hidden, 2.0),
            f"{prefix}.self_attn.o_proj.weight": linear(hidden, queries),
            f"{prefix}.post_attention_layernorm.weight": np.ones(hidden, np.float32),
            f"{prefix}.mlp.gate_proj.weight": linear(inner, hidden),
            f"{prefix}.mlp.up_proj.weight": linear(inner, hidden),
            f"{prefix}.mlp.down_proj.weight": linear(hidden, inner),
        }
        if config["model_type"] == "qwen2":
            for part, rows in (("q", queries), ("k", keys), ("v", keys)):
                weights[f"{prefix}.self_attn.{part}_proj.bias"] = linear(rows, 1, 0.5)[:, 0]
    weights["model.norm.weight"] = np.ones(hidden, np.float32)
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = linear(int(config["vocab_size"]), hidden, LOGIT_SCALE)
    return weights


def _tokenizer() -> Tokenizer:
    """Byte-level BPE: all 256 bytes are tokens, so any text encodes; merges are learnt from made-up words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[TEXT_END, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    return tokenizer


def _corpus() -> list[str]:
    rng = random.Random(20)
    heads = ["th", "st", "w", "m", "pr", "l", "c", "tr", "d", "s", "qu", "n", "b", "gr", "f", "h"]
    tails = ["e", "ing", "at", "or", "ea", "ion", "ous", "er", "ay", "ight", "um", "ow", "al"]
    words = ["".join(rng.choice(heads) + rng.choice(tails) for _ in range(rng.randint(1, 3))) for _ in range(700)]
    words += [
        "water",
        "Wasser",
        "eau",
        "größer",
        "façade",
        "naïve",
        "水",
        "日本語",
        "ответ",
        "🙂",
        "user",
        "system",
    ] * 3
    weights = [1.0 / rank for rank in range(1, len(words) + 1)]
    return [" ".join(rng.choices(words, weights, k=40)) for _ in range(250)]


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
