"""What is read of the API server's answers, in whatever pieces they come, without an API server."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import KubernetesConfig
from cluster.control.nodes import Node
from deployments.checks import free_ports
from deployments.kube.api import KubeApi, KubeError, Seen, _as_seen, _lines

# As kubectl get --raw shows a node, less what is not read.
NODE: dict[str, Any] = {
    "kind": "Node",
    "apiVersion": "v1",
    "metadata": {
        "name": "n1",
        "uid": "u",
        "resourceVersion": "7",
        "deletionTimestamp": "2026-11-30T17:00:00Z",
        "labels": {"l": "v"},
        "annotations": {"a": "w"},
        "managedFields": [{"manager": "kubelet"}],
    },
    "spec": {
        "podCIDR": "10.0.0.0/24",
        "unschedulable": True,
        "taints": [
            {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule", "timeAdded": "2026-11-30T17:00:00Z"},
            {"key": "k", "value": "v", "effect": "NoExecute"},
        ],
    },
    "status": {"conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady"}], "images": []},
}
READ = Node(
    name="n1",
    unschedulable=True,
    deleted=True,
    taints=(("node.kubernetes.io/unschedulable", "", "NoSchedule"), ("k", "v", "NoExecute")),
    conditions={"Ready": "True"},
    labels={"l": "v"},
    annotations={"a": "w"},
)


def line(kind: str, what: object) -> bytes:
    return json.dumps({"type": kind, "object": what}).encode()


def test_a_node_is_read_as_far_as_notices_go() -> None:
    assert _as_seen(line("MODIFIED", NODE)) == Seen("7", READ)
    assert _as_seen(line("DELETED", NODE)) == Seen("7", READ, gone=True)
    bare = {"metadata": {"name": "n", "resourceVersion": "8"}, "spec": {}, "status": {}}
    assert _as_seen(line("ADDED", bare)) == Seen("8", Node("n"))
    nulls = bare | {"spec": {"taints": None, "unschedulable": None}, "status": {"conditions": None}}
    assert _as_seen(line("ADDED", nulls)) == Seen("8", Node("n"))


def test_a_bookmark_is_a_version_and_an_error_is_one_with_its_code() -> None:
    assert _as_seen(line("BOOKMARK", {"metadata": {"resourceVersion": "9"}, "spec": {}, "status": {}})) == Seen(
        "9", None
    )
    with pytest.raises(KubeError, match="the watch ends: too old resource version: 1 \\(2\\)") as error:
        _as_seen(line("ERROR", {"kind": "Status", "code": 410, "message": "too old resource version: 1 (2)"}))
    assert error.value.status == 410
    for wrong in (b"", b"{}", b"[", line("ADDED", 3), line("ADDED", {}), b'{"type": 1, "object": {}}'):
        with pytest.raises(KubeError, match="cannot be read"):
            _as_seen(wrong)


class Pieces:
    """A response whose body comes as it is given."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces

    def stream(self, _: int) -> Iterator[bytes]:
        yield from self._pieces


@given(st.lists(st.binary(min_size=1).filter(lambda text: b"\n" not in text)), st.data())
def test_events_are_told_apart_however_their_bytes_come(lines: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(one + b"\n" for one in lines)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    assert list(_lines(Pieces(pieces))) == lines
    if lines:
        with pytest.raises(KubeError, match="in the middle of an event"):
            list(_lines(Pieces([whole[:-1]])))


def test_a_server_that_nobody_is_at_is_said_in_one_line_of_words(tmp_path: Path) -> None:
    port = free_ports("127.0.0.1", 1)
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(
        f"""clusters: [{{name: c, cluster: {{server: "http://127.0.0.1:{port}"}}}}]
users: [{{name: u, user: {{token: "a-secret"}}}}]
contexts: [{{name: x, context: {{cluster: c, user: u}}}}]
current-context: x
"""
    )
    api = KubeApi(KubernetesConfig(kubeconfig=kubeconfig), random.Random(1))
    with pytest.raises(KubeError) as error:
        api.list_nodes()
    api.close()
    assert error.value.status is None
    said = str(error.value)
    assert said.startswith("the API server does not answer: ")
    assert "refused" in said
    assert not any(odd in said for odd in ("\n", "object at", "a-secret"))
