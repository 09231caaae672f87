"""A model folder in Hugging Face form, read without torch or transformers.

Owns: what router and replica both need to know of a model (name, lengths, end tokens, chat template, identity) and the
check that a folder is one at all. The identity goes into the hello of every link, so that a router never sends token
ids to a replica with another tokenizer.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TODAYS_NAMES = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
}
"""Settings as GPT-2 and its kin name them -> as all others do."""


class ModelFolderError(ValueError):
    """The folder cannot be served; the message says what is missing, in one line."""


@dataclass(frozen=True)
class ModelFolder:
    """What the files of a model say. `path` is absolute."""

    path: Path
    name: str
    settings: dict[str, Any]
    """config.json under today's names, with those of the language model's own part (multimodal models have one) on top."""
    vocab_size: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    chat_template: str | None
    special_tokens: dict[str, str]
    """bos_token, eos_token, … as the chat template may name them."""
    weight_files: tuple[Path, ...]
    identity: str
    """SHA-256 over config.json, tokenizer.json and the names and sizes of the weights, hexadecimal."""

    @property
    def tokenizer_path(self) -> Path:
        return self.path / "tokenizer.json"

    @classmethod
    def open(cls, path: Path, name: str | None = None) -> ModelFolder:
        """Read and check a folder.

        Raises:
            ModelFolderError: it is no folder, or a file is missing or unreadable.
        """
        path = path.expanduser().resolve()
        if not path.is_dir():
            raise ModelFolderError(f"{path} is not a folder; give a model folder in Hugging Face form")
        config = _read_json(path, "config.json", required=True)
        if "architectures" not in config and "model_type" not in config:
            raise ModelFolderError(f"{path}/config.json names no model_type: not a model's configuration")
        settings = _settings(config)
        _read_json(path, "tokenizer.json", required=True)
        weight_files = _weight_files(path)
        generation = _read_json(path, "generation_config.json", required=False)
        tokenizer_config = _read_json(path, "tokenizer_config.json", required=False)
        digest = hashlib.sha256()
        for file in ("config.json", "tokenizer.json"):
            digest.update((path / file).read_bytes())
        for file_path in weight_files:
            digest.update(f"{file_path.name}:{file_path.stat().st_size}".encode())
        return cls(
            path=path,
            name=name or path.name,
            settings=settings,
            vocab_size=_positive(path, settings, "vocab_size"),
            max_position_embeddings=_positive(path, settings, "max_position_embeddings", 2048),
            eos_token_ids=_eos_token_ids(path, generation, settings),
            chat_template=_chat_template(path, tokenizer_config),
            special_tokens=_special_tokens(tokenizer_config),
            weight_files=weight_files,
            identity=digest.hexdigest(),
        )

    def positive(self, key: str, default: int | None = None) -> int:
        """A setting that is a positive whole number; `default` where it is absent or null. Raises ModelFolderError."""
        return _positive(self.path, self.settings, key, default)

    def check_context(self, max_model_len: int) -> None:
        """Raises ModelFolderError where the model was made for shorter texts than these."""
        if max_model_len > self.max_position_embeddings:
            raise ModelFolderError(
                f"{self.name} was made for {self.max_position_embeddings} tokens: "
                f"lower max_model_len ({max_model_len}) to that"
            )


def _read_json(path: Path, file: str, *, required: bool) -> dict[str, Any]:
    target = path / file
    if not target.is_file():
        if required:
            raise ModelFolderError(f"{path} has no {file}; give a model folder in Hugging Face form")
        return {}
    try:
        value = json.loads(target.read_bytes())
    except (ValueError, OSError) as error:
        raise ModelFolderError(f"{target} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelFolderError(f"{target} is not a JSON object")
    return value


def _settings(config: dict[str, Any]) -> dict[str, Any]:
    text = config.get("text_config")
    settings = config | text if isinstance(text, dict) else config
    return {_TODAYS_NAMES.get(key, key): value for key, value in settings.items()}


def _positive(path: Path, settings: dict[str, Any], key: str, default: int | None = None) -> int:
    value = settings.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or value < 1:
        raise ModelFolderError(f"{path}/config.json: {key} must be a positive whole number, not {value!r}")
    return value


def _weight_files(path: Path) -> tuple[Path, ...]:
    """The one file, or those that the index names; others that lie beside them (adapters, copies) are not the model's."""
    single = path / "model.safetensors"
    if single.is_file():
        return (single,)
    parts = _read_json(path, "model.safetensors.index.json", required=False).get("weight_map")
    if not isinstance(parts, dict) or not parts:
        raise ModelFolderError(f"{path} has neither model.safetensors nor model.safetensors.index.json with its parts")
    files = tuple(path / name for name in sorted({str(part) for part in parts.values()}))
    if missing := [file.name for file in files if not file.is_file()]:
        raise ModelFolderError(f"{path} lacks {len(missing)} of {len(files)} weight files, such as {missing[0]}")
    return files


def _eos_token_ids(path: Path, generation: dict[str, Any], settings: dict[str, Any]) -> tuple[int, ...]:
    eos = generation.get("eos_token_id", settings.get("eos_token_id"))
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(isinstance(token_id, int) for token_id in ids):
        raise ModelFolderError(f"{path}: eos_token_id must be a token id or a list of them, not {eos!r}")
    return tuple(ids)


def _chat_template(path: Path, tokenizer_config: dict[str, Any]) -> str | None:
    """The template may be a file of its own (newer) or a field of tokenizer_config.json, there also a named list."""
    file = path / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (ValueError, OSError) as error:
            raise ModelFolderError(f"{file} cannot be read: {error}") from error
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        named = [t for t in template if isinstance(t, dict) and t.get("name") == "default"]
        template = named[0].get("template") if named else None
    return template if isinstance(template, str) else None


def _special_tokens(tokenizer_config: dict[str, Any]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for key in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = tokenizer_config.get(key)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[key] = value
    return tokens
