"""The converted SmolLM2 folder: found without torch, made whole or not at all, once."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from cluster.engine.torch.convert import convert
from cluster.model import ModelFolder, ModelFolderError
from cluster.smollm2 import CONVERTER_VERSION, MODEL_NAME, RECEIPT, default_model_cache, ensure_smollm2, is_converted


@pytest.fixture
def cache(tiny_model: ModelFolder, tmp_path: Path) -> Path:
    """A cache that holds a folder as a conversion leaves it (of another model: what it holds does not matter here)."""
    folder = Path(shutil.copytree(tiny_model.path, tmp_path / MODEL_NAME))
    (folder / RECEIPT).write_text(json.dumps({"converter_version": CONVERTER_VERSION}))
    return tmp_path


def test_a_complete_folder_is_kept_as_it_is(cache: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in (cache / MODEL_NAME).iterdir()}
    assert ensure_smollm2(cache) == cache / MODEL_NAME
    assert convert(cache / MODEL_NAME) is False
    assert {p: p.stat().st_mtime_ns for p in (cache / MODEL_NAME).iterdir()} == before
    assert list(cache.iterdir()) == [cache / MODEL_NAME]


def test_a_complete_folder_is_found_without_torch(cache: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from cluster.smollm2 import ensure_smollm2\n"
        f"ensure_smollm2(Path({str(cache)!r}))\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("lost", [RECEIPT, "config.json", "model.safetensors", "tokenizer.json"])
def test_a_folder_that_lost_a_file_is_not_complete(cache: Path, lost: str) -> None:
    assert is_converted(cache / MODEL_NAME)
    (cache / MODEL_NAME / lost).unlink()
    assert not is_converted(cache / MODEL_NAME)


@pytest.mark.parametrize("receipt", ["", "[]", "{}", '{"converter_version": 0}'])
def test_a_folder_of_another_conversion_is_not_complete(cache: Path, receipt: str) -> None:
    (cache / MODEL_NAME / RECEIPT).write_text(receipt)
    assert not is_converted(cache / MODEL_NAME)


def test_a_folder_with_something_else_is_never_replaced(tiny_model: ModelFolder, tmp_path: Path) -> None:
    mine = Path(shutil.copytree(tiny_model.path, tmp_path / "mine"))
    with pytest.raises(ModelFolderError, match="not made by this conversion"):
        convert(mine)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ModelFolderError, match="not made by this conversion"):
        convert(tmp_path / "file")
    assert ModelFolder.open(mine).identity == tiny_model.identity
    assert (tmp_path / "file").read_text() == "mine"


def test_a_conversion_that_fails_is_one_line_and_an_error(
    tiny_model: ModelFolder, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(tiny_model.path, tmp_path / MODEL_NAME)
    with pytest.raises(ModelFolderError, match="exit code 2"):
        ensure_smollm2(tmp_path)
    said = capfd.readouterr().err.strip().splitlines()
    assert len(said) == 1
    assert said[0].startswith("error: ")


def test_the_cache_follows_the_environment() -> None:
    assert default_model_cache({"XDG_CACHE_HOME": "/somewhere"}) == Path("/somewhere/forebay/models")
    assert default_model_cache({}) == Path.home() / ".cache" / "forebay" / "models"
    assert default_model_cache({"XDG_CACHE_HOME": ""}) == Path.home() / ".cache" / "forebay" / "models"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_conversions_at_once_make_one_whole_folder(tmp_path: Path) -> None:
    folder = tmp_path / "models" / MODEL_NAME
    leftover = folder.parent / f".{MODEL_NAME}.1.partial"
    leftover.mkdir(parents=True)
    command = [sys.executable, "-m", "cluster.engine.torch.convert", "--to", str(folder)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = sorted(process.communicate()[0].strip() for process in both)
    assert said == [f"{folder}: already there", f"{folder}: converted"]
    assert [process.returncode for process in both] == [0, 0]
    assert sorted(p.name for p in folder.parent.iterdir()) == [f".{MODEL_NAME}.lock", MODEL_NAME]
    model = ModelFolder.open(folder)
    assert model.eos_token_ids == (2,)
    assert os.access(folder / "model.safetensors", os.R_OK)
    # The model was trained with every digit a token of its own, and the spaces before a number as one.
    tokens = Tokenizer.from_file(str(model.tokenizer_path)).encode("was  421", add_special_tokens=False).tokens
    assert tokens == ["was", "\u0120\u0120", "4", "2", "1"]
