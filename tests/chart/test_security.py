"""Every pod, port and name that the chart makes, against what a cluster that trusts nobody asks for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
import yaml

from tests.chart.conftest import (
    CHART,
    EXAMPLES,
    RELEASE,
    VARIANTS,
    Manifest,
    groups,
    of_kind,
    pods,
    ray_cluster,
    rendered,
)
from tests.kubernetes.gate import RIGHTS

RESTRICTED_VOLUMES = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret",
}  # fmt: skip
"""The kinds that Pod Security's profile "restricted" has."""


def containers(pod: Manifest) -> Iterator[Manifest]:
    yield from pod["spec"]["containers"]
    yield from pod["spec"].get("initContainers", [])


def environment(container: Manifest) -> dict[str, Manifest]:
    return {entry["name"]: entry for entry in container.get("env", [])}


def test_every_pod_passes_the_restricted_profile(manifests: list[Manifest]) -> None:
    """As https://kubernetes.io/docs/concepts/security/pod-security-standards has it, "baseline" and "restricted"."""
    for name, pod in pods(manifests).items():
        spec, security = pod["spec"], pod["spec"]["securityContext"]
        assert not any(spec.get(key) for key in ("hostNetwork", "hostPID", "hostIPC", "hostUsers")), name
        assert all(set(volume) - {"name"} <= RESTRICTED_VOLUMES for volume in spec["volumes"]), name
        assert security["runAsNonRoot"] is True, name
        assert security["runAsUser"] > 0, name
        assert not security.get("sysctls"), name
        assert not spec.get("ephemeralContainers"), name
        # AppArmor was an annotation once.
        assert not any("apparmor" in key for key in pod["metadata"].get("annotations", {})), name
        held(security)
        for container in containers(pod):
            held_in(container["securityContext"])
            assert not any("hostPort" in port for port in container.get("ports", [])), name
            assert '"host":' not in json.dumps([value for key, value in container.items() if key.endswith("Probe")]), (
                name
            )
    autoscaler = ray_cluster(manifests).get("autoscalerOptions")
    if autoscaler is not None:  # KubeRay's own container, in the head's pod
        held_in(autoscaler["securityContext"])


def held(security: Manifest) -> None:
    """What is asked of a pod and of a container."""
    assert security["runAsNonRoot"] is True
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not security.keys() & {"seLinuxOptions", "windowsOptions", "appArmorProfile"}


def held_in(security: Manifest) -> None:
    held(security)
    assert security["allowPrivilegeEscalation"] is False
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert not security.get("privileged")
    assert "procMount" not in security
    assert security.get("runAsUser") != 0
    assert security["readOnlyRootFilesystem"] is True  # beyond the profile


def test_every_pod_of_the_release_is_judged_here(manifests: list[Manifest]) -> None:
    """Wherever containers are, in whatever kind."""

    def pods_in(part: object) -> int:
        if isinstance(part, list):
            return sum(map(pods_in, part))
        if not isinstance(part, dict):
            return 0
        return ("containers" in part) + sum(map(pods_in, part.values()))

    assert pods_in(manifests) == len(pods(manifests))


def test_where_a_root_cannot_be_written_ray_and_its_workers_have_folders_of_their_own(
    manifests: list[Manifest],
) -> None:
    for name, group in groups(manifests).items():
        spec = group["template"]["spec"]
        kinds = {volume["name"]: set(volume) - {"name"} for volume in spec["volumes"]}
        (container,) = spec["containers"]
        writable = [mount["mountPath"] for mount in container["volumeMounts"] if kinds[mount["name"]] == {"emptyDir"}]
        assert {"/tmp", "/tmp/ray"} <= set(writable), name
        for key in ("HOME", "FOREBAY_CACHE_DIR", "NUMBA_CACHE_DIR"):
            path = environment(container)[key]["value"]
            assert any(path.startswith(f"{folder}/") for folder in writable), (name, key)
        assert all(mount.get("readOnly") or mount["mountPath"] in writable for mount in container["volumeMounts"])


def test_every_process_of_rays_asks_for_the_token(manifests: list[Manifest]) -> None:
    cluster = ray_cluster(manifests)
    (secret,) = {cluster["authOptions"]["secretName"]}
    assert cluster["authOptions"]["mode"] == "token"
    # The autoscaler's container is KubeRay's, which gives it these two by itself.
    for env in (environment(container) for pod in pods(manifests).values() for container in containers(pod)):
        assert env["RAY_AUTH_MODE"] == {"name": "RAY_AUTH_MODE", "value": "token"}
        assert env["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": secret, "key": "auth_token"}


def test_a_secret_is_named_and_never_read(manifests: list[Manifest]) -> None:
    """What nothing reads is in nothing that is rendered: names go in, files and environment are the kubelet's to fill."""
    assert not of_kind(manifests, "Secret")
    assert not any("lookup" in template.read_text() for template in (CHART / "templates").iterdir())
    for pod in pods(manifests).values():
        for container in containers(pod):
            for name, entry in environment(container).items():
                if re.search("TOKEN|PASSWORD|SECRET|KEY", name):
                    assert "value" not in entry, name
    redis = ray_cluster(manifests).get("gcsFaultToleranceOptions", {})
    assert "value" not in redis.get("redisPassword", {})


def test_nothing_that_is_rendered_could_be_a_key(manifests: list[Manifest]) -> None:
    """No string as long as a secret and as random: what there is of the kind is the image's digest."""
    (digest,) = {c["image"].rsplit(":", 1)[1] for pod in pods(manifests).values() for c in containers(pod)}
    text = json.dumps([m for m in manifests if not m["metadata"]["name"].startswith(f"{RELEASE}-forebay-dashboard-")])
    assert set(re.findall(r"\b[0-9a-fA-F]{24,}\b", text)) <= {digest}
    assert not re.search(r"\bfb-[0-9a-f]{12}-|-----BEGIN|[a-z]://[^/\s\"]*:[^/\s\"]*@", text)


