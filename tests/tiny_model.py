"""Random-weight models of about 3.4 million parameters, in Hugging Face form, made in under a second without torch.

Owns: the model that most tests run, a Llama; its kin (Mistral, Qwen2, Qwen3) by overrides of its config.json; and a GPT-2,
which is built of other parts. Imports numpy, safetensors and tokenizers only. A folder depends on the seed and the
overrides alone, byte for byte, so two processes that make it have the same model identity.

Weights are scaled so that every layer matters to the logits, greedy outputs do not fall into one token, and the two best
tokens lie well apart (see LOGIT_SCALE), which keeps ties within rounding rare.
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


def make_tiny_llama(folder: Path, *, seed: int = 0, tokenizer_size: int = VOCAB_SIZE, **overrides: Any) -> ModelFolder:
    """Write the model to `folder` (made if absent) and open it. `overrides` replace fields of config.json."""
    tokenizer = _tokenizer(tokenizer_size)
    config = _llama_config(_end_id(tokenizer)) | overrides
    return _write(folder, "tiny-llama", tokenizer, config, _llama_weights(config, seed))


def make_tiny_gpt2(folder: Path, *, seed: int = 0, **overrides: Any) -> ModelFolder:
    """The same for a GPT-2: learnt positions, layer norms with biases, fused projections, tied embeddings."""
    tokenizer = _tokenizer()
    config = _gpt2_config(_end_id(tokenizer)) | overrides
    return _write(folder, "tiny-gpt2", tokenizer, config, _gpt2_weights(config, seed))


def _end_id(tokenizer: Tokenizer) -> int:
    return int(tokenizer.get_vocab(with_added_tokens=True)[END])


def _write(
    folder: Path, name: str, tokenizer: Tokenizer, config: dict[str, Any], weights: dict[str, NDArray[np.float32]]
) -> ModelFolder:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    end_id = _end_id(tokenizer)
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
            "model_max_length": config.get("max_position_embeddings", config.get("n_positions")),
        },
    )
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return ModelFolder.open(folder, name=name)


def _llama_config(end_id: int) -> dict[str, Any]:
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


def _normal(rng: np.random.Generator, shape: tuple[int, ...], std: float) -> NDArray[np.float32]:
    return rng.standard_normal(shape, dtype=np.float32) * np.float32(std)


def _llama_weights(config: dict[str, Any], seed: int) -> dict[str, NDArray[np.float32]]:
    """Rows of unit gain."""
    rng = np.random.default_rng(seed)

    def linear(out_features: int, in_features: int, gain: float = 1.0) -> NDArray[np.float32]:
        return _normal(rng, (out_features, in_features), float(gain / np.sqrt(in_features)))

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
        if config["model_type"] == "qwen3":
            # The norms of queries and keys make each of length sqrt(head_dim); gains as those of the projections here.
            for part in ("q", "k"):
                gains = 1.5 + _normal(rng, (int(config["head_dim"]),), 0.3)
                weights[f"{prefix}.self_attn.{part}_norm.weight"] = gains
    weights["model.norm.weight"] = np.ones(hidden, np.float32)
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = linear(int(config["vocab_size"]), hidden, LOGIT_SCALE)
    return weights


def _gpt2_config(end_id: int) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "bos_token_id": end_id,
        "eos_token_id": end_id,
        "dtype": "float32",
        "layer_norm_epsilon": 1e-5,
        "n_embd": 256,
        "n_head": 8,
        "n_layer": 4,
        "n_positions": 1024,
        "tie_word_embeddings": True,
        "vocab_size": VOCAB_SIZE,
    }


def _gpt2_weights(config: dict[str, Any], seed: int) -> dict[str, NDArray[np.float32]]:
    """Rows of unit gain over small embeddings: these are the output's too, so a token would else predict itself."""
    rng = np.random.default_rng(seed)
    hidden = int(config["n_embd"])
    embedding_std = 0.1

    def conv(in_features: int, out_features: int, gain: float = 1.0) -> NDArray[np.float32]:
        return _normal(rng, (in_features, out_features), float(gain / np.sqrt(in_features)))

    def bias(features: int) -> NDArray[np.float32]:
        return _normal(rng, (features,), 0.1)

    weights = {
        "transformer.wte.weight": _normal(rng, (int(config["vocab_size"]), hidden), embedding_std),
        "transformer.wpe.weight": _normal(rng, (int(config["n_positions"]), hidden), embedding_std),
        # The norm's output has length sqrt(hidden), the embeddings' rows embedding_std times that.
        "transformer.ln_f.weight": np.full(hidden, LOGIT_SCALE / (embedding_std * np.sqrt(hidden)), np.float32),
        "transformer.ln_f.bias": bias(hidden),
    }
    for layer in range(int(config["n_layer"])):
        prefix = f"transformer.h.{layer}"
        for norm in ("ln_1", "ln_2"):
            weights |= {
                f"{prefix}.{norm}.weight": 1.0 + bias(hidden),
                f"{prefix}.{norm}.bias": bias(hidden),
            }
        weights |= {
            f"{prefix}.attn.c_attn.weight": conv(hidden, 3 * hidden, 1.5),
            f"{prefix}.attn.c_attn.bias": bias(3 * hidden),
            f"{prefix}.attn.c_proj.weight": conv(hidden, hidden, 4.0),
            f"{prefix}.attn.c_proj.bias": bias(hidden),
            f"{prefix}.mlp.c_fc.weight": conv(hidden, 4 * hidden),
            f"{prefix}.mlp.c_fc.bias": bias(4 * hidden),
            f"{prefix}.mlp.c_proj.weight": conv(4 * hidden, hidden),
            f"{prefix}.mlp.c_proj.bias": bias(hidden),
        }
    return weights


def _tokenizer(size: int = VOCAB_SIZE) -> Tokenizer:
    """Byte-level BPE: all 256 bytes are tokens, so any text encodes; merges are learnt from made-up words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[TEXT_END, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    assert tokenizer.get_vocab_size() == size
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
