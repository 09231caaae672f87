"""Reading a model folder: what it says, and one clear line where it is none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from cluster.config import DType, EngineConfig
from cluster.engine.memory import PROCESS_BYTES, TRANSFORMERS_BYTES, memory_bytes
from cluster.model import ModelFolder, ModelFolderError
from tests.tiny_model import END, make_tiny_llama


@pytest.fixture
def folder(tiny_model: ModelFolder, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(tiny_model.path, tmp_path / "model"))


def refusal(path: Path) -> str:
    with pytest.raises(ModelFolderError) as caught:
        ModelFolder.open(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_bytes()), **changes}))


def test_a_folder_says_what_transformers_reads_in_it(tiny_model: ModelFolder) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model.path, local_files_only=True)
    assert tiny_model.vocab_size == len(tokenizer)
    assert tiny_model.eos_token_ids == (tokenizer.eos_token_id,)
    assert tiny_model.special_tokens == {"eos_token": tokenizer.eos_token, "pad_token": tokenizer.pad_token}
    assert tiny_model.chat_template == tokenizer.chat_template
    assert tiny_model.max_position_embeddings == tokenizer.model_max_length
    assert tiny_model.weight_files == (tiny_model.path / "model.safetensors",)


def test_something_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    assert "is not a folder" in refusal(tmp_path / "absent")
    (tmp_path / "file").write_text("x")
    assert "is not a folder" in refusal(tmp_path / "file")


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(folder: Path, file: str) -> None:
    (folder / file).unlink()
    assert file in refusal(folder)


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[1]"])
def test_a_file_that_is_no_json_object_is_named(folder: Path, file: str, content: bytes) -> None:
    (folder / file).write_bytes(content)
    assert file in refusal(folder)


def test_a_configuration_of_something_else_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text('{"vocab_size": 10}')
    assert "model_type" in refusal(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    assert "vocab_size" in refusal(folder)
    odds: tuple[object, ...] = (None, "many", 0, -5, 2.5, [])
    for odd in odds:
        edit(folder / "config.json", vocab_size=odd)
        assert "vocab_size" in refusal(folder)


def test_the_language_models_own_part_of_the_settings_counts_and_gpt2s_names_are_understood(folder: Path) -> None:
    named = {"n_embd": 256, "n_head": 8, "n_layer": 4, "n_positions": 96}
    (folder / "config.json").write_text(json.dumps({"model_type": "x", "text_config": {"vocab_size": 1024, **named}}))
    model = ModelFolder.open(folder)
    assert (model.vocab_size, model.max_position_embeddings) == (1024, 96)
    (folder / "config.json").write_text(
        json.dumps(
            {
                "model_type": "x",
                "vocab_size": 1024,
                "hidden_size": 256,
                "num_attention_heads": 8,
                "num_hidden_layers": 4,
            }
        )
    )
    assert memory_bytes(model, EngineConfig()) == memory_bytes(ModelFolder.open(folder), EngineConfig())


@pytest.mark.parametrize("odd", ["</s>", ["</s>"], 2.5, {"id": 2}])
def test_end_tokens_that_are_no_token_ids_are_refused(folder: Path, odd: object) -> None:
    """A request would never end at them."""
    edit(folder / "generation_config.json", eos_token_id=odd)
    assert "eos_token_id" in refusal(folder)


def test_weights_in_parts_are_those_that_the_index_names(folder: Path) -> None:
    parts = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    whole = folder / "model.safetensors"
    (folder / parts[0]).write_bytes(whole.read_bytes())
    whole.rename(folder / "consolidated.safetensors")
    assert "model.safetensors.index.json" in refusal(folder)
    index = {"weight_map": {"a": parts[1], "b": parts[0], "c": parts[1]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert f"lacks 1 of 2 weight files, such as {parts[1]}" in refusal(folder)
    (folder / parts[1]).write_bytes(b"\2\0\0\0\0\0\0\0{}")
    model = ModelFolder.open(folder)
    assert [file.name for file in model.weight_files] == parts
    consolidated = memory_bytes(model, EngineConfig())
    (folder / "consolidated.safetensors").unlink()
    assert memory_bytes(ModelFolder.open(folder), EngineConfig()) == consolidated, "a copy beside them was counted"


def test_end_tokens_come_from_the_generation_settings_and_may_be_several(folder: Path) -> None:
    edit(folder / "generation_config.json", eos_token_id=[7, 2])
    assert ModelFolder.open(folder).eos_token_ids == (7, 2)
    (folder / "generation_config.json").unlink()
    edit(folder / "config.json", eos_token_id=9)
    assert ModelFolder.open(folder).eos_token_ids == (9,)
    edit(folder / "config.json", eos_token_id=None)
    assert ModelFolder.open(folder).eos_token_ids == ()


def test_the_template_may_be_a_file_a_field_or_a_named_list(folder: Path) -> None:
    edit(
        folder / "tokenizer_config.json",
        chat_template=[{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}],
    )
    assert ModelFolder.open(folder).chat_template == "D"
    edit(folder / "tokenizer_config.json", chat_template=None)
    assert ModelFolder.open(folder).chat_template is None
    edit(folder / "tokenizer_config.json", chat_template=["T"])
    assert ModelFolder.open(folder).chat_template is None
    (folder / "chat_template.jinja").write_text("J ü\n", encoding="utf-8")
    assert ModelFolder.open(folder).chat_template == "J ü\n"
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe\xff")
    assert "chat_template.jinja" in refusal(folder)


def test_special_tokens_may_be_written_as_objects(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", bos_token={"content": "<s>", "lstrip": False}, pad_token=None)
    assert ModelFolder.open(folder).special_tokens == {"bos_token": "<s>", "eos_token": END}


def test_identity_is_of_configuration_tokenizer_and_weights_and_not_of_the_place(
    tiny_model: ModelFolder, folder: Path
) -> None:
    assert ModelFolder.open(folder, name="another").identity == tiny_model.identity
    weights = (folder / "model.safetensors").read_bytes()
    for change in (
        lambda: edit(folder / "config.json", rms_norm_eps=1e-6),
        lambda: edit(folder / "tokenizer.json", version="1.1"),
        lambda: (folder / "model.safetensors").write_bytes(weights + b"\0"),
    ):
        before = ModelFolder.open(folder).identity
        change()
        assert ModelFolder.open(folder).identity != before


def test_the_tiny_model_depends_on_its_seed_alone(tiny_model: ModelFolder, tmp_path: Path) -> None:
    again, other = make_tiny_llama(tmp_path / "a"), make_tiny_llama(tmp_path / "b", seed=1)
    files = sorted(p.name for p in tiny_model.path.iterdir())
    assert all((again.path / f).read_bytes() == (tiny_model.path / f).read_bytes() for f in files)
    assert (other.path / "model.safetensors").read_bytes() != (tiny_model.path / "model.safetensors").read_bytes()


def test_memory_counts_weights_pool_host_blocks_and_logits(tmp_path: Path) -> None:
    """By hand: 2 layers, 8 heads and 4 KV heads of 32, hidden 256, inner 688, vocabulary 1,024, tied.

    The lean decoder reads embeddings from its packed output layer; transformers has both.
    """
    model = make_tiny_llama(tmp_path / "lean", num_hidden_layers=2, tie_word_embeddings=True)
    unknown = make_tiny_llama(tmp_path / "other", num_hidden_layers=2, tie_word_embeddings=True, new_setting=1)
    attention = 256 * 256 * 2 + 256 * 128 * 2
    parameters = 1024 * 256 + 2 * (attention + 3 * 256 * 688 + 2 * 256) + 256
    output_layer = 1024 * 256
    kv_numbers = 2 * 2 * 4 * 32 * (100 + 30) * 16
    config = EngineConfig(
        blocks=100, block_size_tokens=16, host_blocks=30, slots=8, step_token_budget=24, max_model_len=512
    )
    logits = 24 * 1024 * 8 + 1024 * 32
    for dtype, size in ((DType.FLOAT32, 4), (DType.BFLOAT16, 2)):
        expected = (parameters + kv_numbers) * size + logits + PROCESS_BYTES
        assert memory_bytes(model, config.model_copy(update={"dtype": dtype})) == expected
        converted = parameters if dtype is DType.BFLOAT16 else 0  # the file is in float32
        expected += (output_layer + converted) * size + TRANSFORMERS_BYTES
        assert memory_bytes(unknown, config.model_copy(update={"dtype": dtype})) == expected


def test_memory_of_a_model_with_odd_settings_is_refused(folder: Path) -> None:
    for odd in (None, 0, "8"):
        edit(folder / "config.json", num_attention_heads=odd)
        with pytest.raises(ModelFolderError, match="num_attention_heads"):
            memory_bytes(ModelFolder.open(folder), EngineConfig())


def test_memory_of_weights_that_cannot_be_read_is_refused(folder: Path) -> None:
    model = ModelFolder.open(folder)
    for content in (b"", b"1234567", b"\x05\0\0\0\0\0\0\0[1,2]", b"\xff" * 64):
        (folder / "model.safetensors").write_bytes(content)
        with pytest.raises(ModelFolderError, match=r"model\.safetensors"):
            memory_bytes(model, EngineConfig())