def test_no_port_of_rays_is_in_a_service_that_leads_outside(manifests: list[Manifest]) -> None:
    cluster = ray_cluster(manifests)
    assert cluster["headGroupSpec"]["serviceType"] == "ClusterIP"
    assert not cluster["headGroupSpec"].get("enableIngress")
    assert not of_kind(manifests, "Ingress")
    (service,) = of_kind(manifests, "Service")
    assert [port["targetPort"] for port in service["spec"]["ports"]] == ["http"]
    selector = service["spec"]["selector"].items()
    chosen = {name for name, pod in pods(manifests).items() if selector <= pod["metadata"]["labels"].items()}
    assert chosen == {"router"}, "the balancer reaches routers and nothing else"
    with_http = {
        name
        for name, pod in pods(manifests).items()
        for container in containers(pod)
        for port in container.get("ports", [])
        if port["name"] == "http"
    }
    assert with_http == {"router"}


def test_clients_are_those_that_values_name() -> None:
    for settings, peers in (((), 2), (("networkPolicy.clients=null",), 0)):
        policies = of_kind(rendered("8xa100", *settings), "NetworkPolicy")
        (router,) = [p for p in policies if p["metadata"]["name"].endswith("-router")]
        clients = [peer for rule in router["spec"]["ingress"] for peer in rule["from"] if "ipBlock" in peer]
        assert len(clients) == peers


def test_no_pod_has_a_token_of_kubernetes_but_where_it_is_used(manifests: list[Manifest]) -> None:
    assert all(account["automountServiceAccountToken"] is False for account in of_kind(manifests, "ServiceAccount"))
    accounts = {account["metadata"]["name"] for account in of_kind(manifests, "ServiceAccount")}
    roles = of_kind(manifests, "RoleBinding") + of_kind(manifests, "ClusterRoleBinding")
    with_rights = {subject["name"] for role in roles for subject in role["subjects"]}
    scales = ray_cluster(manifests).get("enableInTreeAutoscaling", False)
    for name, pod in pods(manifests).items():
        account = pod["spec"]["serviceAccountName"]
        assert account in accounts
        # The head's autoscaler gets its rights from KubeRay.
        used = account in with_rights or (name == "head" and scales)
        assert pod["spec"]["automountServiceAccountToken"] is used, name
    assert with_rights <= accounts


def test_only_a_pod_that_asks_for_gpus_sees_any(manifests: list[Manifest]) -> None:
    """NVIDIA's runtime gives a container whose image says NVIDIA_VISIBLE_DEVICES=all every GPU of the node."""
    for name, group in groups(manifests).items():
        (container,) = group["template"]["spec"]["containers"]
        asks = any("gpu" in key for key in container.get("resources", {}).get("limits", {}))
        sees = environment(container).get("NVIDIA_VISIBLE_DEVICES", {}).get("value")
        assert sees == (None if asks else "void"), name
        assert asks is (group["rayStartParams"]["num-gpus"] != "0"), name


@pytest.mark.parametrize("controllers", [0, 2])
def test_a_controllers_rights_are_to_watch_nodes_write_events_and_hold_one_lease(controllers: int) -> None:
    manifests = rendered("8xa100", "kubernetesAccess.enabled=true", f"controllers.replicas={controllers}")
    rules = [rule for kind in ("Role", "ClusterRole") for role in of_kind(manifests, kind) for rule in role["rules"]]
    granted = {
        (resource, verb, tuple(rule.get("resourceNames", ())))
        for rule in rules
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    one = ("serving-forebay",)
    assert granted == {
        *(("nodes", verb, ()) for verb in ("list", "watch")),
        *(("events", verb, ()) for verb in ("create", "patch")),
        ("leases", "create", ()),
        *(("leases", verb, one) for verb in ("get", "update")),
    }
    assert {(resource, verb) for resource, verb, _ in granted} == RIGHTS, "what the code is seen to ask for"
    assert not [m for m in rendered("8xa100") if "Role" in m["kind"]], "none unless asked for"


def test_no_budget_holds_up_a_drain_for_ever(manifests: list[Manifest]) -> None:
    """Kubernetes asks the owner of a pod for its scale to know what maxUnavailable leaves, and a RayCluster has none: then
    it would let none go (https://kubernetes.io/docs/tasks/run-application/configure-pdb, "arbitrary workloads")."""
    made = groups(manifests)
    for budget in of_kind(manifests, "PodDisruptionBudget"):
        spec = budget["spec"]
        assert isinstance(spec["minAvailable"], int), "a share needs a scale, too"
        assert "maxUnavailable" not in spec
        assert spec["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
        selector = spec["selector"]["matchLabels"].items()
        fewest = sum(
            group.get("minReplicas", 1)
            for group in made.values()
            if selector <= group["template"]["metadata"]["labels"].items()
        )
        assert 0 < spec["minAvailable"] < fewest


def test_a_raycluster_has_no_scale(crds: object) -> None:
    definition = yaml.load((crds / "rayclusters.yaml").read_text(), yaml.CSafeLoader)  # type: ignore[operator]
    assert all("scale" not in version.get("subresources", {}) for version in definition["spec"]["versions"])


def test_examples_are_all_there_is() -> None:
    assert {"one-node", "8xa100", "two-zones"} == set(EXAMPLES)
    assert len(VARIANTS) >= 2 * len(EXAMPLES)
