"""Profiles: the ones that ship, `engine: vllm` as the only difference, and what cannot be, refused in one clear line."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from cluster.config import EngineConfig, EngineKind
from cluster.engine.memory import VLLM_PROCESSES_BYTES, memory_bytes
from cluster.engine.vllm import version
from deployments.engines import check_installed, gpu_options
from deployments.settings import PROFILES, Environment, Profile, UsageError, load_profile
from deployments.up import check_gpus, open_model
from tests.tiny_model import make_tiny_llama

SHIPPED = sorted(path.stem for path in PROFILES.glob("*.yaml"))
VLLM_ON_A100 = {"engine": {"kind": "vllm"}, "gpus_per_replica": 1, "accelerator_type": "A100"}


def written(folder: Path, content: object) -> str:
    file = folder / "p.yaml"
    file.write_text(yaml.safe_dump(content))
    return str(file)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_profile_that_ships_loads(name: str) -> None:
    profile = load_profile(name, {})
    assert profile.engine.kind is (EngineKind.EMBEDDED if name == "local" else EngineKind.VLLM)
    assert gpu_options(profile) == ({"num_gpus": 1, "accelerator_type": "A100"} if name.startswith("a100") else {})


def test_the_engine_is_the_only_difference(tmp_path: Path) -> None:
    """A word for the whole section, or a key beside the others; overrides reach both."""
    local = yaml.safe_load((PROFILES / "local.yaml").read_text())
    word = load_profile(written(tmp_path, local | {"engine": "vllm"}), {"engine.dtype": "bfloat16"})
    assert word.engine == EngineConfig.model_validate({"kind": "vllm", "dtype": "bfloat16"})
    key = load_profile(written(tmp_path, local | {"engine": local["engine"] | {"kind": "vllm"}}), {})
    assert key.engine == EngineConfig.model_validate(local["engine"] | {"kind": "vllm"})
    assert key.model_copy(update={"engine": None}) == load_profile("local", {}).model_copy(update={"engine": None})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"engine": "vlm"}, "engine.kind: Input should be 'embedded' or 'vllm'"),
        ({"engine": {"vllm": {"eager": True}}}, "engine: vllm: kind 'embedded' does not read"),
        ({"engine": {"kind": "vllm", "mode": "static"}}, "mode 'static': vLLM batches continuously only"),
        ({"engine": ["vllm"]}, "engine must hold a mapping"),
        ({"engine": {"kind": "vllm", "block_size_tokens": 16}}, "must be a multiple of 32"),
        ({"engine": {"kind": "vllm", "vllm": {"gpu_memory_utilization": 0.9}}}, "set gpus_per_replica to 1"),
        ({"accelerator_type": "A100"}, "says nothing with gpus_per_replica 0"),
        ({"gpus_per_replica": 2}, "gpus_per_replica: Input should be less than or equal to 1"),
        ({"model": "models/llama"}, "model: models/llama must be a whole path"),
    ],
)
def test_a_profile_that_cannot_work_is_refused(content: object, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refused:
        load_profile(written(tmp_path, content), {"engine.dtype": "float32"})
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert "more)" not in str(refused.value), "what follows from the one error is told as another"


def test_gpus_take_blocks_of_any_size() -> None:
    profile = Profile.model_validate(VLLM_ON_A100 | {"engine": {"kind": "vllm", "block_size_tokens": 16}})
    assert profile.engine.block_size_tokens == 16


def test_a_model_folder_that_is_not_there_is_told_with_what_to_set(tmp_path: Path) -> None:
    profile = Profile(model=tmp_path / "absent")
    with pytest.raises(
        UsageError, match=r"absent is not a folder; name the model's: MODEL=… \(--model\), or model in the"
    ):
        open_model(profile, Environment(cache_dir=tmp_path))


def test_gpus_that_the_machine_lacks_are_told_before_anything_waits_for_them() -> None:
    two = Profile.model_validate(VLLM_ON_A100)
    check_gpus(Profile(), {"CPU": 2.0})
    check_gpus(two, {"GPU": 2.0, "accelerator_type:A100": 1.0})
    with pytest.raises(UsageError, match="2 replicas need 2, Ray finds 1 here; lower REPLICAS"):
        check_gpus(two, {"GPU": 1.0, "accelerator_type:A100": 1.0})
    with pytest.raises(UsageError, match="no A100 here, Ray finds H100; change accelerator_type"):
        check_gpus(two, {"GPU": 8.0, "accelerator_type:H100": 1.0})


def test_where_vllm_is_not_installed_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "installed", lambda: None)
    check_installed(EngineConfig())
    with pytest.raises(UsageError, match=r"`pip install vllm==0\.32\.0`.*`make serve-vllm`"):
        check_installed(EngineConfig.model_validate({"kind": "vllm"}))


def test_memory_of_vllm_on_a_cpu_counts_weights_blocks_and_logits(tmp_path: Path) -> None:
    """By hand: 2 layers, 8 heads and 4 KV heads of 32, hidden 256, inner 688, vocabulary 1,024."""
    attention = 256 * 256 * 2 + 256 * 128 * 2
    layers = 2 * (attention + 3 * 256 * 688 + 2 * 256)
    kv_numbers = 2 * 2 * 4 * 32 * (100 + 1) * 32
    for tied in (True, False):
        model = make_tiny_llama(tmp_path / str(tied), num_hidden_layers=2, tie_word_embeddings=tied)
        numbers = 2 * 1024 * 256 + layers + 256  # embedding and output layer, of its own or packed
        for dtype, size in (("float32", 4), ("bfloat16", 2)):
            config = EngineConfig.model_validate({"kind": "vllm", "blocks": 100, "slots": 8, "dtype": dtype})
            expected = (numbers + kv_numbers) * size + 8 * 1024 * 8 + VLLM_PROCESSES_BYTES
            assert memory_bytes(model, config) == expected
