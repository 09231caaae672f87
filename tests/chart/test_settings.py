"""What the chart has Serve told is held to what production reads, and to the pods that the chart makes for it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from cluster.config import Auth
from deployments.engines import one_of, replica_options
from deployments.last_node import NOTICE_S
from deployments.serve_app import ServeArgs
from tests.chart.conftest import Manifest, groups, ray_cluster, rendered, serve_config, template


def told(manifests: list[Manifest]) -> ServeArgs:
    (application,) = serve_config(manifests)["applications"]
    return ServeArgs.model_validate(application["args"])


def offers(group: Manifest) -> dict[str, float]:
    """What a Ray node of a group has, as `ray start` of these parameters has it."""
    parameters = group["rayStartParams"]
    (resources,) = shlex.split(parameters.get("resources", "'{}'"))
    custom: dict[str, float] = json.loads(resources)
    return custom | {"CPU": float(parameters["num-cpus"]), "GPU": float(parameters["num-gpus"])}


def fits(asked: dict[str, object], group: Manifest) -> bool:
    wanted = dict(asked.get("resources", {}))  # type: ignore[call-overload]
    wanted["GPU"] = asked.get("num_gpus", 0)
    if "accelerator_type" in asked:
        wanted[f"accelerator_type:{asked['accelerator_type']}"] = 0.001
    have = offers(group)
    return all(have.get(name, 0) >= count for name, count in wanted.items())


def test_serve_takes_the_file_and_production_the_arguments(manifests: list[Manifest]) -> None:
    config = ServeDeploySchema.model_validate(serve_config(manifests))
    assert config.proxy_location == "Disabled"
    (application,) = config.applications
    assert (application.name, application.route_prefix) == ("forebay", None)
    assert application.import_path == "deployments.serve_app:build_app"
    scales = any(model.scale is not None for model in told(manifests).profile.models)
    assert application.external_scaler_enabled is scales


def test_each_actor_has_a_place_in_one_group_alone_and_a_pod_for_each(manifests: list[Manifest]) -> None:
    profile, made = told(manifests).profile, groups(manifests)
    where = [(one_of(profile.router_resource), "router", profile.routers)]
    home = "controller" if "controller" in made else "head"
    where.append((one_of(profile.controller_resource), home, 2 if profile.control.standby else 1))
    where += [(replica_options(m), "model", m.replicas) for m in profile.models]
    taken: list[str] = []
    for asked, component, count in where:
        found = [name for name, group in made.items() if fits(asked, group)]
        labels = {made[name]["template"]["metadata"]["labels"]["app.kubernetes.io/component"] for name in found}
        assert labels == {component}, asked
        assert sum(made[name].get("replicas", 1) for name in found) >= count, asked
        (resource,) = asked["resources"]
        assert all(offers(made[name])[resource] == 1 for name in found), "one pod has room for one"
        taken += found
    assert sorted(taken) == sorted({*taken, *made} - {"head"} | ({home} & {"head"})), (
        "each group is for one kind of actor"
    )


def test_there_is_room_for_as_many_replicas_as_scale_may_ask_for(manifests: list[Manifest]) -> None:
    profile, made = told(manifests).profile, groups(manifests)
    grows = ray_cluster(manifests).get("enableInTreeAutoscaling", False)
    for model in profile.models:
        mine = [group for group in made.values() if fits(replica_options(model), group)]
        assert sum(group["maxReplicas"] for group in mine) == model.replicas_max
        assert grows or sum(group["replicas"] for group in mine) == model.replicas_max
        fewest = model.scale.min if model.scale is not None and grows else model.replicas_max
        assert sum(group["minReplicas"] for group in mine) == fewest
        assert all(group["minReplicas"] <= group["replicas"] <= group["maxReplicas"] for group in mine)


def test_no_group_takes_work_that_is_not_forebays(manifests: list[Manifest]) -> None:
    assert all(offers(group)["CPU"] == 0 for group in groups(manifests).values())


def test_what_the_settings_name_is_mounted_where_it_is_read(manifests: list[Manifest]) -> None:
    args, made = told(manifests), groups(manifests)
    everywhere = [args.secret_path, *(m.model for m in args.profile.models), *filter(None, [args.token_path])]
    router = args.profile.router
    of_routers = [router.keys_file, router.keys_pepper_file] if router.auth is Auth.KEYS else []
    for name, group in made.items():
        (container,) = group["template"]["spec"]["containers"]
        mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
        for path in everywhere + (of_routers if name == "router" else []):
            assert any(str(path).startswith(f"{mount}/") for mount in mounts), (name, path)
        if name != "router":
            assert "/run/forebay/keys" not in mounts, "clients' keys are the routers' alone"


def test_routers_listen_where_the_service_leads(manifests: list[Manifest]) -> None:
    profile = told(manifests).profile
    (container,) = groups(manifests)["router"]["template"]["spec"]["containers"]
    (port,) = [p["containerPort"] for p in container["ports"] if p["name"] == "http"]
    assert (profile.router.host, list(profile.ports)) == ("0.0.0.0", [port])
    assert profile.listen == "node", "links go from pod to pod"


def test_a_pod_is_given_longer_to_end_than_its_work_has(manifests: list[Manifest]) -> None:
    profile = told(manifests).profile
    for name, group in groups(manifests).items():
        spec = group["template"]["spec"]
        (drain,) = [
            float(e["value"])
            for e in spec["containers"][0]["env"]
            if e["name"] == "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
        ]
        assert spec["terminationGracePeriodSeconds"] > drain
        # Ten of deployments/app.py: what Serve gives it.
        assert name == "head" or drain >= profile.health.drain_timeout_s + 10


def test_a_head_outlasts_the_pods_that_are_told_to_end_with_it(manifests: list[Manifest]) -> None:
    made = groups(manifests)
    spec = made.pop("head")["template"]["spec"]
    *command, most_s = spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert command == ["python", "-m", "deployments.last_node"]
    drains = [
        float(entry["value"])
        for group in made.values()
        for entry in group["template"]["spec"]["containers"][0]["env"]
        if entry["name"] == "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
    ]
    assert max(drains) + NOTICE_S <= float(most_s) < spec["terminationGracePeriodSeconds"] - NOTICE_S


def test_whole_numbers_stay_whole_however_large(tmp_path: Path) -> None:
    """Of a file, which Helm 3 reads as floating-point numbers, and writes in YAML as 1e+06: a word to Python."""
    more = tmp_path / "more.yaml"
    more.write_text(f"profile: {{router: {{prefix_entries: 1000000}}, transport: {{max_frame_bytes: {2**31 + 1}}}}}")
    profile = told(list(yaml.safe_load_all(template("8xa100", values_file=more).stdout))).profile
    assert (profile.router.prefix_entries, profile.transport.max_frame_bytes) == (1_000_000, 2**31 + 1)


@pytest.mark.parametrize("seconds", [1800, 1801, 3600])
def test_one_value_sets_how_long_models_may_load(seconds: int) -> None:
    manifests = rendered("one-node", f"startup.modelLoadSeconds={seconds}")
    assert told(manifests).profile.health.start_timeout_s == seconds
    for group in groups(manifests).values():
        probe = group["template"]["spec"]["containers"][0]["startupProbe"]
        assert seconds <= probe["periodSeconds"] * probe["failureThreshold"] < seconds + probe["periodSeconds"]
