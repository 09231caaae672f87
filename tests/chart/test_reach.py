"""Who reaches which port of which pod: all policies of a release, by their rules, for every port that there is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.chart.conftest import NAMESPACE, RELEASE, Manifest, of_kind, pods, rendered
from tests.chart.reach import ALL_PORTS, Peer, Target, matches, ports_open_to

NONE: frozenset[int] = frozenset()
RELEASE_LABELS = {"app.kubernetes.io/name": "forebay", "app.kubernetes.io/instance": RELEASE}
HTTP, DASHBOARD, OF_RAY, OF_MODELS, OF_CONTROLLERS = 8000, 8265, 8080, 9464, 9465


def of_namespace(name: str, **labels: str) -> Peer:
    """A pod; every namespace has its name as a label."""
    return Peer(name, {"kubernetes.io/metadata.name": name}, labels)


STRANGERS = {
    "a pod of the same namespace": of_namespace(NAMESPACE, app="other"),
    "another release in the same namespace": of_namespace(NAMESPACE, **RELEASE_LABELS | {"app.kubernetes.io/instance": "x"}),
    "the same labels in another namespace": of_namespace("elsewhere", **RELEASE_LABELS),
    "an address outside": Peer(ip="203.0.113.7"),
    "an address outside, of IPv6": Peer(ip="2001:db8::7"),
}  # fmt: skip
OPERATOR = replace(of_namespace("kuberay-operator"), ip="10.1.0.1")
PROMETHEUS = replace(of_namespace("monitoring"), ip="10.2.0.1")


def policies(manifests: list[Manifest]) -> list[Manifest]:
    made = of_kind(manifests, "NetworkPolicy")
    return [policy | {"metadata": policy["metadata"] | {"namespace": NAMESPACE}} for policy in made]


def targets(manifests: list[Manifest]) -> Iterator[tuple[str, Target]]:
    """Every pod, by its component."""
    for pod in pods(manifests).values():
        labels = pod["metadata"]["labels"]
        named = {port["name"]: port["containerPort"] for c in pod["spec"]["containers"] for port in c.get("ports", ())}
        yield labels["app.kubernetes.io/component"], Target(NAMESPACE, labels, named)


def clients_of(manifests: list[Manifest]) -> list[Any]:
    (router,) = [p for p in of_kind(manifests, "NetworkPolicy") if p["metadata"]["name"].endswith("-router")]
    return [peer for rule in router["spec"]["ingress"] for peer in rule["from"] if "ipBlock" in peer]


@pytest.mark.parametrize("who", STRANGERS)
def test_a_stranger_reaches_the_routers_http_port_where_clients_may_and_nothing_else(
    who: str, manifests: list[Manifest]
) -> None:
    """Ray's GCS, dashboard, client, agents, workers and metrics, and the links: every other port of every pod."""
    everybody = {"ipBlock": {"cidr": "0.0.0.0/0"}} in clients_of(manifests)
    inside = STRANGERS[who].ip.startswith("10.")  # two-zones names 10.0.0.0/8
    for component, target in targets(manifests):
        may = component == "router" and (everybody or inside)
        assert ports_open_to(policies(manifests), target, STRANGERS[who]) == ({HTTP} if may else NONE), component


def test_pods_of_the_release_reach_each_other_on_every_port(manifests: list[Manifest]) -> None:
    for _, target in targets(manifests):
        assert ports_open_to(policies(manifests), target, of_namespace(NAMESPACE, **RELEASE_LABELS)) == ALL_PORTS


def test_the_operator_reaches_the_dashboard_and_nothing_else_of_rays(manifests: list[Manifest]) -> None:
    for component, target in targets(manifests):
        expected = {"head": {DASHBOARD}, "router": {HTTP}}.get(component, NONE)
        assert ports_open_to(policies(manifests), target, OPERATOR) == expected, component


def test_prometheus_reaches_what_shows_metrics_and_nothing_else(manifests: list[Manifest]) -> None:
    monitors = of_kind(manifests, "PodMonitor")
    asked = {end["port"] for monitor in monitors for end in monitor["spec"]["podMetricsEndpoints"]}
    for component, target in targets(manifests):
        if component == "deploy":
            assert ports_open_to(policies(manifests), target, PROMETHEUS) == NONE
            continue
        home = "control-metrics" in target.ports
        own = {"router": {HTTP}, "model": {OF_MODELS}}.get(component, set()) | ({OF_CONTROLLERS} if home else set())
        assert ports_open_to(policies(manifests), target, PROMETHEUS) == {OF_RAY} | own, component
        if monitors:
            assert {target.ports[name] for name in asked & target.ports.keys()} == {OF_RAY} | own
            selector = monitors[0]["spec"]["selector"]
            assert matches(selector, target.labels)


