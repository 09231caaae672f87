"""What a profile says of scaling, and what of it cannot be."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from pydantic import ValidationError

from cluster.config import EngineConfig, ScaleConfig
from cluster.engine.memory import memory_bytes
from cluster.model import ModelFolder
from deployments.app import build
from deployments.checks import check_gpus, preflight
from deployments.settings import (
    Environment,
    Instance,
    ModelConfig,
    Profile,
    ServeAccess,
    ServedModel,
    UsageError,
    load_profile,
)

SCALE = ScaleConfig(min=0, max=4)


def test_without_scale_there_are_as_many_as_replicas_says() -> None:
    assert (ModelConfig().scale, ModelConfig(replicas=3).replicas_max) == (None, 3)
    assert ModelConfig(replicas=1, scale=SCALE).replicas_max == 4


def test_a_profile_of_one_model_has_scale_at_its_top_level(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("replicas: 1\nscale: {max: 3}\n")
    (model,) = load_profile(str(tmp_path / "p.yaml"), {}).models
    assert model.scale == ScaleConfig(min=1, max=3)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"replicas": 5, "scale": {"max": 4}}, "replicas (5) must be between scale.min (1) and scale.max (4)"),
        ({"replicas": 2, "scale": {"min": 3, "max": 4}}, "replicas (2) must be between scale.min (3)"),
        ({"replicas": 1, "scale": {"max": 0}}, "greater than 0"),
        ({"replicas": 1, "scale": {"max": 2, "maximum": 2}}, "Extra inputs are not permitted"),
    ],
)
def test_what_cannot_be_is_said(fields: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError) as error:
        Profile.model_validate(fields)
    assert said in str(error.value)


def test_there_must_be_gpus_for_as_many_as_there_may_be() -> None:
    profile = Profile(models=(ModelConfig(gpus_per_replica=1, replicas=1, scale=SCALE),))
    check_gpus(profile, {"GPU": 4.0})
    with pytest.raises(UsageError, match=r"4 replicas need 4, Ray finds 3 here; lower scale\.max"):
        check_gpus(profile, {"GPU": 3.0})


def test_there_must_be_memory_for_as_many_as_there_may_be(
    tiny_model: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelConfig(model=tiny_model.path, replicas=1, scale=SCALE, engine=EngineConfig(max_model_len=64))
    enough = (1 << 30) + 4 * memory_bytes(tiny_model, config.engine)
    profile = Profile(models=(config,))
    for available, fits in ((enough, True), (enough - 1, False)):
        monkeypatch.setattr(psutil, "virtual_memory", lambda available=available: SimpleNamespace(available=available))
        if fits:
            preflight(profile, [ServedModel(config, tiny_model)], Environment())
        else:
            with pytest.raises(UsageError, match=r"the replicas \(4 of .*; lower scale\.max"):
                preflight(profile, [ServedModel(config, tiny_model)], Environment())


def test_the_controller_is_told_what_to_scale_and_where_serve_has_it(tiny_model: ModelFolder, tmp_path: Path) -> None:
    config = ModelConfig(model=tiny_model.path, served_name="of a/b", replicas=1, scale=SCALE)
    (tmp_path / "secret").write_text("s" * 64)
    instance = Instance(
        profile=Profile(models=(config,)),
        model_folders=(tiny_model.path,),
        secret_path=tmp_path / "secret",
        serve=ServeAccess(url="http://127.0.0.1:8265", token_path=tmp_path / "token"),
    )
    router: Any = build(instance)._bound_deployment
    _, (controller,), (replica,) = router.init_args
    _, application, scaled, _ = controller._bound_deployment.init_args
    assert application == "forebay"
    assert scaled == [{"model": "of a/b", "deployment": "Replica-0-of-a-b", "scale": SCALE.model_dump(mode="json")}]
    assert replica._bound_deployment.name == "Replica-0-of-a-b"
    assert replica._bound_deployment.num_replicas == 1


@pytest.mark.parametrize(("kept", "begins_with"), [(None, 2), (0, 1), (1, 1), (3, 3), (4, 4), (9, 4)])
@pytest.mark.parametrize("scales", [True, False])
def test_an_upgrade_keeps_as_many_replicas_as_the_load_has_made_within_the_bounds_and_else_what_the_profile_says(
    tiny_model: ModelFolder, tmp_path: Path, kept: int | None, begins_with: int, scales: bool
) -> None:
    config = ModelConfig(model=tiny_model.path, served_name="m", replicas=2, scale=SCALE if scales else None)
    (tmp_path / "secret").write_text("s" * 64)
    instance = Instance(
        profile=Profile(models=(config,)), model_folders=(tiny_model.path,), secret_path=tmp_path / "secret"
    )
    router: Any = build(instance, {} if kept is None else {"Replica-0-m": kept})._bound_deployment
    (replica,) = router.init_args[-1]
    assert replica._bound_deployment.num_replicas == (begins_with if scales else 2)
