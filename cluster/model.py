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


class ModelFolderError(ValueError):
    """The folder cannot be served; the message says what is missing, in one line."""


@dataclass(frozen=True)
class ModelFolder:
    """What the files of a model say. `path` is absolute."""

    path: Path
    name: str
    vocab_size: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    chat_template: str | None
    special_tokens: dict[str, str]
    """bos_token, eos_token, … as the chat template may name them."""
    identity: str
    """SHA-256 over config.json, tokenizer.json and the names and sizes of the weights, hexadecimal."""
    weight_bytes: int

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
        _read_json(path, "tokenizer.json", required=True)
        weights = sorted(path.glob("*.safetensors"))
        if not weights:
            raise ModelFolderError(f"{path} has no *.safetensors file with the weights")
        generation = _read_json(path, "generation_config.json", required=False)
        tokenizer_config = _read_json(path, "tokenizer_config.json", required=False)
        eos = generation.get("eos_token_id", config.get("eos_token_id"))
        eos_ids = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
        digest = hashlib.sha256()
        for file in ("config.json", "tokenizer.json"):
            digest.update((path / file).read_bytes())
        for file_path in weights:
            digest.update(f"{file_path.name}:{file_path.stat().st_size}".encode())
        try:
            return cls(
                path=path,
                name=name or path.name,
                vocab_size=int(config["vocab_size"]),
                max_position_embeddings=int(config.get("max_position_embeddings", config.get("n_positions", 2048))),
                eos_token_ids=eos_ids,
                chat_template=_chat_template(path, tokenizer_config),
                special_tokens=_special_tokens(tokenizer_config),
                identity=digest.hexdigest(),
                weight_bytes=sum(w.stat().st_size for w in weights),
            )
        except (KeyError, TypeError) as error:
            raise ModelFolderError(f"{path}/config.json lacks or has an odd {error}") from error


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


def _chat_template(path: Path, tokenizer_config: dict[str, Any]) -> str | None:
    """The template may be a file of its own (newer) or a field of tokenizer_config.json, there also a named list."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        template = next((t.get("template") for t in template if t.get("name") == "default"), None)
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
