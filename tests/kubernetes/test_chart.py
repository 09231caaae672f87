"""What the chart gives controllers in Kubernetes, and what each pod knows of where it is."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.config import KubernetesConfig
from deployments.serve_app import ServeArgs
from tests.chart.conftest import (
    NAMESPACE,
    RELEASE,
    TOOLS,
    Manifest,
    groups,
    of_kind,
    pods,
    rendered,
    serve_config,
    template,
)


@pytest.fixture(scope="session", autouse=True)
def _tools() -> None:
    if not (TOOLS / "helm").is_file():
        pytest.skip("needs helm: `make deploy-tools`")


def told(manifests: list[Manifest]) -> KubernetesConfig | None:
    (application,) = serve_config(manifests)["applications"]
    return ServeArgs.model_validate(application["args"]).profile.kubernetes


@pytest.mark.parametrize("controllers", [0, 1, 2])
def test_controllers_with_access_know_their_namespace_and_the_one_lease_that_they_may_write(controllers: int) -> None:
    manifests = rendered("8xa100", "kubernetesAccess.enabled=true", f"controllers.replicas={controllers}")
    config = told(manifests)
    assert config is not None
    assert (config.namespace, config.name, config.kubeconfig) == (NAMESPACE, f"{RELEASE}-forebay", None)
    named = [
        name for role in of_kind(manifests, "Role") for rule in role["rules"] for name in rule.get("resourceNames", ())
    ]
    assert named == [config.name]
    (binding,) = of_kind(manifests, "ClusterRoleBinding")
    (subject,) = binding["subjects"]
    home = "controller" if controllers else "head"
    holders = {name for name, pod in pods(manifests).items() if pod["spec"]["serviceAccountName"] == subject["name"]}
    assert holders == {home}
    assert {name for name, pod in pods(manifests).items() if pod["spec"]["automountServiceAccountToken"]} == {home}


def test_without_access_controllers_have_nothing_to_do_with_kubernetes() -> None:
    manifests = rendered("8xa100")
    assert told(manifests) is None
    assert not any(pod["spec"]["automountServiceAccountToken"] for pod in pods(manifests).values())


def test_every_pod_knows_its_node_its_name_and_its_identity() -> None:
    for name, group in groups(rendered("two-zones")).items():
        (container,) = group["template"]["spec"]["containers"]
        env = {e["name"]: e for e in container["env"]}
        paths = {key: env[f"FOREBAY_{key}"]["valueFrom"]["fieldRef"]["fieldPath"] for key in ("NODE", "POD", "POD_UID")}
        assert paths == {"NODE": "spec.nodeName", "POD": "metadata.name", "POD_UID": "metadata.uid"}, name


def test_notices_of_ones_own_go_from_the_values_to_the_controllers_and_wrong_ones_are_refused_by_key() -> None:
    notice = "profile.kubernetes.notices[0]"
    good = (f"{notice}.on=label", f"{notice}.key=example.com/leaves", f"{notice}.why=we move it")
    config = told(rendered("two-zones", *good))
    assert config is not None
    assert [(n.on, n.key, n.value) for n in config.notices] == [("label", "example.com/leaves", None)]
    for wrong, said in (
        (f"{notice}.on=name", "value must be one of"),
        ("profile.kubernetes.namespace=x", "'namespace'"),
    ):
        refused = template("two-zones", *good, wrong, check=False)
        assert refused.returncode != 0
        assert "/profile/kubernetes" in refused.stderr
        assert said in refused.stderr


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


def test_a_router_without_its_label_gets_nothing_new_and_is_still_what_it_was_to_all_else() -> None:
    """What is done by hand to the routers of a cluster that has a successor; see ops/docs/kubernetes-nodes.md."""
    manifests = rendered("8xa100")
    before = pods(manifests)["router"]["metadata"]["labels"]
    after = {key: value for key, value in before.items() if key != "forebay/balanced"}
    services = [service["spec"]["selector"] for service in of_kind(manifests, "Service")]
    assert [selects(selector, before) for selector in services] == [True]
    assert [selects(selector, after) for selector in services] == [False]
    for kind, path in (("NetworkPolicy", "podSelector"), ("PodDisruptionBudget", "selector")):
        for manifest in of_kind(manifests, kind):
            selector = manifest["spec"][path]["matchLabels"]
            assert selects(selector, before) == selects(selector, after)
