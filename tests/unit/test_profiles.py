"""Profiles: the ones that ship, `engine: vllm` as the only difference, and what cannot be, refused in one clear line."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import yaml

from cluster.config import EngineConfig, EngineKind, RouterConfig
from cluster.engine.memory import VLLM_PROCESSES_BYTES, memory_bytes
from cluster.engine.vllm import version
from cluster.model import ModelFolder
from deployments.app import replica_deployments
from deployments.checks import check_gpus, find_models, free_ports, preflight
from deployments.engines import check_installed, replica_options
from deployments.instances import InstanceState
from deployments.move_source import _FRAME_ROOM_BYTES
from deployments.settings import PROFILES, Environment, Instance, ModelConfig, Profile, UsageError, load_profile
from ops.sim.step_time import Prefill, a100, step_ms
from tests.tiny_model import make_tiny_llama

README = Path(__file__).parents[2] / "README.md"
TIMES = {"a100-llama3-8b": a100().models["llama-3-8b"], "a100-llama2-7b": a100().models["llama-2-7b"]}
SHIPPED = sorted(path.stem for path in PROFILES.glob("*.yaml"))
VLLM_ON_A100 = {"engine": {"kind": "vllm"}, "gpus_per_replica": 1, "accelerator_type": "A100"}


def written(folder: Path, content: object) -> str:
    file = folder / "p.yaml"
    file.write_text(yaml.safe_dump(content))
    return str(file)


def the_model(profile: Profile) -> ModelConfig:
    (model,) = profile.models
    return model


@pytest.mark.parametrize("name", SHIPPED)
def test_every_profile_that_ships_loads(name: str) -> None:
    model = the_model(load_profile(name, {}))
    assert model.engine.kind is (EngineKind.EMBEDDED if name == "local" else EngineKind.VLLM)
    assert replica_options(model) == ({"num_gpus": 1, "accelerator_type": "A100"} if name.startswith("a100") else {})


@pytest.mark.parametrize("name", SHIPPED)
def test_a_block_of_keys_and_values_fits_in_a_message_of_a_move_and_that_in_a_frame(name: str) -> None:
    profile = load_profile(name, {})
    engine, transport = the_model(profile).engine, profile.transport
    # SmolLM2-135M: keys and values of 30 layers, 3 heads each, 64 wide, 4 bytes.
    token_bytes = TIMES[name].kv_bytes_per_token if name in TIMES else 2 * 30 * 3 * 64 * 4
    block_bytes = token_bytes * engine.block_size_tokens
    assert block_bytes + _FRAME_ROOM_BYTES <= transport.max_frame_bytes
    assert transport.move_chunk_bytes + _FRAME_ROOM_BYTES <= transport.max_frame_bytes
    if name in TIMES:  # a move is sent while its source decodes: of a context of 1,024 tokens in 8 steps at most
        assert transport.move_chunk_bytes * 8 >= token_bytes * 1024
    if engine.kind is EngineKind.EMBEDDED or name in TIMES:
        assert block_bytes <= transport.move_chunk_bytes


@pytest.mark.parametrize("name", [name for name in SHIPPED if name.startswith("a100")])
def test_what_the_controller_reckons_with_on_a100s_follows_from_their_step_times(name: str) -> None:
    profile, times = load_profile(name, {}), TIMES[name]
    engine, control = the_model(profile).engine, profile.control
    budget, context = engine.step_token_budget, 1024
    token_ms = step_ms(times, [Prefill(budget)], []) / budget
    assert control.recompute_token_s * 1000 == pytest.approx(token_ms, rel=0.05)
    assert control.move_block_s == pytest.approx(engine.block_size_tokens * control.recompute_token_s, rel=0.05)
    one_ms, full_ms = (step_ms(times, [], [context] * batch) for batch in (1, engine.slots))
    each_ms = (full_ms - one_ms) / (engine.slots - 1)
    assert control.step_fixed_part == pytest.approx((one_ms - each_ms) / full_ms, abs=0.01)
    network_s = times.kv_bytes_per_token * engine.block_size_tokens / a100().network_bytes_per_s
    assert f"({network_s:.4f} with one" in (PROFILES / f"{name}.yaml").read_text()


def test_the_engine_is_the_only_difference(tmp_path: Path) -> None:
    """A word for the whole section, or a key beside the others; overrides reach both."""
    local = yaml.safe_load((PROFILES / "local.yaml").read_text())
    word = load_profile(written(tmp_path, local | {"engine": "vllm"}), {"engine.dtype": "bfloat16"})
    assert the_model(word).engine == EngineConfig.model_validate({"kind": "vllm", "dtype": "bfloat16"})
    key = load_profile(written(tmp_path, local | {"engine": local["engine"] | {"kind": "vllm"}}), {})
    assert the_model(key).engine == EngineConfig.model_validate(local["engine"] | {"kind": "vllm"})
    without = key.model_dump(exclude={"models": {0: {"engine"}}})
    assert without == load_profile("local", {}).model_dump(exclude={"models": {0: {"engine"}}})


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


MODELS = [{"model": "/models/a", "replicas": 1}, {"model": "/models/b", "engine": {"slots": 4}}]


def test_a_profile_of_one_model_is_the_short_form_of_a_list_of_one(tmp_path: Path) -> None:
    of_model = {"model": "/models/a", "served_name": "a", "aliases": ["b"], "replicas": 3, "engine": {"slots": 4}}
    rest = {"router": {"port": 1}}
    short, long = of_model | rest, {"models": [of_model]} | rest
    assert load_profile(written(tmp_path, short), {}) == load_profile(written(tmp_path, long), {})
    assert Profile() == Profile(models=(ModelConfig(),))


def test_each_model_of_a_profile_has_settings_of_its_own(tmp_path: Path) -> None:
    first, second = load_profile(written(tmp_path, {"models": MODELS}), {"router.port": 9}).models
    assert (first.model, first.replicas, first.engine) == (Path("/models/a"), 1, EngineConfig())
    assert (second.model, second.replicas, second.engine.slots) == (Path("/models/b"), 2, 4)
    (word,) = load_profile(written(tmp_path, {"models": [{"engine": "vllm"}]}), {}).models
    assert word.engine.kind is EngineKind.VLLM


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"models": MODELS, "replicas": 2, "engine": {}}, "models and engine, replicas are both given: move"),
        ({"models": MODELS, "aliases": ["x"]}, "models and aliases are both given"),
        ({"models": []}, "models must name at least one"),
        ({"models": {}}, "models: Input should be a valid tuple"),
        ({"models": [{"replicas": 0}]}, "models.0.replicas: Input should be greater than 0"),
        ({"models": [{}, {"engine": {"kind": "vlm"}}]}, "models.1.engine.kind: Input should be"),
        ({"models": [{}, {"router": {}}]}, "models.1.router: Extra inputs are not permitted"),
        ({"models": [{"served_name": "a"}, {"served_name": "a"}]}, "'a' names two"),
        ({"models": [{"served_name": "a"}, {"served_name": "b", "aliases": ["a"]}]}, "'a' names two"),
        ({"models": [{"served_name": "a", "aliases": ["x", "x"]}]}, "'x' names two"),
        ({"models": [{"served_name": ""}]}, "models.0.served_name: String should have at least 1 character"),
    ],
)
def test_a_list_of_models_that_cannot_work_is_refused(content: object, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refused:
        load_profile(written(tmp_path, content), {"router.port": 9})
    assert said in str(refused.value)
    assert "more)" not in str(refused.value)


@pytest.mark.parametrize("key", ["replicas", "engine.dtype", "model"])
def test_a_command_s_option_for_one_model_is_refused_where_models_are_listed(key: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"lists its models: change {key} in their entries"):
        load_profile(written(tmp_path, {"models": MODELS}), {key: 1})


def test_models_of_an_instance_are_found_by_their_names_after_a_trip_through_json(
    tiny_model: ModelFolder, other_model: ModelFolder, tmp_path: Path
) -> None:
    """As its processes are told of them."""
    profile = Profile(models=(ModelConfig(served_name="first"), ModelConfig(aliases=("small",))))
    sent = Instance(profile=profile, model_folders=(tiny_model.path, other_model.path), secret_path=tmp_path)
    models = Instance.model_validate(sent.model_dump(mode="json")).models()
    assert list(models) == ["first", "tiny-other"]
    assert models["first"].folder.identity == tiny_model.identity
    assert models["tiny-other"].folder.identity == other_model.identity
    assert models["tiny-other"].names == ("tiny-other", "small")


def test_a_replica_needs_the_folder_of_its_own_model_alone(tiny_model: ModelFolder, tmp_path: Path) -> None:
    profile = Profile(models=(ModelConfig(served_name="elsewhere"), ModelConfig()))
    instance = Instance(profile=profile, model_folders=(tmp_path / "absent", tiny_model.path), secret_path=tmp_path)
    assert instance.model(tiny_model.name).folder.identity == tiny_model.identity
    for name, said in (("elsewhere", "absent is not a folder"), ("unheard-of", "no model 'unheard-of'")):
        with pytest.raises(UsageError, match=said):
            instance.model(name)


def test_two_folders_of_one_name_are_told_to_be_named(tiny_model: ModelFolder, tmp_path: Path) -> None:
    again = make_tiny_llama(tmp_path / tiny_model.path.name, seed=3)
    profile = Profile(models=(ModelConfig(model=tiny_model.path), ModelConfig(model=again.path)))
    with pytest.raises(UsageError, match="'tiny-llama' names two: give them a served_name"):
        find_models(profile, Environment(cache_dir=tmp_path))


@pytest.mark.parametrize("kind", list(EngineKind))
def test_a_context_longer_than_the_model_s_is_refused_before_anything_starts(
    kind: EngineKind, tiny_model: ModelFolder, tmp_path: Path
) -> None:
    longest = tiny_model.max_position_embeddings

    def profile(length: int) -> Profile:
        engine = EngineConfig(kind=kind, max_model_len=length)
        return Profile(models=(ModelConfig(model=tiny_model.path, engine=engine),))

    (model,) = find_models(profile(longest), Environment(cache_dir=tmp_path))
    assert model.config.engine.max_model_len == longest
    with pytest.raises(UsageError, match=rf"made for {longest} tokens: lower max_model_len \({longest + 1}\) to that"):
        find_models(profile(longest + 1), Environment(cache_dir=tmp_path))


def test_deployments_of_replicas_are_named_after_their_models_safely_and_apart() -> None:
    names = replica_deployments(["SmolLM2-135M", "org/model:v1.5", "org-model:v1-5", "größe 水"])
    assert names == (
        "Replica-0-SmolLM2-135M",
        "Replica-1-org-model-v1-5",
        "Replica-2-org-model-v1-5",
        "Replica-3-gr-e-",
    )


def test_memory_of_all_models_on_the_cpu_is_asked_for_together(
    tiny_model: ModelFolder, other_model: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = EngineConfig(blocks=256, host_blocks=0)
    first = ModelConfig(model=tiny_model.path, engine=engine, replicas=2)
    second = ModelConfig(model=other_model.path, engine=engine, replicas=1)
    need = 2 * memory_bytes(tiny_model, engine) + memory_bytes(other_model, engine) + 2**30
    profile = Profile(models=(first, second), router=RouterConfig(port=0))
    models = find_models(profile, Environment(cache_dir=tmp_path))
    for have, fits in ((need, True), (need - 1, False)):
        monkeypatch.setattr(psutil, "virtual_memory", lambda have=have: SimpleNamespace(available=have))
        if fits:
            preflight(profile, models, Environment(cache_dir=tmp_path))
        else:
            with pytest.raises(UsageError, match=r"the replicas \(2 of tiny-llama, 1 of tiny-other\) need about"):
                preflight(profile, models, Environment(cache_dir=tmp_path))


def test_port_of_an_instance_of_one_s_own_is_told_with_how_to_reach_and_to_end_it(
    tiny_model: ModelFolder, tmp_path: Path
) -> None:
    environment = Environment(cache_dir=tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        profile = Profile(models=(ModelConfig(model=tiny_model.path),), router=RouterConfig(port=port))
        models = find_models(profile, environment)
        with pytest.raises(UsageError, match=rf"^port {port} is in use on 127\.0\.0\.1; choose another"):
            preflight(profile, models, environment)
        url = f"http://127.0.0.1:{port}"
        InstanceState(url, os.getpid(), ("a", "b"), "").write(environment.run_dir / "1.json")
        said = rf"by your instance that serves a, b at {url} \(`kill -INT {os.getpid()}` ends it\); choose another"
        with pytest.raises(UsageError, match=said):
            preflight(profile, models, environment)


def test_free_ports_are_free_in_a_row_and_none_that_the_kernel_gives_out_meanwhile() -> None:
    lowest_given_out = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    first = free_ports("127.0.0.1", 3)
    assert first + 3 <= lowest_given_out
    with contextlib.ExitStack() as stack:
        for port in range(first, first + 3):
            stack.enter_context(socket.create_server(("127.0.0.1", port)))


def test_gpus_are_counted_over_all_models() -> None:
    on_gpu = ModelConfig(gpus_per_replica=1, replicas=2)
    profile = Profile(models=(on_gpu, on_gpu, ModelConfig()))
    check_gpus(profile, {"GPU": 4.0})
    with pytest.raises(UsageError, match="4 replicas need 4, Ray finds 3 here"):
        check_gpus(profile, {"GPU": 3.0})


def test_the_list_of_models_that_the_readme_shows_is_one() -> None:
    (shown,) = re.findall(r"```yaml\n(models:\n.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    profile = Profile.model_validate(yaml.safe_load(shown))
    assert [(m.served_name, m.aliases, m.replicas) for m in profile.models] == [
        ("llama-3-8b", ("default",), 2),
        (None, (), 1),
    ]


def test_gpus_take_blocks_of_any_size() -> None:
    profile = Profile.model_validate(VLLM_ON_A100 | {"engine": {"kind": "vllm", "block_size_tokens": 16}})
    assert the_model(profile).engine.block_size_tokens == 16


def test_a_model_folder_that_is_not_there_is_told_with_what_to_set(tmp_path: Path) -> None:
    profile = Profile(models=(ModelConfig(model=tmp_path / "absent"),))
    with pytest.raises(
        UsageError, match=r"absent is not a folder; name the model's: MODEL=… \(--model\), or model in the"
    ):
        find_models(profile, Environment(cache_dir=tmp_path))


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