def test_each_kind_of_metrics_is_shown_by_one_kind_of_pod(manifests: list[Manifest]) -> None:
    shown = {component: set(target.ports) - {"metrics"} for component, target in targets(manifests)}
    home = "controller" if "controller" in shown else "head"
    for component, names in shown.items():
        assert ("model-metrics" in names) is (component == "model"), component
        assert ("control-metrics" in names) is (component == home), component


def test_a_gateway_that_values_name_reads_replicas_metrics_and_nothing_else() -> None:
    gateway = replace(of_namespace("gateways", app="picker"), ip="192.168.0.1")
    where = "networkPolicy.gateways[0]"
    settings = (
        f"{where}.namespaceSelector.matchLabels.kubernetes\\.io/metadata\\.name=gateways",
        f"{where}.podSelector.matchLabels.app=picker",
    )
    for given, expected in (((), NONE), (settings, {OF_MODELS})):
        made = rendered("two-zones", *given)
        for component, target in targets(made):
            reached = ports_open_to(policies(made), target, gateway)
            assert reached == (expected if component == "model" else NONE), component
            assert ports_open_to(policies(made), target, replace(gateway, labels={"app": "other"})) == NONE


def test_without_policies_everything_is_open() -> None:
    made = rendered("8xa100", "networkPolicy.enabled=false")
    assert not of_kind(made, "NetworkPolicy")
    for _, target in targets(made):
        assert ports_open_to(policies(made), target, STRANGERS["an address outside"]) == ALL_PORTS


POD = Target("a", {"app": "x"}, {"web": 80})
HERE = Peer("a", {"name": "a"}, {"app": "y"})
THERE = Peer("b", {"name": "b"}, {"app": "y"})
RULES = [
    ("no rule lets nobody in", [], HERE, NONE),
    ("an empty rule lets everybody in", [{}], THERE, ALL_PORTS),
    ("an empty list of peers is everybody", [{"from": [], "ports": [{"port": 80}]}], THERE, {80}),
    ("pods are those of the policy's namespace", [{"from": [{"podSelector": {}}]}], HERE, ALL_PORTS),
    ("and of no other", [{"from": [{"podSelector": {}}]}], THERE, NONE),
    ("a namespace by its labels", [{"from": [{"namespaceSelector": {"matchLabels": {"name": "b"}}}]}], THERE, ALL_PORTS),
    ("one peer of both is both", [{"from": [{"namespaceSelector": {}, "podSelector": {"matchLabels": {"app": "z"}}}]}], THERE, NONE),
    ("two peers are either", [{"from": [{"namespaceSelector": {}}, {"podSelector": {"matchLabels": {"app": "z"}}}]}], THERE, ALL_PORTS),
    ("an address is no pod", [{"from": [{"namespaceSelector": {}}]}], Peer(), NONE),
    ("a block of addresses", [{"from": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}], Peer(ip="10.9.9.9"), ALL_PORTS),
    ("less a part", [{"from": [{"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.9.0.0/16"]}}]}], Peer(ip="10.9.9.9"), NONE),
    ("another family", [{"from": [{"ipBlock": {"cidr": "0.0.0.0/0"}}]}], Peer(ip="::1"), NONE),
    ("a named port is the pod's", [{"ports": [{"port": "web"}]}], HERE, {80}),
    ("or none", [{"ports": [{"port": "gcs"}]}], HERE, NONE),
    ("a range", [{"ports": [{"port": 5, "endPort": 7}]}], HERE, {5, 6, 7}),
    ("another protocol", [{"ports": [{"protocol": "UDP", "port": 53}]}], HERE, NONE),
    ("rules add up", [{"ports": [{"port": 1}]}, {"ports": [{"port": 2}]}], HERE, {1, 2}),
    ("an expression", [{"from": [{"podSelector": {"matchExpressions": [{"key": "app", "operator": "NotIn", "values": ["y"]}]}}]}], HERE, NONE),
]  # fmt: skip


@pytest.mark.parametrize(("says", "ingress", "peer", "reached"), RULES, ids=[rule[0] for rule in RULES])
def test_the_rules_are_those_of_the_reference(says: str, ingress: Any, peer: Peer, reached: set[int]) -> None:
    policy = {
        "metadata": {"namespace": "a"},
        "spec": {"podSelector": {"matchLabels": {"app": "x"}}, "ingress": ingress},
    }
    assert ports_open_to([policy], POD, peer) == reached
    for other in (replace(POD, labels={"app": "w"}), replace(POD, namespace="c")):
        assert ports_open_to([policy], other, peer) == ALL_PORTS, "what no policy selects is open"
    with pytest.raises(ValueError, match="not known"):
        ports_open_to([policy | {"spec": policy["spec"] | {"ingres": []}}], POD, peer)
