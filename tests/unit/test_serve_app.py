"""What Serve's config file gives the application's builder: read whole, refused by the key that is wrong."""

from __future__ import annotations

import inspect
import itertools
from pathlib import Path
from typing import Any

import pytest
from ray.serve import Application
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary
from ray.serve.schema import ServeDeploySchema

from cluster.model import ModelFolder
from deployments.app import build
from deployments.serve_app import ServeArgs, build_app
from deployments.settings import Profile, ServeAccess, UsageError

MODEL = {"model": "/models/tiny", "served_name": "tiny"}


def args(**changes: Any) -> dict[str, Any]:
    return {"profile": MODEL, "secret_path": "/run/forebay/secret"} | changes


def test_arguments_make_the_instance() -> None:
    scaled = MODEL | {"replicas": 1, "scale": {"max": 3}}
    told = ServeArgs.model_validate(args(profile=scaled, dashboard_url="http://head:8265", token_path="/run/token"))
    instance = told.instance
    assert instance.profile == Profile.model_validate(scaled)
    assert (instance.secret_path, instance.model_folders) == (Path("/run/forebay/secret"), (Path("/models/tiny"),))
    assert instance.serve == ServeAccess(url="http://head:8265", token_path=Path("/run/token"))
    assert ServeArgs.model_validate(args()).instance.serve is None


def test_a_model_is_known_by_the_folder_that_a_link_leads_to(tmp_path: Path) -> None:
    (tmp_path / "llama-3").mkdir()
    (tmp_path / "current").symlink_to("llama-3")
    told = ServeArgs.model_validate(args(profile={"model": str(tmp_path / "current")}))
    assert told.instance.model_folders == (tmp_path / "llama-3",)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"secret_path": "/s"}, "args: profile: Field required"),
        (args(secrets="x"), "args: secrets: Extra inputs are not permitted"),
        (args(secret_path="secret"), "secret_path: secret must be a whole path"),
        (args(token_path="token"), "token_path: token must be a whole path"),
        (args(profile={"served_name": "x"}), "profile.models[0].model must name a folder"),
        (args(profile=MODEL | {"replica": 3}), "args: profile.replica: Extra inputs are not permitted"),
        (args(profile=MODEL | {"router": {"prot": 1}}), "args: profile.router.prot: Extra inputs are not permitted"),
        (
            args(profile={"models": [MODEL, {"model": "/models/b", "engine": {"slots": -1}}]}),
            "args: profile.models.1.engine.slots: Input should be greater than 0",
        ),
        (args(profile=MODEL | {"scale": {"max": 3}}), "dashboard_url must be given: profile.models[0] has scale"),
        (args(log_level="LOUD"), "args: log_level: Input should be 'DEBUG', 'INFO', 'WARNING' or 'ERROR'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_by_the_key(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as refused:
        build_app(given)
    assert said in str(refused.value)


def test_serve_can_call_the_builder() -> None:
    """It wants a function of one parameter, and hands it the file's arguments as they are."""
    assert inspect.isfunction(build_app)
    with pytest.raises(UsageError, match="args: profile: Field required"):
        call_user_app_builder_with_args_if_necessary(build_app, {"secret_path": "/s"})


def test_the_example_in_its_docstring_is_a_file_that_serve_takes() -> None:
    import yaml

    import deployments.serve_app as module

    assert module.__doc__ is not None
    _, _, after = module.__doc__.partition("on Kubernetes:\n")
    text, _, _ = after.partition("Owns:")
    config = ServeDeploySchema.model_validate(yaml.safe_load(text.replace("{...}", "{}")))
    (application,) = config.applications
    assert (config.proxy_location, application.external_scaler_enabled) == ("Disabled", True)
    assert set(application.args) <= set(ServeArgs.model_fields)


def test_routers_and_replicas_and_controllers_ask_for_the_resources_that_the_profile_names(
    tiny_model: ModelFolder,
) -> None:
    profile = {
        "model": str(tiny_model.path),
        "resource": "forebay_model_tiny",
        "routers": 3,
        "router_resource": "forebay_router",
        "controller_resource": "forebay_controller",
        "control": {"standby": True},
    }
    application = build(ServeArgs.model_validate(args(profile=profile)).instance)
    router = application._bound_deployment
    found, asked = [router], {}
    for deployment in found:  # as it grows
        asked[deployment.name] = (deployment.ray_actor_options or {})["resources"]
        lists = [argument for argument in deployment.init_args if isinstance(argument, list)]
        found += [bound._bound_deployment for bound in itertools.chain(*lists) if isinstance(bound, Application)]
    assert asked == {
        "Router": {"forebay_router": 1},
        "Replica-0-tiny-llama": {"forebay_model_tiny": 1},
        "Controller": {"forebay_controller": 1},
        "Standby": {"forebay_controller": 1},
    }
    # There is no second place for a router that comes before the old one goes.
    assert router._deployment_config.max_surge_percent == 0


def test_routers_that_have_pods_of_their_own_all_listen_on_one_port() -> None:
    profile = Profile.model_validate(MODEL | {"routers": 3, "router": {"port": 8000}})
    assert list(profile.ports) == [8000, 8001, 8002]
    assert list(profile.model_copy(update={"router_resource": "forebay_router"}).ports) == [8000]
